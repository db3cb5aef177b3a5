import collections
import json
import os
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine import checkpoint
from jengine.checkpoint.manifest import seal
from jengine.config.errors import ConfigError
from jengine.config.paths import flatten
from jengine.hooks import Hook
from jengine.model import FunctionalModel

SAVE = dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=dict(type="LoggerHook", interval=2))


def noisy_model():
    """Return a model with state and with noise in its loss, so that a resumed run must restore both."""

    def predict(params, model_state, batch):
        return batch["x"] @ params["w"] + model_state["mean"]

    def loss(params, model_state, batch, rng):
        noise = jax.random.normal(rng, batch["y"].shape)
        error = predict(params, model_state, batch) - batch["y"] + 0.1 * noise
        return {"loss": jnp.square(error)}, {"mean": 0.9 * model_state["mean"] + 0.1 * batch["y"].mean()}

    return FunctionalModel(init=lambda: ({"w": jnp.zeros((2,))}, {"mean": jnp.zeros(())}), loss=loss, predict=predict)


def read_log(runner):
    return pathlib.Path(runner.log_dir, f"{runner.timestamp}.log").read_text()


class Average(Hook):
    """Keep traced state and host state."""

    def __init__(self):
        self.epochs = 0

    def init_traced_state(self, params, model_state):
        return jax.tree.map(jnp.copy, params)

    def traced_update(self, ctx):
        return ctx.replace(hook_state=jax.tree.map(lambda a, p: a + 0.1 * (p - a), ctx.hook_state, ctx.params))

    def after_train_epoch(self, runner):
        self.epochs += 1

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict):
        self.epochs = state_dict["epochs"]


class StopAfter(Hook):
    """End training with an exception after some iterations, like a kill."""

    def __init__(self, iters):
        self.iters = iters

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.iters:
            raise KeyboardInterrupt


def arguments(hook, **changes):
    return {
        **dict(
            model=noisy_model(),
            train_cfg=dict(max_epochs=4),
            optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.05), clip_grad=dict(max_norm=1.0)),
            param_scheduler=[
                dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=6),
                dict(type="MultiStepLR", milestones=[2], gamma=0.1),
            ],
            default_hooks=SAVE,
            custom_hooks=[hook],
        ),
        **changes,
    }


def bits(state):
    leaves = flatten(state)
    return {
        path: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()
        for path, x in leaves.items()
    }


BY_EPOCH = dict(train_cfg=dict(max_epochs=4))
WITHIN_AN_EPOCH = {
    **BY_EPOCH,
    "default_hooks": {**SAVE, "checkpoint": dict(type="CheckpointHook", by_epoch=False, interval=3)},
}
BY_ITER = {
    **WITHIN_AN_EPOCH,
    "train_cfg": dict(by_epoch=False, max_iters=16, val_interval=4),
    "param_scheduler": dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=14),
}
BY_FUNCTION = {**WITHIN_AN_EPOCH, "param_scheduler": optax.warmup_cosine_decay_schedule(0.0, 0.05, 4, 16)}


@pytest.mark.parametrize(
    ("changes", "validations"),
    [
        (BY_EPOCH, [(e, 4 * e) for e in (1, 2, 3, 4)]),
        (WITHIN_AN_EPOCH, [(e, 4 * e) for e in (1, 2, 3, 4)]),
        (BY_ITER, [(0, i) for i in (4, 8, 12, 16)]),
        (BY_FUNCTION, [(e, 4 * e) for e in (1, 2, 3, 4)]),
    ],
    ids=["at an epoch border", "within an epoch", "in an iteration loop", "with an optax schedule"],
)
def test_a_resumed_run_ends_with_the_same_bits(make_runner, tmp_path, changes, validations):
    whole = Average()
    uninterrupted = make_runner(work_dir=tmp_path / "whole", **arguments(whole, **changes), validates=True)
    expected = uninterrupted.train()

    broken = make_runner(work_dir=tmp_path / "broken", **arguments(Average(), **changes), validates=True)
    broken.register_hook(StopAfter(10))
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    again = Average()
    runner = make_runner(work_dir=tmp_path / "broken", **arguments(again, **changes), resume=True, validates=True)
    state = runner.train()

    assert bits(state) == bits(expected)
    assert again.epochs == whole.epochs
    assert runner.log_dir == broken.log_dir
    assert [entry[:2] for entry in runner.validations] == validations
    assert [entry[2] for entry in runner.validations] == [entry[2] for entry in uninterrupted.validations]


