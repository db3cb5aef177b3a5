"""Refuse bad configs in the constructor of the Runner: before a compile, and without a trace in the work dir.

Most cases come from the annotations of the registered classes: for each argument a value of another type, and one
outside of its range. A table adds what annotations cannot express.
"""

import collections.abc
import math
import types
import typing

import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config import registry
from jengine.config.annotations import Range, parameters_of
from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from jengine.runner import Runner
from jengine.train import compilation_counter

GIVEN = {
    "runner",
    "dataloader",
    "evaluator",
    "optimizer",
    "dataset",
    "save_dir",
    "self",
}  # by the engine, not in configs
VALID = {int: 1, float: 0.5, bool: True, str: "acc", typing.Any: {}, collections.abc.Callable: print}
WRONG_TYPE = {int: "many", float: "large", bool: "no", str: 3}


def config(work_dir, **changes):
    model = FunctionalModel(
        init=lambda: {"w": jnp.zeros(())},
        loss=lambda params, batch: params["w"],
        predict=lambda params, batch: batch["x"],
    )
    data = ArrayDataset({"x": np.zeros((8, 2)), "label": np.zeros(8, np.int32)})
    cfg = dict(
        model=model,
        work_dir=work_dir,
        train_dataloader=dict(batch_size=4, dataset=data),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        val_dataloader=dict(batch_size=4, dataset=data),
        val_cfg=dict(),
        val_evaluator=dict(type="Accuracy"),
    )
    for path, value in changes.items():
        *parents, key = path.split("__")
        section = cfg
        for parent in parents:
            section = section[parent]
        section[key] = value
    return cfg


