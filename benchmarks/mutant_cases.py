"""Define what is mutated: the configs, shrunk to train in a moment, and documented calls with
their arguments.
"""

import functools
import pathlib
import unittest.mock
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jengine import data, evaluation, hooks, model, optim
from jengine import logging as log
from jengine import parallel as sharding
from jengine import train as averaging
from jengine.config import load_config, resolve
from jengine.data import ArrayDataset
from jengine.extras import diagnose, drawing
from jengine.extras.weights import load_pretrained
from jengine.model import FunctionalModel
from jengine.optim.schedules import build_param_schedulers

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
_SMALL = {  # networks that compile quickly
    "digits_cnn": {"model.module.widths": (4, 8)},
    "digits_vit": {"model.module.width": 8, "model.module.depth": 1, "model.module.heads": 2},
    "finetune_vit": {"model.model.module.width": 8, "model.model.module.depth": 1},
    "imix_fp16": {
        "model.module.widths": (4, 8),
        "max_iter": 4,
        "eval_iter_period": 2,
        "checkpoint_config.iter_period": 2,
        "lr_config.max_iters": 4,
        "lr_config.warmup_iters": 2,
        "momentum_config.end": 3,
    },
    "imix_style": {"model.module.widths": (4, 8)},
    "lm": {
        "model.module.width": 16,
        "model.module.depth": 1,
        "model.module.heads": 2,
        "model.module.mlp_width": 16,
    },
}
Config = dict[str, Any]


def linear_config() -> Config:
    """Return a config as a script builds it: plain functions, arrays in memory, and many
    documented settings.
    """

    def predict(params, batch):
        return batch["x"] @ params["w"] + params["b"]

    def cross_entropy(predictions, batch):
        return -jnp.take_along_axis(jax.nn.log_softmax(predictions), batch["label"][:, None], 1)[
            :, 0
        ]

    data = {
        "x": np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32),
        "label": np.arange(16) % 3,
    }
    dataset = ArrayDataset(
        {
            name: array.astype(np.float32 if name == "x" else np.int32)
            for name, array in data.items()
        }
    )
    return dict(
        model=FunctionalModel(
            init=lambda: {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)},
            loss=lambda params, batch: cross_entropy(predict(params, batch), batch),
            predict=predict,
        ),
        train_dataloader=dict(
            batch_size=4,
            dataset=dataset,
            sampler=dict(type="DefaultSampler", shuffle=True, seed=3),
            drop_last=True,
            num_threads=0,
            prefetch_factor=2,
            device_prefetch=1,
        ),
        val_dataloader=dict(
            batch_size=4, dataset=dataset, sampler=dict(type="DefaultSampler", shuffle=False)
        ),
        train_cfg=dict(
            type="EpochBasedTrainLoop", max_epochs=4, val_begin=1, val_interval=1, steps_per_call=1
        ),
        val_cfg=dict(type="ValLoop", fp16=False),
        val_evaluator=[
            dict(type="Accuracy", topk=(1, 2), label="label"),
            dict(type="MeanLoss", loss=cross_entropy, prefix="nll"),
        ],
        optim_wrapper=dict(
            type="OptimWrapper",
            optimizer=dict(type="SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
            accumulative_counts=2,
            clip_grad=dict(max_norm=1.0, norm_type=2),
            paramwise_cfg=dict(
                bias_lr_mult=2.0, bias_decay_mult=0.0, custom_keys={"w": dict(lr_mult=0.5)}
            ),
        ),
        param_scheduler=[
            dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end=4),
            dict(type="MultiStepLR", milestones=[2, 3], gamma=0.1, by_epoch=True),
            dict(type="CosineAnnealingMomentum", T_max=4, eta_min=0.5),
        ],
        default_hooks=dict(
            timer=dict(type="IterTimerHook"),
            logger=dict(type="LoggerHook", interval=1, ignore_last=False),
            checkpoint=dict(
                type="CheckpointHook",
                interval=1,
                by_epoch=True,
                max_keep_ckpts=2,
                save_best="accuracy/top1",
                rule="greater",
                published_keys=["meta", "state_dict"],
                filename_tmpl="ep_{}",
            ),
        ),
        custom_hooks=[
            dict(type="EMAHook", momentum=0.1, update_buffers=True, priority="NORMAL"),
            dict(
                type="EarlyStoppingHook",
                monitor="accuracy/top1",
                patience=3,
                min_delta=0.01,
                rule="greater",
            ),
            dict(type="NumericsGuardHook"),
            dict(type="CheckInvalidLossHook", interval=1),
        ],
        log_processor=dict(
            window_size=10, by_epoch=True, custom_cfg=[dict(data_src="loss", method_name="mean")]
        ),
        visualizer=dict(type="LocalVisualizer", vis_backends=[dict(type="LocalVisBackend")]),
        randomness=dict(seed=0),
        auto_scale_lr=dict(enable=True, base_batch_size=8),
        log_level="INFO",
        experiment_name="linear",
        parallel=dict(type="SingleDevice", device=0),
        precision=dict(compute="float32"),
        resume=False,
    )


