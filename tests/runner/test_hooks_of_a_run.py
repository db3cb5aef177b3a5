import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.hooks import Hook
from jengine.runner import Runner

DEFAULTS = [
    "RuntimeInfoHook",
    "IterTimerHook",
    "DistSamplerSeedHook",
    "LoggerHook",
    "ParamSchedulerHook",
    "CheckpointHook",
]


def make_recorder(calls):
    """Return a hook that defines all stages and records each call."""

    def make(stage):
        def method(self, runner, **arguments):
            calls.append(stage)

        return method

    return type("Recorder", (Hook,), {stage: make(stage) for stage in Hook.stages})()


def list_names(runner):
    return [type(hook).__name__ for hook in runner.hooks]


def test_the_stages_of_a_run_in_order(make_runner):
    calls = []
    make_runner(custom_hooks=[make_recorder(calls)], validates=True).train()
    val = ["before_val", "before_val_epoch", *["before_val_iter", "after_val_iter"] * 2, "after_val_epoch", "after_val"]
    epoch = ["before_train_epoch", *["before_train_iter", "after_train_iter"] * 4, "after_train_epoch"]
    assert calls == ["before_run", "before_train", *(epoch + val) * 2, "after_train", "after_run"]


def test_a_hook_reads_the_process_and_the_interval_that_is_in_force(make_runner):
    class Reader(Hook):
        seen = ()

        def after_train_epoch(self, runner):
            assert (runner.distributed, runner.rank, runner.world_size) == (False, 0, 1)
            self.seen += (runner.train_loop.val_interval,)

    reader = Reader()
    train_cfg = dict(max_epochs=4, val_interval=2, dynamic_intervals=[(3, 1)])
    make_runner(train_cfg=train_cfg, custom_hooks=[reader], validates=True).train()
    assert reader.seen == (2, 2, 1, 1)


def test_the_stages_of_saving_and_loading(make_runner, tmp_path):
    calls = []
    make_runner(default_hooks=dict(logger=None), custom_hooks=[make_recorder(calls)]).train()  # fmt: skip
    assert calls.count("before_save_checkpoint") == 2
    at = calls.index("before_save_checkpoint")
    assert calls[at - 1 : at + 2] == ["after_train_epoch", "before_save_checkpoint", "before_train_epoch"]
    calls.clear()
    make_runner(work_dir=tmp_path / "second", custom_hooks=[make_recorder(calls)], load_from=tmp_path / "run", validates=True).val()
    assert calls[:2] == ["before_run", "after_load_checkpoint"]


class ScaleGradients(Hook):
    """Scale the gradients by an attribute, which the iteration `at` changes."""

    acts_on = "hyperparams"

    def __init__(self, attribute, value, at):
        self.scale, self.steps, self.unit, self.table, self.traces = 0.5, (1, "a"), jnp.float32(1), np.ones(2), 0
        self.unread = 0
        self.change = attribute, value, at

    @property
    def double(self):
        return 2 * self.scale

    def traced_grads(self, ctx):
        self.traces += 1
        scale = self.double * self.steps[0] * self.unit * self.table[0]
        return ctx.replace(grads=jax.tree.map(lambda g: scale * g, ctx.grads))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        attribute, value, at = self.change
        self.unread += 1
        if runner.iter == at:
            if attribute == "table":
                self.table[0] = value
            else:
                setattr(self, attribute, value)


