"""Models loaded from checkpoints, as functions from batches to predictions."""

import contextlib
import functools
import os
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from jengine.config.annotations import Count, checked
from jengine.config.dump import check_written, parse_config, parse_modules
from jengine.config.errors import CheckpointMismatchError, ConfigError
from jengine.config.frames import boundary
from jengine.config.modules import import_listed
from jengine.config.plugins import load_provided
from jengine.config.storage import read_text
from jengine.data.batch_check import Batch
from jengine.data.collate import count_examples
from jengine.extras.serving.predictor import Predictor, iterate_batches
from jengine.extras.serving.trust import only_known_classes
from jengine.model.model import Model
from jengine.model.precision import build_model
from jengine.parallel.processes import SingleProcess
from jengine.parallel.replica_axis import convert_replica_axis, convert_replica_axis_structs
from jengine.parallel.strategy import DispatchLimiter, SingleDevice

PyTree = Any
Weights = Literal["evaluated", "averaged", "trained"]


@boundary
@functools.partial(checked, owner="load_model")
def load_model(
    checkpoint: str | os.PathLike[str],
    *,
    model: Any = None,
    batch_size: Count | None = None,
    weights: Weights = "evaluated",
    trust: bool = False,
    best: bool | str = False,
) -> "LoadedModel":
    """Return a checkpoint's model as a function from batches to predictions, on the first device.

    The model is built from the config in the checkpoint. A checkpoint may be from anyone, so the
    config can name only registered classes, classes in your own modules that are already imported,
    and networks from imported packages. The weights are read at the first call, whose batch
    determines the parameter structure.

    Args:
      checkpoint: a checkpoint, or a work dir for the newest one.
      model: a `Model` or a config, which replaces the checkpoint's model and precision.
      batch_size: divide batches into parts with this size and pad the last one, so that one program
        serves all; None compiles a program for each size.
      weights: 'evaluated' for those that the run validates: averages with an `EMAHook`; 'averaged'
        or 'trained'.
      trust: let the config import and call anything that it names; it can then run any code.
      best: True for the best checkpoint of a work dir, or a metric if `save_best` has several.

    Raises:
      FileNotFoundError, CorruptCheckpointError: the checkpoint does not exist, or is incomplete or
        damaged.
      ConfigError: it has no config, so `model` must be passed, or one that needs `trust`.
        ValueError: it has no averages. Building the model may raise others.
    """
    from jengine.checkpoint.layout import find_checkpoint, read_meta

    if best is not False:
        checkpoint = load_provided("jengine.checkpoint", "find_best_checkpoint")(checkpoint, best)
    path = str(find_checkpoint(checkpoint, checksums=True))
    meta = read_meta(path)
    text = _read_text(path, meta)
    cfg = parse_config(text) if text else {}
    if text and trust and model is None:
        # moved; they may be on `sys.path`, else the build names them
        with contextlib.suppress(ConfigError):
            import_listed(parse_modules(text), Path(path).parent / "config.py")
    if model is not None:
        built = build_model(model, None)
    elif cfg.get("model") is None:
        raise ConfigError(
            f"checkpoint {path} has no config from which the model can be built: pass `model=`"
        )
    else:
        try:
            check_written(cfg["model"], "model")
            with only_known_classes(None if trust else path):
                built = build_model(cfg["model"], cfg.get("precision"))
        except Exception as error:
            error.add_note(
                f"the model is built from the config in {path}: import the module of its classes, "
                "or pass `model=`"
            )
            raise
    items = select_items(meta, weights)
    auxiliary = meta.get("auxiliary", ())
    return LoadedModel(path, built, items, meta.get("replicas"), cfg, batch_size, trust, auxiliary)