def test_a_resume_looks_at_each_file_of_the_arrays_once(make_runner, tmp_path, monkeypatch):
    make_runner(work_dir=tmp_path, **arguments(Average(), train_cfg=dict(max_epochs=1))).train()
    seen, find_stat = collections.Counter(), os.stat

    def count(path, **options):
        seen.update([str(path)])
        return find_stat(path, **options)

    monkeypatch.setattr(os, "stat", count)
    runner = make_runner(work_dir=tmp_path, **arguments(Average(), train_cfg=dict(max_epochs=2)), resume=True)
    runner.train()
    assert runner.iter == 8
    data = list((tmp_path / "epoch_1" / "state" / "d").iterdir())
    assert data
    assert [seen[str(path)] for path in data] == [1] * len(data)


def test_resuming_without_a_checkpoint_starts_from_scratch_with_a_line_about_it(make_runner, tmp_path):
    runner = make_runner(resume=True, train_cfg=dict(max_epochs=1))
    assert runner.train().step == 4
    assert f"There is nothing to resume in {tmp_path / 'run'}: the run starts from scratch." in read_log(runner)


def test_a_resume_after_a_run_that_failed_in_its_first_step_names_the_earlier_checkpoints(make_runner, tmp_path):
    make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=1)).train()

    def fail(params, batch):
        return batch["lable"]

    with pytest.raises(KeyError):
        make_runner(
            default_hooks=SAVE, model=FunctionalModel(lambda: {"w": np.zeros(2)}, fail),
        ).train()  # fmt: skip
    with pytest.raises(ConfigError, match="got none; checkpoints of earlier runs are in earlier_1$"):
        make_runner(default_hooks=SAVE, resume="must")
    runner = make_runner(default_hooks=SAVE, resume=True)
    runner.train()
    assert "the run starts from scratch; checkpoints of earlier runs are in earlier_1." in read_log(runner)
    resumed = make_runner(default_hooks=SAVE, resume=tmp_path / "run" / "earlier_1" / "epoch_1")
    assert resumed.train().step == 8
    assert resumed.iters_this_session == 4


def test_a_resume_that_must_find_a_checkpoint_is_refused_without_one(make_runner, tmp_path):
    for load_from in (None, {"w": np.ones(2, np.float32), "b": np.ones((), np.float32)}):
        with pytest.raises(ConfigError, match="`resume` must find a checkpoint in .*/run with resume='must', got none"):
            make_runner(resume="must", load_from=load_from)
    assert list(tmp_path.iterdir()) == []
    make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=1)).train()
    runner = make_runner(resume="must")
    runner.train()
    assert runner.iters_this_session == 4
    assert f"Resumed from {tmp_path / 'run' / 'epoch_1'}: epoch 1, iteration 4." in read_log(runner)


def test_resume_with_the_path_of_a_checkpoint_in_load_from_continues_that_one(make_runner, tmp_path):
    make_runner(default_hooks=SAVE, work_dir=tmp_path / "first").train()
    first = tmp_path / "first" / "epoch_1"
    for _ in range(2):  # again from there, although the work dir has a newer one
        runner = make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=3), resume=True, load_from=str(first))
        runner.train()
        assert runner.iters_this_session == 8
        log = read_log(runner)
        assert f"Resumed from {first}: epoch 1, iteration 4." in log
        assert f"resume='{first}' does the same." in log
        assert runner.resume_command(None) == "Runner(..., load_from=None, resume=True)"


def test_other_weights_to_load_start_a_run_that_is_resumed_from_its_own_checkpoints(make_runner, tmp_path):
    make_runner(default_hooks=SAVE, work_dir=tmp_path / "first").train()
    published, _ = checkpoint.publish(tmp_path / "first" / "epoch_1", ["params"])
    for name, load_from in dict(options=dict(path=tmp_path / "first" / "epoch_1"), published=published).items():
        run = dict(default_hooks=SAVE, work_dir=tmp_path / name, resume=True, load_from=load_from)
        runner = make_runner(**run, train_cfg=dict(max_epochs=1))
        runner.train()
        assert runner.iters_this_session == 4
        assert "nothing to resume in" in read_log(runner)
        assert "the run starts from the weights of load_from." in read_log(runner)
        runner = make_runner(**run)
        runner.train()
        assert runner.iters_this_session == 4
        assert f"Resumed from {tmp_path / name / 'epoch_1'}" in read_log(runner)


