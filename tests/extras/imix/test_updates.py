import json

import jax
import optax
import pytest

from jengine.config.errors import ConfigError
from jengine.extras.imix import (
    Fp16OptimizerHook,
    HookBase,
    LRSchedulerHook,
    OptimizerHook,
    from_imix,
)
from jengine.extras.imix.levels import PriorityStatus
from jengine.extras.imix.lr_scheduler import select_group
from jengine.extras.imix.schedules import PythiaScheduler
from jengine.optim import OptimWrapper
from jengine.optim.transforms.clip import ClipByNorm
from jengine.runner import Runner


class Recorder(HookBase):
    """Record w, the norm of the gradients and the learning rate after each iteration."""

    def __init__(self):
        self.weights, self.norms, self.rates = [], [], []

    def after_train_iter(self):
        self.weights.append(float(self.trainer.state.params["w"]))
        self.norms.append(float(self.outputs["grad_norm"]) if "grad_norm" in self.outputs else None)
        self.rates.append(self.trainer.message_hub.get_scalar("train/lr").current())


def test_gradients_are_accumulated_and_the_remaining_ones_make_another_update(imix_runner):
    recorder = Recorder()
    runner = imix_runner(10, gradient_accumulation_steps=2, custom_hooks=[recorder])
    runner.train()
    # each update moves w half the way to 1: in iterations 1 and 3, counted from 0, and in the remaining one
    assert recorder.weights == pytest.approx([0.0, 0.5, 0.5, 0.75, 0.875])


def test_the_norm_of_the_gradients_is_logged_and_clipped(imix_runner):
    recorder = Recorder()
    imix_runner(4, optimizer_config=dict(grad_clip=dict(max_norm=0.5, norm_type=2)), custom_hooks=[recorder]).train()
    assert recorder.norms == pytest.approx([1.0, 0.75])  # w - 1 before clipping: w is 0, then 0.5 * 0.5
    assert recorder.weights[0] == pytest.approx(0.25, abs=1e-5)


def test_half_precision_works_with_accumulation_and_clipping(imix_runner):
    runner = imix_runner(
        8,
        fp16=dict(init_scale=8.0, growth_interval=100),
        gradient_accumulation_steps=2,
        optimizer_config=dict(grad_clip=dict(max_grad_l2_norm=0.5, clip_norm_mode="all", use_scale=True)),
    )
    state = runner.train()
    assert [type(hook).__name__ for hook in runner.hooks if isinstance(hook, OptimizerHook)] == ["Fp16OptimizerHook"]
    assert float(optax.tree.get(state.opt_state, "loss_scale")) == 8.0
    assert float(state.params["w"]) == pytest.approx(0.5, abs=1e-3)  # two updates, each clipped to 0.5 * 0.5
    assert state.params["w"].dtype == "float32"


def test_the_hook_returns_the_config_of_the_wrapper():
    hook = OptimizerHook(dict(max_grad_l2_norm=3, use_scale=False), gradient_accumulation_steps=4)
    assert hook.wrapper_options() == dict(type="OptimWrapper", accumulative_counts=4, clip_grad=dict(max_norm=3))
    assert Fp16OptimizerHook().wrapper_options()["loss_scale"] == "dynamic"
    with pytest.raises(ConfigError, match="`grad_clip.clip_norm_mode` must be 'all'.*, got 'question'"):
        OptimizerHook(dict(max_grad_l2_norm=3, clip_norm_mode="question"))
    with pytest.raises(ConfigError, match="did you mean 'use_scale'"):
        OptimizerHook(dict(max_grad_l2_norm=3, use_scales=True))
    with pytest.raises(TypeError, match="did you mean 'max_norm'"):
        OptimizerHook(dict(max_nrm=3))


def test_a_wrapper_with_the_settings_of_the_hook_is_taken(trainer):
    trainer.optim_wrapper = OptimWrapper(dict(type="SGD", lr=0.1))
    OptimizerHook().before_train(trainer)
    trainer.optim_wrapper.clip_grad = ClipByNorm(1.0)
    OptimizerHook(dict(max_norm=1)).before_train(trainer)


@pytest.mark.parametrize(("is_lr_accumulation", "steps"), [(True, 2), (False, 4)])
def test_schedules_step_after_each_update_or_each_iteration(imix_runner, is_lr_accumulation, steps):
    runner = imix_runner(
        8,
        gradient_accumulation_steps=2,
        is_lr_accumulation=is_lr_accumulation,
        lr_config=dict(policy="PythiaScheduler", lr_steps=[100], lr_ratio=0.1, warmup_iterations=10, end=20),
    )
    runner.train()
    assert runner.param_schedulers[0].last_step == steps
    assert isinstance(runner.param_schedulers[0], PythiaScheduler)


