import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jengine.hooks import Hook
from jengine.model import FunctionalModel, LinenModel, MeanSquaredError, autocast
from jengine.optim import build_optim_wrapper
from jengine.parallel import SingleDevice
from tests.refusals import check_refusal

ADAMW = dict(optimizer=dict(type="AdamW", lr=0.05, weight_decay=0.1), clip_grad=dict(max_norm=0.5))


def batches(count, size=4, scale=1.0):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, size, 2)).astype(np.float32)
    return [{"x": scale * x[i], "y": x[i].sum(axis=1)} for i in range(count)]


def train_with_optax(model, tx, data):
    """Train in a plain loop around an optax transformation."""
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(params, opt_state, batch):
        def loss(params):
            losses, _ = model.loss(params, {}, batch, rng=jax.random.key(0), hyperparams={})
            return losses["loss"].mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params, value=value, grad=grads, value_fn=loss)
        return optax.apply_updates(params, updates), opt_state

    params, _ = model.init(jax.random.key(0), data[0])
    opt_state = tx.init(params)
    for batch in data:
        params, opt_state = step(params, opt_state, batch)
    return params


def test_accumulation_in_a_run_equals_multisteps_in_a_plain_loop(make_runner):
    cfg = {**ADAMW, "accumulative_counts": 3}
    data = batches(12)
    runner = make_runner(
        train_dataloader=data, train_cfg=dict(by_epoch=False, max_iters=12), optim_wrapper=cfg
    )
    state = runner.train()
    params, _ = runner.model.init(jax.random.key(0), data[0])
    expected = train_with_optax(runner.model, build_optim_wrapper(params, cfg).tx, data)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, expected)
    assert int(optax.tree.get(state.opt_state, "count")) == 4
    assert (runner.programs.update.traces, runner.programs.accumulate.traces) == (1, 1)


@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.adamw(0.05),
        lambda: optax.chain(optax.clip(1.0), optax.sgd(0.1)),
        lambda: optax.lbfgs(),
        lambda: optax.polyak_sgd(),
        lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)),
    ],
    ids=["adamw", "chain", "lbfgs", "polyak_sgd", "reduce_on_plateau"],
)
def test_an_optax_transformation_trains_as_in_a_plain_loop(make_runner, make, steps_per_call):
    data = batches(6)
    train_cfg = dict(by_epoch=False, max_iters=6, steps_per_call=steps_per_call)
    runner = make_runner(train_dataloader=data, train_cfg=train_cfg, optim_wrapper=make())
    state = runner.train()
    expected = train_with_optax(runner.model, make(), data)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, expected)
    assert "train/lr" not in runner.message_hub.log_scalars


def _is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


@pytest.mark.parametrize("optimizer", [dict(type="adafactor"), dict(type="adamw", learning_rate=0.1, mask=_is_matrix)])
def test_an_optax_optimizer_without_a_learning_rate_or_with_a_function_trains_and_is_saved(make_runner, optimizer):
    runner = make_runner(optim_wrapper=dict(optimizer=optimizer), default_hooks=dict(logger=None))
    runner.train()
    assert ("train/lr" in runner.message_hub.log_scalars) == ("learning_rate" in optimizer)
    assert os.path.exists(os.path.join(runner.work_dir, "epoch_2"))


def test_the_last_accumulation_window_may_be_shorter(make_runner):
    weights = [0.0]

    class Watch(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            weights.append(float(jax.tree.leaves(runner.state.params)[0].sum()))

    cfg = dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=3)
    runner = make_runner(
        train_dataloader=batches(10), train_cfg=dict(max_epochs=1), optim_wrapper=cfg, custom_hooks=[Watch()]
    )
    state = runner.train()
    changed = [i + 1 for i in range(10) if weights[i + 1] != weights[i]]
    assert changed == [3, 6, 9, 10]  # after 3, 6, 9 and, with the factor 1, after 10
    # by hand: three windows of the mean gradient, then one batch alone
    data, w, b = batches(10), np.zeros(2), 0.0
    for window in (data[:3], data[3:6], data[6:9], data[9:]):
        x, y = np.concatenate([d["x"] for d in window]), np.concatenate([d["y"] for d in window])
        error = x @ w + b - y
        w, b = w - 0.1 * 2 * x.T @ error / len(y), b - 0.1 * 2 * error.mean()
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-5, atol=1e-6)


