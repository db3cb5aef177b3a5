"""Attributes that a compiled step has read and that have changed since, and hyperparameters that
it does not read.
"""

import argparse
import collections
import dataclasses
import functools
import logging
import math
import types
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jengine.model.model import get_model, is_number
from jengine.optim.param_groups.grouped import FROZEN as PREFIX
from jengine.train.jaxpr_hash import hash_jaxpr
from jengine.train.model_attributes import list_models, optimizer_names

_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic, jax.Array)
_MAX_SIZE = 1000  # elements of a NumPy array that is copied to be compared
_MAX_ITEMS = 100  # of a list or dict; a longer one is data
_MAX_DEPTH = 5  # of nested lists and dicts
_LIBRARIES = ("builtins", "jax", "jaxlib", "flax", "equinox", "optax", "numpy")
_MAX_TRACES = 2  # for the changes of one attribute that did not matter
_ABSENT = object()
# by object and attribute, and the path within the attribute
Snapshot = dict[tuple[str, int, str, str], Any]

logger = logging.getLogger("jengine")


class FrozenAttributes:
    """Watch that stops a run whose compiled step has read an attribute that has changed since.

    It compares the plain attributes of the hooks with traced points, the model, and the losses and
    models that these hold. If one has changed, the step is traced again: the run stops if it
    computes something else now. See `IterTimerHook`.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()  # hyperparameters that need no check, or are checked

    def start(self, runner: Any) -> None:
        """Record the attributes before the first trace."""
        self._snapshot = _snapshot(runner)
        self._harmless: collections.Counter[str] = collections.Counter()
        self._known |= optimizer_names(runner.optim_wrapper)

    def request(self, runner: Any) -> None:
        """Request nothing."""

    def act(self, runner: Any, completed: int, requests: list[None]) -> float:
        """Check the attributes and the hyperparameters."""
        if shapes := runner.programs.called():
            self._check_attributes(runner, shapes)
            self._check_hyperparams(runner, shapes)
        return math.inf

    def end(self, runner: Any, failed: bool) -> None:
        """Check what has changed in the last iterations."""
        if not failed:
            self.act(runner, 0, [])

    def _check_attributes(self, runner: Any, shapes: Mapping[str, Any]) -> None:
        now = _snapshot(runner)
        changed: dict[str, tuple[Any, Any]] = {}
        for key, value in self._snapshot.items():
            name = key[0]
            is_input = key[2] in runner.hyperparams and is_number(value)
            if (
                self._harmless[name] < _MAX_TRACES
                and not is_input
                and not _is_same(value, now.get(key, _ABSENT))
            ):
                changed.setdefault(name, (value, now.get(key)))
        if not changed:
            return
        fresh = runner.build_programs()
        for kind, args in shapes.items():
            try:
                new_hash = hash_jaxpr(fresh.compiled[kind].trace(*args).jaxpr)
            except Exception:  # of any type, as for an entry that was removed
                new_hash = ""
            if new_hash != hash_jaxpr(runner.programs.compiled[kind].trace(*args).jaxpr):
                name, (old, new) = next(iter(changed.items()))
                others = f" (and maybe {', '.join(list(changed)[1:])})" if len(changed) > 1 else ""
                raise RuntimeError(
                    f"`{name}`{others} must not change during training, because the compiled step "
                    f"keeps the value that its trace has read, {old!r}; got {new!r}. Set a number "
                    "in runner.hyperparams, first in before_train, and read it from `hyperparams` "
                    "in the loss or from ctx.hyperparams in a traced method"
                )
        self._harmless.update(changed.keys())
        self._snapshot = now

    def _check_hyperparams(self, runner: Any, shapes: Mapping[str, Any]) -> None:
        names = {name for name in runner.hyperparams if not name.startswith(PREFIX)}
        if names <= self._known:
            return
        read: set[str] = set()
        fresh = runner.build_programs()
        for kind, (state, batch, inputs) in shapes.items():
            vector, *updates = inputs if isinstance(inputs, tuple) else (inputs,)
            vector = _recording(vector, read)
            inputs = (vector, *updates) if updates else vector
            fresh.compiled[kind].trace(state, batch, inputs)
        for name in sorted(names - self._known - read):
            logger.warning(
                f"{name!r}, which a hook sets in runner.hyperparams, has no effect in the step, "
                f"which does not read it: read hyperparams[{name!r}] in the loss"
            )
        self._known |= names


def explain_assigned_attributes(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Say which attributes of the model are arrays in the step.

    Explainer, for Python branches on them.
    """
    run: Any = context.get("run")
    if run is None or not isinstance(error, jax.errors.JAXTypeError):
        return None
    model = get_model(run.model)
    names = sorted(name for name in run.hyperparams if is_number(getattr(model, name, None)))
    if not names:
        return None
    return (
        f"hooks assign the attributes {names} of the model during training, so that they are "
        "arrays in the step, for which Python's `if` and `range` have no value: use jnp.where or "
        "jax.lax.cond"
    )


