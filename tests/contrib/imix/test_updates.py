import json

import jax
import optax
import pytest

from jengine.contrib.imix import (
    Fp16OptimizerHook,
    HookBase,
    LRSchedulerHook,
    OptimizerHook,
    PriorityStatus,
    from_imix,
)
from jengine.contrib.imix.lr_scheduler import best_group
from jengine.contrib.imix.schedules import PythiaScheduler
from jengine.errors import ConfigError
from jengine.optim import OptimWrapper
from jengine.optim.transforms.clip import ClipByNorm
from jengine.runner import Runner


class Watch(HookBase):
    """Notes w after each iteration, and what the run has logged."""

    def __init__(self):
        self.weights, self.norms, self.rates = [], [], []

    def after_train_iter(self):
        self.weights.append(float(self.trainer.state.params["w"]))
        self.norms.append(float(self.outputs["grad_norm"]) if "grad_norm" in self.outputs else None)
        self.rates.append(self.trainer.message_hub.get_scalar("train/lr").current())


def test_gradients_are_accumulated_and_the_rest_makes_an_update_of_its_own(imix_runner):
    watch = Watch()
    runner = imix_runner(10, gradient_accumulation_steps=2, custom_hooks=[watch])
    runner.train()
    # w moves half the way to 1 in iterations 1 and 3, counted from 0, and with the one that is left
    assert watch.weights == pytest.approx([0.0, 0.5, 0.5, 0.75, 0.875])


def test_the_gradients_norm_is_logged_and_clipped(imix_runner):
    watch = Watch()
    imix_runner(4, optimizer_config=dict(grad_clip=dict(max_norm=0.5, norm_type=2)), custom_hooks=[watch]).train()
    assert watch.norms == pytest.approx([1.0, 0.75])  # w - 1 before clipping: w is 0, then 0.5 * 0.5
    assert watch.weights[0] == pytest.approx(0.25, abs=1e-5)


def test_half_precision_accumulates_and_clips_without_an_error(imix_runner):
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


def test_the_hook_says_what_the_wrapper_is():
    hook = OptimizerHook(dict(max_grad_l2_norm=3, use_scale=False), gradient_accumulation_steps=4)
    assert hook.wrapper_options() == dict(type="OptimWrapper", accumulative_counts=4, clip_grad=dict(max_norm=3))
    assert Fp16OptimizerHook().wrapper_options()["loss_scale"] == "dynamic"
    with pytest.raises(ConfigError, match="clip_norm_mode is 'all'"):
        OptimizerHook(dict(max_grad_l2_norm=3, clip_norm_mode="question"))
    with pytest.raises(ConfigError, match="did you mean 'use_scale'"):
        OptimizerHook(dict(max_grad_l2_norm=3, use_scales=True))
    with pytest.raises(ValueError, match="did you mean 'max_norm'"):
        OptimizerHook(dict(max_nrm=3))


def test_a_hook_that_the_wrapper_contradicts_is_an_error(trainer):
    trainer.optim_wrapper = OptimWrapper(dict(type="SGD", lr=0.1))
    OptimizerHook().before_train(trainer)
    with pytest.raises(ConfigError, match="asks for updates over 2 iterations"):
        OptimizerHook(gradient_accumulation_steps=2).before_train(trainer)
    with pytest.raises(ConfigError, match=r"clip_grad=\{'max_norm': 1\}"):
        OptimizerHook(dict(max_norm=1)).before_train(trainer)
    with pytest.raises(ConfigError, match="needs an AmpOptimWrapper, found OptimWrapper"):
        Fp16OptimizerHook().before_train(trainer)
    trainer.optim_wrapper.clip_grad = ClipByNorm(1.0)
    OptimizerHook(dict(max_norm=1)).before_train(trainer)


@pytest.mark.parametrize(("is_lr_accumulation", "steps"), [(True, 2), (False, 4)])
def test_schedules_step_with_each_update_or_with_each_iteration(imix_runner, is_lr_accumulation, steps):
    runner = imix_runner(
        8,
        gradient_accumulation_steps=2,
        is_lr_accumulation=is_lr_accumulation,
        lr_config=dict(policy="PythiaScheduler", lr_steps=[100], lr_ratio=0.1, warmup_iterations=10, end=20),
    )
    runner.train()
    assert runner.param_schedulers[0].last_step == steps
    assert isinstance(runner.param_schedulers[0], PythiaScheduler)


