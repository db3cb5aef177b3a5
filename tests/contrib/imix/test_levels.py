import warnings

import pytest

from jengine.contrib.imix import HookBase, PriorityStatus, get_level, to_priority
from jengine.errors import ConfigError
from jengine.registry import HOOKS
from jengine.runner import build
from jengine.runner.hook_list import HookList


class Custom(HookBase):
    def before_train(self):
        pass


def test_the_seven_levels():
    assert {level.name: level.value for level in PriorityStatus} == dict(
        HIGHEST=0, HIGHER=10, HIGH=20, NORMAL=30, LOW=40, LOWER=50, LOWEST=60
    )


@pytest.mark.parametrize("level", ["HIGH", "high", "High", 20, PriorityStatus.HIGH])
def test_a_level_is_a_member_a_name_in_any_case_or_a_number(level):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_level(level) is PriorityStatus.HIGH


@pytest.mark.parametrize("level", [35, "35", "VERY_HIGH", None, 2.5, True])
def test_anything_else_is_normal_with_a_warning(level):
    with pytest.warns(UserWarning, match="NORMAL is used"):
        assert get_level(level) is PriorityStatus.NORMAL


def test_the_order_of_the_levels_stays_on_mmengines_scale():
    priorities = [to_priority(level) for level in PriorityStatus]
    assert priorities == sorted(set(priorities))
    assert to_priority(PriorityStatus.NORMAL) == 50


def names_of(hooks):
    return [getattr(hook, "name", type(hook).__name__) for hook in hooks]


def named(name, level):
    hook = Custom()
    hook.name = name
    return hook, level


def test_custom_hooks_stand_behind_the_default_ones_of_their_level(imix_cfg, test_data):
    from jengine.contrib.imix import from_imix

    arguments = from_imix(imix_cfg(test_data=test_data))
    hooks = build.build_hooks(arguments["default_hooks"], arguments["custom_hooks"])
    for hook, level in (named("A", 20), named("B", 20), named("C", 40), named("D", 30), named("Z", 0)):
        hook.level = level
        hooks.register(hook)
    assert [name for name in names_of(hooks) if name not in ("RuntimeInfoHook", "DistSamplerSeedHook")] == [
        "Z", "OptimizerHook", "LRSchedulerHook", "A", "B", "IterationTimerHook", "PeriodicLogger", "CheckPointHook",
        "EvaluateHook", "D", "C",
    ]  # fmt: skip
    assert names_of(hooks)[0] == "Z"  # before every default hook


def test_a_config_gives_a_level_to_any_hook():
    hooks = HookList()
    assert hooks.priority_of(hooks.register(dict(type="IterTimerHook", level="low"))) == 70
    assert hooks.priority_of(hooks.register(dict(type="TextLoggerHook", level=0))) == 0
    assert hooks.priority_of(hooks.register(dict(type="TextLoggerHook"))) == 50
    assert hooks.priority_of(hooks.register(dict(type="OptimizerHook"))) == 30
    with pytest.warns(UserWarning, match="got 35"):
        assert hooks.priority_of(hooks.register(dict(type="TextLoggerHook", level=35))) == 50


def test_a_level_and_a_priority_are_not_given_both():
    with pytest.raises(ConfigError, match="got both: 30 and 20"):
        HookList().register(dict(type="TextLoggerHook", priority=30, level=20))


def test_a_hook_that_forgets_the_constructor_of_its_base_has_a_level():
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
