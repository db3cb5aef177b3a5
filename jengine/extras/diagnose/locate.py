"""The path in a config of the argument that an error names by its class: `CrossEntropy.label` is
`model.loss.label`.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jengine.config.containers import is_level, iter_nodes

PLACE = "in the config at "  # as notes by `config_path` begin
_ARGUMENT = re.compile(r"`(\w+)\.([\w.]+)`")


def locate_argument(cfg: Any, argument: str) -> str | None:
    """Return the config path of an argument; None unless exactly one section has the class.

    >>> locate_argument(
    ...     dict(model=dict(loss=dict(type="CrossEntropy", label="y"))), "CrossEntropy.label"
    ... )
    'model.loss.label'

    An argument that the section leaves out has the path of the section.
    """
    owner, _, name = argument.partition(".")
    found = [
        (path, section)
        for path, section in _sections(cfg)
        if _class_name(section.get("type")) == owner
    ]
    if len(found) != 1 or not found[0][0]:
        return None
    path, section = found[0]
    return f"{path}.{name}" if name.partition(".")[0] in section else path


def locate_sizes(cfg: Any, sizes: Collection[int]) -> dict[str, int]:
    """Return the numbers in the section `model` of a config that are one of `sizes`, by path.

    >>> locate_sizes(dict(model=dict(module=dict(type="flax.linen.Dense", features=512))), (3, 512))
    {'model.module.features': 512}
    """
    sections = _sections(cfg["model"], "model") if is_level(cfg) and "model" in cfg else ()
    found = [
        (f"{path}.{key}", value) for path, section in sections for key, value in section.items()
    ]
    return {
        path: value for path, value in found if type(value) is int and value > 1 and value in sizes
    }


def add_place(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return the path in the config for an error that begins with the argument of a class.

    Explainer, the first of all in the order of names: others leave an error with a path as it is.
    """
    match = None if has_place(error) else _ARGUMENT.match(str(error))
    path = locate_argument(context.get("cfg"), f"{match[1]}.{match[2]}") if match else None
    return f"{PLACE}`{path}`" if path else None


def has_place(error: BaseException) -> bool:
    """Return whether a note has the path in the config that an error is about."""
    return any(note.startswith(PLACE) for note in getattr(error, "__notes__", ()))


def _sections(cfg: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    return ((place, node) for place, node in iter_nodes(cfg, path) if is_level(node))


def _class_name(kind: object) -> str:
    return str(getattr(kind, "__name__", kind)).rpartition(".")[2]
