import warnings

import pytest

from jengine.config import HOOKS
from jengine.extras.imix import HookBase
from jengine.extras.imix.levels import PriorityStatus, get_level, to_priority
from jengine.hooks.hook_list import HookList


class Custom(HookBase):
    def before_train(self):
        pass


def test_there_are_seven_levels():
    assert {level.name: level.value for level in PriorityStatus} == dict(
        HIGHEST=0, HIGHER=10, HIGH=20, NORMAL=30, LOW=40, LOWER=50, LOWEST=60
    )


@pytest.mark.parametrize("level", ["HIGH", "high", "High", 20, PriorityStatus.HIGH])
def test_a_level_can_be_a_member_a_name_in_any_case_or_a_number(level):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_level(level) is PriorityStatus.HIGH


@pytest.mark.parametrize("level", [35, "35", "VERY_HIGH", None, 2.5, True])
def test_other_values_are_normal_with_a_warning(level):
    with pytest.warns(UserWarning, match="NORMAL is used"):
        assert get_level(level) is PriorityStatus.NORMAL


def test_levels_have_the_same_order_on_mmengines_scale():
    priorities = [to_priority(level) for level in PriorityStatus]
    assert priorities == sorted(set(priorities))
    assert to_priority(PriorityStatus.NORMAL) == 50


def get_names(hooks):
    return [getattr(hook, "name", type(hook).__name__) for hook in hooks]


def make_hook(name, level):
    hook = Custom()
    hook.name = name
    hook.level = level
    return hook


def test_custom_hooks_run_after_the_default_hooks_of_their_level(imix_cfg, test_data):
    from jengine.extras.imix import from_imix

    arguments = from_imix(imix_cfg(test_data=test_data))
    hooks = HookList()
    hooks.register_defaults(arguments["default_hooks"])
    hooks.register_all(arguments["custom_hooks"])
    for name, level in (("A", 20), ("B", 20), ("C", 40), ("D", 30), ("Z", 0)):
        hooks.register(make_hook(name, level))
    assert [name for name in get_names(hooks) if name not in ("RuntimeInfoHook", "DistSamplerSeedHook")] == [
        "Z", "OptimizerHook", "LRSchedulerHook", "A", "B", "IterationTimerHook", "PeriodicLogger", "CheckPointHook",
        "EvaluateHook", "D", "C",
    ]  # fmt: skip
    assert get_names(hooks)[0] == "Z"  # before every default hook


def test_the_config_of_any_hook_can_have_a_level():
    hooks = HookList()
    assert hooks.priority_of(hooks.register(dict(type="IterTimerHook", level="low"))) == 70
    assert hooks.priority_of(hooks.register(dict(type="TextLoggerHook", level=0))) == 0
    assert hooks.priority_of(hooks.register(dict(type="TextLoggerHook"))) == 50
    assert hooks.priority_of(hooks.register(dict(type="OptimizerHook"))) == 30
    with pytest.warns(UserWarning, match="got 35"):
        assert hooks.priority_of(hooks.register(dict(type="TextLoggerHook", level=35))) == 50


def test_a_hook_that_does_not_call_super_init_has_a_level():
    class Forgetful(HookBase):
        def __init__(self):
            pass

    assert Forgetful().level is PriorityStatus.NORMAL


def test_every_hook_is_registered():
    for name in (
        "AutogradAnomalyDetectHook", "AutogradProfilerHook", "CheckPointHook", "EvaluateHook", "IterationTimerHook",
        "LRSchedulerHook", "OptimizerHook", "Fp16OptimizerHook", "PeriodicLogger", "EMAIterHook", "EMAEpochHook",
        "TextLoggerHook",
    ):  # fmt: skip
        assert issubclass(HOOKS.get(name), HookBase)
