"""Run the chain of an optimizer on parameter groups, whose hyperparameters are passed as data."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jengine import paths
from jengine.optim.optimizers.common import Parts, Tree, strip_weak_types, upcast
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.optim.param_groups import freeze
from jengine.optim.param_groups.group_table import COLUMNS, group_table
from jengine.optim.param_groups.param_group import GroupLayout, ParamGroup, assign_groups
from jengine.optim.transforms.groups import GroupHyperparamsState

Wrap = Callable[[optax.GradientTransformationExtraArgs], optax.GradientTransformationExtraArgs]
_FIELDS = {"lr": ("learning_rate",), "betas": ("b1", "b2", "b3")}  # optax's names


class GroupedOptimizer:
    """Hold the parameter groups of an optimizer, their hyperparameters, and the group of each parameter.

    Args:
      optimizer: the optimizer with its groups; without any, one group of all parameters.

    Attributes:
      param_groups: the groups; their hyperparameters may be set between two steps.
      base_param_settings: with more than one group, a group of the optimizer's own settings; None otherwise.
      unmatched: config keys that match no parameter, for the table.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.unmatched: list[str] = []
        if optimizer.groups is None:
            self.param_groups = [ParamGroup(optimizer.defaults)]
        else:
            self.param_groups = [_build_group(optimizer.defaults, settings) for settings in optimizer.groups]
        self._members: list[list[str] | None] = [None]
        if optimizer.groups is not None:
            self._members = [group.paths for group in self.param_groups]
        is_single = len(self.param_groups) == 1
        self.base_param_settings = None if is_single else ParamGroup(optimizer.defaults, paths=())
        self._initial = [{name: group[name] for name in optimizer.defaults} for group in self.param_groups]
        self._chains = _group_by_chain(optimizer, self._initial)
        self._fields = {name: _field_names(name, optimizer.defaults[name]) for name in optimizer.hyperparams}
        plain = (bool, int, float, str, tuple, type(None))
        watched = [name for name, value in optimizer.defaults.items() if isinstance(value, plain)]
        self._watched = [(name, operator.itemgetter(name)) for name in watched]
        self._dtype: Any = np.float32
        self._dynamic_by_chain = [self._dynamic_in(groups) for groups in self._chains]
        self._dynamic = set().union(*self._dynamic_by_chain)
        self._last_values: dict[str, list[Any]] = {}  # of each setting in the groups, when it was last read
        self._arrays: dict[str, np.ndarray] = {}  # the hyperparameters, made from `_last_values`
        self._layouts: dict[Any, GroupLayout] = {}  # by structure of the tree
        self._layout: GroupLayout | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    # ------------------------------------------------------------------ the chain

    def transformation(self, before: Parts, wrap: Wrap) -> optax.GradientTransformationExtraArgs:
        """Return the chain with its hyperparameters in the state, as in `optax.inject_hyperparams`.

        The update takes `hyperparams`, values by name that replace those in the state: float32[] or [G] each; names
        that are not in the state are ignored. An entry `frozen:PATTERN` that is not 0 freezes the parameters whose path
        contains PATTERN. Other extra arguments are passed to the parts.

        Args:
          before: parts that act on the gradients of all groups, before the optimizer.
          wrap: wraps the chain (see `accumulate_gradients`); it must not depend on hyperparameters.
        """

        def init(params: Tree) -> GroupHyperparamsState:
            layout = self.layout(params)
            dtype = _dtype_of(layout.trainable(params))
            hyperparams = {name: jnp.array(value, dtype) for name, value in self.hyperparams().items()}
            inner = wrap(self._build_chain(before, hyperparams, layout, params))
            inner_state = inner.init(upcast(layout.trainable(params)))
            return GroupHyperparamsState(hyperparams, strip_weak_types(inner_state))

        def update(
            grads: Tree, state: GroupHyperparamsState, params: Tree = None, *,
            hyperparams: Mapping[str, Any] | None = None, **extra: Any,
        ) -> tuple[Tree, GroupHyperparamsState]:  # fmt: skip
            given = hyperparams or {}
            is_known = any(name in state.hyperparams or name.startswith(freeze.PREFIX) for name in given)
            if given and state.hyperparams and not is_known:
                raise KeyError(f"hyperparams must have one of {sorted(state.hyperparams)}, got {sorted(given)}")
            values = {
                name: jnp.broadcast_to(jnp.asarray(given.get(name, old), old.dtype), old.shape)
                for name, old in jax.tree.map(jnp.asarray, state.hyperparams).items()
            }
            layout = self.layout(grads if params is None else params)
            chain = self._build_chain(before, values, layout, grads if params is None else params)
            if (frozen := freeze.frozen_flags(layout, given)) is not None:
                chain = freeze.skip_frozen(chain, layout, frozen, self._chains)
            if None in layout.groups:  # line searches must receive only the trainable parameters
                extra = _restrict_to_trainable(extra, layout, params)
            trainable = None if params is None else upcast(layout.trainable(params))
            updates, inner_state = wrap(chain).update(
                upcast(layout.trainable(grads)), state.inner_state, trainable, **extra
            )
            updates = layout.combine(updates, jax.tree.map(jnp.zeros_like, grads))
            if params is not None:  # like optax, which computes in the dtype of the gradients and parameters
                updates = jax.tree.map(
                    lambda u, g, p: u.astype(jnp.promote_types(g.dtype, p.dtype)), updates, grads, params
                )
            return updates, GroupHyperparamsState(values, strip_weak_types(inner_state))

        return optax.GradientTransformationExtraArgs(init, update)

    def _build_chain(
        self, before: Parts, hyperparams: Mapping[str, jax.Array], layout: GroupLayout, like: Tree
    ) -> optax.GradientTransformationExtraArgs:
        """Return the chain for the hyperparameters of a step; groups that cannot share a chain have separate ones."""
        layout.check_stacked(self._chains, self.optimizer)
        names = [name for name in self.optimizer.per_parameter if name in self._dynamic]
        per_parameter = layout.broadcast({name: hyperparams[self._fields[name][0]] for name in names}, like)
        chains = []
        for index, groups in enumerate(self._chains):
            first = self._initial[groups[0]]
            settings = dict(first)
            for name in self._dynamic_by_chain[index]:
                if name in per_parameter:
                    value = per_parameter[name]
                    settings[name] = layout.select(value, groups) if len(self._chains) > 1 else value
                else:
                    fields = [hyperparams[field] for field in self._fields[name]]
                    values = [value if value.ndim == 0 else value[index] for value in fields]
                    settings[name] = tuple(values) if isinstance(first[name], tuple) else values[0]
            chains.append(self.optimizer.parts(**settings))
        if len(chains) == 1:
            return _named_chain(*before, *chains[0])
        by_groups = _apply_by_groups([_named_chain(*parts) for parts in chains], layout, self._chains)
        return _named_chain(*before, ("groups", by_groups))

    def _dynamic_in(self, groups: Sequence[int]) -> list[str]:
        """Return the names of the settings that are data, not constants, in the chain of these groups."""
        absent = self.optimizer.absent_at_zero
        values = {name: [self._initial[group][name] for group in groups] for name in self.optimizer.hyperparams}
        return [name for name, initial in values.items() if name not in absent or any(initial)]

    # ------------------------------------------------------------------ the group of each parameter

    def layout(self, params: Tree) -> GroupLayout:
        """Return the group of each leaf of a tree like the parameters.

        Raises:
          TypeError: a trainable leaf that is not floating. ValueError: groups that do not fit the tree.
        """
        treedef = jax.tree.structure(params)
        if treedef not in self._layouts:
            self._layouts[treedef] = assign_groups(params, self._members)
        return self._layouts[treedef]

    def map_groups(self, params: Tree, function: Callable[[ParamGroup], float]) -> Tree:
        """Return the value of a function of the group of each parameter, 0 for frozen parameters.

        Args:
          params: the parameters.
          function: group -> number.

        Returns:
          A tree of float32[] like the parameters; for a parameter whose layers are in several groups an array that
          broadcasts against it.
        """
        layout = self.layout(params)
        values = np.asarray([function(group) for group in self.param_groups], np.float32)
        tree = layout.broadcast({"value": jnp.asarray(values if len(values) > 1 else values[0])}, params)["value"]
        if len(values) == 1:
            tree = layout.trainable(jax.tree.map(lambda _: tree, params))
        return layout.combine(tree, jax.tree.map(lambda _: jnp.float32(0), params))

    def bind(self, params: Tree) -> None:
        """Set the names and shapes of the parameters, for tables and `param_settings`.

        Raises:
          TypeError: a trainable leaf that is not floating. ValueError: groups that do not fit the parameters.
        """
        layout = self.layout(params)
        layout.check_stacked(self._chains, self.optimizer)
        self._last_values = {}
        self._dtype = _dtype_of(layout.trainable(params))
        self._shapes = {path: tuple(leaf.shape) for path, leaf in paths.flatten(params).items()}
        if self.optimizer.groups is None:
            self.param_groups[0].paths = list(layout.paths)
        self._layout = layout

    def select_state(self, layout: GroupLayout, flags: list[Any], old: Any, new: Any) -> Any:
        """Return an optimizer state with `old` for the leaves with a flag and `new` for the others."""
        return freeze.select_state(layout, flags, self._chains, old, new)

    def restrict(self, params: Tree) -> None:
        """Freeze all parameters that are not in the tree `params`, if no groups were given."""
        if self.optimizer.groups is None:
            self._members = [list(paths.flatten(params))]
            self._layouts.clear()

    # ------------------------------------------------------------------ hyperparameters on the host

    def hyperparams(self) -> dict[str, Any]:
        """Return the current hyperparameters of all groups: by name a scalar, or float[G] for several groups.

        Raises:
          ValueError: a setting of a group was changed in a way that the chain does not support.
        """
        for name, get in self._watched:
            values = list(map(get, self.param_groups))  # without a Python call for each group and setting
            if values != self._last_values.get(name):
                self._read(name, values)
        return dict(self._arrays)

    def cast(self, value: Any) -> np.ndarray:
        """Return a value in the dtype of the hyperparameters."""
        return np.asarray(value, self._dtype)

    def _read(self, name: str, values: list[Any]) -> None:
        """Read the current values of a setting in the groups."""
        if len(values) > 1 or name not in self._dynamic:  # one value of the chain may change freely
            self._check(name)
        self._last_values[name] = values
        if name not in self._dynamic:
            return
        if name not in self.optimizer.per_parameter:
            values = [values[groups[0]] for groups in self._chains]
        for i, field in enumerate(self._fields[name]):
            column = [value[i] for value in values] if isinstance(values[0], tuple) else values
            self._arrays[field] = np.asarray(column if len(column) > 1 else column[0], self._dtype)
            self._arrays[field].setflags(write=False)  # the same array is returned again

    def _check(self, name: str) -> None:
        """Check that the chain supports the current values of a setting."""
        optimizer = self.optimizer.name
        if name not in self._fields:
            for initial, group in zip(self._initial, self.param_groups, strict=True):
                if group[name] != initial[name]:
                    raise ValueError(
                        f"{optimizer}: {name} must stay {initial[name]!r}, because it is part of the chain, "
                        f"got {group[name]!r}; set it in the config"
                    )
            return
        for groups, dynamic in zip(self._chains, self._dynamic_by_chain, strict=True):
            values = [self.param_groups[group][name] for group in groups]
            if name not in dynamic and any(values):
                raise ValueError(
                    f"{optimizer}: {name} must stay 0, because the chain was built without it, "
                    f"got {max(values, key=abs)}; start from a {name} above 0"
                )
            if name not in self.optimizer.per_parameter and any(value != values[0] for value in values):
                raise ValueError(
                    f"{optimizer}: {name} must stay equal in the groups {list(groups)}, which share a chain, "
                    f"got {values}; set different values in the config"
                )

    def param_settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings of each parameter by dotted path; {} before `bind`."""
        if self._layout is None:
            return {}
        settings = {}
        for path, member in zip(self._layout.paths, self._layout.groups, strict=True):
            if isinstance(member, tuple):
                settings.update({f"{path}[{i}]": dict(self.param_groups[g]) for i, g in enumerate(member)})
            elif member is not None:
                settings[path] = dict(self.param_groups[member])
        return settings

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the parameter groups as a table: column names and rows of strings; no rows before `bind`."""
        if self._layout is None:
            return list(COLUMNS), []
        return list(COLUMNS), group_table(self.param_groups, self._layout, self._shapes, self.unmatched)

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of all groups as JSON-compatible values."""
        state: dict[str, Any] = {"param_groups": [_json_settings(group) for group in self.param_groups]}
        if self.base_param_settings is not None:
            state["base_param_settings"] = _json_settings(self.base_param_settings)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the settings of a `state_dict`.

        Raises:
          ValueError: a different number of groups.
        """
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the checkpoint must have {len(self.param_groups)} parameter groups, as this run, got {len(groups)}; "
                "its paramwise_cfg differs"
            )
        for group, saved in zip(self.param_groups, groups, strict=True):
            self._restore(group, saved)
        if self.base_param_settings is not None and "base_param_settings" in state_dict:
            self._restore(self.base_param_settings, state_dict["base_param_settings"])

    def _restore(self, group: dict[str, Any], saved: Mapping[str, Any]) -> None:
        """Restore a group, except for the settings that are part of the chain."""
        for key, value in saved.items():
            if key in self._fields or key not in self.optimizer.defaults:
                group[key] = tuple(value) if isinstance(value, list) else value