EVERY_THIRD = dict(logger=dict(type="LoggerHook", interval=3), checkpoint=None)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        (
            "scale",
            0.7,
            r"`ScaleGradients.scale` .* must not change .* read, 0.5; got 0.7. Set a number in runner.hyperparams",
        ),
        ("steps", (2, "a"), "read, 1; got 2"),
        ("unit", jnp.float32(2), "`ScaleGradients.unit` .* must not change"),
        ("table", 3.0, r"`ScaleGradients.table` .* must not change .* read, array\(\[1., 1.\]\); got array\(\[3., 1.\]\)"),
    ],
)
def test_a_traced_attribute_that_changes_stops_the_run(make_runner, attribute, value, message):
    runner = make_runner(custom_hooks=[ScaleGradients(attribute, value, at=4)], default_hooks=EVERY_THIRD)
    with pytest.raises(RuntimeError, match=message):
        runner.train()
    assert 4 < runner.iter <= 8  # the iterations between two checks double, up to those of 10 seconds


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_traced_attribute_that_changes_stops_a_run_without_log_lines(
    make_runner, steps_per_call
):
    train_cfg = dict(by_epoch=False, max_iters=6, steps_per_call=steps_per_call)
    runner = make_runner(custom_hooks=[ScaleGradients("scale", 0.7, at=2)], train_cfg=train_cfg)
    with pytest.raises(RuntimeError, match=r"`ScaleGradients.scale` .* must not change"):
        runner.train()
    assert 2 < runner.iter <= 6


def test_attributes_that_the_trace_does_not_read_or_keeps_may_change(make_runner):
    hook = ScaleGradients("scale", 0.5, at=3)  # the same value
    runner = make_runner(custom_hooks=[hook], default_hooks=EVERY_THIRD)
    runner.train()
    assert (hook.unread, type(hook)) == (8, ScaleGradients)
    assert runner.programs.update.traces == 1  # the watch traces programs of its own


def test_an_unregistered_hook_is_not_called(make_runner):
    calls = []
    make_recorder(calls)
    make_runner(train_cfg=dict(max_epochs=1)).train()
    assert calls == []


def test_hooks_are_built_before_training(make_runner):
    assert list_names(make_runner(default_hooks=None)) == DEFAULTS


def test_default_hooks_are_removed_replaced_and_added_by_name(make_runner):
    runner = make_runner(default_hooks=dict(timer=None, logger=dict(type="LoggerHook", interval=3), mine=Hook()))
    assert list_names(runner) == ["RuntimeInfoHook", "DistSamplerSeedHook", "Hook", *DEFAULTS[3:]]
    assert runner.hooks[3].interval == 3
    with pytest.raises(ValueError, match="got 'tmier'") as error:
        make_runner(default_hooks=dict(tmier=None))
    assert error.value.__notes__ == ["in the config at `default_hooks.tmier`"]


def test_in_a_notebook_the_progress_is_a_default_hook_that_can_be_removed(make_runner, monkeypatch):
    assert list_names(make_runner(default_hooks=dict(progress=None))) == DEFAULTS
    monkeypatch.setattr("jengine.hooks.hook_list.in_notebook", lambda: True)
    assert list_names(make_runner(default_hooks=None)) == [*DEFAULTS, "ProgressHook"]
    assert list_names(make_runner(default_hooks=dict(progress=None))) == DEFAULTS


def test_custom_hooks_follow_the_defaults_of_their_priority(make_runner):
    class First(Hook):
        pass

    runner = make_runner(default_hooks=None, custom_hooks=[First(), dict(type=First, priority="VERY_HIGH")])
    assert list_names(runner) == [
        "RuntimeInfoHook",
        "First",
        "IterTimerHook",
        "DistSamplerSeedHook",
        "First",
        *DEFAULTS[3:],
    ]


def test_one_custom_hook_needs_no_list(make_runner):
    assert list_names(make_runner(custom_hooks=dict(type="IterTimerHook"))).count("IterTimerHook") == 2


def test_the_hook_table_lists_the_defaults_in_order(make_runner):
    lines = make_runner(default_hooks=None).get_hooks_info().splitlines()
    at = lines.index("after_train_epoch:")
    assert [line.rstrip() for line in lines[at + 1 : at + 3]] == [
        "(LOW         ) ParamSchedulerHook",
        "(VERY_LOW    ) CheckpointHook",
    ]


