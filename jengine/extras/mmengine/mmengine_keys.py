"""Keys in MMEngine's configs: those with a meaning here, and those without."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jengine.config.annotations import parameters_of
from jengine.config.containers import iter_nodes
from jengine.config.errors import ConfigError
from jengine.config.registry import (
    HOOKS,
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIM_WRAPPERS,
    VISBACKENDS,
    VISUALIZERS,
)

_MODES = ("train", "val", "test")
_CONSTRUCTION = ("paramwise_cfg", "constructor")

# The arguments of the Runner, and `vars`; a test compares them with its signature.
SECTIONS = (
    "model",
    "work_dir",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "train_cfg",
    "val_cfg",
    "test_cfg",
    "optim_wrapper",
    "param_scheduler",
    "val_evaluator",
    "test_evaluator",
    "default_hooks",
    "custom_hooks",
    "load_from",
    "resume",
    "parallel",
    "precision",
    "log_processor",
    "visualizer",
    "randomness",
    "auto_scale_lr",
    "experiment_name",
    "log_level",
    "check",
    "inspect",
    "vars",
)

# Keys that change nothing here, by dotted path, with the reason; `*` stands for train, val and
# test.
WITHOUT_EFFECT = {
    "default_scope": "a name is found in every package",
    "env_cfg": "there are no CUDA or fork settings",
    "cudnn_benchmark": "XLA tunes its kernels itself",
    "dist_params": "`jengine train --launcher` connects processes",
    "launcher": "`jengine train --launcher` connects processes",
    "find_unused_parameters": "gradients of unused parameters are zero",
    "model_wrapper_cfg": "`parallel` selects the strategy",
    "sync_bn": "`parallel` decides over which examples BatchNorm computes its statistics",
    "compile": "the step is always compiled",
    "runner_type": "there is one Runner",
    "vis_backends": "`visualizer` has them",
    "randomness.deterministic": "a program gives the same numbers at each run on the same devices",
    "randomness.diff_rank_seed": "each process draws its own random numbers",
    "*_dataloader.persistent_workers": "workers stay alive between epochs",
    "*_dataloader.pin_memory": "batches are sent to the device before they are needed",
    "*_dataloader.collate_fn": "samples are always stacked",
    "*_dataloader.worker_init_fn": "the seed and the position give workers their random numbers",
    "*_dataloader.batch_sampler": "`sampler` orders the examples, `batch_size` divides them",
    "*_dataloader.timeout": "a setting of PyTorch's loader",
    "*_dataloader.multiprocessing_context": "a setting of PyTorch's loader",
    "*_dataloader.generator": "a setting of PyTorch's loader",
    "tta_model": "`build_runner_with_tta` reads it",
    "tta_pipeline": "`build_runner_with_tta` reads it",
}
# any other `collate_fn` has an effect
_COLLATE = ({"type": "default_collate"}, {"type": "pseudo_collate"})

# Classes in the runtime files of OpenMMLab's packages that only draw or log, unless they are
# registered here.
_DRAWING = re.compile(r"((Action|Cls|Universal|ConcatImage|Gen)|(\w*Local))Visualizer")
_BACKENDS = (
    "AimVisBackend",
    "ClearMLVisBackend",
    "DVCLiveVisBackend",
    "NeptuneVisBackend",
    "PaviVisBackend",
    "GenVisBackend",
)
_HOOKS = re.compile(r"(\w+)?VisualizationHook|OptimizerHook|YOLOv5ParamSchedulerHook")
# Of constructors, the rules that only they read
_CONSTRUCTORS = {
    "TSMOptimWrapperConstructor": ("fc_lr5",),
    "SwinOptimWrapperConstructor": ("base_lr", "backbone_lr"),
}


class Change(NamedTuple):
    """Part of an MMEngine config that is left out or replaced."""

    path: str
    reason: str
    replaced: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def adapt_config(cfg: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a config without parts of MMEngine's that mean nothing here, and lines that name
    those.

    Raises:
      ConfigError: a section that must be written otherwise here.
    """
    reject_foreign_sections(cfg)
    cfg, changes = drop_without_effect(cfg)
    scaling = cfg.get("auto_scale_lr")
    if isinstance(scaling, dict) and "enable" not in scaling:  # in MMEngine a flag of the command
        changes.append(Change("auto_scale_lr", "with `enable=True` it scales the learning rates"))
    return cfg, describe_changes(changes)