def test_a_path_without_a_checkpoint_is_an_error_before_anything_is_written(make_runner, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        with pytest.raises(FileNotFoundError, match=name) as error:
            make_runner(resume=str(tmp_path / name))
        assert "in the config at `resume`" in error.value.__notes__
    with pytest.raises(FileNotFoundError, match="missing"):
        make_runner(load_from=str(tmp_path / "missing"))
    assert not (tmp_path / "run").exists()


def test_load_from_loads_only_the_weights(make_runner, tmp_path):
    trained = make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=1)).train()
    runner = make_runner(work_dir=tmp_path / "tuned", load_from=tmp_path / "run" / "epoch_1")
    before = {}

    class Look(Hook):
        def before_train(self, runner):
            before.update(iter=runner.iter, w=np.asarray(runner.state.params["w"]))

    runner.register_hook(Look())
    runner.train()
    assert before["iter"] == 0
    np.testing.assert_array_equal(before["w"], trained.params["w"])


def test_a_new_run_in_the_same_work_dir_moves_the_old_checkpoints(make_runner, tmp_path):
    first = make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=1)).train()
    (tmp_path / "run" / "epoch_2.incoming" / "state").mkdir(parents=True)  # of a run that was killed during this save
    make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=1), randomness=dict(seed=7)).train()
    assert [path.name for path in (tmp_path / "run").rglob("epoch_*")].count("epoch_1") == 2
    assert not list((tmp_path / "run").rglob("*.incoming"))  # nothing can resume from it
    old = checkpoint.load(tmp_path / "run" / "earlier_1" / "epoch_1")
    np.testing.assert_array_equal(old.params["w"], first.params["w"])
    assert (tmp_path / "run" / "epoch_1").is_dir()
    assert pathlib.Path(checkpoint.find_latest(tmp_path / "run")).parent == tmp_path / "run"


def test_a_checkpoint_has_the_learning_rate_of_the_next_step(make_runner, tmp_path):
    make_runner(
        default_hooks=SAVE,
        train_cfg=dict(max_epochs=2),
        param_scheduler=dict(type="MultiStepLR", milestones=[1], gamma=0.1),
    ).train()
    meta = checkpoint.read_meta(tmp_path / "run" / "epoch_1")
    assert meta["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.01)
    assert meta["meta"]["epoch"] == 1
    assert meta["meta"]["iter"] == 4


@pytest.mark.parametrize(
    ("hook", "train_cfg", "expected"),
    [
        (dict(interval=5), dict(max_epochs=12), ["epoch_10", "epoch_12", "epoch_5"]),
        (dict(interval=5, by_epoch=False), dict(by_epoch=False, max_iters=12), ["iter_10", "iter_12", "iter_5"]),
    ],
)
def test_checkpoints_are_written_at_their_interval_and_at_the_end(make_runner, tmp_path, hook, train_cfg, expected):
    make_runner(
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", **hook), logger=None),
        train_cfg=train_cfg,
    ).train()  # fmt: skip
    found = sorted(
        p.name for p in (tmp_path / "run").iterdir() if p.is_dir() and p.name.startswith(("epoch_", "iter_"))
    )
    assert found == expected


def test_the_seed_of_the_checkpoint_overrides_a_drawn_one(make_runner):
    first = make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=1), randomness=dict(seed=None))
    first.train()
    again = make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=2), randomness=dict(seed=None), resume=True)
    assert again.seed == first.seed


class Rates(Hook):
    """Record the learning rate of each iteration."""

    def __init__(self):
        self.rates = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.rates.append(runner.optim_wrapper.get_lr()["lr"][0])


