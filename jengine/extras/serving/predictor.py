"""Predictions for data of any kind, in batches with one shape, collected on the host."""

import collections
import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jengine.config import paths
from jengine.config.annotations import Count, checked
from jengine.config.errors import ConfigError
from jengine.config.registry import DATASETS
from jengine.data.batch_stream import prefetch_to_device
from jengine.data.build import build_dataloader, get_batch_axis
from jengine.data.collate import count_examples, pad_examples, to_numpy
from jengine.data.host_entries import select_arrays
from jengine.data.iterables import IterableLoader
from jengine.data.loader import DataLoader
from jengine.data.masking import get_mask, on_whole_batches, whole_batches
from jengine.evaluation.metric import drop_padding
from jengine.hooks.run import Run
from jengine.model.model import Model, predict_with_key, prediction_key
from jengine.parallel.mesh import DataShard
from jengine.parallel.placement import Rules
from jengine.parallel.processes import ProcessGroup
from jengine.parallel.strategy import DispatchLimiter, Strategy
from jengine.runner.lifecycle import abort_all
from jengine.runner.runner import Runner
from jengine.train.model_attributes import hyperparams_as_attributes, plain_attributes

PyTree = Any
# A host batch with leading axis B, and the position of each example in the data, int32[B]; -1 for
# padding
PositionedBatch = tuple[PyTree, np.ndarray]

_DEFAULT_BATCH_SIZE = 128
_ALL_DATA = DataShard()


# by run and batch rules
_predictors: weakref.WeakKeyDictionary[Run, dict[str, "Predictor"]] = weakref.WeakKeyDictionary()


def predict(runner: Runner, data: Any, batch_size: int | None, seed: int | None) -> PyTree:
    """Return what `Runner.predict` returns."""
    run = runner.run
    example, batches, rules = open_batches(data, batch_size, run.strategy, run.seed)
    if runner.state is None:
        with whole_batches(rules is not None):
            runner.init_state(example)
    runner.load_or_resume()
    with run.stopwatch.part("prediction"), abort_all(run):
        known = _predictors.setdefault(run, {})
        if str(rules) not in known:  # each compiles once
            args = runner.model, run.strategy, run.processes, rules, run.seed
            known[str(rules)] = Predictor(*args)
        variables = runner.eval_variables()[""]
        return known[str(rules)].predict(*variables, batches, run.limiter, seed)


