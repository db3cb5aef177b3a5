"""Comparison of optimizer settings between a resumed run and a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jengine.optim.wrapper_dict import AnyWrapper, wrappers_by_name


class Setting(NamedTuple):
    """Optimizer setting that differs."""

    line: str  # its path and both values
    is_restorable: bool  # False in the compiled chain, where the checkpoint's value cannot be used


def optimizer_settings(optim_wrapper: AnyWrapper) -> dict[str, dict[str, Any]]:
    """Return the optimizer type and group settings, before schedulers change them, as JSON-compatible values.

    Returns:
      By optimizer name, '' for a single one: `type`, `param_groups`, the number of parameters in each group as
      `group_sizes` (None for a single group) and, with several groups, `base_param_settings`.
    """
    settings = {}
    for name, wrapper in wrappers_by_name(optim_wrapper).items():
        groups = wrapper.param_groups
        # A single group may be unbound
        sizes = [len(group.paths or ()) for group in groups] if len(groups) > 1 else [None]
        settings[name] = {"type": wrapper.optimizer.name, "group_sizes": sizes, **wrapper.group_state_dict()}
    return settings


def compare_optimizers(
    optim_wrapper: AnyWrapper, new: Mapping[str, Any], old: Mapping[str, Any] | None
) -> list[Setting]:
    """Return the settings that differ between a config and a checkpoint, results of `optimizer_settings`.

    None are compared with a checkpoint without the optimizer.
    """
    if old is None:
        return []
    # Other names mean other optimizers: comparing settings by chance names would only confuse.
    if set(old) != set(new):
        own, other = ("one optimizer" if "" in side else f"the optimizers {sorted(side)}" for side in (new, old))
        return [Setting(f"optim_wrapper: {own} in the config, {other} in the checkpoint", False)]
    differences: list[Setting] = []
    for name, wrapper in wrappers_by_name(optim_wrapper).items():
        path = f"optim_wrapper.{name}.optimizer" if name else "optim_wrapper.optimizer"
        differences += _compare_groups(path, wrapper.optimizer, new[name], old[name])
    return differences


def _compare_groups(path: str, optimizer: Any, new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield the differences between the settings of one optimizer; `optimizer` is the config's."""

    def setting(name: str, own: Any, other: Any, is_restorable: bool = False) -> Setting:
        return Setting(f"{path}{name}: {own} in the config, {other} in the checkpoint", is_restorable)

    for key, name in (("type", ".type"), ("group_sizes", ": numbers of parameters by group")):
        if new[key] != old[key]:
            yield setting(name, new[key], old[key])
            return  # the other settings have other meanings
    groups = list(zip(new["param_groups"], old["param_groups"], strict=True))
    if len(groups) == 1:
        pairs = [("", *groups[0])]
    else:
        pairs = [("", new["base_param_settings"], old["base_param_settings"])]
        pairs += [(f".param_groups[{i}]", *pair) for i, pair in enumerate(groups)]
    # The chain has no part for a setting that is 0 in all groups
    is_absent = {key: all(group.get(key) == 0 for group in new["param_groups"]) for key in optimizer.absent_at_zero}
    for prefix, own, other in pairs:
        for key in own.keys() | other.keys():
            if own.get(key) != other.get(key):
                is_traced = key in optimizer.hyperparams or key not in optimizer.defaults
                is_restorable = is_traced and not is_absent.get(key, False)
                yield setting(f"{prefix}.{key}", own.get(key), other.get(key), is_restorable)
