"""Mixture of experts: a gated MLP of which each token uses a few of many."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jengine.model.attention import BATCH
from jengine.model.constrain import axes_of_type


class MixtureOfExperts(nn.Module):
    """Gated MLPs, `down(silu(gate(x)) * up(x))`, of which each token uses the `top_k` with the largest router weights.

    No token is dropped: tokens are sorted by expert, and each expert multiplies its own part (`jax.lax.ragged_dot`). On
    a mesh, each device sorts its own tokens; the parameters are gathered, as those of other layers with `fsdp`.

    The balance loss, 1 if all experts get equally many tokens and `experts` if one gets all, is sown as `balance` into
    the collection `losses`: `LinenModel(..., sown_losses={"balance": 0.01})`.

    Attributes:
      experts: number of MLPs.
      top_k: number of MLPs that a token uses, with weights that add up to 1.
      width: hidden width of each.

    Sources: Shazeer et al. 2017 (top-k routing); Fedus et al. 2022 (balance loss); Gale et al. 2023 (without dropping).
    """

    experts: int
    top_k: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return tokens f[B, T, D] for tokens `x` f[B, T, D]."""
        size = x.shape[-1]
        init = nn.initializers.lecun_normal(batch_axis=(0,))
        gate, up = (self.param(name, init, (self.experts, size, self.width)) for name in ("gate", "up"))
        down = self.param("down", init, (self.experts, self.width, size))
        # In float32: in bfloat16 two experts often have the same weight, and the order of ties would decide.
        router = nn.Dense(self.experts, use_bias=False, dtype=jnp.float32, name="router")
        probabilities = nn.softmax(router(x.astype(jnp.float32)))
        weights, chosen = jax.lax.top_k(probabilities, self.top_k)
        shares = jax.nn.one_hot(chosen, self.experts).sum(axis=-2).mean(axis=(0, 1)) / self.top_k
        self.sow("losses", "balance", self.experts * (shares * probabilities.mean(axis=(0, 1))).sum())
        weights = (weights / weights.sum(axis=-1, keepdims=True)).astype(x.dtype)
        return _on_each_device(x, chosen, weights, *(kernel.astype(x.dtype) for kernel in (gate, up, down)))


def _on_each_device(x: jax.Array, chosen: jax.Array, weights: jax.Array, *kernels: jax.Array) -> jax.Array:
    """Apply the experts to the tokens of each device: a sort over all devices would exchange every token."""
    mesh = jax.sharding.get_abstract_mesh()
    mapped_axes = axes_of_type(mesh, AxisType.Auto)
    if not mapped_axes:
        return _apply_experts(x, chosen, weights, *kernels)
    batch = tuple(name for name in BATCH if name in mapped_axes)
    batch = batch if x.shape[0] % math.prod(mesh.shape[name] for name in batch) == 0 else ()
    mapped = jax.shard_map(
        _apply_experts,
        in_specs=(P(batch), P(batch), P(batch), P(), P(), P()),
        out_specs=P(batch),
        axis_names=mapped_axes,
    )
    return mapped(x, chosen, weights, *kernels)


def _apply_experts(
    x: jax.Array, chosen: jax.Array, weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    top_k, size = chosen.shape[-1], x.shape[-1]
    experts = chosen.reshape(-1)
    order = jnp.argsort(experts)
    counts = jnp.zeros(gate.shape[0], jnp.int32).at[experts].add(1)
    multiply = functools.partial(jax.lax.ragged_dot, group_sizes=counts)
    tokens = x.reshape(-1, size)[order // top_k]
    hidden = nn.silu(multiply(tokens, gate)) * multiply(tokens, up)
    results = multiply(hidden, down) * weights.reshape(-1)[order, None]
    # Back in the order of the tokens, so that a sum over the experts of each token needs no atomic additions.
    return results[jnp.argsort(order)].reshape(*x.shape[:-1], top_k, size).sum(axis=-2)
