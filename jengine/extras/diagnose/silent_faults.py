"""Faults with which a run trains without an error: statistics that stay, examples that mix, layers
without any output.
"""

import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jengine.config import paths
from jengine.data.host_entries import select_arrays
from jengine.data.masking import whole_batches
from jengine.extras.diagnose.failing_examples import list_some
from jengine.extras.diagnose.inspection import (
    compile_inspection,
    put_batch,
    read_statistics,
    split_layers,
)
from jengine.extras.diagnose.nnx_calls import wrapped_calls
from jengine.extras.diagnose.traced_values import OUTPUT, collect, mark
from jengine.train.phases import batches_per_iteration

PyTree = Any
_LARGE = 1e4  # rms of activations, over the largest input
_UNSCALED = 32.0  # a larger mean of pixels comes from no normalization
_PREDICTION = "prediction"

logger = logging.getLogger("jengine")


class SilentFaults:
    """Search in the first steps of a single-device run.

    Args:
      run: the run, whose training is prepared but has not started.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._is_single = run.strategy.replicas is None and jax.process_count() == 1
        self._before = self._read() if self._is_single else {}

    def describe(self) -> list[str]:
        """Return a sentence for each fault, after some steps."""
        lines: list[str] = []
        if not self._is_single:
            return lines
        lines += self._describe_unchanged()
        searches = (
            self._describe_inputs,
            self._describe_mixing,
            self._describe_dropout,
            self._describe_layers,
        )
        for search in searches:
            try:  # a search must not end a run that trains
                lines += search()
            except Exception as error:
                logger.debug(f"{search.__name__} has failed", exc_info=error)
        return lines

    def _read(self) -> dict[str, np.ndarray]:
        state = self._run.state
        trees = {"params": state.params, "model_state": state.model_state}
        return {path: np.asarray(x) for path, x in paths.flatten(jax.device_get(trees)).items()}

    def _describe_unchanged(self) -> list[str]:
        now = self._read()
        same = [
            path
            for path, x in self._before.items()
            if path in now and x.size and np.array_equal(x, now[path])
        ]
        states = [p for p in same if p.startswith("model_state.") and ".frozen." not in p]
        lines = []
        if states:
            lines.append(
                f"The steps have not changed {list_some(states)}: does the network get "
                "`train=True`, or a BatchNorm `use_running_average=not train`?"
            )
        params = [path for path in same if path.startswith("params.")]
        if params and len(params) == sum(path.startswith("params.") for path in self._before):
            rates = [
                rate for values in self._run.optim_wrapper.get_lr().values() for rate in values
            ]
            lines.append(
                f"The steps have not changed any parameter: the learning rate is {max(rates):g}. "
                "Set `optim_wrapper.optimizer.lr`, or look at `jengine schedule`."
            )
        return lines

    def _describe_inputs(self) -> list[str]:
        example = select_arrays(self._run.train_dataloader.example())
        lines = []
        for path, x in paths.flatten(example).items():
            x = np.asarray(x)
            if x.ndim == 4 and abs(float(x.mean())) > _UNSCALED:
                lines.append(
                    f"The entry {path!r} of a batch has {x.dtype} pixels from {x.min():g} to "
                    f"{x.max():g}. Unless the network scales them, do so in the dataset: "
                    "x.astype(np.float32) / 255."
                )
        return lines

    def _describe_mixing(self) -> list[str]:
        """Return a sentence if the prediction of an example depends on the others."""
        run = self._run
        loader = run.train_dataloader
        batch = select_arrays(loader.example())
        sizes = {np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)}
        if len(sizes) != 1 or run.model.predicts_with_rng:
            return []
        size = sizes.pop()
        state = run.state
        # all become the first example: its prediction must stay
        other = jax.tree.map(lambda x: np.repeat(x[:1], size, 0) if np.ndim(x) else x, batch)
        order: list[str] = []

        def predict(batch: Any) -> Any:
            return mark(_PREDICTION, run.model.predict(state.params, state.model_state, batch))

        def first_rows(batch: Any) -> dict[str, jax.Array]:
            rows, _ = collect(predict, lambda _, x: x[0] if x.shape[:1] == (size,) else None, batch)
            order[:] = rows
            return rows

        with whole_batches(loader.batch_rules is not None):
            first, second = map(jax.jit(first_rows), (batch, other))
        change = {path: float(jnp.abs(first[path] - second[path]).max()) for path in order}
        moved = [x for x in order if change[x] > 1e-3 * float(jnp.abs(first[x]).max())]
        if not moved or _top(moved[-1]) != _PREDICTION:
            return []
        before = order[: order.index(moved[0])]
        place = f" after the outputs of {before[-1]}" if before else ""
        if _top(moved[0]) not in (OUTPUT, _PREDICTION):
            place += f"{',' * bool(before)} before those of {moved[0]}"
        return [
            f"The prediction for an example changes by {change[moved[-1]]:.2g} if others in its "
            "batch change: look for a mean, norm, softmax, mask or reshape over axis 0"
            f"{place or ' in the model'}."
        ]

    def _describe_dropout(self) -> list[str]:
        """Return a sentence about layers for dropout that drop nothing in the loss."""
        run = self._run
        state = run.state
        loader = run.train_dataloader
        idle: dict[str, None] = {}

        def note(module: Any, path: str, inputs: Any, output: Any) -> Any:
            is_dropout = "drop" in type(module).__name__.lower() and bool(
                getattr(module, "rate", 0)
            )
            if is_dropout and any(output is x for x in inputs):
                idle[path] = None
            return output

        def note_linen(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            path = ".".join(context.module.path)
            return note(context.module, path, args, call(*args, **kwargs))

        def loss(params: PyTree, model_state: PyTree) -> Any:
            batch = select_arrays(loader.example())
            return run.model.loss(
                params,
                model_state,
                batch,
                rng=jax.random.key(0),
                hyperparams=run.step_hyperparams(),
            )

        with (
            whole_batches(loader.batch_rules is not None),
            nn.intercept_methods(note_linen),
            wrapped_calls(lambda module, path, call: note(module, path, call.args, call())),
        ):
            jax.eval_shape(loss, state.params, state.model_state)
        if not idle:
            return []
        return [
            f"{list_some([*idle])} drops nothing in training: does the network get "
            "`train=True`, or the layer `deterministic=False`?"
        ]

    def _describe_layers(self) -> list[str]:
        """Return sentences about layers whose outputs are all zero or very large."""
        run = self._run
        example = run.train_dataloader.example()
        count = batches_per_iteration(run.train_loop.settings.phases)
        batch = put_batch(run, example if count == 1 else (example,) * count)
        program, kinds = compile_inspection(run, ["activations"])
        # the state is donated
        state = jax.tree.map(jnp.copy, run.state)
        _, values = program(state, batch, run.step_hyperparams())
        values = split_layers(jax.device_get(values), kinds)
        largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(select_arrays(example)))
        statistics = {path: read_statistics(x) for path, x in values.items()}
        return describe_layers(statistics, largest)


def describe_layers(
    statistics: Mapping[str, Mapping[str, float]], largest: float = 1.0
) -> list[str]:
    """Return sentences about the layers with dead units, and the first with large outputs.

    >>> describe_layers({"head": {"zeros": 1.0, "rms": 0.0}})
    ['All outputs of head are zero: the units are dead, or the inputs are zero.']

    Args:
      statistics: of the activations, by path in the order of the computation.
      largest: the largest magnitude in the batch.
    """
    dead = [path for path, x in statistics.items() if x["zeros"] == 1.0]
    limit = _LARGE * max(1.0, largest)
    large = [(path, x["rms"]) for path, x in statistics.items() if x["rms"] > limit]
    lines = []
    if dead:
        lines.append(
            f"All outputs of {list_some(dead)} are zero: the units are dead, or the inputs are "
            "zero."
        )
    if large:
        path, rms = large[0]
        lines.append(
            f"The outputs of {path} have an rms of {rms:.2g}, the first that are so large: look at "
            "its initializer and for a missing norm."
        )
    return lines


def _top(path: str) -> str:
    return path.partition(".")[0]
