"""Define the context of traced hooks: the values of the step that they are compiled into."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import struct

PyTree = Any


class StepContext(struct.PyTreeNode):
    """Hold the values of the current step. Hooks receive one and return one, changed by `ctx.replace(...)`.

    Attributes:
      step: int32[], iterations done before this one.
      rng: key<fry>[], a key for this hook in this iteration (for the model's at `loss`).
      batch: the batch.
      hyperparams: f32 arrays by name, passed by the host.
      params: parameters; before the update at `traced_batch` and `traced_grads`, after it at `traced_update`.
      model_state: state of the model; the new one after the loss.
      opt_state: state of the optimizer wrapper; the new one at `traced_update`.
      grads: the gradients of the total loss, None before there are any.
      loss_weight: f32[], weight of the gradients in a mean over iterations or replicas; None for equal weights.
      metrics: f32[] by name, returned by the step.
      hook_state: state of the hook that is called, see `Hook.init_traced_state`.
      apply_update: bool[], or None for True. A hook may set it at `traced_batch` or `traced_grads`; where it is False
        the step changes nothing but `step` and the states of hooks with `update_on_skipped_steps`.
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
    metrics: dict[str, jax.Array] = struct.field(default_factory=dict)
    hook_state: PyTree = None
    apply_update: jax.Array | None = None
