"""An optimizer with its parameter groups, on the parameters that it serves."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine import paths
from jengine.optim import freeze
from jengine.optim.core import Optimizer, Tree
from jengine.optim.group_table import COLUMNS, group_table
from jengine.optim.param_group import Layout, ParamGroup, bind, group_numbers, shared_names


class GroupedOptimizer:
    """Owns the numbers of the groups and knows which parameter is in which.

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
        if optimizer.param_groups is None:
            self.param_groups = [ParamGroup(optimizer.defaults)]
        else:
            self.param_groups = [_group(optimizer.defaults, settings) for settings in optimizer.param_groups]
        single = len(self.param_groups) == 1
        self.base_param_settings = None if single else ParamGroup(optimizer.defaults, paths=())
        self._core = optimizer.plan(self.param_groups)
        self._shared = shared_names(self.param_groups, self._core.numbers)
        self._dtype: Any = np.float32
        self._kept: dict[str, tuple[list[float], Any]] = {}
        self._layout: Layout | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    def layout(self, params: Tree) -> Layout:
        """Which group each leaf of `params` is in; found at the first call, and again if the structure changes.

        Raises:
          TypeError: a trainable leaf that is not floating. ValueError: groups that do not fit the parameters.
        """
        if self._layout is not None and self._layout.treedef == jax.tree_util.tree_structure(params):
            return self._layout
        layout = bind(params, self.param_groups)
        divided = [path for path, group in zip(layout.paths, layout.groups, strict=True) if isinstance(group, tuple)]
        if divided and self.optimizer.whole_tensor:
            raise ValueError(
                f"{self.optimizer.name} works on whole tensors, so that the stacked layers of {divided[0]!r} cannot be "
                "in different groups"
            )
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(layout.trainable(params))}
        self._kept.clear()
        self._dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(np.float32, *dtypes))
        self._shapes = {path: tuple(leaf.shape) for path, leaf in paths.flatten(params).items()}
        if self.param_groups[0].paths is None:
            self.param_groups[0].paths = list(layout.paths)
        self._layout = layout
        return layout

    def known_layout(self) -> Layout:
        """The layout that an earlier call found.

        Raises:
          ValueError: there was none.
        """
        if self._layout is None:
            raise ValueError("the optimizer wrapper does not know its parameters yet: call init(params) first")
        return self._layout

    def numbers(self) -> dict[str, Any]:
        """The numbers of all groups as the step takes them, see `group_numbers`."""
        return group_numbers(self.param_groups, self._core.numbers, self._shared, self._dtype, self._kept)

    def number(self, value: Any) -> np.ndarray:
        """`value`, a number or several, in the dtype of the numbers."""
        return np.asarray(value, self._dtype)

    def init(self, params: Tree) -> Any:
        """The state of the optimizer, for the trainable leaves of `params`."""
        return self._core.init(self.layout(params).trainable(params))

    def update(self, grads: Tree, state: Any, params: Tree, hyperparams: Mapping[str, Any]) -> tuple[Tree, Any]:
        """One step of the optimizer.

        Args:
          grads: gradients of the trainable leaves, None elsewhere.
          state: its state.
          params: all parameters.
          hyperparams: what `numbers` gave, and flags that freeze parameters (see `freeze`).

        Returns:
          Updates of the trainable leaves, None elsewhere, and the new state.
        """
        layout = self.layout(params)
        numbers = layout.spread(hyperparams, self._core.numbers(self.param_groups[0]), params)
        updates, new_state = self._core.update(grads, state, layout.trainable(params), numbers)
        flags = freeze.flags(layout, hyperparams)
        if flags is None:
            return updates, new_state
        return freeze.mask(updates, flags), freeze.hold(layout, flags, state, new_state)

    def param_settings(self) -> dict[str, dict[str, Any]]:
        """The settings in force for each parameter, by dotted path; empty until the parameters are known."""
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
        """The parameter groups as a table: column names and rows of strings; no rows until parameters are known."""
        if self._layout is None:
            return list(COLUMNS), []
        return list(COLUMNS), group_table(self.param_groups, self._layout, self._shapes, self.unmatched)

    def state_dict(self) -> dict[str, Any]:
        """The numbers of all groups, as JSON can hold them."""
        out: dict[str, Any] = {"param_groups": [_plain(group) for group in self.param_groups]}
        if self.base_param_settings is not None:
            out["base_param_settings"] = _plain(self.base_param_settings)
        return out

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Puts the numbers of a `state_dict` in force.

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
            _restore(group, saved)
        if self.base_param_settings is not None and "base_param_settings" in state_dict:
            _restore(self.base_param_settings, state_dict["base_param_settings"])


def _group(defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> ParamGroup:
    where = settings["params"]
    own = {key: value for key, value in settings.items() if key not in ("params", "patterns")}
    return ParamGroup(
        {**defaults, **own}, [where] if isinstance(where, str) else list(where), settings.get("patterns", ())
    )


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in group.items()}


def _restore(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        group[key] = tuple(value) if isinstance(value, list) else value
