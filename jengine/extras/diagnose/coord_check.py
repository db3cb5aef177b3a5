"""`jengine coord-check`: how far activations move in a few steps, over widths."""

import argparse
import collections
import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jengine.cli.commands import load, temporary_runner
from jengine.config import paths
from jengine.config.containers import iter_nodes
from jengine.config.errors import ConfigError
from jengine.config.overrides import set_path
from jengine.config.plugins import load_provided
from jengine.data.host_entries import select_arrays
from jengine.data.masking import whole_batches
from jengine.extras.diagnose.groups import save_figure
from jengine.extras.diagnose.layer_outputs import find_outputs
from jengine.hooks.hook import Hook
from jengine.logging.console import write_line
from jengine.logging.tables import format_table

FLAT = 0.2  # the steepest slope that still counts as flat


class Coordinates(NamedTuple):
    """Activations over widths.

    Attributes:
      widths: int[N].
      changes: by layer the mean absolute change of its outputs in the steps, f64[N].
      sizes: by layer the mean absolute size of its outputs after the steps, f64[N].
    """

    widths: list[int]
    changes: dict[str, list[float]]
    sizes: dict[str, list[float]]


class _StopHook(Hook):
    """Hook that stops training after a number of iterations."""

    priority = "LOWEST"

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Stop after the last step."""
        runner.train_loop.stop_training = runner.iter + 1 >= self._steps


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Train a few steps at each width, and print changes and sizes of activations with their
    slopes.
    """
    try:
        widths = [int(text) for text in args.widths.split(",")]
    except ValueError:
        widths = []
    if len(set(widths)) < 2 or min(widths) < 1:
        raise ConfigError(f"--widths must be two or more numbers, got {args.widths!r}")
    if args.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {args.steps}")
    found = check_coordinates(load(args, overrides), widths, args.steps, args.standard)
    columns = ["layer", *map(str, found.widths), "slope", "size's slope", ""]
    rows = []
    for layer, changes in found.changes.items():
        slope = fit_slope(found.widths, changes)
        verdict = "flat" if abs(slope) <= FLAT else ("grows" if slope > 0 else "shrinks")
        size = fit_slope(found.widths, found.sizes[layer])
        rows.append([layer, *(f"{x:.3g}" for x in changes), f"{slope:+.2f}", f"{size:+.2f}"])
        rows[-1].append(verdict)
    title = f"Mean absolute change of activations in {args.steps} steps, over widths"
    write_line(format_table(columns, rows, title=title))
    steep = [row[0] for row in rows if row[-1] != "flat"]
    print(
        f"not flat: {', '.join(steep)} (slopes are of the logarithms; flat is at most {FLAT})"
        if steep
        else f"all flat: no slope of the logarithms is steeper than {FLAT}"
    )
    if args.png:
        _save_png(found, args.png)
        print(f"saved to {args.png}")


def check_coordinates(
    cfg: Mapping[str, Any], widths: Sequence[int], steps: int, standard: bool = False
) -> Coordinates:
    """Train a config for a few steps at each width, without schedules, and measure activations.

    The values in `paramwise_cfg.base.width` change in proportion. Activations are the products of
    layers on the first batch, with the same random numbers before and after.

    Args:
      cfg: a resolved config with `paramwise_cfg.base`.
      widths: values of the first path in `paramwise_cfg.base.width`.
      steps: number of iterations.
      standard: leave the parametrization out.

    Raises:
      ConfigError: no base model in the config, or a width at which another value is no integer.
    """
    wrapper = cfg.get("optim_wrapper")
    rules = wrapper.get("paramwise_cfg") if isinstance(wrapper, Mapping) else None
    if not isinstance(rules, Mapping) or "base" not in rules:
        raise ConfigError(
            "`optim_wrapper.paramwise_cfg.base` must say what a width is for coord-check, got none"
        )
    base = load_provided("optimizer_parts", "parse_base")(rules["base"])["width"]
    if standard:
        left_out = ("parametrization", "base", "branches")
        rules = {name: value for name, value in rules.items() if name not in left_out}
    changes: dict[str, list[float]] = collections.defaultdict(list)
    sizes: dict[str, list[float]] = collections.defaultdict(list)
    for width in widths:
        before, after = _train(_at_width(cfg, rules, base, width), steps)
        for layer, new in after.items():
            changes[layer].append(float(np.mean(np.abs(new - before[layer]))))
            sizes[layer].append(float(np.mean(np.abs(new))))
    return Coordinates(list(widths), dict(changes), dict(sizes))