def test_a_longer_run_continues_with_its_optax_schedule(make_runner):
    schedule, rates = optax.exponential_decay(0.1, transition_steps=5, decay_rate=0.5), Rates()
    hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None)
    run = dict(param_scheduler=schedule, custom_hooks=[rates], default_hooks=hooks)
    make_runner(train_cfg=dict(max_epochs=2), **run).train()
    runner = make_runner(train_cfg=dict(max_epochs=5), resume=True, **run)
    runner.train()
    assert rates.rates == pytest.approx([float(schedule(step)) for step in range(20)], rel=1e-6)
    log = (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()
    assert "The schedules of the config and of the checkpoint differ" not in log


def test_a_checkpoint_without_the_optimizer_resumes_with_fresh_moments(make_runner, tmp_path):
    adam = dict(optimizer=dict(type="Adam", lr=0.05))
    hooks = dict(checkpoint=dict(type="CheckpointHook", interval=1, save_optimizer=False), logger=None)
    first = make_runner(optim_wrapper=adam, default_hooks=hooks, train_cfg=dict(max_epochs=1)).train()
    assert int(optax.tree.get(first.opt_state, "count")) == 4
    runner = make_runner(optim_wrapper=adam, default_hooks=hooks, train_cfg=dict(max_epochs=2), resume=True)
    state = runner.train()
    assert state.step == 8
    assert int(optax.tree.get(state.opt_state, "count")) == 4


def test_the_schedules_after_a_resume_are_those_of_the_config(make_runner, tmp_path):
    # a cosine over 2 epochs is stretched to 4: after the first epoch it is at (1 + cos(pi / 4)) / 2
    def run(max_epochs, **changes):
        cosine = dict(type="CosineAnnealingLR", T_max=max_epochs)
        return make_runner(train_cfg=dict(max_epochs=max_epochs), param_scheduler=cosine, **changes)

    broken = run(2, default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None))
    broken.register_hook(StopAfter(4))
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    seen = []

    class Look(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            seen.append(runner.optim_wrapper.get_lr()["lr"][0])

    runner = run(4, resume=True, custom_hooks=[Look()])
    runner.train()
    assert seen[0] == pytest.approx(0.05 + 0.05 * 0.5**0.5)
    log = (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()
    assert "param_scheduler.T_max: 4 in the config, 2 in the checkpoint" in log


def test_a_validation_before_training_does_not_replace_the_weights_to_load(make_runner, tmp_path):
    trained = make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=1), validates=True).train()
    runner = make_runner(
        work_dir=tmp_path / "tuned",
        load_from=tmp_path / "run",
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)), validates=True,
    )
    before = runner.val()["loss"]
    state = runner.train()
    np.testing.assert_array_equal(state.params["w"], trained.params["w"])
    assert runner.val()["loss"] == before


# --- Several runs, damaged checkpoints, and foreign values. ---


def save_to(**settings):
    return dict(checkpoint=dict(type="CheckpointHook", interval=1, **settings), logger=None)


def test_resuming_elsewhere_leaves_the_checkpoints_of_the_other_run_complete(make_runner, tmp_path):
    for name in ("a", "b"):
        make_runner(work_dir=tmp_path / name, default_hooks=save_to(), train_cfg=dict(max_epochs=2)).train()
    keep_one = save_to(max_keep_ckpts=1)
    resumed = make_runner(
        work_dir=tmp_path / "a", default_hooks=keep_one, train_cfg=dict(max_epochs=3), resume=tmp_path / "b" / "epoch_2"
    )
    resumed.train()
    moved = sorted(path.name for path in (tmp_path / "a" / "earlier_1").iterdir())
    assert moved == ["epoch_1", "epoch_2"]
    assert sorted(path.name for path in (tmp_path / "a").glob("epoch_*")) == ["epoch_3"]
    assert sorted(path.name for path in (tmp_path / "b").glob("epoch_*")) == ["epoch_1", "epoch_2"]


def test_two_runs_cannot_share_an_out_dir(make_runner, tmp_path):
    def make_second(**changes):
        return make_runner(
            work_dir=tmp_path / "other" / "run", default_hooks=save_to(out_dir=tmp_path / "out"), **changes
        )

    class SecondRun(Hook):
        """Train a second run with the same name and `out_dir` within the first one."""

        def before_train(self, runner):
            with pytest.raises(checkpoint.WorkDirLockedError, match=r"another run is training in .*out/run"):
                make_second().train()

    early = make_second()
    runner = make_runner(
        default_hooks=save_to(out_dir=tmp_path / "out"), custom_hooks=[SecondRun()], experiment_name="first"
    )
    runner.train()
    for start in (make_second, early.train):
        with pytest.raises(
            ConfigError, match="`CheckpointHook.out_dir` must have checkpoints of one work dir"
        ) as error:
            start()
        assert f"the run {runner.experiment_name} of {tmp_path / 'run'}" in str(error.value)
        assert f"this run of {tmp_path / 'other' / 'run'}" in str(error.value)
    assert sorted(path.name for path in (tmp_path / "out" / "run").glob("e*")) == ["epoch_1", "epoch_2"]
    make_second(resume=tmp_path / "out" / "run" / "epoch_2").train()  # the same run
    make_runner(default_hooks=save_to(out_dir=tmp_path / "out")).train()  # another one of the same work dir
    assert sorted(path.name for path in (tmp_path / "out" / "run" / "earlier_1").iterdir()) == ["epoch_1", "epoch_2"]