def test_a_longer_run_after_a_shorter_last_window_updates_with_means(make_runner):
    def train(iterations, **changes):
        cfg = dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=4)
        train_cfg = dict(by_epoch=False, max_iters=iterations)
        return make_runner(train_dataloader=batches(24), train_cfg=train_cfg, optim_wrapper=cfg, **changes)

    train(6, default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=6))).train()
    state = train(12, resume=True).train()
    data, w, b = batches(24), np.zeros(2), 0.0
    for window in (data[:4], data[4:6], data[6:8], data[8:12]):
        x, y = (np.concatenate([batch[name] for batch in window]) for name in ("x", "y"))
        error = x @ w + b - y
        w, b = w - 0.1 * 2 * x.T @ error / len(y), b - 0.1 * 2 * error.mean()
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-5, atol=1e-6)


def test_a_small_batch_accumulated_equals_the_large_batch(make_runner):
    small, cfg = batches(16, size=4), dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9))
    large = [{k: np.concatenate([b[k] for b in small[i : i + 4]]) for k in ("x", "y")} for i in range(0, 16, 4)]
    run = dict(train_cfg=dict(max_epochs=1))
    one = make_runner(train_dataloader=small, optim_wrapper={**cfg, "accumulative_counts": 4}, **run).train()
    other = make_runner(train_dataloader=large, optim_wrapper=cfg, **run).train()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one.params, other.params)


def test_a_run_resumed_within_a_window_loses_no_gradient(make_runner, tmp_path):
    def make(work_dir, **changes):
        return make_runner(
            work_dir=work_dir,
            train_dataloader=batches(10),
            train_cfg=dict(max_epochs=1),
            optim_wrapper={**ADAMW, "accumulative_counts": 3},
            default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1), logger=None),
            **changes,
        )

    whole = make(tmp_path / "whole").train()
    resumed = make(tmp_path / "rest", resume=tmp_path / "whole" / "iter_5").train()
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)


def test_batch_norm_under_accumulation_logs_a_warning(make_runner, monkeypatch):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool = False):
            return nn.Dense(1)(nn.BatchNorm(use_running_average=not train, name="bn")(x))[:, 0]

    monkeypatch.setattr(logging.getLogger("jengine"), "propagate", True)
    runner = make_runner(
        model=LinenModel(Net(), MeanSquaredError(target="y"), inputs="x"),
        train_dataloader=batches(2),
        train_cfg=dict(max_epochs=1),
        optim_wrapper={**ADAMW, "accumulative_counts": 2},
    )
    runner.train()
    with open(f"{runner.log_dir}/{runner.timestamp}.log") as log:
        assert "BatchNorm (bn) computes its statistics from each small batch" in log.read()


def overflowing_model(seen):
    """A model with state whose network overflows in float16 for large inputs."""

    def network(params, x):
        seen.append((params["w"].dtype, x.dtype))
        return jnp.square(x @ params["w"])

    def loss(params, model_state, batch):
        outputs = autocast(network)(params, batch["x"])
        seen.append((outputs.dtype, batch["y"].dtype))
        return {"loss": jnp.abs(outputs - jnp.square(batch["y"]))}, {"steps": model_state["steps"] + 1}

    return FunctionalModel(init=lambda: ({"w": jnp.ones((2,))}, {"steps": jnp.zeros(())}), loss=loss)


