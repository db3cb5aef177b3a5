"""Training state, one donated pytree with everything that the step reads and updates, and the
size of parameters.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from optax import OptState

from jengine.optim.optimizers.common import strip_weak_types
from jengine.optim.wrapper import OptimWrapper
from jengine.optim.wrapper_dict import OptimWrapperDict, wrappers_by_name
from jengine.train.traced_hooks import TracedHooks

PyTree = Any

MAX_STEP = 2**31 - 1  # the largest `TrainState.step`
# the fields that `repr` describes by their size
_SIZED = ("params", "model_state", "opt_state", "hook_state")


class TrainState(struct.PyTreeNode):
    """Training state, as it is passed to the step and saved in checkpoints.

    Attributes:
      step: int32[], training iterations done (micro-batches under gradient accumulation).
      params: model parameters.
      model_state: other model variables (running statistics), {} for none.
      opt_state: optimizer wrapper state, moments in float32.
      hook_state: traced hook states, by hook name.
      rng: uint32[2], data of the run's key, which never changes: each step folds the step number
        in. (A typed key would be wrapped by Python code at each call.)
    """

    step: jax.Array
    params: PyTree
    model_state: PyTree
    opt_state: OptState
    hook_state: dict[str, PyTree]
    rng: jax.Array

    @property
    def key(self) -> jax.Array:
        """The key of the run, key<fry>[]."""
        return jax.random.wrap_key_data(self.rng)

    @property
    def is_abstract(self) -> bool:
        """Whether the leaves are `jax.ShapeDtypeStruct`s: a plan compiles the step and has no
        values.
        """
        return isinstance(self.step, jax.ShapeDtypeStruct)

    def __repr__(self) -> str:
        # Sizes instead of values: a notebook shows the result of `runner.train()`, perhaps after it
        # was donated.
        is_known = isinstance(self.step, jax.Array) and not isinstance(self.step, jax.core.Tracer)
        step = "?" if not is_known or self.step.is_deleted() else str(self.step)
        sizes = ((name, jax.tree.leaves(getattr(self, name))) for name in _SIZED)
        parts = (
            f"{name}={sum(math.prod(jnp.shape(x)) for x in arrays):,} in {len(arrays)} arrays"
            for name, arrays in sizes
        )
        return f"TrainState(step={step}, {', '.join(parts)})"


def create_train_state(
    params: PyTree,
    model_state: PyTree,
    optim_wrapper: OptimWrapper | OptimWrapperDict,
    hooks: Sequence[Any] = (),
    *,
    rng: jax.Array,
) -> TrainState:
    """Create the initial state, without weak types, which would compile the step twice.

    Args:
      params: parameters. They are not copied, and the first step donates them.
      model_state: other model variables.
      optim_wrapper: initializes the optimizer state, and scales the parameters if it has a
        parametrization.
      hooks: the hooks whose traced state becomes part of the state.
      rng: key<fry>[], the key of the run.

    Raises:
      ValueError: the key implementation is not JAX's default (`jax_default_prng_impl`), or is
        'unsafe_rbg'.
    """
    if jax.random.key_impl(rng) != jax.random.key_impl(jax.random.key(0)):  # which `key` assumes
        raise ValueError(
            f"rng must be a key of JAX's default implementation, got {jax.random.key_impl(rng)}"
        )
    if str(jax.random.key_impl(rng)) == "unsafe_rbg":
        raise ValueError(
            "`jax_default_prng_impl` must be 'rbg' or 'threefry2x32', got 'unsafe_rbg': its "
            "`fold_in` commutes, so "
            "that iterations, micro-batches and layers would draw the same numbers as others"
        )
    params = strip_weak_types(params)
    for wrapper in wrappers_by_name(optim_wrapper).values():
        if (rescale := getattr(wrapper, "rescale", None)) is not None:
            params = rescale(params)
    model_state = strip_weak_types(model_state)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        model_state=model_state,
        opt_state=optim_wrapper.init(params),
        hook_state=TracedHooks(hooks).init(params, model_state),
        rng=jax.random.key_data(rng),
    )


def parameter_size(params: PyTree) -> str:
    """Return the numbers of tensors and parameters, and the memory.

    >>> parameter_size({"w": jax.ShapeDtypeStruct((1024, 256), "float32")})
    '1 tensors, 262,144 parameters, 1.00 MiB'
    """
    tensors, parameters, size = count_parameters(params)
    return f"{tensors} tensors, {parameters:,} parameters, {size / 2**20:,.2f} MiB"


def count_parameters(params: PyTree) -> tuple[int, int, int]:
    """Return the numbers of tensors, parameters and bytes."""
    leaves = jax.tree.leaves(params)
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    return (
        len(sizes),
        sum(sizes),
        sum(size * leaf.dtype.itemsize for size, leaf in zip(sizes, leaves, strict=True)),
    )
