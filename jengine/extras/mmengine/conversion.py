"""Conversion of MMEngine config sections to jengine's."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jengine.config.containers import iter_nodes, resolve
from jengine.config.errors import config_path
from jengine.config.registry import (
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
from jengine.extras.mmengine.conversion_rows import Row, Status, describe, list_lost
from jengine.extras.mmengine.counterparts import (
    convert_augments,
    convert_erasing,
    convert_loss,
    find_num_classes,
)
from jengine.extras.mmengine.mmengine_keys import SECTIONS, drop_without_effect
from jengine.optim.wrapper_builder import check_optim_wrapper

_MODES = ("train", "val", "test")
_LOOPS = {"val_cfg": "ValLoop", "test_cfg": "TestLoop"}
_EVAL = ("val_evaluator", "test_evaluator")
_ADVICE = ("tta_model",)  # of what is dropped, the keys that have a counterpart
# With the same meaning; others with the same names take batches here
_SAMPLE_TRANSFORMS = ("Normalize", "Pad")
_READERS = ("Load", "Pack", "Collect", "ToTensor", "ImageToTensor", "DefaultFormatBundle")
_LOSS = re.compile(r"\.loss(_\w+)?(\[\d+\])?$")
# From which entries without effect are dropped beforehand
_LISTS = ("custom_hooks", "visualizer.vis_backends")

Section = dict[str, Any] | Sequence[dict[str, Any]]  # one part, or several


class Conversion:
    """Conversion of an MMEngine config, section by section.

    Keys that jengine supports are kept, unknown arguments are dropped, and unknown classes get the
    import path of one that the user writes: `my_data.ImageNet`, `my_metrics.CocoMetric`. Each value
    in the config is in the result, or a row tells what became of it.

    >>> conversion = Conversion(
    ...     {"train_cfg": {"by_epoch": True, "max_epochs": 3}, "log_level": "INFO"}
    ... )
    >>> conversion.result["train_cfg"]
    {'by_epoch': True, 'max_epochs': 3}

    Args:
      cfg: resolved config, with the variables at the top level; it is not modified.
      read: the variables that the file reads; by default all.

    Attributes:
      result: the converted config.
      rows: what happened to each key, in config order.
      todo: what to do, for each path in `result` that a person must complete.
    """

    def __init__(self, cfg: Mapping[str, Any], read: Collection[str] | None = None) -> None:
        self.result: dict[str, Any] = {}
        self.rows: list[Row] = []
        self.todo: dict[str, list[str]] = {}
        cfg = _strip_scopes(cfg)
        self._moved: dict[str, str] = {}  # new paths by old ones
        self._augments: list[dict[str, Any]] = []  # of batches
        self._preprocessor = cfg.get("data_preprocessor")
        self._read = set(cfg if read is None else read)
        apart = {name: cfg[name] for name in (*_ADVICE, "vis_backends") if name in cfg}
        kept, changes = drop_without_effect(
            resolve({name: value for name, value in cfg.items() if name not in apart})
        )
        kept |= apart
        for change in changes:
            self._whole(change.path, "changed" if change.replaced else "dropped", change.reason)
        dropped = {change.path for change in changes}
        # The original place of each entry that is left in a list
        self._places = {
            path: [i for i in range(len(entries)) if f"{path}[{i}]" not in dropped]
            for path, entries in iter_nodes(cfg)
            if path in _LISTS and isinstance(entries, list | tuple)
        }
        convert: dict[str, Callable[[str, Any], None]] = {
            "model": self._model,
            "optim_wrapper": self._optim_wrapper,
            "param_scheduler": self._schedulers,
            "default_hooks": self._default_hooks,
            "custom_hooks": self._custom_hooks,
            "visualizer": self._visualizer,
            "load_from": self._load_from,
            "resume": self._resume,
            "log_processor": self._log_processor,
            **{f"{mode}_dataloader": self._dataloader for mode in _MODES},
            **{f"{mode}_cfg": self._loop for mode in _MODES},
            **dict.fromkeys(_EVAL, self._evaluator),
        }
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
        if self._augments:
            hook = self._fit(
                HOOKS, "custom_hooks", {"type": "BatchAugmentHook", "augments": self._augments}
            )
            self.result["custom_hooks"] = [*(self.result.get("custom_hooks") or ()), hook]
        lost = list_lost(cfg, self.result, self.rows, self._moved)
        self.rows += lost
        # In the file too: the table is gone when the module is written.
        self.todo.setdefault("model", []).extend(
            f"{row.path}: {row.text}" for row in lost if row.status == "to be done"
        )

    # --- Sections. ---

    def _model(self, name: str, cfg: dict[str, Any]) -> None:
        if cfg.get("type", "") in MODELS:
            self._take(name, self._fit(MODELS, name, cfg))
            return
        kind = cfg.get("type", "MyModel")
        loss = self._loss(name, cfg)
        self.result[name] = {
            "type": "LinenModel",
            "module": {"type": f"my_model.{kind}"},
            "loss": loss or {"type": "my_model.loss"},
        }
        parts = ", ".join(
            f"{key}={part['type']}"
            for key, part in cfg.items()
            if _has_type(part) and key != "data_preprocessor"
        )
        self._do(
            name,
            f"write a Flax module in my_model.py, next to this file, in place of {cfg.get('type')}"
            f"{f' ({parts})' if parts else ''}; for Flax NNX use NnxModel",
        )
        self._moved[f"{name}.type"] = f"{name}.module.type"
        if not loss:
            self._do(f"{name}.loss", "a function (outputs, batch) -> losses")
        if cfg.get("data_preprocessor"):
            self._normalize(f"{name}.data_preprocessor", cfg["data_preprocessor"])
        train_cfg = cfg.get("train_cfg")
        if isinstance(train_cfg, Mapping) and train_cfg.get("augments"):
            self._mix(f"{name}.train_cfg", train_cfg, cfg)

    def _loss(self, name: str, cfg: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the counterpart of a model's only loss: the sum of several is another one."""
        losses = {
            path: node
            for path, node in iter_nodes(cfg, name)
            if _LOSS.search(path) and _has_type(node)
        }
        if len(losses) != 1:
            return None
        ((path, node),) = losses.items()
        head = dict(iter_nodes(cfg, name))[path.rpartition(".")[0]]
        # Heads of MMSegmentation leave out 255.
        ignore_index = head.get("ignore_index", 255) if path.endswith(".loss_decode") else None
        loss = convert_loss(node, ignore_index)
        if loss:
            self._whole(path, "changed", f"{describe(node)} to {describe(loss)}")
        return loss

    def _mix(self, path: str, cfg: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        """Convert the MixUp and CutMix of a classifier."""
        augment = convert_augments(cfg)
        num_classes = find_num_classes(
            model.get("head"), model.get("data_preprocessor"), self._preprocessor, cfg["augments"]
        )
        if augment is None or num_classes is None:
            self._do("custom_hooks", f"a BatchAugmentHook (docs/data.md) for {describe(cfg)}", path)
            return
        self._augments += [{"type": "SoftLabels", "num_classes": num_classes}, augment]
        for key in cfg.keys() & {"augments", "probs"}:
            self._whole(
                f"{path}.{key}",
                "changed",
                f"{describe(cfg[key])} to a BatchAugmentHook in `custom_hooks`",
            )

    def _normalize(self, path: str, cfg: Any) -> None:
        text = f"normalize the images in the pipeline or the module: {cfg!r}"
        if text not in self.todo.get("model", ()):
            self.todo.setdefault("model", []).append(text)
        self._whole(path, "to be done", text)

    def _dataloader(self, name: str, cfg: dict[str, Any]) -> None:
        loader = dict(cfg)
        # Named functions of PyTorch projects return tensors; nothing of them can be kept.
        if collate := loader.pop("collate_fn", None):
            text = (
                "`collate_fn` must be a function, or left out to stack the samples, got "
                f"{describe(collate)}"
            )
            self._do(name, text, f"{name}.collate_fn")
        if "prefetch_factor" in loader:
            self._whole(f"{name}.prefetch_factor", "dropped", "a setting of PyTorch's loader")
            del loader["prefetch_factor"]
        sampler: Any = loader.get("sampler")
        if _has_type(sampler):
            if sampler["type"] in DATA_SAMPLERS:
                loader["sampler"] = self._fit(
                    DATA_SAMPLERS, f"{name}.sampler", sampler, dataset=None
                )
            else:
                del loader["sampler"]
                kind = describe(sampler)
                text = f"a sampler in place of {kind}: any iterable of indices with a length"
                self._do(name, text, f"{name}.sampler")
        dataset = loader.get("dataset", {})
        if isinstance(dataset, Mapping):
            loader["dataset"] = self._dataset(f"{name}.dataset", f"{name}.dataset", dataset)
        # A default that differs and changes the training: it gets a row, although nothing was
        # written.
        if name == "train_dataloader" and "drop_last" not in cfg:
            text = "True by default: the last, smaller batch of an epoch is dropped"
            self._note(f"{name}.drop_last", "changed", text)
        self._take(name, loader)

    def _dataset(self, path: str, new_path: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
        """Return a dataset, in a TransformedDataset if it has a pipeline."""
        kind = cfg.get("type", "MyDataset")
        is_known = kind in DATASETS
        takes_pipeline = is_known and "pipeline" in inspect.signature(DATASETS.get(kind)).parameters
        pipeline = cfg.get("pipeline")
        transforms = (
            self._pipeline(f"{path}.pipeline", pipeline)
            if isinstance(pipeline, list | tuple)
            else []
        )
        is_wrapped = bool(transforms) and not takes_pipeline
        inner_path = f"{new_path}.dataset" if is_wrapped else new_path
        self._moved |= {path: inner_path, f"{path}.pipeline": f"{new_path}.pipeline"}
        dataset = {**cfg, "type": kind if is_known else f"my_data.{kind}"}
        if takes_pipeline and transforms:
            dataset["pipeline"] = transforms
        else:
            dataset.pop("pipeline", None)
        for key in ("dataset", "datasets"):  # of a wrapper
            place = f"{path}.{key}"
            new_place = f"{inner_path}.{key}"
            if isinstance(parts := cfg.get(key), list | tuple):
                dataset[key] = [
                    self._dataset(f"{place}[{i}]", f"{new_place}[{i}]", part)
                    if isinstance(part, Mapping)
                    else part
                    for i, part in enumerate(parts)
                ]
            elif isinstance(parts, Mapping):
                dataset[key] = self._dataset(place, new_place, parts)
        if is_known:
            converted = {key: None for key in ("dataset", "datasets", "pipeline") if key in dataset}
            dataset = self._fit(DATASETS, path, dataset, **converted)
        else:
            self._do(
                path.partition(".")[0],
                f"write the dataset my_data.{kind}: `__len__` and `__getitem__` -> a dict "
                "of arrays, images as [H, W, C]",
            )
        return (
            {"type": "TransformedDataset", "dataset": dataset, "pipeline": transforms}
            if is_wrapped
            else dataset
        )

    def _pipeline(self, path: str, transforms: Sequence[Any]) -> list[Any]:
        kept: list[Any] = []
        names = []
        for i, transform in enumerate(transforms):
            place = f"{path}[{i}]"
            kind = transform["type"] if _has_type(transform) else ""
            if kind.startswith(_READERS):
                self._whole(
                    place, "dropped", f"{kind}: the dataset reads, and batches are dicts of arrays"
                )
            elif (
                kind == "RandomErasing"
                and path.startswith("train_")
                and (erasing := convert_erasing(transform))
            ):
                if erasing not in self._augments:
                    self._augments.insert(0, erasing)  # before images are mixed
                text = (
                    f"{describe(transform)} to {describe(erasing)} of a BatchAugmentHook in "
                    "`custom_hooks`"
                )
                self._whole(place, "changed", text)
            elif kind in _SAMPLE_TRANSFORMS:
                kept.append(
                    self._fit(
                        TRANSFORMS,
                        place,
                        self._pad(place, transform) if kind == "Pad" else transform,
                    )
                )
            elif kind:
                own = f"my_data.{kind.rpartition('/')[2]}"
                if "/" in kind:  # torchvision/Normalize
                    self._whole(f"{place}.type", "changed", f"{kind} to {own}")
                kept.append({**transform, "type": own})
                names.append(own)
            else:
                kept.append(transform)
        if names:
            text = (
                f"write the transforms {', '.join(names)}: a class whose `__call__(sample, rng)` "
                "returns a sample"
            )
            self._do(path.partition(".")[0], text)
        return kept

    def _pad(self, path: str, cfg: Mapping[str, Any]) -> dict[str, Any]:
        result = dict(cfg)
        if isinstance(cfg.get("size"), list | tuple):
            result["size"] = tuple(cfg["size"])[::-1]
            self._whole(
                f"{path}.size",
                "changed",
                f"(width, height) {cfg['size']} to (height, width) {result['size']}",
            )
        if isinstance(value := cfg.get("pad_val"), Mapping | list | tuple):
            value = value.get("img", 0) if isinstance(value, Mapping) else value
            # Often the same number for each channel
            result["pad_val"] = (
                value[0] if isinstance(value, list | tuple) and len(set(value)) == 1 else value
            )
            text = f"{describe(cfg['pad_val'])} to {result['pad_val']!r}, for images"
            self._whole(f"{path}.pad_val", "changed", text)
        return result

    def _loop(self, name: str, cfg: dict[str, Any]) -> None:
        supplied: dict[str, Any] = {"runner": None, "dataloader": None}
        if name in _LOOPS:
            supplied["evaluator"] = None
            if "type" not in cfg:
                checked = self._fit(LOOPS, name, {"type": _LOOPS[name], **cfg}, **supplied)
                self._take(name, {key: value for key, value in checked.items() if key != "type"})
                return
        if "type" not in cfg:
            self._take(name, cfg)
        elif cfg["type"] in LOOPS:
            self._take(name, self._fit(LOOPS, name, cfg, **supplied))
        else:
            self._take(name, {key: value for key, value in cfg.items() if key != "type"})
            self._do(
                name,
                f"a loop in place of {cfg['type']}: see docs/runner.md, custom loops",
                f"{name}.type",
            )

    def _optim_wrapper(self, name: str, cfg: dict[str, Any]) -> None:
        if "optimizer" not in cfg:
            self._take(name, cfg)
            self._do(name, "several optimizers: see docs/runner.md, several optimizers")
            return
        wrapper = dict(cfg)
        rules = {
            key: wrapper.pop(key) for key in ("paramwise_cfg", "constructor") if key in wrapper
        }
        kind = wrapper.get("type", "OptimWrapper")
        if kind not in OPTIM_WRAPPERS:
            wrapper["type"] = "AmpOptimWrapper" if "Apex" in kind else "OptimWrapper"
            self._whole(f"{name}.type", "changed", f"{kind} to {wrapper['type']}")
        if wrapper.get("type", "") == "AmpOptimWrapper" and wrapper.get("dtype") is None:
            self._note(
                name, "changed", "computes in bfloat16; for MMEngine's float16 set dtype='float16'"
            )
        optimizer = wrapper["optimizer"]
        if optimizer.get("type") in OPTIMIZERS:
            wrapper["optimizer"] = self._fit(OPTIMIZERS, f"{name}.optimizer", optimizer)
        else:
            self._do(
                name,
                f"an optimizer in place of {optimizer.get('type')}: one of optax by its import "
                "path, or your own (docs/optim.md)",
            )
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
            self._whole(path, "dropped", "there are no deformable convolutions")
        if "custom_keys" in kept:
            self._do(
                "optim_wrapper",
                "check with `jengine groups` that each of custom_keys matches your parameters; "
                "Flax names and their PyTorch aliases (`layers.3`, `weight`) both match",
            )
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
                self._do(
                    name,
                    f"a schedule in place of {describe(scheduler)}: see docs/schedules.md",
                    f"{name}[{i}]",
                )
        self._take(name, kept if isinstance(cfg, list | tuple) else kept[0] if kept else None)

    def _default_hooks(self, name: str, cfg: dict[str, Any]) -> None:
        hooks = {
            key: hook if hook is None else self._hook(name, f"{name}.{key}", hook)
            for key, hook in cfg.items()
        }
        self._take(
            name, {key: hook for key, hook in hooks.items() if hook is not None or cfg[key] is None}
        )

    def _custom_hooks(self, name: str, cfg: Sequence[dict[str, Any]]) -> None:
        hooks = [
            self._hook(name, f"{name}[{i}]", hook)
            for i, hook in zip(self._places[name], cfg, strict=True)
        ]
        self._take(name, [hook for hook in hooks if hook is not None])

    def _hook(self, section: str, path: str, cfg: dict[str, Any]) -> dict[str, Any] | None:
        if not _has_type(cfg):
            return cfg
        if cfg["type"] not in HOOKS:
            self._do(
                section,
                f"jengine has no hook {describe(cfg)}: write one (docs/hooks.md), or leave it out",
                path,
            )
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
                # With its arguments, and under a path that does not exist: the config cannot run
                # with the metric silently missing.
                kept.append({**metric, "type": f"my_metrics.{metric['type']}"})
                self._do(name, f"write the metric {kept[-1]['type']} (docs/evaluation.md)")
        self._take(name, kept if isinstance(cfg, list | tuple) else kept[0])

    def _visualizer(self, name: str, cfg: dict[str, Any]) -> None:
        visualizer = dict(cfg)
        kind = cfg.get("type", "Visualizer")
        if kind not in VISUALIZERS:
            visualizer["type"] = "LocalVisualizer"
            self._whole(f"{name}.type", "changed", f"{kind} to LocalVisualizer")
        backends = []
        listed = visualizer.get("vis_backends") or []
        for i, backend in zip(self._places.get(f"{name}.vis_backends", []), listed, strict=True):
            if backend["type"] in VISBACKENDS:
                backends.append(
                    self._fit(VISBACKENDS, f"{name}.vis_backends[{i}]", backend, save_dir=None)
                )
            else:
                self._whole(
                    f"{name}.vis_backends[{i}]", "dropped", f"there is no {describe(backend)}"
                )
        if "vis_backends" in visualizer:
            visualizer["vis_backends"] = backends
        self._take(
            name, self._fit(VISUALIZERS, name, {"type": "Visualizer", **visualizer}, save_dir=None)
        )

    def _log_processor(self, name: str, cfg: dict[str, Any]) -> None:
        self._take(name, self._fit(LOG_PROCESSORS, name, {"type": "LogProcessor", **cfg}))

    def _load_from(self, name: str, cfg: str | dict[str, Any]) -> None:
        self.result[name] = None
        text = (
            f"weights of {cfg}: a local file, and `rename` for your model's names "
            "(docs/pretrained.md)"
        )
        self._do(name, text, name)

    def _resume(self, name: str, resume: bool | str) -> None:
        if resume is not True or self._load_from_path is None:
            self._take(name, resume)
            return
        self.result[name] = False
        self._do(
            name,
            f"MMEngine continues the run of load_from={self._load_from_path!r}, which cannot be "
            "read here; resume='PATH' continues a checkpoint of jengine",
            name,
        )

    def _variable(self, name: str, value: Any) -> None:
        if name == "data_preprocessor":
            self._normalize(name, value)
        elif name == "tta_model":
            text = (
                "test-time augmentation: BaseTTAModel and PrepareTTAHook (docs/more_hooks.md) "
                f"for {describe(value)}"
            )
            self._do("model", text, name)
        elif name == "custom_imports":
            self._do(name, f"import these modules in this file, without PyTorch: {value!r}", name)
        elif name in self._read:
            self._whole(name, "dropped", "a variable, whose value is where it is used")
        else:
            self._whole(name, "dropped", f"nothing reads {describe(value)}")

    # --- Parts of a section. ---

    def _fit(
        self, registry: Registry, path: str, cfg: Mapping[str, Any], **supplied: Any
    ) -> dict[str, Any]:
        """Return the config without arguments that the class does not have.

        Errors in others are to be done.
        """
        kept = dict(cfg)
        parameters = inspect.signature(registry.get(kept["type"])).parameters
        takes_any = any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        for key in [
            key for key in kept if not takes_any and key not in (*parameters, "type", *supplied)
        ]:
            self._whole(f"{path}.{key}", "dropped", f"{kept['type']} has no such argument")
            del kept[key]
        try:
            registry.check(
                {key: value for key, value in kept.items() if key not in supplied}, **supplied
            )
        except (KeyError, TypeError, ValueError) as error:
            self._do(path.partition(".")[0].partition("[")[0], str(error))
        return kept

    def _take(self, name: str, section: Any) -> None:
        """Store a section. It is kept as it is unless rows say otherwise."""
        self.result[name] = section
        if not any(row.path.partition(".")[0].partition("[")[0] == name for row in self.rows):
            self._note(name, "taken over", "")
        elif not any(row.path.startswith(name) and row.status == "to be done" for row in self.rows):
            self._note(name, "taken over", "all else")

    def _do(self, path: str, text: str, whole: str = "") -> None:
        """Note what a person must do at `path` in the result.

        `whole` is an original path, if the text tells everything below it.
        """
        self.todo.setdefault(path, []).append(text)
        self.rows.append(Row("to be done", whole or path, text, bool(whole)))

    def _whole(self, path: str, status: Status, text: str) -> None:
        """Note what became of everything below a path."""
        self.rows.append(Row(status, path, text, is_whole=True))

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
