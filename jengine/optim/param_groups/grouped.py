"""Parameter groups of an optimizer: settings on the host, and the chain to which they are data.

Groups that differ only in learning rate and weight decay share a chain over the whole tree; only
other differences need separate chains, because each adds to the compile time and the time of a
step.
"""

import collections
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import OptState, Updates

from jengine.config import paths
from jengine.config.plugins import load_provided
from jengine.model.autocast import cast_floating_like
from jengine.model.roles import Role, parameter_roles
from jengine.optim.optimizers.common import Parts, strip_weak_types, upcast
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.optim.param_groups.param_group import GroupLayout, ParamGroup, assign_groups
from jengine.optim.transforms.groups import GroupHyperparamsState

Wrap = Callable[[optax.GradientTransformationExtraArgs], optax.GradientTransformationExtraArgs]
FROZEN = "frozen:"  # before a part of parameter paths, in the name of a hyperparameter
COLUMNS = ("group", "patterns", "tensors", "parameters", "lr", "weight decay")
_FIELDS = {"lr": ("learning_rate",), "betas": ("b1", "b2", "b3")}  # optax's names


class GroupedOptimizer:
    """An optimizer's parameter groups, the hyperparameters, and the group of each parameter.

    Args:
      optimizer: the optimizer with groups; without any, one group with all parameters.

    Attributes:
      param_groups: the groups; hyperparameters may be set between two steps.
      base_param_settings: with more than one group, a group with the optimizer's own settings; None
        otherwise.
      chains: the groups in each chain.
      unmatched: config keys that match no parameter, for the table.
      find_roles: function that returns the parameters' roles; None if they are unknown.
      stacked: the axes along which layers are stacked by path, as far as they are known.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.unmatched: list[str] = []
        self.find_roles: Callable[[], Mapping[str, Role]] | None = None
        self.stacked: Mapping[str, tuple[int, ...]] = {}
        # the paths in each group; None for all parameters
        self._members: list[list[str] | None] = [None]
        self.param_groups = [ParamGroup(optimizer.defaults)]
        if optimizer.groups is not None:
            self.param_groups = [
                _build_group(optimizer.defaults, settings) for settings in optimizer.groups
            ]
            self._members = [group.paths for group in self.param_groups]
        elif optimizer.kinds is not None:
            self.param_groups.append(ParamGroup({**optimizer.defaults, **optimizer.others}))
        # Schedules change this group, too: it keeps the rate without multipliers, for logs and
        # optax's schedules. A single group has the optimizer's own settings.
        is_single = len(self.param_groups) == 1
        self.base_param_settings = None if is_single else ParamGroup(optimizer.defaults, paths=())
        # The chain is built for these values: constants among them must not change, see `_read`.
        self._initial = [
            {name: group[name] for name in optimizer.defaults} for group in self.param_groups
        ]
        varying = optimizer.per_parameter
        chains: dict[Any, list[int]] = {}
        for index, group in enumerate(self._initial):
            # by repr, because settings such as the mask of an optax optimizer cannot be hashed
            key = repr({k: v for k, v in group.items() if k not in varying}) if varying else index
            chains.setdefault(key, []).append(index)
        self.chains = tuple(tuple(groups) for groups in chains.values())
        # names of each hyperparameter in the state, one per element
        self._fields = {
            name: _field_names(name, optimizer.defaults[name]) for name in optimizer.hyperparams
        }
        # The settings that are data in each chain. A part for a value that starts at 0, such as
        # momentum, would cost memory in every run that does not use it.
        self._dynamic = [
            {
                name
                for name in self._fields
                if name not in optimizer.absent_at_zero
                or any(self._initial[index][name] for index in groups)
            }
            for groups in self.chains
        ]
        # what == compares without a surprise, unlike arrays
        plain = (int, float, str, tuple, type(None))
        watched = [name for name, value in optimizer.defaults.items() if isinstance(value, plain)]
        self._watched = [(name, operator.itemgetter(name)) for name in watched]
        self._dtype = np.dtype(np.float32)
        # of each setting in the groups, when it was last read
        self._last_values: dict[str, list[Any]] = {}
        # the hyperparameters, made from `_last_values`
        self._arrays: dict[str, np.ndarray | np.generic] = {}
        self._layouts: dict[Any, GroupLayout] = {}  # by tree structure
        self._roles: dict[Any, Mapping[str, Role]] = {}  # by tree structure, of names and shapes
        self._layout: GroupLayout | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    # -------------------- the group of each parameter

    def layout(self, params: Any) -> GroupLayout:
        """Return the group of each leaf in a tree like the parameters.

        Raises:
          TypeError: a trainable leaf that is not floating. ValueError: groups that do not fit the
            tree.
        """
        treedef = jax.tree.structure(params)
        # optax.masked and optax.partition pass partial trees, each with a structure of its own.
        if treedef not in self._layouts:  # matches all paths: once per structure
            is_by_role = self.optimizer.kinds is not None and self.optimizer.groups is None
            members = self._split_by_role(params) if is_by_role else self._members
            self._layouts[treedef] = assign_groups(params, members, self.stacked)
        return self._layouts[treedef]

    def roles(self, params: Any) -> Mapping[str, Role]:
        """Return the role of each parameter by dotted path."""
        if self.find_roles is not None:
            return self.find_roles()
        if (treedef := jax.tree.structure(params)) not in self._roles:
            self._roles[treedef] = parameter_roles(None, params)
        return self._roles[treedef]

    def _split_by_role(self, params: Any) -> list[list[str]]:
        """Return the paths of the optimizer's `kinds` and of the others."""
        roles = self.roles(params)
        trained = self._members[0]  # None for all
        chosen = [path for path in paths.flatten(params) if trained is None or path in trained]
        own = [path for path in chosen if not self.optimizer.settings_of(roles[path])]
        return [own, [path for path in chosen if path not in own]]

    def map_groups(self, params: Any, function: Callable[[ParamGroup], float]) -> Any:
        """Return a number for each parameter from the group, float32[] in a tree like `params`, 0
        for frozen ones.

        For a parameter whose layers are in several groups it is an array that broadcasts against
        it.
        """
        layout = self.layout(params)
        # `broadcast` takes a vector by group: the same code as for the rates of a step.
        values = jnp.asarray([function(group) for group in self.param_groups], jnp.float32)
        tree = layout.broadcast({"value": values}, params)["value"]
        return layout.combine(tree, jax.tree.map(lambda _: jnp.float32(0), params))

    def bind(self, params: Any) -> None:
        """Set the parameter names and shapes, for tables and `param_settings`.

        Errors as for `layout`.
        """
        layout = self.layout(params)
        layout.check_stacked(self.chains, self.optimizer)
        self._last_values = {}  # the dtype may change
        self._dtype = np.dtype(_hyperparams_dtype(layout.trainable(params)))
        # Shapes alone: arrays kept here would keep the initial parameters in memory.
        self._shapes = {path: tuple(leaf.shape) for path, leaf in paths.flatten(params).items()}
        if self.optimizer.groups is None:
            for index, group in enumerate(self.param_groups):
                members = zip(layout.paths, layout.groups, strict=True)
                group.paths = [path for path, member in members if member == index]
        self._layout = layout

    def restrict(self, params: Any) -> None:
        """Freeze all parameters that are not in the tree `params`, if no groups were given."""
        if self.optimizer.groups is None:
            # An optimizer of several updates a part of the model: what its tree lacks belongs to
            # the others.
            self._members = [list(paths.flatten(params))]
            self._layouts.clear()  # found for all parameters

    # -------------------- hyperparameters

    def hyperparams(self) -> dict[str, Any]:
        """Return the current group hyperparameters: by name a scalar, or float[G] for several
        groups.

        Raises:
          ValueError: a group setting was changed in a way that the chain does not support.
        """
        # A run calls this in each iteration. An array is made only when a value has changed,
        # because each new array is another transfer to the device.
        for name, get in self._watched:
            # without a Python call for each group and setting
            values = list(map(get, self.param_groups))
            if values != self._last_values.get(name):
                self._read(name, values)
        # A copy of the dict, so that a caller may add entries for its step.
        return dict(self._arrays)

    def find_setting(self, field: str) -> tuple[str, int | None]:
        """Return the group setting of a hyperparameter, and the index in it if that is a tuple,
        such as `betas`.

        >>> from jengine.optim.optimizers.adam import Adam
        >>> GroupedOptimizer(Adam(lr=0.1)).find_setting("learning_rate")
        ('lr', None)
        """
        name, fields = next(
            (name, fields) for name, fields in self._fields.items() if field in fields
        )
        return name, fields.index(field) if len(fields) > 1 else None

    def _read(self, name: str, values: list[Any]) -> None:
        """Read the current values of a setting in the groups, which the chains must support."""
        per_group = name in self.optimizer.per_parameter
        of_chains = []  # the value of the first group of each chain
        is_dynamic = False
        for groups, dynamic in zip(self.chains, self._dynamic, strict=True):
            # A constant is compiled into the step: a new value would silently have no effect.
            is_constant = name not in dynamic
            expected = self._initial[groups[0]][name] if is_constant else values[groups[0]]
            for index in groups if is_constant or not per_group else ():
                if values[index] != expected:
                    raise ValueError(
                        f"`{name}` of {self.optimizer.name} must stay {expected!r} in the groups "
                        f"{list(groups)}, for which the chain was built, got "
                        f"{[values[i] for i in groups]}; set other values in the config"
                    )
            of_chains.append(values[groups[0]])
            is_dynamic = is_dynamic or not is_constant
        self._last_values[name] = values
        if not is_dynamic:
            return
        if not per_group:
            values = of_chains
        for i, field in enumerate(self._fields[name]):
            # betas are a tuple in a group, and a field each in the step
            numbers = [value[i] for value in values] if isinstance(values[0], tuple) else values
            if len(numbers) == 1:
                self._arrays[field] = self._dtype.type(numbers[0])
                continue
            self._arrays[field] = array = np.asarray(numbers, self._dtype)
            array.setflags(write=False)  # the same array is returned again

    # -------------------- the chain: pure functions

    def transformation(self, before: Parts, wrap: Wrap) -> optax.GradientTransformationExtraArgs:
        """Return the chain with the hyperparameters in the state, as in `optax.inject_hyperparams`.

        The update takes `hyperparams`, values by name that replace those in the state: float32[] or
        [G] each; names that are not in the state are ignored. An entry `frozen:PATTERN` that is not
        0 freezes the parameters whose path contains PATTERN. Other extra arguments are passed to
        the parts.

        Args:
          before: parts that act on all gradients, before the optimizer.
          wrap: wraps the chain (see `accumulate_gradients`); it must not depend on hyperparameters.
        """

        def init(params: Any) -> GroupHyperparamsState:
            layout = self.layout(params)
            dtype = _hyperparams_dtype(layout.trainable(params))
            # copies: a donated state must not take the host's arrays along
            hyperparams = {
                name: jnp.array(value, dtype) for name, value in self.hyperparams().items()
            }
            inner = wrap(self._build(before, hyperparams, layout, params))
            inner_state = inner.init(upcast(layout.trainable(params)))
            # a weak type would be strong after the first update, and the step would compile twice
            return GroupHyperparamsState(hyperparams, strip_weak_types(inner_state))

        def update(
            grads: Updates,
            state: GroupHyperparamsState,
            params: Any | None = None,
            *,
            hyperparams: Mapping[str, Any] | None = None,
            **extra: Any,
        ) -> tuple[Updates, GroupHyperparamsState]:
            given = hyperparams or {}
            # Some may be unknown: a step passes the hyperparameters for the model as well.
            is_known = any(name in state.hyperparams or name.startswith(FROZEN) for name in given)
            # most likely PyTorch's names, which would have no effect
            if given and state.hyperparams and not is_known:
                raise KeyError(
                    f"hyperparams must have one of {sorted(state.hyperparams)}, got {sorted(given)}"
                )
            values = {  # in the shape of the state, which must not change from step to step
                name: jnp.broadcast_to(jnp.asarray(given.get(name, old), old.dtype), old.shape)
                for name, old in jax.tree.map(jnp.asarray, state.hyperparams).items()
            }
            like = grads if params is None else params
            layout = self.layout(like)
            # Built anew in each trace: optax's factories close over their hyperparameters, here
            # over traced values.
            chain = self._build(before, values, layout, like)
            if any(name.startswith(FROZEN) for name in given):
                skip_frozen = load_provided("optimizer_parts", "skip_frozen")
                chain = skip_frozen(chain, layout, given, self.chains)
            if extra and None in layout.groups:  # a line search may see trainable parameters alone
                restrict = load_provided("optimizer_parts", "restrict_to_trainable")
                extra = restrict(extra, layout, params)
            trainable = None if params is None else upcast(layout.trainable(params))
            # in float32 at least: averages in bfloat16 would lose what is below 2**-8 of their
            # value
            updates, inner_state = wrap(chain).update(
                upcast(layout.trainable(grads)), state.inner_state, trainable, **extra
            )
            if trainable is not None:
                _check_shapes(layout, updates, trainable, self.optimizer.name)
            # zeros for frozen leaves
            updates = layout.combine(updates, jax.tree.map(jnp.zeros_like, grads))
            # like optax, which computes in the dtype of the gradients and parameters
            if params is not None:
                updates = jax.tree.map(
                    lambda u, g, p: u.astype(jnp.promote_types(g.dtype, p.dtype)),
                    updates,
                    grads,
                    params,
                )
            return updates, GroupHyperparamsState(values, strip_weak_types(inner_state))

        return optax.GradientTransformationExtraArgs(init, update)

    def _build(
        self, before: Parts, hyperparams: Mapping[str, jax.Array], layout: GroupLayout, like: Any
    ) -> optax.GradientTransformationExtraArgs:
        """Return the chain for the hyperparameters of a step.

        Groups that cannot share a chain have separate ones.
        """
        layout.check_stacked(self.chains, self.optimizer)
        # Rates and decays become a tree over all parameters, so that one chain serves every group.
        dynamic = set().union(*self._dynamic)
        per_parameter = layout.broadcast(
            {
                name: hyperparams[self._fields[name][0]]
                for name in self.optimizer.per_parameter
                if name in dynamic
            },
            like,
        )
        if self.optimizer.kinds is not None:
            known = self.roles(like)
            members = zip(layout.paths, layout.groups, strict=True)
            roles = layout.treedef.unflatten(
                [None if group is None else known[path] for path, group in members]
            )
        parts = []
        for index, groups in enumerate(self.chains):
            first = self._initial[groups[0]]  # the others differ only in what is per parameter
            settings = dict(first)
            for name in self._dynamic[index]:
                if name in per_parameter:
                    value = per_parameter[name]
                    # optax maps trees of equal structure: a chain for some leaves needs the rates
                    # of these alone
                    settings[name] = layout.select(value, groups) if len(self.chains) > 1 else value
                else:
                    fields = [hyperparams[field] for field in self._fields[name]]
                    # float[] if there is one chain, else float[number of chains]
                    values = [value if value.ndim == 0 else value[index] for value in fields]
                    settings[name] = tuple(values) if isinstance(first[name], tuple) else values[0]
            if self.optimizer.kinds is not None:
                settings["roles"] = layout.select(roles, groups)
            if self.optimizer.by_layer:
                stacked = layout.treedef.unflatten(layout.stacked)
                settings["stacked"] = layout.select(stacked, groups)
            parts.append(self.optimizer.parts(**settings))
        if len(parts) == 1:
            return _named_chain(*before, *parts[0])
        # `before`, such as clipping, stays outside: the norm is over the gradients of all groups.
        by_groups = _apply_by_groups([_named_chain(*part) for part in parts], layout, self.chains)
        return _named_chain(*before, ("groups", by_groups))

    # -------------------- reports and checkpoints

    def param_settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings of each parameter by dotted path; {} before `bind`."""
        settings = {}
        for path, members in self._list_members():
            # Layers of one stacked array have settings of their own, so each gets a path of its
            # own.
            for i, group in enumerate(members):
                if group is not None:
                    settings[f"{path}[{i}]" if len(members) > 1 else path] = dict(
                        self.param_groups[group]
                    )
        return settings

    def _list_members(self) -> list[tuple[str, tuple[int | None, ...]]]:
        """Return the path of each parameter, and the group of each of its layers in several groups,
        None if it is frozen; [] before `bind`.
        """
        if self._layout is None:
            return []
        pairs = zip(self._layout.paths, self._layout.groups, strict=True)
        return [(path, each if isinstance(each, tuple) else (each,)) for path, each in pairs]

    def table(self, with_roles: bool = False) -> tuple[list[str], list[list[str]]]:
        """Return the parameter groups as a table: column names and rows of strings.

        No rows before `bind`. With a column of the parameters' roles the model may be traced.

        There is one row per group, one for frozen parameters if there are any, and one per
        unmatched key. A parameter whose layers are in several groups counts as a tensor in each,
        with the elements in that group.
        """
        members = self._list_members()
        shapes = {p: jax.ShapeDtypeStruct(s, np.float32) for p, s in self._shapes.items()}
        roles = self.roles(paths.nest(shapes)) if with_roles and members else {}
        columns = [*COLUMNS[:2], *(["roles"] if with_roles else []), *COLUMNS[2:]]
        rows: list[list[str]] = []
        frozen = (None, ParamGroup({"group_name": "frozen"}))
        for index, settings in [*enumerate(self.param_groups), frozen] if members else []:
            own = [(path, layers) for path, layers in members if index in layers]
            # Layers of a stack have equal sizes.
            sizes = [
                math.prod(self._shapes[path]) // len(layers) * layers.count(index)
                for path, layers in own
            ]
            if sizes or index is not None:
                name = str(settings.get("group_name", index))
                rates = [
                    "" if (v := settings.get(key)) is None else f"{v:.6g}"
                    for key in ("lr", "weight_decay")
                ]
                found = [None if roles.get(path) is None else roles[path].kind for path, _ in own]
                kinds = sorted(collections.Counter(kind or "unknown" for kind in found).items())
                text = [", ".join(f"{n} {kind}" for kind, n in kinds)] if with_roles else []
                patterns = ", ".join(settings.patterns)
                rows.append([name, patterns, *text, str(len(sizes)), f"{sum(sizes):,}", *rates])
        blank = [""] if with_roles else []
        unmatched = self.unmatched if members else []
        rows += [["no match", key, *blank, "0", "0", "", ""] for key in unmatched]
        return columns, rows

    def state_dict(self) -> dict[str, Any]:
        """Return all group settings as JSON-compatible values."""
        state: dict[str, Any] = {
            "param_groups": [_json_settings(group) for group in self.param_groups]
        }
        if self.base_param_settings is not None:
            state["base_param_settings"] = _json_settings(self.base_param_settings)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the settings in a `state_dict`; raise ValueError for another number of groups."""
        groups = state_dict["param_groups"]
        # Groups have no identity but their order, so that with another number no assignment is
        # right.
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the checkpoint must have {len(self.param_groups)} parameter groups, as this "
                f"run, got {len(groups)}; its paramwise_cfg differs"
            )
        pairs: list[tuple[Any, Any]] = [*zip(self.param_groups, groups, strict=True)]
        # Absent in checkpoints of a single group: then the group itself had these settings.
        if self.base_param_settings is not None and "base_param_settings" in state_dict:
            pairs.append((self.base_param_settings, state_dict["base_param_settings"]))
        for group, saved in pairs:
            for key, value in saved.items():
                # Constants of the chain come from this run's config, which was checked; a
                # checkpoint cannot change them.
                if key in self._fields or key not in self.optimizer.defaults:
                    # JSON has no tuples, but betas are compared with, and unpacked as, a tuple.
                    group[key] = tuple(value) if isinstance(value, list) else value


