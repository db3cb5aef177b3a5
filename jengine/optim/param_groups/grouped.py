"""Run the chain of an optimizer on parameter groups, whose numbers are data."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jengine import paths
from jengine.optim.optimizers.common import Parts, Tree, strongly_typed, wide
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.optim.param_groups import freeze
from jengine.optim.param_groups.group_table import COLUMNS, group_table
from jengine.optim.param_groups.param_group import Layout, ParamGroup, bind
from jengine.optim.transforms.groups import GroupHyperparamsState

Wrap = Callable[[optax.GradientTransformationExtraArgs], optax.GradientTransformationExtraArgs]
_FIELDS = {"lr": ("learning_rate",), "betas": ("b1", "b2", "b3")}  # optax's names


class GroupedOptimizer:
    """Own the numbers of the groups, and know which parameter is in which.

    Args:
      optimizer: with groups of its own, or none for one group of all parameters.

    Attributes:
      param_groups: the groups; their numbers may be set between two steps.
      base_param_settings: with more than one group, a group of the optimizer's own settings; None otherwise.
      unmatched: config keys that match no parameter, for the table.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.unmatched: list[str] = []
        if optimizer.groups is None:
            self.param_groups = [ParamGroup(optimizer.defaults)]
        else:
            self.param_groups = [_group(optimizer.defaults, settings) for settings in optimizer.groups]
        self._members: list[list[str] | None] = [None]
        if optimizer.groups is not None:
            self._members = [group.paths for group in self.param_groups]
        single = len(self.param_groups) == 1
        self.base_param_settings = None if single else ParamGroup(optimizer.defaults, paths=())
        self._settings = [{name: group[name] for name in optimizer.defaults} for group in self.param_groups]
        self._chains = _groups_by_chain(optimizer, self._settings)
        self._fields = {name: _fields(name, optimizer.defaults[name]) for name in optimizer.numbers}
        plain = (bool, int, float, str, tuple, type(None))
        self._watched = [name for name, value in optimizer.defaults.items() if isinstance(value, plain)]
        self._dtype: Any = np.float32
        self._data = {name for groups in self._chains for name in self._moving(groups)}
        self._values: dict[str, list[Any]] = {}  # those that were read last, by setting
        self._numbers: dict[str, np.ndarray] = {}  # made from them
        self._layouts: dict[Any, Layout] = {}  # by structure of the tree
        self._layout: Layout | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    # ------------------------------------------------------------------ the chain

    def transformation(self, before: Parts, wrap: Wrap) -> optax.GradientTransformationExtraArgs:
        """Return the chain with its numbers in the state, as `optax.inject_hyperparams` has them.

        The update takes `hyperparams`, numbers by name, which replace those in the state: float32[] or [G] each, others
        than in the state are ignored. An entry `frozen:PATTERN` that is not 0 freezes the parameters whose path
        contains PATTERN. Other extra arguments go to the parts.

        Args:
          before: parts that act on the gradients of all groups, before the optimizer.
          wrap: adds what surrounds the chain (see `accumulate_gradients`); it may not depend on numbers.
        """

        def init(params: Tree) -> GroupHyperparamsState:
            layout = self.layout(params)
            dtype = _dtype_of(layout.trainable(params))
            hyperparams = {name: jnp.array(value, dtype) for name, value in self.numbers().items()}
            inner = wrap(self._chain(before, hyperparams, layout, params))
            inner_state = inner.init(wide(layout.trainable(params)))
            return GroupHyperparamsState(hyperparams, strongly_typed(inner_state))

        def update(
            grads: Tree, state: GroupHyperparamsState, params: Tree = None, *,
            hyperparams: Mapping[str, Any] | None = None, **extra: Any,
        ) -> tuple[Tree, GroupHyperparamsState]:  # fmt: skip
            given = hyperparams or {}
            known = any(name in state.hyperparams or name.startswith(freeze.PREFIX) for name in given)
            if given and state.hyperparams and not known:
                raise KeyError(f"hyperparams must have one of {sorted(state.hyperparams)}, got {sorted(given)}")
            numbers = {
                name: jnp.broadcast_to(jnp.asarray(given.get(name, old), old.dtype), old.shape)
                for name, old in jax.tree.map(jnp.asarray, state.hyperparams).items()
            }
            layout = self.layout(grads if params is None else params)
            chain = self._chain(before, numbers, layout, grads if params is None else params)
            if (frozen := freeze.flags(layout, given)) is not None:
                chain = freeze.hold_frozen(chain, layout, frozen, self._chains)
            if None in layout.groups:  # for line searches, which then see the trainable parameters alone
                extra = _of_trainable(extra, layout, params)
            own = None if params is None else wide(layout.trainable(params))
            updates, inner_state = wrap(chain).update(wide(layout.trainable(grads)), state.inner_state, own, **extra)
            updates = layout.fill(updates, jax.tree.map(jnp.zeros_like, grads))
            if params is not None:  # as optax, which computes in the dtype of the gradients and parameters
                updates = jax.tree.map(
                    lambda u, g, p: u.astype(jnp.promote_types(g.dtype, p.dtype)), updates, grads, params
                )
            return updates, GroupHyperparamsState(numbers, strongly_typed(inner_state))

        return optax.GradientTransformationExtraArgs(init, update)

    def _chain(
        self, before: Parts, hyperparams: Mapping[str, jax.Array], layout: Layout, like: Tree
    ) -> optax.GradientTransformationExtraArgs:
        """Return the chain on the numbers of a step; one for each set of groups that differ in more than `by_leaf`."""
        layout.check_stacked(self._chains, self.optimizer)
        moving = [name for name in self.optimizer.by_leaf if name in self._data]
        by_leaf = layout.spread({name: hyperparams[self._fields[name][0]] for name in moving}, like)
        chains = []
        for index, groups in enumerate(self._chains):
            first = self._settings[groups[0]]
            settings = dict(first)
            for name in self._moving(groups):
                if name in by_leaf:
                    settings[name] = layout.part(by_leaf[name], groups) if len(self._chains) > 1 else by_leaf[name]
                else:
                    fields = [hyperparams[field] for field in self._fields[name]]
                    values = [value if value.ndim == 0 else value[index] for value in fields]
                    settings[name] = tuple(values) if isinstance(first[name], tuple) else values[0]
            chains.append(self.optimizer.parts(**settings))
        if len(chains) == 1:
            return optax.named_chain(*before, *chains[0])
        side_by_side = _side_by_side([optax.named_chain(*parts) for parts in chains], layout, self._chains)
        return optax.named_chain(*before, ("groups", side_by_side))

    def _moving(self, groups: Sequence[int]) -> list[str]:
        """Return the names of the settings that are data in the chain of these groups."""
        absent = self.optimizer.absent_at_zero
        values = {name: [self._settings[group][name] for group in groups] for name in self.optimizer.numbers}
        return [name for name, own in values.items() if name not in absent or any(own)]

    # ------------------------------------------------------------------ which parameter is in which group

    def layout(self, params: Tree) -> Layout:
        """Return the group of each leaf of a tree, of gradients or parameters.

        Raises:
          TypeError: a trainable leaf that is not floating. ValueError: groups that do not fit the tree.
        """
        treedef = jax.tree.structure(params)
        if treedef not in self._layouts:
            self._layouts[treedef] = bind(params, self._members)
        return self._layouts[treedef]

    def bind(self, params: Tree) -> None:
        """Take the names and shapes of the parameters, for tables and `param_settings`.

        Raises:
          TypeError: a trainable leaf that is not floating. ValueError: groups that do not fit the parameters.
        """
        layout = self.layout(params)
        layout.check_stacked(self._chains, self.optimizer)
        self._values = {}
        self._dtype = _dtype_of(layout.trainable(params))
        self._shapes = {path: tuple(leaf.shape) for path, leaf in paths.flatten(params).items()}
        if self.optimizer.groups is None:
            self.param_groups[0].paths = list(layout.paths)
        self._layout = layout

    def hold(self, layout: Layout, flags: list[Any], old: Any, new: Any) -> Any:
        """Return an optimizer state that is `old` for the leaves with a flag and `new` for the others."""
        return freeze.hold(layout, flags, self._chains, old, new)

    def restrict(self, params: Tree) -> None:
        """Train the parameters of a tree alone, where no groups were given: all others are frozen."""
        if self.optimizer.groups is None:
            self._members = [list(paths.flatten(params))]
            self._layouts.clear()

    # ------------------------------------------------------------------ the numbers on the host

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of all groups: by name a scalar, or float[G] where there are several groups.

        Raises:
          ValueError: a number was set that the chain cannot take.
        """
        for name in self._watched:
            values = [group[name] for group in self.param_groups]
            if values != self._values.get(name):
                self._take(name, values)
        return dict(self._numbers)

    def number(self, value: Any) -> np.ndarray:
        """Return a number, or several, in the dtype of the numbers."""
        return np.asarray(value, self._dtype)

    def _take(self, name: str, values: list[Any]) -> None:
        """Take the values that a setting has in the groups as they are now."""
        self._check(name)
        self._values[name] = values
        if name not in self._data:
            return
        if name not in self.optimizer.by_leaf:
            values = [values[groups[0]] for groups in self._chains]
        for i, field in enumerate(self._fields[name]):
            column = [value[i] if isinstance(value, tuple) else value for value in values]
            self._numbers[field] = np.asarray(column if len(column) > 1 else column[0], self._dtype)
            self._numbers[field].setflags(write=False)  # the same array is returned again

    def _check(self, name: str) -> None:
        """Check that the chain can take a setting as it is now."""
        optimizer = self.optimizer.name
        if name not in self._fields:
            for settings, group in zip(self._settings, self.param_groups, strict=True):
                if group[name] != settings[name]:
                    raise ValueError(
                        f"{optimizer}: {name} must stay {settings[name]!r}, for it is part of the chain, "
                        f"got {group[name]!r}; set it in the config"
                    )
            return
        for groups in self._chains:
            found = [self.param_groups[g][name] for g in groups]
            if name not in self._moving(groups) and any(found):
                raise ValueError(
                    f"{optimizer} was built with {name} 0 and keeps none, so it cannot be moved to "
                    f"{max(found, key=abs)}; start from a {name} above 0"
                )
            if name not in self.optimizer.by_leaf and any(value != found[0] for value in found):
                raise ValueError(
                    f"{optimizer}: {name} must stay equal in the groups {list(groups)}, which were built with one "
                    f"{name}, got {found}; give them different ones in the config"
                )

    def param_settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings of each parameter by dotted path; {} before `bind`."""
        if self._layout is None:
            return {}
        out = {}
        for path, member in zip(self._layout.paths, self._layout.groups, strict=True):
            if isinstance(member, tuple):
                out.update({f"{path}[{i}]": dict(self.param_groups[g]) for i, g in enumerate(member)})
            elif member is not None:
                out[path] = dict(self.param_groups[member])
        return out

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the parameter groups as a table: column names and rows of strings; no rows before `bind`."""
        if self._layout is None:
            return list(COLUMNS), []
        return list(COLUMNS), group_table(self.param_groups, self._layout, self._shapes, self.unmatched)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of all groups, as JSON can hold them."""
        out: dict[str, Any] = {"param_groups": [_plain(group) for group in self.param_groups]}
        if self.base_param_settings is not None:
            out["base_param_settings"] = _plain(self.base_param_settings)
        return out

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the numbers of a `state_dict`.

        Raises:
          ValueError: it has another number of groups.
        """
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the checkpoint has {len(groups)} parameter groups, this run {len(self.param_groups)}: its "
                "paramwise_cfg differs"
            )
        for group, saved in zip(self.param_groups, groups, strict=True):
            self._restore(group, saved)
        if self.base_param_settings is not None and "base_param_settings" in state_dict:
            self._restore(self.base_param_settings, state_dict["base_param_settings"])

    def _restore(self, group: dict[str, Any], saved: Mapping[str, Any]) -> None:
        """Restore a group; the settings that are part of the chain are those of this run."""
        for key, value in saved.items():
            if key in self._fields or key not in self.optimizer.defaults:
                group[key] = tuple(value) if isinstance(value, list) else value


def _group(defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> ParamGroup:
    where = settings["params"]
    own = {key: value for key, value in settings.items() if key not in ("params", "patterns")}
    return ParamGroup(
        {**defaults, **own}, [where] if isinstance(where, str) else list(where), settings.get("patterns", ())
    )


def _groups_by_chain(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], ...]:
    """Return the groups that share a chain: those that differ in nothing but the settings `by_leaf`."""
    chains: dict[Any, list[int]] = {}
    for index, own in enumerate(settings):
        key = repr({k: v for k, v in own.items() if k not in optimizer.by_leaf}) if optimizer.by_leaf else index
        chains.setdefault(key, []).append(index)
    return tuple(tuple(groups) for groups in chains.values())


def _fields(name: str, value: Any) -> tuple[str, ...]:
    """Return the names of a setting's numbers in the state of the chain."""
    if name in _FIELDS:
        return _FIELDS[name][: len(value)] if isinstance(value, tuple) else _FIELDS[name]
    return tuple(f"{name}_{i}" for i in range(len(value))) if isinstance(value, tuple) else (name,)


