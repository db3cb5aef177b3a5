"""`jengine lr-find`: the loss while the learning rate grows step by step, and a rate to start
from.
"""

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jengine.cli.commands import load, temporary_runner
from jengine.config.annotations import is_mapping
from jengine.config.errors import ConfigError
from jengine.config.registry import HOOKS, as_config
from jengine.extras.diagnose.groups import save_figure
from jengine.extras.diagnose.schedule import plot
from jengine.hooks.hook import Hook

_RATE_NAMES = ("lr", "learning_rate")
_DIVERGED = 4.0  # times the lowest loss, both smoothed
_SMOOTHING = 0.9
_SKIPPED = 0.1  # of the steps at the start, where losses are noise


class RateSearch(NamedTuple):
    """Losses over learning rates."""

    rates: np.ndarray  # f64[N], increasing
    losses: np.ndarray  # f64[N], smoothed
    suggestion: float  # the rate at which the loss falls fastest
    diverged: bool  # whether the loss ended the search


class LrFindHook(Hook):
    """Hook that records losses and stops training after the last rate or once they diverge."""

    priority = "LOWEST"

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.losses: list[float] = []
        self.diverged = False

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Record the loss."""
        self.losses.append(float(outputs["loss"]))
        averages = smooth(self.losses)  # single batches may differ by more than the limit
        self.diverged = not math.isfinite(averages[-1]) or averages[-1] > _DIVERGED * averages.min()
        if self.diverged:
            self.losses.pop()
        runner.train_loop.stop_training = self.diverged or len(self.losses) == self._steps


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Train with growing learning rates, draw the losses, and print the suggestion."""
    if not 0 < args.min < args.max:
        raise ConfigError(
            f"--min must be above 0 and below --max, got {args.min:g} and {args.max:g}"
        )
    if args.steps < 10:
        raise ConfigError(f"--steps must be at least 10, got {args.steps}")
    found = find_rate(load(args, overrides), args.min, args.max, args.steps)
    ends = (f"{found.rates[0]:.1g}", f"{found.rates[-1]:.1g}")
    print(plot(found.losses.tolist(), "loss, smoothed, over learning rates", ends=ends))
    lowest = found.rates[int(np.argmin(found.losses))]
    print(
        f"\nThe loss falls fastest at the learning rate {found.suggestion:.2g}, the suggestion; "
        "it is lowest at"
    )
    print(f"{lowest:.2g}{f', and diverges above {found.rates[-1]:.2g}' if found.diverged else ''}.")
    print(
        f"  --config.optim_wrapper.optimizer.{_rate_name(load(args, overrides))}="
        f"{found.suggestion:.2g}"
    )
    if args.png:
        _save_png(found, args.png)
        print(f"saved to {args.png}")


def find_rate(cfg: Mapping[str, Any], low: float, high: float, steps: int) -> RateSearch:
    """Train a config in a temporary directory, with rates that grow from `low` to `high` by a
    constant factor.

    All parameter groups keep their ratios (`lr_mult`). Validation, schedules and hooks without a
    traced point are left out.

    Args:
      cfg: a resolved config.
      low, high: the first and the last rate.
      steps: number of iterations; fewer if the loss diverges.

    Raises:
      ConfigError: the optimizer has no learning rate in the config, or the run is shorter.
    """
    name = _rate_name(cfg)
    wrapper = cfg["optim_wrapper"]
    # Equal steps on a logarithmic scale, as rates that work span powers of ten.
    factor = (high / low) ** (1 / (steps - 1))
    evaluations = [
        f"{mode}_{part}" for mode in ("val", "test") for part in ("dataloader", "cfg", "evaluator")
    ]
    hooks = cfg.get("custom_hooks") or []
    hook = LrFindHook(steps)
    short = {
        **cfg,
        **dict.fromkeys(evaluations),
        "visualizer": None,
        "optim_wrapper": {**wrapper, "optimizer": {**wrapper["optimizer"], name: low}},
        "param_scheduler": {
            "type": "ExponentialLR",
            "gamma": factor,
            "by_epoch": False,
            "end": steps,
        },
        # The loss is meant to diverge at the end; single steps, since the hook reads the loss of
        # each.
        "train_cfg": {**cfg["train_cfg"], "on_nonfinite": "ignore", "steps_per_call": 1},
        "default_hooks": {"checkpoint": None, "logger": None},
        # Hooks within the step change the gradients, so they belong to what is measured; the others
        # would write files.
        "custom_hooks": [
            each for each in ([hooks] if is_mapping(hooks) else hooks) if _is_traced(each)
        ],
    }
    with temporary_runner(short) as runner:
        runner.register_hook(hook)
        runner.train()
    if len(hook.losses) < steps and not hook.diverged:
        raise ConfigError(
            f"--steps must be at most {len(hook.losses)}, the iterations of the run, got {steps}"
        )
    if len(hook.losses) < 3:
        raise ConfigError(
            f"--min must be a rate at which the loss does not diverge at once, got {low:g}"
        )
    rates = low * factor ** np.arange(len(hook.losses))
    losses = smooth(hook.losses)
    return RateSearch(rates, losses, suggest(rates, losses), hook.diverged)


