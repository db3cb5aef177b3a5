import types

import pytest

from jengine.hooks import Hook, Priority, get_priority
from jengine.hooks.hook_list import HookList
from tests.refusals import check_refusal


def runner_at(epoch=0, iter=0, max_epochs=2, max_iters=8):
    return types.SimpleNamespace(epoch=epoch, iter=iter, max_epochs=max_epochs, max_iters=max_iters)


def test_priorities_have_the_values_of_mmengine():
    assert [(p.name, p.value) for p in Priority] == [
        ("HIGHEST", 0), ("VERY_HIGH", 10), ("HIGH", 30), ("ABOVE_NORMAL", 40), ("NORMAL", 50),
        ("BELOW_NORMAL", 60), ("LOW", 70), ("VERY_LOW", 90), ("LOWEST", 100),
    ]  # fmt: skip
    assert [get_priority(p) for p in ("very_high", "Normal", 45, Priority.LOW)] == [10, 50, 45, 70]


@pytest.mark.parametrize(
    ("priority", "error", "words"),
    [
        (101, ValueError, ["100", "got 101"]),
        (-1, ValueError, ["got -1"]),
        ("foo", KeyError, ["got 'foo'"]),
        ("NORMEL", KeyError, ["did you mean 'NORMAL'"]),
        (1.5, TypeError, ["got 1.5"]),
    ],
)
def test_an_invalid_priority_is_refused_with_the_legal_values(priority, error, words):
    check_refusal(lambda: get_priority(priority), error, *words)


def test_every_n_epochs_counts_from_one_and_includes_its_start():
    hook = Hook()
    assert [e + 1 for e in range(20) if hook.every_n_epochs(runner_at(epoch=e), 5)] == [5, 10, 15, 20]
    assert [e + 1 for e in range(10) if hook.every_n_epochs(runner_at(epoch=e), 2, start=3)] == [3, 5, 7, 9]
    assert not any(hook.every_n_epochs(runner_at(epoch=e), n) for e in range(9) for n in (0, -1))


def test_every_n_iterations_and_the_last_iteration():
    hook = Hook()
    assert [i for i in range(10) if hook.every_n_train_iters(runner_at(iter=i), 4)] == [3, 7]
    assert [i for i in range(10) if hook.every_n_train_iters(runner_at(iter=i), 3, start=2)] == [1, 4, 7]
    assert [i for i in range(10) if hook.every_n_inner_iters(i, 5)] == [4, 9]
    assert not hook.every_n_inner_iters(4, 0)
    assert hook.end_of_epoch([0, 1, 2], 2)
    assert not hook.end_of_epoch([0, 1, 2], 1)
    assert hook.is_last_train_epoch(runner_at(epoch=1))
    assert hook.is_last_train_iter(runner_at(iter=7))
    assert not hook.is_last_train_iter(runner_at(iter=6))


def test_a_shared_method_defines_three_stages_in_order():
    class Both(Hook):
        def _after_iter(self, runner, batch_idx, data_batch=None, outputs=None, mode="train"):
            pass

        def before_run(self, runner):
            pass

    assert Both().get_triggered_stages() == ["before_run", "after_train_iter", "after_val_iter", "after_test_iter"]
    assert Hook().get_triggered_stages() == []


def test_shared_methods_receive_the_mode_and_every_argument():
    seen = []

    class Grouped(Hook):
        def _before_iter(self, runner, batch_idx, data_batch=None, mode="train"):
            seen.append((mode, batch_idx, data_batch))

    hook = Grouped()
    hook.before_train_iter(None, batch_idx=1, data_batch="a")  # by keyword
    hook.before_val_iter(None, 2, "b")  # by position
    assert seen == [("train", 1, "a"), ("val", 2, "b")]


def test_hooks_of_equal_priority_run_in_the_order_of_registration():
    calls = []

    def make(name):
        class Recorder(Hook):
            def before_train_iter(self, runner, batch_idx, data_batch=None):
                calls.append(name)

        return Recorder()

    hooks = HookList()
    for name, priority in (("normal", None), ("ln", "LOWEST"), ("vh", "VERY_HIGH"), ("45", 45), ("n2", "normal")):
        hooks.register(make(name), priority)
    hooks.call("before_train_iter", runner_at(), batch_idx=0)
    assert calls == ["vh", "45", "normal", "n2", "ln"]


def test_priority_comes_from_the_argument_then_the_config_then_the_class():
    class Early(Hook):
        priority = "ABOVE_NORMAL"

    hooks = HookList()
    cfg = dict(type=Early, priority="LOW")
    assert hooks.priority_of(hooks.register(Early())) == 40
    assert hooks.priority_of(hooks.register(cfg)) == 70
    assert hooks.priority_of(hooks.register(cfg, priority="HIGH")) == 30
    assert cfg == dict(type=Early, priority="LOW")


def test_a_config_passes_its_arguments_to_the_constructor_and_is_not_modified():
    class Two(Hook):
        def __init__(self, a, b):
            self.a, self.b = a, b

    cfg = dict(type=Two, a=1, b=2, priority="NORMAL")
    hook = HookList().register(cfg)
    assert (hook.a, hook.b) == (1, 2)
    assert cfg == dict(type=Two, a=1, b=2, priority="NORMAL")


def test_a_stage_of_a_custom_loop_is_called_on_hooks_that_define_it():
    calls = []

    class WarmUp(Hook):
        def before_warmup_iter(self, runner, factor):
            calls.append(factor)

    hooks = HookList()
    hooks.register(Hook())
    hooks.register(WarmUp())
    hooks.call("before_warmup_iter", runner_at(), factor=0.5)
    hooks.call("no_such_stage", runner_at())
    assert calls == [0.5]


def test_hooks_get_any_value_with_progress_as_the_run():
    seen = []

    class Second(Hook):
        every = 2

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen.append((runner.iter, outputs["loss"]))

    hooks = HookList([Second()])
    for i in range(4):
        hooks.call("after_train_iter", types.SimpleNamespace(iter=i, epoch=0), batch_idx=i, outputs={"loss": -i})
    assert seen == [(1, -1), (3, -3)]


def test_the_order_is_printed_stage_by_stage():
    class Early(Hook):
        def before_run(self, runner):
            pass

    class Tr(Hook):
        def after_train_epoch(self, runner):
            pass

    hooks = HookList()
    hooks.register(Tr(), 45)
    hooks.register(Tr(), "LOW")
    hooks.register(Early(), 10)
    name = "{:<35}".format
    assert hooks.describe() == (
        f"before_run:\n(VERY_HIGH   ) {name('Early')}\n -------------------- \n"
        f"after_train_epoch:\n(45          ) {name('Tr')}\n(LOW         ) {name('Tr')}\n -------------------- "
    )


def test_traced_points_are_printed_between_the_stages_of_an_iteration():
    class Average(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            pass

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            pass

        def traced_update(self, ctx):
            return ctx

    hooks = HookList()
    hooks.register(Average())
    titles = [line for line in hooks.describe().splitlines() if line.endswith(":")]
    assert titles == ["before_train_iter:", "traced_update:", "after_train_iter:"]
