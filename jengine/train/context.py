"""What a traced hook sees of the step that it is compiled into."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import struct

PyTree = Any


class StepContext(struct.PyTreeNode):
    """The step in the making. Hooks get one and return one, changed by `ctx.replace(...)`.

    Attributes:
      step: int32[], iterations done before this one.
      rng: key<fry>[], a key for this hook in this iteration (for the model's at `loss`).
      batch: the batch.
      hyperparams: what the host handed to this step, f32 arrays by name.
      params: parameters; before the update at `traced_batch` and `traced_grads`, after it at `traced_update`.
      model_state: the model's state; after the loss it is the new one.
      opt_state: the optimizer wrapper's state, the new one at `traced_update`.
      grads: the gradients of the total loss, None before there are any.
      loss_weight: f32[], what the gradients count with in a mean over iterations or replicas; None: all alike.
      outputs: what the step reports, scalars by name.
      hook_state: the calling hook's own state, see `Hook.init_traced_state`.
      accept: bool[] or None, whether this iteration counts. A hook may set it at `traced_batch` or `traced_grads`;
        where it is False the step changes nothing but `step` and the states of hooks with `counts_dropped_steps`.
    """

    step: jax.Array
    rng: jax.Array
    batch: PyTree
    hyperparams: Mapping[str, Any]
    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    grads: PyTree = None
    loss_weight: jax.Array | None = None
    outputs: dict[str, jax.Array] = struct.field(default_factory=dict)
    hook_state: PyTree = None
    accept: jax.Array | None = None
