"""Several optimizer wrappers by name, for models with parts trained by different optimizers."""

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from optax import OptState

from jengine.config.errors import ArgumentError
from jengine.config.registry import OPTIM_WRAPPERS
from jengine.optim.param_groups.param_group import ParamGroup
from jengine.optim.wrapper import OptimWrapper


@OPTIM_WRAPPERS.register_module()
class OptimWrapperDict(UserDict[str, OptimWrapper]):
    """Mapping from names to optimizer wrappers, each with a state.

    The training loop chooses the wrapper for each step, so this class has no `update_params`,
    `backward` or `step`: call them on one of the wrappers.

    >>> from jengine.optim.optimizers.sgd import SGD
    >>> OptimWrapperDict(gen=OptimWrapper(SGD(lr=0.1)), disc=OptimWrapper(SGD(lr=0.2))).get_lr()
    {'gen.lr': [0.1], 'disc.lr': [0.2]}

    Args:
      **wrappers: OptimWrapper by name.

    Raises:
      ArgumentError: a value that is not an OptimWrapper.
    """

    def __init__(self, **wrappers: OptimWrapper) -> None:
        for name, wrapper in wrappers.items():
            if not isinstance(wrapper, OptimWrapper):
                raise ArgumentError(
                    f"`{name}` must be an OptimWrapper, got {type(wrapper).__name__}"
                )
        super().__init__(wrappers)

    def init(self, params: Any) -> dict[str, OptState]:
        """Return the wrapper states by name; each wrapper selects parameters from `params`."""
        return {name: wrapper.init(params) for name, wrapper in self.items()}

    @property
    def accumulates(self) -> bool:
        """False, because phases do not accumulate gradients."""
        return False

    @property
    def hyperparams(self) -> dict[str, dict[str, Any]]:
        """The hyperparameters of every wrapper, by name."""
        return {name: wrapper.hyperparams for name, wrapper in self.items()}

    @property
    def param_groups(self) -> dict[str, list[ParamGroup]]:
        """The groups of every wrapper, by name."""
        return {name: wrapper.param_groups for name, wrapper in self.items()}

    def zero_grad(self, opt_state: Mapping[str, OptState]) -> dict[str, OptState]:
        """Clear the accumulated gradients of every wrapper."""
        return {name: wrapper.zero_grad(opt_state[name]) for name, wrapper in self.items()}

    def initialize_count_status(self, init_counts: int, max_counts: int | float) -> None:
        """Do nothing: each wrapper counts updates, not the run's iterations."""

    def start_step(self, step: int | None = None) -> bool:
        """Return True: every phase of a step updates parameters."""
        return True

    def get_lr(self) -> dict[str, list[float]]:
        """Return `<name>.lr` for every wrapper, preceded by `<name>.base_lr` for a wrapper with
        several groups.
        """
        return self._collect(OptimWrapper.get_lr)

    def get_momentum(self) -> dict[str, list[float]]:
        """Return `<name>.momentum` for every wrapper."""
        return self._collect(OptimWrapper.get_momentum)

    def _collect(self, get: Callable[[OptimWrapper], dict[str, Any]]) -> dict[str, Any]:
        return {
            f"{name}.{key}": value
            for name, wrapper in self.items()
            for key, value in get(wrapper).items()
        }

    def group_table(self, with_roles: bool = False) -> tuple[list[str], list[list[str]]]:
        """Return one table of the groups of all wrappers, called `<name>.<group>`."""
        columns: list[str] = []
        rows: list[list[str]] = []
        for name, wrapper in self.items():
            columns, group_rows = wrapper.group_table(with_roles)
            rows += [[f"{name}.{row[0]}", *row[1:]] for row in group_rows]
        return columns, rows

    def group_state_dict(self) -> dict[str, Any]:
        """Return the settings of all groups of every wrapper, by name."""
        return {name: wrapper.group_state_dict() for name, wrapper in self.items()}

    def load_group_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the settings in a `group_state_dict`; raise KeyError for an unknown name."""
        for name, saved in state_dict.items():
            self[name].load_group_state_dict(saved)

    def state_dict(self, opt_state: Mapping[str, OptState]) -> dict[str, Any]:
        """Return the state dict of every wrapper, by name."""
        return {name: wrapper.state_dict(opt_state[name]) for name, wrapper in self.items()}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], opt_state: Mapping[str, OptState]
    ) -> dict[str, OptState]:
        """Restore a `state_dict`; raise KeyError for an unknown name."""
        loaded = {
            name: self[name].load_state_dict(saved, opt_state[name])
            for name, saved in state_dict.items()
        }
        return {**opt_state, **loaded}


AnyWrapper: TypeAlias = OptimWrapper | OptimWrapperDict


def wrappers_by_name(optim_wrapper: AnyWrapper) -> dict[str, OptimWrapper]:
    """Return the wrappers of all optimizers by name; a single wrapper has the name ''."""
    return (
        dict(optim_wrapper) if isinstance(optim_wrapper, OptimWrapperDict) else {"": optim_wrapper}
    )
