"""A user's script. `make types` checks it with mypy: each `type: ignore` must be an error, and nothing else may be one."""

from typing import Any, assert_type

import jax
import numpy as np
import optax
from flax import linen as nn
from ml_collections import ConfigDict

from jengine import Runner, load_config, load_model
from jengine.config import DATASETS, HOOKS
from jengine.data import ArrayDataset
from jengine.evaluation import Accuracy
from jengine.extras.metrics import ConfusionMatrix
from jengine.extras.serving import LoadedModel
from jengine.hooks import CheckpointHook, EMAHok, EMAHook, Hook, LoggerHook  # type: ignore[attr-defined]
from jengine.model import CrossEntropy, LinenModel
from jengine.optim import OptimWrapper
from jengine.parallel import Pjit
from jengine.runner import EvalCfg, LoaderCfg, OptimWrapperCfg, TrainCfg
from jengine.train import TrainState


class Net(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        return nn.Dense(10)(nn.relu(nn.Dense(self.width)(image)))


@DATASETS.register_module()
class Points(ArrayDataset):
    def __init__(self, n: int = 64) -> None:
        rng = np.random.default_rng(0)
        super().__init__(dict(image=rng.standard_normal((n, 8), np.float32), label=rng.integers(0, 10, n)))


@HOOKS.register_module()
class Print(Hook):
    def before_train(self, runner: Runner) -> None:
        runner.logger.info(str(runner.max_epochs))

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        if self.every_n_train_iters(runner, 2):
            print(runner.iter, runner.message_hub.get_scalar("train/loss"))


class Halve(Hook):
    def traced_grads(self, ctx: Any) -> Any:
        return ctx.replace(grads=jax.tree.map(lambda g: g * 0.5, ctx.grads))


def train() -> Runner:
    loader = dict(batch_size=16, dataset=Points())
    runner = Runner(
        model=LinenModel(Net(), CrossEntropy()),
        work_dir="work_dirs/types",
        train_dataloader=loader,
        val_dataloader=dict(batch_size=16, dataset=dict(type="Points")),
        train_cfg=dict(max_epochs=2, val_interval=1),
        val_cfg=dict(),
        val_evaluator=[Accuracy(), ConfusionMatrix(num_classes=10)],
        optim_wrapper=OptimWrapper(optax.adamw(1e-3)),
        default_hooks=dict(checkpoint=CheckpointHook(interval=1), logger=LoggerHook(interval=2), timer=None),
        custom_hooks=[Print(), EMAHook(momentum=0.01), Halve()],
        parallel=Pjit(),
    )
    assert_type(runner.train(), TrainState)
    assert_type(runner.validations, list[tuple[int, int, dict[str, float]]])
    model = load_model("work_dirs/types")
    assert_type(model, LoadedModel)
    model(dict(image=np.zeros((2, 8), np.float32)))
    return runner


SGD = dict(type="SGD", lr=0.1)


def accepted() -> None:
    cfg = load_config("configs/digits_cnn.py")
    Runner.from_cfg(cfg)
    Runner("model", "dir", train_cfg=cfg.train_cfg, train_dataloader=[dict(x=np.ones(2))], custom_hooks=Halve())
    Runner("model", "dir", train_cfg=ConfigDict(dict(max_epochs=2)), val_cfg={"fp16": True})
    Runner("model", "dir", train_cfg=TrainCfg(max_epochs=2), train_dataloader=LoaderCfg(batch_size=2, dataset=[1]))
    Runner("model", "dir", train_cfg={"max_iters": 2, "by_epoch": False}, optim_wrapper=dict(optimizer=SGD, clip_grad=None))
    Runner("model", "dir", val_cfg=dict(robust=dict(interval=2)), optim_wrapper=dict(a=dict(optimizer=SGD), b=optax.sgd(0.1)))


def refused() -> None:
    Runner("model", "dir", train_cfg=dict(max_epoch=2))  # type: ignore[arg-type]
    Runner("model", "dir", train_cfg=dict(max_epochs="2"))  # type: ignore[arg-type]
    Runner("model", "dir", train_cfg={"max_epoch": 2})  # type: ignore[arg-type]
    Runner("model", "dir", val_cfg=dict(fp_16=True))  # type: ignore[dict-item]
    Runner("model", "dir", optim_wrapper=dict(optimzer=SGD))  # type: ignore[dict-item]
    Runner("model", "dir", optim_wrapper=dict(optimizer=SGD, clip_grads=dict(max_norm=1)))  # type: ignore[dict-item]
    Runner("model", "dir", default_hooks=dict(logger=10))  # type: ignore[dict-item]
    TrainCfg(max_epoch=2)  # type: ignore[typeddict-unknown-key]
    LoaderCfg(batchsize=2)  # type: ignore[typeddict-unknown-key]
    EvalCfg(interval=2)  # type: ignore[typeddict-unknown-key]
    OptimWrapperCfg(optimizer=SGD, clip=2)  # type: ignore[typeddict-unknown-key]
    EMAHok()
