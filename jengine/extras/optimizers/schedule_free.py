"""Averages that schedule-free optimizers define."""

import jax
import optax.contrib

from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.config.registry import HOOKS
from jengine.hooks.ema import EMAHook, EMAHookState
from jengine.train.traced_hooks import StepContext


@HOOKS.register_module()
class ScheduleFreeHook(EMAHook):
    """Averaged parameters of `schedule_free_adamw`, `schedule_free_sgd` or
    `optax.contrib.schedule_free`.

    Such an optimizer trains at points between two sequences; the average of one of them is the
    model. The hook computes it after each update, so that validation, test and checkpoints have it,
    as with an `EMAHook`, of which a run has none then.

    Args:
      evaluate_on_ema: whether validation and test use the averages.
      evaluate_on_origin: whether they use the trained parameters; with `evaluate_on_ema` in a
        second pass whose metrics end in `_origin`.

    Raises:
      ConfigError: in the first step, no optimizer is schedule-free.

    Examples:
      >>> ScheduleFreeHook().get_traced_points()
      ['traced_update', 'traced_accumulate']

    Source: Defazio et al., The Road Less Scheduled, arXiv:2405.15682.
    """

    def __init__(self, evaluate_on_ema: bool = True, evaluate_on_origin: bool = False) -> None:
        super().__init__(
            evaluate_on_ema=evaluate_on_ema,
            evaluate_on_origin=evaluate_on_origin,
            count_by="update",
        )

    def traced_update(self, ctx: StepContext) -> StepContext:
        """Compute the averages from the optimizer's state."""
        kind = optax.contrib.ScheduleFreeState
        nodes = jax.tree.leaves(ctx.opt_state, is_leaf=lambda node: isinstance(node, kind))
        found = [node for node in nodes if isinstance(node, kind)]  # one for each parameter group
        if not found:
            raise ConfigError(
                "ScheduleFreeHook: `optim_wrapper.optimizer` must be schedule-free, such as "
                "dict(type='schedule_free_adamw', learning_rate=...), got another one"
            )
        params = paths.flatten(ctx.params)
        averages = {}
        for state in found:
            z = {path: leaf for path, leaf in paths.flatten(state.z).items() if path in params}
            selected = {path: params[path] for path in z}
            averages.update(optax.contrib.schedule_free_eval_params(state._replace(z=z), selected))

        def select(path: str, old: jax.Array, raw: jax.Array) -> jax.Array:
            # a frozen parameter is its own average
            return averages.get(path, raw).astype(old.dtype)

        before: EMAHookState = ctx.hook_state
        new = paths.map_with_path(select, before.params, ctx.params)
        return ctx.replace(hook_state=before._replace(params=new, steps=before.steps + 1))