def test_mixed_precision_skips_the_whole_step_of_an_overflow_and_logs_it(make_runner):
    data = batches(6)
    data[3] = {"x": np.full((4, 2), 1e4, np.float32), "y": np.zeros(4, np.float32)}  # its square overflows in float16
    seen, records = [], []

    class Watch(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            state = runner.state
            records.append(
                (
                    float(outputs["loss_scale"]),
                    float(outputs["skipped_steps"]),
                    float(state.model_state["steps"]),
                    float(state.params["w"][0]),
                )
            )

    runner = make_runner(
        model=overflowing_model(seen),
        train_dataloader=data,
        train_cfg=dict(max_epochs=1),
        optim_wrapper=dict(
            type="AmpOptimWrapper",
            dtype="float16",
            loss_scale=dict(init_scale=8.0),
            optimizer=dict(type="SGD", lr=0.01),
        ),
        custom_hooks=[Watch()],
    )
    state = runner.train()
    assert seen == [(jnp.float16, jnp.float16), (jnp.float32, jnp.float32)]
    assert state.params["w"].dtype == jnp.float32
    scales, skipped, steps, weights = zip(*records, strict=True)
    assert scales == (8.0, 8.0, 8.0, 8.0, 4.0, 4.0)  # the scale in force in each step
    assert skipped == (0, 0, 0, 1, 1, 1)
    assert steps == (1, 2, 3, 3, 4, 5)
    assert weights[3] == weights[2]
    assert weights[4] != weights[3]
    assert runner.programs.update.traces == 1


class RecordMetrics(Hook):
    """Record the metrics of each iteration."""

    def __init__(self):
        self.metrics = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.metrics.append({name: float(value) for name, value in outputs.items()})


LOW = {
    "AMP": dict(optim_wrapper=dict(type="AmpOptimWrapper", optimizer=dict(type="SGD", lr=0.0))),
    "precision": dict(precision="bfloat16", optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0))),
}


@pytest.mark.parametrize("low", LOW)
def test_bfloat16_leaves_targets_alone_and_logs_no_loss_scale(make_runner, low):
    record = RecordMetrics()
    network = LinenModel(nn.Dense(1, kernel_init=nn.initializers.ones), squared_error, inputs="x")
    batch = {"x": np.full((4, 2), 1.001, np.float32), "y": np.full((4,), 3000.7, np.float32)}
    runner = make_runner(
        model=network,
        train_dataloader=[batch],
        train_cfg=dict(max_epochs=1),
        custom_hooks=[record],
        **LOW[low],
    )
    state = runner.train()
    # the output is 2 * 1.001 = 2 in bfloat16, where the target would be 3008
    assert record.metrics == [{"loss": pytest.approx((3000.7 - 2) ** 2, rel=1e-6)}]
    assert optax.tree.get(state.opt_state, "loss_scale") is None


def squared_error(outputs, batch):
    return {"loss": jnp.square(outputs[:, 0] - batch["y"])}


@pytest.mark.full_optimization
def test_float32_under_the_mixed_precision_wrapper_is_the_plain_run(make_runner):
    data, optimizer = batches(8), dict(type="Adam", lr=0.05)
    run = dict(train_dataloader=data, train_cfg=dict(max_epochs=1))
    plain = make_runner(optim_wrapper=dict(optimizer=optimizer), **run).train()
    amp = dict(type="AmpOptimWrapper", dtype="float32", loss_scale=1024.0, optimizer=optimizer)
    scaled = make_runner(optim_wrapper=amp, **run).train()
    # the last bit may differ: a skipped update is a branch, which keeps the compiler from fusing the sum behind it
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-7, atol=1e-8), plain.params, scaled.params)


