"""Use the values that a Flax module sows: as losses, in the loss function, and in predictions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jengine.model.adapters import accepts
from jengine.model.model import Losses, PyTree

Sown = dict[str, dict[str, Any]]  # collection (Linen) or name of the variable type (NNX) -> dotted path -> value


class SownValues:
    """Select sown values by the name of their collection, or by the name under which they were sown.

    Args:
      owner: the name of the adapter, for error messages.
      losses: names of sown losses, or a dict from name to weight; None if there are none to be used.
      predictions: names of sown values that are returned with the predictions.
    """

    def __init__(
        self, owner: str, losses: Sequence[str] | Mapping[str, float] | None, predictions: Sequence[str]
    ) -> None:
        self._owner = owner
        self._is_decided = losses is not None
        self._weights = dict(losses.items() if isinstance(losses, Mapping) else dict.fromkeys(losses or (), 1.0))
        self._predictions = tuple(predictions)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all selected values."""
        return (*self._weights, *self._predictions)

    @property
    def in_predictions(self) -> bool:
        """True if sown values are returned with the predictions."""
        return bool(self._predictions)

    def add_losses(self, losses: Losses, sown: Sown, loss: Callable[..., Any]) -> Losses:
        """Return the losses together with the sown ones.

        Values that are sown under one name, by any number of modules, are added up in one entry of that name, to which
        `_loss` is appended if it does not contain 'loss'. A loss called 'loss', the name of the total, becomes
        'main_loss'.

        Args:
          losses: the losses by name.
          sown: all values that were sown in this call.
          loss: the loss function. With an argument `sown`, it is responsible for the losses that are not selected.

        Raises:
          ValueError: a selected name that is not sown; an entry that `losses` has as well; or a value with 'loss' in
            its name or collection that nothing uses.
        """
        entries: dict[str, list[Any]] = {}
        used = set()
        for name, weight in self._weights.items():
            for collection, path, value in self._find(name, sown, "sown_losses"):
                used.add((collection, path))
                entry = _last(path) if "loss" in _last(path) else f"{_last(path)}_loss"
                entries.setdefault(entry, []).extend(weight * part for part in _parts(value))
        for entry in entries:
            if entry in losses:
                raise ValueError(f"{self._owner}: a sown loss must not have the name of another loss, got {entry!r}")
        unused = [
            f"{collection}: {path}"
            for collection, path, _ in _entries(sown)
            if "loss" in f"{collection} {_last(path)}".lower() and (collection, path) not in used
        ]
        if unused and not self._is_decided and not accepts(loss, "sown"):
            raise ValueError(
                f"{self._owner}: the module sows losses that nothing uses ({', '.join(unused)}); name their collection "
                "in `sown_losses`, or add an argument `sown` to the loss function; `sown_losses=()` ignores them"
            )
        if entries and [name for name in losses if "loss" in name] == ["loss"]:  # a part, no longer the total
            losses = {"main_loss" if name == "loss" else name: value for name, value in losses.items()}
        return {**losses, **entries}

    def add_predictions(self, outputs: PyTree, sown: Sown) -> PyTree:
        """Return the outputs, or a dict of them as 'outputs' and of the selected sown values by name.

        A value that one module sows once is the array itself; several are a dict from dotted path to value.

        Raises:
          ValueError: a selected name that is not sown.
        """
        if not self._predictions:
            return outputs
        selected = {}
        for name in self._predictions:
            values = {path: _only(value) for _, path, value in self._find(name, sown, "sown_predictions")}
            selected[name] = next(iter(values.values())) if len(values) == 1 else values
        return {"outputs": outputs, **selected}

    def _find(self, name: str, sown: Sown, argument: str) -> list[tuple[str, str, Any]]:
        """Return `(collection, path, value)` of the values with this name or in the collection of this name."""
        found = [entry for entry in _entries(sown) if name in (entry[0], _last(entry[1]))]
        if not found:
            names = sorted({text for collection, path, _ in _entries(sown) for text in (collection, _last(path))})
            raise ValueError(
                f"{self._owner}: `{argument}` must be names that the module sows, got {name!r}; "
                f"it sows {', '.join(names) if names else 'nothing'}"
            )
        return found


def flatten_sown(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of nested dicts by dotted path; tuples, to which `sow` appends, are values."""
    flat: dict[str, Any] = {}
    for name, value in variables.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{path}": inner for path, inner in flatten_sown(value).items()})
        else:
            flat[str(name)] = value
    return flat


def _entries(sown: Sown) -> Iterator[tuple[str, str, Any]]:
    for collection, values in sown.items():
        for path, value in values.items():
            yield collection, path, value


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _parts(value: Any) -> tuple[Any, ...]:
    """Return the values of all calls of a module: `sow` collects them in a tuple unless it is given another reducer."""
    return value if isinstance(value, tuple) else (value,)


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value
