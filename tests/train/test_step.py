import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.hooks import Hook
from jengine.model import FunctionalModel, autocast
from jengine.model.precision import build_model
from jengine.optim import AmpOptimWrapper, OptimWrapper
from jengine.optim.gradients import sum_losses
from jengine.train import (
    RecompilationGuard,
    build_eval_step,
    build_train_step,
    create_train_state,
    total_loss,
)

BATCH = {"x": np.array([1.0, 3.0], np.float32)}


def make_model():
    def loss(params, model_state, batch, rng, hyperparams):
        noise = jax.random.normal(rng)
        losses = {"loss_fit": params["w"] * batch["x"], "noise": noise, "scale": hyperparams.get("scale", 0.0)}
        return losses, {"seen": model_state["seen"] + batch["x"].sum()}

    return FunctionalModel(init=lambda: ({"w": jnp.ones(())}, {"seen": jnp.zeros(())}), loss=loss)


def start(model, wrapper, hooks=()):
    params, model_state = model.init(jax.random.key(0), BATCH)
    return create_train_state(params, model_state, wrapper, hooks, rng=jax.random.key(1))


def test_a_step_updates_parameters_and_model_state():
    model, wrapper = make_model(), OptimWrapper(dict(type="SGD", lr=0.5))
    state = start(model, wrapper)
    step = jax.jit(build_train_step(model, wrapper))
    after, metrics = step(state, BATCH, wrapper.hyperparams)
    assert after.step == 1
    assert after.step.dtype == jnp.int32
    assert metrics["loss"] == metrics["loss_fit"] == 2.0  # w * mean(x)
    assert after.params["w"] == 0.0  # 1 - 0.5 * mean(x)
    assert after.model_state["seen"] == 4.0


def test_the_key_of_an_iteration_is_a_function_of_the_run_key_and_the_step():
    model, wrapper = make_model(), OptimWrapper(dict(type="SGD", lr=0.0))
    step = jax.jit(build_train_step(model, wrapper))
    state = start(model, wrapper)
    noises = []
    for _ in range(2):
        state, metrics = step(state, BATCH, wrapper.hyperparams)
        noises.append(float(metrics["noise"]))
    expected = [float(jax.random.normal(jax.random.fold_in(jax.random.key(1), i))) for i in range(2)]
    np.testing.assert_allclose(noises, expected, rtol=1e-6)


def test_hyperparameters_change_without_a_new_trace():
    model, wrapper = make_model(), OptimWrapper(dict(type="SGD", lr=0.5))
    guard = RecompilationGuard(build_train_step(model, wrapper), ("state", "batch", "hyperparams"))
    step = jax.jit(guard, donate_argnums=0)
    state, weights, scales = start(model, wrapper), [], []
    for lr, scale in ((0.5, 1.0), (0.25, 2.0)):
        wrapper.param_groups[0]["lr"] = lr
        state, metrics = step(state, BATCH, {**wrapper.hyperparams, "scale": np.float32(scale)})
        weights.append(float(state.params["w"]))
        scales.append(float(metrics["scale"]))
    assert weights == [0.0, -0.5]
    assert scales == [1.0, 2.0]
    assert guard.traces == 1


class Count(Hook):
    """Count its calls in the traced state and double the gradients."""

    def init_traced_state(self, params, model_state):
        return {"calls": jnp.zeros((), jnp.int32)}

    def traced_grads(self, ctx):
        return ctx.replace(
            grads=jax.tree.map(lambda g: 2 * g, ctx.grads),
            hook_state={"calls": ctx.hook_state["calls"] + 1},
            metrics={**ctx.metrics, "calls": ctx.hook_state["calls"]},
        )


class Shift(Hook):
    """Add one to every parameter after the update."""

    def traced_update(self, ctx):
        return ctx.replace(params=jax.tree.map(lambda p: p + 1, ctx.params))


class Square(Hook):
    """Square the gradients; together with `Count` the result depends on the order."""

    def traced_grads(self, ctx):
        return ctx.replace(grads=jax.tree.map(jnp.square, ctx.grads))


def test_traced_hooks_change_the_step_in_order_and_keep_their_state():
    model, wrapper, hooks = make_model(), OptimWrapper(dict(type="SGD", lr=0.5)), [Count(), Square(), Shift(), Count()]
    state = start(model, wrapper, hooks)
    assert set(state.hook_state) == {"Count", "Count_1"}
    step = jax.jit(build_train_step(model, wrapper, hooks))
    state, metrics = step(state, BATCH, wrapper.hyperparams)
    # gradient 2, doubled, squared, doubled: 32; 1 - 0.5 * 32 + 1
    assert state.params["w"] == -14.0
    assert metrics["calls"] == 0
    state, metrics = step(state, BATCH, wrapper.hyperparams)
    assert metrics["calls"] == 1
    assert state.hook_state["Count_1"]["calls"] == 2


