"""Mixture of experts: many gated MLPs, where each token uses a few."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jengine.extras.networks.constrain import BATCH, CONTEXT
from jengine.extras.networks.mesh_axes import axes_that_divide
from jengine.model.constrain import axes_of_type

EXPERT = "expert"  # axis of the mesh over which experts are sharded
HIDDEN = "tensor"  # axis of the mesh over which their hidden channels are sharded


class MixtureOfExperts(nn.Module):
    """Gated MLPs, `down(silu(gate(x)) * up(x))`, where each token uses the `top_k` with the largest
    router weights.

    No token is dropped: tokens are sorted by expert, and each expert multiplies its own part
    (`jax.lax.ragged_dot`). On a mesh, each device sorts its own tokens, and gathers all experts'
    parameters. With the axis `expert`, devices hold and gather the parameters for some experts
    only: they gather the tokens along it, and exchange the sums. The axis `tensor` divides hidden
    channels.

    The balance loss, 1 if all experts get equally many tokens and `experts` if one gets all, is
    sown as `balance` into the collection `losses`: `LinenModel(..., sown_losses={"balance":
    0.01})`.

    Attributes:
      experts: MLP count.
      top_k: how many MLPs a token uses, with weights that add up to 1.
      width: hidden width per MLP.

    Sources: Shazeer et al. 2017 (top-k routing); Fedus et al. 2022 (balance loss); Gale et al. 2023
    (without dropping).
    """

    experts: int
    top_k: int
    width: int
    # leading axes of the module's own parameters, for rules by shape
    expert_axes: ClassVar[int] = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return tokens f[B, T, D] for tokens `x` f[B, T, D]."""
        size = x.shape[-1]
        init = nn.initializers.lecun_normal(batch_axis=(0,))
        gate, up = (
            self.param(name, init, (self.experts, size, self.width)) for name in ("gate", "up")
        )
        down = self.param("down", init, (self.experts, self.width, size))
        # In float32: in bfloat16 two experts often have the same weight, and the order of ties
        # would decide.
        router = nn.Dense(self.experts, use_bias=False, dtype=jnp.float32, name="router")
        probabilities = nn.softmax(router(x.astype(jnp.float32)))
        weights, chosen = jax.lax.top_k(probabilities, self.top_k)
        shares = jax.nn.one_hot(chosen, self.experts).sum(axis=-2).mean(axis=(0, 1)) / self.top_k
        self.sow(
            "losses", "balance", self.experts * (shares * probabilities.mean(axis=(0, 1))).sum()
        )
        weights = (weights / weights.sum(axis=-1, keepdims=True)).astype(x.dtype)
        return _on_each_device(
            x, chosen, weights, *(kernel.astype(x.dtype) for kernel in (gate, up, down))
        )


def _on_each_device(
    x: jax.Array, chosen: jax.Array, weights: jax.Array, *kernels: jax.Array
) -> jax.Array:
    """Apply the experts to the tokens on each device: a sort over all devices would exchange
    every token.
    """
    mesh = jax.sharding.get_abstract_mesh()
    mapped_axes = axes_of_type(mesh, AxisType.Auto)
    if not mapped_axes:
        return _apply_experts(x, chosen, weights, *kernels)
    count, _, width = kernels[0].shape
    batch = axes_that_divide(mesh, BATCH, x.shape[0])
    context = axes_that_divide(mesh, (CONTEXT,), x.shape[1])
    hidden = axes_that_divide(mesh, (HIDDEN,), width)
    expert = EXPERT if EXPERT in mapped_axes else None
    if expert and count % mesh.shape[EXPERT]:
        found = f"{count} experts on {mesh.shape[EXPERT]} devices"
        raise ValueError(
            f"MixtureOfExperts: `experts` must be a multiple of the mesh axis {EXPERT!r}, got "
            f"{found}"
        )
    axes = {*batch, *context, *hidden, expert} - {None}
    parts = mesh.shape[expert] if expert in batch else 1

    def apply(
        x: jax.Array, chosen: jax.Array, weights: jax.Array, *kernels: jax.Array
    ) -> jax.Array:
        # Gradients are summed over the axes along which only some arguments vary.
        x, chosen, weights = (
            jax.lax.pcast(y, tuple(sorted(axes - {*batch, *context})), to="varying")
            for y in (x, chosen, weights)
        )
        kernels = tuple(
            jax.lax.pcast(y, tuple(sorted(axes - {expert, *hidden})), to="varying") for y in kernels
        )
        if expert is not None:
            if expert in batch:
                x, chosen, weights = (
                    jax.lax.all_gather(y, expert, tiled=True) for y in (x, chosen, weights)
                )
            chosen = chosen - jax.lax.axis_index(expert) * kernels[0].shape[0]
        y = _apply_experts(x, chosen, weights, *kernels, parts=parts)
        # A token's sum over its experts, in parts on their devices.
        if expert is not None:
            y = (
                jax.lax.psum_scatter(y, expert, tiled=True)
                if expert in batch
                else jax.lax.psum(y, expert)
            )
        return jax.lax.psum(y, hidden) if hidden else y

    tokens = P(batch, context)
    inner = P(expert, None, hidden)
    outer = P(expert, hidden)
    mapped = jax.shard_map(
        apply,
        in_specs=(tokens, tokens, tokens, inner, inner, outer),
        out_specs=tokens,
        axis_names=mapped_axes,
    )
    return mapped(x, chosen, weights, *kernels)


