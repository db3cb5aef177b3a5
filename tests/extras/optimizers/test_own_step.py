"""Training steps that a model defines itself, each against the same loop written by hand with optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jengine.extras.diagnose import NumericsGuardHook
from jengine.hooks import EMAHook, Hook
from jengine.model import FunctionalModel, LinenModel, autocast
from jengine.optim import AmpOptimWrapper, OptimWrapper, build_optim_wrapper
from jengine.train import build_train_step, create_train_state
from tests.refusals import check_refusal

RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 8, 3), np.float32)  # 6 iterations
BATCHES = [{"x": x, "y": np.tanh(x.sum(axis=1))} for x in X]
WEIGHTS = {"w": jnp.array([0.5, -0.3, 0.2]), "b": jnp.zeros(())}


def squared_error(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]) ** 2)


def run(model, wrapper, batches=BATCHES, hooks=()):
    """Run one step for each batch; return the last state, and the losses."""
    params, model_state = model.init(jax.random.key(0), batches[0])
    state = create_train_state(params, model_state, wrapper, hooks, rng=jax.random.key(1))
    step, losses = jax.jit(build_train_step(model, wrapper, hooks)), []
    for batch in batches:
        state, metrics = step(state, batch, wrapper.hyperparams)
        losses.append(float(metrics["loss"]))
    return state, losses


def optimize(tx, params, gradients, batches=BATCHES):
    """Return the parameters after an update with `gradients(params, batch)` for each batch."""

    @jax.jit
    def update(params, opt_state, batch):
        updates, opt_state = tx.update(gradients(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for batch in batches:
        params, opt_state = update(params, opt_state, batch)
    return params


def assert_close(tree, expected, rtol=1e-6):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-7)


def own(train_step, init=lambda: WEIGHTS):
    return FunctionalModel(init=init, train_step=train_step)


def sharpness_aware(state, batch, ctx):
    """SAM: the gradient at the worst point within a radius of 0.05."""

    def loss(params):
        return squared_error(params, batch)

    first = ctx.gradients(state, loss)
    radius = 0.05 / optax.tree.norm(first.grads)
    worst = jax.tree.map(lambda p, g: p + radius * g, state.params, first.grads)
    second = ctx.gradients(state.replace(params=worst), loss)
    return ctx.apply(state, second.grads, first.metrics)


def sharpness_aware_gradient(params, batch):
    grads = jax.grad(squared_error)(params, batch)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in grads.values()))
    return jax.grad(squared_error)({name: params[name] + 0.05 * grads[name] / norm for name in params}, batch)


def test_sam_equals_a_loop_by_hand():
    state, losses = run(own(sharpness_aware), OptimWrapper(optax.adam(0.1)))
    assert_close(state.params, optimize(optax.adam(0.1), WEIGHTS, sharpness_aware_gradient))
    assert losses[0] == pytest.approx(float(squared_error(WEIGHTS, BATCHES[0])))
    assert int(state.step) == 6


def test_gsam_equals_a_loop_by_hand():
    # Zhuang et al. 2022: the perturbed gradient, minus 0.4 times what the clean one has orthogonal to it
    def train_step(state, batch, ctx):
        def loss(params):
            return squared_error(params, batch)

        clean = ctx.gradients(state, loss)
        radius = 0.05 / optax.tree.norm(clean.grads)
        worst = jax.tree.map(lambda p, g: p + radius * g, state.params, clean.grads)
        sharp = ctx.gradients(state.replace(params=worst), loss).grads
        along = optax.tree.vdot(clean.grads, sharp) / optax.tree.vdot(sharp, sharp)
        grads = jax.tree.map(lambda s, g: s - 0.4 * (g - along * s), sharp, clean.grads)
        return ctx.apply(state, grads, clean.metrics)

    def gradient(params, batch):
        clean, sharp = jax.grad(squared_error)(params, batch), sharpness_aware_gradient(params, batch)
        g, s = (jnp.concatenate([jnp.ravel(tree[name]) for name in ("w", "b")]) for tree in (clean, sharp))
        combined = s - 0.4 * (g - (g @ s) / (s @ s) * s)
        return {"w": combined[:3], "b": combined[3]}

    state, _ = run(own(train_step), OptimWrapper(optax.sgd(0.1, momentum=0.9)))
    assert_close(state.params, optimize(optax.sgd(0.1, momentum=0.9), WEIGHTS, gradient), rtol=1e-5)


def test_a_gan_with_gradient_penalty_equals_a_loop_by_hand():
    def critic(params, x):
        return jnp.tanh(x @ params["critic"]["w"]) @ params["critic"]["v"]

    def fake(params, rng):
        return jax.random.normal(rng, (8, 2)) @ params["gen"]["w"]

    def critic_loss(params, x, rng):
        fake_rng, mix_rng = jax.random.split(rng)
        generated = jax.lax.stop_gradient(fake(params, fake_rng))
        mixed = x + jax.random.uniform(mix_rng, (8, 1)) * (generated - x)
        slopes = jax.vmap(jax.grad(lambda x: critic(params, x)))(mixed)
        penalty = jnp.mean((jnp.linalg.norm(slopes, axis=1) - 1) ** 2)
        return critic(params, generated).mean() - critic(params, x).mean() + 10 * penalty

    def gen_loss(params, rng):
        return -critic(params, fake(params, rng)).mean()

    def init():
        keys = jax.random.split(jax.random.key(3), 3)
        critic = {"w": 0.5 * jax.random.normal(keys[0], (3, 4)), "v": jax.random.normal(keys[1], (4,))}
        return {"critic": critic, "gen": {"w": jax.random.normal(keys[2], (2, 3))}}

    def train_step(state, batch, ctx):
        for i in range(2):
            rng = jax.random.fold_in(ctx.rng, i)
            state, metrics = ctx.update(state, lambda p, rng=rng: critic_loss(p, batch["x"], rng), "critic")
        state, gen_metrics = ctx.update(state, lambda p: gen_loss(p, ctx.rng), "gen")
        return state, {**metrics, **gen_metrics}

    wrappers = build_optim_wrapper(init(), dict(critic=optax.adam(1e-2), gen=optax.sgd(1e-2)))
    state, losses = run(own(train_step, init), wrappers)

    params, txs = init(), {"critic": optax.adam(1e-2), "gen": optax.sgd(1e-2)}
    opt_states, expected = {name: tx.init(params[name]) for name, tx in txs.items()}, []

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def update(name, loss, params, opt_states, *arguments):
        value, grads = jax.value_and_grad(lambda part: loss({**params, name: part}, *arguments))(params[name])
        updates, opt_state = txs[name].update(grads, opt_states[name])
        return value, {**params, name: optax.apply_updates(params[name], updates)}, {**opt_states, name: opt_state}

    for i, batch in enumerate(BATCHES):
        key = jax.random.fold_in(jax.random.key(1), i)
        for j in range(2):
            rng = jax.random.fold_in(key, j)
            critic_value, params, opt_states = update("critic", critic_loss, params, opt_states, batch["x"], rng)
        gen_value, params, opt_states = update("gen", gen_loss, params, opt_states, key)
        expected.append(critic_value + gen_value)
    assert_close(state.params, params, rtol=1e-5)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)  # the sum of the losses of both


def test_the_scales_of_mixed_precision_are_no_part_of_the_total_loss():
    def train_step(state, batch, ctx):
        state, first = ctx.update(state, lambda params: 2.0 + params["a"] ** 2, "a")
        state, second = ctx.update(state, lambda params: 3.0 + params["b"] ** 2, "b")
        assert {"loss_scale_a", "loss_scale_b"} <= {**first, **second}.keys()
        return state, {**first, **second}

    amp = dict(type="AmpOptimWrapper", dtype="float16", optimizer=dict(type="SGD", lr=0.1))
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    wrappers = build_optim_wrapper(params, dict(a=amp, b=amp))
    assert run(own(train_step, lambda: params), wrappers)[1] == [5.0] * 6


def test_meta_learning_with_an_inner_loop_equals_a_loop_by_hand():
    # MAML on sines (Finn et al. 2017): each example is a task with 5 points to adapt to and 5 to be judged by
    phases = RNG.uniform(0, np.pi, (6, 4, 1)).astype(np.float32)
    points = RNG.uniform(-5, 5, (6, 4, 10)).astype(np.float32)
    tasks = [{"x": x, "y": np.sin(x + phase)} for x, phase in zip(points, phases, strict=True)]

    def init():
        keys = jax.random.split(jax.random.key(2), 2)
        return {
            "w": jax.random.normal(keys[0], (10,)),
            "c": jnp.zeros(10),
            "v": 0.3 * jax.random.normal(keys[1], (10,)),
        }

    def error(params, x, y):
        return jnp.mean((jnp.tanh(x[:, None] * params["w"] + params["c"]) @ params["v"] - y) ** 2)

    def adapted_error(params, task):
        for _ in range(2):
            grads = jax.grad(error)(params, task["x"][:5], task["y"][:5])
            params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
        return error(params, task["x"][5:], task["y"][5:])

    def train_step(state, batch, ctx):
        return ctx.update(state, lambda params: jax.vmap(adapted_error, in_axes=(None, 0))(params, batch))

    def gradient(params, batch):
        each = [jax.grad(adapted_error)(params, {k: v[i] for k, v in batch.items()}) for i in range(4)]
        return jax.tree.map(lambda *g: sum(g) / 4, *each)

    state, _ = run(own(train_step, init), OptimWrapper(optax.adam(1e-2)), tasks)
    assert_close(state.params, optimize(optax.adam(1e-2), init(), gradient, tasks), rtol=1e-5)


def test_distillation_from_a_teacher_in_the_model_state_equals_a_loop_by_hand():
    def outputs(params, batch):
        return batch["x"] @ params["w"] + params["b"]

    def distill(params, teacher, batch):
        return jnp.mean((outputs(params, batch) - outputs(teacher, batch)) ** 2) + squared_error(params, batch)

    def train_step(state, batch, ctx):
        teacher = state.model_state["teacher"]
        state, metrics = ctx.update(state, lambda params: distill(params, teacher, batch))
        teacher = optax.incremental_update(state.params, teacher, 0.1)  # follows the student
        return state.replace(model_state={"teacher": teacher}), metrics

    start = {"w": jnp.ones(3), "b": jnp.ones(())}
    state, losses = run(own(train_step, lambda: (WEIGHTS, {"teacher": start})), OptimWrapper(optax.sgd(0.1)))
    params, teacher, expected = WEIGHTS, start, []
    differentiate = jax.jit(jax.value_and_grad(distill))
    for batch in BATCHES:
        value, grads = differentiate(params, teacher, batch)
        expected.append(value)
        params = {name: params[name] - 0.1 * grads[name] for name in params}
        teacher = {name: 0.9 * teacher[name] + 0.1 * params[name] for name in params}
    assert_close((state.params, state.model_state["teacher"]), (params, teacher))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_several_updates_in_a_loop_of_jax_equal_a_loop_by_hand():
    class Noise(Hook):
        def traced_grads(self, ctx):
            noise = jax.random.normal(ctx.rng)
            return ctx.replace(
                grads=jax.tree.map(lambda g: g + 0 * noise, ctx.grads), metrics={**ctx.metrics, "z": noise}
            )

    def train_step(state, batch, ctx):
        def update(state, inputs):
            i, part = inputs
            return ctx.fold_in(i).update(state, lambda params: squared_error(params, part))

        parts = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), batch)
        state, metrics = jax.lax.scan(update, state, (jnp.arange(4), parts))
        return state, {"loss": metrics["loss"].mean(), "spread": metrics["z"].std()}

    model, wrapper, hooks = own(train_step), OptimWrapper(optax.adam(0.1)), [Noise(), NumericsGuardHook()]
    state, losses = run(model, wrapper, hooks=hooks)
    parts = [jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], batch) for batch in BATCHES for i in range(4)]
    assert_close(state.params, optimize(optax.adam(0.1), WEIGHTS, jax.grad(squared_error), parts))
    assert losses[0] > losses[-1]
    _, metrics = build_train_step(model, wrapper, hooks)(state, BATCHES[0], wrapper.hyperparams)
    assert metrics["spread"] > 0.1  # each update has its own key


def test_a_step_of_parts_equals_the_built_in_step_with_hooks_and_statistics():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.Dense(1)(nn.Dropout(0.2, deterministic=not train)(nn.BatchNorm(not train)(x)))[:, 0]

    class Own(LinenModel):
        def train_step(self, state, batch, ctx):
            def loss(params):
                return self.loss(params, state.model_state, batch, rng=ctx.rng, hyperparams=ctx.hyperparams)

            return ctx.update(state, loss)

    class Double(Hook):
        def traced_batch(self, ctx):
            return ctx.replace(batch={**ctx.batch, "x": 2 * ctx.batch["x"]})

        def traced_grads(self, ctx):
            return ctx.replace(grads=jax.tree.map(lambda g: 2 * g, ctx.grads))

    def loss(outputs, batch):
        return {"loss_fit": jnp.square(outputs - batch["y"])}

    wrapper = OptimWrapper(optax.adam(0.1), clip_grad=dict(max_norm=1.0))
    batches = [{**batch, "mask": np.arange(8) < 5} for batch in BATCHES]  # padding is left out
    results = [run(cls(Net(), loss, inputs="x"), wrapper, batches, [Double(), EMAHook()]) for cls in (Own, LinenModel)]
    (state, losses), (expected, expected_losses) = results
    assert losses == expected_losses
    assert_close(state.replace(rng=0), expected.replace(rng=0), rtol=0)


def test_a_dropped_step_changes_nothing_but_the_count():
    def train_step(state, batch, ctx):
        state, metrics = ctx.update(state, lambda params: squared_error(params, batch))
        return state.replace(model_state={"seen": state.model_state["seen"] + 1}), metrics

    model = own(train_step, lambda: (WEIGHTS, {"seen": jnp.zeros(())}))
    bad = {"x": np.full((8, 3), np.nan, np.float32), "y": BATCHES[0]["y"]}
    hooks = [NumericsGuardHook(), EMAHook()]
    state, losses = run(model, OptimWrapper(optax.adam(0.1)), [BATCHES[0], bad, BATCHES[1]], hooks)
    expected, _ = run(model, OptimWrapper(optax.adam(0.1)), BATCHES[:2], hooks)
    assert (int(state.step), int(state.model_state["seen"]), np.isnan(losses).tolist()) == (3, 2, [False, True, False])
    assert_close((state.params, state.hook_state["EMAHook"]), (expected.params, expected.hook_state["EMAHook"]))


def test_gradients_are_unscaled_under_a_loss_scale_and_networks_compute_in_low_precision():
    seen = []

    def train_step(state, batch, ctx):
        def loss(params):
            outputs = autocast(lambda w, x: seen.append(x.dtype) or x @ w)(params["w"], batch["x"])
            return jnp.square(outputs - batch["y"])

        return ctx.apply(state, jax.grad(lambda p: jnp.mean(loss(p)))(state.params), ctx.gradients(state, loss).metrics)

    wrapper = AmpOptimWrapper(dtype="float16", loss_scale=1024.0, optimizer=optax.sgd(0.1))
    state, _ = run(own(train_step), wrapper)
    assert set(map(str, seen)) == {"float16"}

    def gradient(params, batch):
        def loss(params):
            outputs = (batch["x"].astype("float16") @ params["w"].astype("float16")).astype("float32")
            return jnp.mean((outputs - batch["y"]) ** 2)

        return jax.grad(loss)(params)

    assert_close(state.params, optimize(optax.sgd(0.1), WEIGHTS, gradient), rtol=2e-3)


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (lambda state, m: state, TypeError, ["cannot unpack"]),
        (lambda state, m: (state.params, m), ValueError, ["must stay", "got absent"]),
        (
            lambda state, m: (state.replace(params={"w": state.params["w"]}), m),
            ValueError,
            ["`params.b`", "float32", "[]", "got absent"],
        ),
        (
            lambda state, m: (state.replace(params={**state.params, "w": jnp.zeros(4)}), m),
            ValueError,
            ["`params.w`", "float32", "[3]", "got float32[4]"],
        ),
        (
            lambda state, m: (state, {**m, "p": jnp.ones(2)}),
            ValueError,
            ["got the shape (2,) for 'p'"],
        ),
        (lambda state, m: (state, {"accuracy": 1.0}), ValueError, ["'loss'"]),
    ],
)
def test_a_wrong_result_is_refused_while_tracing(result, error, words):
    def train_step(state, batch, ctx):
        return result(*ctx.update(state, lambda params: squared_error(params, batch)))

    check_refusal(lambda: run(own(train_step), OptimWrapper(optax.sgd(0.1))), error, *words)