def test_more_iterations_than_the_step_can_count_are_refused_before_training(make_runner, tmp_path):
    class Overflow(Hook):
        def before_save_checkpoint(self, runner, checkpoint):
            checkpoint["meta"]["iter"] = 2**32 + checkpoint["meta"]["iter"]

    make_runner(default_hooks=save_to(), custom_hooks=[Overflow()], train_cfg=dict(max_epochs=1)).train()
    endless = dict(by_epoch=False, max_iters=2**31 - 1)
    with pytest.raises(ConfigError, match="`train_cfg.max_iters` must be at least 4294967300"):
        make_runner(resume=True, train_cfg=endless).train()
    with pytest.raises(ConfigError, match="got 4294967300 in `meta` and 4 in `state.step`"):
        make_runner(resume=True, train_cfg=dict(max_epochs=5)).train()
    assert [path.name for path in (tmp_path / "run").glob("epoch_*")] == ["epoch_1"]


def test_an_out_dir_that_cannot_be_written_is_refused_before_training(make_runner, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="`CheckpointHook.out_dir` must be writable, got .*/file/run"):
        make_runner(default_hooks=save_to(out_dir=tmp_path / "file"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="`CheckpointHook.out_dir` must be writable, got /proc/jengine/run"):
        make_runner(default_hooks=save_to(out_dir="/proc/jengine"))
    assert not (tmp_path / "run").exists()


def test_a_run_killed_while_it_moves_other_checkpoints_does_not_resume_from_the_rest(
    make_runner, tmp_path, monkeypatch
):
    make_runner(default_hooks=save_to()).train()
    rename = os.rename

    def killed(path, target):
        if os.path.basename(path) == "epoch_2":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        make_runner(default_hooks=save_to(), randomness=dict(seed=5)).train()
    monkeypatch.undo()
    left = [path.name for path in (tmp_path / "run").glob("epoch_*")]
    runner = make_runner(default_hooks=save_to(), resume=True)
    assert left == ["epoch_2"]
    assert runner.train().step == 8  # from scratch: the rest belongs to another run
    assert sorted(path.name for path in (tmp_path / "run").glob("earlier_*/*")) == ["epoch_1", "epoch_2"]


def test_checkpoints_of_interrupted_epochs_are_removed_after_the_next_epoch(make_runner, tmp_path):
    hooks = save_to(max_keep_ckpts=1)
    for iters in (2, 3):
        runner = make_runner(default_hooks=hooks, train_cfg=dict(max_epochs=2), resume=True)
        runner.register_hook(Interrupt(iters))
        with pytest.raises(KeyboardInterrupt):
            runner.train()
    assert sorted(path.name for path in (tmp_path / "run").glob("*_[0-9]")) == ["iter_3"]
    make_runner(default_hooks=hooks, train_cfg=dict(max_epochs=2), resume=True).train()
    assert sorted(path.name for path in (tmp_path / "run").glob("*_[0-9]")) == ["epoch_2"]


class Interrupt(Hook):
    """Send SIGINT to this process after some iterations."""

    def __init__(self, iters):
        self.iters = iters

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.iters:
            signal.raise_signal(signal.SIGINT)


def test_a_damaged_checkpoint_is_skipped_with_one_line(make_runner, tmp_path, caplog):
    make_runner(default_hooks=save_to()).train()
    newest = tmp_path / "run" / "epoch_2"
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"!")
    with pytest.raises(checkpoint.CorruptCheckpointError, match="is damaged"):
        make_runner(default_hooks=save_to(), resume=newest)
    with caplog.at_level("WARNING", logger="jengine"):
        runner = make_runner(default_hooks=save_to(), resume=True)
    assert len([record for record in caplog.records if "skipped checkpoint" in record.message]) == 1
    assert runner.train().step == 8


def test_values_of_a_checkpoint_from_elsewhere_are_never_paths(make_runner, tmp_path):
    make_runner(work_dir=tmp_path / "their", default_hooks=save_to()).train()
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file.json").write_text("keep")
    theirs = tmp_path / "their" / "epoch_2"
    stored = json.loads((theirs / "meta.json").read_text())
    stored["hooks"]["CheckpointHook"].update(evicting=["../victim", str(victim)], interrupted=["../victim"])
    stored["visualizer"] = {
        "LocalVisBackend": {"sizes": {str(victim / "file.json"): 0, "../../../victim/file.json": 0}}
    }
    stored["meta"]["timestamp"] = "../../victim/logs"
    (theirs / "meta.json").write_text(json.dumps(stored))
    seal(theirs, run=stored["meta"]["run"], is_latest=True, iteration=8)
    runner = make_runner(
        work_dir=tmp_path / "mine", default_hooks=save_to(), train_cfg=dict(max_epochs=3), resume=theirs
    )
    runner.train()
    assert [path.name for path in victim.iterdir()] == ["file.json"]
    assert (victim / "file.json").read_text() == "keep"
    assert pathlib.Path(runner.log_dir).parent == tmp_path / "mine"