def test_a_hook_may_change_the_batch_and_gets_its_own_key():
    keys = {}

    class Noise(Hook):
        def traced_batch(self, ctx):
            keys["hook"] = ctx.rng
            return ctx.replace(batch={"x": ctx.batch["x"] * 10})

    model, wrapper = make_model(), OptimWrapper(dict(type="SGD", lr=0.5))
    state = start(model, wrapper, [Noise()])
    _, metrics = build_train_step(model, wrapper, [Noise()])(state, BATCH, wrapper.hyperparams)
    assert metrics["loss"] == 20.0
    model_key = jax.random.fold_in(state.key, 0)
    assert not np.array_equal(jax.random.key_data(keys["hook"]), jax.random.key_data(model_key))
    np.testing.assert_allclose(metrics["noise"], jax.random.normal(model_key), rtol=1e-6)


def test_accumulation_in_two_programs_equals_the_large_batch():
    model = make_model()
    wrapper = OptimWrapper(dict(type="SGD", lr=0.5), accumulative_counts=2)
    wrapper.initialize_count_status(0, 2)
    state = start(model, wrapper)
    for x in (1.0, 3.0):
        update = wrapper.start_step()
        step = jax.jit(build_train_step(model, wrapper, update=update))
        state, _ = step(state, {"x": np.array([x], np.float32)}, wrapper.hyperparams)
    assert state.step == 2
    assert state.params["w"] == 0.0  # like with the batch (1, 3)
    assert state.model_state["seen"] == 4.0


def test_the_evaluation_step_updates_metrics_and_returns_predictions():
    model = FunctionalModel(init=dict, loss=lambda: 0.0, predict=lambda params, batch: params["w"] * batch["x"])
    step = jax.jit(build_eval_step(model, lambda sums, predictions, batch: sums + predictions.sum()))
    sums, predictions = step({"w": 2.0}, {}, jnp.float32(1.0), BATCH)
    assert sums == 9.0
    np.testing.assert_array_equal(predictions, [2.0, 6.0])


@pytest.mark.parametrize(
    ("losses", "batch", "total"),
    [
        ({"loss": jnp.array([1.0, 3.0])}, None, 2.0),  # the mean of an array
        ({"loss_a": 1.0, "b_loss": [2.0, jnp.array([4.0, 6.0])], "acc": 100.0}, None, 8.0),  # the sum of a list
        ({"loss": (jnp.float32(6.0), jnp.float32(4.0))}, None, 1.5),  # (sum, weight)
        ({"loss": jnp.array([1.0, 3.0, 99.0])}, {"mask": jnp.array([True, True, False])}, 2.0),  # padding is excluded
        ({"loss": jnp.array([[1.0, 2.0], [9.0, 9.0]])}, {"mask": jnp.array([True, False])}, 1.5),
    ],
)
def test_the_total_is_the_sum_of_entries_with_loss_in_their_name(losses, batch, total):
    value, metrics = total_loss(losses, batch)
    np.testing.assert_allclose(value, total)
    np.testing.assert_allclose(metrics["loss"], total)
    assert set(metrics) == {*losses, "loss"}
    assert all(x.shape == () and x.dtype == jnp.float32 for x in metrics.values())


@pytest.mark.parametrize("reduce", [total_loss, sum_losses])
def test_a_total_among_its_parts_is_an_error_that_shows_both_ways_out(reduce):
    recon, kl = jnp.float32(3.0), jnp.float32(1.0)
    with pytest.raises(ValueError, match=r"'loss' must be the only entry .*\['recon_loss', 'kl_loss'\]") as caught:
        reduce({"loss": recon + kl, "recon_loss": recon, "kl_loss": kl})
    assert "rename the parts, which are then only logged (['recon', 'kl']), or drop 'loss'" in str(caught.value)
    for losses in ({"loss": recon + kl, "recon": recon, "kl": kl}, {"recon_loss": recon, "kl_loss": kl}):
        assert jax.tree.leaves(reduce(losses))[0] == 4.0


def test_weakly_typed_arrays_do_not_cause_a_recompilation():
    def loss(params, model_state, batch):
        return params["w"] * batch["x"], {"rate": model_state["rate"] * np.float32(2)}

    model = FunctionalModel(init=lambda: ({"w": jnp.full((), 0.5)}, {"rate": jnp.full(2, 0.5)}), loss=loss)
    wrapper = OptimWrapper(dict(type="SGD", lr=0.5))
    guard = RecompilationGuard(build_train_step(model, wrapper), ("state", "batch", "hyperparams"))
    step, state = jax.jit(guard), start(model, wrapper)
    for _ in range(2):
        state, _ = step(state, BATCH, wrapper.hyperparams)
    assert guard.traces == 1
    assert state.model_state["rate"].tolist() == [2.0, 2.0]


def test_an_overflow_within_a_window_leaves_the_model_state_finite():
    def loss(params, model_state, batch):
        outputs = autocast(jnp.dot)(params["w"], batch["x"])  # 1e5 is infinite in float16
        return outputs, {"mean": 0.5 * model_state["mean"] + 0.5 * outputs}

    model = FunctionalModel(init=lambda: ({"w": jnp.ones(2)}, {"mean": jnp.zeros(())}), loss=loss)
    wrapper = AmpOptimWrapper(
        loss_scale=8.0, dtype="float16", optimizer=dict(type="SGD", lr=0.5), accumulative_counts=3
    )
    steps = [jax.jit(build_train_step(model, wrapper, update=update)) for update in (False, True)]
    means, state = [], start(model, wrapper)
    for x, step in zip((2.0, 1e5, 4.0), (*steps[:1], *steps), strict=True):
        batch = {"x": np.array([x, 0.0], np.float32)}
        state, _ = step(state, batch, wrapper.hyperparams)
        means.append(float(state.model_state["mean"]))
    assert means == [1.0, 1.0, 2.5]
    assert state.params["w"].tolist() == [1.0, 1.0]  # the window overflowed


