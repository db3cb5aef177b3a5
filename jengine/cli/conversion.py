"""Conversion of MMEngine config sections to jengine's."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jengine.config.containers import iter_nodes
from jengine.config.mmengine_keys import SECTIONS, drop_without_effect
from jengine.errors import config_path
from jengine.optim import check_optim_wrapper
from jengine.registry import (
    DATA_SAMPLERS,
    DATASETS,
    HOOKS,
    LOG_PROCESSORS,
    LOOPS,
    METRICS,
    MODELS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    TRANSFORMS,
    VISBACKENDS,
    VISUALIZERS,
    Registry,
)

Status = Literal["taken over", "changed", "dropped", "to be done"]
_MODES = ("train", "val", "test")
_LOOPS = {"val_cfg": "ValLoop", "test_cfg": "TestLoop"}
_EVAL = ("val_evaluator", "test_evaluator")
_ADVICE = ("tta_model",)  # of what is dropped, the keys that have a counterpart
_LOSSES = {"CrossEntropyLoss": "CrossEntropy", "LabelSmoothLoss": "CrossEntropy", "MSELoss": "MeanSquaredError"}


Section = dict[str, Any] | Sequence[dict[str, Any]]  # one part, or several


class Row(NamedTuple):
    """What happened to a key in the original config."""

    status: Status
    path: str
    text: str


class Conversion:
    """Conversion of an MMEngine config, section by section.

    Keys that jengine supports are kept, unknown arguments are dropped, and unknown classes get the import path of one
    that the user writes: `my_data.ImageNet`, `my_metrics.CocoMetric`.

    >>> conversion = Conversion({"train_cfg": {"by_epoch": True, "max_epochs": 3}, "log_level": "INFO"})
    >>> conversion.result["train_cfg"]
    {'by_epoch': True, 'max_epochs': 3}

    Args:
      cfg: resolved config, with the variables at the top level; it is not modified.

    Attributes:
      result: the converted config.
      rows: what happened to each key, in config order.
      todo: what to do, for each path in `result` that a person must complete.
    """

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self.result: dict[str, Any] = {}
        self.rows: list[Row] = []
        self.todo: dict[str, list[str]] = {}
        cfg = _strip_scopes(cfg)
        kept, changes = drop_without_effect(dict(cfg))
        kept |= {name: cfg[name] for name in _ADVICE if name in cfg}
        for change in changes:
            if change.path in _ADVICE:
                continue  # `kept` has it again, for a person to complete
            self._note(change.path, "changed" if change.replaced else "dropped", change.reason)
        convert: dict[str, Callable[[str, Any], None]] = {
            "model": self._model, "optim_wrapper": self._optim_wrapper, "param_scheduler": self._schedulers,
            "default_hooks": self._default_hooks, "custom_hooks": self._custom_hooks, "visualizer": self._visualizer,
            "load_from": self._load_from, "resume": self._resume, "log_processor": self._log_processor,
            **{f"{mode}_dataloader": self._dataloader for mode in _MODES},
            **{f"{mode}_cfg": self._loop for mode in _MODES}, **dict.fromkeys(_EVAL, self._evaluator),
        }  # fmt: skip
        self._load_from_path = kept.get("load_from")
        ordered = {name: kept[name] for name in SECTIONS if name in kept} | kept
        for name, value in ordered.items():
            if name not in SECTIONS:
                self._variable(name, value)
            elif value is None or name not in convert:
                self.result[name] = value
                self._note(name, "taken over", "")
            else:
                with config_path(name):
                    convert[name](name, value)

    # --- Sections. ---

    def _model(self, name: str, cfg: dict[str, Any]) -> None:
        if cfg.get("type", "") in MODELS:
            self._take(name, self._fit(MODELS, name, cfg))
            return
        kinds = (node["type"] for _, node in iter_nodes(cfg) if _has_type(node))
        loss = next((kind for kind in kinds if kind in _LOSSES), None)
        self.result[name] = {
            "type": "LinenModel",
            "module": {"type": f"my_model.{cfg.get('type', 'MyModel')}"},
            "loss": {"type": _LOSSES[loss] if loss else "my_model.loss"},
        }
        parts = ", ".join(
            f"{key}={part['type']}" for key, part in cfg.items() if _has_type(part) and key != "data_preprocessor"
        )
        self._do(name, f"write a Flax module in my_model.py, next to this file, in place of {cfg.get('type')}"
                 f"{f' ({parts})' if parts else ''}; for Flax NNX use NnxModel")  # fmt: skip
        if not loss:
            self._do(f"{name}.loss", "a function (outputs, batch) -> losses")
        if "data_preprocessor" in cfg:
            self._variable("data_preprocessor", cfg["data_preprocessor"])

    def _dataloader(self, name: str, cfg: dict[str, Any]) -> None:
        loader = dict(cfg)
        # Named functions of PyTorch projects return tensors; nothing of them can be kept.
        if loader.pop("collate_fn", None) is not None:
            self._do(name, "`collate_fn` must be a function, or left out to stack the samples")
        if loader.pop("prefetch_factor", None) is not None:
            self._note(f"{name}.prefetch_factor", "dropped", "a setting of PyTorch's loader")
        dataset = loader.get("dataset", {})
        sampler: Any = loader.get("sampler")
        if _has_type(sampler):
            if sampler["type"] in DATA_SAMPLERS:
                loader["sampler"] = self._fit(DATA_SAMPLERS, f"{name}.sampler", sampler, dataset=None)
            else:
                del loader["sampler"]
                self._do(name, f"a sampler in place of {sampler['type']}: any iterable of indices with a length")
        pipeline = dataset.get("pipeline") if hasattr(dataset, "items") else None
        loader["dataset"] = self._dataset(f"{name}.dataset", dataset)
        # Datasets of MMEngine have a pipeline of their own; those here take samples, and a wrapper transforms them.
        if pipeline and loader["dataset"]["type"] != "TransformedDataset":
            transforms = self._pipeline(f"{name}.dataset.pipeline", pipeline)
            if transforms:
                loader["dataset"] = {"type": "TransformedDataset", "dataset": loader["dataset"], "pipeline": transforms}
        # A default that differs and changes the training: it gets a row, although nothing was written.
        if name == "train_dataloader" and "drop_last" not in cfg:
            text = "True by default: the last, smaller batch of an epoch is dropped"
            self._note(f"{name}.drop_last", "changed", text)
        self._take(name, loader)

    def _dataset(self, path: str, cfg: dict[str, Any]) -> dict[str, Any]:
        if cfg.get("type", "") in DATASETS:
            return self._fit(DATASETS, path, cfg)
        kind = cfg.get("type", "MyDataset")
        self._do(path.partition(".")[0], f"write the dataset my_data.{kind}: `__len__` and `__getitem__` -> a dict of "
                 "arrays, images as [H, W, C]")  # fmt: skip
        return {"type": f"my_data.{kind}", **{k: v for k, v in cfg.items() if k not in ("type", "pipeline")}}

    def _pipeline(self, path: str, transforms: list[Any]) -> list[dict[str, Any]]:
        kept = []
        for transform in transforms:
            kind = transform.get("type", "")
            if kind.startswith(("Load", "Pack", "Collect", "ToTensor", "ImageToTensor", "DefaultFormatBundle")):
                self._note(path, "dropped", f"{kind}: the dataset reads, and batches are dicts of arrays")
            elif kind in TRANSFORMS:
                kept.append(self._fit(TRANSFORMS, path, transform))
            else:
                kept.append({**transform, "type": f"my_data.{kind}"})
        if kept:
            names = ", ".join(transform["type"] for transform in kept)
            self._do(path.partition(".")[0], f"write the transforms {names}: a class whose `__call__(sample, rng)` "
                     "returns a sample")  # fmt: skip
        return kept

    def _loop(self, name: str, cfg: dict[str, Any]) -> None:
        supplied: dict[str, Any] = {"runner": None, "dataloader": None}
        if name in _LOOPS:
            # MMEngine fills in the type as well; a type in the config replaces it.
            cfg, supplied = {"type": _LOOPS[name], **cfg}, {**supplied, "evaluator": None}
        if "type" not in cfg:
            self._take(name, cfg)
        elif cfg["type"] in LOOPS:
            self._take(name, self._fit(LOOPS, name, cfg, **supplied))
        else:
            self._take(name, {key: value for key, value in cfg.items() if key != "type"})
            self._do(name, f"a loop in place of {cfg['type']}: see docs/runner.md, custom loops")

    def _optim_wrapper(self, name: str, cfg: dict[str, Any]) -> None:
        if "optimizer" not in cfg:
            self._take(name, cfg)
            self._do(name, "several optimizers: see docs/runner.md, several optimizers")
            return
        wrapper = dict(cfg)
        rules = {key: wrapper.pop(key) for key in ("paramwise_cfg", "constructor") if key in wrapper}
        kind = wrapper.get("type", "OptimWrapper")
        if kind not in OPTIM_WRAPPERS:
            wrapper["type"] = "AmpOptimWrapper" if "Apex" in kind else "OptimWrapper"
            self._note(f"{name}.type", "changed", f"{kind} to {wrapper['type']}")
        if wrapper.get("type", "") == "AmpOptimWrapper" and wrapper.get("dtype") is None:
            self._note(name, "changed", "computes in bfloat16; for MMEngine's float16 set dtype='float16'")
        optimizer = wrapper["optimizer"]
        if optimizer.get("type") in OPTIMIZERS:
            wrapper["optimizer"] = self._fit(OPTIMIZERS, f"{name}.optimizer", optimizer)
        else:
            self._do(name, f"an optimizer in place of {optimizer.get('type')}: one of optax by its import path, or "
                     "your own (docs/optim.md)")  # fmt: skip
        kept = self._fit(OPTIM_WRAPPERS, name, {"type": "OptimWrapper", **wrapper})
        rules = {**rules, "paramwise_cfg": self._rules(rules.get("paramwise_cfg"))} if rules else {}
        self._take(name, {**kept, **{key: value for key, value in rules.items() if value}})
        if optimizer.get("type") in OPTIMIZERS:
            try:
                check_optim_wrapper(self.result[name])
            except (KeyError, TypeError, ValueError) as error:
                self._do(name, str(error))

    def _rules(self, rules: Mapping[str, Any] | None) -> dict[str, Any]:
        kept = dict(rules or {})
        if kept.pop("dcn_offset_lr_mult", None) is not None:
            path = "optim_wrapper.paramwise_cfg.dcn_offset_lr_mult"
            self._note(path, "dropped", "there are no deformable convolutions")
        if "custom_keys" in kept:
            self._do("optim_wrapper", "check with `jengine groups` that each of custom_keys matches your parameters; "
                     "Flax names and their PyTorch aliases (`layers.3`, `weight`) both match")  # fmt: skip
        return kept

    def _schedulers(self, name: str, cfg: Section) -> None:
        schedulers = cfg if isinstance(cfg, list | tuple) else [cfg]
        kept = []
        for i, scheduler in enumerate(schedulers):
            if not _has_type(scheduler):  # the schedulers of several optimizers
                kept.append(scheduler)
            elif scheduler["type"] in PARAM_SCHEDULERS:
                supplied = {"optimizer": None, "convert_to_iter_based": None}
                kept.append(self._fit(PARAM_SCHEDULERS, f"{name}[{i}]", scheduler, **supplied))
            else:
                self._do(name, f"a schedule in place of {scheduler['type']}: see docs/schedules.md")
        self._take(name, kept if isinstance(cfg, list | tuple) else kept[0] if kept else None)

    def _default_hooks(self, name: str, cfg: dict[str, Any]) -> None:
        hooks = {key: hook if hook is None else self._hook(name, f"{name}.{key}", hook) for key, hook in cfg.items()}
        self._take(name, {key: hook for key, hook in hooks.items() if hook is not None or cfg[key] is None})

    def _custom_hooks(self, name: str, cfg: Sequence[dict[str, Any]]) -> None:
        hooks = [self._hook(name, f"{name}[{i}]", hook) for i, hook in enumerate(cfg)]
        self._take(name, [hook for hook in hooks if hook is not None])

    def _hook(self, section: str, path: str, cfg: dict[str, Any]) -> dict[str, Any] | None:
        if cfg["type"] not in HOOKS:
            arguments = ", ".join(f"{key}={value!r}" for key, value in cfg.items() if key != "type")
            self._do(section, f"jengine has no hook {cfg['type']}({arguments}): write one (docs/hooks.md), or "
                     "leave it out")  # fmt: skip
            return None
        return self._fit(HOOKS, path, cfg, priority=None)

    def _evaluator(self, name: str, cfg: Section) -> None:
        metrics = cfg if isinstance(cfg, list | tuple) else [cfg]
        kept = []
        for i, metric in enumerate(metrics):
            path = f"{name}[{i}]" if isinstance(cfg, list | tuple) else name
            if not _has_type(metric) or metric["type"] in METRICS:
                kept.append(self._fit(METRICS, path, metric) if _has_type(metric) else metric)
            else:
                # With its arguments, and under a path that does not exist: the config cannot run with the metric
                # silently missing.
                kept.append({**metric, "type": f"my_metrics.{metric['type']}"})
                self._do(name, f"write the metric {kept[-1]['type']} (docs/evaluation.md)")
        self._take(name, kept if isinstance(cfg, list | tuple) else kept[0])

    def _visualizer(self, name: str, cfg: dict[str, Any]) -> None:
        visualizer = dict(cfg)
        kind = cfg.get("type", "Visualizer")
        if kind not in VISUALIZERS:
            visualizer["type"] = "LocalVisualizer"
            self._note(f"{name}.type", "changed", f"{kind} to LocalVisualizer")
        backends = []
        for i, backend in enumerate(visualizer.get("vis_backends") or []):
            if backend["type"] in VISBACKENDS:
                backends.append(self._fit(VISBACKENDS, f"{name}.vis_backends[{i}]", backend, save_dir=None))
            else:
                self._note(f"{name}.vis_backends[{i}]", "dropped", f"there is no {backend['type']}")
        if "vis_backends" in visualizer:
            visualizer["vis_backends"] = backends
        self._take(name, self._fit(VISUALIZERS, name, {"type": "Visualizer", **visualizer}, save_dir=None))

    def _log_processor(self, name: str, cfg: dict[str, Any]) -> None:
        self._take(name, self._fit(LOG_PROCESSORS, name, {"type": "LogProcessor", **cfg}))

    def _load_from(self, name: str, cfg: str | dict[str, Any]) -> None:
        self.result[name] = None
        self._do(name, f"weights of {cfg}: a local file, and `rename` for your model's names (docs/pretrained.md)")

    def _resume(self, name: str, resume: bool | str) -> None:
        if resume is not True or self._load_from_path is None:
            self._take(name, resume)
            return
        self.result[name] = False
        self._do(name, f"MMEngine continues the run of load_from={self._load_from_path!r}, which cannot be read here; "
                 "resume='PATH' continues a checkpoint of jengine")  # fmt: skip

    def _variable(self, name: str, value: Any) -> None:
        advice = {
            "data_preprocessor": ("model", f"normalize the images in the pipeline or the module: {value!r}"),
            "tta_model": ("model", "test-time augmentation: BaseTTAModel and PrepareTTAHook (docs/more_hooks.md)"),
            "custom_imports": (name, f"import these modules in this file, without PyTorch: {value!r}"),
        }
        if name in advice:
            path, text = advice[name]
            if text not in self.todo.get(path, ()):
                self._do(path, text)
        else:
            self._note(name, "dropped", "a variable, whose value is where it is used")

    # --- Parts of a section. ---

    def _fit(self, registry: Registry, path: str, cfg: Mapping[str, Any], **supplied: Any) -> dict[str, Any]:
        """Return the config without arguments that the class does not have; errors in others are to be done."""
        kept = dict(cfg)
        parameters = inspect.signature(registry.get(kept["type"])).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for key in [key for key in kept if not takes_any and key not in (*parameters, "type", *supplied)]:
            if kept.pop(key) is not None:
                self._note(f"{path}.{key}", "dropped", f"{kept['type']} has no such argument")
        try:
            registry.check({key: value for key, value in kept.items() if key not in supplied}, **supplied)
        except (KeyError, TypeError, ValueError) as error:
            self._do(path.partition(".")[0].partition("[")[0], str(error))
        return kept

    def _take(self, name: str, section: Any) -> None:
        """Store a section. It is taken over as it is unless rows say otherwise."""
        self.result[name] = section
        if not any(row.path.partition(".")[0].partition("[")[0] == name for row in self.rows):
            self._note(name, "taken over", "")
        elif not any(row.path.startswith(name) and row.status == "to be done" for row in self.rows):
            self._note(name, "taken over", "all else")

    def _do(self, path: str, text: str) -> None:
        self.todo.setdefault(path, []).append(text)
        self._note(path, "to be done", text)

    def _note(self, path: str, status: Status, text: str) -> None:
        self.rows.append(Row(status, path, text))


def _strip_scopes(value: Any) -> Any:
    """Return a config with type names without scopes: 'mmseg.IoUMetric' -> 'IoUMetric'."""
    if hasattr(value, "items"):
        level = {key: _strip_scopes(item) for key, item in value.items()}
        if "type" in level:
            kind = level["type"]
            level["type"] = (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]
        return level
    return type(value)(map(_strip_scopes, value)) if type(value) in (list, tuple) else value


def _has_type(value: Any) -> bool:
    return hasattr(value, "items") and "type" in value