def drop_without_effect(cfg: dict[str, Any]) -> tuple[dict[str, Any], list[Change]]:
    """Remove those parts of MMEngine's that mean nothing here from a resolved config, which is
    changed in place; return it, and what has changed.

    Keys without effect are dropped, `_scope_` at every level, and an empty `data_preprocessor`, by
    which a file takes back that of its base; `activation_checkpointing` moves to the model;
    visualizers that draw for one task become a LocalVisualizer; hooks that only draw, arguments of
    PyTorch's loader, and places where metrics are collected are dropped.

    >>> drop_without_effect({"work_dir": "runs", "launcher": "none"})[0]
    {'work_dir': 'runs'}

    Raises:
      ConfigError: `vis_backends` that the visualizer does not have; `activation_checkpointing`
        without a model.
    """
    result = cfg
    changes = list[Change]()
    scopes = [
        node.pop("_scope_")  # which dumped configs have at each class
        for _, node in iter_nodes(cfg)
        if isinstance(node, dict) and "_scope_" in node
    ]
    if scopes:
        changes.append(Change("_scope_", WITHOUT_EFFECT["default_scope"]))
    _check_backends(result)
    for owner in (result, result.get("model")):
        if isinstance(owner, dict) and not owner.get("data_preprocessor", True):
            del owner["data_preprocessor"]
    for pattern, reason in WITHOUT_EFFECT.items():
        for mode in _MODES if "*" in pattern else ("",):
            path = pattern.replace("*", mode)
            section, _, key = path.rpartition(".")
            owner = result.get(section) if section else result
            if (
                isinstance(owner, dict)
                and key in owner
                and (key != "collate_fn" or owner[key] in _COLLATE)
            ):
                del owner[key]
                changes.append(Change(path, reason))
    _move_checkpointing(result, changes)
    sections: dict[str, Callable[[str, Any, list[Change]], Any]] = {
        "visualizer": _change_visualizer,
        "default_hooks": _change_hooks,
        "custom_hooks": _change_hooks,
        "log_processor": _change_log_processor,
        "optim_wrapper": _change_optim_wrapper,
        "val_evaluator": _change_metrics,
        "test_evaluator": _change_metrics,
    }
    for name, change in sections.items():
        if isinstance(result.get(name), dict | list | tuple):
            result[name] = change(name, result[name], changes)
    return result, changes


def reject_foreign_sections(cfg: Mapping[str, Any]) -> None:
    """Raise ConfigError for `data_preprocessor`, and for a section with a comma behind it, which
    is a tuple.
    """
    model = cfg.get("model")
    for owner, path in ((cfg, "data_preprocessor"), (model, "model.data_preprocessor")):
        if isinstance(owner, dict) and owner.get("data_preprocessor"):
            raise ConfigError(
                f"`{path}` must be left out: images are normalized in the compiled step, "
                "`model=dict(type='PreprocessedModel', steps=[dict(type='BatchNormalize', "
                "mean=..., std=...)], model=...)`, or by `dict(type='Normalize', mean=..., "
                "std=...)` in `train_dataloader.dataset.pipeline` (docs/data.md); got "
                f"{owner['data_preprocessor']!r}"
            )
    for name, value in cfg.items():
        may_be_list = name in ("param_scheduler", "custom_hooks") or name.endswith("_evaluator")
        if (
            isinstance(value, tuple)
            and len(value) == 1
            and isinstance(value[0], dict)
            and not may_be_list
        ):
            raise ConfigError(
                f"`{name}` must be a dict, got a tuple of one; remove the comma after `{name} = "
                "dict(...)`"
            )


def describe_changes(changes: Sequence[Change]) -> str:
    """Return one line for each change, for the log; "" if there are none."""
    lines = [f"  {change}" for change in changes]
    return (
        "\n".join(["Parts of MMEngine's config that are changed or have no effect here:", *lines])
        if lines
        else ""
    )


def _move_checkpointing(cfg: dict[str, Any], changes: list[Change]) -> None:
    """Move the key `activation_checkpointing` to the model, which has an argument of this name."""
    modules = cfg.pop("activation_checkpointing", None)
    if not modules:
        return

    def add(model: Any) -> dict[str, Any]:
        # a model around another one
        if isinstance(model, dict) and isinstance(model.get("model"), dict):
            return {**model, "model": add(model["model"])}
        if not isinstance(model, dict) or "activation_checkpointing" in model:
            got = "another list in it" if isinstance(model, dict) else f"{model!r}"
            raise ConfigError(
                "`activation_checkpointing` must be given once, and `model` be a config, got "
                f"{modules!r} at the top "
                f"level and {got}; write `LinenModel(..., activation_checkpointing=[...])`"
            )
        return {**model, "activation_checkpointing": modules}

    cfg["model"] = add(cfg.get("model"))
    changes.append(Change("activation_checkpointing", "an argument of the model", replaced=True))


def _check_backends(cfg: Mapping[str, Any]) -> None:
    """Raise ConfigError for `vis_backends` at the top level unless the visualizer has them too."""
    given = cfg.get("vis_backends")
    visualizer = cfg.get("visualizer")
    listed = visualizer.get("vis_backends") if isinstance(visualizer, dict) else None
    if given is None or given == listed:
        return
    if not given or listed is None or any(backend not in listed for backend in given):
        raise ConfigError(
            "`vis_backends` must be in `visualizer`, dict(type='Visualizer', vis_backends=[...]), "
            f"got {given!r} at the top level"
        )


