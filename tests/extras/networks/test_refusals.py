"""What networks refuse: a call, its error, and the words that must be in the message."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType

from jengine.config.errors import ConfigError
from jengine.extras.networks import TransformerLM
from jengine.extras.networks.attention import attend
from jengine.extras.networks.mixture import MixtureOfExperts
from jengine.model import LinenModel, NnxModel
from tests.refusals import check_row

BATCH = {"x": np.zeros((4, 8), np.float32)}
QUERY = jnp.zeros((2, 384, 4, 16))
KEY = VALUE = QUERY[:, :, :2]


class Linen(nn.Module):
    """Two layers."""

    def setup(self):
        """Make the layers."""
        self.layers = [nn.Dense(8) for _ in range(2)]

    def __call__(self, x):
        """Apply the layers."""
        return self.layers[1](self.layers[0](x))


class Nnx(nnx.Module):
    """Two layers."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        """Apply the layers."""
        return self.layers[1](self.layers[0](x))


def square(outputs, batch):
    return outputs**2


def checkpoint(adapter, module):
    model = adapter(module, square, inputs="x", activation_checkpointing=["layer_0"])
    jax.eval_shape(model.init, jax.random.key(0), BATCH)


def share_experts(devices):
    """Share four experts among devices."""
    mesh = jax.make_mesh((devices,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    mixture, x = MixtureOfExperts(experts=4, top_k=2, width=12), jnp.zeros((6, 4, 6))
    with jax.set_mesh(mesh):
        jax.eval_shape(mixture.init, jax.random.key(0), x)


def quantize(module, format_name, *inputs, **settings):
    pytest.importorskip("qwix")
    from jengine.extras.networks.quantized import quantize

    quantize(module, format_name, **settings).init(jax.random.key(0), *inputs)


REFUSED = {
    # attention
    "heads that are no multiple": (lambda: attend(QUERY, QUERY[:, :, :3], QUERY[:, :, :3]), ValueError, "heads", "`key`", "got 4 and 3"),
    "a window without causality": (lambda: attend(QUERY, KEY, VALUE, causal=False, window=3), ValueError, "`window`", "None", "`causal`"),
    "a window of nothing": (lambda: attend(QUERY, KEY, VALUE, window=0), ValueError, "`window`", "at least 1", "got 0"),
    "100 tokens for splash attention": (lambda: attend(QUERY[:, :100], KEY[:, :100], VALUE[:, :100], implementation="splash"), ValueError, "multiple of 128", "splash", "got 100"),
    "keys of another sequence": (lambda: attend(QUERY, KEY[:, :150], VALUE), ValueError, "`key` and `value`", "f[B, T, G, K]", "[2, 384, 4, 16], [2, 150, 2, 16]"),
    "segments of another length": (lambda: attend(QUERY, KEY, VALUE, segment_ids=jnp.ones((2, 299), int)), ValueError, "`segment_ids`", "int[2, 384]", "int32[2, 299]"),
    "an unknown implementation": (lambda: attend(QUERY, KEY, VALUE, implementation="flash"), ValueError, "auto, splash, cudnn, tokamax, blocks, plain", "'flash'"),
    "a width that the heads do not divide": (
        lambda: TransformerLM(vocab_size=11, width=8, depth=3, heads=3, mlp_width=12).init(jax.random.key(0), jnp.zeros((2, 6), int)), ValueError, "`width`", "2 * heads = 6", "got 8",
    ),
    **{
        f"blocks without a window, {changes}": (
            lambda changes=changes: TransformerLM(vocab_size=11, width=8, depth=3, heads=2, mlp_width=12, **changes).make_settings(), ValueError, "`full_blocks`", "depth = 3", "`window`",
        )
        for changes in (dict(full_blocks=(1,)), dict(full_blocks=(3,), window=2))
    },
    # modules
    "four experts on three devices": (lambda: share_experts(3), ValueError, "mesh axis 'expert'", "4 experts on 3 devices"),
    "a checkpoint of no module of Linen": (lambda: checkpoint(LinenModel, Linen()), ValueError, "'layer_0'", "closest: layers_0"),
    "a checkpoint of no module of NNX": (lambda: checkpoint(NnxModel, Nnx), ValueError, "'layer_0'", "closest: layers.0"),
    # formats
    "tiles of another size": (lambda: quantize(nn.Dense(7), "nvfp4", tile=32), ConfigError, "`tile`", "16", "'nvfp4'"),
    "gradients in int8": (lambda: quantize(nn.Dense(7), "int4", gradients="int8"), ConfigError, "`gradients`", "'int4'"),
    "a convolution in a format of tiles": (lambda: quantize(nn.Conv(4, (3, 3)), "mxfp8", np.ones((1, 8, 8, 3), "f")), ConfigError, "`paths`", "convolutions"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_a_network_cannot_do_is_refused(row, request):
    check_row(request, *row)