def smooth(losses: Sequence[float]) -> np.ndarray:
    """Return the exponential moving average, f64[N], without a bias to 0 at the start.

    >>> smooth([2.0, 2.0, 1.0]).round(2).tolist()
    [2.0, 2.0, 1.63]
    """
    weights = 1 - _SMOOTHING ** np.arange(1, len(losses) + 1)
    averages = itertools.accumulate(
        losses, lambda x, loss: _SMOOTHING * x + (1 - _SMOOTHING) * loss, initial=0.0
    )
    return np.asarray([*averages][1:]) / weights


def suggest(rates: np.ndarray, losses: np.ndarray) -> float:
    """Return the rate at which the loss falls fastest over the logarithm of the rate, before it is
    lowest.

    Slopes are those over a sixth of the steps, so that noise does not decide.
    """
    end = max(int(np.argmin(losses)) + 1, 3)
    reach = max(min(len(losses) // 12, (end - 1) // 2), 1)
    falls = losses[: end - 2 * reach] - losses[2 * reach : end]  # at the steps from `reach` on
    start = min(int(_SKIPPED * len(losses)), len(falls) - 1)
    return float(rates[reach + start + int(np.argmax(falls[start:]))])


def _rate_name(cfg: Mapping[str, Any]) -> str:
    """Return the name of the learning rate among the optimizer's arguments."""
    if cfg.get("train_cfg") is None:
        raise ConfigError(
            "`train_cfg` must be given for lr-find, got none: there is nothing to train"
        )
    wrapper = cfg.get("optim_wrapper")
    optimizer = wrapper.get("optimizer") if isinstance(wrapper, Mapping) else None
    if not isinstance(optimizer, Mapping):
        raise ConfigError(
            "`optim_wrapper.optimizer` must be the config of one optimizer for lr-find"
        )
    for name in _RATE_NAMES:
        if name in optimizer:
            return name
    raise ConfigError(
        f"`optim_wrapper.optimizer` must have `lr` for lr-find, got {sorted(optimizer)}"
    )


def _is_traced(hook: Any) -> bool:
    """Return whether a hook, or that of a config, takes part in the compiled step."""
    cfg = as_config(hook)
    kind = cfg["type"] if is_mapping(cfg) else type(hook)
    kind = HOOKS.get(kind) if isinstance(kind, str) else kind
    return any(
        getattr(kind, point, None) is not getattr(Hook, point) for point in Hook.traced_points
    )


def _save_png(found: RateSearch, path: str) -> None:
    with save_figure(path, figsize=(7, 4)) as (axis,):
        axis.semilogx(found.rates, found.losses)
        axis.axvline(
            found.suggestion,
            linestyle="--",
            color="gray",
            label=f"suggestion {found.suggestion:.2g}",
        )
        axis.set_xlabel("learning rate")
        axis.set_ylabel("loss, smoothed")
        axis.grid(alpha=0.3)
        axis.legend()
