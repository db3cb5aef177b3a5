"""Dumps of a failed training step, and a replay that finds the first non-finite values."""

import os
import pathlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from jengine.config.paths import flatten
from jengine.config.storage import LARGE, read_bytes
from jengine.data.batch_check import Batch
from jengine.extras.diagnose.failing_examples import find_examples
from jengine.extras.diagnose.first_failure import find_failure, named_nnx_layers
from jengine.train.phases import PhaseConfig
from jengine.train.state import TrainState
from jengine.train.step import build_train_step
from jengine.train.traced_hooks import StepContext

PyTree = Any
_COUNT_PREFIX = "non-finite elements of "


def write_dump(path: str | os.PathLike[str], **arguments: PyTree) -> None:
    """Write pytrees of arrays, by name, to a file.

    Every process must call this, and process 0 writes.
    """
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        def fetch(leaf: Any) -> Any:
            if (
                not isinstance(leaf, jax.Array)
                or leaf.is_fully_addressable
                or leaf.is_fully_replicated
            ):
                return leaf
            array = multihost_utils.process_allgather(leaf, tiled=True)
            # the others must not hold a whole state
            return array if jax.process_index() == 0 else None

        arguments = jax.tree.map(fetch, arguments)
    if jax.process_index() == 0:
        file = pathlib.Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        # A pickle, because the replay needs optax's classes of states
        file.write_bytes(pickle.dumps(jax.tree.map(_to_host, arguments)))


def read_dump(path: str | os.PathLike[str]) -> dict[str, PyTree]:
    """Return the arguments of `write_dump`; raise ValueError for another file.

    The file is a pickle: you should read only files that you trust.
    """
    try:
        # Pickle: only dumps of the user's own runs are read, which may hold any pytree classes of
        # their code.
        arguments = pickle.loads(read_bytes(path, limit=LARGE))
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} must be a dump of a training step, got another file") from error
    return jax.tree.map(
        lambda x: (
            jax.random.wrap_key_data(jnp.asarray(x.data), impl=x.impl) if isinstance(x, _Key) else x
        ),
        arguments,
        # Keys are stored as data and implementation, since JAX does not pickle them.
        is_leaf=lambda x: isinstance(x, _Key),
    )


class _Key:
    """A typed key in the file."""

    def __init__(self, key: jax.Array) -> None:
        self.data = np.asarray(jax.random.key_data(key))
        self.impl = str(jax.random.key_impl(key))


def _to_host(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _Key(leaf)  # NumPy has no typed keys
    return np.asarray(leaf)


class Findings(NamedTuple):
    """Results of a replayed step."""

    metrics: dict[str, float]
    non_finite: dict[str, int]  # path -> number of infinite or NaN elements, in computation order
    # the first operation with a non-finite result, its layer and the user's line; '' for none
    operation: str
    # indices in the batch, at most 16, with which alone a loss or a gradient is not finite; None if
    # they were not looked for
    examples: list[int] | None


def replay_step(
    model: Any,
    optim_wrapper: Any,
    hooks: Sequence[Any],
    state: TrainState,
    batch: Batch,
    hyperparams: Mapping[str, Any],
    *,
    update: bool = True,
    phases: Sequence[PhaseConfig] | None = None,
    compile_step: Callable[..., Any] = jax.jit,
    bisect: bool = False,
) -> Findings:
    """Run one training step on recorded arguments, and count the non-finite elements of all arrays.

    Args:
      model, optim_wrapper, hooks, update, phases: see `build_train_step`. Hooks that skip steps are
        not run.
      state, batch, hyperparams: arguments of the step.
      compile_step: compiles the step; one with a mapped axis requires the strategy's
        `compile_train_step`.
      bisect: also look for the examples, with the same compiled step.
    """
    hooks = [hook for hook in hooks if not hook.update_on_skipped_steps]
    step = build_train_step(
        model, optim_wrapper, [*hooks, _NonFiniteCounter()], update=update, phases=phases
    )
    compiled = compile_step(step)

    def run(batch: Batch) -> Mapping[str, jax.Array]:
        # a copy, because the step donates its state, which the searches need afterwards
        metrics: Mapping[str, jax.Array] = compiled(
            jax.tree.map(jnp.copy, state), batch, hyperparams
        )[1]
        return metrics

    metrics = run(batch)
    values = {
        name: float(value) for name, value in metrics.items() if not name.startswith(_COUNT_PREFIX)
    }
    counts = {
        name.removeprefix(_COUNT_PREFIX): int(n)
        for name, n in metrics.items()
        if name.startswith(_COUNT_PREFIX)
    }
    ordered: dict[str, Any] = {
        **_count_non_finite("params", state.params),
        **_count_non_finite("model_state", state.model_state),
        **{path: n for path, n in counts.items() if not path.startswith("grads")},
        **{name: int(not np.isfinite(value)) for name, value in values.items() if "loss" in name},
        **{path: n for path, n in counts.items() if path.startswith("grads")},
    }
    non_finite = {path: int(n) for path, n in ordered.items() if n}
    operation = ""
    if non_finite:
        args = state, batch, hyperparams
        with named_nnx_layers():
            program = jax.make_jaxpr(compile_step(step))(*args)
            failure = find_failure(program, args, checkify.float_checks)
        operation = f"{failure.text}{failure.describe()}" if failure else ""
    examples = find_examples(lambda part: _fails(run(part)), batch) if bisect else None
    return Findings(values, non_finite, operation, examples)


def _fails(metrics: Mapping[str, jax.Array]) -> bool:
    """Return whether a loss or a gradient is not finite."""
    grads = f"{_COUNT_PREFIX}grads"
    return any(
        value != 0 if name.startswith(grads) else not np.isfinite(value)
        for name, value in metrics.items()
        if name.startswith(grads) or "loss" in name
    )


class _NonFiniteCounter:
    """Last traced hook, which counts the non-finite elements in the batch and the gradients."""

    update_on_skipped_steps = False

    def get_traced_points(self) -> list[str]:
        return ["traced_batch", "traced_grads"]

    def traced_batch(self, ctx: StepContext) -> StepContext:
        return self._add_counts(ctx, "batch", ctx.batch)

    def traced_grads(self, ctx: StepContext) -> StepContext:
        return self._add_counts(ctx, "grads", ctx.grads)

    def _add_counts(self, ctx: StepContext, name: str, tree: PyTree) -> StepContext:
        counts = {f"{_COUNT_PREFIX}{path}": n for path, n in _count_non_finite(name, tree).items()}
        if ctx.axis_name is not None:
            counts = jax.lax.psum(counts, ctx.axis_name)
        # each of several optimizers has gradients of its own
        return ctx.replace(
            metrics={
                **ctx.metrics,
                **{key: n + ctx.metrics.get(key, 0) for key, n in counts.items()},
            }
        )


def _count_non_finite(name: str, tree: PyTree) -> dict[str, jax.Array]:
    """Return how many non-finite elements each floating leaf has, by path."""
    return {
        f"{name}.{path}" if path else name: jnp.sum(~jnp.isfinite(leaf))
        for path, leaf in flatten(tree).items()
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    }
