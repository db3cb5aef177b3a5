"""Test the rule of a resume: settings from the config, all else from the checkpoint, and one list of what differs."""

import contextlib
import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset, DataLoader, DefaultSampler
from jengine.hooks import EMAHook, Hook
from jengine.model import FunctionalModel
from jengine.optim import OptimWrapper
from tests.runner.conftest import build_runner

SAVE = dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None)


def adam(**settings):
    return dict(optimizer=dict(type="AdamW", **settings))


class Recorder(Hook):
    """Record the settings of the first group, and the inputs, in each iteration."""

    def __init__(self):
        self.groups = []
        self.batches = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.groups.append(dict(runner.optim_wrapper.param_groups[0]))
        self.batches.append(np.asarray(data_batch["x"]))

    def values(self, name):
        return [group[name] for group in self.groups]


class CountsTraces(Hook):
    """Count the compilations of the step."""

    traces = 0

    def traced_update(self, ctx):
        self.traces += 1
        return ctx


@pytest.fixture
def run(make_runner):
    """Return a function that trains with a recorder and returns it, with the Runner."""

    def run(max_epochs, **changes):
        recorder = Recorder()
        runner = make_runner(
            **{
                **dict(default_hooks=SAVE, train_cfg=dict(max_epochs=max_epochs)),
                **changes,
                "custom_hooks": [recorder, *changes.get("custom_hooks", ())],
            }
        )
        runner.train()
        return recorder, runner

    return run


def read_log(runner):
    return (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()


def differences(log):
    """Return the settings that the log lists, without a change of the computation."""
    assert "The computation of the training step" not in log
    _, _, listed = log.partition(" differ; those of the run hold")
    return [line.strip() for line in itertools.takewhile(lambda line: line.startswith("  "), listed.splitlines()[1:])]


def test_settings_are_those_of_the_config_and_the_log_lists_once_what_differs(run):
    run(1, optim_wrapper=adam(lr=0.1, weight_decay=0.01, betas=(0.9, 0.99)))
    recorder, runner = run(2, optim_wrapper=adam(lr=0.2, weight_decay=0.02, betas=(0.8, 0.99)), resume=True)
    assert recorder.values("lr") == [0.2] * 4
    assert recorder.values("weight_decay") == [0.02] * 4
    assert recorder.values("betas") == [(0.8, 0.99)] * 4
    assert int(optax.tree.get(runner.state.opt_state, "count")) == 8  # the moments are kept
    log = read_log(runner)
    for line in (
        "lr: 0.2 in the config, 0.1",
        "weight_decay: 0.02 in the config, 0.01",
        "betas[0]: 0.8 in the config, 0.9",
    ):
        assert log.count(f"optim_wrapper.optimizer.{line} in the checkpoint") == 1
    assert log.count("differ; those of the run hold") == 1


COSINE = dict(type="CosineAnnealingLR", T_max=4)
WARM_COSINE = [dict(type="LinearLR", start_factor=0.0, by_epoch=False, end=6), COSINE]


@pytest.mark.parametrize("scheduler", [COSINE, WARM_COSINE, optax.cosine_decay_schedule(1.0, 16)])
def test_a_learning_rate_of_the_config_follows_the_schedules_from_the_next_iteration_on(run, tmp_path, scheduler):
    expected, _ = run(4, work_dir=tmp_path / "whole", optim_wrapper=adam(lr=0.2), param_scheduler=scheduler)
    run(1, optim_wrapper=adam(lr=0.1), param_scheduler=scheduler)
    recorder, _ = run(4, optim_wrapper=adam(lr=0.2), param_scheduler=scheduler, resume=True)
    assert recorder.values("lr") == expected.values("lr")[4:]


def test_other_schedules_of_the_config_have_the_values_of_their_step(run, tmp_path):
    expected, _ = run(4, work_dir=tmp_path / "whole", optim_wrapper=adam(lr=0.1), param_scheduler=COSINE)
    one_cycle = dict(type="OneCycleLR", eta_max=1.0, by_epoch=False)
    run(1, optim_wrapper=adam(lr=0.1), param_scheduler=one_cycle)
    recorder, _ = run(4, optim_wrapper=adam(lr=0.1), param_scheduler=COSINE, resume=True)
    assert recorder.values("lr") == expected.values("lr")[4:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(optim_wrapper=adam(lr=0.2)), "optim_wrapper.optimizer.lr: 0.2 in the config, 0.1 in the checkpoint"),
        (dict(param_scheduler=dict(type="ExponentialLR", gamma=0.5)), "param_scheduler.type: 'ExponentialLR' in the"),
        (dict(randomness=dict(seed=5)), "randomness.seed: 5 in the config, 0 in the checkpoint"),
        (dict(train_cfg=dict(max_epochs=3)), "train_cfg.max_epochs: 3 in the config, 2 in the checkpoint"),
    ],
    ids=["optimizer", "schedules", "seed", "length"],
)
def test_any_difference_can_be_an_error_before_anything_is_compiled(make_runner, changes, message):
    arguments = dict(optim_wrapper=adam(lr=0.1), train_cfg=dict(max_epochs=2), default_hooks=SAVE)
    make_runner(**arguments, custom_hooks=[CountsTraces()]).train()
    counter = CountsTraces()
    runner = make_runner(**{**arguments, **changes}, custom_hooks=[counter], resume="exact")
    with pytest.raises(ConfigError, match="must be those of the checkpoint .* with resume='exact'") as error:
        runner.train()
    assert message in str(error.value)
    assert counter.traces == 0