def test_the_rate_that_is_recorded_and_used_is_the_one_before_the_step(imix_runner, tmp_path):
    watch = Watch()
    watch.level = "LOW"
    runner = imix_runner(
        6,
        max_iter=3,
        lr_config=dict(policy="PythiaScheduler", lr_steps=[1, 2], lr_ratio=0.5),
        custom_hooks=[watch],
        log_config=dict(period=1, hooks=[dict(type="JSONLoggerHook")]),
        checkpoint_config=dict(prefix="p", iter_period=1),
    )
    runner.train()
    # rates 0.5, 0.25, 0.125: w = 0.5, then 0.5 + 0.25 * 0.5, then 0.625 + 0.125 * 0.375
    assert watch.weights == pytest.approx([0.5, 0.625, 0.671875])
    assert watch.rates == [0.5, 0.25, 0.125]
    rows = [json.loads(line) for line in (tmp_path / "run" / "training_status.json").read_text().splitlines()]
    assert [row["lr"] for row in rows] == [0.5, 0.25, 0.125]
    # the checkpoint of iteration 0 holds its update
    from jengine import checkpoint

    saved = checkpoint.load(tmp_path / "run" / "p_iter0000000_model")
    assert float(jax.tree.leaves(saved.params)[0]) == 0.5


def test_the_group_whose_rate_stands_for_all():
    assert best_group([1, 5, 2], [0.1, 0.2, 0.3]) == 1
    assert best_group([1, 1, 1], [0.1, 0.2, 0.2]) == 1
    assert best_group([4], [0.1]) == 0


def test_no_schedule_is_no_work(imix_runner):
    runner = imix_runner(4)
    runner.train()
    assert runner.optim_wrapper.get_lr() == {"lr": [0.5]}
    assert [type(hook).__name__ for hook in runner.hooks].count(LRSchedulerHook.__name__) == 1


def test_numbers_leave_the_device_only_where_a_line_is_due(imix_runner):
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
def test_rate_and_momentum_are_stepped_and_recorded_each_by_its_hook(imix_runner, optimizer):
    class Used(HookBase):
        default_level = PriorityStatus.LOW

        def __init__(self):
            self.seen = []

        def after_train_iter(self):
            hub = self.trainer.message_hub
            self.seen.append([hub.get_scalar(f"train/{name}").current() for name in ("lr", "momentum")])

    used = Used()
    runner = imix_runner(
        8,
        optimizer=optimizer,
        gradient_accumulation_steps=2,
        lr_config=dict(policy="StepLR", step_size=1, gamma=0.5, by_epoch=False),
        momentum_config=dict(policy="StepMomentum", step_size=1, gamma=0.25, by_epoch=False),
        custom_hooks=[used],
    )
    runner.train()
    # both step with each update, and what is recorded is what the iteration has used
    assert used.seen == [[0.5, 0.8], [0.5, 0.8], [0.25, 0.2], [0.25, 0.2]]
    names = [type(hook).__name__ for hook in runner.hooks]
    assert names.index("LRSchedulerHook") < names.index("MomentumSchedulerHook") < names.index("PeriodicLogger")
    assert [scheduler.last_step for scheduler in runner.param_schedulers] == [2, 2]


def test_without_a_hook_of_its_own_the_momentum_is_stepped_with_the_rate(imix_cfg):
    arguments = from_imix(
        imix_cfg(6, optimizer=dict(type="SGD", lr=0.5, momentum=0.8), lr_config=dict(policy="StepLR", step_size=1))
    )
    arguments["param_scheduler"].append(dict(type="StepMomentum", step_size=1, gamma=0.5, by_epoch=False))
    runner = Runner(**arguments)
    runner.train()
    assert runner.optim_wrapper.get_momentum() == {"momentum": [0.2]}  # the last of three steps is past the end
