"""Several optimizers at rates of their own and on batches of their own, against loops written by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.extras.augment import MeanTeacherHook
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from jengine.optim import build_optim_wrapper
from jengine.runner import Runner
from jengine.train import build_train_step, create_train_state
from tests.refusals import check_refusal
from tests.runner.conftest import build_runner

RNG = np.random.RandomState(0)
REAL = RNG.randn(48, 3).astype(np.float32)
PHASES = [dict(optimizer="critic", steps=3, batches="each"), dict(optimizer="gen", every=2)]


def init():
    return {"critic": {"w": jnp.ones(3)}, "gen": {"w": jnp.full((2, 3), 0.5)}}


def generate(params, rng, count):
    return jax.random.normal(rng, (count, 2)) @ params["gen"]["w"]


def critic_loss(params, batch, rng):
    fake = jnp.tanh(generate(params, rng, len(batch["x"])) @ params["critic"]["w"])
    return fake.mean() - jnp.tanh(batch["x"] @ params["critic"]["w"]).mean()


def gen_loss(params, batch, rng):
    return -jnp.tanh(generate(params, rng, len(batch["x"])) @ params["critic"]["w"]).mean()


LOSSES = dict(critic=critic_loss, gen=gen_loss)


class Record(Hook):
    """Keep the metrics of each iteration by their names."""

    acts_on = "metrics"

    def __init__(self):
        self.metrics = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.metrics.append({name: float(value) for name, value in outputs.items()})


@pytest.fixture
def train(tmp_path):
    """Return a function that trains the networks with 8 batches of 6 in a pass."""

    def run(name, hooks=(), **changes):
        arguments = dict(
            model=FunctionalModel(init, LOSSES),
            train_dataloader=dict(
                batch_size=6, dataset=ArrayDataset(dict(x=REAL)), sampler=dict(type="DefaultSampler", shuffle=False)
            ),
            train_cfg=dict(max_epochs=3, phases=PHASES),
            optim_wrapper=dict(critic=optax.adam(0.1), gen=optax.sgd(0.1)),
            custom_hooks=list(hooks),
            default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1, by_epoch=False), logger=None),
            randomness=dict(seed=0),
            log_level="ERROR",
        )
        runner = build_runner(tmp_path / name, **{**arguments, **changes})
        runner.train()
        return runner

    return run


def update(tx, params, name, opt_states, loss):
    """Update one part of the parameters; return the loss and all parameters."""
    value, grads = jax.value_and_grad(lambda part: loss({**params, name: part}))(params[name])
    updates, opt_states[name] = tx.update(grads, opt_states[name])
    return value, {**params, name: optax.apply_updates(params[name], updates)}


def assert_equal(tree, expected, **tolerance):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **(tolerance or dict(rtol=0)))


def test_each_update_takes_its_own_batch_and_a_phase_acts_every_other_iteration(train):
    record = Record()
    runner = train("run", [record])
    # a pass has 8 batches, an iteration takes 3: epochs have 2 iterations, and the batches go on where they ended
    assert (runner.epoch, runner.iter, runner.train_loop.epoch_length) == (3, 6, 2)
    assert runner.train_loop.position == {"epoch": 2, "position": 2, "examples": 12}  # 6 * 3 = 2 * 8 + 2
    params, txs, batches = init(), dict(critic=optax.adam(0.1), gen=optax.sgd(0.1)), [*REAL.reshape(8, 6, 3)] * 3
    opt_states, key = {name: tx.init(params[name]) for name, tx in txs.items()}, runner.state.key
    for i in range(6):
        rng, expected = jax.random.fold_in(key, i), {}
        for j in range(3):
            loss = functools.partial(critic_loss, batch={"x": batches[3 * i + j]}, rng=jax.random.fold_in(rng, j))
            expected["loss_critic"], params = update(txs["critic"], params, "critic", opt_states, loss)
        if i % 2:  # iterations 2, 4 and 6, with the newest batch
            loss = functools.partial(gen_loss, batch={"x": batches[3 * i + 2]}, rng=jax.random.fold_in(rng, 3))
            expected["loss_gen"], params = update(txs["gen"], params, "gen", opt_states, loss)
        expected["loss"] = sum(expected.values())
        assert record.metrics[i] == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-5, abs=1e-6)
    assert_equal(runner.state.params, params, rtol=1e-5)


@pytest.mark.parametrize("parallel", ["Pjit", "DataParallel"])
def test_phases_on_several_devices_equal_those_on_one(train, parallel):
    def loss(params, batch):  # without random numbers, which each replica draws for itself
        return (jnp.tanh(batch["x"] @ params["critic"]["w"]) - batch["x"][:, :2] @ params["gen"]["w"][:, 0]) ** 2

    model = FunctionalModel(init, dict(critic=loss, gen=lambda params, batch: -loss(params, batch)))
    one = train("one", model=model)
    cfg = dict(max_epochs=3, phases=PHASES, steps_per_call=2)
    several = train("several", model=model, train_cfg=cfg, parallel=dict(type=parallel, devices=2))
    assert_equal(jax.device_get(several.state.params), one.state.params, rtol=1e-5, atol=1e-7)


def test_a_phase_that_does_not_act_is_no_failure_for_the_numerics_guard(train):
    phases = [("critic", 1), dict(optimizer="gen", every=2), ("critic", 1)]
    record, cfg = Record(), dict(max_epochs=1, phases=phases)
    runner = train("guarded", [dict(type="NumericsGuardHook"), record], train_cfg=cfg)
    assert [metrics["dropped_steps"] for metrics in record.metrics] == [0] * 8
    assert ["loss_gen" in metrics for metrics in record.metrics] == [False, True] * 4
    assert_equal(runner.state.params, train("plain", train_cfg=cfg).state.params, rtol=1e-6)


@pytest.mark.full_optimization
def test_chunks_and_a_run_resumed_within_an_epoch_are_equal_to_the_last_bit(train, tmp_path):
    records = Record(), Record()
    single, chunks = (
        train("single", [records[0]]),
        train(
            "chunks",
            [records[1]],
            train_cfg=dict(max_epochs=3, phases=PHASES, steps_per_call=2),
            default_hooks=dict(checkpoint=None, logger=None),
        ),
    )
    assert chunks.programs.chunk.traces == 1
    assert_equal(chunks.state, single.state)
    assert records[0].metrics == records[1].metrics
    for saved in ("iter_1", "iter_3"):
        resumed = train(f"resumed_{saved}", resume=str(tmp_path / "single" / saved))
        assert_equal(resumed.state, single.state)
        assert resumed.train_loop.position == single.train_loop.position


def test_td3_equals_the_update_of_cleanrl():
    # https://github.com/vwxyzjn/cleanrl/blob/master/cleanrl/td3_continuous_action_jax.py, `update_critic`, `update_actor`
    gamma, tau, noise, clip = 0.99, 0.005, 0.2, 0.5
    batches = [
        dict(
            obs=RNG.randn(8, 3),
            action=RNG.uniform(-1, 1, (8, 2)),
            next_obs=RNG.randn(8, 3),
            reward=RNG.randn(8),
            done=RNG.rand(8) < 0.2,
        )
        for _ in range(5)
    ]
    batches = [{name: value.astype(np.float32) for name, value in batch.items()} for batch in batches]

    def start():
        keys = jax.random.split(jax.random.key(5), 3)
        q1, q2 = ({"w": jax.random.normal(key, (5,)), "b": jnp.zeros(())} for key in keys[:2])
        return {"actor": {"w": 0.3 * jax.random.normal(keys[2], (3, 2))}, "critic": {"q1": q1, "q2": q2}}

    def act(actor, obs):
        return jnp.tanh(obs @ actor["w"])

    def value(q, obs, action):
        return jnp.sin(jnp.concatenate([obs, action], axis=1)) @ q["w"] + q["b"]

    def critic_error(critic, target, batch, rng):
        smoothing = jnp.clip(noise * jax.random.normal(rng, batch["action"].shape), -clip, clip)
        action = jnp.clip(act(target["actor"], batch["next_obs"]) + smoothing, -1, 1)
        values = [value(target["critic"][name], batch["next_obs"], action) for name in ("q1", "q2")]
        wanted = batch["reward"] + (1 - batch["done"]) * gamma * jnp.minimum(*values)
        return {
            f"loss_{name}": (value(critic[name], batch["obs"], batch["action"]) - wanted) ** 2 for name in ("q1", "q2")
        }

    def actor_error(actor, critic, batch):
        return -value(critic["q1"], batch["obs"], act(actor, batch["obs"])).mean()

    model = FunctionalModel(
        start,
        dict(
            critic=lambda params, batch, rng, hyperparams: critic_error(
                params["critic"], hyperparams["teacher"]["params"], batch, rng
            ),
            actor=lambda params, batch: actor_error(params["actor"], params["critic"], batch),
        ),
    )
    hooks = [MeanTeacherHook(momentum=tau, interval=2)]  # the targets, as they were before the step
    wrapper = build_optim_wrapper(start(), dict(actor=optax.adam(1e-2), critic=optax.adam(1e-2)))
    state = create_train_state(start(), {}, wrapper, hooks, rng=jax.random.key(1))
    phases = [dict(optimizer="critic"), dict(optimizer="actor", every=2)]
    step = jax.jit(build_train_step(model, wrapper, hooks, phases=phases))

    tx = optax.adam(1e-2)

    @jax.jit
    def update_critic(params, target, opt_state, batch, rng):
        def total(critic):
            return sum(jnp.mean(error) for error in critic_error(critic, target, batch, rng).values())

        updates, opt_state = tx.update(jax.grad(total)(params["critic"]), opt_state)
        return {**params, "critic": optax.apply_updates(params["critic"], updates)}, opt_state

    @jax.jit
    def update_actor(params, target, opt_state, batch):
        gradients = jax.grad(actor_error)(params["actor"], params["critic"], batch)
        updates, opt_state = tx.update(gradients, opt_state)
        params = {**params, "actor": optax.apply_updates(params["actor"], updates)}
        return params, optax.incremental_update(params, target, tau), opt_state

    params, target = start(), start()
    opt_states = {name: tx.init(params[name]) for name in params}
    for i, batch in enumerate(batches):
        state, _ = step(state, batch, wrapper.hyperparams)
        rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), i), 0)
        params, opt_states["critic"] = update_critic(params, target, opt_states["critic"], batch, rng)
        if (i + 1) % 2 == 0:
            params, target, opt_states["actor"] = update_actor(params, target, opt_states["actor"], batch)
        assert_equal(state.params, params, rtol=1e-6, atol=1e-7)  # with jax 0.10.2 to the last bit
        # the average is `old + tau * (new - old)` here and `tau * new + (1 - tau) * old` in optax
        assert_equal(state.hook_state["MeanTeacherHook"].params, target, rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        (
            [dict(optimizer="critic", every=2, batches="each"), ("gen", 1)],
            ["`every`", "'each'", "got 2"],
        ),
        ([dict(optimizer="critic", every=2)], ["each iteration"]),
        ([dict(optimizer="critic", evry=2)], ["'evry'"]),
        ([dict(optimizer="critic", steps=0)], ["steps"]),
    ],
)
def test_wrong_phases_are_refused_in_the_constructor(train, phases, words):
    cfg = dict(max_epochs=1, phases=phases)
    check_refusal(lambda: train("wrong", train_cfg=cfg), (ConfigError, ValueError, TypeError), *words, "train_cfg")


def test_iterations_of_several_batches_require_a_length_or_enough_batches(train):
    record = Record()
    with pytest.raises(ConfigError, match="`train_cfg.epoch_length` must be given .* the 3 batches .* got 2 in a pass"):
        train("short", [record], train_dataloader=dict(batch_size=24, dataset=ArrayDataset(dict(x=REAL))))
    assert record.metrics == []


def test_epochs_of_another_length_than_a_pass_do_not_disturb_the_passes(train):
    seen = []

    class Seen(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen.append((runner.train_loop.position["epoch"], runner.train_loop.position["position"]))

    train("epochs", [Seen()], train_cfg=dict(max_epochs=4, epoch_length=3))
    assert seen == [*((0, i) for i in range(1, 8)), *((1, i) for i in range(5))]


class SetRates(Hook):
    """Set a rate of one of the optimizers by its name in the step."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 2:
            runner.hyperparams["critic.learning_rate"] = 0.5
            runner.hyperparams["critic.b1"] = 0.25


