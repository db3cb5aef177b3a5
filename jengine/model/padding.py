"""BatchNorm statistics without padding, in Linen and NNX modules.

The batch's mask is read while tracing, as the dtype in `autocast` is: modules need no argument for
it.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
from flax import linen as nn

from jengine.data.masking import get_mask
from jengine.model.model import Batch

if TYPE_CHECKING:
    from flax import nnx

_MASK: contextvars.ContextVar[Any] = contextvars.ContextVar("jengine_padding_mask", default=None)


@contextlib.contextmanager
def exclude_padding(batch: Batch) -> Iterator[None]:
    """Compute the statistics in each BatchNorm that is called in the body from the real examples in
    `batch`.

    It applies to `flax.linen.BatchNorm`, and to the modules passed to `mask_batch_norms`, if the
    first input axis is the batch's. If all examples are padding, as on a replica whose share of the
    last batch is empty, all are counted: there would be no statistics otherwise. Without a mask
    nothing changes.
    """
    mask = get_mask(batch)
    token = _MASK.set(None if mask is None else mask | ~mask.any())  # all count if none is real
    try:
        with contextlib.nullcontext() if mask is None else nn.intercept_methods(_pass_mask):
            yield
    finally:
        _MASK.reset(token)


def mask_batch_norms(module: "nnx.Module") -> None:
    """Make the BatchNorms in an NNX module read the mask from `exclude_padding`, in place."""
    if _MASK.get() is None:
        return
    from flax import nnx

    for _, node in nnx.iter_modules(module):
        if type(node) is nnx.BatchNorm:  # a subclass has its own `__call__`
            # past the checks of NNX modules
            object.__setattr__(node, "__class__", _masked_batch_norm())


def _pass_mask(
    next_fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: nn.module.InterceptorContext,
) -> Any:
    """Intercept a call to a Linen module."""
    if (
        isinstance(context.module, nn.BatchNorm)
        and context.method_name == "__call__"
        and kwargs.get("mask") is None
    ):
        kwargs = {**kwargs, "mask": _mask_for(args[0])}
    return next_fun(*args, **kwargs)


# One class for all traces, and made late, as importing NNX takes a while.
@functools.cache
def _masked_batch_norm() -> type:
    from flax import nnx

    class MaskedBatchNorm(nnx.BatchNorm):
        """Pass the mask of the current batch to BatchNorm."""

        def __call__(
            self,
            x: jax.Array,
            use_running_average: bool | None = None,
            *,
            mask: jax.Array | None = None,
        ) -> jax.Array:
            """Normalize `x`; arguments as for `nnx.BatchNorm`."""
            return super().__call__(
                x, use_running_average, mask=_mask_for(x) if mask is None else mask
            )

    return MaskedBatchNorm


def _mask_for(x: jax.Array) -> jax.Array | None:
    """Return the mask with the rank of `x`; None if the first axis is not the batch's."""
    mask = _MASK.get()
    if x.ndim == 0 or x.shape[0] != mask.shape[0]:
        return None
    return mask.reshape(-1, *(1,) * (x.ndim - 1))