class LoadedModel:
    """Model with weights from a checkpoint; may be called from several threads.

    Args:
      path: the checkpoint.
      model: the model, without variables.
      items: dotted paths in the checkpoint, from `select_items`.
      replicas: number of replicas in the saved state; None if it has no replica axis.
      cfg: the run's config.
      batch_size, trust: see `load_model`.
      auxiliary: names of stored parameters that only training needs.
    """

    def __init__(
        self,
        path: str,
        model: Model,
        items: Mapping[str, str],
        replicas: int | None,
        cfg: Mapping[str, Any],
        batch_size: int | None,
        trust: bool = False,
        auxiliary: Collection[str] = (),
    ) -> None:
        self.path = path
        self.model = model
        self.cfg = cfg
        self.batch_size = batch_size
        self.trust = trust
        self._items = items
        self._replicas = replicas
        self._auxiliary = auxiliary
        self._strategy = SingleDevice()  # the run's mesh need not exist here
        self._predictor = Predictor(model, self._strategy, SingleProcess())
        self._variables: tuple[PyTree, PyTree] | None = None
        self._lock = threading.Lock()  # several threads may make the first call

    def __call__(self, batch: Batch, seed: int = 0) -> PyTree:
        """Return the predictions for a batch.

        Args:
          batch: arrays with leading axis B (one, or a dict or tuple), without entries that
            `predict` does not use.
          seed: for models that sample, where another one gives other samples.

        Returns:
          A pytree of NumPy arrays with leading axis B.
        """
        size = self.batch_size or max(count_examples(batch), 1)
        batches = iterate_batches(batch, size)
        limiter = DispatchLimiter(self._strategy.max_in_flight)
        return self._predictor.predict(*self.load(batch), batches, limiter, seed)

    def load(self, batch: Batch) -> tuple[PyTree, PyTree]:
        """Return `(params, model_state)` on the device, read at the first call.

        Args:
          batch: an example with the structure, shapes and dtypes of all batches.

        Raises:
          CheckpointMismatchError: model and checkpoint have other variables.
        """
        with self._lock:
            if self._variables is None:
                # an NnxModel builds its module now
                with only_known_classes(None if self.trust else self.path):
                    self._variables = self._strategy.put_replicated(self._read(batch))
            return self._variables

    def _read(self, batch: Batch) -> tuple[PyTree, PyTree]:
        from jengine.checkpoint.restore import load_params

        # shapes only
        params, model_state = jax.eval_shape(self.model.init, jax.random.key(0), batch)
        values = convert_replica_axis_structs(
            {"params": params, "model_state": model_state}, None, self._replicas
        )
        for item, target in values.items():
            if jax.tree.leaves(target):  # a model may have no state
                # `load_model` has compared the checksums
                values[item], report = load_params(
                    self.path,
                    target,
                    strict=item != "params" or not self._auxiliary,
                    item=self._items[item],
                    checksums=False,
                )
                # what is missing is an error without `strict` too, as the target has only shapes
                if {name.split(".")[0] for name in report.unexpected} - {*self._auxiliary}:
                    raise CheckpointMismatchError(self.path, report, "")
        values = convert_replica_axis(values, self._replicas, None)
        return values["params"], values["model_state"]


def select_items(meta: Mapping[str, Any], weights: Weights) -> dict[str, str]:
    """Return where the 'params' and 'model_state' to use are in a checkpoint, as dotted paths.

    >>> select_items({"exchanged": {"params": "hook_state.EMAHook.params"}}, "trained")
    {'params': 'hook_state.EMAHook.params', 'model_state': 'model_state'}

    Args:
      meta: the checkpoint's metadata. `exchanged` has the paths to the trained values where
        averages replace them, `evaluated` those to the values that the run validates.
      weights: see `load_model`.
    """
    exchanged = meta.get("exchanged", {})
    if weights == "averaged" and "params" not in exchanged:
        raise ValueError(
            "the checkpoint must have averaged parameters, got none: the run had no EMAHook"
        )
    paths = {"evaluated": meta.get("evaluated", {}), "averaged": {}, "trained": exchanged}[weights]
    return {item: paths.get(item, item) for item in ("params", "model_state")}


def _read_text(path: str, meta: Mapping[str, Any]) -> str:
    """Return the text of the run's config from the metadata, or from the work dir.

    "" if there is none.
    """
    text = meta.get("meta", {}).get("cfg")
    file = Path(path).parent / "config.py"
    if not text and file.is_file():  # a published copy may have no metadata
        text = read_text(file)
    return text or ""
