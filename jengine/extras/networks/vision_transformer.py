"""Vision transformers as Linen modules: classifiers, and CLIP's encoders for images and texts."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from jengine.config.annotations import Count, Decay, Index, Positive
from jengine.config.registry import MODELS
from jengine.extras.networks.activations import ACTIVATIONS, Activation
from jengine.model.losses import CrossEntropy
from jengine.model.model import Batch, Losses


class ViTBlock(nn.Module):
    """Pre-norm transformer block.

    Attributes:
      heads: number of attention heads.
      mlp_ratio: hidden MLP width divided by the token width.
      dropout: dropout rate after attention and MLP.
      activation: nonlinearity in the MLP.
      norm_epsilon: number added to the variance in norms.
    """

    heads: Count
    mlp_ratio: Positive
    dropout: Decay
    activation: Activation | Literal["quick_gelu"] = "gelu_tanh"
    norm_epsilon: Positive = 1e-6

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None = None) -> jax.Array:
        """Return tokens f[B, N, D] for tokens `x` f[B, N, D].

        `mask`, bool[B or 1, 1, N, N], says which tokens each attends to; None for all.
        """
        y = nn.LayerNorm(self.norm_epsilon, name="ln1")(x)
        y = nn.MultiHeadDotProductAttention(self.heads, name="attn")(y, mask=mask)
        x = x + nn.Dropout(self.dropout, deterministic=not train)(y)
        y = nn.LayerNorm(self.norm_epsilon, name="ln2")(x)
        y = nn.Dense(round(self.mlp_ratio * x.shape[-1]), name="fc1")(y)
        y = nn.Dense(x.shape[-1], name="fc2")(ACTIVATIONS[self.activation](y))
        return x + nn.Dropout(self.dropout, deterministic=not train)(y)


@MODELS.register_module()
class ViT(nn.Module):
    """Vision transformer with a class token and learned position embeddings.

    The defaults are ViT-B/16. `jengine.extras.weights.hub_module` reads the arguments from a
    Hugging Face `config.json`.

    >>> logits, _ = ViT(patch=4, width=8, depth=1, heads=2).init_with_output(
    ...     jax.random.key(0), jnp.zeros((1, 8, 8, 3))
    ... )
    >>> logits.shape
    (1, 1000)

    Attributes:
      num_classes: number of classes; None to return features f[B, width].
      patch: side length of a patch in pixels.
      width: token width.
      depth: number of blocks.
      heads: attention heads per block.
      mlp_ratio: hidden MLP width divided by `width`.
      dropout: dropout rate in the blocks.
      activation: nonlinearity in the MLPs; 'gelu_tanh' is the approximate GELU.
      norm_epsilon: number added to the variance in norms.
      patch_bias: whether the patch embedding has a bias.
      pre_norm: whether tokens are also normed before the first block.

    Source: Dosovitskiy et al. 2021.
    """

    num_classes: Count | None = 1000
    patch: Count = 16
    width: Count = 768
    depth: Count = 12
    heads: Count = 12
    mlp_ratio: Positive = 4.0
    dropout: Decay = 0.0
    activation: Activation | Literal["quick_gelu"] = "gelu"
    norm_epsilon: Positive = 1e-12
    patch_bias: bool = True
    pre_norm: bool = False

    @nn.compact
    def __call__(self, image: jax.Array, train: bool = False) -> jax.Array:
        """Return logits f[B, num_classes], or features, for images f[B, H, W, C]."""
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, size, use_bias=self.patch_bias, name="patch_embed")(image)
        x = x.reshape(x.shape[0], -1, self.width)
        cls_token = self.param("cls_token", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate(
            [jnp.broadcast_to(cls_token, (x.shape[0], 1, self.width)).astype(x.dtype), x], axis=1
        )
        # Learned, as attention alone does not see the order of patches.
        x = x + self.param("pos_embed", nn.initializers.normal(0.02), (1, x.shape[1], self.width))
        if self.pre_norm:
            x = nn.LayerNorm(self.norm_epsilon, name="pre_norm")(x)
        block = self.heads, self.mlp_ratio, self.dropout, self.activation, self.norm_epsilon
        for i in range(self.depth):
            x = ViTBlock(*block, name=f"layers_{i}")(x, train)
        x = nn.LayerNorm(self.norm_epsilon, name="norm")(x[:, 0])
        return x if self.num_classes is None else nn.Dense(self.num_classes, name="head")(x)


class TextTransformer(nn.Module):
    """Text encoder of `CLIP`: tokens attend to earlier ones, and the last one stands for all.

    Attributes:
      vocab_size: vocabulary size in tokens.
      width, depth, heads, mlp_ratio, activation, norm_epsilon: see `ViT`.
      max_length: the most tokens.
      end_token: the token that ends a text; None for the largest one in each text.
    """

    vocab_size: Count = 49_408
    width: Count = 512
    depth: Count = 12
    heads: Count = 8
    mlp_ratio: Positive = 4.0
    activation: Activation | Literal["quick_gelu"] = "quick_gelu"
    norm_epsilon: Positive = 1e-5
    max_length: Count = 77
    end_token: Index | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Return features f[B, width] for tokens int[B, T]."""
        length = tokens.shape[1]
        if length > self.max_length:
            raise ValueError(
                f"CLIP: texts must have at most max_length = {self.max_length} tokens, got {length}"
            )
        normal = nn.initializers.normal(0.02)
        x = nn.Embed(self.vocab_size, self.width, embedding_init=normal, name="embed")(tokens)
        x = x + self.param("pos_embed", normal, (self.max_length, self.width))[:length]
        mask = nn.make_causal_mask(tokens)
        block = self.heads, self.mlp_ratio, 0.0, self.activation, self.norm_epsilon
        for i in range(self.depth):
            x = ViTBlock(*block, name=f"layers_{i}")(x, train, mask)
        x = nn.LayerNorm(self.norm_epsilon, name="norm")(x)
        # the first of equal ones
        last = jnp.argmax(tokens if self.end_token is None else tokens == self.end_token, axis=1)
        return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]


