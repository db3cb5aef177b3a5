"""Weights that a run starts from: the Runner's argument `load_from`, with all its options."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from jengine.checkpoint.report import LoadReport
from jengine.checkpoint.start_from import LoadFrom, Weights
from jengine.config.modules import import_attribute
from jengine.config.registry import check_arguments
from jengine.extras.weights.array_rules import RuleLike, parse_rules
from jengine.extras.weights.best import describe_best
from jengine.extras.weights.interpolation import Method
from jengine.extras.weights.optimizer_state import continue_other_loop
from jengine.extras.weights.pretrained import find_rules, load_pretrained
from jengine.extras.weights.weight_source import (
    describe_formats,
    is_pytree_of_arrays,
    locate_weights,
    open_weights,
)
from jengine.model.model import get_model
from jengine.parallel.processes import ProcessGroup
from jengine.runner.runner import Runner


@dataclasses.dataclass(frozen=True)
class AnyWeights(LoadFrom):
    """Weights that a run starts from; see `load_pretrained`.

    Attributes:
      path: where the weights are, or an object in memory: a pytree of arrays, an `nnx.State` or an
        `nnx.Module`.
      rename: `(old, new)` prefixes of parameter paths, for a model with other names; or `(old, new,
        options)` with functions on the arrays; or the name of a model of Hugging Face.
      exclude: paths of parameters that keep the initial values.
      interpolate: paths of position embeddings that are resized to the model's grid.
      interpolation: how they are resized.
      item: dotted path to the weights in a tree, if it is not that of the parameters.
      optimizer: True continues another loop's training: also loads the optimizer state and the step
        that are stored next to the weights.
      structure: for an `.eqx` file that has more than the parameters: a function without arguments,
        or an import path, that returns a pytree like the one that was saved.
    """

    path: Any
    rename: Sequence[RuleLike] | str = ()
    exclude: Sequence[str] = ()
    interpolate: Sequence[str] = ()
    interpolation: Method = "bicubic"
    item: str | None = None
    optimizer: bool = False
    structure: Callable[[], Any] | str | None = None

    def open(self, params: Any, *, evaluated: bool) -> Weights:
        """Open the weights, for a model with these `params`."""
        structure = params
        if self.structure is not None:
            make = self.structure
            structure = (import_attribute(make) if isinstance(make, str) else make)()
        source = open_weights(
            self.path, raw=self.raw, evaluated=evaluated, verified=True, structure=structure
        )
        names = ("rename", "strict", "exclude", "interpolate", "interpolation", "item")
        options = {name: getattr(self, name) for name in names}

        def load(target: Any) -> tuple[Any, LoadReport]:
            *values, report = load_pretrained(
                source, target["params"], target["model_state"], **options
            )
            return dict(zip(("params", "model_state"), values, strict=True)), report

        def finish(runner: Runner, report: LoadReport) -> None:
            if differences := source.find_differences(get_model(runner.model)):
                runner.logger.warning(
                    f"The model computes something else than that of {source.label}: "
                    f"{'; '.join(differences)}."
                )
            is_own = runner.train_loop is None and "meta" in source.meta
            if is_own and (best := describe_best(self.path)):
                runner.logger.info(best)
            if self.optimizer and runner.train_loop is not None:
                continue_other_loop(
                    runner, source, report.matched, self.rename, self.item, self.strict
                )

        return Weights(source.label, source.structs, source.meta, load, finish)


def parse_start(load_from: Any, processes: ProcessGroup) -> AnyWeights:
    """Return the weights to start from; all processes verify that they exist.

    Raises:
      FileNotFoundError: nothing is at the path. CorruptCheckpointError: a checkpoint is damaged.
        ValueError: a file in another format. TypeError: neither a path nor a pytree of arrays, or
        an unknown field.
    """
    # a dict may also be a pytree of arrays
    is_options = hasattr(load_from, "items") and (
        "path" in load_from or not is_pytree_of_arrays(load_from)
    )
    options = dict(load_from.items()) if is_options else {"path": load_from}
    if "path" in options:
        path = options["path"]
        if isinstance(path, str | os.PathLike):
            # Verified now, before anything is built
            options["path"] = locate_weights(path, checksums=True, processes=processes)
        elif not is_pytree_of_arrays(path):
            raise TypeError(f"`load_from` must be {describe_formats()}; got {path!r}")
    check_arguments(AnyWeights, options)
    # A wrong rule is found before the model is built
    if isinstance(rules := options.get("rename", ()), str):
        find_rules(rules)
    else:
        parse_rules(rules)
    return AnyWeights(**options)