def alternatives(annotation):
    """Return the annotations of a union, else the annotation itself."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def valid_value(annotation):
    annotation = alternatives(annotation)[0]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return valid_value(args[0])
    if origin is typing.Literal:
        return args[0]
    if origin is tuple and args[-1:] != (...,):
        return [valid_value(arg) for arg in args]
    if origin in (collections.abc.Sequence, tuple):
        return [valid_value(args[0])]
    return VALID.get(origin or annotation, {})


def bad_values(annotation):
    """Yield a value of a wrong type, and for a number with bounds or a choice one outside of them."""
    kinds = [
        (typing.get_args(a) if typing.get_origin(a) is typing.Annotated else (a,)) for a in alternatives(annotation)
    ]
    types_of = {typing.get_origin(kind[0]) or kind[0] for kind in kinds}
    if types_of & {typing.Any, object} or any(typing.get_origin(kind[0]) is type for kind in kinds):
        return
    if typing.Literal in types_of and str not in types_of:
        yield "nonsense"
    elif len(types_of - {type(None)}) == 1:
        yield next((WRONG_TYPE[kind] for kind in types_of if kind in WRONG_TYPE), 5)
    else:
        yield object()
    for kind in kinds:
        for bound in kind[1:]:
            if isinstance(bound, Range):
                yield outside(bound)


def outside(bound):
    if bound.gt is not None:
        return bound.gt
    if bound.ge is not None:
        return bound.ge - 1 if bound.ge else -2  # -1 may stand for "never"
    return math.nan


def generated_cases():
    """Yield (name, changes of the config): one for each bad value of each argument of each registered class."""
    places = {
        registry.HOOKS: "custom_hooks", registry.OPTIMIZERS: "optim_wrapper__optimizer",
        registry.PARAM_SCHEDULERS: "param_scheduler", registry.DATA_SAMPLERS: "train_dataloader__sampler",
        registry.LOOPS: "train_cfg", registry.METRICS: "val_evaluator", registry.VISUALIZERS: "visualizer",
        registry.LOG_PROCESSORS: "log_processor", registry.STRATEGIES: "parallel",
        registry.DATASETS: "train_dataloader__dataset",
    }  # fmt: skip
    for of, place in places.items():
        for entry_name in list(of):
            entry = of.get(entry_name)
            if not (entry.__module__ or "").startswith("jengine"):
                continue
            parameters = {n: p for n, p in parameters_of(entry).items() if n not in GIVEN}
            section = "val_cfg" if entry_name == "ValLoop" else place
            if entry_name == "TestLoop":
                continue
            needed = {n: valid_value(p.annotation) for n, p in parameters.items() if p.default is p.empty}
            needed = {n: v for n, v in needed.items() if parameters[n].kind is not parameters[n].VAR_KEYWORD}
            if "param_name" in needed:
                needed["param_name"] = "lr"
            for name, parameter in parameters.items():
                if parameter.annotation is parameter.empty or parameter.kind is parameter.VAR_KEYWORD:
                    continue
                for value in bad_values(parameter.annotation):
                    cfg = {"type": entry_name, **needed, name: value}
                    yield f"{entry_name}.{name}={value!r}", {section: [cfg] if of is registry.HOOKS else cfg}


class MisspeltStage(Hook):
    def after_train_itr(self, runner, batch_idx, data_batch=None, outputs=None):
        """Never be called."""


SGD, STEP = dict(type="SGD", lr=0.1), dict(type="StepLR", step_size=1)
BY_HAND = [
    dict(train_cfg=dict(max_epochs=2, dynamic_intervals=[(1, 0)])),
    dict(train_cfg=dict(max_epochs=2, dynamic_intervals=[3])),
    dict(train_cfg=dict(max_epochs=2, dynamic_intervals=[(1, 2, 3)])),
    dict(train_cfg=dict(by_epoch=True, max_iters=10)),
    dict(train_cfg=dict(by_epoch=False, max_epochs=2)),
    dict(train_cfg=dict(by_epoch="no", max_epochs=2)),
    dict(train_cfg=dict(max_epochs=True)),
    dict(train_cfg=dict(max_epochs="2")),
    dict(train_cfg=dict(by_epoch=True)),
    dict(train_cfg=dict(by_epoch=True, max_epochs=2, max_epoch=2)),
    dict(train_cfg=dict(type="EpochBasedTrainLop", max_epochs=2)),
    dict(train_cfg=dict(type="EpochBasedTrainLoop", by_epoch=True, max_epochs=2)),
    dict(train_cfg=5),
    dict(train_cfg=None),
    dict(val_cfg=5),
    dict(val_cfg=dict(fp61=True)),
    dict(val_cfg=None),
    dict(val_evaluator=None),
    dict(val_evaluator=5),
    dict(val_evaluator="Acuracy"),
    dict(val_evaluator=[]),
    dict(val_evaluator=dict(type="Accuracy", topk=(1, 1))),
    dict(val_evaluator=[dict(type="Accuracy"), dict(type="Accuracy")]),
    dict(train_dataloader=5),
    dict(train_dataloader="Digits"),
    dict(train_dataloader=dict(batch_size=4)),
    dict(train_dataloader__batch_size=True),
    dict(train_dataloader__batch_sise=4),
    dict(train_dataloader__pin_memory=True),
    dict(train_dataloader__dataset="Digit"),
    dict(train_dataloader__dataset=7),
    dict(val_dataloader__dataset=None),
    dict(train_dataloader__sampler=True),
    dict(train_dataloader__dataset=dict(type="Digits", split="validation")),
    dict(train_dataloader__dataset=dict(split="train")),
    dict(train_dataloader__dataset=dict(type="TransformedDataset", dataset=dict(type="Digit"))),
    dict(train_dataloader__sampler="DefaultSample"),
    dict(train_dataloader__sampler=dict(type="DefaultSampler", shufle=True)),
    dict(val_dataloader__num_workers=-1),
    dict(parallel="Replicas"),
    dict(parallel=5),
    dict(parallel=dict(type="DataParallel", mesh=dict(dta=8))),
    dict(parallel=dict(type="SingleDevice", device=99)),
    dict(precision="flaot16"),
    dict(optim_wrapper=5),
    dict(optim_wrapper="SGD"),
    dict(optim_wrapper=dict(optimizer=5)),
    dict(optim_wrapper=dict(optimizer=dict(lr=0.1))),
    dict(optim_wrapper=dict(optimizer="SGDD")),
    dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=math.inf))),
    dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=math.nan))),
    dict(optim_wrapper=dict(optimizer=dict(type="adamw", learning_rate=math.inf))),
    dict(optim_wrapper=dict(optimizer=dict(type="adamw", learning_rate=1e-3, b1=math.nan))),
    dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr="0.1"))),
    dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=True))),
    dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, nesterov="False", momentum=0.9))),
    dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, nesterov=True))),
    dict(optim_wrapper=dict(optimizer=SGD, accumulative_counts=True)),
    dict(optim_wrapper=dict(optimizer=SGD, accumulative_counts=0)),
    dict(optim_wrapper=dict(optimizer=SGD, clip_grad=dict())),
    dict(optim_wrapper=dict(optimizer=SGD, clip_grad=dict(max_norm=math.nan))),
    dict(optim_wrapper=dict(optimizer=SGD, clip_grad=dict(max_nrom=1.0))),
    dict(optim_wrapper=dict(optimizer=SGD, paramwise_cfg=dict(bias_lr_mul=2.0))),
    dict(optim_wrapper=dict(optimizer=SGD, paramwise_cfg=5)),
    dict(optim_wrapper=dict(optimizer=SGD, paramwise_cfg=dict(custom_keys={"w": {"lr_multt": 0}}))),
    dict(optim_wrapper=dict(a=dict(optimizer=SGD, paramwise_cfg=dict(custom_keys={"w": {"lr_multt": 0}})))),
    dict(optim_wrapper=dict(optimizer=SGD, constructor={"a": 1})),
    dict(optim_wrapper=dict(optimizer=SGD, constructor="DefaultConstructor")),
    dict(optim_wrapper=dict(type="AmpOptimWraper", optimizer=SGD)),
    dict(optim_wrapper=dict(type="AmpOptimWrapper", optimizer=SGD, dtype="half")),
    dict(optim_wrapper=dict(type="AmpOptimWrapper", optimizer=SGD, loss_scale="dynamc")),
    dict(optim_wrapper=dict(type="AmpOptimWrapper", optimizer=SGD, loss_scale=dict(growth_interval={}))),
    dict(param_scheduler=5),
    dict(param_scheduler="StepLRR"),
    dict(param_scheduler=dict(step_size=1)),
    dict(param_scheduler=[STEP, dict(type="StepLR", step_size=0)]),
    dict(param_scheduler=dict(type="MultiStepLR", milestones=3)),
    dict(param_scheduler=dict(type="StepMomentum", step_size=1, gama=0.1)),
    dict(param_scheduler=dict(main=STEP)),
    dict(custom_hooks=5),
    dict(custom_hooks="EMAHok"),
    dict(custom_hooks=[5]),
    dict(custom_hooks=[dict(type="EMAHook", momentum=2.0)]),
    dict(custom_hooks=[dict(type="EMAHook", ema_type="Exponential")]),
    dict(custom_hooks=[dict(type="EMAHook", priority="HIGHST")]),
    dict(custom_hooks=[dict(type="EarlyStoppingHook", monitor="acuracy/top1")]),
    dict(custom_hooks=[dict(type="EarlyStoppingHook", monitor="unknown_quantity")]),
    dict(custom_hooks=[MisspeltStage()]),
    dict(custom_hooks=[dict(type="CheckpointHook", interval=1)]),
    dict(custom_hooks=[dict(type="CheckpointHook", interval=5, max_keep_ckpts=1)]),
    dict(default_hooks=5),
    dict(default_hooks=dict(tmier=None)),
    dict(default_hooks=dict(logger=dict(type="LoggerHok"))),
    dict(default_hooks=dict(logger=dict(type="LoggerHook", interval=True))),
    dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", save_best="acc/top1", rule="greater"))),
    dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", save_best=["accuracy/top1", "accuracy/top5"]))),
    dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", published_keys=["parms"]))),
    dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", published_keys="state_dcit"))),
    dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", by_epoch="False"))),
    dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", keep_best=2))),
    dict(randomness=dict(sed=1)),
    dict(randomness=dict(seed="one")),
    dict(randomness=dict(seed=10**30)),
    dict(randomness=dict(seed=-1)),
    dict(train_cfg=dict(max_epochs=10**30)),
    dict(train_cfg=dict(by_epoch=False, max_iters=2**31)),
    dict(param_scheduler=dict(type=0.5, convert_to_iter_based=True)),
    dict(default_hooks=dict(checkpoint=dict(type="CheckpointHook", published_keys=["weights_only"]))),
    dict(log_processor=dict(custom_cfg=[dict(data_src=[], method_name="max")])),
    dict(model=dict(type="LinenModel", module=dict(type=[]), loss=dict(type="CrossEntropy"))),
    dict(auto_scale_lr=dict(base_batch_size=0)),
    dict(auto_scale_lr=dict(enable="yes", base_batch_size=4)),
    dict(auto_scale_lr=5),
    dict(log_level="INFOO"),
    dict(experiment_name=5),
    dict(experiment_name="one\ntwo"),
    dict(resume=5),
    dict(resume="/nowhere/epoch_1"),
    dict(load_from=5),
    dict(load_from=dict(path="/nowhere/epoch_1")),
    dict(load_from=dict(pth="/nowhere/epoch_1")),
    dict(resume_policy=dict(optimizer="config")),
    dict(log_processor=5),
    dict(log_processor="LogProcesor"),
    dict(log_processor=dict(windowsize=5)),
    dict(log_processor=dict(custom_cfg=[dict(data_src="loss", method_name="maxx")])),
    dict(visualizer=5),
    dict(visualizer="Visualiser"),
    dict(visualizer=dict(vis_backends=["LocalVisBackendd"])),
    dict(visualizer=dict(vis_backends=[dict(type="LocalVisBackend", scalar_save_file="scalars.txt")])),
    dict(model=5),
    dict(model="LinenModl"),
    dict(model=dict(type="LinenModel")),
    dict(model=dict(type="LoRA", model=dict(type="LinenModel", module="SmallCNN", loss="CrossEntropy"), targets=[0.5])),
]


def test_bad_configs_are_refused_before_anything_is_touched(tmp_path):
    (tmp_path / "config.py").write_text("of an earlier run")
    compilation_counter.install()
    compiled = compilation_counter.count
    cases = [*generated_cases(), *((str(changes), changes) for changes in BY_HAND)]
    accepted, raw = [], []
    for name, changes in cases:
        try:
            Runner(**config(tmp_path, **changes))
        except Exception as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            if not any(phrase in text for phrase in ("must ", "did you mean", "in the config at", "expected")):
                raw.append((name, text))
        else:
            accepted.append(name)
        assert [path.name for path in tmp_path.iterdir()] == ["config.py"], name
    assert not accepted
    assert len(raw) <= 0.02 * len(cases), raw
    assert len(cases) >= 320
    assert compilation_counter.count == compiled
    assert (tmp_path / "config.py").read_text() == "of an earlier run"


@pytest.mark.parametrize("url", ["ftp://bucket/run", "s3a://bucket"])
@pytest.mark.parametrize(
    "argument", ["work_dir", "resume", "load_from", "load_from.path", "default_hooks.checkpoint.out_dir"]
)
def test_urls_of_other_schemes_are_refused_and_no_directory_is_named_after_them(argument, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, *keys = argument.split(".")
    for key in reversed(keys):
        url = {key: url} | ({"type": "CheckpointHook"} if key == "out_dir" else {})
    with pytest.raises(ConfigError, match="must be a local path or a URL of gs:// or s3://, got '(ftp|s3a)://"):
        Runner(**{**config("run"), name: url})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("work_dir", ["", " "])
def test_a_work_dir_without_a_name_is_refused(work_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="`work_dir` must be the path of a directory"):
        Runner(**config(work_dir))
    assert list(tmp_path.iterdir()) == []


def test_hooks_with_names_like_those_of_default_hooks_are_added(tmp_path):
    hook = dict(type="CheckpointHook", out_dir=str(tmp_path / "other"))
    runner = Runner(
        **config(tmp_path / "run", default_hooks=dict(checkpoint_best=hook, memory=dict(type="EmptyCacheHook")))
    )
    assert len(runner.hooks) == 8


def test_names_of_types_stand_for_configs(tmp_path):
    runner = Runner(
        **config(
            tmp_path,
            train_dataloader__dataset="Digits",
            train_dataloader__sampler="DefaultSampler",
            parallel="SingleDevice",
            custom_hooks=["CheckInvalidLossHook"],
            optim_wrapper__optimizer="SGD",
            param_scheduler=["QuadraticWarmupLR"],
            val_evaluator=["Accuracy"],
            log_processor="LogProcessor",
            visualizer="Visualizer",
        )
    )
    assert type(runner.strategy).__name__ == "SingleDevice"
    assert type(runner.train_dataloader.dataset).__name__ == "Digits"
    assert "CheckInvalidLossHook" in [type(hook).__name__ for hook in runner.hooks]


def test_checkpoint_hooks_with_directories_of_their_own_may_be_several(tmp_path):
    hook = dict(type="CheckpointHook", interval=5, out_dir=str(tmp_path / "other"))
    Runner(**config(tmp_path / "run", custom_hooks=[hook]))
