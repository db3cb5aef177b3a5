"""Define the Flax models that the recorded weights of tests/data/pretrained are loaded into."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx


class BasicBlock(nn.Module):
    """Define torchvision's BasicBlock."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x, train=False):
        conv = functools.partial(nn.Conv, self.width, use_bias=False)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        y = nn.relu(norm(name="bn1")(conv((3, 3), self.stride, padding=1, name="conv1")(x)))
        y = norm(name="bn2")(conv((3, 3), padding=1, name="conv2")(y))
        if x.shape != y.shape:
            x = norm(name="downsample_1")(conv((1, 1), self.stride, name="downsample_0")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Define torchvision's ResNet-18, with NHWC images."""

    num_classes: int = 5
    width: int = 4

    @nn.compact
    def __call__(self, image, train=False):
        x = nn.Conv(self.width, (7, 7), 2, padding=3, use_bias=False, name="conv1")(image)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name="bn1")(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for stage in range(4):
            for block in range(2):
                stride = 2 if stage > 0 and block == 0 else 1
                x = BasicBlock(self.width * 2**stage, stride, name=f"layer{stage + 1}_{block}")(x, train)
        return nn.Dense(self.num_classes, name="fc")(x.mean((1, 2)))


class ViT(nn.Module):
    """Define timm's vision transformer, with the attention of Flax."""

    num_classes: int = 5
    width: int = 24

    @nn.compact
    def __call__(self, image):
        x = nn.Conv(self.width, (4, 4), (4, 4), name="embed")(image).reshape(len(image), -1, self.width)
        token = self.param("cls_token", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, self.width)), x], axis=1)
        x = x + self.param("pos_embed", nn.initializers.zeros, (1, x.shape[1], self.width))
        for i in range(2):
            y = nn.LayerNorm(name=f"layers_{i}_norm1")(x)
            x = x + nn.MultiHeadDotProductAttention(3, name=f"layers_{i}_attn")(y)
            y = nn.Dense(4 * self.width, name=f"layers_{i}_fc1")(nn.LayerNorm(name=f"layers_{i}_norm2")(x))
            x = x + nn.Dense(self.width, name=f"layers_{i}_fc2")(nn.gelu(y, approximate=False))
        return nn.Dense(self.num_classes, name="head")(nn.LayerNorm(name="norm")(x)[:, 0])


class NnxAttention(nnx.Module):
    """Define an attention with one matrix for queries, keys and values, like timm."""

    def __init__(self, width, heads, rngs):
        self.heads = heads
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.proj = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(*x.shape[:2], 3, self.heads, -1), 2, 0)
        return self.proj(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))


class NnxMlp(nnx.Module):
    """Define the two layers after the attention."""

    def __init__(self, width, rngs):
        self.fc1 = nnx.Linear(width, 4 * width, rngs=rngs)
        self.fc2 = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return self.fc2(nnx.gelu(self.fc1(x), approximate=False))


class NnxBlock(nnx.Module):
    """Define a block with the names of timm."""

    def __init__(self, width, rngs, attention=NnxAttention):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attn = attention(width, 3, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = NnxMlp(width, rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class NnxPatches(nnx.Module):
    """Define timm's patch embedding."""

    def __init__(self, width, rngs):
        self.proj = nnx.Conv(3, width, (4, 4), (4, 4), rngs=rngs)


class NnxViT(nnx.Module):
    """Define timm's vision transformer in NNX, with all of its names."""

    def __init__(self, rngs, width=24, num_classes=5):
        self.patch_embed = NnxPatches(width, rngs)
        self.cls_token = nnx.Param(jnp.zeros((1, 1, width)))
        self.pos_embed = nnx.Param(jnp.zeros((1, 17, width)))
        self.blocks = nnx.List([NnxBlock(width, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, num_classes, rngs=rngs)

    def __call__(self, image):
        x = self.patch_embed.proj(image)
        x = x.reshape(len(x), -1, x.shape[-1])
        token = jnp.broadcast_to(self.cls_token[...], (len(x), 1, x.shape[-1]))
        x = jnp.concatenate([token, x], axis=1) + self.pos_embed[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])
