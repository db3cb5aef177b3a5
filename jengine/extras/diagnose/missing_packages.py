"""Optional packages that a config requires, found before anything is built."""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from jengine.config.containers import iter_nodes
from jengine.config.errors import MissingPackageError
from jengine.config.registry import find_registered, is_built_in
from jengine.config.storage import file_name

# Modules of the extras that have another name
_MODULES = {
    "draw": "PIL",
    "examples": "sklearn",
    "bleu": "sacrebleu",
    "sweep": "optuna",
    "comet": "comet_ml",
}
_SAFETENSORS = (".safetensors", ".safetensors.index.json")


def check_packages(cfg: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a config as it is, and no lines for the log.

    A class names the extra that installs what it imports: `extra = "wandb"`.

    Raises:
      MissingPackageError: types or weights in the config lack packages; with the command to install
        them.
    """
    missing: dict[str, str] = {}
    for path, extra in _list_extras({key: value for key, value in cfg.items() if key != "vars"}):
        module = _MODULES.get(extra, extra)
        # Found, not imported: some of these packages take seconds to import.
        if importlib.util.find_spec(module) is None:
            missing.setdefault(extra, f"{module} (for `{path}`)")
    if missing:
        raise MissingPackageError(
            f"the config requires packages that are not installed: {', '.join(missing.values())}; "
            f"install all of them with: pip install 'jengine[{','.join(sorted(missing))}]'"
        )
    return cfg, ""


def _list_extras(cfg: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the path and the extra of each config part that requires one."""
    plain = set[str]()  # names without an extra
    for path, value in iter_nodes(cfg):
        if path in ("load_from", "load_from.path"):
            if file_name(str(value)).endswith(_SAFETENSORS):
                yield path, "safetensors"
        elif path == "visualizer" or "." in path or "[" in path:
            # other values at the top level are no types
            entries: list[Any] = [value] if isinstance(value, type) else []
            # may be a class
            if isinstance(value, str) and value not in plain:
                name = value.rpartition(".")[2]
                if name[:1].isupper():
                    entries = find_registered(name, import_all=True)
                plain.add(value)
            for entry in entries:
                if hasattr(entry, "extra") and is_built_in(entry):
                    plain.discard(value)
                    yield path.removesuffix(".type"), entry.extra