def several_optimizers() -> Config:
    """Return the config of a run with two optimizers, a chunk of steps, and AMP."""

    def loss(params, batch):
        return jnp.square(batch["x"] @ params["a"]["w"] - params["b"]["w"])

    adam = dict(type="Adam", lr=1e-3, betas=(0.9, 0.99))
    return dict(
        model=FunctionalModel(
            init=lambda: {"a": {"w": jnp.ones(2)}, "b": {"w": jnp.ones(())}},
            loss={"a": loss, "b": loss},
        ),
        train_dataloader=dict(
            batch_size=4, dataset=ArrayDataset({"x": np.ones((16, 2), np.float32)})
        ),
        train_cfg=dict(
            by_epoch=False, max_iters=4, phases=[("a", 2), ("b", 1)], on_recompile="warn"
        ),
        optim_wrapper=dict(
            a=dict(optimizer=adam, clip_grad=dict(type="value", clip_value=1.0)),
            b=dict(type="OptimWrapper", optimizer=adam),
        ),
        param_scheduler=dict(
            a=dict(type="PolyLR", power=0.9, eta_min=0.0, by_epoch=False),
            b=[dict(type="ExponentialLR", gamma=0.9, by_epoch=False)],
        ),
        default_hooks=dict(
            logger=dict(type="LoggerHook", interval=1),
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=2),
        ),
        randomness=dict(seed=1),
    )


