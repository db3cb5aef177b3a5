"""The first value that was not finite in the step of a loss that was not."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.checkpoint.restore import load
from jengine.config.paths import flatten, map_with_path
from jengine.data.host_entries import select_arrays
from jengine.data.masking import whole_batches
from jengine.extras.diagnose.failing_examples import draw_again, list_some
from jengine.extras.diagnose.inspection import (
    Origin,
    RecordedValue,
    compile_inspection,
    in_order,
    put_batch,
)
from jengine.extras.diagnose.numerics_guard import NumericsGuardHook
from jengine.extras.diagnose.traced_values import GRADIENT, OUTPUT, base_path
from jengine.extras.diagnose.wrong_labels import find_checkpoints
from jengine.logging.loss_watch import NonFiniteLossError
from jengine.logging.slow_call import report_if_slow
from jengine.parallel.flat_state import flatten_state
from jengine.train.initial_state import StateInitializer

_MAX_REPEATED = 100  # steps of a training that is repeated
_TREES = {
    "loss": "loss",
    "grads": "gradient of the parameter",
    "updates": "update of the parameter",
    "params": "parameter",
}
_UNKNOWN = "Which layer was the first with a value that is not finite cannot be told"


class _Step(NamedTuple):
    """Step to compute again."""

    iteration: int
    state: Any  # before the step
    batch: Any
    label: str = ""  # where the parameters are from, unless they are those of the run


def find_first_bad_value(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return the first value that was not finite, by layer, in the forward or the backward pass.

    Explainer for the errors of the loss check and of the numerics guard. The step is computed once
    more, with its batch.
    """
    run = context.get("run")
    if run is None or "evaluation" in context or not isinstance(error, FloatingPointError):
        return None
    failed = [h.failed_step for h in run.hooks if isinstance(h, NumericsGuardHook)]
    dropped = failed[0] if failed else None
    if dropped is None and not isinstance(error, NonFiniteLossError):
        return None
    if run.processes.count > 1:  # all would have to compute the step together
        return f"{_UNKNOWN} in a run of several processes."
    if dropped is not None:
        state, batch, hyperparams, update = dropped
        found = _search(run, _Step(int(state.step), state, batch), hyperparams, update)
        return found or f"{_UNKNOWN}: computed again, all values of the step are finite."
    iteration = getattr(error, "iteration", None)
    iteration = run.iter if iteration is None else iteration
    tried = []
    for step in _list_steps(run, iteration):
        if found := _search(run, step, run.step_hyperparams(), True):
            return found
        tried.append(step.label or "the parameters at hand")
    if not tried:
        return (
            f"{_UNKNOWN}: the batch of iteration {iteration}, or the parameters from before it, "
            "are gone."
        )
    return (
        f"{_UNKNOWN}: all values are finite for this batch with "
        f"{' and '.join(dict.fromkeys(tried))}."
    )


def _search(run: Any, step: _Step, hyperparams: Mapping[str, Any], update: bool) -> str | None:
    """Return a message about the first bad value of a step; None if all are finite."""
    with report_if_slow("computing the step again, for the first value that is not finite"):
        program, kinds = compile_inspection(run, None, update=update)
        # a copy: the program donates it
        state = jax.tree.map(jnp.copy, step.state)
        values = jax.device_get(program(state, put_batch(run, step.batch), hyperparams)[1])
    ordered = in_order(values, kinds)
    types = run.model.module_types
    first = next((i for i, (_, value) in enumerate(ordered) if value.moments[-2] > 0), None)
    if first is None:
        return None
    text = f"the first value that is not finite is {describe(first, ordered, kinds, types)}"
    is_nan = [bool(value.moments[-1] > 0) for _, value in ordered]
    # An infinity may be meant, as that of a mask
    if not is_nan[first] and True in is_nan:
        text += f"; the first NaN is {describe(is_nan.index(True), ordered, kinds, types)}"
    again = f" It was computed again with {step.label}." if step.label else ""
    return f"In iteration {step.iteration}, {text}.{again}"


def describe(
    number: int,
    ordered: Sequence[tuple[str, RecordedValue]],
    kinds: Mapping[str, Origin],
    module_types: Mapping[str, str],
) -> str:
    """Return where a value is, and how many elements are not finite.

    Args:
      number, ordered: its number in the result of `in_order`.
      kinds: see `compile_inspection`.
      module_types: classes by path of the module.
    """
    path, value = ordered[number]
    kind = kinds[_without_layer(path, kinds)]
    name = _without_layer(path, kinds)
    place = _describe_place(path, kinds, module_types)
    top = name.partition(".")[0]
    if name.startswith(GRADIENT):
        # What is wrong lies between this gradient and the one before
        others = [other for other, _ in ordered[:number] if other.startswith(GRADIENT)]
        text = f"in the backward pass, {place}"
        if others:
            behind = _describe_place(others[-1], kinds, module_types)
            text += f", which is computed from {behind}"
    else:
        part = {"batch": "in", "grads": "in the backward pass,", "updates": "in the update,"}
        text = f"{part.get(top, 'in the forward pass,')} {place}"
        if top == "loss" and OUTPUT in kinds:
            text += ", computed from finite outputs of all layers"
    size = kind.seen.size
    count = max(round(float(value.moments[-2]) * size), 1)
    bad = f"{count} of {size} elements" if size > 1 else "its only element"
    return f"{text} ({bad}{_describe_examples(value)})"