def _change_visualizer(path: str, cfg: Any, changes: list[Change]) -> Any:
    if not isinstance(cfg, dict):
        return cfg
    kind = _type_name(cfg)
    result = dict(cfg)
    if _DRAWING.fullmatch(kind) and kind not in VISUALIZERS:
        result["type"] = "LocalVisualizer"
        changes.append(Change(f"{path}.type", f"{kind} to LocalVisualizer", replaced=True))
        # Settings of the other class have no meaning in this one; they get a row and are not
        # silently kept.
        known = parameters_of(VISUALIZERS.get("LocalVisualizer"))
        for key in [key for key in result if key not in known and key != "type"]:
            del result[key]
            changes.append(Change(f"{path}.{key}", f"a setting of {kind}"))
    backends = result.get("vis_backends")
    if isinstance(backends, list | tuple):
        names = list(map(_type_name, backends))
        unknown = [
            i for i, name in enumerate(names) if name in _BACKENDS and name not in VISBACKENDS
        ]
        changes += [Change(f"{path}.vis_backends[{i}]", f"there is no {names[i]}") for i in unknown]
        result["vis_backends"] = [backend for i, backend in enumerate(backends) if i not in unknown]
    return result


def _change_hooks(path: str, cfg: Any, changes: list[Change]) -> Any:
    items = cfg.items() if isinstance(cfg, dict) else enumerate(cfg)
    kept = []
    for key, hook in items:
        name = _type_name(hook)
        if not _HOOKS.fullmatch(name) or (
            name in HOOKS and (name != "OptimizerHook" or path == "custom_hooks")
        ):
            kept.append((key, hook))
            continue
        reason = "`optim_wrapper` has its settings" if name == "OptimizerHook" else "it only draws"
        changes.append(
            Change(
                f"{path}.{key}" if isinstance(cfg, dict) else f"{path}[{key}]", f"{name}: {reason}"
            )
        )
    return dict(kept) if isinstance(cfg, dict) else [hook for _, hook in kept]


def _change_log_processor(path: str, cfg: Any, changes: list[Change]) -> Any:
    if not isinstance(cfg, dict) or not isinstance(cfg.get("custom_cfg"), list | tuple):
        return cfg
    kept = []
    for i, entry in enumerate(cfg["custom_cfg"]):
        if isinstance(entry, dict) and entry.get("data_src") == "":
            changes.append(
                Change(f"{path}.custom_cfg[{i}]", "it names no scalar, `data_src` is ''")
            )
        else:
            kept.append(entry)
    return {**cfg, "custom_cfg": kept}


def _change_optim_wrapper(path: str, cfg: Any, changes: list[Change]) -> Any:
    if not isinstance(cfg, dict):
        return cfg
    result = dict(cfg)
    if (kind := _type_name(cfg)) == "ApexOptimWrapper" and kind not in OPTIM_WRAPPERS:
        known = parameters_of(OPTIM_WRAPPERS.get("AmpOptimWrapper"))
        result = {
            key: value for key, value in result.items() if key in known or key in _CONSTRUCTION
        }
        result["type"] = "AmpOptimWrapper"
        changes.append(
            Change(
                f"{path}.type",
                f"{kind} to AmpOptimWrapper, which computes in bfloat16",
                replaced=True,
            )
        )
    constructor = str(result.get("constructor", "")).rpartition(".")[2]
    if constructor in _CONSTRUCTORS and constructor not in OPTIM_WRAPPER_CONSTRUCTORS:
        del result["constructor"]
        rules = dict(result.get("paramwise_cfg") or {})
        own = [rule for rule in _CONSTRUCTORS[constructor] if rules.pop(rule, None) is not None]
        result["paramwise_cfg"] = rules
        lost = f", and its {', '.join(own)}" if own else ""
        text = f"there is no {constructor}{lost}: write such rules as `paramwise_cfg.custom_keys`"
        changes.append(Change(f"{path}.constructor", text))
    return result


def _change_metrics(path: str, cfg: Any, changes: list[Change]) -> Any:
    """Drop where metrics are collected, from an evaluator, a list of metrics, or evaluators by
    name.
    """
    for place, node in iter_nodes(cfg, path):
        if isinstance(node, dict) and "type" in node:
            for key in ("collect_device", "collect_dir"):
                if key in node:
                    del node[key]
                    reason = "JAX gathers the results of all processes"
                    changes.append(Change(f"{place}.{key}", reason))
    return cfg


def _type_name(cfg: Any) -> str:
    """Return a config's type without the scope; "" if it has none, or a class."""
    kind = cfg.get("type") if isinstance(cfg, dict) else None
    return kind.rpartition(".")[2] if isinstance(kind, str) else ""
