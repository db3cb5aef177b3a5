"""Parameters that the loss does not reach, such as those behind `jax.lax.stop_gradient`.

Their gradients are zero whatever the values are, but a weight decay moves them.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jengine.config import paths
from jengine.data.host_entries import select_arrays
from jengine.data.masking import whole_batches
from jengine.extras.diagnose.failing_examples import list_some
from jengine.optim.wrapper import OptimWrapper
from jengine.optim.wrapper_dict import wrappers_by_name
from jengine.parallel.replica_axis import map_per_replica
from jengine.train.losses import total_loss
from jengine.train.phases import apply_precision

PyTree = Any


def list_unreached(loss: Callable[[PyTree], jax.Array], params: PyTree) -> list[str]:
    """Return the dotted paths of the parameters on which a scalar loss does not depend, as far as a
    trace tells: parameters within a loop count as reached.

    >>> list_unreached(lambda p: p["a"] * jax.lax.stop_gradient(p["b"]), {"a": 1.0, "b": 2.0})
    ['b']
    """
    reached = set()

    def mark(path: str, leaf: jax.Array) -> jax.Array:
        @jax.custom_vjp
        def identity(x: jax.Array) -> jax.Array:
            return x

        def backward(_: None, cotangent: Any) -> tuple[jax.Array]:
            if isinstance(cotangent, SymbolicZero):
                return (jnp.zeros(cotangent.shape, cotangent.dtype),)
            reached.add(path)
            return (cotangent,)

        identity.defvjp(lambda x: (x.value, None), backward, symbolic_zeros=True)
        return identity(leaf)

    jax.eval_shape(jax.grad(lambda params: loss(paths.map_with_path(mark, params))), params)
    return [path for path in paths.flatten(params) if path not in reached]


def describe_unreached(run: Any) -> list[str]:
    """Return a line with the trained parameters that no loss of a run reaches.

    [] for none, for a model with its own step, and for a loss that needs more than a batch, such as
    a mapped axis.
    """
    if run.model.has_train_step:
        return []
    # A loss alone has no collectives, so the first replica is enough
    is_single = run.strategy.replicas is None
    state = run.state if is_single else map_per_replica(lambda leaf: leaf[0], run.state)
    loader = run.train_dataloader
    batch = select_arrays(loader.example())
    hyperparams = run.step_hyperparams()

    def list_of(name: str, wrapper: OptimWrapper) -> list[str]:
        model = apply_precision(run.model, wrapper)
        loss = functools.partial(model.phase_loss, name) if name else model.loss

        def total(params: PyTree) -> jax.Array:
            losses, _ = loss(
                params, state.model_state, batch, rng=jax.random.key(0), hyperparams=hyperparams
            )
            return total_loss(losses, batch)[0]

        trained = paths.flatten(wrapper.grouped.layout(state.params).trainable(state.params))
        return [path for path in list_unreached(total, state.params) if path in trained]

    unreached: list[str] = []
    with contextlib.suppress(Exception), whole_batches(loader.batch_rules is not None):
        for name, wrapper in wrappers_by_name(run.optim_wrapper).items():
            unreached += list_of(name, wrapper)
    if not unreached:
        return []
    return [
        f"No loss reaches the parameters {list_some(unreached, 10)}: a weight decay moves "
        "them, though their gradients are zero. Freeze them by requires_grad=False in custom_keys, "
        "or by `trainable` or `wrt` of the model."
    ]