@functools.cache
def api_calls() -> dict[str, tuple[Callable[..., Any], Config]]:
    """Return documented calls by name: what is called, and its arguments, as on the pages."""
    dataset = ArrayDataset({"x": np.ones((16, 2), np.float32)})
    params = {"w": jnp.ones((2, 3)), "norm": {"scale": jnp.ones(3), "bias": jnp.ones(3)}}
    adam = dict(type="AdamW", lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01)
    wrapper = optim.build_optim_wrapper(params, dict(optimizer=adam))
    schedulers = [
        dict(type="LinearLR", start_factor=0.1, end=2),
        dict(type="StepLR", step_size=2, gamma=0.1),
    ]
    calls = [
        (
            data.DataLoader,
            dict(
                dataset=dataset, batch_size=4, drop_last=True, num_workers=0, num_batch_per_epoch=2
            ),
        ),
        (data.DefaultSampler, dict(dataset=dataset, shuffle=True, seed=1, round_up=True)),
        (
            data.build_dataloader,
            dict(cfg_or_loader=dict(dataset="Digits", batch_size=4), train=True, seed=1),
        ),
        (data.ArrayDataset, dict(arrays={"x": np.ones((4, 2))}, metainfo=dict(classes=["a", "b"]))),
        (
            optim.OptimWrapper,
            dict(optimizer=adam, accumulative_counts=2, clip_grad=dict(max_norm=1.0, norm_type=2)),
        ),
        (
            optim.AmpOptimWrapper,
            dict(optimizer=adam, loss_scale=dict(init_scale=8.0), dtype="float16"),
        ),
        (optim.AdamW, dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01)),
        (
            functools.partial(optim.build_optim_wrapper, params),
            dict(
                cfg=dict(
                    type="OptimWrapper",
                    optimizer=adam,
                    accumulative_counts=2,
                    clip_grad=dict(max_norm=1.0),
                    constructor="DefaultOptimWrapperConstructor",
                    paramwise_cfg=dict(
                        norm_decay_mult=0.0, custom_keys={"w": dict(lr_mult=0.1, decay_mult=0.5)}
                    ),
                )
            ),
        ),
        (
            build_param_schedulers,
            dict(cfg=schedulers, wrapper=wrapper, max_epochs=4, max_iters=8, epoch_length=2),
        ),
        (
            hooks.CheckpointHook,
            dict(interval=1, by_epoch=True, max_keep_ckpts=3, save_best="acc", rule="greater"),
        ),
        (
            hooks.EMAHook,
            dict(ema_type="StochasticWeightAverage", begin_epoch=1, evaluate_on_origin=True),
        ),
        (hooks.LoggerHook, dict(interval=5, ignore_last=False, out_suffix=[".log"])),
        (
            hooks.EarlyStoppingHook,
            dict(monitor="acc", rule="less", min_delta=0.1, patience=2, stopping_threshold=0.5),
        ),
        (diagnose.ProfilerHook, dict(by_epoch=False, profile_times=2)),
        (evaluation.Accuracy, dict(topk=(1, 5), label="label", prefix="acc", ignore_index=255)),
        (
            evaluation.Evaluator,
            dict(metrics=[dict(type="Accuracy"), dict(type="MeanLoss", loss=optax.l2_loss)]),
        ),
        (
            model.CrossEntropy,
            dict(label="label", label_smoothing=0.1, output="logits", ignore_index=255),
        ),
        (
            model.LinenModel,
            dict(
                module=dict(type="SmallCNN", num_classes=3, widths=(4, 8)),
                loss=dict(type="CrossEntropy"),
                inputs="image",
                rngs=["dropout"],
                sown_losses={"balance": 0.1},
            ),
        ),
        (averaging.ExponentialMovingAverage, dict(momentum=0.1, interval=2)),
        (
            log.LogProcessor,
            dict(
                window_size=5, custom_cfg=[dict(data_src="loss", method_name="max", window_size=2)]
            ),
        ),
        (
            drawing.LocalVisualizer,
            dict(vis_backends=[dict(type="LocalVisBackend")], save_dir="vis", zoom=2),
        ),
        (
            sharding.Pjit,
            dict(
                mesh=dict(data=1, fsdp=1),
                rules=[("w", (None, "fsdp"))],
                fsdp_min_size=4,
                strict=True,
            ),
        ),
        (sharding.DataParallel, dict(impl="shard_map", mesh=dict(data=1), devices=1)),
        (
            functools.partial(
                load_pretrained, {"v": np.ones((2, 3)), "norm": params["norm"]}, params
            ),
            dict(
                rename=[("v", "w")],
                strict=False,
                exclude=["norm"],
                interpolation="bicubic",
            ),
        ),
    ]
    return {
        getattr(getattr(call, "func", call), "__name__", ""): (call, arguments)
        for call, arguments in calls
    }


@functools.cache
def load_bases() -> dict[str, Config]:
    """Return the unchanged configs and arguments of calls by name; each trains for a moment."""
    bases = {name: {**arguments} for name, (_, arguments) in api_calls().items()}
    for file in sorted(CONFIGS.glob("*.py")):
        # `build` converts the mutant
        with unittest.mock.patch("jengine.extras.imix.from_imix", lambda cfg: cfg):
            cfg = resolve(load_config(f"{file}:toy" if file.stem == "lm" else str(file)))
        for path, value in _SMALL.get(file.stem, {}).items():
            set_value(cfg, path.split("."), value)
        if file.stem.startswith("imix"):
            bases[file.stem] = cfg
            continue
        for mode in ("train", "val", "test"):
            if f"{mode}_dataloader" in cfg:
                cfg[f"{mode}_dataloader"] = {**cfg[f"{mode}_dataloader"], "num_batch_per_epoch": 2}
        cfg["train_cfg"]["val_interval"] = 2 if "max_iters" in cfg["train_cfg"] else 1
        bases[file.stem] = cfg
    return {**bases, "linear": linear_config(), "several": several_optimizers()}


def get_value(cfg: Any, path: Any) -> Any:
    """Return the value at a path of keys and indices."""
    for key in path:
        cfg = cfg[key]
    return cfg


def set_value(cfg: Any, path: Any, value: Any) -> None:
    """Set the value at a path of keys and indices."""
    get_value(cfg, path[:-1])[path[-1]] = value
