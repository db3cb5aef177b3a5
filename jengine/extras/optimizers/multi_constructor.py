"""Constructor of several optimizer wrappers, each for one part of the model."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.config import paths
from jengine.config.annotations import is_mapping
from jengine.config.errors import config_path
from jengine.config.registry import OPTIM_WRAPPER_CONSTRUCTORS
from jengine.optim.optimizers.optimizer_builder import is_optimizer
from jengine.optim.param_groups.modules import ParamsSource, get_params
from jengine.optim.wrapper import OptimWrapper
from jengine.optim.wrapper_dict import OptimWrapperDict


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class MultiOptimWrapperConstructor:
    """Constructor of an optimizer wrapper for each named part of the model.

    >>> import jax.numpy as jnp
    >>> cfg = dict(
    ...     gen=dict(optimizer=dict(type="SGD", lr=0.1)),
    ...     disc=dict(optimizer=dict(type="SGD", lr=0.2)),
    ... )
    >>> wrappers = MultiOptimWrapperConstructor(cfg)(
    ...     {"gen": {"w": jnp.ones(2)}, "disc": {"w": jnp.ones(2)}}
    ... )
    >>> wrappers.get_lr()
    {'gen.lr': [0.1], 'disc.lr': [0.2]}

    Args:
      optim_wrapper_cfg: name -> a built wrapper, a bare optax transformation, or a config as for a
        single optimizer (`optimizer`, `clip_grad`, `paramwise_cfg`, `constructor`, …). It trains
        the parameters in the module called `name`, or in the modules listed in its entry `modules`.
        A built wrapper with groups of its own trains those.
      paramwise_cfg: rules for every wrapper without rules.

    Raises:
      TypeError: a value that is neither a wrapper nor a config.
    """

    find_roles: Any = None  # see DefaultOptimWrapperConstructor
    find_base: Any = None

    def __init__(
        self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None
    ) -> None:
        cfg = {
            name: {"optimizer": value} if is_optimizer(value) else value
            for name, value in optim_wrapper_cfg.items()
            if name != "type"
        }
        for name, value in cfg.items():
            if not is_mapping(value) and not isinstance(value, OptimWrapper):
                raise TypeError(
                    f"`{name}` must be an optimizer wrapper or the config of one, got {value!r}"
                )
        self.optim_wrapper_cfg = cfg
        self.paramwise_cfg = paramwise_cfg

    def configs(self) -> dict[str, Any]:
        """Return by name the built wrapper, or the config for the constructor."""
        rules = {} if self.paramwise_cfg is None else {"paramwise_cfg": self.paramwise_cfg}
        configs: dict[str, Any] = {}
        for name, cfg in self.optim_wrapper_cfg.items():
            if not isinstance(cfg, OptimWrapper):
                # An optimizer's own paramwise_cfg comes second, so that it replaces the common one.
                cfg = {**rules, **{key: value for key, value in cfg.items() if key != "modules"}}
            configs[name] = cfg
        return configs

    def build_without_params(self) -> dict[str, OptimWrapper]:
        """Return the wrappers by name, after the checks of the rules that need no parameters."""
        # In the function: the builder imports the constructors.
        from jengine.optim.wrapper_builder import build_without_params

        wrappers = {}
        for name, cfg in self.configs().items():
            with config_path(name):
                wrappers[name] = build_without_params(cfg)[""]
        return wrappers

    def __call__(
        self, model: ParamsSource, module_types: Mapping[str, str] | None = None
    ) -> OptimWrapperDict:
        """Build the wrappers; the arguments are those of `get_params`.

        Raises:
          ValueError: a module without parameters, or one in several wrappers.
        """
        from jengine.optim.wrapper_builder import construct  # its module imports the wrappers first

        params, types = get_params(model, module_types)
        roles = self.find_roles
        if roles is not None:
            roles = functools.partial(roles, phases=tuple(self.optim_wrapper_cfg))
        wrappers: dict[str, Any] = {}
        owners: dict[str, str] = {}
        for name, wrapper_cfg in self.configs().items():
            is_built = isinstance(wrapper_cfg, OptimWrapper)
            if is_built and wrapper_cfg.optimizer.groups is not None:
                wrappers[name] = wrapper_cfg
                continue
            modules = [name] if is_built else self.optim_wrapper_cfg[name].get("modules", [name])
            with config_path(name):
                selected = _select_modules(
                    params, [modules] if isinstance(modules, str) else modules
                )
                # Two optimizers would each step the parameter, with moments that know nothing of
                # the other's steps.
                for path in paths.flatten(selected):
                    if path in owners:
                        raise ValueError(
                            f"parameter {path!r} must be in one optimizer wrapper, got "
                            f"{owners[path]!r} and {name!r}"
                        )
                    owners[path] = name
                # returns a built one
                wrappers[name] = construct(selected, wrapper_cfg, types, roles, self.find_base)
                # it receives all parameters, and must not train the others
                wrappers[name].grouped.restrict(selected)
        return OptimWrapperDict(**wrappers)


def _select_modules(params: Any, modules: Sequence[str]) -> Any:
    """Return the parameters in `modules`, nested as in `params`.

    Raise ValueError for a module without any.
    """
    leaves = paths.flatten(params)
    selected: dict[str, Any] = {}
    for module in modules:
        # A full name or a prefix up to a dot: `dis` must not select `discriminator`.
        below = {
            path: leaf
            for path, leaf in leaves.items()
            if path == module or path.startswith(f"{module}.")
        }
        if not below:
            raise ValueError(
                "`modules` must have parameters, got "
                f"{module!r}{paths.closest_paths(module, leaves)}"
            )
        selected |= below
    return paths.nest(selected)
