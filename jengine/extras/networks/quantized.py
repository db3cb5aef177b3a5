"""Training with matrix products in 8 or 4 bits, by qwix."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jengine.config.annotations import Range
from jengine.config.errors import ConfigError, MissingPackageError
from jengine.config.registry import MODELS
from jengine.model.adapters import build_module

QuantizedType = Literal["int8", "float8_e4m3fn", "float8_e5m2"]
SmallType = Literal[QuantizedType, "int4", "mxfp8", "mxfp4", "nvfp4"]
# elements with one scale: of a format whose definition has it, and of integers
_TILES = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
_INT4_TILE = 32
# the backend that multiplies such arrays; others multiply the rounded values
_MULTIPLIED_ON = {"int4": "tpu", "mxfp8": "gpu", "mxfp4": "gpu", "nvfp4": "gpu"}
_BLACKWELL = 10  # compute capability of the first GPUs with such products


@MODELS.register_module("Quantized")
def quantize(
    module: nn.Module | Mapping[str, Any],
    dtype: SmallType = "int8",
    paths: str = ".*",
    gradients: QuantizedType | None = None,
    tile: Annotated[int, Range(ge=2)] | None = None,
) -> nn.Module:
    """Return a Linen module whose matrix products and convolutions have 8 or 4 bits, in training
    and in prediction.

    Weights and inputs are rounded in each call, scaled by their largest absolute values along the
    summed axes; parameters, and the rest of the network, keep their dtypes. Gradients pass the
    rounding as if it were not there.

    >>> from jengine.extras.networks.transformer import TransformerLM
    >>> module = quantize(
    ...     TransformerLM(vocab_size=32), dtype="int8", paths="layers/.*"
    ... )  # doctest: +SKIP

    Args:
      module: the network, or its config.
      dtype: the dtype of weights and inputs. 'mxfp8' and 'mxfp4' have a scale for 32 elements that
        is a power of two, 'nvfp4' one in 8 bits for 16 elements. Devices without products of these
        and of 'int4' multiply the rounded values.
      paths: regular expression for the paths of the submodules, separated by '/'.
      gradients: the dtype of the gradients in products of the backward pass, with 8 bits; None for
        that of the computation. Only for the types that it can have itself.
      tile: how many elements along the summed axes have one scale; None for all, or as the format
        says, and 32 for 'int4'. The summed axes, the `fan_in` of a parameter's role, are taken as
        one, and filled up with zeros. Not for convolutions.

    Raises:
      MissingPackageError: without qwix.
      ConfigError: another `tile` than the format has, or `gradients` for a small format; from a
        call, a convolution with tiles.
    """
    try:
        import qwix
    except ImportError as error:
        raise MissingPackageError("Quantized requires qwix: pip install qwix") from error
    size = _TILES.get(dtype, tile)
    if tile not in (None, size):
        raise ConfigError(f"`tile` must be {size} for {dtype!r}, or left out, got {tile}")
    if dtype in _MULTIPLIED_ON and gradients is not None:
        raise ConfigError(f"`gradients` must be left out for {dtype!r}, got {gradients!r}")
    if dtype == "int4" and tile is None:
        size = _INT4_TILE
    rule = qwix.QtRule(
        module_path=paths,
        weight_qtype=dtype,
        act_qtype=dtype,
        bwd_qtype=gradients,
        tile_size=size,
    )
    provider = qwix.QtProvider([rule]) if size is None else _tiled_provider(qwix, rule, size)
    quantized: nn.Module = qwix.quantize_model(build_module(module), provider)
    return quantized


Quantized = quantize


def _is_multiplied(dtype: str) -> bool:
    """Return whether the devices of this process multiply arrays of the small format."""
    backend = jax.default_backend()
    if backend != _MULTIPLIED_ON[dtype]:
        return False
    if backend != "gpu":
        return True
    # "9.0" on Hopper; the name of an architecture on AMD's
    major = str(getattr(jax.local_devices()[0], "compute_capability", "")).partition(".")[0]
    return major.isdecimal() and int(major) >= _BLACKWELL


def _tiled_provider(qwix: Any, rule: Any, size: int) -> Any:
    """Return a provider whose products have tiles over all summed axes.

    Qwix alone takes the last one, such as the size of a head, and its size must be a multiple.
    """
    dtype = rule.weight_qtype

    def round_values(x: jax.Array) -> jax.Array:
        others = tuple(range(x.ndim - 1))
        codes = qwix.quantize(x, dtype, channelwise_axes=others, tiled_axes={x.ndim - 1: size})
        rounded: jax.Array = qwix.dequantize(codes).astype(x.dtype)
        return rounded

    class TiledProvider(qwix.QtProvider):
        def dot_general(
            self,
            lhs: jax.Array,
            rhs: jax.Array,
            dimension_numbers: Any,
            precision: Any = None,
            preferred_element_type: Any = None,
            **options: Any,
        ) -> jax.Array:
            options |= dict(precision=precision, preferred_element_type=preferred_element_type)
            contracted, batch = dimension_numbers
            if not contracted[0]:
                return jax.lax.dot_general(lhs, rhs, dimension_numbers, **options)
            pairs = zip((lhs, rhs), contracted, batch, strict=True)
            (lhs, *left), (rhs, *right) = (_merge_summed(*pair, size) for pair in pairs)
            numbers = ((left[0], right[0]), (left[1], right[1]))
            found, _ = self._get_current_rule_and_op_id("dot_general", only_rule=True)
            if found is None or dtype not in _MULTIPLIED_ON:
                result: jax.Array = super().dot_general(lhs, rhs, numbers, **options)
                return result
            # The gradient is that of the exact product: on GPUs, qwix multiplies such tiles in
            # float32, and its gradients of other dtypes would have it too.
            exact = jax.lax.dot_general(lhs, rhs, numbers, **options)
            lhs, rhs = jax.lax.stop_gradient((lhs, rhs))
            if _is_multiplied(dtype):
                rounded = super().dot_general(lhs, rhs, numbers, **options)
            else:
                lhs = round_values(lhs)
                rhs = round_values(rhs)
                rounded = jax.lax.dot_general(lhs, rhs, numbers, **options)
            # the value of the one, to the last bit, and the gradient of the other
            return rounded.astype(exact.dtype) + (exact - jax.lax.stop_gradient(exact))

        def einsum(
            self,
            subscripts: str,
            *operands: Any,
            _dot_general: Callable[..., Any] | None = None,
            **options: Any,
        ) -> jax.Array:
            def multiply(lhs: Any, rhs: Any, numbers: Any, *_: Any, **__: Any) -> jax.Array:
                return self.dot_general(lhs, rhs, numbers)

            # or the cache of the compiled sum would return products of another module
            with jax.disable_jit():
                return jnp.einsum(subscripts, *operands, _dot_general=multiply, **options)

        def conv_general_dilated(self, *args: Any, **options: Any) -> jax.Array:
            try:
                result: jax.Array = super().conv_general_dilated(*args, **options)
            except ValueError as error:
                raise ConfigError(
                    f"`paths` must leave convolutions out, which cannot have the tiles of {dtype} "
                    f"with {size} elements, got {rule.module_path!r}"
                ) from error
            return result

    return TiledProvider([rule])


def _merge_summed(
    x: jax.Array, summed: Sequence[int], batch: Sequence[int], size: int
) -> tuple[jax.Array, tuple[int], tuple[int, ...]]:
    """Return an array with the summed axes as the last one, a multiple of `size`, the axis, and
    the new batch axes.
    """
    kept = [axis for axis in range(x.ndim) if axis not in summed]
    shape = [x.shape[axis] for axis in kept]
    count = math.prod(x.shape[axis] for axis in summed)
    x = x.transpose(*kept, *summed).reshape(*shape, count)
    x = jnp.pad(x, [(0, 0)] * len(kept) + [(0, -count % size)])
    return x, (len(kept),), tuple(kept.index(axis) for axis in batch)
