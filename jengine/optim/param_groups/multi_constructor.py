"""Build several optimizer wrappers, each for its own part of the model."""

from collections.abc import Mapping, Sequence
from typing import Any

from jengine import paths
from jengine.errors import config_path
from jengine.optim.optimizers.build import refuse_trailing_comma
from jengine.optim.param_groups.modules import params_of
from jengine.optim.param_groups.param_group import did_you_mean
from jengine.optim.wrapper import OptimWrapper
from jengine.optim.wrapper_dict import OptimWrapperDict
from jengine.registry import OPTIM_WRAPPER_CONSTRUCTORS


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class MultiOptimWrapperConstructor:
    """Give each named part of the model its own optimizer wrapper.

    Args:
      optim_wrapper_cfg: name -> a built wrapper, or the config of one, as for one optimizer (`optimizer`, `clip_grad`,
        `paramwise_cfg`, `constructor`, …). Its parameters are those of the module called `name`, or of those that
        its entry `modules` lists.
      paramwise_cfg: rules for every wrapper that has none of its own.

    Raises:
      TypeError: not of that form.
    """

    def __init__(self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None) -> None:
        cfg = {name: value for name, value in optim_wrapper_cfg.items() if name != "type"}
        for name, own in cfg.items():
            refuse_trailing_comma(own, "an optimizer wrapper")
            if not hasattr(own, "items") and not isinstance(own, OptimWrapper):
                raise TypeError(f"several optimizers are a dict of wrapper configs by name, found {name}={own!r}")
        self.optim_wrapper_cfg = cfg
        self.paramwise_cfg = paramwise_cfg

    def __call__(self, model: Any, module_types: Mapping[str, str] | None = None) -> OptimWrapperDict:
        """Build the wrappers.

        Args:
          model: what `params_of` takes: parameters, or what holds them.
          module_types: dotted module path -> class name.

        Raises:
          ValueError: a module that is not there, or one that two wrappers claim.
        """
        from jengine.optim.build import construct  # which itself finds this class in the registry

        params, types = params_of(model, module_types)
        wrappers: dict[str, Any] = {}
        claimed: dict[str, str] = {}
        for name, cfg in self.optim_wrapper_cfg.items():
            if isinstance(cfg, OptimWrapper):
                wrappers[name] = cfg
                continue
            own = dict(cfg.items())
            modules = own.pop("modules", [name])
            if self.paramwise_cfg is not None:
                own.setdefault("paramwise_cfg", self.paramwise_cfg)
            with config_path(name):
                part = _part(params, [modules] if isinstance(modules, str) else modules)
                for path in paths.flatten(part):
                    if path in claimed:
                        raise ValueError(f"parameter {path!r} is claimed by {claimed[path]!r} and {name!r}")
                    claimed[path] = name
                wrappers[name] = construct(part, own, types)
                wrappers[name].grouped.restrict(part)
        return OptimWrapperDict(**wrappers)


def _part(params: Any, modules: Sequence[str]) -> Any:
    """Return the parameters below `modules`, in the nesting of `params`.

    Raises:
      ValueError: no parameter lies below one of them.
    """
    everything = paths.flatten(params)
    part: dict[str, Any] = {}
    for module in modules:
        found = [path for path in everything if path == module or path.startswith(f"{module}.")]
        if not found:
            raise ValueError(f"no parameter lies below {module!r}{did_you_mean(module, everything)}")
        for path in found:
            *parents, leaf = path.split(".")
            node = part
            for key in parents:
                node = node.setdefault(key, {})
            node[leaf] = everything[path]
    return part