def _dtype_of(trainable: Tree) -> Any:
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(trainable)}
    return jax.dtypes.canonicalize_dtype(jnp.result_type(np.float32, *dtypes))


def _side_by_side(
    chains: Sequence[optax.GradientTransformationExtraArgs], layout: Layout, members: Sequence[Sequence[int]]
) -> optax.GradientTransformationExtraArgs:
    """Return several chains as one transformation, each on the parameters of its groups, with a state by groups."""
    names = ["_".join(map(str, groups)) for groups in members]

    def init(params: Tree) -> dict[str, Any]:
        rows = zip(names, chains, members, strict=True)
        return OrderedDict((name, chain.init(layout.part(params, groups))) for name, chain, groups in rows)

    def update(grads: Tree, state: Mapping[str, Any], params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        updates: Tree = jax.tree.map(lambda g: None, grads)
        new_state = OrderedDict()
        for name, chain, groups in zip(names, chains, members, strict=True):
            own = None if params is None else layout.part(params, groups)
            found, new_state[name] = chain.update(layout.part(grads, groups), state[name], own, **extra)
            updates = layout.fill(found, updates)
        return updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _of_trainable(extra: Mapping[str, Any], layout: Layout, params: Tree) -> dict[str, Any]:
    """Return the extra arguments of an update with `grad` and `value_fn` for the trainable parameters alone."""
    out = dict(extra)
    if "grad" in extra and jax.tree.structure(extra["grad"]) == layout.treedef:
        out["grad"] = layout.trainable(extra["grad"])
    if (value_fn := extra.get("value_fn")) is not None:
        out["value_fn"] = lambda trainable, *args, **kwargs: value_fn(layout.fill(trainable, params), *args, **kwargs)
    return out


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that JSON can hold: not the mask or the line search of an optimizer of optax."""
    plain = {key: list(value) if type(value) is tuple else value for key, value in group.items()}
    return {
        key: value for key, value in plain.items() if isinstance(value, bool | int | float | str | list | dict | None)
    }
