"""Numbers of parameters."""

import math

from optax import Params

from jengine.paths import flatten


def parameter_size(params: Params) -> str:
    """Return the numbers of tensors and parameters, and the memory.

    >>> import jax
    >>> parameter_size({"w": jax.ShapeDtypeStruct((1024, 256), "float32")})
    '1 tensors, 262,144 parameters, 1.00 MiB'
    """
    tensors, parameters, size = count_parameters(params)
    return f"{tensors} tensors, {parameters:,} parameters, {size / 2**20:,.2f} MiB"


def count_parameters(params: Params) -> tuple[int, int, int]:
    """Return the numbers of tensors, parameters and bytes."""
    leaves = flatten(params).values()
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    size = sum(size * leaf.dtype.itemsize for size, leaf in zip(sizes, leaves, strict=True))
    return len(sizes), sum(sizes), size
