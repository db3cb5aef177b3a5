"""Test replicas that train alone between outer steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.extras.plan import Collective, find_collectives
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from tests.parallel.conftest import make_loader
from tests.refusals import check_refusal

REPLICAS = 4
RNG = np.random.RandomState(0)
X = RNG.randn(48, 8).astype(np.float32)
DATA = ArrayDataset(dict(x=X, y=X @ RNG.randn(8, 4).astype(np.float32) + 1))
KERNEL = RNG.randn(8, 4).astype(np.float32)
LR = 0.1
MOMENTUM = 0.9
MAX_NORM = 0.5


def loss(params, batch):
    return jnp.square(batch["x"] @ params["kernel"] + params["bias"] - batch["y"]).mean(axis=-1)


def make_model():
    return FunctionalModel(lambda: {"kernel": jnp.asarray(KERNEL), "bias": jnp.zeros(4)}, loss)


@pytest.fixture
def run(make_run):
    """Build a run of 12 iterations, each with 16 examples, with DiLoCo on four replicas."""

    def build(work_dir="run", counts=1, iters=12, steps_per_call=1, save_every=None, parallel=None, **changes):
        checkpoint = save_every and dict(type="CheckpointHook", by_epoch=False, interval=save_every, max_keep_ckpts=-1)
        arguments = dict(
            model=make_model(),
            train_dataloader=make_loader(16, DATA),
            train_cfg=dict(by_epoch=False, max_iters=iters, steps_per_call=steps_per_call),
            optim_wrapper=dict(
                optimizer=dict(type="SGD", lr=LR, momentum=MOMENTUM),
                clip_grad=dict(max_norm=MAX_NORM),
                accumulative_counts=counts,
            ),
            default_hooks=dict(checkpoint=checkpoint, logger=None),
        )
        parallel = dict(type="DiLoCo", inner_steps=4, devices=REPLICAS) if parallel is None else parallel
        return make_run(parallel, work_dir=work_dir, **{**arguments, **changes})

    return build


def train_by_hand(iters, inner_steps, parts=1, counts=1, outer_lr=0.7, outer_momentum=0.9):
    """Return the outer parameters, those of the replicas and the outer momentum, computed with NumPy in float64."""
    outer = {"bias": np.zeros(4), "kernel": KERNEL.astype(float)}
    moments = {name: np.zeros_like(value) for name, value in outer.items()}
    inner = [{name: value.copy() for name, value in outer.items()} for _ in range(REPLICAS)]
    velocity = [{name: np.zeros_like(value) for name, value in outer.items()} for _ in range(REPLICAS)]
    window = [{name: np.zeros_like(value) for name, value in outer.items()} for _ in range(REPLICAS)]
    for i in range(iters):
        rows = np.arange(16) + 16 * (i % 3)
        for replica, own in enumerate(np.split(rows, REPLICAS)):
            x, y = X[own].astype(float), _targets(own)
            params = inner[replica]
            error = 2 * (x @ params["kernel"] + params["bias"] - y) / y.size
            window[replica]["bias"] += error.sum(axis=0)
            window[replica]["kernel"] += x.T @ error
            if (i + 1) % counts:
                continue
            grads = {name: value / counts for name, value in window[replica].items()}
            norm = np.sqrt(sum((value**2).sum() for value in grads.values()))
            for name, grad in grads.items():
                velocity[replica][name] = MOMENTUM * velocity[replica][name] + grad * min(1, MAX_NORM / (norm + 1e-6))
                params[name] -= LR * velocity[replica][name]
                window[replica][name] = np.zeros_like(grad)
        every = inner_steps // parts
        if (i + 1) % every:
            continue
        names = ["bias", "kernel"] if parts == 1 else [["bias", "kernel"][((i + 1) // every - 1) % 2]]
        for name in names:
            moved = outer[name] - np.mean([params[name] for params in inner], axis=0)
            moments[name] = outer_momentum * moments[name] + moved
            outer[name] -= outer_lr * (moved + outer_momentum * moments[name])
            for params in inner:
                params[name] = outer[name].copy()
    return outer, {name: np.stack([params[name] for params in inner]) for name in outer}, moments


def _targets(rows):
    return np.stack([DATA[int(row)]["y"] for row in rows]).astype(float)


def start_from(runner):
    """Return the state with which a run starts."""
    runner.prepare_training()
    runner.load_or_resume()
    return runner.state


@pytest.mark.parametrize(
    ("settings", "counts", "steps_per_call", "iters"),
    [
        (dict(inner_steps=3), 1, 1, 8),
        (dict(inner_steps=4, outer_lr=0.5, outer_momentum=0.8), 2, 2, 12),
        (dict(inner_steps=4, parts=2), 1, 2, 11),
    ],
    ids=["with momentum and clipping", "accumulation in chunks", "in parts"],
)
def test_a_run_equals_the_method_by_hand(run, settings, counts, steps_per_call, iters):
    parallel = dict(type="DiLoCo", devices=REPLICAS, **settings)
    runner = run(parallel=parallel, counts=counts, steps_per_call=steps_per_call, iters=iters)
    state = runner.train()
    own = state.hook_state["DiLoCoHook"]
    expected = train_by_hand(iters, counts=counts, **settings)
    for found, right in zip((state.params, own["model_state"], own["momentum"]), expected, strict=True):
        for name, value in right.items():
            np.testing.assert_allclose(found[name], value, atol=2e-6, rtol=2e-6)
    # nothing is traced again after an outer step
    assert set(runner.programs.called()) == ({"update"} if steps_per_call == 1 else {"chunk", "update"} if iters % 2 else {"chunk"})
    assert [runner.programs.compiled[name].flat._cache_size() for name in runner.programs.called()] == [1] * len(runner.programs.called())


def test_replicas_exchange_only_their_parameters_and_only_in_outer_steps(run):
    runner = run(counts=2, steps_per_call=2)
    state = runner.train()
    programs = {
        name: find_collectives(runner.programs.compiled[name].lower(*shapes).compile().as_text())
        for name, shapes in runner.programs.called().items()
    }
    assert programs == {"chunk": []}
    [exchange] = find_collectives(runner.strategy.compile_outer_step().lower(state).compile().as_text())
    assert exchange == Collective("all-reduce", 2, sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)))
    assert runner.strategy.compile_outer_step()._cache_size() == 1


def test_single_steps_have_no_collectives_and_an_optimizer_is_not_reset(run):
    runner = run(counts=2, iters=4)
    runner.train()
    for name, shapes in runner.programs.called().items():
        assert not find_collectives(runner.programs.compiled[name].lower(*shapes).compile().as_text())
    assert set(runner.programs.called()) == {"update", "accumulate"}
    with pytest.raises(ConfigError, match="one state of the optimizer for all replicas, .* got DiLoCo"):
        runner.reset_optimizer()


@pytest.mark.parametrize(("mean_metrics", "rows", "steps_per_call"), [(False, 4, 1), (True, 16, 2)])
def test_the_loss_of_a_step_is_the_first_replicas_unless_they_exchange_it(run, mean_metrics, rows, steps_per_call):
    seen = []

    class Losses(Hook):
        acts_on = "metrics"

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen.append(float(outputs["loss"]))

    parallel = dict(type="DiLoCo", inner_steps=2, devices=REPLICAS, mean_metrics=mean_metrics)
    runner = run(parallel=parallel, iters=2, steps_per_call=steps_per_call, custom_hooks=[Losses()])
    runner.train()
    assert seen[0] == pytest.approx(float(np.square(X[:rows] @ KERNEL - _targets(range(rows))).mean()), rel=1e-5)
    [(name, shapes)] = runner.programs.called().items()
    found = find_collectives(runner.programs.compiled[name].lower(*shapes).compile().as_text())
    assert found == ([Collective("all-reduce", 2, 8 * steps_per_call)] if mean_metrics else [])  # with the norm


def test_a_resumed_run_is_bitwise_equal_and_its_checkpoints_have_the_outer_parameters(run, tmp_path):
    expected = run("one", counts=2, iters=12, save_every=6).train()
    saved = tmp_path / "one" / "iter_6"  # within a round
    resumed = run(counts=2, iters=12, resume=saved).train()
    parts = [(state.params, state.opt_state, state.hook_state) for state in (resumed, expected)]
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, parts))

    outer = train_by_hand(6, 4, counts=2)[0]
    for parallel in (None, dict(type="SingleDevice"), dict(type="DataParallel", devices=2)):
        state = start_from(run("other", parallel=parallel, iters=1, load_from=saved))
        np.testing.assert_allclose(state.params["kernel"], outer["kernel"], atol=1e-6)
        if parallel is None:  # each replica starts from them
            found = state.hook_state["DiLoCoHook"]["model_state"]["kernel"]
            np.testing.assert_array_equal(found, np.stack([state.params["kernel"]] * REPLICAS))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(custom_hooks=[dict(type="EMAHook")]), ["DiLoCo", "got EMAHook"]),
        (dict(counts=3), ["`parallel.inner_steps`", "`accumulative_counts`", "got 4"]),
        (dict(parallel=dict(type="DiLoCo", inner_steps=4, parts=3)), ["`parts`", "got 4"]),
        (dict(parallel=dict(type="DiLoCo", inner_steps=6, parts=3)), ["`parallel.parts`", "got 3"]),
        (dict(parallel=dict(type="DiLoCo", inner_steps=4, outer_momentum=1)), ["outer_momentum`", "got 1"]),
    ],
)
def test_what_it_cannot_do_is_refused(run, changes, words):
    check_refusal(lambda: run(**changes).train(), ConfigError, *words)


def test_a_run_resumes_on_another_number_of_replicas_from_their_mean_and_with_a_new_optimizer(run, tmp_path):
    first = run("one", iters=6, save_every=6).train()
    state = start_from(run(parallel=dict(type="DiLoCo", inner_steps=4, devices=2), resume=tmp_path / "one" / "iter_6"))
    found, saved = state.hook_state["DiLoCoHook"], first.hook_state["DiLoCoHook"]
    np.testing.assert_array_equal(state.params["kernel"], first.params["kernel"])
    np.testing.assert_array_equal(found["momentum"]["kernel"], saved["momentum"]["kernel"])
    mean = np.asarray(saved["model_state"]["kernel"]).mean(axis=0)
    np.testing.assert_allclose(found["model_state"]["kernel"], np.stack([mean, mean]), rtol=1e-6)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.opt_state.inner_state))


def test_replicas_resume_from_a_run_of_another_strategy(run, tmp_path):
    first = run("one", iters=2, save_every=2, parallel=dict(type="DataParallel", devices=2)).train()
    state = start_from(run(resume=tmp_path / "one" / "iter_2"))
    inner = state.hook_state["DiLoCoHook"]["model_state"]["kernel"]
    np.testing.assert_array_equal(inner, np.stack([first.params["kernel"]] * REPLICAS))



def test_replicas_of_several_devices_have_the_results_of_replicas_of_one(run, caplog):
    mesh = dict(type="DiLoCo", inner_steps=3, mesh=dict(data=2, fsdp=2), devices=4, fsdp_min_size=16)
    expected = run("one", iters=7, parallel=dict(type="DiLoCo", inner_steps=3, devices=2)).train()
    assert "DiLoCo: the last 1 of 7 iterations come after the last outer step" in caplog.text
    state = run(iters=7, parallel=mesh).train()
    inner = state.hook_state["DiLoCoHook"]["model_state"]["kernel"]
    assert inner.sharding.shard_shape(inner.shape) == (1, 4, 4)
    for part in ("params", "opt_state", "hook_state"):
        found, right = (jax.tree.leaves(jax.device_get(getattr(x, part))) for x in (state, expected))
        for a, b in zip(found, right, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_validations_have_the_outer_parameters_and_what_replicas_draw_differs(run):
    model = FunctionalModel(
        init=lambda: {"w": jnp.ones(())},
        loss=lambda params, batch, rng: params["w"] * jax.random.normal(rng),
        predict=lambda params, batch: params["w"] * jnp.ones(len(batch["x"])),
    )
    runner = run(
        model=model,
        iters=3,
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=1.0)),
        train_cfg=dict(by_epoch=False, max_iters=3, val_interval=1),
        parallel=dict(type="DiLoCo", inner_steps=2, devices=REPLICAS, outer_lr=1.0, outer_momentum=0.0),
        val_dataloader=make_loader(16, DATA),
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=lambda predictions, batch: predictions),
    )
    key = jax.random.fold_in(jax.random.key(runner.seed), 1)
    drawn = np.array(
        [
            [jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, replica), i)) for i in range(2)]
            for replica in range(REPLICAS)
        ]
    )
    assert len(np.unique(drawn)) == drawn.size
    runner.train()
    after = 1 - drawn.sum(axis=1).mean()
    found = [next(iter(metrics.values())) for _, _, metrics in runner.validations]
    assert found == pytest.approx([1.0, after, after], abs=1e-5)