def test_a_hyperparameter_of_one_of_several_optimizers_is_set_by_its_name(train):
    wrappers = {name: dict(optimizer=dict(type="Adam", lr=0.1)) for name in ("critic", "gen")}
    schedule = dict(type="ExponentialLR", gamma=0.5, by_epoch=False)
    runner = train(
        "named", [SetRates()], optim_wrapper=wrappers, param_scheduler=dict(critic=schedule, gen=schedule),
        train_cfg=dict(by_epoch=False, max_iters=4, phases=PHASES, on_recompile="raise"),
    )  # fmt: skip
    rates = {name: runner.message_hub.get_scalar(f"train/{name}.lr").data[0].tolist() for name in wrappers}
    assert rates == {"critic": [0.1, 0.05, 0.5, 0.25], "gen": [0.1, 0.05, 0.025, 0.0125]}
    assert runner.optim_wrapper["critic"].param_groups[0]["betas"] == (0.25, 0.999)
    assert runner.optim_wrapper["gen"].param_groups[0]["betas"] == (0.9, 0.999)
    assert not runner.hyperparams


def joint_loss(params, batch):
    advantage = batch["x"] @ params["critic"]["w"] - batch["y"]
    return jnp.square(advantage) + advantage * (batch["x"] @ params["actor"]["w"])


