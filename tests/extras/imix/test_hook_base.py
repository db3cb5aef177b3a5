import gc

import pytest

from jengine.extras.imix import HookBase, register_hooks
from jengine.hooks.hook_list import HookList


class Recorder(HookBase):
    def __init__(self):
        self.calls = []

    def before_train(self):
        self.calls.append("before_train")

    def before_train_epoch(self):
        self.calls.append("before_train_epoch")

    def before_train_iter(self):
        self.calls.append(f"before_train_iter {self.inner_iter}")

    def after_train_iter(self):
        self.calls.append(f"after_train_iter {self.inner_iter} {sorted(self.outputs)}")

    def after_train_epoch(self):
        self.calls.append("after_train_epoch")

    def after_train(self):
        self.calls.append("after_train")


class Fails(HookBase):
    def after_train_iter(self):
        if self.trainer.iter == 1:
            raise ArithmeticError("no more")


ITERATIONS = [
    line for i in range(2) for line in (f"before_train_iter {i}", f"after_train_iter {i} ['loss']")
]  # fmt: skip


def test_training_by_epochs_calls_all_six_methods_in_order(imix_runner):
    recorder = Recorder()
    imix_runner(4, total_epochs=2, custom_hooks=[recorder]).train()
    epoch = ["before_train_epoch", *ITERATIONS, "after_train_epoch"]
    assert recorder.calls == ["before_train", *epoch, *epoch, "after_train"]


def test_training_by_iterations_skips_the_epoch_methods(imix_runner):
    recorder = Recorder()
    imix_runner(4, max_iter=2, custom_hooks=[recorder]).train()
    assert recorder.calls == ["before_train", *ITERATIONS, "after_train"]


def test_after_train_is_called_on_an_error_which_propagates(imix_runner):
    recorder = Recorder()
    with pytest.raises(ArithmeticError, match="no more"):
        imix_runner(4, max_iter=4, custom_hooks=[recorder, Fails()]).train()
    assert recorder.calls == ["before_train", *ITERATIONS, "after_train"]


def test_a_failing_after_train_does_not_hide_the_error(imix_runner, tmp_path):
    class FailsTwice(Fails):
        def after_train(self):
            raise KeyError("nor this")

    recorder = Recorder()
    with pytest.raises(ArithmeticError, match="no more"):
        imix_runner(4, max_iter=4, custom_hooks=[FailsTwice(), recorder]).train()
    assert recorder.calls[-1] == "after_train"
    assert "FailsTwice.after_train failed: KeyError" in next(tmp_path.glob("run/*/*.log")).read_text()


class Engine:
    """Provide the part of a Runner that `register_hooks` uses."""

    def __init__(self):
        self.hooks = HookList()

    def register_hook(self, hook):
        self.hooks.register(hook)


@pytest.mark.usefixtures("only_new_garbage")
def test_the_trainer_is_a_weak_proxy():
    engine, hook = Engine(), Recorder()
    register_hooks(engine, [None, hook, None])
    assert list(hook.trainer.hooks) == [hook]
    del engine
    gc.collect()
    with pytest.raises(ReferenceError):
        print(hook.trainer.hooks)


def test_a_method_can_call_super(trainer):
    class Child(Recorder):
        def before_train(self):
            super().before_train()
            self.calls.append("child")

    hook = Child()
    hook.before_train(trainer)
    assert hook.calls == ["before_train", "child"]


def test_the_text_logger_logs_at_each_stage(imix_runner, tmp_path):
    imix_runner(2, max_iter=1, custom_hooks=[dict(type="TextLoggerHook", text="hello", level=60)]).train()
    text = next(tmp_path.glob("run/*/*.log")).read_text()
    positions = [text.index(f"{stage}:hello") for stage in ("before_train", "after_train_iter", "after_train")]
    assert positions == sorted(positions)


def test_the_trainer_has_the_names_of_imix(imix_runner):
    class Reads(HookBase):
        def before_train(self):
            trainer = self.trainer
            self.read = [trainer.max_iter, trainer.max_epoch, trainer.by_epoch, self in trainer._hooks]
            trainer.remark = "set on the run"

    for arguments, expected in ((dict(total_epochs=3), [6, 3, True, True]), (dict(max_iter=4), [4, 1, False, True])):
        hook = Reads()
        runner = imix_runner(4, custom_hooks=[hook], **arguments)
        runner.train()
        assert hook.read == expected
        assert runner.remark == "set on the run"
