"""Descriptions of values as a config file can have them.

Literals, short arrays and containers describe themselves. A class or function is the path from
which it can be imported; a `functools.partial`, a dataclass (which all Linen modules are) and an
object whose constructor is `checked` are `dict(type=..., **arguments)`. Anything else is
`Unwritable`: reading arguments back from attributes would be a guess.

`config.py` has this description, checkpoints store it for the comparison on a resume, and processes
compare it.
"""

import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import importlib
import inspect
import operator
import os
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from ml_collections import ConfigDict, FieldReference

from jengine.config.annotations import parameters_of, takes_functions
from jengine.config.containers import iter_nodes
from jengine.config.load import MODULE_PREFIX
from jengine.config.modules import find_script_module
from jengine.config.registry import find_registered

Leaf: TypeAlias = bool | int | float | str | None
SCRIPTS: tuple[str, ...] = ("__main__", "__mp_main__")

_MAX_ITEMS = 1000  # of a list or an array; a longer one is data
_MAX_BYTES = 2**20  # of an array; a larger one is hashed by rows of at most this size together
_MAX_ROWS = 256
_MAX_TEXT = 200  # characters; of a longer text the rest is a hash
_LITERALS = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType)
_WITH_REPR = (
    enum.Enum,
    range,
    slice,
    re.Pattern,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    fractions.Fraction,
)
_STAMP = "_constructed_with"  # the attribute of an object that has its described arguments
_FIELDS = "__dataclass_fields__"