def joint_init():
    return {"actor": {"w": jnp.ones(2)}, "critic": {"w": jnp.zeros(2)}}


CHAINS = {"a": optax.adam(3e-2), "c": optax.sgd(1e-1)}
GROUPS = {"actor": dict(lr=1e-2), "critic": dict(lr=1e-1)}
JOINT = [{"x": x, "y": x[:, 0]} for x in np.random.default_rng(1).standard_normal((4, 8, 2)).astype(np.float32)]


def both_from_one_gradient(state, batch, ctx):
    loss, grads = jax.value_and_grad(lambda params: joint_loss(params, batch).mean())(state.params)
    state, metrics = ctx.apply(state, grads, {"loss": loss}, "actor")
    return ctx.apply(state, grads, metrics, "critic")


@pytest.mark.parametrize(
    ("optim_wrapper", "txs"),
    [
        (optax.partition(CHAINS, {"actor": "a", "critic": "c"}), (CHAINS["a"], CHAINS["c"])),
        (
            dict(optimizer=dict(type="SGD", lr=1.0), paramwise_cfg=dict(custom_keys=GROUPS)),
            (optax.sgd(1e-2), optax.sgd(1e-1)),
        ),
        (dict(actor=CHAINS["a"], critic=CHAINS["c"]), (CHAINS["a"], CHAINS["c"])),
    ],
    ids=["chains", "groups", "own step"],
)
def test_two_networks_are_updated_from_one_gradient(optim_wrapper, txs, tmp_path):
    is_own = "actor" in optim_wrapper if isinstance(optim_wrapper, dict) else False
    step = dict(train_step=both_from_one_gradient) if is_own else dict(loss=joint_loss)
    runner = Runner(FunctionalModel(joint_init, **step), tmp_path, train_dataloader=JOINT, optim_wrapper=optim_wrapper,
                    train_cfg=dict(by_epoch=False, max_iters=4))  # fmt: skip
    params = runner.train().params
    expected = joint_init()
    opt_states = {name: tx.init(expected[name]) for name, tx in zip(expected, txs, strict=True)}
    for batch in JOINT:
        grads = jax.grad(lambda params: joint_loss(params, batch).mean())(expected)  # noqa: B023
        for name, tx in zip(("actor", "critic"), txs, strict=True):
            updates, opt_states[name] = tx.update(grads[name], opt_states[name], expected[name])
            expected = {**expected, name: optax.apply_updates(expected[name], updates)}
    for name in expected:
        np.testing.assert_allclose(params[name]["w"], expected[name]["w"], rtol=1e-5)
