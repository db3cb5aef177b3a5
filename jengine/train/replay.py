"""Dump the arguments of a training step, and run it again to find where its numbers become non-finite."""

import contextlib
import os
import pathlib
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.paths import flatten
from jengine.train.state import TrainState
from jengine.train.step import build_train_step
from jengine.train.traced_hooks import StepContext

PyTree = Any
_MARK = "non-finite elements of "


class Findings(NamedTuple):
    """Hold the results of a replayed step."""

    outputs: dict[str, float]  # metrics of the step
    non_finite: dict[str, int]  # path -> number of infinite or NaN elements, in the order of the computation
    operation: str  # the first operation with such a result, and its source line; '' for none


def replay_step(
    model: Any,
    optim_wrapper: Any,
    hooks: Sequence[Any],
    state: TrainState,
    batch: PyTree,
    hyperparams: Mapping[str, Any],
    *,
    update: bool = True,
    phases: Sequence[tuple[str, int]] | None = None,
    compile_step: Callable[..., Any] = jax.jit,
) -> Findings:
    """Run one training step on its recorded arguments, and check every array on the way.

    Args:
      model, optim_wrapper, hooks, update, phases: parts of the step, see `build_train_step`. Hooks that drop
        steps are left out.
      state: before the step.
      batch: its batch.
      hyperparams: its hyperparameters.
      compile_step: compiles it; a step with a mapped axis requires that of its strategy.
    """
    hooks = [hook for hook in hooks if not getattr(hook, "update_on_skipped_steps", False)]
    wrappers = list(optim_wrapper.values()) if isinstance(optim_wrapper, Mapping) else [optim_wrapper]
    axis = wrappers[0].axis_name
    step = build_train_step(model, optim_wrapper, [*hooks, _Probe(axis)], update=update, phases=phases)
    _, outputs = compile_step(step)(jax.tree.map(jnp.copy, state), batch, hyperparams)
    numbers = {name: float(value) for name, value in outputs.items() if not name.startswith(_MARK)}
    probed = {name.removeprefix(_MARK): int(n) for name, n in outputs.items() if name.startswith(_MARK)}
    counts: dict[str, Any] = {
        **_counts("params", state.params),
        **_counts("model_state", state.model_state),
        **{path: n for path, n in probed.items() if not path.startswith("grads")},
        **{name: int(not np.isfinite(value)) for name, value in numbers.items() if "loss" in name},
        **{path: n for path, n in probed.items() if path.startswith("grads")},
    }
    found = {path: int(n) for path, n in counts.items() if n}
    searches = found and axis is None  # JAX's search for the operation never ends in a step with a mapped axis
    return Findings(numbers, found, _first_operation(compile_step(step), state, batch, hyperparams) if searches else "")


class _Probe:
    """Count the non-finite elements of the batch, as the model receives it, and of the gradients, as a traced hook."""

    def __init__(self, axis: str | None) -> None:
        self._axis = axis

    def get_traced_points(self) -> list[str]:
        return ["traced_batch", "traced_grads"]

    def traced_batch(self, ctx: StepContext) -> StepContext:
        return self._with_counts(ctx, "batch", ctx.batch)

    def traced_grads(self, ctx: StepContext) -> StepContext:
        return self._with_counts(ctx, "grads", ctx.grads)

    def _with_counts(self, ctx: StepContext, name: str, tree: PyTree) -> StepContext:
        counts = {f"{_MARK}{path}": n for path, n in _counts(name, tree).items()}
        if self._axis is not None:
            counts = jax.lax.psum(counts, self._axis)
        return ctx.replace(metrics={**ctx.metrics, **counts})


def _counts(name: str, tree: PyTree) -> dict[str, jax.Array]:
    """Return the number of non-finite elements of each floating leaf, by path."""
    return {
        f"{name}.{path}" if path else name: jnp.sum(~jnp.isfinite(leaf))
        for path, leaf in flatten(tree).items()
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    }


def _first_operation(step: Callable[..., Any], *args: Any) -> str:
    """Return the first operation of `step` with a non-finite result, found by JAX's own search."""
    try:
        # JAX prints a line when its search starts
        with jax.debug_nans(True), jax.debug_infs(True), contextlib.redirect_stdout(None):
            jax.block_until_ready(step(*args))
    except FloatingPointError as error:
        # the innermost line of the user: neither JAX's nor one of this package
        frames = [
            f"{frame.filename}:{frame.lineno}: {frame.line}"
            for frame in traceback.extract_tb(error.__traceback__)
            if "site-packages" not in frame.filename and "/jengine/" not in frame.filename
        ]
        return "\n  ".join([str(error).splitlines()[0], *frames[-1:]])
    return ""


def write_dump(path: str | os.PathLike[str], **arguments: PyTree) -> None:
    """Writes pytrees of arrays; every process calls it, the first one writes.

    Args:
      path: the file.
      **arguments: what to write, by name. Typed keys are kept as such.
    """
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        def fetch(leaf: Any) -> Any:
            return leaf if _is_local(leaf) else multihost_utils.process_allgather(leaf, tiled=True)

        arguments = jax.tree.map(fetch, arguments)
    if jax.process_index() == 0:
        file = pathlib.Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(jax.tree.map(_plain, arguments)))


def read_dump(path: str | os.PathLike[str]) -> dict[str, PyTree]:
    """What `write_dump` wrote, by name. The file is a pickle: read only those of your own runs.

    Raises:
      ValueError: the file is none of those.
    """
    try:
        arguments = pickle.loads(pathlib.Path(path).read_bytes())
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is no dump of a training step") from error
    return jax.tree.map(
        lambda x: jax.random.wrap_key_data(jax.numpy.asarray(x.data), impl=x.impl) if isinstance(x, _Key) else x,
        arguments,
        is_leaf=lambda x: isinstance(x, _Key),
    )


class _Key:
    """A typed key on its way through the file."""

    def __init__(self, key: jax.Array) -> None:
        self.data = np.asarray(jax.random.key_data(key))
        self.impl = str(jax.random.key_impl(key))


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _Key(leaf)
    return np.asarray(leaf)


def _is_local(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