def fit_slope(widths: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of the logarithm of values over that of widths; 0 for zeros.

    >>> fit_slope([64, 128, 256], [1.0, 2.0, 4.0])
    1.0
    """
    if not any(values):
        return 0.0
    if not all(value > 0 and math.isfinite(value) for value in values):
        return math.inf
    return float(np.polyfit(np.log(widths), np.log(values), 1)[0].round(6))


def _at_width(
    cfg: Mapping[str, Any], rules: Mapping[str, Any], base: Mapping[str, Any], width: int
) -> dict[str, Any]:
    """Return the short config of a run at a width."""
    first = next(iter(base.values()))
    evaluations = [
        f"{mode}_{part}" for mode in ("val", "test") for part in ("dataloader", "cfg", "evaluator")
    ]
    changed = {
        **cfg,
        **dict.fromkeys(evaluations),
        "model": copy.deepcopy(cfg["model"]),
        "visualizer": None,
        "load_from": None,
        "parallel": None,
        "param_scheduler": None,  # a warm-up would leave nothing to see
        "optim_wrapper": {**cfg["optim_wrapper"], "paramwise_cfg": rules},
        "train_cfg": {**cfg["train_cfg"], "steps_per_call": 1, "on_nonfinite": "ignore"},
        "default_hooks": {"checkpoint": None, "logger": None},
        "custom_hooks": None,
    }
    known = dict(iter_nodes({"model": changed["model"]}))
    for path, value in base.items():
        if path not in known:
            raise ConfigError(
                f"`paramwise_cfg.base.width` must have paths in the config, got {path!r}"
            )
        new = value * width / first
        if isinstance(value, int) and new != int(new):
            raise ConfigError(
                f"--widths must leave `{path}` an integer, got {new:g} at the width {width}"
            )
        set_path(changed, path, int(new) if isinstance(value, int) else new)
    return changed


def _train(
    cfg: Mapping[str, Any], steps: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the outputs of the layers before and after the steps, those of a stack together."""
    with temporary_runner(cfg) as runner:
        runner.register_hook(_StopHook(steps))
        runner.prepare_training()
        loader = runner.train_dataloader
        batch = select_arrays(loader.example())
        with whole_batches(loader.batch_axis is None):
            before = _measure(runner, batch)
            runner.train()
            return before, _measure(runner, batch)


def _measure(runner: Any, batch: Any) -> dict[str, np.ndarray]:
    model = runner.model
    state = runner.state
    hyperparams = collections.defaultdict(lambda: 1.0, runner.hyperparams)

    @jax.jit
    def outputs(params: Any, model_state: Any) -> dict[str, jax.Array]:
        def loss(leaves: Mapping[str, jax.Array]) -> Any:
            tree = paths.map_with_path(lambda path, _: leaves[path], params)
            key = jax.random.key(0)
            return model.loss(tree, model_state, batch, rng=key, hyperparams=hyperparams)[0]

        return find_outputs(loss, paths.flatten(params))

    found = jax.device_get(outputs(state.params, state.model_state))
    layers: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for name, value in found.items():  # the layers of a stack, and calls of a layer, are averaged
        layers[name.partition("#")[0].partition("[")[0]].append(np.asarray(value, np.float64))
    return {name: np.concatenate([x.ravel() for x in values]) for name, values in layers.items()}


def _save_png(found: Coordinates, path: str) -> None:
    with save_figure(path, rows=2, figsize=(7, 9)) as axes:
        for axis, (title, values) in zip(
            axes, (("change", found.changes), ("size", found.sizes)), strict=True
        ):
            for layer, numbers in values.items():
                axis.loglog(found.widths, numbers, marker="o", label=layer)
            axis.set_xlabel("width")
            axis.set_ylabel(f"mean absolute {title}")
            axis.grid(alpha=0.3)
            axis.legend(fontsize=6)