class Stop(Hook):
    """End training after an iteration, without a setting of its own that says so."""

    at = None

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == Stop.at:
            raise KeyboardInterrupt


def test_an_unchanged_config_passes_an_exact_resume_with_the_same_bits(make_runner, tmp_path, monkeypatch):
    arguments = dict(
        optim_wrapper=adam(lr=0.1), param_scheduler=WARM_COSINE, randomness=dict(seed=3), default_hooks=SAVE,
        train_cfg=dict(max_epochs=4), custom_hooks=[Stop()],
    )  # fmt: skip
    whole = make_runner(work_dir=tmp_path / "whole", **arguments).train()
    monkeypatch.setattr(Stop, "at", 6)
    with pytest.raises(KeyboardInterrupt):
        make_runner(**arguments).train()
    monkeypatch.setattr(Stop, "at", None)
    runner = make_runner(**arguments, resume="exact")
    np.testing.assert_array_equal(runner.train().params["w"], whole.params["w"])
    assert runner.iters_this_session == 12
    assert differences(read_log(runner)) == []


def test_another_optimizer_starts_with_a_new_state_and_a_line_about_it(run):
    run(1, optim_wrapper=adam(lr=0.1))
    sgd = dict(optimizer=dict(type="SGD", lr=0.2, momentum=0.9))
    recorder, runner = run(2, optim_wrapper=sgd, resume=True)
    assert runner.iter == 8
    assert recorder.values("lr") == [0.2] * 4
    log = read_log(runner)
    assert "optim_wrapper.optimizer.type: 'SGD' in the config, 'AdamW' in the checkpoint" in log
    assert "does not fit the optimizer of the run, which starts with a new state" in log


def test_an_optimizer_of_the_config_with_the_same_state_keeps_its_moments(run):
    run(1, optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.1)))
    _, runner = run(2, optim_wrapper=adam(lr=0.1), resume=True)
    assert int(optax.tree.get(runner.state.opt_state, "count")) == 8


def test_a_flag_of_the_config_holds_after_a_resume(run):
    def sgd(**settings):
        return dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9, **settings))

    run(1, optim_wrapper=sgd(nesterov=False))
    _, runner = run(2, optim_wrapper=sgd(nesterov=True), resume=True)
    assert runner.iter == 8


def test_the_seed_is_that_of_the_checkpoint(run, tmp_path):
    expected, whole = run(3, work_dir=tmp_path / "whole", randomness=dict(seed=1))
    run(1, randomness=dict(seed=1))
    recorder, runner = run(3, randomness=dict(seed=2), resume=True)
    assert runner.seed == 1
    np.testing.assert_array_equal(np.stack(recorder.batches), np.stack(expected.batches[4:]))
    keys = jax.random.key_data(runner.state.rng), jax.random.key_data(whole.state.rng)
    np.testing.assert_array_equal(*keys)
    assert "randomness.seed: 2 in the config, 1 in the checkpoint, which holds" in read_log(runner)


