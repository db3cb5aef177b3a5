"""Check that the optional packages that a config requires are installed, all of them before anything starts."""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from jengine.errors import MissingPackageError
from jengine.registry import find_registered, is_built_in

# The extra of each type that requires one, and the module that the extra installs.
_EXTRA_OF_TYPE = {
    "TensorboardVisBackend": "tensorboard",
    "TensorboardLoggerHook": "tensorboard",
    "WandbVisBackend": "wandb",
    "MLflowVisBackend": "mlflow",
    "LocalVisualizer": "draw",
    "SelfSupVisualizer": "draw",
    "NaiveVisualizationHook": "draw",
    "SegVisualizationHook": "draw",
    "Digits": "examples",
    "Kmeans": "examples",
    "PIC": "examples",
}
_MODULES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "draw": "PIL",
    "examples": "sklearn",
    "safetensors": "safetensors",
}
_SAFETENSORS = (".safetensors", ".safetensors.index.json")


def check_extras(cfg: Mapping[str, Any]) -> None:
    """Check that the packages are installed that the types of a resolved config and its `load_from` require.

    Raises:
      MissingPackageError: some are not; the message has all of them, and the command that installs them.
    """
    missing: dict[str, str] = {}
    for path, extra in _list_extras({key: value for key, value in cfg.items() if key != "vars"}, ""):
        if importlib.util.find_spec(_MODULES[extra]) is None:
            missing.setdefault(extra, f"{_MODULES[extra]} (for `{path}`)")
    if missing:
        raise MissingPackageError(
            f"the config requires packages that are not installed: {', '.join(missing.values())}; "
            f"install all of them with: pip install 'jengine[{','.join(sorted(missing))}]'"
        )


def _list_extras(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the extra of each part of a config that requires one."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _list_extras(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _list_extras(value, f"{path}[{index}]")
    elif path in ("load_from", "load_from.path"):
        if str(node).endswith(_SAFETENSORS):
            yield path, "safetensors"
    elif _may_be_type(path) and (extra := _extra_of(node)) is not None:
        yield path.removesuffix(".type"), extra


def _may_be_type(path: str) -> bool:
    """Return whether a value can be a type, or a bare name in its place: most values at the top level cannot."""
    return path == "visualizer" or "." in path or "[" in path


def _extra_of(kind: Any) -> str | None:
    """Return the extra that a type of jengine requires; None for other types and values."""
    name = kind.rpartition(".")[2] if isinstance(kind, str) else getattr(kind, "__name__", "")
    entries = [kind] if isinstance(kind, type) else find_registered(name)
    return _EXTRA_OF_TYPE.get(name) if all(map(is_built_in, entries)) else None
