"""The optimizers of iMIX for BERT-like models: Adam without bias correction, and AdamW as Transformers had it."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.errors import ConfigError, closest
from jengine.optim import core
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.registry import OPTIMIZERS

_SCHEDULES = ("warmup_linear", "warmup_cosine", "warmup_constant")
_NUMBERS = core.numbers_of("lr", "betas", "eps", "weight_decay")


class BertAdamState(NamedTuple):
    """State of these optimizers."""

    steps: jax.Array  # int32[], updates done
    mu: Tree  # float32, like the parameters: mean of the gradients
    nu: Tree  # float32, like the parameters: mean of their squares


@OPTIMIZERS.register_module()
def BertAdam(
    lr: float,
    warmup: float = -1,
    t_total: int = -1,
    schedule: str = "warmup_linear",
    b1: float = 0.9,
    b2: float = 0.999,
    e: float = 1e-6,
    weight_decay: float = 0.01,
    max_grad_norm: float = 1.0,
) -> Optimizer:
    """Adam without bias correction and with decoupled weight decay, which may bring its own schedule.

    Args:
      lr: the learning rate, which the schedule multiplies.
      warmup: the part of the updates that warms up, in [0, 1), or -1 for none.
      t_total: updates of the whole run; -1 for no schedule.
      schedule: 'warmup_linear', 'warmup_cosine' or 'warmup_constant'.
      b1: weight of the past in the mean of gradients.
      b2: likewise of their squares.
      e: added to the root.
      weight_decay: part of the parameters, times the learning rate, that an update takes away.
      max_grad_norm: without effect, as in iMIX; clip with the optimizer wrapper.

    Raises:
      ValueError: a setting outside its range, or an unknown schedule.
    """
    if schedule not in _SCHEDULES:
        raise ConfigError(f"BertAdam: no schedule is called {schedule!r}{closest(schedule, _SCHEDULES)}")
    if not (0 <= warmup < 1 or warmup == -1):
        raise ConfigError(f"BertAdam: warmup is a part of the run, in [0, 1), or -1 for none; found {warmup}")
    if t_total < 1 and t_total != -1:
        raise ConfigError(f"BertAdam: t_total is a number of updates, or -1 for no schedule; found {t_total}")
    settings = _settings("BertAdam", lr, (b1, b2), e, weight_decay)
    settings |= {"warmup": warmup, "t_total": t_total, "schedule": schedule}
    return Optimizer("BertAdam", settings, _plan_bert_adam)


@OPTIMIZERS.register_module()
def BertAdam1(
    lr: float,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    max_grad_norm: float = 1.0,
) -> Optimizer:
    """`BertAdam` without a schedule, which scales the gradient of each tensor down to the norm `max_grad_norm`.

    Raises:
      ValueError: a setting outside its range.
    """
    settings = _settings("BertAdam1", lr, betas, eps, weight_decay)
    core.in_range("BertAdam1", max_grad_norm=max_grad_norm)
    return Optimizer("BertAdam1", {**settings, "max_grad_norm": max_grad_norm}, _plan_bert_adam1, whole_tensor=True)


@OPTIMIZERS.register_module()
def TansformerAdamW(
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    correct_bias: bool = True,
) -> Optimizer:
    """AdamW as Transformers had it; the name is spelt as in iMIX.

    Other than in `AdamW`, `eps` is added before the bias correction, and the decay is taken of the updated parameters.

    Args:
      lr: the learning rate.
      betas: weights of the past in the means of gradients and of their squares.
      eps: added to the root.
      weight_decay: part of the parameters, times the learning rate, that an update takes away.
      correct_bias: whether the means are corrected for their start at zero.

    Raises:
      ValueError: a setting outside its range.
    """
    settings = _settings("TansformerAdamW", lr, betas, eps, weight_decay)
    return Optimizer("TansformerAdamW", {**settings, "correct_bias": correct_bias}, _plan_transformer)


def _settings(name: str, lr: float, betas: Sequence[float], eps: float, weight_decay: float) -> dict[str, Any]:
    core.in_range(name, lr=lr, eps=eps, weight_decay=weight_decay)
    return {"lr": lr, "betas": core.betas_in_range(name, betas), "eps": eps, "weight_decay": weight_decay}


def _init(params: Tree) -> BertAdamState:
    return BertAdamState(core.step_zero(), core.zeros_like(params), core.zeros_like(params))


def _moments(grads: Tree, state: BertAdamState, hp: Numbers) -> BertAdamState:
    return BertAdamState(
        state.steps + 1,
        core.mean(state.mu, hp["beta1_complement"], grads),
        core.mean_of_squares(state.nu, hp["beta2_complement"], grads),
    )


def _plan_bert_adam(groups: Sequence[Mapping[str, Any]]) -> Core:
    flags = {name: core.shared_flag("BertAdam", groups, name) for name in ("warmup", "t_total", "schedule")}
    return Core(_init, functools.partial(_uncorrected, factor=functools.partial(_factor, **flags)), _NUMBERS)


def _plan_bert_adam1(groups: Sequence[Mapping[str, Any]]) -> Core:
    most = core.shared_flag("BertAdam1", groups, "max_grad_norm")

    def clipped(grads: Tree, state: BertAdamState, params: Tree, hp: Numbers) -> tuple[Tree, BertAdamState]:
        return _uncorrected(jax.tree.map(lambda g: _clip(g, most), grads), state, params, hp)

    return Core(_init, clipped, _NUMBERS)


def _plan_transformer(groups: Sequence[Mapping[str, Any]]) -> Core:
    correct_bias = core.shared_flag("TansformerAdamW", groups, "correct_bias")

    def update(grads: Tree, state: BertAdamState, params: Tree, hp: Numbers) -> tuple[Tree, BertAdamState]:
        """First moments over the root of the second, and decay of what results."""
        state = _moments(grads, state, hp)
        rate = hp["lr"]
        if correct_bias:
            corrections = (
                core.bias_correction(hp[name], state.steps) for name in ("beta1_complement", "beta2_complement")
            )
            rate = core.per_group(lambda lr, first, second: lr * jnp.sqrt(second) / first, rate, *corrections)
        decay = core.per_group(jnp.multiply, hp["lr"], hp["weight_decay"])

        def step(r: Any, m: Any, v: Any, eps: Any, k: Any, p: Any) -> Any:
            change = -r * m / (jnp.sqrt(v) + eps)
            return change - k * (p + change)

        return jax.tree.map(step, rate, state.mu, state.nu, hp["eps"], decay, params), state

    return Core(_init, update, _NUMBERS)


def _uncorrected(
    grads: Tree, state: BertAdamState, params: Tree, hp: Numbers, factor: Any = None
) -> tuple[Tree, BertAdamState]:
    """Adam without bias correction; `factor` gives the schedule's multiple of the rate from the updates done."""
    rate = hp["lr"] if factor is None else core.per_group(lambda lr: lr * factor(state.steps), hp["lr"])
    state = _moments(grads, state, hp)
    updates = jax.tree.map(
        lambda r, m, v, eps, wd, p: -r * (m / (jnp.sqrt(v) + eps) + wd * p),
        rate, state.mu, state.nu, hp["eps"], hp["weight_decay"], params,
    )  # fmt: skip
    return updates, state


def _factor(steps: jax.Array, warmup: float, t_total: int, schedule: str) -> jax.Array:
    """The schedule after so many updates; the first update has the number 0, and with a warm-up the rate 0."""
    if t_total == -1:
        return jnp.ones((), jnp.float32)
    done = steps.astype(jnp.float32) / t_total
    if schedule == "warmup_linear":
        after = jnp.maximum((done - 1) / (warmup - 1), 0.0)
    elif schedule == "warmup_cosine":
        after = 0.5 * (1 + jnp.cos(jnp.pi * done))
    else:
        after = jnp.ones((), jnp.float32)
    return jnp.where(done < warmup, done / warmup, after) if warmup > 0 else after


def _clip(gradient: jax.Array, most: float) -> jax.Array:
    norm = jnp.sqrt(jnp.sum(jnp.square(gradient)))
    return gradient * jnp.minimum(most / (norm + 1e-6), 1.0)