def test_a_longer_run_has_the_schedules_of_its_length(run, tmp_path):
    cosine = dict(type="CosineAnnealingLR", by_epoch=False)  # without `end` and `T_max`: over the whole run
    expected, _ = run(4, work_dir=tmp_path / "whole", param_scheduler=cosine)
    run(2, param_scheduler=cosine)
    recorder, runner = run(4, param_scheduler=cosine, resume=True)
    assert recorder.values("lr") == expected.values("lr")[8:]
    assert recorder.values("lr")[-1] > 0
    assert differences(read_log(runner)) == ["train_cfg.max_epochs: 4 in the config, 2 in the checkpoint"]


def test_a_finished_run_ends_at_once_with_a_line_about_it(run):
    run(2)
    recorder, runner = run(2, resume=True)
    assert recorder.groups == []
    assert "There is nothing left to train" in read_log(runner)


@pytest.mark.filterwarnings("ignore:.*wrote its repr:UserWarning")
def test_a_config_that_is_passed_with_objects_is_compared_too(run):
    first, second = object(), object()  # with addresses that differ between runs
    run(1, cfg=dict(model=dict(depth=2, blocks=[dict(width=3, data=first)]), work_dir="a", note="x"))
    cfg = dict(model=dict(depth=4, blocks=[dict(width=3, data=second)]), work_dir="b", extra=1.5)
    _, runner = run(1, cfg=cfg, resume=True)
    assert differences(read_log(runner)) == [
        "cfg.model.depth: 4 in the config, 2 in the checkpoint",
        "extra: 1.5 in the config, not set in the checkpoint",
        "note: not set in the config, 'x' in the checkpoint",
    ]


# --- Everything that shapes a run, with objects and with a config. ---


GAIN = 1.0


def fit(params, batch, scale=1.0):
    return GAIN * scale * (batch["x"] @ params["w"] + params["b"])


def scaled_loss(scale):
    return lambda params, batch: jnp.square(scale * fit(params, batch) - batch["y"])


def absolute_loss(params, batch):
    return jnp.abs(fit(params, batch) - batch["y"])


def line_model(loss, predict=fit):
    return FunctionalModel(init=lambda: {"w": jnp.zeros((2,)), "b": jnp.zeros(())}, loss=loss, predict=predict)


def data(dtype=np.float32, first=0.0):
    x = np.arange(32, dtype=dtype).reshape(16, 2)
    x[0, 0] = first
    return ArrayDataset(dict(x=x, y=np.ones(16, dtype)))


def objects(**changes):
    """Return the arguments of a run as objects."""
    return (
        dict(
            model=line_model(scaled_loss(1.0)),
            train_dataloader=DataLoader(data(), 4, sampler=DefaultSampler(16, shuffle=True)),
            train_cfg=dict(max_epochs=1),
            optim_wrapper=OptimWrapper(optax.chain(optax.clip(1.0), optax.sgd(0.1)), accumulative_counts=2),
            default_hooks=SAVE,
            custom_hooks=[EMAHook(momentum=0.01)],
        )
        | changes
    )


