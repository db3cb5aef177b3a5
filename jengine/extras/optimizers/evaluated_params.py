"""Parameters that an optimizer defines beside those that it trains, for evaluation and deployment:
averages of schedule-free optimizers, and slow parameters of lookahead.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from optax import OptState, Updates

from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.config.registry import HOOKS
from jengine.hooks.ema import EMAHook, EMAHookState
from jengine.train.traced_hooks import StepContext


class SlowParamsState(NamedTuple):
    """State of `keep_slow_params`."""

    slow: Any  # float32, like the parameters
    inner_state: OptState


def keep_slow_params(
    tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Return `optax.lookahead`, or a chain with it, for the fast parameters alone, with the slow
    ones in the state.

    >>> tx = keep_slow_params(
    ...     optax.with_extra_args_support(optax.lookahead(optax.sgd(1.0), 2, 0.5))
    ... )
    >>> params = jnp.zeros(1)
    >>> state = tx.init(params)
    >>> for _ in range(2):
    ...     updates, state = tx.update(-jnp.ones(1), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> params.tolist(), state.slow.tolist()
    ([1.0], [1.0])

    Raises:
      TypeError: from `init`, the parameters are `optax.LookaheadParams`.
    """

    def init(params: Any) -> SlowParamsState:
        if isinstance(params, optax.LookaheadParams):
            raise TypeError(
                "optax.lookahead must have the network's parameters, got LookaheadParams: the "
                "optimizer keeps the slow ones in its state, and a LookaheadHook evaluates them"
            )
        slow = jax.tree.map(jnp.array, params)  # a copy, or a step would donate one array twice
        return SlowParamsState(slow, tx.init(optax.LookaheadParams(params, slow)))

    def update(
        grads: Updates, state: SlowParamsState, params: Any | None = None, **extra: Any
    ) -> tuple[Updates, SlowParamsState]:
        pair = optax.LookaheadParams(params, state.slow)
        updates, inner_state = tx.update(grads, state.inner_state, pair, **extra)
        slow = optax.apply_updates(state.slow, updates.slow)
        return updates.fast, SlowParamsState(slow, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def train_fast(
    tx: optax.GradientTransformationExtraArgs, example: OptState | None
) -> optax.GradientTransformationExtraArgs:
    """Return `keep_slow_params(tx)` if a transformation has `optax.lookahead`, and otherwise `tx`.

    Args:
      tx: the transformation.
      example: a state for a pair of trees; None if `tx` requires certain parameters, with which
        `init` finds out.

    Raises:
      ConfigError: from `init`, a lookahead for a part of the parameters.
    """
    slow = keep_slow_params(tx)
    if example is not None:
        return slow if _has_lookahead(example) else tx

    def init(params: Any) -> OptState:
        state = tx.init(params)
        if not _has_lookahead(state):
            return state
        try:
            return slow.init(params)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "`optim_wrapper.optimizer` must have optax.lookahead around what treats parameters "
                "differently, such as optax.lookahead(optax.masked(...), ...), got one within it"
            ) from error

    def update(
        grads: Updates, state: OptState, params: Any | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        chain = slow if isinstance(state, SlowParamsState) else tx
        return chain.update(grads, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _has_lookahead(state: OptState) -> bool:
    kind = optax.LookaheadState
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return any(isinstance(node, kind) for node in nodes)


class EvaluatedParamsHook(EMAHook):
    """Evaluation and checkpoints with the parameters that the state of the optimizer defines.

    They are computed after each update, so that validation, test and checkpoints have them, as with
    an `EMAHook`, of which a run has none then. A subclass says which state it is, and how the
    parameters follow from it.

    Args:
      evaluate_on_ema: whether validation and test use these parameters.
      evaluate_on_origin: whether they use the trained parameters; with `evaluate_on_ema` in a
        second pass whose metrics end in `_origin`.

    Attributes:
      kind: the state of the optimizer, of which there is one for each parameter group.
      required: the optimizer, for the error.

    Raises:
      ConfigError: in the first step, no optimizer has such a state.
    """

    kind: ClassVar[Any]
    required: ClassVar[str]

    def __init__(self, evaluate_on_ema: bool = True, evaluate_on_origin: bool = False) -> None:
        super().__init__(
            evaluate_on_ema=evaluate_on_ema,
            evaluate_on_origin=evaluate_on_origin,
            count_by="update",
        )

    def evaluate(self, state: Any, params: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Return the parameters to evaluate by dotted path, from a state and the trained
        parameters by dotted path.

        Those that are missing are the trained ones.
        """
        raise NotImplementedError

    def traced_update(self, ctx: StepContext) -> StepContext:
        """Compute the parameters from the optimizer's state."""
        nodes = jax.tree.leaves(ctx.opt_state, is_leaf=lambda node: isinstance(node, self.kind))
        found = [node for node in nodes if isinstance(node, self.kind)]
        if not found:
            raise ConfigError(
                f"{type(self).__name__}: `optim_wrapper.optimizer` must be {self.required}, got "
                "another one"
            )
        params = paths.flatten(ctx.params)
        evaluated: dict[str, jax.Array] = {}
        for state in found:
            evaluated.update(self.evaluate(state, params))

        def select(path: str, old: jax.Array, raw: jax.Array) -> jax.Array:
            # frozen parameters are in no state
            return evaluated.get(path, raw).astype(old.dtype)

        before: EMAHookState = ctx.hook_state
        new = paths.map_with_path(select, before.params, ctx.params)
        return ctx.replace(hook_state=before._replace(params=new, steps=before.steps + 1))


@HOOKS.register_module()
class ScheduleFreeHook(EvaluatedParamsHook):
    """Averaged parameters of `schedule_free_adamw`, `schedule_free_sgd` or
    `optax.contrib.schedule_free`.

    Such an optimizer trains at points between two sequences; the average of one of them is the
    model. The arguments are those of `EvaluatedParamsHook`.

    Examples:
      >>> ScheduleFreeHook().get_traced_points()
      ['traced_update', 'traced_accumulate']

    Source: Defazio et al., The Road Less Scheduled, arXiv:2405.15682.
    """

    kind = optax.contrib.ScheduleFreeState
    required = "schedule-free, such as dict(type='schedule_free_adamw', learning_rate=...)"

    def evaluate(self, state: Any, params: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Return the average, from the parameters and the other sequence."""
        z = {path: leaf for path, leaf in paths.flatten(state.z).items() if path in params}
        selected = {path: params[path] for path in z}
        averages: Any = optax.contrib.schedule_free_eval_params(state._replace(z=z), selected)
        return averages


@HOOKS.register_module()
class LookaheadHook(EvaluatedParamsHook):
    """Slow parameters of `optax.lookahead`, which is trained at the fast ones.

    The arguments are those of `EvaluatedParamsHook`.

    Source: Zhang et al., Lookahead Optimizer: k steps forward, 1 step back, arXiv:1907.08610.
    """

    kind = SlowParamsState
    required = "optax.lookahead(...)"

    def evaluate(self, state: Any, params: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Return the slow parameters."""
        return paths.flatten(state.slow)
