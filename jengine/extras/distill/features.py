"""Outputs of modules inside a network, by path, in a trace of its loss or prediction."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
from flax import linen as nn

from jengine.config.errors import ConfigError, did_you_mean
from jengine.model.model import ArrayTree
from jengine.model.sown import Observer, Sown, observed

if TYPE_CHECKING:
    from flax import nnx

_SOWN = "module_output"  # the name under which modules sow what they return


@contextlib.contextmanager
def features_sown(names: Collection[str], use: Callable[[ArrayTree, Sown], Any]) -> Iterator[None]:
    """Let the modules at these dotted paths sow their outputs, and `use` get the values; see
    `observed`.
    """

    def call_linen(
        next_fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ctx: nn.module.InterceptorContext,
    ) -> Any:
        outputs = next_fun(*args, **kwargs)
        if ctx.method_name == "__call__" and ".".join(ctx.module.path) in names:
            ctx.module.sow("intermediates", _SOWN, outputs)
        return outputs

    def prepare_nnx(module: "nnx.Module") -> None:
        from flax import nnx

        for path, node in list(nnx.iter_modules(module)):
            if ".".join(map(str, path)) in names:
                _sow_outputs(node)

    with nn.intercept_methods(call_linen), observed(Observer(use, prepare_nnx)):
        yield


def _sow_outputs(node: "nnx.Module") -> None:
    from flax import nnx

    kind: Any = type(node)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = kind.__call__(self, *args, **kwargs)
        self.sow(nnx.Intermediate, _SOWN, outputs)
        return outputs

    # Calls look up the class, so an attribute of the instance would not do.
    node.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def select_features(
    names: Iterable[str], sown: Sown, modules: Mapping[str, Any], owner: str
) -> dict[str, jax.Array]:
    """Return the arrays with these names: outputs of modules, or values that a module sows, by
    dotted path.

    Args:
      names: of the arrays.
      sown: the values that were sown.
      modules: the modules by dotted path, for errors.
      owner: 'student' or 'teacher', for errors.

    Raises:
      ConfigError: there is no such value, or it is not a single array.
    """
    values = {path: value for entries in sown.values() for path, value in entries.items()}
    found = {}
    for name in names:
        value = values.get(f"{name}.{_SOWN}", values.get(name))
        if value is None:
            paths = {path.removesuffix(f".{_SOWN}") for path in values}
            known = sorted(paths | {path for path in modules if path} - {""})
            raise ConfigError(
                f"`features` must be modules of the {owner} or values that it sows, got {name!r}"
                f"{did_you_mean(name, known)}; it has {', '.join(known)}"
            )
        parts = value if isinstance(value, tuple) else (value,)
        if len(parts) != 1 or not isinstance(parts[0], jax.Array):
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise ConfigError(
                f"the feature {name!r} of the {owner} must be one array, from one call, got {kinds}"
            )
        found[name] = parts[0]
    return found