def test_several_optimizers_act_in_their_phases(make_runner):
    model = FunctionalModel(
        init=lambda: {"a": {"w": jnp.zeros(())}, "b": {"w": jnp.zeros(())}},
        loss={
            "a": lambda params: {"loss_up": -params["a"]["w"] + 0 * params["b"]["w"]},
            "b": lambda params, hyperparams: {"loss_to_a": hyperparams["pull"] * -params["b"]["w"] * params["a"]["w"]},
        },
    )
    rates = []

    class Watch(Hook):
        def before_train(self, runner):
            runner.hyperparams["pull"] = 2.0

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            rates.append(runner.optim_wrapper.get_lr())

    runner = make_runner(
        model=model,
        train_dataloader=batches(2),
        train_cfg=dict(max_epochs=1, phases=[("a", 3), ("b", 1)]),
        optim_wrapper=dict(a=dict(optimizer=dict(type="SGD", lr=1.0)), b=dict(optimizer=dict(type="SGD", lr=0.5))),
        param_scheduler=dict(
            a=dict(type="ConstantLR", factor=1.0, by_epoch=False),
            b=dict(type="MultiStepLR", milestones=[1], gamma=0.1, by_epoch=False),
        ),
        custom_hooks=[Watch()],
    )
    state = runner.train()
    # a moves by 3 x 1 an iteration; b by lr x 2 x a: 0.5 x 2 x 3, then 0.05 x 2 x 6
    assert state.params["a"]["w"] == 6.0
    assert state.params["b"]["w"] == pytest.approx(3.6)
    assert rates == [{"a.lr": [1.0], "b.lr": [0.5]}, {"a.lr": [1.0], "b.lr": [pytest.approx(0.05)]}]
    assert runner.programs.update.traces == 1


def test_a_number_for_each_group_fits_the_groups_of_the_rules(make_runner):
    model = LinenModel(nn.Dense(1), MeanSquaredError(target="y"), inputs="x")
    rules = dict(custom_keys=dict(bias=dict(lr_mult=2.0)))
    cycle = dict(type="OneCycleLR", eta_max=[0.5, 1.0, 0.25], div_factor=5.0, by_epoch=False)
    runner = make_runner(
        model=model, train_dataloader=batches(4), param_scheduler=cycle,
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1), paramwise_cfg=rules),
    )  # fmt: skip
    runner.prepare_training(abstract=True)
    lrs = runner.optim_wrapper.get_lr()
    assert lrs["base_lr"] + lrs["lr"] == pytest.approx([0.05, 0.1, 0.2])


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_frozen_pattern_freezes_in_each_phase(make_runner, steps_per_call):
    class Freeze(Hook):
        acts_on = "hyperparams"

        def before_train(self, runner):
            runner.hyperparams["frozen:gen"] = runner.hyperparams["frozen:disc.head"] = True

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            runner.hyperparams["frozen:gen"] = runner.iter < 2

    runner = make_runner(
        model=FunctionalModel(
            init=lambda: {"gen": {"w": jnp.zeros(())}, "disc": {"w": jnp.zeros(()), "head": jnp.zeros(())}},
            loss={
                "gen": lambda params: -params["gen"]["w"],
                "disc": lambda params: -params["disc"]["w"] - params["disc"]["head"],
            },
        ),
        train_dataloader=batches(4),
        train_cfg=dict(max_epochs=1, phases=[("disc", 2), ("gen", 1)], steps_per_call=steps_per_call),
        optim_wrapper={name: dict(optimizer=dict(type="SGD", lr=1.0)) for name in ("gen", "disc")},
        custom_hooks=[Freeze()],
    )
    state = runner.train()
    # in four iterations gen moves in two, and disc twice in each
    assert jax.tree.map(float, state.params) == {"gen": {"w": 2.0}, "disc": {"w": 8.0, "head": 0.0}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(train_cfg=dict(max_epochs=1, phases=[("a", 1)])), ["None"]),
        (
            dict(
                train_cfg=dict(max_epochs=1, phases=[("c", 1)]),
                optim_wrapper=dict(w=dict(optimizer=dict(type="SGD", lr=1.0))),
            ),
            ["got 'c'"],
        ),
        (
            dict(optim_wrapper=dict(w=dict(optimizer=dict(type="SGD", lr=1.0), accumulative_counts=2))),
            ["`accumulative_counts`"],
        ),
    ],
)
def test_invalid_phases_are_refused(make_runner, changes, words):
    check_refusal(lambda: make_runner(**changes).train(), ValueError, *words)