def test_the_recorded_rate_is_the_rate_of_the_iteration(imix_runner, tmp_path):
    recorder = Recorder()
    recorder.level = "LOW"
    runner = imix_runner(
        6,
        max_iter=3,
        lr_config=dict(policy="PythiaScheduler", lr_steps=[1, 2], lr_ratio=0.5),
        custom_hooks=[recorder],
        log_config=dict(period=1, hooks=[dict(type="JSONLoggerHook")]),
        checkpoint_config=dict(prefix="p", iter_period=1),
    )
    runner.train()
    # rates 0.5, 0.25, 0.125: w = 0.5, then 0.5 + 0.25 * 0.5, then 0.625 + 0.125 * 0.375
    assert recorder.weights == pytest.approx([0.5, 0.625, 0.671875])
    assert recorder.rates == [0.5, 0.25, 0.125]
    lines = (tmp_path / "run" / "training_status.json").read_text().splitlines()
    assert [json.loads(line)["lr"] for line in lines] == [0.5, 0.25, 0.125]
    # the checkpoint of iteration 0 includes its update
    from jengine import checkpoint

    saved = checkpoint.load(tmp_path / "run" / "p_iter0000000_model")
    assert float(jax.tree.leaves(saved.params)[0]) == 0.5


def test_the_largest_group_or_the_most_common_rate_is_recorded():
    assert select_group([1, 5, 2], [0.1, 0.2, 0.3]) == 1
    assert select_group([1, 1, 1], [0.1, 0.2, 0.2]) == 1
    assert select_group([4], [0.1]) == 0


def test_without_a_schedule_the_rate_is_constant(imix_runner):
    runner = imix_runner(4)
    runner.train()
    assert runner.optim_wrapper.get_lr() == {"lr": [0.5]}
    assert [type(hook).__name__ for hook in runner.hooks].count(LRSchedulerHook.__name__) == 1


def test_metrics_are_transferred_only_when_a_line_is_written(imix_runner):
    class Fetches(HookBase):
        default_level = PriorityStatus.LOWEST

        def __init__(self):
            self.seen = []

        def after_train_iter(self):
            self.seen.append(self.trainer.message_hub.fetches)

    fetches = Fetches()
    imix_runner(12, log_config=dict(period=3), custom_hooks=[dict(type="EMAIterHook"), fetches]).train()
    assert fetches.seen == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    "optimizer", [dict(type="SGD", lr=0.5, momentum=0.8), dict(type="Adam", lr=0.5, betas=(0.8, 0.9))]
)
def test_two_hooks_step_and_record_the_rate_and_the_momentum(imix_runner, optimizer):
    class RecordValues(HookBase):
        default_level = PriorityStatus.LOW

        def __init__(self):
            self.seen = []

        def after_train_iter(self):
            hub = self.trainer.message_hub
            self.seen.append([hub.get_scalar(f"train/{name}").current() for name in ("lr", "momentum")])

    recorder = RecordValues()
    runner = imix_runner(
        8,
        optimizer=optimizer,
        gradient_accumulation_steps=2,
        lr_config=dict(policy="StepLR", step_size=1, gamma=0.5, by_epoch=False),
        momentum_config=dict(policy="StepMomentum", step_size=1, gamma=0.25, by_epoch=False),
        custom_hooks=[recorder],
    )
    runner.train()
    # both step after each update, and the recorded values are those of the iteration
    assert recorder.seen == [[0.5, 0.8], [0.5, 0.8], [0.25, 0.2], [0.25, 0.2]]
    names = [type(hook).__name__ for hook in runner.hooks]
    assert names.index("LRSchedulerHook") < names.index("MomentumSchedulerHook") < names.index("PeriodicLogger")
    assert [scheduler.last_step for scheduler in runner.param_schedulers] == [2, 2]


def test_without_a_momentum_hook_the_lr_hook_steps_the_momentum(imix_cfg):
    arguments = from_imix(
        imix_cfg(6, optimizer=dict(type="SGD", lr=0.5, momentum=0.8), lr_config=dict(policy="StepLR", step_size=1))
    )
    arguments["param_scheduler"].append(dict(type="StepMomentum", step_size=1, gamma=0.5, by_epoch=False))
    runner = Runner(**arguments)
    runner.train()
    assert runner.optim_wrapper.get_momentum() == {"momentum": [0.2]}  # the last of three steps is past the end
