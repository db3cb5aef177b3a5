"""Parameter groups on the host: settings, the hyperparameters of a step, tables and checkpoints.

What the compiled step does with them is in `chain`.
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
from optax import Params

from jengine.config import paths
from jengine.model.roles import Role, parameter_roles
from jengine.optim.optimizers.common import Parts
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.optim.param_groups.chain import GroupedChain, Wrap, hyperparams_dtype
from jengine.optim.param_groups.param_group import GroupLayout, ParamGroup, assign_groups

COLUMNS = ("group", "patterns", "tensors", "parameters", "lr", "weight decay")


class GroupedOptimizer:
    """An optimizer's parameter groups, the hyperparameters, and the group of each parameter.

    Args:
      optimizer: the optimizer with groups; without any, one group with all parameters.

    Attributes:
      param_groups: the groups; hyperparameters may be set between two steps.
      base_param_settings: with more than one group, a group with the optimizer's own settings; None
        otherwise.
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
        # optax's schedules. then the group itself has the optimizer's own settings
        is_single = len(self.param_groups) == 1
        self.base_param_settings = None if is_single else ParamGroup(optimizer.defaults, paths=())
        # The chain is built for these values: constants among them must not change, see `_check`.
        self._initial = [
            {name: group[name] for name in optimizer.defaults} for group in self.param_groups
        ]
        self._chain = GroupedChain(optimizer, self._initial)
        # what == compares without a surprise, unlike arrays
        plain = (bool, int, float, str, tuple, type(None))
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

    def transformation(self, before: Parts, wrap: Wrap) -> optax.GradientTransformationExtraArgs:
        """Return the chain for the groups; see `GroupedChain.transformation`."""
        return self._chain.transformation(before, wrap, self.layout, self.roles, self.hyperparams)

    # -------------------- the group of each parameter

    def layout(self, params: Params) -> GroupLayout:
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

    def roles(self, params: Params) -> Mapping[str, Role]:
        """Return the role of each parameter by dotted path."""
        if self.find_roles is not None:
            return self.find_roles()
        if (treedef := jax.tree.structure(params)) not in self._roles:
            self._roles[treedef] = parameter_roles(None, params)
        return self._roles[treedef]

    def _split_by_role(self, params: Params) -> list[list[str]]:
        """Return the paths of the optimizer's `kinds` and of the others."""
        roles = self.roles(params)
        trained = self._members[0]  # None for all
        chosen = [path for path in paths.flatten(params) if trained is None or path in trained]
        own = [path for path in chosen if not self.optimizer.settings_of(roles[path])]
        return [own, [path for path in chosen if path not in own]]

    @property
    def chains(self) -> Sequence[Sequence[int]]:
        """The groups in each chain."""
        return self._chain.members

    def map_groups(self, params: Params, function: Callable[[ParamGroup], float]) -> Params:
        """Return a number for each parameter from the group, float32[] in a tree like `params`, 0
        for frozen ones.

        For a parameter whose layers are in several groups it is an array that broadcasts against
        it.
        """
        layout = self.layout(params)
        # `broadcast` takes a vector by group: the same code as for the rates of a step.
        values = np.asarray([function(group) for group in self.param_groups], np.float32)
        tree = layout.broadcast(
            {"value": jnp.asarray(values if len(values) > 1 else values[0])}, params
        )["value"]
        if len(values) == 1:  # a scalar, which `broadcast` returns as it is
            tree = layout.trainable(jax.tree.map(lambda _: tree, params))
        return layout.combine(tree, jax.tree.map(lambda _: jnp.float32(0), params))

    def bind(self, params: Params) -> None:
        """Set the parameter names and shapes, for tables and `param_settings`.

        Errors as for `layout`.
        """
        layout = self.layout(params)
        layout.check_stacked(self._chain.members, self.optimizer)
        self._last_values = {}  # the dtype may change
        self._dtype = np.dtype(hyperparams_dtype(layout.trainable(params)))
        # Shapes alone: arrays kept here would keep the initial parameters in memory.
        self._shapes = {path: tuple(leaf.shape) for path, leaf in paths.flatten(params).items()}
        if self.optimizer.groups is None:
            for index, group in enumerate(self.param_groups):
                members = zip(layout.paths, layout.groups, strict=True)
                group.paths = [path for path, member in members if member == index]
        self._layout = layout

    def restrict(self, params: Params) -> None:
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
            (name, fields) for name, fields in self._chain.fields.items() if field in fields
        )
        return name, fields.index(field) if len(fields) > 1 else None

    def _read(self, name: str, values: list[Any]) -> None:
        """Read the current values of a setting in the groups."""
        # a single dynamic value may change freely
        if len(values) > 1 or name not in self._chain.dynamic:
            self._check(name)
        self._last_values[name] = values
        if name not in self._chain.dynamic:
            return
        # one value for each chain, in which all groups agree
        if name not in self.optimizer.per_parameter:
            values = [values[groups[0]] for groups in self._chain.members]
        for i, field in enumerate(self._chain.fields[name]):
            # betas are a tuple in a group, and a field each in the step
            column = [value[i] for value in values] if isinstance(values[0], tuple) else values
            if len(column) == 1:
                self._arrays[field] = self._dtype.type(column[0])
                continue
            self._arrays[field] = array = np.asarray(column, self._dtype)
            array.setflags(write=False)  # the same array is returned again

    def _check(self, name: str) -> None:
        """Check that the chain supports the current values of a setting."""
        optimizer = self.optimizer.name
        if name not in self._chain.fields:
            for initial, group in zip(self._initial, self.param_groups, strict=True):
                # A constant is compiled into the step, so that a new value would silently have no
                # effect.
                if group[name] != initial[name]:
                    raise ValueError(
                        f"{optimizer}: {name} must stay {initial[name]!r}, because it is part of "
                        f"the chain, got {group[name]!r}; set it in the config"
                    )
            return
        for groups, dynamic in zip(self._chain.members, self._chain.dynamic_by_chain, strict=True):
            values = [self.param_groups[group][name] for group in groups]
            if name not in dynamic and any(values):
                raise ValueError(
                    f"{optimizer}: {name} must stay 0, because the chain was built without it, "
                    f"got {max(values, key=abs)}; start from a {name} above 0"
                )
            if name not in self.optimizer.per_parameter and any(
                value != values[0] for value in values
            ):
                raise ValueError(
                    f"{optimizer}: {name} must stay equal in the groups {list(groups)}, which "
                    f"share a chain, got {values}; set different values in the config"
                )

    # -------------------- reports and checkpoints

    def param_settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings of each parameter by dotted path; {} before `bind`."""
        if self._layout is None:
            return {}
        settings = {}
        for path, member in zip(self._layout.paths, self._layout.groups, strict=True):
            # Layers of one stacked array have settings of their own, so each gets a path of its
            # own.
            if isinstance(member, tuple):
                settings.update(
                    {f"{path}[{i}]": dict(self.param_groups[g]) for i, g in enumerate(member)}
                )
            elif member is not None:
                settings[path] = dict(self.param_groups[member])
        return settings

    def table(self, with_roles: bool = False) -> tuple[list[str], list[list[str]]]:
        """Return the parameter groups as a table: column names and rows of strings.

        No rows before `bind`. With a column of the parameters' roles the model may be traced.

        There is one row per group, one for frozen parameters if there are any, and one per
        unmatched key. A parameter whose layers are in several groups counts as a tensor in each,
        with the elements in that group.
        """
        if self._layout is None:
            return list(COLUMNS), []
        groups = self.param_groups
        shapes = {p: jax.ShapeDtypeStruct(s, np.float32) for p, s in self._shapes.items()}
        roles = self.roles(paths.nest(shapes)) if with_roles else {}
        kinds: list[collections.Counter[str]] = [collections.Counter() for _ in (*groups, None)]
        tensors = [0] * (len(groups) + 1)  # the last is frozen
        parameters = [0] * (len(groups) + 1)
        for path, member in zip(self._layout.paths, self._layout.groups, strict=True):
            size = math.prod(self._shapes[path])
            # the group of each layer; a tensor that is not stacked has one layer
            layers = (
                member
                if isinstance(member, tuple)
                else (len(groups) if member is None else member,)
            )
            for group in set(layers):
                tensors[group] += 1
                role = roles.get(path)
                kinds[group]["unknown" if role is None else role.kind] += 1
                # Layers of a stack have equal sizes.
                parameters[group] += size // len(layers) * layers.count(group)
        rows = []
        for index, settings in enumerate(groups):
            name = str(settings.get("group_name", index))
            counts = [str(tensors[index]), f"{parameters[index]:,}"]
            rates = [
                "" if (v := settings.get(key)) is None else f"{v:.6g}"
                for key in ("lr", "weight_decay")
            ]
            rows.append([name, ", ".join(settings.patterns), *counts, *rates])
        if tensors[-1]:
            rows.append(["frozen", "", str(tensors[-1]), f"{parameters[-1]:,}", "", ""])
        rows += [["no match", key, "0", "0", "", ""] for key in self.unmatched]
        if not with_roles:
            return list(COLUMNS), rows
        texts = [", ".join(f"{n} {kind}" for kind, n in sorted(found.items())) for found in kinds]
        texts += [""] * len(self.unmatched)
        texts = texts if tensors[-1] else [*texts[: len(groups)], *texts[len(groups) + 1 :]]
        rows = [[*row[:2], text, *row[2:]] for row, text in zip(rows, texts, strict=True)]
        return [*COLUMNS[:2], "roles", *COLUMNS[2:]], rows

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
        for group, saved in zip(self.param_groups, groups, strict=True):
            self._restore(group, saved)
        # Absent in checkpoints of a single group: then the group itself had these settings.
        if self.base_param_settings is not None and "base_param_settings" in state_dict:
            self._restore(self.base_param_settings, state_dict["base_param_settings"])

    def _restore(self, group: dict[str, Any], saved: Mapping[str, Any]) -> None:
        """Restore a group, except for the settings that are part of the chain."""
        for key, value in saved.items():
            # Constants of the chain come from this run's config, which was checked; a checkpoint
            # cannot change them.
            if key in self._chain.fields or key not in self.optimizer.defaults:
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
