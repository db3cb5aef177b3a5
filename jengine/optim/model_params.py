"""Find the parameters and module types of what a user hands to an optimizer wrapper's constructor."""

import sys
from collections.abc import Mapping
from typing import Any

from jengine import paths
from jengine.model.model import Model


def params_of(source: Any, module_types: Mapping[str, str] | None = None) -> tuple[Any, Mapping[str, str]]:
    """Return the parameters to train and the types of their modules.

    Args:
      source: a pytree of arrays or ShapeDtypeStructs; an `nnx.State` or `nnx.Module`, of which the `nnx.Param`s are
        the parameters; or an object that has such a tree as `params` (and perhaps `module_types`).
      module_types: dotted module path -> class name; takes precedence over the types of `source`.

    Returns:
      The parameters and the types by dotted module path, empty if unknown.

    Raises:
      TypeError: `source` holds no parameters.
    """
    nnx = sys.modules.get("flax.nnx")  # not loaded: `source` cannot be one of its objects
    if nnx is not None and isinstance(source, nnx.Module):
        types = {".".join(map(str, path)): type(node).__name__ for path, node in nnx.iter_modules(source)}
        return _trained(nnx, nnx.state(source), type(source).__name__), module_types or types
    if nnx is not None and isinstance(source, nnx.State):  # before `params`: a state has its keys as attributes
        return _trained(nnx, source, "an nnx.State"), module_types or {}
    if hasattr(source, "params"):
        params, known = params_of(source.params)
        return params, module_types or getattr(source, "module_types", None) or known
    if isinstance(source, Model):
        name = type(source).__name__
        raise TypeError(
            f"the parameters must be given, got a {name}, which has none before `init`; write "
            "`params, model_state = model.init(rng, batch)` and pass `params` with `module_types=model.module_types`"
        )
    for path, leaf in paths.leaves_with_path(source):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            where = f" at {path!r}" if path else "; pass the parameters that its `init` returns"
            raise TypeError(
                "the parameters must be a pytree of arrays, an nnx.State or an nnx.Module, "
                f"got {type(leaf).__name__}{where}"
            )
    return source, module_types or {}


def _trained(nnx: Any, state: Any, name: str) -> Any:
    """Return the `nnx.Param`s of a state; a state of bare arrays, as optax gets it, holds parameters alone."""
    variables = [leaf for _, leaf in nnx.to_flat_state(state) if isinstance(leaf, nnx.Variable)]
    if not variables:
        return state
    params = nnx.filter_state(state, nnx.Param)
    if not nnx.to_flat_state(params):
        found = ", ".join(sorted({type(variable).__name__ for variable in variables}))
        raise TypeError(f"the parameters must be of type nnx.Param, got {name} with {found} alone")
    return params