def _build_group(defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> ParamGroup:
    members = settings["params"]
    own_settings = {key: value for key, value in settings.items() if key not in ("params", "patterns")}
    return ParamGroup(
        {**defaults, **own_settings},
        [members] if isinstance(members, str) else list(members),
        settings.get("patterns", ()),
    )


def _group_by_chain(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], ...]:
    """Return sets of groups that share a chain: they differ only in the settings `per_parameter`."""
    varying = optimizer.per_parameter
    chains: dict[Any, list[int]] = {}
    for index, group in enumerate(settings):
        key = repr({k: v for k, v in group.items() if k not in varying}) if varying else index
        chains.setdefault(key, []).append(index)
    return tuple(tuple(groups) for groups in chains.values())


def _field_names(name: str, value: Any) -> tuple[str, ...]:
    """Return the names of a hyperparameter in the state of the chain, one per element."""
    if name in _FIELDS:
        return _FIELDS[name][: len(value)] if isinstance(value, tuple) else _FIELDS[name]
    return tuple(f"{name}_{i}" for i in range(len(value))) if isinstance(value, tuple) else (name,)


def _dtype_of(trainable: Tree) -> Any:
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(trainable)}
    return jax.dtypes.canonicalize_dtype(jnp.result_type(np.float32, *dtypes))