def _without_layer(path: str, kinds: Mapping[str, Origin]) -> str:
    while path not in kinds:
        path = path.rpartition(".")[0]
    return path


def _describe_place(path: str, kinds: Mapping[str, Origin], module_types: Mapping[str, str]) -> str:
    known = _without_layer(path, kinds)
    layer = path[len(known) + 1 :]
    name = base_path(known)
    if name.startswith(GRADIENT):
        output = _describe_value(name.removeprefix(GRADIENT), module_types)
        text = f"the gradient of {output}"
    else:
        text = _describe_value(name, module_types)
    return f"{text}, layer {layer} of the stack" if layer else text


def _describe_value(name: str, module_types: Mapping[str, str]) -> str:
    if name == OUTPUT:
        return "the output of the network"
    tree, _, rest = name.partition(".")
    if tree == "batch":
        return f"the entry {rest!r} of the batch" if rest else "the batch"
    if tree in _TREES:
        return f"the {_TREES[tree]} {rest!r}"
    owner = name
    while owner and owner not in module_types:
        owner = owner.rpartition(".")[0]
    if not owner:
        return f"the output of the layer {name!r}"
    part = f"{name[len(owner) + 1 :]!r} in" if owner != name else "the output of"
    return f"{part} the layer {owner!r} ({module_types[owner]})"


def _describe_examples(value: RecordedValue) -> str:
    if value.bad_examples is None:
        return ""
    examples = np.flatnonzero(value.bad_examples).tolist()
    total = value.bad_examples.size
    if len(examples) == total:
        return ", in all examples of the batch"
    plural = "s" if len(examples) > 1 else ""
    return f", in the example{plural} {list_some(examples)} of the batch"


def _list_steps(run: Any, iteration: int) -> Iterator[_Step]:
    """Yield the steps that may have made a loss not finite, the likeliest first, each with finite
    parameters.
    """
    state = run.state.replace(step=jnp.full_like(run.state.step, iteration))
    if _is_finite(state) and (batch := _find_batch(run, iteration)) is not None:
        is_exact = run.iter == iteration and not isinstance(run.state.step, np.ndarray)
        label = "" if is_exact else f"the parameters of iteration {run.iter}"
        yield _Step(iteration, state, batch, label)
    for first, start, label in _list_starts(run, iteration):
        if iteration - first <= _MAX_REPEATED and (step := _repeat(run, start, first, iteration)):
            name = f"the training repeated from {label}" if iteration > first else label
            yield step._replace(label="" if first == iteration else name)
        # The one before may have made the parameters not finite
        for number in (iteration, iteration - 1):
            if number >= first and (batch := _find_batch(run, number)) is not None:
                at = start.replace(step=jnp.full_like(start.step, number))
                yield _Step(number, at, batch, label)


def _repeat(run: Any, state: Any, first: int, iteration: int) -> _Step | None:
    """Train again, up to the step that makes the parameters not finite; None without the data."""
    if run.optim_wrapper.accumulates:
        return None
    for number in range(first, iteration + 1):
        if (batch := _find_batch(run, number)) is None:
            return None
        before = jax.tree.map(jnp.copy, state)
        if number == iteration:
            return _Step(number, before, batch)
        arguments = (
            flatten_state(state),
            put_batch(run, batch),
            run.step_hyperparams(),
            True,
            number,
        )
        state = run.programs.run_step(*arguments)[0].unflatten()
        if not _is_finite(state):
            # Earlier, it is another training: the data have changed, or the rates
            return _Step(number, before, batch) if number == iteration - 1 else None
    return None


def _list_starts(run: Any, iteration: int) -> Iterator[tuple[int, Any, str]]:
    """Yield iterations, the states before them, and names: of the newest checkpoint from before a
    step, and the initial one.
    """
    before, _ = find_checkpoints(run, iteration)
    if before is not None:
        checkpoint = load(before, checksums=False)
        first = int(checkpoint.state["step"])
        stored = flatten(checkpoint.state)
        raw = checkpoint.meta.get("exchanged", {})

        def read(path: str, leaf: Any) -> Any:
            top, _, rest = path.partition(".")
            saved = stored.get(f"{raw.get(top, top)}.{rest}" if rest else path)
            if saved is None or np.shape(saved) != np.shape(leaf) or path == "rng":
                return leaf
            return jax.device_put(np.asarray(saved, leaf.dtype), leaf.sharding)

        yield first, map_with_path(read, run.state), before
    elif run.resume_from is None and run.load_from is None:
        initializer = StateInitializer(run.model, run.strategy, run.seed, lambda: run.cfg)
        example = select_arrays(run.train_dataloader.example())
        with whole_batches(run.train_dataloader.batch_rules is not None):
            _, create = initializer.trace(example, run.optim_wrapper, run.hooks)
            yield 0, create(), "the initial parameters"


def _find_batch(run: Any, iteration: int) -> Any:
    """Return the batch of an iteration; None if it is gone."""
    loader = run.train_dataloader
    count = run.train_loop.batches_per_iteration
    if loader.has_random_access:
        batches = [*draw_again(loader, iteration * count, count)]
        return (batches[0] if count == 1 else tuple(batches)) if len(batches) == count else None
    if iteration == run.train_loop.iter and run.train_loop.batch is not None:
        return select_arrays(run.train_loop.batch)
    return None


def _is_finite(state: Any) -> bool:
    floats = [x for x in flatten(state.params).values() if jnp.issubdtype(x.dtype, jnp.inexact)]
    return all(bool(jnp.isfinite(x).all()) for x in floats)
