"""Configs of closures: the function that makes one, and its arguments, so that a config file can
have them.
"""

import ast
import inspect
import sys
import textwrap
import types
from typing import Any

from jengine.config.annotations import parameters_of
from jengine.config.description import describe
from jengine.config.registry import FUNCTIONS


def find_factory(function: types.FunctionType) -> dict[str, Any] | None:
    """Return the config of a closure, `dict(type=make_loss, weight=0.5)`; None if it cannot be made
    again.

    The function that defines it must return it, and all that it captures must be arguments of that
    function, which is called once more: what it makes from the config has to be the same, by code
    and captured values.

    >>> import optax
    >>> find_factory(optax.cosine_decay_schedule(0.1, decay_steps=100))["decay_steps"]
    100
    """
    name, *inner = function.__qualname__.split(".<locals>.")
    factory = getattr(sys.modules.get(function.__module__), name, None)
    if (
        len(inner) != 1
        or not isinstance(factory, types.FunctionType)
        or not _returns(factory, inner[0])
    ):
        return None
    parameters = parameters_of(factory)
    captured = function.__code__.co_freevars
    if any(
        key not in parameters or parameters[key].kind is inspect.Parameter.POSITIONAL_ONLY
        for key in captured
    ):
        return None
    config: dict[str, Any] = {"type": factory}
    try:
        for key, cell in zip(captured, function.__closure__ or (), strict=True):
            value = cell.cell_contents
            # optax's cosine makes a float of it
            if isinstance(value, float) and parameters[key].annotation is int:
                value = int(value)
            if value is not parameters[key].default:
                config[key] = value
        made = FUNCTIONS.build_function(config)
        is_same = made.__code__ is function.__code__ and describe(made) == describe(function)
        return config if is_same else None
    except Exception:  # of a function of the user's
        return None


def _returns(factory: types.FunctionType, name: str) -> bool:
    """Return whether a function itself has a `return NAME`, or a `return lambda ...` for the
    name '<lambda>'.
    """
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(factory))).body
    except (OSError, SyntaxError):  # without a file
        return False
    nodes = list(ast.iter_child_nodes(tree))
    for node in nodes:  # it grows; a `return` in an inner function is another one's
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)
    values = [node.value for node in nodes if isinstance(node, ast.Return)]
    return any(
        isinstance(value, ast.Lambda)
        if name == "<lambda>"
        else isinstance(value, ast.Name) and value.id == name
        for value in values
    )