def _named_chain(*parts: tuple[str, optax.GradientTransformation]) -> optax.GradientTransformationExtraArgs:
    """Return `optax.named_chain` with its state in a dict, which JAX flattens in C++, unlike an OrderedDict."""
    chain = optax.named_chain(*parts)

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        updates, new_state = chain.update(grads, state, params, **extra)
        return updates, dict(new_state)

    return optax.GradientTransformationExtraArgs(lambda params: dict(chain.init(params)), update)


def _apply_by_groups(
    chains: Sequence[optax.GradientTransformationExtraArgs], layout: GroupLayout, members: Sequence[Sequence[int]]
) -> optax.GradientTransformationExtraArgs:
    """Apply each chain to the parameters of its groups, with the states in a dict by groups."""
    names = ["_".join(map(str, groups)) for groups in members]

    def init(params: Tree) -> dict[str, Any]:
        named_chains = zip(names, chains, members, strict=True)
        return {name: chain.init(layout.select(params, groups)) for name, chain, groups in named_chains}

    def update(grads: Tree, state: Mapping[str, Any], params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        updates: Tree = jax.tree.map(lambda g: None, grads)
        new_state = {}
        for name, chain, groups in zip(names, chains, members, strict=True):
            own_params = None if params is None else layout.select(params, groups)
            own_updates, new_state[name] = chain.update(layout.select(grads, groups), state[name], own_params, **extra)
            updates = layout.combine(own_updates, updates)
        return updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _restrict_to_trainable(extra: Mapping[str, Any], layout: GroupLayout, params: Tree) -> dict[str, Any]:
    """Return the extra arguments of an update with `grad` and `value_fn` for the trainable parameters only."""
    restricted = dict(extra)
    if "grad" in extra and jax.tree.structure(extra["grad"]) == layout.treedef:
        restricted["grad"] = layout.trainable(extra["grad"])
    if (value_fn := extra.get("value_fn")) is not None:

        def evaluate(trainable: Tree, *args: Any, **kwargs: Any) -> Any:
            return value_fn(layout.combine(trainable, params), *args, **kwargs)

        restricted["value_fn"] = evaluate
    return restricted


def _json_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON-compatible settings of a group: not the mask or the line search of an optimizer of optax."""
    plain = {key: list(value) if type(value) is tuple else value for key, value in group.items()}
    return {
        key: value for key, value in plain.items() if isinstance(value, bool | int | float | str | list | dict | None)
    }
