"""Pipeline parallelism: the blocks of a network on different devices, with microbatches.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/pipeline.py

GPipe's schedule (Huang et al. 2019, https://arxiv.org/abs/1811.06965) as a function in the network:
a device has the parameters of one stage, and passes its results on to the next. The strategy,
`Pjit`, has a mesh with an axis `stage`; without one, the same network computes on one device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from jengine import Runner
from jengine.config import MODELS

PyTree = Any


def pipeline(
    apply: Callable[[PyTree, jax.Array], jax.Array],
    params: PyTree,
    x: jax.Array,
    microbatches: int,
    axis: str = "stage",
) -> jax.Array:
    """Return `x` after all stages, `apply(params[-1], ... apply(params[0], x))`.

    Args:
      apply: function of the parameters of a stage and f[b, ...], which keeps the shape and treats
        examples alone.
      params: of all stages, each array with a leading axis of stages.
      x: f[B, ...].
      microbatches: the parts of the batch, which must divide it. All devices work in `microbatches`
        of `microbatches + stages - 1` ticks.
      axis: the mesh axis of the stages.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.axis_names:
        return jax.lax.scan(lambda x, stage: (apply(stage, x), None), x, params)[0]
    stages = mesh.shape[axis]

    def run_stage(params: PyTree, x: jax.Array) -> jax.Array:
        own = jax.tree.map(lambda p: p[0], params)  # the axis of stages, of which this has one
        stage = jax.lax.axis_index(axis)
        parts = x.reshape(-1, microbatches, *x.shape[1:])  # axis 0 stays sharded as it is

        def tick(received: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            new = parts[:, jnp.minimum(i, microbatches - 1)]
            out = apply(own, jnp.where(stage == 0, new, received))
            # the gradients go back the same way
            sent = jax.lax.ppermute(out, axis, [(j, j + 1) for j in range(stages - 1)])
            return sent, out

        nothing = jax.lax.pcast(jnp.zeros_like(parts[:, 0]), axis, to="varying")
        _, outs = jax.lax.scan(tick, nothing, jnp.arange(microbatches + stages - 1))
        finished = jnp.moveaxis(outs[stages - 1 :], 0, 1).reshape(x.shape)  # in the last stage
        return jax.lax.psum(jnp.where(stage == stages - 1, finished, 0), axis)

    in_specs = P(axis), P()
    return jax.shard_map(run_stage, in_specs=in_specs, out_specs=P(), axis_names={axis})(params, x)


class Block(nn.Module):
    """Transformer block, from f[B, T, D] to the same."""

    @nn.compact
    def __call__(self, x):
        """Return the sum of the input and of what attention and perceptron add."""
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


@MODELS.register_module()
class PipelinedClassifier(nn.Module):
    """Classifier of images f[B, H, W, 1] by their rows, with a stack of blocks."""

    width: int = 32
    stages: int = 2
    microbatches: int = 4

    @nn.compact
    def __call__(self, image):
        """Return the logits, f[B, 10]."""
        x = nn.Dense(self.width)(image[..., 0])
        x = x + self.param("position", nn.initializers.normal(0.1), x.shape[1:])
        block = Block(parent=None)  # its parameters are those below, which have a leading axis

        def init(key: jax.Array) -> PyTree:
            keys = jax.random.split(key, self.stages)
            return jax.vmap(lambda key: block.init(key, x)["params"])(keys)

        params = self.param("blocks", init)
        x = pipeline(lambda p, x: block.apply({"params": p}, x), params, x, self.microbatches)
        return nn.Dense(10)(x.mean(axis=1))


def main(max_epochs: int = 20, work_dir: str = "work_dirs/pipeline", stages: int = 2) -> Runner:
    """Train on a mesh with an axis `stage`, or without one for `stages=1`; return the Runner."""
    mesh = dict(stage=stages, data=-1)
    rules = [("blocks", ("stage",))]  # the first axis of all parameters below `blocks`
    pjit = dict(type="Pjit", mesh=mesh, batch_axes=("data",), rules=rules)
    runner = Runner(
        dict(
            type="LinenModel",
            module=dict(type="PipelinedClassifier"),
            loss=dict(type="CrossEntropy"),
        ),
        work_dir,
        train_dataloader=dict(batch_size=64, dataset=dict(type="Digits", split="train")),
        train_cfg=dict(max_epochs=max_epochs, val_interval=5),
        val_dataloader=dict(batch_size=64, dataset=dict(type="Digits", split="test")),
        val_cfg=dict(),
        val_evaluator=dict(type="Accuracy"),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=3e-3)),
        parallel=pjit if stages > 1 else None,
        randomness=dict(seed=0),
    )
    runner.train()
    return runner


if __name__ == "__main__":
    main(stages=2 if len(jax.devices()) > 1 else 1)