@pytest.mark.parametrize(
    ("changes", "error", "message", "path"),
    [
        (dict(custom_hooks=[dict(type="ChekpointHook")]), KeyError, "did you mean 'CheckpointHook'", "custom_hooks[0].type"),
        (dict(custom_hooks=[dict(type="IterTimerHook", priority=101)]), ValueError, "got 101", "custom_hooks[0]"),
        (dict(default_hooks=dict(logger=dict(type="LoggerHook", interval=0))), ValueError, "logger.interval` must be an integer of at least 1", "default_hooks.logger"),
        (dict(default_hooks=dict(logger=dict(type="LoggerHook", interval=2.0))), TypeError, "an integer", "default_hooks.logger"),
        (dict(default_hooks=dict(timer=dict(type="IterTimerHook", blok=True))), TypeError, "did you mean 'block'", "default_hooks.timer"),
        (dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=0))), ValueError, "interval", "default_hooks.checkpoint"),
    ],
)  # fmt: skip
def test_an_invalid_hook_is_reported_with_its_path(make_runner, changes, error, message, path, tmp_path):
    with pytest.raises(error, match=message) as caught:
        make_runner(**changes)
    assert caught.value.__notes__ == [f"in the config at `{path}`"]
    assert not (tmp_path / "run").exists()


def test_hooks_that_hold_a_donated_array_find_it_deleted(make_runner):
    kept = []

    class Keep(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            kept.append(runner.state.params["w"])

    runner = make_runner(custom_hooks=[Keep()])
    state = runner.train()
    with pytest.raises(RuntimeError, match="deleted"):
        kept[0] + 1
    assert state.params["w"].is_deleted() is False


def test_a_failing_hook_ends_the_run_with_its_own_error(make_runner):
    class Broken(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if runner.iter == 5:
                raise ZeroDivisionError("no")

    runner = make_runner(custom_hooks=[Broken()])
    with pytest.raises(ZeroDivisionError) as error:
        runner.train()
    assert error.value.__notes__ == ["in Broken.after_train_iter at iteration 5 (epoch 1)"]
    assert (runner.iter, int(runner.state.step)) == (5, 6)


class Extra(Hook):
    """Do nothing."""


def test_hooks_are_registered_after_the_construction_without_doubling_the_default_hooks(make_runner):
    runner = make_runner(default_hooks=dict(mine=dict(type=Extra)))
    runner.register_default_hooks(dict(timer=None, mine=None, logger=dict(type=Extra, priority=100)))
    runner.register_custom_hooks(Extra())
    without = [name for name in DEFAULTS if name not in ("IterTimerHook", "LoggerHook")]
    assert list_names(runner) == [without[0], without[1], "Extra", *without[2:], "Extra"]
    runner.register_hooks(custom_hooks=[dict(type=Extra)])
    assert list_names(runner) == [without[0], without[1], "Extra", "Extra", *without[2:], "Extra"]  # no timer again
    with pytest.raises(ValueError, match="a default hook to remove must be one of runtime_info, .* mine, got 'tmer'"):
        runner.register_default_hooks(dict(tmer=None))


def test_a_subclass_of_the_runner_can_change_the_hooks(make_runner):
    class Quiet(Runner):
        def register_default_hooks(self, hooks=None):
            super().register_default_hooks({**(hooks or {}), "logger": None})

    assert "LoggerHook" not in list_names(make_runner(runner_class=Quiet, default_hooks=None))


def test_every_way_to_set_hyperparameters_stores_float32_scalars(make_runner):
    hyperparams = make_runner().hyperparams
    hyperparams["a"] = 1
    hyperparams.update(b=2, a=3.5)
    hyperparams |= {"c": np.arange(1)}
    assert hyperparams.setdefault("d", 4) == 4
    assert hyperparams == {"a": 3.5, "b": 2, "c": 0, "d": 4}
    assert {type(value) for value in hyperparams.values()} == {np.float32}
    with pytest.raises(TypeError, match="the hyperparameter 'a' must be a number, got 'x'"):
        hyperparams.update(a="x")
