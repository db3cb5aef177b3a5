"""Frozen models: variables that the step reads as an input, and never changes."""

import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jengine.checkpoint.start_from import parse_load_from
from jengine.config import paths
from jengine.config.annotations import is_mapping
from jengine.config.errors import ConfigError, config_path
from jengine.config.load import load_config
from jengine.config.plugins import load_provided
from jengine.config.registry import HOOKS
from jengine.config.storage import reading_only
from jengine.data.batch_check import Batch
from jengine.data.host_entries import select_arrays
from jengine.data.masking import whole_batches
from jengine.hooks.hook import Hook
from jengine.hooks.priority import Priority
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.model.model import Model
from jengine.model.precision import build_model
from jengine.parallel.processes import get_processes, put_whole
from jengine.parallel.replica_axis import convert_replica_axis
from jengine.parallel.strategy import Strategy

PyTree = Any

_FORMS = (
    "a checkpoint or work dir, dict(config=..., checkpoint=...), dict(model=..., checkpoint=...) "
    "or dict(model=..., params=..., model_state=...)"
)
_KEYS = {"config", "model", "checkpoint", "params", "model_state"}


class FrozenModel:
    """Model with weights, opened when they are needed.

    Args:
      source: a checkpoint, or a work dir for its newest one, as `load_model` takes it; or a dict
        with the network, `config` (the file or dict of a run) or `model` (a `Model` or its
        config), and the weights, `checkpoint` (anything that `load_from` takes) or `params` and
        `model_state`.

    Attributes:
      given: the path as it was given; None for weights that are no path.
      path: where the weights were found; None before that, and for weights that are no path.

    Raises:
      ConfigError: another source.
    """

    def __init__(self, source: Any) -> None:
        options = {"checkpoint": source} if isinstance(source, str | os.PathLike) else source
        is_known = is_mapping(options) and set(options) <= _KEYS
        has_weights = is_known and ("checkpoint" in options) != ("params" in options)
        has_network = is_known and len({"config", "model"} & set(options)) < 2
        if not has_weights or not has_network or ("params" in options and "model" not in options):
            raise ConfigError(f"a frozen model must be {_FORMS}, got {source!r}")
        self._options: Mapping[str, Any] = dict(options)
        self.given: str | None = None
        checkpoint = self._options.get("checkpoint")
        if isinstance(checkpoint, str | os.PathLike):
            self.given = os.fspath(checkpoint)
        self.path: str | None = None

    def keep_path(self, path: str) -> None:
        """Read the weights at this path, where an earlier part of the run has found them."""
        self._options = {**self._options, "checkpoint": path}

    @functools.cached_property
    def model(self) -> Model:
        """The model, without variables."""
        if (config := self._options.get("config")) is not None:
            with config_path("config"):
                cfg = load_config(config) if isinstance(config, str | os.PathLike) else config
                return build_model(cfg["model"], cfg.get("precision"))
        if "model" in self._options:
            return build_model(self._options["model"], None)
        loaded = load_provided("jengine", "load_model")(self._options["checkpoint"])
        model: Model = loaded.model
        return model

    def init(self, batch: Batch) -> tuple[PyTree, PyTree]:
        """Return initial variables for a batch like `batch`, in a trace."""
        is_foreign = self._options.keys().isdisjoint(("config", "model"))
        # as for `load_model`: an NnxModel builds the module only now
        with reading_only(self.given if is_foreign else None):
            return self.model.init(jax.random.key(0), batch)

    def read(self, batch: Batch, strategy: Strategy, abstract: bool = False) -> dict[str, PyTree]:
        """Return `params` and `model_state` on the devices, sharded by the rules of the strategy.

        Args:
          batch: an example with the structure, shapes and dtypes of all batches.
          strategy: of the run.
          abstract: return ShapeDtypeStructs, and read nothing.

        Raises:
          CheckpointMismatchError: the weights do not fit the model.
        """
        make = jax.jit(
            strategy.with_explicit_mesh(
                lambda: dict(zip(("params", "model_state"), self.init(batch), strict=True))
            )
        )
        shapes = make.eval_shape()
        axes = self.model.logical_axes
        shardings = {
            "params": strategy.constant_shardings(shapes["params"], axes),
            "model_state": strategy.constant_shardings(shapes["model_state"], {}),
        }
        if abstract:
            return jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
            )
        if "params" in self._options:
            values = {name: self._options.get(name, {}) for name in shapes}
            _check_shapes(values, shapes)
        else:
            values = self._load(jax.jit(make, out_shardings=shardings)())
        return jax.tree.map(put_whole, values, shardings)

    def _load(self, initial: dict[str, PyTree]) -> dict[str, PyTree]:
        """Return the weights, in the places of the initial ones."""
        start = parse_load_from(self._options["checkpoint"], get_processes())
        if start is None:
            raise ConfigError("`checkpoint` of a frozen model must be weights, got None")
        self.path = start.path if isinstance(start.path, str) else None
        weights = start.open(initial["params"], evaluated=True)
        replicas = weights.meta.get("replicas")
        loaded, _ = weights.load(convert_replica_axis(initial, None, replicas))
        return dict(convert_replica_axis(loaded, replicas, None))