@MODELS.register_module()
class CLIP(nn.Module):
    """Encoders for images and texts whose features are near each other for pairs.

    Training minimizes `contrastive_loss` over the pairs in a batch, with the inputs `image` and
    `tokens` of a `LinenModel` whose module is, for example, `hub_module("weights/clip")`.

    Attributes:
      image: arguments of `ViT`.
      text: arguments of `TextTransformer`.
      width: width of the common features.
      logit_scale: initial logarithm of the factor for similarities.

    Source: Radford et al. 2021.
    """

    image: Mapping[str, Any]
    text: Mapping[str, Any]
    width: Count = 512
    logit_scale: float = 2.6592

    def setup(self) -> None:
        """Make the encoders and the projections."""
        self.image_encoder = ViT(num_classes=None, **self.image)
        self.text_encoder = TextTransformer(**self.text)
        self.image_projection = nn.Dense(self.width, use_bias=False)
        self.text_projection = nn.Dense(self.width, use_bias=False)
        start = nn.initializers.constant(self.logit_scale)
        self.log_factor = self.param("log_factor", start, ())

    def make_settings(self) -> dict[str, Any]:
        """Return the settings of both encoders, also those that are not given."""
        # without a parent, as they are made to be read alone
        image = ViT(parent=None, **self.image)
        encoders = {"image": image, "text": TextTransformer(parent=None, **self.text)}
        return {
            f"{name}.{field.name}": getattr(encoder, field.name)
            for name, encoder in encoders.items()
            for field in dataclasses.fields(encoder)
            if field.name not in ("parent", "name", "num_classes")
        }

    def __call__(self, image: jax.Array, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Return logits f[B, N] for images f[B, H, W, C] with texts int[N, T]."""
        images = self.embed_image(image, train)
        texts = self.embed_text(tokens, train)
        return jnp.exp(self.log_factor) * images @ texts.T

    def embed_image(self, image: jax.Array, train: bool = False) -> jax.Array:
        """Return features f[B, width] of length 1 for images f[B, H, W, C]."""
        return _normalize(self.image_projection(self.image_encoder(image, train)))

    def embed_text(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Return features f[N, width] of length 1 for texts int[N, T]."""
        return _normalize(self.text_projection(self.text_encoder(tokens, train)))


def _normalize(x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def contrastive_loss(logits: jax.Array, batch: Batch) -> Losses:
    """Return the loss of `CLIP` for the pairs in a batch, {'loss': f[B]}.

    It is the mean of two cross-entropies: of the text for each image, and of the image for each
    text.

    >>> contrastive_loss(jnp.zeros((4, 4)), {})["loss"]
    Array([1.3862944, 1.3862944, 1.3862944, 1.3862944], dtype=float32)
    """
    pairs = {"label": jnp.arange(logits.shape[0])}
    losses = [CrossEntropy()(x, pairs)["loss"] for x in (logits, logits.T)]
    return {"loss": (losses[0] + losses[1]) / 2}
