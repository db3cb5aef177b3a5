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
    make_runner(custom_hooks=[make_recorder(calls)]).train()
    val = ["before_val", "before_val_epoch", *["before_val_iter", "after_val_iter"] * 2, "after_val_epoch", "after_val"]
    epoch = ["before_train_epoch", *["before_train_iter", "after_train_iter"] * 4, "after_train_epoch"]
    assert calls == ["before_run", "before_train", *(epoch + val) * 2, "after_train", "after_run"]


def test_the_stages_of_saving_and_loading(make_runner, tmp_path):
    calls = []
    make_runner(default_hooks=dict(logger=None), custom_hooks=[make_recorder(calls)], val_dataloader=None, val_cfg=None,
                val_evaluator=None).train()  # fmt: skip
    assert calls.count("before_save_checkpoint") == 2
    at = calls.index("before_save_checkpoint")
    assert calls[at - 1 : at + 2] == ["after_train_epoch", "before_save_checkpoint", "before_train_epoch"]
    calls.clear()
    make_runner(work_dir=tmp_path / "second", custom_hooks=[make_recorder(calls)], load_from=tmp_path / "run").val()
    assert calls[:2] == ["before_run", "after_load_checkpoint"]


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
    assert [line.rstrip() for line in lines[at + 1 : at + 4]] == [
        "(NORMAL      ) IterTimerHook",
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

    with pytest.raises(ZeroDivisionError) as error:
        make_runner(custom_hooks=[Broken()]).train()
    assert error.value.__notes__ == ["in Broken.after_train_iter at iteration 5 (epoch 1)"]


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