def _check_shapes(values: Mapping[str, PyTree], expected: Mapping[str, PyTree]) -> None:
    """Raise ConfigError unless variables in memory have the paths and shapes of the model's."""
    found = _shapes(values)
    known = _shapes(expected)
    for path in {**known, **found}:
        if found.get(path) != known.get(path):
            raise ConfigError(
                f"the variables of a frozen model must be those of its model, with the shape "
                f"{known.get(path)} of {path!r}, got {found.get(path)}"
            )


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    return {path: tuple(jnp.shape(leaf)) for path, leaf in paths.flatten(tree).items()}


@HOOKS.register_module()
class FrozenModelHook(Hook):
    """Frozen model for a loss or a `train_step` of one's own, which reads its variables in
    `hyperparams[name]`, `dict(params=..., model_state=...)`.

    They are an input of the compiled step: not trained, donated or saved, but sharded by the rules
    of the strategy. A run that is resumed reads the same checkpoint again.

    Args:
      model: the model with its weights: a checkpoint or work dir, or a dict, see `FrozenModel`.
      name: under which the step finds the variables.

    Examples:
      >>> hook = FrozenModelHook("work_dirs/pretrained", name="reference")
    """

    priority = Priority.HIGHEST  # other hooks may trace the step in `before_train`

    def __init__(self, model: Any, name: str = "frozen") -> None:
        with config_path("model"):
            self.frozen = FrozenModel(model)
        self.name = name

    def before_train(self, runner: RunnerProtocol) -> None:
        """Read the weights.

        Raises:
          ConfigError: `name` is that of a hyperparameter.
        """
        if self.name in runner.optim_wrapper.hyperparams or self.name in runner.hyperparams:
            raise ConfigError(
                f"`name` of a frozen model must not be that of a hyperparameter, got {self.name!r}"
            )
        loader = runner.train_dataloader
        batch = select_arrays(loader.example())
        with whole_batches(loader.batch_axis is None):
            runner.constants[self.name] = self.frozen.read(
                batch, runner.strategy, abstract=runner.state.is_abstract
            )
        if self.frozen.path is not None:
            runner.logger.info(f"The frozen model {self.name!r} is from {self.frozen.path}.")

    def after_run(self, runner: RunnerProtocol) -> None:
        """Free the memory."""
        runner.constants.pop(self.name, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint of the weights, so that a resumed run does not take a newer one."""
        if self.frozen.path is None:
            return {}
        return {"given": self.frozen.given, "path": self.frozen.path}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the same checkpoint, unless the config has another source now."""
        if state_dict["given"] == self.frozen.given:
            self.frozen.keep_path(state_dict["path"])
