"""What the names of iMIX refuse: a call, its error, and the words that must be in the message."""

import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.extras.imix import (
    AutogradProfilerHook,
    CheckPointHook,
    EMAEpochHook,
    EMAIterHook,
    EvaluateHook,
    Fp16OptimizerHook,
    HookBase,
    OptimizerHook,
    PeriodicLogger,
    from_imix,
    register_hooks,
)
from jengine.extras.imix.evaluate import select_metrics
from jengine.hooks import Hook
from jengine.hooks.hook_list import HookList
from jengine.optim import OptimWrapper, build_optim_wrapper
from tests.refusals import check_row


def convert(**changes):
    cfg = {
        "model": dict(type="LinenModel", module=dict(type="SmallCNN"), loss=dict(type="CrossEntropy")),
        "work_dir": "run",
        "train_data": dict(samples_per_gpu=8, workers_per_gpu=2, data=dict(type="Digits")),
        "optimizer": dict(type="SGD", lr=0.1),
        "total_epochs": 3,
    }
    from_imix(cfg | changes)


def optimizer(**settings):
    OptimWrapper(dict(lr=0.1, **settings))


def check_wrapper(hook, trainer):
    trainer.optim_wrapper = OptimWrapper(dict(type="SGD", lr=0.1))
    hook.before_train(trainer)


def evaluate_without_validation(imix_runner):
    runner = imix_runner(4)
    runner.register_hook(EvaluateHook())
    runner.train()


def build_by_names(path):
    """Build an optimizer by a list of weights of another model."""
    (path / "weight_name.json").write_text('["encoder.layer.0.query.weight"]')
    cfg = dict(
        optimizer=dict(type="AdamW", lr=1e-3, training_encoder_lr_multiply=1, image_lr=1e-5),
        constructor="BertOptimizerConstructor",
        paramwise_cfg=dict(language_weights_file=str(path / "weight_name.json")),
    )
    build_optim_wrapper({"fc": {"kernel": np.ones((2, 2)), "bias": np.ones(2)}}, cfg)


def before_train_of_another(self, runner):
    """Take an argument that iMIX does not pass."""


FROM_1 = (ConfigError, "integer", "at least 1")
REFUSED = {
    # hooks
    "a period of 0 epochs": (lambda: CheckPointHook(epoch_period=0), *FROM_1, "epoch_period`"),
    "a period of 0 iterations": (lambda: EvaluateHook(eval_iter_period=0), *FROM_1, "eval_iter_period`"),
    "a misspelt metric": (lambda: select_metrics({"ndcg": 0.4}, ["ndgc"]), KeyError, "'ndgc'", "did you mean 'ndcg'"),
    "an evaluation without a validation": (evaluate_without_validation, ConfigError, "val_dataloader", "val_cfg", "val_evaluator"),
    "a decay of 1": (lambda: EMAIterHook(decay=1), ConfigError, "decay`", "[0, 1)", "got 1"),
    "averages of epochs alone": (lambda trainer: EMAEpochHook().before_train(trainer), ConfigError, "EMAIterHook"),
    "a predicate that is a switch": (lambda: AutogradProfilerHook(True, "traces", use_cuda=False), TypeError, "enable_predicate`", "function", "got True"),
    "a hook of the engine": (lambda: register_hooks(object(), [Hook()]), AssertionError, "HookBase", "got Hook"),
    "a method with arguments": (lambda: type("Wrong", (HookBase,), {"before_train": before_train_of_another}), TypeError, "Wrong.before_train", "except self", "'runner'"),
    "a level and a priority": (lambda: HookList().register(dict(type="TextLoggerHook", priority=30, level=20)), ConfigError, "both", "30 and 20"),
    # loggers
    "a logger every 2.5 iterations": (lambda: PeriodicLogger([], 2.5), TypeError, "integer", "at least 1", "got 2.5"),
    "a logger every 0 iterations": (lambda: PeriodicLogger([], 0), *FROM_1, "got 0"),
    "a misspelt writer": (lambda: PeriodicLogger([dict(type="JSONLogger")]), KeyError, "did you mean 'JSONLoggerHook'"),
    "an object as a writer": (lambda: PeriodicLogger([object()]), TypeError, "LogBufferWriter"),
    # configs
    "a hook that is no list": (lambda: convert(custom_hooks=dict(type="TextLoggerHook")), AssertionError, "`custom_hooks`", "list", "got dict"),
    **{
        f"{name} in a text": (lambda name=name: convert(**{name: "no"}), TypeError, f"`{name}`", "True or False", "got 'no'")
        for name in ("is_run_eval", "is_lr_accumulation", "fp16")
    },
    "an unknown mode of clipping": (lambda: convert(optimizer_config=dict(grad_clip=dict(max_grad_l2_norm=1, mode="all"))), ConfigError, "optimizer_config"),
    # optimizers
    "a list of weights of another model": (lambda tmp_path: build_by_names(tmp_path), ConfigError, "'fc.kernel'", "weight_name.json"),
    "a misspelt warm-up": (lambda: optimizer(type="BertAdam", schedule="warmup_liner"), ValueError, "'warmup_linear'", "got 'warmup_liner'"),
    "a warm-up of 100": (lambda: optimizer(type="BertAdam", warmup=100), ValueError, "[0, 1) or -1", "got 100"),
    "a warm-up of 0 steps": (lambda: optimizer(type="BertAdam", t_total=0), ValueError, "t_total`", "-1", "at least 1"),
    "a decay below 0": (lambda: optimizer(type="TansformerAdamW", weight_decay=-1.0), ValueError, "weight_decay`", "at least 0"),
    "another accumulation": (lambda trainer: check_wrapper(OptimizerHook(gradient_accumulation_steps=2), trainer), ConfigError, "accumulative_counts=2", "got 1 and None"),
    "another clipping": (lambda trainer: check_wrapper(OptimizerHook(dict(max_norm=1)), trainer), ConfigError, "clip_grad={'max_norm': 1}"),
    "no loss scale": (lambda trainer: check_wrapper(Fp16OptimizerHook(), trainer), ConfigError, "AmpOptimWrapper", "loss scale", "got OptimWrapper"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_imix_has_not_is_refused(row, request):
    check_row(request, *row)