def config(**changes):
    """Return the arguments of the same run as a config."""
    optimizer = dict(type="SGD", lr=0.1)
    return (
        objects(
            train_dataloader=dict(batch_size=4, dataset=data(), sampler=dict(type="DefaultSampler", shuffle=True)),
            optim_wrapper=dict(optimizer=optimizer, accumulative_counts=2, clip_grad=dict(max_norm=1.0)),
            custom_hooks=[dict(type="EMAHook", momentum=0.01)],
        )
        | changes
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the checkpoints of a run with objects and of one with a config."""
    paths = {}
    for arguments in (objects, config):
        work_dir = tmp_path_factory.mktemp(arguments.__name__)
        build_runner(work_dir, **arguments()).train()
        paths[arguments] = work_dir / "epoch_1"
    return paths


def wrapper(*parts, **settings):
    return dict(optim_wrapper=OptimWrapper(optax.chain(*parts, optax.sgd(0.1)), **settings))


CLIP, LOADER = optax.clip(1.0), dict(batch_size=4, sampler=dict(type="DefaultSampler", shuffle=True))
SGD = dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=2, clip_grad=dict(max_norm=1.0))


@pytest.mark.parametrize(
    ("arguments", "changes", "expected"),
    [
        (objects, dict(), ""),
        (objects, dict(custom_hooks=[EMAHook(momentum=0.02)]), "custom_hooks[0].momentum: 0.02 in the config, 0.01"),
        (objects, dict(custom_hooks=[EMAHook("StochasticWeightAverage")]), "custom_hooks[0].ema_type: 'StochasticWeight"),
        (objects, wrapper(CLIP, accumulative_counts=1), "optim_wrapper.accumulative_counts: 1 in the config, 2 in the"),
        (objects, wrapper(optax.clip(2.0), accumulative_counts=2), "max_delta: 2.0 in the config, 1.0 in the checkpoint"),
        (objects, dict(precision="bfloat16"), "precision: 'bfloat16' in the config, not set in the checkpoint"),
        (objects, dict(model=line_model(scaled_loss(2.0))), "model.loss.scale: 2.0 in the config, 1.0 in the checkpoint"),
        (objects, dict(model=line_model(absolute_loss)), "absolute_loss' in the config"),
        (
            objects,
            dict(model=line_model(scaled_loss(1.0), functools.partial(fit, scale=2.0))),
            "model.predict.scale: 2.0 in the config, not set in",
        ),
        (objects, dict(train_dataloader=DataLoader(data(), 4, sampler=DefaultSampler(16, shuffle=False))), "shuffle: False in"),
        (objects, dict(train_dataloader=DataLoader(data(first=1.0), 4, sampler=DefaultSampler(16, shuffle=True))), "arrays.x"),
        (
            objects,
            dict(train_dataloader=DataLoader(data(np.float16), 4, sampler=DefaultSampler(16, shuffle=True))),
            "train_dataloader.dataset.arrays.x: 'float16[16, 2]",
        ),
        (config, dict(), ""),
        (config, dict(custom_hooks=[dict(type="EMAHook", momentum=0.02)]), "custom_hooks[0].momentum: 0.02 in the config"),
        (config, dict(optim_wrapper={**SGD, "clip_grad": dict(max_norm=2.0)}), "optim_wrapper.clip_grad.max_norm: 2.0 in the"),
        (config, dict(optim_wrapper={**SGD, "accumulative_counts": 4}), "optim_wrapper.accumulative_counts: 4 in the config"),
        (config, dict(train_dataloader={**LOADER, "dataset": data(first=1.0)}), "train_dataloader.dataset.arrays.x: 'float32"),
    ],
)  # fmt: skip
def test_each_setting_that_differs_is_named(make_runner, trained, caplog, arguments, changes, expected):
    runner = make_runner(**arguments(**changes), resume=trained[arguments])
    with (
        caplog.at_level("INFO", "jengine"),
        contextlib.suppress(ValueError),
    ):  # a state that does not fit has no log file
        runner.train()
    lines = differences("\n".join(record.getMessage() for record in caplog.records))
    assert [line for line in lines if expected in line] if expected else lines == []
    assert len(lines) <= 3


@pytest.mark.parametrize(
    ("flag", "value"),
    [("jax_enable_x64", True), ("jax_threefry_partitionable", False), ("jax_default_matmul_precision", "highest")],
)
def test_numerical_flags_of_jax_are_compared(make_runner, trained, flag, value):
    before = getattr(jax.config, flag)
    jax.config.update(flag, value)
    try:
        runner = make_runner(**objects(), resume=trained[objects])
        assert runner.run.described.settings[f"jax.config.{flag}"] == value  # as `train` does before all else
    finally:
        jax.config.update(flag, before)
    runner.train()
    assert differences(read_log(runner)) == [
        f"jax.config.{flag}: {value!r} in the config, {before!r} in the checkpoint"
    ]


def test_other_data_are_refused_by_an_exact_resume(make_runner, trained):
    other = DataLoader(data(first=1.0), 4, sampler=DefaultSampler(16, shuffle=True))
    recorder = Recorder()
    arguments = {**objects(train_dataloader=other), "custom_hooks": [recorder]}
    with pytest.raises(ConfigError, match="train_dataloader.dataset.arrays.x"):
        make_runner(**arguments, load_from=str(trained[objects]), resume="exact").train()
    assert recorder.batches == []


def test_another_computation_with_the_same_settings_is_reported(make_runner, trained, monkeypatch):
    def train():
        runner = make_runner(**{**objects(), "train_cfg": dict(max_epochs=2)}, resume=trained[objects])
        runner.train()
        return read_log(runner).count("The computation of the training step (update) has changed since the checkpoint")

    assert train() == 0
    monkeypatch.setitem(train.__globals__, "GAIN", 1.5)
    assert train() == 1


def test_descriptions_do_not_depend_on_the_process(run_python):
    program = """
import functools, optax, numpy as np
import jax, jax.numpy as jnp
from flax import linen as nn, nnx
from jengine.config.description import describe, flatten_description
from jengine.hooks import EMAHook
from jengine.train.jaxpr_hash import hash_jaxpr
class Plain:
    def __init__(self, a, b=object()):
        self.a, self.b = a, b
values = [Plain({"x", "y", "z"}), object(), lambda x: x in {"a", "b", "c"}, nn.Dense(3), EMAHook(), print, np.float32(.1),
          optax.adamw(optax.cosine_decay_schedule(1., 3)), functools.partial(max, key=len), nnx.Linear(1, 2, rngs=nnx.Rngs(0)),
          iter([1]), range(3), jnp.ones(3), jax.jit(jnp.sin), jax.random.key(0), {"f": jax.nn.relu, 2: {1, 2}}]
step = jax.jit(lambda x: jax.nn.relu(x) + jax.checkpoint(jnp.sin)(x) + np.arange(3.0))
mesh = jax.make_mesh((1, 1, 1), ("one", "two", "three"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
spec = jax.P(("one", "two", "three"))
mapped = jax.jit(jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec))
result = [flatten_description(describe(values)), [hash_jaxpr(f.trace(jnp.ones(3)).jaxpr) for f in (step, mapped)]]
"""
    own = {"__name__": "program"}
    exec(program, own)
    run = (
        f"import json; scope = {{'__name__': 'program'}}; exec({program!r}, scope); print(json.dumps(scope['result']))"
    )
    process = run_python(run)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == own["result"]
    assert " at 0x" not in process.stdout


def test_an_error_in_reading_names_the_packages_with_other_versions(make_runner, tmp_path):
    class Versions(Hook):
        def before_save_checkpoint(self, runner, checkpoint):
            checkpoint["meta"]["versions"] = {**checkpoint["meta"]["versions"], "jax": "0.1.2"}

    make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=1), custom_hooks=[Versions()]).train()
    start = {"w": jnp.zeros((2,)), "b": jnp.zeros(()), "c": jnp.zeros(())}
    wide = FunctionalModel(init=lambda: start, loss=absolute_loss, predict=fit)
    load_from = dict(path=tmp_path / "run", rename=[("w", "v")])
    for runner in (make_runner(model=wide, resume=True), make_runner(load_from=load_from, work_dir=tmp_path / "tuned")):
        with pytest.raises((ValueError, TypeError)) as error:
            runner.train()
        (note,) = [note for note in error.value.__notes__ if "was written with other versions" in note]
        assert note.endswith(f": jax 0.1.2, now {jax.__version__}")
        assert runner.iter == 0


def test_other_parameter_groups_have_the_settings_of_the_config(run):
    sgd = dict(optimizer=dict(type="SGD", lr=0.1))
    other = {**sgd, "paramwise_cfg": dict(custom_keys=dict(b=dict(lr_mult=2.0), w=dict(lr_mult=3.0)))}
    run(1, optim_wrapper=sgd)
    _, runner = run(2, optim_wrapper=other, resume=True)
    assert sorted(group["lr"] for group in runner.optim_wrapper.param_groups) == pytest.approx([0.2, 0.3])
    assert "optim_wrapper.paramwise_cfg.custom_keys.b.lr_mult: 2.0 in the config, not set" in read_log(runner)


def test_a_loss_scale_is_added_in_a_resumed_run_with_a_new_optimizer_state(run):
    run(1, optim_wrapper=adam())
    amp = dict(type="AmpOptimWrapper", dtype="float32", loss_scale=8.0, **adam())
    _, runner = run(2, optim_wrapper=amp, resume=True)
    assert runner.iter == 8
    assert "which starts with a new state" in read_log(runner)