# --- Hyperparameters that a trace reads ---


class _Recorded(dict[str, Any]):
    """Hyperparameters by name that add the names that are read to a set."""

    read: "_Names"

    def __getitem__(self, name: str) -> Any:
        self.read.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - which is this method

    def items(self) -> Any:
        return {name: self[name] for name in self}.items()

    def values(self) -> Any:
        return {name: self[name] for name in self}.values()


@dataclasses.dataclass(eq=False)  # by identity, as part of a tree's structure
class _Names:
    names: set[str]


def _flatten(scalars: _Recorded) -> tuple[list[Any], Any]:
    names = sorted(scalars)
    return [dict.__getitem__(scalars, name) for name in names], (tuple(names), scalars.read)


def _unflatten(static: Any, values: Iterable[Any]) -> _Recorded:
    names, read = static
    scalars = _Recorded(zip(names, values, strict=True))
    scalars.read = read
    return scalars


jax.tree_util.register_pytree_node(_Recorded, _flatten, _unflatten)


def _recording(vector: Any, read: set[str]) -> Any:
    """Return the vector of hyperparameters, which becomes a `_Recorded` in the step."""
    scalars = _Recorded(
        jax.tree.unflatten(vector.spec.treedef, range(vector.spec.treedef.num_leaves))
    )
    scalars.read = _Names(read)
    spec = dataclasses.replace(vector.spec, treedef=jax.tree.structure(scalars))
    return dataclasses.replace(vector, spec=spec)


# --- Attributes ---


def _snapshot(runner: Any) -> Snapshot:
    """Return the plain values in the attributes that a trace may read."""
    found: Snapshot = {}
    owners: list[Any] = [hook for hook in runner.hooks if hook.get_traced_points()]
    owners += list_models(runner.model)
    seen = {id(owner) for owner in owners}
    while owners:
        owner = owners.pop()
        for name, value in _attributes(owner).items():
            key = f"{type(owner).__name__}.{name}", id(owner), name
            for path, leaf in _leaves(value):
                inner = _find_owner(leaf)
                if inner is None:
                    found[*key, path] = np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
                elif id(inner) not in seen:
                    seen.add(id(inner))
                    owners.append(inner)
    return found


def _attributes(owner: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cls in reversed(type(owner).__mro__):
        if cls.__module__.partition(".")[0] not in _LIBRARIES:
            found |= {name: x for name, x in vars(cls).items() if isinstance(x, _SCALARS)}
    found |= vars(owner)
    return {name: x for name, x in found.items() if not name.startswith("__")}


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the plain values and the objects in an attribute, with the path within it."""
    is_small = isinstance(value, np.ndarray) and value.size <= _MAX_SIZE
    if isinstance(value, _SCALARS) or is_small or _find_owner(value) is not None:
        return [(path, value)]
    if isinstance(value, list | tuple):
        items: Any = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    elif dataclasses.is_dataclass(value) or isinstance(
        value, types.SimpleNamespace | argparse.Namespace
    ):
        items = getattr(value, "__dict__", {}).items()
    else:
        return []
    items = list(items)
    if len(items) > _MAX_ITEMS or path.count(".") >= _MAX_DEPTH:
        return []
    return [leaf for key, item in items for leaf in _leaves(item, f"{path}.{key}")]


def _find_owner(item: Any) -> Any:
    """Return a model, a callable object such as a loss, or the object whose method `item` is.

    None for others.
    """
    while isinstance(item, functools.partial):
        item = item.func
    if isinstance(item, types.MethodType):
        item = item.__self__
    elif not callable(item) and not callable(getattr(type(item), "loss", None)):
        return None
    is_foreign = any(
        cls.__module__.partition(".")[0] in _LIBRARIES[1:] for cls in type(item).__mro__
    )
    return None if is_foreign or isinstance(item, type) or not hasattr(item, "__dict__") else item


def _is_same(traced: Any, current: Any) -> bool:
    if traced is current:
        return True
    if isinstance(traced, jax.Array) or isinstance(current, jax.Array):
        return False  # another array: its values are not fetched
    if isinstance(traced, np.ndarray) or isinstance(current, np.ndarray):
        return np.array_equal(traced, current)
    # NaN is not equal to itself
    return bool(traced == current) or (traced != traced and current != current)