class Accelerator(SingleDevice):
    """A device that, unlike a CPU, has memory of its own; it counts what is sent to it."""

    def __init__(self):
        super().__init__()
        self.platform = "accelerator"
        self.sent = []

    def put_replicated(self, tree):
        """Send and count."""
        self.sent.append(tree)
        return super().put_replicated(tree)


class Plain(SingleDevice):
    """A strategy of a user, which knows no flat states."""

    def compile_train_step(self, step, chunked=False, rules=None):
        """Compile with `jax.jit` alone."""
        return jax.jit(step, donate_argnums=0)


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_strategy_may_return_what_jit_returns(make_runner, steps_per_call):
    settings = dict(
        train_dataloader=batches(4), train_cfg=dict(by_epoch=False, max_iters=4, steps_per_call=steps_per_call),
        optim_wrapper=ADAMW,
    )  # fmt: skip
    expected = make_runner(**settings).train()
    jax.tree.map(np.testing.assert_array_equal, make_runner(parallel=Plain(), **settings).train(), expected)


class SetRate(Hook):
    """Set the rate of the first group before some iterations, as no schedule knows it."""

    def __init__(self, iterations):
        self.iterations = iterations

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter in self.iterations:
            runner.optim_wrapper.param_groups[0]["lr"] *= 0.9


class ReplaceState(Hook):
    """Set the counter of the state to another value, as a state from elsewhere may have."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter in (20, 50):
            runner.state = runner.state.replace(step=runner.state.step + (1000 if runner.iter == 20 else -3))


class TwoSteps(Hook):
    """Take a further step in each iteration, with the same rate."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        runner.train_step(data_batch)


LINEAR = dict(type="LinearLR", start_factor=0.5, end=100, by_epoch=False)
WARM_UP = [dict(type="LinearLR", start_factor=0.1, end=7, by_epoch=False)]
WARM_UP += [dict(type="CosineAnnealingLR", begin=7, end=100, by_epoch=False)]
WARM_UP += [dict(type="ConstantMomentum", factor=0.5, end=9, by_epoch=False)]


@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize(
    ("schedule", "changes", "count"),
    [
        (None, {}, 1),
        (LINEAR, {}, 7),  # of 1, 2, 4, ..., 64 iterations
        (WARM_UP, dict(optim_wrapper=dict(**ADAMW, paramwise_cfg=dict(custom_keys={"w": dict(lr_mult=0.3)}))), 7),
        (LINEAR, dict(custom_hooks=[SetRate([20])]), 12),  # and again of 1, 2, 4, ...
        (LINEAR, dict(custom_hooks=[SetRate(range(96))]), 96),
        (LINEAR, dict(custom_hooks=[ReplaceState()]), 16),
        (LINEAR, dict(custom_hooks=[TwoSteps()]), 191),  # ahead, and again
        (dict(type="StepLR", step_size=1, gamma=0.5), {}, 12),  # at the end of each epoch
        (dict(type="optax.cosine_decay_schedule", init_value=0.05, decay_steps=80), {}, 7),
    ],
    ids=["constant", "linear", "groups", "one by hand", "all by hand", "another state", "two steps", "epochs", "optax"],
)
def test_hyperparameters_are_sent_ahead_to_an_accelerator(make_runner, steps_per_call, schedule, changes, count):
    settings = dict(
        train_dataloader=batches(8), train_cfg=dict(max_epochs=12, steps_per_call=steps_per_call, val_interval=100),
        **{"optim_wrapper": ADAMW, "param_scheduler": schedule, **changes},
    )  # fmt: skip
    strategy = Accelerator()
    state = make_runner(parallel=strategy, **settings).train()
    expected = make_runner(parallel=SingleDevice(), **settings).train()
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
    if steps_per_call == 1:
        assert len(strategy.sent) == count