def _build_group(defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> ParamGroup:
    members = settings["params"]
    own = {key: value for key, value in settings.items() if key not in ("params", "patterns")}
    return ParamGroup(
        {**defaults, **own},
        [members] if isinstance(members, str) else members,
        settings.get("patterns", ()),
    )


def _json_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's JSON-compatible settings: not, for instance, the mask of an optax
    optimizer.
    """
    plain = {key: list(value) if type(value) is tuple else value for key, value in group.items()}
    return {
        key: value
        for key, value in plain.items()
        if isinstance(value, bool | int | float | str | list | dict | None)
    }


def _check_shapes(layout: GroupLayout, updates: Updates, params: Any, name: str) -> None:
    """Raise ValueError for an update that has another shape than its parameter.

    The sum would broadcast: optimizers for gradients of single examples reduce the first axis, and
    take that of a parameter for examples.
    """
    leaves = zip(layout.paths, layout.flatten(updates), layout.flatten(params), strict=True)
    for path, update, param in leaves:
        if param is not None and jnp.shape(update) != param.shape:
            raise ValueError(
                f"{name} must return an update of the shape {param.shape} for {path!r}, got "
                f"{jnp.shape(update)}; an optimizer for gradients of single examples, such as "
                "dpsgd, needs a `train_step` that computes them"
            )


def _hyperparams_dtype(trainable: Any) -> Any:
    """Return the dtype of hyperparameters for these parameters: float32, or float64 if a
    parameter has it.
    """
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(trainable)}
    return jax.dtypes.canonicalize_dtype(jnp.result_type(jnp.float32, *dtypes))


def _field_names(name: str, value: object) -> tuple[str, ...]:
    if name in _FIELDS:
        return _FIELDS[name][: len(value)] if isinstance(value, tuple) else _FIELDS[name]
    return tuple(f"{name}_{i}" for i in range(len(value))) if isinstance(value, tuple) else (name,)


def _named_chain(
    *parts: tuple[str, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Return `optax.named_chain` with the state in a dict, which JAX flattens in C++, unlike an
    OrderedDict.
    """
    # Named, so that checkpoints and logs do not depend on how many parts there are.
    chain = optax.named_chain(*parts)

    def update(
        grads: Updates, state: OptState, params: Any | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        updates, new_state = chain.update(grads, state, params, **extra)
        # Hyperparameters are float64 if one parameter is, and would make the states of float32
        # parameters float64 too.
        return updates, cast_floating_like(dict(new_state), state)

    return optax.GradientTransformationExtraArgs(lambda params: dict(chain.init(params)), update)


def _apply_by_groups(
    chains: Sequence[optax.GradientTransformationExtraArgs],
    layout: GroupLayout,
    members: Sequence[Sequence[int]],
) -> optax.GradientTransformationExtraArgs:
    """Apply each chain to the parameters in its groups, with the states in a dict by groups."""
    # Named by groups, which checkpoints record as well.
    named_chains = [
        ("_".join(map(str, groups)), chain, groups)
        for chain, groups in zip(chains, members, strict=True)
    ]

    def init(params: Any) -> dict[str, Any]:
        return {
            name: chain.init(layout.select(params, groups)) for name, chain, groups in named_chains
        }

    def update(
        grads: Updates, state: Mapping[str, Any], params: Any | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        updates: Updates = jax.tree.map(lambda g: None, grads)  # each chain fills in its own leaves
        new_state = {}
        for name, chain, groups in named_chains:
            own_params = None if params is None else layout.select(params, groups)
            own_updates, new_state[name] = chain.update(
                layout.select(grads, groups), state[name], own_params, **extra
            )
            updates = layout.combine(own_updates, updates)
        return updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)
