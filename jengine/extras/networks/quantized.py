"""Training with matrix products in 8 bits, by qwix."""

from collections.abc import Mapping
from typing import Any, Literal

from flax import linen as nn

from jengine.config.errors import MissingPackageError
from jengine.config.registry import MODELS
from jengine.model.adapters import build_module

QuantizedType = Literal["int8", "float8_e4m3fn", "float8_e5m2"]


@MODELS.register_module("Quantized")
def quantize(
    module: nn.Module | Mapping[str, Any],
    dtype: QuantizedType = "int8",
    paths: str = ".*",
    gradients: QuantizedType | None = None,
) -> nn.Module:
    """Return a Linen module whose matrix products and convolutions have 8 bits, in training and in
    prediction.

    Weights and inputs are rounded in each call, scaled by their largest absolute values along the
    summed axis; parameters, and the rest of the network, keep their dtypes. Gradients pass the
    rounding as if it were not there.

    >>> from jengine.extras.networks.transformer import TransformerLM
    >>> module = quantize(
    ...     TransformerLM(vocab_size=32), dtype="int8", paths="layers/.*"
    ... )  # doctest: +SKIP

    Args:
      module: the network, or its config.
      dtype: the dtype of weights and inputs.
      paths: regular expression for the paths of the submodules, separated by '/'.
      gradients: the dtype of the gradients in products of the backward pass; None for that of the
        computation.

    Raises:
      MissingPackageError: without qwix.
    """
    try:
        import qwix
    except ImportError as error:
        raise MissingPackageError("Quantized requires qwix: pip install qwix") from error
    rule = qwix.QtRule(module_path=paths, weight_qtype=dtype, act_qtype=dtype, bwd_qtype=gradients)
    quantized: nn.Module = qwix.quantize_model(build_module(module), qwix.QtProvider([rule]))
    return quantized


Quantized = quantize