class Predictor:
    """Predictor with one step, which is compiled once for each batch shape.

    Each process gets all predictions.

    Args:
      model, strategy, processes: of the run.
      rules: see `Strategy.put_batch`; with rules the predictions are those of whole batches.
      seed: for models that sample, see `prediction_key`.
    """

    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        processes: ProcessGroup,
        rules: Rules | None = None,
        seed: int = 0,
    ) -> None:
        adapted = strategy.adapt_for_eval(model, rules)
        self._seed = seed
        self._put = functools.partial(strategy.put_batch, rules=rules)
        self._is_whole = rules is not None
        self._is_shared = processes.count > 1

        def step(
            params: PyTree, model_state: PyTree, seed: jax.Array, batch: PositionedBatch
        ) -> tuple[Any, Any]:
            inputs, positions = batch
            # The number of the batch; padding has the position -1
            rng = (
                prediction_key(seed, positions.max() // positions.size)
                if adapted.predicts_with_rng
                else None
            )
            predictions = predict_with_key(adapted, params, model_state, inputs, rng)
            if not self._is_whole:
                _check_batch_axis(predictions, positions.shape)
            # The first result is copied to every device, where each process can read all of it
            outputs = predictions, positions
            return ((seed, outputs), None) if self._is_shared else ((seed, None), outputs)

        def compile_step() -> Callable[..., Any]:
            self._attributes = plain_attributes(model)
            traced = hyperparams_as_attributes(model)(step)
            return strategy.compile_eval_step(on_whole_batches(traced, self._is_whole))

        self._model = model
        self._compile_step = compile_step
        self._step = compile_step()

    def predict(
        self,
        params: PyTree,
        model_state: PyTree,
        batches: Iterable[PositionedBatch],
        limiter: DispatchLimiter,
        seed: int | None = None,
    ) -> PyTree:
        """Return the predictions for all examples, without padding, in the order of their
        positions.

        While the device computes, the next batches are sent to it and earlier predictions are
        fetched.

        Args:
          params, model_state: the model's variables, on their devices.
          batches: with one shape unless they are whole; see `iterate_batches`.
          limiter: limits the number of steps in flight.
          seed: replaces that of the constructor.

        Returns:
          A pytree of NumPy arrays with one leading entry per example; for whole batches a list with
          one per batch.
        """
        if plain_attributes(self._model) != self._attributes:
            self._step = self._compile_step()
        parts: list[tuple[PyTree, np.ndarray]] = []
        pending: collections.deque[Any] = collections.deque()
        seed = self._seed if seed is None else seed
        with contextlib.closing(prefetch_to_device(batches, self._put)) as ready:
            for batch in ready:
                limiter.wait()  # bounds the run-ahead
                # An input: another seed does not compile again
                (_, replicated), sharded = self._step(params, model_state, np.uint32(seed), batch)
                outputs = replicated if self._is_shared else sharded
                limiter.add(jax.tree.leaves(outputs)[0])
                # `_fetch` then hardly waits
                jax.tree.map(lambda leaf: leaf.copy_to_host_async(), outputs)
                pending.append(outputs)
                if len(pending) > limiter.limit:  # the oldest is finished by now
                    parts.append(_fetch(pending.popleft()))
        parts += [_fetch(outputs) for outputs in pending]
        self._attributes = plain_attributes(self._model)  # with those that the trace has set
        if self._is_whole:
            return [predictions for predictions, _ in parts]
        predictions, positions = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        if not self._is_shared:
            return predictions
        order = np.argsort(positions)  # processes read examples in turn
        return jax.tree.map(lambda leaf: leaf[order], predictions)


def open_batches(
    data: Any, batch_size: int | None, strategy: Strategy, seed: int
) -> tuple[PyTree, Iterator[PositionedBatch], Rules | None]:
    """Return the first batch in `data`, an example for the state.

    All batches, see `iterate_batches`; their rules.
    """
    if get_batch_axis(data) is None:
        data = build_dataloader(data, train=False, seed=seed)
    rules = getattr(data, "batch_rules", None)
    batches = iterate_batches(
        data, batch_size, multiple=strategy.batch_multiple, seed=seed, shard=strategy.data_shard
    )
    for first in batches:  # only to look at one
        return first[0], itertools.chain([first], batches), rules
    raise ConfigError("`data` must have at least one batch, got none")


@functools.partial(checked, owner="")
def iterate_batches(
    data: Any,
    batch_size: Count | None = None,
    *,
    multiple: int = 1,
    seed: int = 0,
    shard: DataShard = _ALL_DATA,
) -> Iterator[PositionedBatch]:
    """Return host batches, all as large as the first one, with smaller ones padded.

    >>> [positions.tolist() for _, positions in iterate_batches(np.zeros(5), 2)]
    [[0, 1], [2, 3], [4, -1]]

    Args:
      data: see `Runner.predict`.
      batch_size: examples per batch on this process, for arrays and datasets; by default 128, or
        fewer for fewer data.
      multiple: a number that divides every batch size for arrays, datasets and foreign iterables.
      seed: for the samplers.
      shard: the part of the data that this process reads.

    Raises:
      ValueError: `batch_size` for data in batches, no example, or a batch larger than the first.
        TypeError: data of another kind.
    """
    if _is_config(data) and "dataset" not in data:
        data = DATASETS.build(data)
    is_arrays = _is_arrays(data)
    if is_arrays or _is_dataset(data):
        total = count_examples(data) if is_arrays else len(data)
        if total == 0:
            raise ValueError("`data` must have at least one example, got none")
        share = -(-total // shard.count)  # each process needs as many batches
        size = (
            _round_up(min(share, _DEFAULT_BATCH_SIZE), multiple)
            if batch_size is None
            else batch_size
        )
        if is_arrays:
            return _slice_arrays(data, size, shard)
        data = dict(dataset=data, batch_size=size)
    elif batch_size is not None:
        raise ValueError(
            f"`batch_size` must be None for data that are in batches already, got {batch_size}"
        )
    if _is_config(data):
        data = build_dataloader(
            data, train=False, seed=seed, process_index=shard.index, process_count=shard.count
        )
    if callable(data) and not hasattr(data, "__iter__"):
        data = data()
    if not hasattr(data, "__iter__"):
        raise TypeError(
            "`data` must be arrays, a dataset, a dataloader, its config, or an iterable of "
            f"batches, got {type(data).__name__}"
        )
    is_loader = isinstance(data, DataLoader | IterableLoader)
    if is_loader and data.batch_axis is None:
        return ((select_arrays(batch), np.asarray(i, np.int32)) for i, batch in enumerate(data))
    return _add_positions(data, is_loader, multiple, shard)


def _is_config(data: Any) -> bool:
    return hasattr(data, "items") and ("dataset" in data or "type" in data)


def _is_arrays(data: object) -> bool:
    # A list has batches
    if _is_config(data) or isinstance(data, list) or data is None:
        return False
    return not jax.tree_util.all_leaves([data]) or (
        hasattr(data, "dtype") and hasattr(data, "shape")
    )


def _is_dataset(data: object) -> bool:
    # A map-style dataset that can also be iterated has a method to fetch several examples
    if _is_config(data) or not jax.tree_util.all_leaves([data]):
        return False
    return hasattr(data, "__getitems__") or (
        hasattr(data, "__getitem__") and not hasattr(data, "__iter__")
    )


def _slice_arrays(arrays: PyTree, size: int, shard: DataShard) -> Iterator[PositionedBatch]:
    """Yield batches for one of S shards: s has the s-th, (s + S)-th ... example."""
    arrays = jax.tree.map(np.asarray, arrays)  # one transfer, if they are on a device
    total = count_examples(arrays)
    for start in range(0, total, size * shard.count):
        positions = start + shard.index + shard.count * np.arange(size, dtype=np.int32)
        rows = np.minimum(positions, total - 1)  # padding repeats the last example
        batch = jax.tree.map(lambda leaf, rows=rows: leaf[rows], arrays)
        yield batch, np.where(positions < total, positions, -1)


def _add_positions(
    batches: Iterable[PyTree], is_loader: bool, multiple: int, shard: DataShard
) -> Iterator[PositionedBatch]:
    """Yield batches with positions, as if the shards took the examples in turn.

    Those of a loader are padded.
    """
    size = 0
    for i, raw in enumerate(batches):
        batch = select_arrays(to_numpy(raw))
        count = count_examples(batch)
        if is_loader:
            size = count
            is_real = np.ones(count, bool)
            if (mask := get_mask(batch)) is not None:
                is_real = mask
        else:
            # the first one decides: one shape, one program
            size = size or _round_up(count, multiple)
            if not 0 < count <= size:
                raise ValueError(
                    f"batches must have 1 to {size} examples, as the first one, got {count} in "
                    f"batch {i}"
                )
            batch = pad_examples(batch, size) if count < size else batch
            is_real = np.arange(size) < count
        positions = (i * size + np.arange(size)) * shard.count + shard.index
        yield batch, np.where(is_real, positions, -1).astype(np.int32)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _fetch(outputs: tuple[PyTree, jax.Array]) -> tuple[PyTree, np.ndarray]:
    predictions, positions = jax.device_get(outputs)
    is_real = np.asarray(positions >= 0)
    # Most batches have no padding, and need no copy
    return (
        (predictions, positions)
        if is_real.all()
        else drop_padding((predictions, positions), is_real)
    )


def _check_batch_axis(predictions: PyTree, batch_axis: tuple[int, ...]) -> None:
    shapes = {path: leaf.shape for path, leaf in paths.flatten(predictions).items()}
    if not shapes or any(shape[:1] != batch_axis for shape in shapes.values()):
        raise ValueError(
            f"predictions must have one entry for each of the {batch_axis[0]} examples of a "
            f"batch, got {shapes or 'no array'}"
        )