def _apply_experts(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    *kernels: jax.Array,
    parts: int = 1,
) -> jax.Array:
    """Return the weighted sums over these experts.

    Numbers in `chosen` below 0 or too large belong to other experts.

    Rows are computed in `parts`, as many as the devices whose tokens these are: most rows belong to
    other experts, and parts without a row for these are left out.
    """
    top_k = chosen.shape[-1]
    count = kernels[0].shape[0]
    # Rows of other experts come last.
    experts = jnp.where((chosen >= 0) & (chosen < count), chosen, count).reshape(-1)
    order = jnp.argsort(experts)
    ends = jnp.zeros(count, jnp.int32).at[experts].add(1, mode="drop").cumsum()
    rows = order.reshape(parts, -1)
    if parts == 1:
        results = _compute_part(0, rows, ends, x, weights, *kernels)
    else:
        results = _compute_parts(rows, ends, x, weights, *kernels)
    # Back in the order of the tokens, so that a sum over the experts of each token needs no atomic
    # additions. The axis of these experts comes first: TPUs pad the last two, which would be
    # `top_k` and the width.
    places = jnp.argsort(order).reshape(-1, top_k).T
    return results.reshape(-1, x.shape[-1])[places].sum(axis=0).reshape(x.shape)


def _compute_part(
    i: jax.typing.ArrayLike,
    rows: jax.Array,
    ends: jax.Array,
    x: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
) -> jax.Array:
    """Return f[R, D], the results for part `i` in `rows` i32[parts, R], whose rows up to `ends`
    belong to experts.
    """
    size = rows.shape[1]
    # Rows are sorted by expert: the group sizes in this part, for `ragged_dot`, follow from where
    # each expert ends.
    counts = jnp.diff(jnp.clip(ends - i * size, 0, size), prepend=0)
    tokens = x.reshape(-1, x.shape[-1])[rows[i] // weights.shape[-1]]
    multiply = functools.partial(_multiply, counts=counts)
    hidden = nn.silu(multiply(tokens, gate)) * multiply(tokens, up)
    # Weighted here, where the row of a weight is known; the caller adds up the experts of a token.
    return multiply(hidden, down) * weights.reshape(-1)[rows[i], None]


def _multiply(tokens: jax.Array, kernels: jax.Array, counts: jax.Array) -> jax.Array:
    """Multiply each expert's rows; rows without an expert give zeros."""
    if kernels.shape[0] > 1:
        return jax.lax.ragged_dot(tokens, kernels, counts)
    # With one group, the kernel of TPUs does not compile in a loop.
    return jnp.where(jnp.arange(len(tokens))[:, None] < counts, tokens @ kernels[0], 0)


@jax.custom_vjp
def _compute_parts(rows: jax.Array, ends: jax.Array, *arrays: jax.Array) -> jax.Array:
    """Return f[parts, R, D], the results for all parts with rows for the experts, and zeros for the
    others.

    How many parts these are is known in the step only, and JAX cannot differentiate such a loop.
    The gradients recompute the results, so that one part's memory suffices.
    """
    x = arrays[0]
    zeros = jnp.zeros_like(x, shape=(*rows.shape, x.shape[-1]))

    def add(i: jax.Array, results: jax.Array) -> jax.Array:
        return results.at[i].set(_compute_part(i, rows, ends, *arrays))

    return jax.lax.fori_loop(0, _used_parts(rows, ends), add, zeros)


def _used_parts(rows: jax.Array, ends: jax.Array) -> jax.Array:
    return -(-ends[-1] // rows.shape[1])


def _forward(
    rows: jax.Array, ends: jax.Array, *arrays: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _compute_parts(rows, ends, *arrays), (rows, ends, *arrays)


def _backward(
    residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array | None, ...]:
    rows, ends, *arrays = residuals

    def add(i: jax.Array, gradients: list[jax.Array]) -> list[jax.Array]:
        _, backward = jax.vjp(lambda *arrays: _compute_part(i, rows, ends, *arrays), *arrays)
        return [total + new for total, new in zip(gradients, backward(gradient[i]), strict=True)]

    zeros = [jnp.zeros_like(array) for array in arrays]
    return None, None, *jax.lax.fori_loop(0, _used_parts(rows, ends), add, zeros)


_compute_parts.defvjp(_forward, _backward)