@dataclasses.dataclass(frozen=True)
class Unwritable:
    """Stand-in for a value that a config file cannot have, without a reference to the value.

    Attributes:
      kind: what the value is: 'ndarray'.
      content: what tells it from others of this kind, for comparisons: a hash, or a description.
      path: from which only the script that runs can import it.
    """

    kind: str
    content: Any = None
    path: str = ""

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def stamp(built: object, init: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Record with which arguments, `self` included, the constructor `init` has made an object.

    They are described now, so that arrays are not kept in memory; objects that describe themselves
    are described when a description is asked for.
    """
    kind = type(built)
    # NNX takes attributes for state. Other modules of Flax are dataclasses.
    of_flax = kind.__mro__[-2].__module__.startswith("flax.")
    if of_flax or dataclasses.is_dataclass(built) or not hasattr(built, "__dict__"):
        return
    parameters = parameters_of(init)
    config: Any = {}
    for name, value in list(arguments.items())[1:]:
        if name not in parameters:  # the signature that a class declares has others
            continue
        how = parameters[name].kind
        if how in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            config = Unwritable(f"{kind.__name__} with positional arguments")
            break
        describes_itself = _STAMP in getattr(value, "__dict__", ()) or hasattr(value, _FIELDS)
        described = value if type(value) in _LITERALS or describes_itself else describe(value)
        config |= described if how is inspect.Parameter.VAR_KEYWORD else {name: described}
    # the last attribute: later ones are not the constructor's
    vars(built)[_STAMP] = config


def describe(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """Return a value as a config file has it: literals, short arrays, import paths, and dicts and
    lists of these; `Unwritable` for what it cannot have.

    >>> from jengine.model.losses import CrossEntropy
    >>> describe({"loss": CrossEntropy(label="y"), "weights": np.ones(3000), "call": max})
    {'loss': {'type': 'jengine.model.CrossEntropy', 'label': 'y'}, 'weights': <ndarray>, 'call':
    'builtins.max'}

    Args:
      value: anything.
      outer: the IDs of the functions whose closures have the value.
    """
    kind = type(value)
    if kind in _LITERALS or kind is Unwritable:
        return value
    if isinstance(value, FieldReference):
        return describe(value.get(), outer)
    if isinstance(value, Mapping | ConfigDict):
        described = {}
        for key, item in value.items():
            key = key if type(key) in _LITERALS else describe(key, outer)
            described[key] = text = item if type(item) in _LITERALS else describe(item, outer)
            if callable(item) and isinstance(text, str) and "type" in value and key != "type":
                described[key] = _describe_argument(value["type"], key, item, text)
        return described
    if kind in (list, tuple):
        return _describe_list(value, outer)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if _is_dtype(value):
        return np.dtype(value).name
    if isinstance(value, functools.partial) and not value.args and "type" not in value.keywords:
        return describe({"type": value.func, **value.keywords}, outer)
    if hasattr(kind, "shape") and hasattr(kind, "dtype"):
        return _describe_array(value)
    if isinstance(value, types.MethodType):
        return Unwritable("method", content=describe(value.__self__, outer))
    if callable(value) and hasattr(value, "__qualname__"):
        return _describe_function(value, outer)
    return _describe_object(value, outer)


def flatten_description(description: Any, path: str = "") -> dict[str, Leaf]:
    """Return the leaves in a description by path, with JSON's types.

    >>> flatten_description({"custom_hooks": [{"momentum": 0.1}], "mean": np.ones(2)})
    {'custom_hooks[0].momentum': 0.1, 'mean': 'float64[2] cd6283f6ffa67b0e'}
    """
    leaves: dict[str, Leaf] = {}
    for place, node in iter_nodes(description, path):
        is_short = type(node) is str and len(node) <= _MAX_TEXT
        if is_short or node is None or type(node) in (bool, int):
            leaves[place] = node
        elif not isinstance(node, dict | list | tuple):
            leaves[place] = _flatten_leaf(node)
            if isinstance(node, Unwritable) and isinstance(node.content, dict | list):
                leaves |= flatten_description(node.content, place)
    return leaves


def _flatten_leaf(value: Any) -> Leaf:
    if isinstance(value, Unwritable):
        return f"<{value.kind} {value.content}>" if isinstance(value.content, str) else str(value)
    if isinstance(value, str):
        return f"{value[:_MAX_TEXT]}… {hash_text(value)}"
    if isinstance(value, float) and value - value == 0:  # JSON has neither nan nor inf
        return value
    return describe_array(value) if hasattr(value, "dtype") else repr(value)


def _describe_argument(kind: Any, name: str, value: Any, path: str) -> str | Unwritable:
    """Return the path of a class or function that is an argument, unless the class of the config
    would read it back as text.
    """
    entry = kind if callable(kind) else next(iter(find_registered(kind)), None)
    with contextlib.suppress(TypeError, ValueError):  # no signature, or no class
        parameter = parameters_of(entry).get(name)
        if parameter is not None and not takes_functions(parameter):
            kind_of = "`type`" if isinstance(value, type) else "`Callable`"
            return Unwritable(
                f"{path} for the argument `{parameter}`, which has no annotation {kind_of}",
                path=path,
            )
    return path


def _describe_list(items: Sequence[Any], outer: tuple[int, ...]) -> Any:
    if len(items) > _MAX_ITEMS:
        chosen = np.linspace(0, len(items) - 1, _MAX_ITEMS).astype(int)
        sample = flatten_description([describe(items[i], outer) for i in chosen])
        kind = f"{type(items).__name__} of {len(items):,} items"
        return Unwritable(kind, content=hash_text(repr(sample)))
    described = []
    for item in items:
        described.append(item if type(item) in _LITERALS else describe(item, outer))
    kind_of_list: Any = type(items)
    return kind_of_list(described)


def _is_dtype(value: Any) -> bool:
    return (
        isinstance(value, np.dtype)
        or (isinstance(value, type) and issubclass(value, np.generic))
        # `jnp.bfloat16`
        or (callable(value) and isinstance(getattr(value, "dtype", None), np.dtype))
    )


def _describe_array(value: Any) -> Any:
    jax: Any = sys.modules.get("jax")
    is_small = isinstance(value.dtype, np.dtype) and 0 < value.size <= _MAX_ITEMS
    if is_small and value.dtype.kind in "biuf":
        if type(value) is np.ndarray:
            return value.copy()  # the user may write to it later
        is_array = jax is not None and isinstance(value, jax.Array)
        if is_array and not isinstance(value, jax.core.Tracer) and value.is_fully_addressable:
            return value.copy()
    return Unwritable(type(value).__name__, content=describe_array(value))


def describe_array(value: Any) -> str:
    """Return shape, dtype and a hash of an array, or of another object with a shape and a dtype.

    Values on a device are fetched if they are small.
    """
    text = f"{value.dtype}{list(value.shape)}"
    if not isinstance(value, np.ndarray):
        try:
            if value.nbytes > _MAX_BYTES or not getattr(value, "is_fully_addressable", True):
                return text
            value = np.asarray(value)
        except Exception:  # a tracer, a random key, a tensor of another library on a device
            return text
    if value.dtype.hasobject:
        return text
    return f"{text} {value.item()!r}" if value.ndim == 0 else f"{text} {hash_array(value)}"


def hash_array(array: np.ndarray[Any, Any]) -> str:
    """Return a hash over an array's shape, dtype and elements.

    Over evenly spaced rows in a large one.
    """
    if array.nbytes > _MAX_BYTES:
        rows = array[np.linspace(0, len(array) - 1, min(len(array), _MAX_ROWS)).astype(np.int64)]
        rows = rows.reshape(len(rows), -1)
        array = rows[:, :: -(-rows.nbytes // _MAX_BYTES)]
    return hash_text(f"{array.dtype}{array.shape}".encode() + array.tobytes())


def hash_text(text: str | bytes) -> str:
    """Return a short hash."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def _describe_function(value: Any, outer: tuple[int, ...]) -> str | Unwritable:
    path = _find_import_path(value)
    kind = f"{type(value).__name__} {value.__qualname__}"
    if path is not None:
        is_script = path.startswith(SCRIPTS)
        return Unwritable(f"{kind} of a script or notebook", path=path) if is_script else path
    content = None
    code = getattr(value, "__code__", None)
    if code is not None and id(value) not in outer:
        cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
        content = {}
        for variable, cell in cells:
            with contextlib.suppress(ValueError):  # not set yet
                content[variable] = describe(cell.cell_contents, (*outer, id(value)))
    return Unwritable(kind, content)


def _describe_object(value: Any, outer: tuple[int, ...]) -> Any:
    kind = type(value)
    attributes = getattr(value, "__dict__", {})
    if _STAMP in attributes:
        names = list(attributes)
        late = [
            name
            for name in names[names.index(_STAMP) + 1 :]
            if not name.startswith("_") and not hasattr(kind, name)  # not a cached property
        ]
        if late:
            return Unwritable(f"{kind.__name__} with {late[0]!r} set later")
        config = attributes[_STAMP]
        return describe({"type": kind, **config}, outer) if isinstance(config, dict) else config
    if dataclasses.is_dataclass(value) and kind.__dataclass_params__.init:
        return describe({"type": kind, **_changed_fields(value)}, outer)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a transformation of optax
        fields = dict(zip(value._fields, value, strict=True))
        return Unwritable(kind.__name__, content=describe(fields, outer))
    if isinstance(value, functools.partial):
        content = describe([value.func, *value.args], outer)
        return Unwritable("functools.partial with positional arguments", content)
    if isinstance(value, set | frozenset):
        return Unwritable(kind.__name__, content=repr(sorted(map(repr, value))))
    of_jax = kind.__module__.partition(".")[0] == "jax"
    if of_jax and kind.__name__ in ("P", "PartitionSpec"):  # by version
        return describe(tuple(value))  # which the rules of a strategy accept too
    if of_jax or isinstance(value, _WITH_REPR):
        return Unwritable(kind.__name__, content=repr(value))
    with contextlib.suppress(TypeError, ValueError):  # a class in C has no signature
        # without a constructor, attributes were set from outside
        is_made = kind.__init__ is not object.__init__ or not attributes
        if is_made and hasattr(value, "__dict__") and not inspect.signature(kind).parameters:
            return {"type": describe(kind)}
    return Unwritable(kind.__name__)


def _changed_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass object that differ from the defaults.

    Flax sets `parent` and `name` itself.
    """
    changed = {}
    for field in dataclasses.fields(value):
        if field.init and field.name not in ("parent", "name"):
            item = getattr(value, field.name, field.default)
            if item is not field.default:
                changed[field.name] = item
    return changed


def _find_import_path(value: Any) -> str | None:
    """Return the shortest dotted path from which `value` can be imported, if there is one."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not module or not name or module.startswith(MODULE_PREFIX):
        return None
    found = vars(sys.modules.get(module, types))
    if found.get(name) is not value:  # `errors = jax.vmap(error)` has the name 'error'
        name = next((key for key, item in found.items() if item is value), name)
    if "<" in name:
        return None
    if module in SCRIPTS and (script := find_script_module(name)):
        return f"{script}.{name}"
    # Prefer re-exports: `optax.adamw` to `optax._src.alias.adamw`, and `jax.nn.gelu` to
    # `jax._src.nn.functions.gelu`
    public = [part for part in module.split(".") if not part.startswith("_")]
    for parts in (public, module.split(".")):
        for count in range(1, len(parts) + 1):
            package = ".".join(parts[:count])
            with contextlib.suppress(ImportError, AttributeError):
                if operator.attrgetter(name)(importlib.import_module(package)) is value:
                    return f"{package}.{name}"
    return _find_import_path(value.__wrapped__) if _is_jitted(value) else None


def _is_jitted(value: Any) -> bool:
    """Return whether a value is a function of `jax.jit`, in whose place the step can call the
    function itself.
    """
    jax = sys.modules.get("jax")
    return (
        jax is not None and isinstance(value, jax.stages.Wrapped) and hasattr(value, "__wrapped__")
    )