@pytest.mark.parametrize(
    ("initial", "change", "message"),
    [
        (
            jnp.zeros(2, jnp.bfloat16),
            lambda s: {"a": s["a"] + jnp.ones(2)},
            r".a` must stay bfloat16\[2\] .* got float32",
        ),
        (
            jnp.zeros(2),
            lambda s: {"a": s["a"].sum()},
            r".a` must stay float32\[2\] in a training step, got float32\[\]:",
        ),
        (
            jnp.zeros(2, jnp.int32),
            lambda s: {"a": s["a"] * 0.5 * jnp.ones(2)},
            r".a` must stay int32\[2\] .* got float32",
        ),
        (jnp.zeros(2), lambda s: {"a": s["a"], "b": jnp.ones(())}, r".b` must stay absent .* got float32\[\]"),
        (jnp.zeros(2), lambda s: {}, r".a` must stay float32\[2\] in a training step, got absent"),
        ([jnp.zeros(2)], lambda s: {"a": tuple(s["a"])}, r"` must stay PyTreeDef.* got PyTreeDef"),
    ],
    ids=["dtype", "shape", "kind", "new key", "lost key", "container"],
)
@pytest.mark.parametrize("part", ["model", "hook", "micro"])
def test_a_state_that_changes_in_a_step_is_refused_with_its_path(initial, change, message, part):
    class Changes(Hook):
        def init_traced_state(self, params, model_state):
            return {"a": initial}

        def traced_update(self, ctx):
            return ctx.replace(hook_state=change(ctx.hook_state))

    def loss(params, model_state, batch):
        return (params["w"] * batch["x"].sum(-1)).mean(), model_state if part == "hook" else change(model_state)

    model = FunctionalModel(lambda: ({"w": jnp.zeros(())}, {"a": initial}), loss)
    hooks = [Changes()] if part == "hook" else []
    wrapper = OptimWrapper(dict(type="SGD", lr=0.1))
    step = build_train_step(model, wrapper, hooks, micro_batches=2 if part == "micro" else 1)
    where = "`hook_state.Changes" if part == "hook" else "`model_state"
    with pytest.raises(ValueError, match=where + message):
        jax.jit(step)(start(model, wrapper, hooks), {"x": jnp.ones((4, 2))}, wrapper.hyperparams)


def test_a_state_whose_dtype_holds_the_new_values_is_cast_back():
    def loss(params, model_state, batch):
        state = {
            "mean": (model_state["mean"] + batch["x"].sum()).astype(jnp.bfloat16),
            "count": (model_state["count"] + 1).astype(jnp.int8),
            "rate": 0.5,
        }
        return params["w"] * batch["x"], state

    initial = {"mean": jnp.zeros(()), "count": jnp.zeros((), jnp.int32), "rate": jnp.zeros((), jnp.bfloat16)}
    model, wrapper = (
        FunctionalModel(lambda: ({"w": jnp.zeros(())}, initial), loss),
        OptimWrapper(dict(type="SGD", lr=1)),
    )
    guard = RecompilationGuard(build_train_step(model, wrapper), ("state", "batch", "hyperparams"))
    step, state = jax.jit(guard), start(model, wrapper)
    for _ in range(2):
        state, _ = step(state, BATCH, wrapper.hyperparams)
    assert guard.traces == 1
    assert {name: (leaf.dtype.name, float(leaf)) for name, leaf in state.model_state.items()} == {
        "mean": ("float32", 8.0), "count": ("int32", 2.0), "rate": ("bfloat16", 0.5),
    }  # fmt: skip


def test_a_precision_policy_keeps_the_dtypes_of_the_model_state_but_not_another_structure():
    def make(new_key):
        def loss(params, model_state, batch):
            outputs = params["w"] * batch["x"]
            return outputs, {"mean": model_state["mean"] + outputs.mean(), **({"b": outputs} if new_key else {})}

        model = FunctionalModel(lambda: ({"w": jnp.ones(())}, {"mean": jnp.zeros((), jnp.bfloat16)}), loss)
        return build_model(model, "float32")

    wrapper = OptimWrapper(dict(type="SGD", lr=0.0))
    state, _ = build_train_step(make(False), wrapper)(start(make(False), wrapper), BATCH, wrapper.hyperparams)
    assert (state.model_state["mean"].dtype, float(state.model_state["mean"])) == (jnp.bfloat16, 2.0)
    with pytest.raises(ValueError, match="`model_state.b` must stay absent"):
        build_train_step(make(True), wrapper)(start(make(True), wrapper), BATCH, wrapper.hyperparams)
