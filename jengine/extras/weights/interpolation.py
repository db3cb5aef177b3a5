"""Interpolation that fits position embeddings for a token grid to another number of tokens."""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Method = Literal["bilinear", "bicubic"]

_MAX_EXTRA = 16  # class and register tokens


class Grid(NamedTuple):
    """Tokens of a position embedding: leading tokens outside the grid (`extra`), then `height` x
    `width`.
    """

    extra: int
    height: int
    width: int


def find_grids(stored: tuple[int, ...], expected: tuple[int, ...]) -> tuple[Grid, Grid] | None:
    """Return the grids of two position embeddings; None if they cannot be resized into each other.

    Both should have the same number of extra tokens. One axis with all tokens is taken as a square
    grid.

    Args:
      stored, expected: shapes (tokens, width) or (height, width of the grid, width), with or
        without leading ones.

    >>> find_grids((1, 197, 768), (577, 768))
    (Grid(extra=1, height=14, width=14), Grid(extra=1, height=24, width=24))
    """
    shapes = [stored, expected]
    for i in range(2):
        while len(shapes[i]) > 2 and shapes[i][0] == 1:
            shapes[i] = shapes[i][1:]
    if any(len(shape) not in (2, 3) for shape in shapes) or shapes[0][-1] != shapes[1][-1]:
        return None
    # the fewest that leave a square in both: shapes do not tell
    for extra in range(_MAX_EXTRA + 1):
        before, after = (_find_grid(shape, extra) for shape in shapes)
        if before is not None and after is not None:
            return before, after
    return None


def resize_positions(array: np.ndarray, shape: tuple[int, ...], method: Method) -> np.ndarray:
    """Resize a position embedding to another grid; the embeddings of extra tokens are kept.

    Args:
      array: real[..., tokens, D], see `find_grids`.
      shape: the new shape.
      method: both methods reduce aliasing when they make the grid smaller.

    Raises:
      ValueError: the shapes do not belong to two grids.
    """
    grids = find_grids(array.shape, shape)
    if grids is None:
        raise ValueError(
            f"a position embedding must be of a grid to be resized to {shape}, got {array.shape}"
        )
    before, after = grids
    # `jax.image` computes in this dtype
    tokens = jnp.asarray(array.reshape(-1, shape[-1]), jnp.float32)
    grid = tokens[before.extra :].reshape(before.height, before.width, -1)
    resized = jax.image.resize(grid, (after.height, after.width, shape[-1]), method)
    tokens = jnp.concatenate([tokens[: before.extra], resized.reshape(-1, shape[-1])])
    return np.asarray(tokens).reshape(shape).astype(array.dtype)


def _find_grid(shape: tuple[int, ...], extra: int) -> Grid | None:
    if len(shape) == 3:
        return Grid(0, shape[0], shape[1]) if extra == 0 else None
    side = math.isqrt(max(shape[0] - extra, 0))
    return Grid(extra, side, side) if side and side * side == shape[0] - extra else None
