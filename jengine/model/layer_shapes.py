"""Shapes of single kernels, where a transformation of Flax stacks those of several layers in one parameter."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
from flax import linen as nn

from jengine import paths
from jengine.model.mixture import MixtureOfExperts

if TYPE_CHECKING:
    from flax import nnx

Shapes = dict[str, tuple[int, ...]]  # by dotted parameter path


@contextlib.contextmanager
def record_shapes(shapes: Shapes) -> Iterator[None]:
    """Record the shapes that Linen modules see for their parameters, while they are initialized in the context."""

    def record(next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        result, module = next_fun(*args, **kwargs), context.module
        stacked = 1 if isinstance(module, MixtureOfExperts) else 0  # the first axis is that of the experts
        for name, leaf in nn.meta.unbox(module.variables.get("params", {})).items():
            if not isinstance(leaf, Mapping):  # those of submodules
                shapes[".".join([*module.path, name])] = leaf.shape[stacked:]
        return result

    with nn.intercept_methods(record):
        yield


def select_stacked(shapes: Mapping[str, tuple[int, ...]], params: Any) -> Shapes:
    """Return the recorded shapes that differ from those of the parameters."""
    found = {path: leaf.shape for path, leaf in paths.flatten(params).items()}
    return {path: shape for path, shape in shapes.items() if path in found and shape != found[path]}


def find_nnx_shapes(module: "nnx.Module", get_inputs: Callable[[], tuple[Any, ...]]) -> Shapes:
    """Return the shapes of single kernels in an NNX module, as the settings of Flax's own modules say.

    Args:
      module: the module.
      get_inputs: returns inputs for it, with which a Linen module in Flax's bridge is traced.
    """
    from flax import nnx

    shapes: Shapes = {}
    if isinstance(module, nnx.bridge.ToNNX):
        with record_shapes(shapes):
            jax.eval_shape(module.to_nnx__module.init, jax.random.key(0), *get_inputs())
        return shapes
    for path, node in nnx.iter_modules(module):
        match node:
            case nnx.Linear():
                kernel: dict[str, tuple[int, ...]] = {"kernel": (node.in_features, node.out_features)}
            case nnx.LinearGeneral():
                kernel = {"kernel": (*node.in_features, *node.out_features)}
            case nnx.Conv() | nnx.ConvTranspose():
                kernel = {"kernel": tuple(node.kernel_shape)}
            case nnx.Embed():
                kernel = {"embedding": (node.num_embeddings, node.features)}
            case _:
                continue
        shapes |= {".".join([*map(str, path), name]): shape for name, shape in kernel.items()}
    return shapes
