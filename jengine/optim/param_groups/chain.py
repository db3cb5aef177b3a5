"""The chain of an optimizer over parameter groups: pure functions, to which hyperparameters are
data.

Groups that differ only in learning rate and weight decay share a chain over the whole tree; only
other differences need separate chains, because each adds to the compile time and the time of a
step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import OptState, Params, Updates

from jengine.config.plugins import load_provided
from jengine.model.autocast import cast_floating_like
from jengine.model.roles import Role
from jengine.optim.optimizers.common import Parts, strip_weak_types, upcast
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.optim.param_groups.param_group import GroupLayout
from jengine.optim.transforms.groups import GroupHyperparamsState

Wrap = Callable[[optax.GradientTransformationExtraArgs], optax.GradientTransformationExtraArgs]
FROZEN = "frozen:"  # before a part of parameter paths, in the name of a hyperparameter
_FIELDS = {"lr": ("learning_rate",), "betas": ("b1", "b2", "b3")}  # optax's names


class GroupedChain:
    """What the initial settings of the groups determine: which groups share a chain, and which
    settings are data.

    Args:
      optimizer: the optimizer.
      settings: the initial settings of each group.

    Attributes:
      members: the groups in each chain.
      dynamic_by_chain: names of the settings that are data, not constants, in each chain.
      dynamic: all of these names.
      fields: names of each hyperparameter in the state, one per element.
    """

    def __init__(self, optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
        self.optimizer = optimizer
        self.settings = settings
        varying = optimizer.per_parameter
        chains: dict[Any, list[int]] = {}
        for index, group in enumerate(settings):
            # by repr, because settings such as the mask of an optax optimizer cannot be hashed
            key = repr({k: v for k, v in group.items() if k not in varying}) if varying else index
            chains.setdefault(key, []).append(index)
        self.members = tuple(tuple(groups) for groups in chains.values())
        self.fields = {
            name: _field_names(name, optimizer.defaults[name]) for name in optimizer.hyperparams
        }
        self.dynamic_by_chain = [self._dynamic_in(groups) for groups in self.members]
        # A setting may be a constant in one chain and data in another: momentum that is 0 in some
        # groups.
        self.dynamic = set().union(*self.dynamic_by_chain)

    def transformation(
        self,
        before: Parts,
        wrap: Wrap,
        layout_of: Callable[[Params], GroupLayout],
        roles_of: Callable[[Params], Mapping[str, Role]],
        hyperparams_of: Callable[[], Any],
    ) -> optax.GradientTransformationExtraArgs:
        """Return the chain with the hyperparameters in the state, as in `optax.inject_hyperparams`.

        The update takes `hyperparams`, values by name that replace those in the state: float32[] or
        [G] each; names that are not in the state are ignored. An entry `frozen:PATTERN` that is not
        0 freezes the parameters whose path contains PATTERN. Other extra arguments are passed to
        the parts.

        Args:
          before: parts that act on all gradients, before the optimizer.
          wrap: wraps the chain (see `accumulate_gradients`); it must not depend on hyperparameters.
          layout_of: returns the groups of the leaves in a tree.
          roles_of: returns the roles of the leaves by path, for an optimizer by role.
          hyperparams_of: returns the initial hyperparameters.
        """

        def init(params: Params) -> GroupHyperparamsState:
            layout = layout_of(params)
            dtype = hyperparams_dtype(layout.trainable(params))
            # copies: a donated state must not take the host's arrays along
            hyperparams = {
                name: jnp.array(value, dtype) for name, value in hyperparams_of().items()
            }
            inner = wrap(self._build(before, hyperparams, layout, params, roles_of))
            inner_state = inner.init(upcast(layout.trainable(params)))
            # a weak type would be strong after the first update, and the step would compile twice
            return GroupHyperparamsState(hyperparams, strip_weak_types(inner_state))

        def update(
            grads: Updates,
            state: GroupHyperparamsState,
            params: Params | None = None,
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
            layout = layout_of(grads if params is None else params)
            # Built anew in each trace: optax's factories close over their hyperparameters, here
            # over traced values.
            like = grads if params is None else params
            chain = self._build(before, values, layout, like, roles_of)
            if any(name.startswith(FROZEN) for name in given):
                skip_frozen = load_provided("optimizer_parts", "skip_frozen")
                chain = skip_frozen(chain, layout, given, self.members)
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
        self,
        before: Parts,
        hyperparams: Mapping[str, jax.Array],
        layout: GroupLayout,
        like: Params,
        roles_of: Callable[[Params], Mapping[str, Role]],
    ) -> optax.GradientTransformationExtraArgs:
        """Return the chain for the hyperparameters of a step.

        Groups that cannot share a chain have separate ones.
        """
        layout.check_stacked(self.members, self.optimizer)
        # Rates and decays become a tree over all parameters, so that one chain serves every group.
        names = [name for name in self.optimizer.per_parameter if name in self.dynamic]
        per_parameter = layout.broadcast(
            {name: hyperparams[self.fields[name][0]] for name in names}, like
        )
        if self.optimizer.kinds is not None:
            known = roles_of(like)
            members = zip(layout.paths, layout.groups, strict=True)
            roles = layout.treedef.unflatten(
                [None if group is None else known[path] for path, group in members]
            )
        chains = []
        for index, groups in enumerate(self.members):
            first = self.settings[groups[0]]  # the others differ only in what is per parameter
            settings = dict(first)
            for name in self.dynamic_by_chain[index]:
                if name in per_parameter:
                    value = per_parameter[name]
                    # optax maps trees of equal structure: a chain for some leaves needs the rates
                    # of these alone
                    settings[name] = (
                        layout.select(value, groups) if len(self.members) > 1 else value
                    )
                else:
                    fields = [hyperparams[field] for field in self.fields[name]]
                    # float[] if there is one chain, else float[number of chains]
                    values = [value if value.ndim == 0 else value[index] for value in fields]
                    settings[name] = tuple(values) if isinstance(first[name], tuple) else values[0]
            if self.optimizer.kinds is not None:
                settings["roles"] = layout.select(roles, groups)
            if self.optimizer.by_layer:
                stacked = layout.treedef.unflatten(layout.stacked)
                settings["stacked"] = layout.select(stacked, groups)
            chains.append(self.optimizer.parts(**settings))
        if len(chains) == 1:
            return _named_chain(*before, *chains[0])
        # `before`, such as clipping, stays outside: the norm is over the gradients of all groups.
        by_groups = _apply_by_groups(
            [_named_chain(*parts) for parts in chains], layout, self.members
        )
        return _named_chain(*before, ("groups", by_groups))

    def _dynamic_in(self, groups: Sequence[int]) -> list[str]:
        # a part for a value that starts at 0, such as momentum, would cost memory in every run that
        # does not use it
        absent = self.optimizer.absent_at_zero
        values = {
            name: [self.settings[group][name] for group in groups]
            for name in self.optimizer.hyperparams
        }
        return [name for name, initial in values.items() if name not in absent or any(initial)]


def _check_shapes(layout: GroupLayout, updates: Updates, params: Params, name: str) -> None:
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


def hyperparams_dtype(trainable: Params) -> Any:
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
        grads: Updates, state: OptState, params: Params | None = None, **extra: Any
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

    def init(params: Params) -> dict[str, Any]:
        return {
            name: chain.init(layout.select(params, groups)) for name, chain, groups in named_chains
        }

    def update(
        grads: Updates, state: Mapping[str, Any], params: Params | None = None, **extra: Any
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
