"""Widths that transfer: initial scales, rates and decays that a smaller base model determines."""

import fnmatch
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.config import paths
from jengine.config.annotations import is_host_number, is_mapping
from jengine.config.containers import iter_nodes, resolve
from jengine.config.errors import ConfigError, closest
from jengine.config.overrides import set_path
from jengine.model.precision import build_model
from jengine.model.roles import Role
from jengine.optim.optimizers.optimizer import Optimizer

logger = logging.getLogger("jengine")

NAMES = ("mup", "complete-p")
# Optimizers by the size of their updates: of an element about 1 whatever the gradient is, in
# proportion to the gradient, or of a matrix about 1.
_ADAPTIVE = {
    *("Adagrad", "Adam", "AdamW", "Adamax", "BertAdam", "BertAdam1", "Lion", "NAdam"),
    *("ProximalAdan", "RAdam", "RMSprop", "Rprop", "SOAP", "Shampoo", "TansformerAdamW"),
    *("adabelief", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad"),
    *("lion", "nadam", "nadamw", "radam", "rmsprop", "rprop", "sign_sgd", "yogi"),
}
_PROPORTIONAL = {"ASGD", "SGD", "sgd"}
_NORMALIZED = {"Muon", "NorMuon", "TorchMuon"}


class Base(NamedTuple):
    """A base model, as far as it determines the parametrization of another one.

    Attributes:
      init: returns the initial parameters, of the base model's widths and the other's depth.
      width: how many times as wide the other model is.
      depth: how many times as deep the other model is.
    """

    init: Callable[[], Any]
    width: float = 1.0
    depth: float = 1.0


def build_base(arguments: Mapping[str, Any], base: Any, batch: Any) -> Base:
    """Build the base model from the config of another one.

    Args:
      arguments: the Runner's, of which `model` and `precision` count.
      base: `dict(width={'model.module.width': 64}, depth={'model.module.depth': 2})`: values of
        the config in the base model; also lists of pairs.
      batch: a batch, or its shapes.

    Raises:
      ConfigError: another type, or a path that is not in the config.
    """
    cfg = resolve({name: arguments[name] for name in ("model", "precision")})
    known = {path: value for path, value in iter_nodes(cfg) if is_host_number(value)}
    ratios: dict[str, list[float]] = {}
    for kind, values in parse_base(base).items():
        for path, value in values.items():
            where = f"paramwise_cfg.base.{kind}"
            if path not in known:
                raise ConfigError(
                    f"`{where}` must have paths of numbers in the config, got {path!r}"
                    f"{closest(path, known)}"
                )
            if not is_host_number(value) or value <= 0:
                raise ConfigError(f"`{where}[{path!r}]` must be a number above 0, got {value!r}")
            ratios.setdefault(kind, []).append(known[path] / value)
            # The depth stays, so that each parameter has its counterpart.
            if kind == "width":
                set_path(cfg, path, value)
    depths = ratios.get("depth", [1.0])
    if len(set(depths)) > 1:
        raise ConfigError(f"`paramwise_cfg.base.depth` must have one ratio, got {depths}")
    model = build_model(cfg["model"], cfg["precision"])
    shapes = jax.eval_shape(lambda: batch)

    def init() -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return model.init(jax.random.key(0), zeros)[0]

    return Base(init, ratios["width"][0], depths[0])


def parse_base(base: Any) -> dict[str, dict[str, Any]]:
    """Return `base` as a dict of dicts; raise ConfigError for another type."""
    try:
        parsed = {kind: dict(values) for kind, values in dict(base).items()}
    except (TypeError, ValueError):
        parsed = {}
    if not parsed.get("width") or parsed.keys() - {"width", "depth"}:
        raise ConfigError(
            "`paramwise_cfg.base` must be dict(width={path in the config: value}) and optionally "
            f"depth, got {base!r}"
        )
    return parsed


def parametrize(
    groups: Sequence[dict[str, Any]],
    cfg: Mapping[str, Any],
    optimizer: Optimizer,
    params: Any,
    roles: Mapping[str, Role],
    find_base: Callable[[Any], Base] | None,
) -> tuple[list[dict[str, Any]], Callable[[Any], Any] | None]:
    """Return settings of parameters with the rates and decays for this size, and a function that
    scales the initial parameters; the values given are right for the base model.

    `mup` is the maximal update parametrization without multipliers (Yang et al., arXiv:2203.03466,
    table 3), `complete-p` with residual branches of size 1 / depth (Dey et al., arXiv:2505.01618).

    Args:
      groups: settings, each with `params`, a list of parameters or paths.
      cfg: `paramwise_cfg`.
      optimizer: the optimizer.
      params: the parameters, or their shapes.
      roles: their roles by path.
      find_base: returns the base model for `cfg['base']`.

    Returns:
      The settings, each for one parameter, and the function of the initial parameters, to be
      traced; None if they stay.

    Raises:
      ConfigError: an illegal value, an unknown optimizer, or a base model with other parameters.
    """
    name = cfg.get("parametrization")
    if name not in NAMES:
        raise ConfigError(
            f"`paramwise_cfg.parametrization` must be one of {', '.join(NAMES)}, got {name!r}"
        )
    if find_base is None:
        raise ConfigError(
            "`paramwise_cfg.parametrization` must be in the config of a Runner, or "
            "`build_optim_wrapper` must get `base`, got none"
        )
    if optimizer.name not in _ADAPTIVE | _PROPORTIONAL | _NORMALIZED:
        raise ConfigError(
            f"`optimizer` must have a rule for paramwise_cfg.parametrization, got "
            f"{optimizer.name!r}; these have: "
            f"{', '.join(sorted(_ADAPTIVE | _PROPORTIONAL | _NORMALIZED))}"
        )
    base = find_base(cfg.get("base"))
    shapes = {path: tuple(leaf.shape) for path, leaf in paths.flatten(params).items()}
    base_shapes = _list_shapes(base, shapes)
    is_deep = name == "complete-p"
    if base.depth != 1 and not is_deep:
        raise ConfigError(
            "`paramwise_cfg.base.depth` must be left out with parametrization='mup', which is for "
            "widths alone"
        )
    if "branches" in cfg and not is_deep:
        raise ConfigError(
            "`paramwise_cfg.branches` must be with parametrization='complete-p', got 'mup'"
        )
    branches = _find_branches(cfg.get("branches"), shapes) if is_deep else {}
    if not any(role.kind == "head" for role in roles.values()):
        logger.warning(
            f"{name}: no parameter is a head; if the embedding is, the model itself must divide "
            f"its outputs by {base.width:g}, the width over that of the base model"
        )
    scales = {}
    ratios = {}
    for path, shape in shapes.items():
        ratios[path] = inputs, outputs = _find_ratios(path, roles[path], shape, base_shapes[path])
        # From inputs that become more to outputs that do not, values add up in one direction, and
        # the usual scale is too large by the root.
        is_output = roles[path].kind == "head" or (outputs == 1 and inputs != 1)
        scale = 1 / inputs if is_output else inputs**-0.5
        # The multiplier of a branch is a factor of its last layer.
        scale *= 1 / base.depth if branches.get(path) else 1
        if shape != base_shapes[path] or scale != 1:
            scales[path] = scale
    changed = []
    for group in groups:
        if "lr" not in group:
            raise ConfigError(
                f"`optimizer.lr` must be a number, which parametrization={name!r} multiplies, got "
                "none"
            )
        for parameter in group["params"]:
            path = parameter if isinstance(parameter, str) else parameter.path
            leaf = path if path in shapes else path.rpartition("[")[0]  # of a layer in a stack
            role = roles[leaf]
            settings = {**optimizer.defaults, **optimizer.settings_of(role), **group}
            multiplier = 1 / base.depth if branches.get(leaf) else 1.0
            sizes = shapes[leaf], base_shapes[leaf]
            rate = _rate_factor(optimizer.name, settings, role, *sizes, ratios[leaf], multiplier)
            new = {**group, "params": [parameter], "lr": group["lr"] * rate}
            # Rate times decay, by which a weight shrinks in a step, stays.
            if "weight_decay" in group:
                new["weight_decay"] = group["weight_decay"] / rate
            is_adaptive = optimizer.name in _ADAPTIVE or settings.get("adam", False)
            if is_deep and is_adaptive and is_host_number(settings.get("eps")):
                new["eps"] = settings["eps"] * _eps_factor(role, base, branches.get(leaf))
            changed.append(new)
    return changed, _rescaler(base.init, base_shapes, scales) if scales else None


def _list_shapes(base: Base, shapes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the base model's shapes by path."""
    found = {
        path: tuple(leaf.shape) for path, leaf in paths.flatten(jax.eval_shape(base.init)).items()
    }
    for path in shapes:
        if path not in found:
            raise ConfigError(
                f"`paramwise_cfg.base` must give a model with the same parameters, got one without "
                f"{path!r}"
            )
    for path, shape in shapes.items():
        if len(shape) != len(found[path]):
            raise ConfigError(
                "`paramwise_cfg.base` must give parameters with equally many axes, got "
                f"{found[path]} for {path!r}, {shape}"
            )
    return found


def _find_branches(patterns: Any, shapes: Mapping[str, Any]) -> dict[str, bool]:
    """Return the parameters in residual blocks, and whether each is the end of a branch."""
    if not patterns or isinstance(patterns, str) or is_mapping(patterns):
        raise ConfigError(
            "`paramwise_cfg.branches` must list the modules whose outputs are added to the "
            f"residual stream, such as ['layers.*.attn.out', 'layers.*.mlp.down'], got {patterns!r}"
        )
    found: dict[str, bool] = {}
    blocks = set()
    for pattern in patterns:
        modules = {path.rpartition(".")[0] for path in shapes}
        ends = {module for module in modules if fnmatch.fnmatchcase(module, pattern)}
        if not ends:
            raise ConfigError(
                f"`paramwise_cfg.branches` must match modules, got {pattern!r}"
                f"{closest(pattern, modules)}"
            )
        for end in ends:
            parts = end.split(".")
            blocks.add(".".join(parts[:-2] or parts[:1]))
            found |= {path: True for path in shapes if path.startswith(f"{end}.")}
    inside = {path for path in shapes for block in blocks if path.startswith(f"{block}.")}
    return {**dict.fromkeys(inside, False), **found}


def _find_ratios(
    path: str, role: Role, shape: Sequence[int], base_shape: Sequence[int]
) -> tuple[float, float]:
    """Return how many times as many inputs and outputs a parameter has as in the base model."""
    ratios = [size / old for size, old in zip(shape, base_shape, strict=True)]
    for axis in role.stacked:
        if ratios[axis] != 1:
            raise ConfigError(
                "`paramwise_cfg.base.width` must leave the number of layers and experts, got "
                f"{base_shape[axis]} and {shape[axis]} in {path!r}"
            )
    inputs, outputs = (
        math.prod(ratios[axis] for axis in axes) for axes in (role.fan_in, role.fan_out)
    )
    return inputs, outputs


def _rate_factor(
    optimizer: str,
    settings: Mapping[str, Any],
    role: Role,
    shape: Sequence[int],
    base_shape: Sequence[int],
    ratios: tuple[float, float],
    multiplier: float,
) -> float:
    """Return the factor of a parameter's rate; `multiplier` is one of the parameter itself."""
    inputs, outputs = ratios
    if optimizer in _PROPORTIONAL:
        return multiplier**2 * outputs / inputs
    if optimizer in _ADAPTIVE or settings.get("adam", False):
        return multiplier / inputs
    # A matrix of this size keeps the size of activations, see Yang et al., arXiv:2310.17813.
    own = _own_factor(role, shape, settings) / _own_factor(role, base_shape, settings)
    factor: float = multiplier * (outputs / inputs) ** 0.5 / own
    return factor


def _eps_factor(role: Role, base: Base, branch: bool | None) -> float:
    """Return the factor of Adam's epsilon, which follows the gradient's size.

    `branch` is whether the parameter ends a residual branch, None outside of residual blocks.
    """
    if role.kind == "head":
        return 1.0
    return 1 / base.width / (base.depth if branch is False else 1)


def _own_factor(role: Role, shape: Sequence[int], settings: Mapping[str, Any]) -> float:
    """Return the factor that an optimizer of matrices itself takes for a shape."""
    head = role.heads if settings.get("per_head") else None
    rows, columns = (
        math.prod(shape[axis] for axis in axes if axis != head)
        for axes in (role.fan_in, role.fan_out)
    )
    columns //= role.parts
    if settings.get("adjust_lr_fn") == "match_rms_adamw":
        return float(max(rows, columns) ** 0.5)
    if settings.get("consistent_rms") is not None:
        return float(max(rows, columns) ** 0.5)
    return float(max(1.0, columns / rows) ** 0.5)


def _rescaler(
    init: Callable[[], Any], base_shapes: Mapping[str, Any], scales: Mapping[str, float]
) -> Callable[[Any], Any]:
    """Return a function that gives initial parameters the base model's sizes times `scales`."""

    def rescale(params: Any) -> Any:
        base = {path: _root_mean_square(leaf) for path, leaf in paths.flatten(init()).items()}

        def leaf(path: str, x: jax.Array) -> jax.Array:
            if path not in scales:
                return x
            factor: Any = scales[path]
            if x.shape != base_shapes[path]:
                # Of what the initializer makes at both sizes: some know the width, as that of an
                # embedding in Flax, and some do not.
                own = _root_mean_square(x)
                factor = jnp.where(own > 0, base[path] * factor / jnp.where(own > 0, own, 1), 1)
            return (x.astype(jnp.promote_types(x.dtype, jnp.float32)) * factor).astype(x.dtype)

        return paths.map_with_path(leaf, params)

    return rescale


def _root_mean_square(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))))
