"""Values that a Flax module sows: as losses, in the loss function, and in predictions."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jengine.model.adapters import accepts
from jengine.model.model import ArrayTree, Losses, PyTree

# collection (Linen) or name of the variable type (NNX) -> dotted path -> value
Sown = dict[str, dict[str, Any]]


class Observer(NamedTuple):
    """What the wrapper of a model does with the network's values, see `observed`."""

    # from the outputs and the sown values to further losses by name, or to what a prediction
    # returns instead of the outputs
    use: Callable[[ArrayTree, Sown], Any]
    # changes the copy of an NNX module that is called next
    prepare: Callable[[Any], None] = lambda module: None


# a context variable, as between the wrapper and the adapter other wrappers may trace functions
_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar(
    "observer", default=None
)


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Let `observer` use the network's outputs and sown values in a `loss` or `predict` of a
    `LinenModel` or an `NnxModel` that is called in the body.
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def prepare_observed(module: Any) -> None:
    """Let the observer, if there is one, change an NNX module."""
    if (observer := _observer.get()) is not None:
        observer.prepare(module)


class SownValues:
    """Selection from the sown values, by collection or by the name under which they were sown.

    See `LinenModel`.

    `owner` is the adapter's name, for error messages; `names` are all selected names.
    """

    def __init__(
        self,
        owner: str,
        losses: Sequence[str] | Mapping[str, float] | None,
        predictions: Sequence[str],
    ) -> None:
        self._owner = owner
        self._is_decided = losses is not None
        self._weights = dict(
            losses.items() if isinstance(losses, Mapping) else dict.fromkeys(losses or (), 1.0)
        )
        self.predictions = tuple(predictions)
        self.names = (*self._weights, *self.predictions)

    def add_losses(
        self, losses: Losses, outputs: ArrayTree, sown: Sown, loss: Callable[..., Any]
    ) -> Losses:
        """Return the losses together with the sown ones, and those of an observer.

        Values that are sown under one name, by any number of modules, are added up in one entry
        with that name, to which `_loss` is appended if it does not contain 'loss'. A loss called
        'loss', which is the total's name, becomes 'main_loss'. A loss function with an argument
        `sown` is responsible for the losses that are not selected.

        Raises:
          ValueError: a selected name that is not sown; an entry that `losses` has as well; or an
            unused value with 'loss' in its name or collection.
        """
        entries: dict[str, list[Any]] = {}
        used = set()
        for name, weight in self._weights.items():
            for collection, path, value in self._find(name, sown, "sown_losses"):
                # a value may be selected by its name and by its collection
                used.add((collection, path))
                entry = _last(path) if "loss" in _last(path) else f"{_last(path)}_loss"
                entries.setdefault(entry, []).extend(weight * part for part in _parts(value))
        if (observer := _observer.get()) is not None:
            entries |= observer.use(outputs, sown)
        if clash := [entry for entry in entries if entry in losses]:
            raise ValueError(
                f"{self._owner}: a sown or added loss must not have the name of another loss, got "
                f"{clash[0]!r}"
            )
        unused = [
            f"{collection}: {path}"
            for collection, path, _ in _entries(sown)
            if "loss" in f"{collection} {_last(path)}".lower() and (collection, path) not in used
        ]
        if unused and not self._is_decided and not accepts(loss, "sown"):
            raise ValueError(
                f"{self._owner}: the module sows losses that nothing uses ({', '.join(unused)}); "
                "name their collection in `sown_losses`, or add an argument `sown` to the loss "
                "function; `sown_losses=()` ignores them"
            )
        # a part, no longer the total
        if entries and [name for name in losses if "loss" in name] == ["loss"]:
            losses = {
                "main_loss" if name == "loss" else name: value for name, value in losses.items()
            }
        return {**losses, **entries}

    @property
    def are_predicted(self) -> bool:
        """Whether predictions need the sown values."""
        return bool(self.predictions) or _observer.get() is not None

    def add_predictions(self, outputs: ArrayTree, sown: Sown) -> PyTree:
        """Return the outputs, or a dict with them as 'outputs' and the selected sown values by
        name.

        A value that one module sows once is the array itself; several are a dict from dotted path
        to value.
        """
        if (observer := _observer.get()) is not None:
            return observer.use(outputs, sown)
        if not self.predictions:
            return outputs
        selected = {}
        for name in self.predictions:
            found = [
                (path, _parts(value), value)
                for _, path, value in self._find(name, sown, "sown_predictions")
            ]
            values = {path: parts[0] if len(parts) == 1 else value for path, parts, value in found}
            selected[name] = next(iter(values.values())) if len(values) == 1 else values
        return {"outputs": outputs, **selected}

    def _find(self, name: str, sown: Sown, argument: str) -> list[tuple[str, str, Any]]:
        """Return `(collection, path, value)` for the values with this name or in this
        collection.
        """
        found = [entry for entry in _entries(sown) if name in (entry[0], _last(entry[1]))]
        if not found:
            names = {name: sorted(values) for name, values in sown.items()}
            raise ValueError(
                f"{self._owner}: `{argument}` must be names that the module sows, got {name!r}; "
                f"it sows {names}"
            )
        return found


def _entries(sown: Sown) -> list[tuple[str, str, Any]]:
    return [
        (collection, path, value)
        for collection, values in sown.items()
        for path, value in values.items()
    ]


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _parts(value: Any) -> tuple[Any, ...]:
    """Return the values from all calls: `sow` collects them in a tuple unless it is given
    another reducer.
    """
    return value if isinstance(value, tuple) else (value,)
