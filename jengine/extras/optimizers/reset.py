"""Reset of the optimizer of a run, or of some parameter groups."""

from collections.abc import Sequence

import jax

from jengine.config.errors import ConfigError
from jengine.extras.optimizers.freeze import reset_state
from jengine.runner.runner import Runner, find_wrapper


def reset_optimizer(runner: Runner, groups: Sequence[int | str] | None, optimizer: str) -> None:
    """Start the optimizer of a run anew, see `Runner.reset_optimizer`."""
    if hasattr(runner.strategy, "outer_step"):
        raise ConfigError(
            "`parallel` must be a strategy with one state of the optimizer for all replicas, to "
            f"start it anew, got {type(runner.strategy).__name__}"
        )
    wrapper = find_wrapper(runner.optim_wrapper, optimizer)
    names = [group.get("group_name", index) for index, group in enumerate(wrapper.param_groups)]
    known = {name: index for index, name in enumerate(names)}
    known |= {index: index for index in range(len(names))}
    if unknown := [group for group in groups or () if group not in known]:
        raise ConfigError(f"`groups` must be parameter groups, {names}, got {unknown}")
    chosen = None if groups is None else tuple(sorted({known[group] for group in groups}))
    opt_state = runner.state.opt_state
    state = opt_state[optimizer] if optimizer else opt_state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)  # the step expects these
    reset = jax.jit(
        lambda state, params: reset_state(wrapper, state, params, chosen), out_shardings=shardings
    )
    state = reset(state, runner.state.params)
    opt_state = {**opt_state, optimizer: state} if optimizer else state
    runner.state = runner.state.replace(opt_state=opt_state)
