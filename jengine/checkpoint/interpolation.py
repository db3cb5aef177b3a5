"""Resize position embeddings of a grid of tokens for another number of tokens."""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Method = Literal["bilinear", "bicubic"]

_MAX_EXTRA = 16  # class and register tokens


class Grid(NamedTuple):
    """Describe the tokens of a position embedding.

    Attributes:
      extra: number of leading tokens that are not part of the grid, such as a class token.
      height, width: number of tokens along each side.
    """

    extra: int
    height: int
    width: int


def find_grids(stored: tuple[int, ...], expected: tuple[int, ...]) -> tuple[Grid, Grid] | None:
    """Return the grids of two position embeddings; None if they cannot be resized into each other.

    Both have the same number of extra tokens. A grid whose sides are merged into one axis is taken as square.

    Args:
      stored, expected: shapes (tokens, width) or (height, width of the grid, width), with or without leading ones.
    """
    shapes = [_drop_leading_ones(shape) for shape in (stored, expected)]
    if any(len(shape) not in (2, 3) for shape in shapes) or shapes[0][-1] != shapes[1][-1]:
        return None
    for extra in range(_MAX_EXTRA + 1):
        grids = [_find_grid(shape, extra) for shape in shapes]
        if grids[0] is not None and grids[1] is not None:
            return grids[0], grids[1]
    return None


def resize_positions(array: np.ndarray, shape: tuple[int, ...], method: Method) -> np.ndarray:
    """Resize a position embedding to another grid; the embeddings of extra tokens are kept.

    Args:
      array: real[..., tokens, D], see `find_grids`.
      shape: the new shape.
      method: the interpolation; both reduce aliasing when they make the grid smaller.

    Returns:
      The embedding with the dtype of `array`.

    Raises:
      ValueError: the shapes are not those of two grids.
    """
    grids = find_grids(array.shape, shape)
    if grids is None:
        raise ValueError(f"a position embedding must be of a grid to be resized to {shape}, got {array.shape}")
    before, after = grids
    tokens = jnp.asarray(array.reshape(-1, shape[-1]), jnp.float32)
    grid = tokens[before.extra :].reshape(before.height, before.width, -1)
    resized = jax.image.resize(grid, (after.height, after.width, shape[-1]), method)
    tokens = jnp.concatenate([tokens[: before.extra], resized.reshape(-1, shape[-1])])
    return np.asarray(tokens).reshape(shape).astype(array.dtype)


def _drop_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _find_grid(shape: tuple[int, ...], extra: int) -> Grid | None:
    if len(shape) == 3:
        return Grid(0, shape[0], shape[1]) if extra == 0 else None
    side = math.isqrt(max(shape[0] - extra, 0))
    return Grid(extra, side, side) if side and side * side == shape[0] - extra else None
