"""Roles of parameters: what each does in its model, and what its axes are."""

import collections
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jengine.config import paths
from jengine.config.annotations import is_mapping
from jengine.config.errors import ConfigError, closest
from jengine.config.plugins import load_provided, provided
from jengine.model.model import FROZEN, Batch, Model, ModelState, Params, predict_with_key
from jengine.model.module_types import is_norm, kind_of, stacked_axes

Shape = tuple[int, ...]

logger = logging.getLogger("jengine")

KINDS = (
    *("embedding", "position", "input", "hidden", "head", "norm", "bias", "scale"),
    *("convolution", "depthwise", "router", "adapter"),
)
_POSITION = re.compile(r"(^|\.|_)(pos|position|positions|positional|pos_?emb\w*|wpe)(_|\.|$)", re.I)
_ADAPTER = re.compile(r"(^|[._])lora([._]|$)", re.IGNORECASE)
_ROUTER = re.compile(r"(^|[._])router([._]|$)", re.IGNORECASE)
_HEAD = re.compile(r"(^|[._])(head|logits|classifier)(\.\w+)?$", re.IGNORECASE)
# names that tell a norm: of the module, or of the one-dimensional leaves that it has
_NORM = re.compile(r"norm|(?<![a-z])(bn|ln|gn)(?![a-z])", re.IGNORECASE)
_NORM_LEAVES = (
    {"scale"},
    {"scale", "bias"},
    {"scale", "offset"},
    {"weight", "bias"},
    {"gamma", "beta"},
)
# the least axes of a single layer's parameter, by name
LEAST_AXES = {"kernel": 2, "embedding": 2, "bias": 1, "scale": 1}
_ATTENTION = re.compile(r"(^|[._])(query|key|value|q|k|v|[qkv]_proj)\.\w+$")


@dataclasses.dataclass(frozen=True)
class Role:
    """What a parameter does in its model, and what its axes are.

    >>> Role("hidden", fan_in=(0,), fan_out=(1, 2), heads=1)
    Role(kind='hidden', fan_in=(0,), fan_out=(1, 2), stacked=(), heads=1, parts=1)

    Attributes:
      kind: one of `KINDS`.
      fan_in: axes over which the layer sums; of a convolution the spatial and the input axes, of a
        look-up table its entries.
      fan_out: axes of the outputs.
      stacked: axes along which layers or experts are stacked.
      heads: the axis of attention heads, if the array has one.
      parts: number of fused projections of equal size along the first axis in `fan_out`, such as 3
        for queries, keys and values.
    """

    kind: str
    fan_in: tuple[int, ...] = ()
    fan_out: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()
    heads: int | None = None
    parts: int = 1


class Roles(dict[str, Role]):
    """Roles by dotted path, without those that cannot be told: to ask for one is a ConfigError."""

    def __missing__(self, path: str) -> Role:
        raise ConfigError(
            f"the role of {path!r} cannot be told: set `paramwise_cfg.roles` to "
            f"{{{path!r}: dict(role=...)}} with one of {', '.join(KINDS)}"
        )


def parameter_roles(
    model: Model | None,
    params: Params,
    overrides: Mapping[str, Any] | None = None,
    batch: Batch | None = None,
    *,
    model_state: ModelState | None = None,
    module_types: Mapping[str, str] | None = None,
    phases: Sequence[str] = (),
) -> Roles:
    """Return the role of each parameter by dotted path.

    They are read from the traced loss: what a parameter is multiplied with, and what comes before
    and after it. Names and shapes tell the rest; without a model or a batch they tell all, with a
    warning.

    >>> params = {"head": {"kernel": jax.numpy.ones((4, 2)), "bias": jax.numpy.ones(2)}}
    >>> {path: role.kind for path, role in parameter_roles(None, params).items()}
    {'head.bias': 'bias', 'head.kernel': 'head'}

    Args:
      model: the model, whose `init` has been called or traced; None if it is unknown.
      params: pytree of arrays or ShapeDtypeStructs.
      overrides: roles by path, `{'blocks.*.qkv.kernel': dict(role='hidden', fan_in=(0,),
        fan_out=(1, 2))}`; `*` stands for any characters. Axes that are not given stay.
      batch: a batch, or its shapes.
      model_state: the model state, or its shapes; without it `init` is traced.
      module_types: class names by dotted module path; by default the model's.
      phases: names of the optimizers, for a model that is trained by several.

    Raises:
      ConfigError: an override that matches no parameter or is not a role; and from the result, a
        parameter whose role cannot be told.
    """
    types = module_types or getattr(model, "module_types", {})
    traced: dict[str, Role] = {}
    if model is not None and batch is not None and "trace_roles" in provided("parameter_roles"):
        stacked = _known_stacks(paths.flatten(params), types)
        traced = _trace(model, params, model_state, batch, stacked, phases)
    if not traced:
        logger.warning("the roles of the parameters are told by their names and shapes alone")
    return _complete(traced, params, types, overrides)


def roles_by_name(
    params: Params, module_types: Mapping[str, str], overrides: Mapping[str, Any] | None = None
) -> Roles:
    """Return the roles that names, shapes and module types tell, without a warning.

    The arguments are those of `parameter_roles`.
    """
    return _complete({}, params, module_types, overrides)


def _complete(
    traced: Mapping[str, Role],
    params: Params,
    types: Mapping[str, str],
    overrides: Mapping[str, Any] | None,
) -> Roles:
    leaves = paths.flatten(params)
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    stacked = _known_stacks(leaves, types)
    unknown = {path: shape for path, shape in shapes.items() if stacked_axes(types, path) is None}
    stacked |= _stacks_by_name(unknown)
    norms = set() if types else _norms_by_name(shapes, stacked)
    roles = Roles()
    for path, shape in shapes.items():
        axes = stacked.get(path, ())
        role = _correct(path, traced.get(path), types)
        if role is None and path in norms:
            role = Role("norm", (), _rest(shape, axes), axes)
        role = role or _guess(path, shape, axes, types)
        if role is not None:
            roles[path] = role
    _override(roles, leaves, overrides or {})
    return roles


def _known_stacks(leaves: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Shape]:
    known = {path: stacked_axes(types, path) for path in leaves}
    return {
        path: tuple(axis % len(leaves[path].shape) for axis in axes)
        for path, axes in known.items()
        if axes
    }


def _trace(
    model: Model,
    params: Params,
    model_state: ModelState | None,
    batch: Batch,
    stacked: Mapping[str, Shape],
    phases: Sequence[str],
) -> dict[str, Role]:
    """Return the roles that the losses tell, or else the prediction."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch, params = jax.eval_shape(lambda: (batch, paths.unwrap(params)))
    if model_state is None:
        _, model_state = jax.eval_shape(model.init, key, batch)
    leaves = paths.flatten(params)
    frozen: dict[str, Any] = {}  # they are matrices as well
    if isinstance(model_state, Mapping) and FROZEN in model_state:
        frozen = {f"{FROZEN}.{path}": x for path, x in paths.flatten(model_state[FROZEN]).items()}

    def losses(params: Params, state: ModelState, batch: Batch, key: jax.Array) -> Any:
        if model.has_train_step:
            outline_step = load_provided("parameter_roles", "outline_step")
            return outline_step(model, params, state, batch, key, phases)
        arguments: Any = {"rng": key, "hyperparams": collections.defaultdict(lambda: 1.0)}
        if not phases:
            return model.loss(params, state, batch, **arguments)[0]
        return [model.phase_loss(name, params, state, batch, **arguments)[0] for name in phases]

    def predictions(params: Params, state: ModelState, batch: Batch, key: jax.Array) -> Any:
        return predict_with_key(model, params, state, batch, key)

    errors = []
    for outputs in (losses, predictions):

        def run(
            leaves: Any, batch: Any, key: Any, state: Any, outputs: Callable[..., Any] = outputs
        ) -> Any:
            tree = paths.map_with_path(lambda path, _: leaves[path], params)
            if frozen:
                below = model_state[FROZEN]
                below = paths.map_with_path(lambda path, _: leaves[f"{FROZEN}.{path}"], below)
                state = {**state, FROZEN: below}
            return outputs(tree, state, batch, key)

        try:
            program = jax.make_jaxpr(run)({**leaves, **frozen}, batch, key, model_state)
        except Exception as error:  # of any type: it is the user's code
            errors.append(error)
            continue
        return load_provided("parameter_roles", "trace_roles")(
            program, {**leaves, **frozen}, stacked, len(jax.tree.leaves((batch, key)))
        )
    logger.warning("the loss cannot be traced for the roles of the parameters: %r", errors[0])
    return {}


def _correct(path: str, role: Role | None, types: Mapping[str, str]) -> Role | None:
    """Return a traced role with what names and types tell better."""
    if role is None:
        return None
    module = types.get(path.rpartition(".")[0])
    if _ADAPTER.search(path):
        rest = [*role.fan_in, *role.fan_out]
        is_matrix = role.kind not in ("position", "bias", "scale")
        fan = (role.fan_in, role.fan_out) if is_matrix else (tuple(rest[:1]), tuple(rest[1:]))
        return dataclasses.replace(role, kind="adapter", fan_in=fan[0], fan_out=fan[1])
    if role.kind in ("scale", "bias") and _is_norm_type(module):
        return dataclasses.replace(role, kind="norm", fan_in=())
    if role.kind in ("embedding", "hidden", "input") and _POSITION.search(path):
        # positions that the batch has, or a grid that is resized
        is_own = role.kind == "embedding" or path.rpartition(".")[2] not in (
            "kernel",
            "weight",
            "w",
        )
        return dataclasses.replace(role, kind="position") if is_own else role
    if role.kind == "hidden" and _ROUTER.search(path):
        return dataclasses.replace(role, kind="router")
    return role


def _is_norm_type(module: str | None) -> bool:
    kind = kind_of(module)
    return is_norm(module) or (kind.endswith("Norm") and kind not in ("WeightNorm", "SpectralNorm"))


def _rest(shape: Shape, stacked: Sequence[int]) -> Shape:
    return tuple(axis for axis in range(len(shape)) if axis not in stacked)


def _stacks_by_name(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the axes of stacked layers in modules whose parameters all have an axis too many for
    their names.
    """
    found: dict[str, Shape] = {}

    def visit(below: Mapping[str, Shape], depth: int) -> None:
        names = {path: path.rpartition(".")[2] for path in below}
        # Vectors tell best: kernels have more axes in convolutions and attention as well
        has_vector = any(name in ("bias", "scale") for name in names.values())
        is_long = all(len(below[path]) > LEAST_AXES.get(name, 0) for path, name in names.items())
        if has_vector and is_long and len({shape[0] for shape in below.values()}) == 1:
            found.update(dict.fromkeys(below, (0,)))
            return
        children: dict[str, dict[str, Shape]] = {}
        for path, shape in below.items():
            parts = path.split(".")
            if len(parts) > depth + 1:
                children.setdefault(parts[depth], {})[path] = shape
        for child in children.values():
            visit(child, depth + 1)

    visit(shapes, 0)
    return found


def _norms_by_name(shapes: Mapping[str, Shape], stacked: Mapping[str, Shape]) -> set[str]:
    """Return the parameters of norms in a tree without types."""
    modules: dict[str, list[str]] = {}
    for path in shapes:
        modules.setdefault(path.rpartition(".")[0], []).append(path)
    norms = set()
    for module, below in modules.items():
        vectors = {path for path in below if len(_rest(shapes[path], stacked.get(path, ()))) == 1}
        names = {path.rpartition(".")[2] for path in below}
        is_called = _NORM.search(last_name(module)) is not None
        if vectors == set(below) and (is_called or names in _NORM_LEAVES):
            norms |= vectors
        norms |= {path for path in vectors if _NORM.search(path.rpartition(".")[2])}
    return norms


def last_name(path: str) -> str:
    """Return the last path part that is not an index.

    >>> last_name("layers.norms.0")
    'norms'
    """
    # Modules in a list are called after the list.
    return next((part for part in reversed(path.split(".")) if not part.isdigit()), "")


def _guess(
    path: str, shape: Shape, stacked: Sequence[int], types: Mapping[str, str]
) -> Role | None:
    """Return the role that a parameter's name and shape tell, None if they do not."""
    module, _, name = path.rpartition(".")
    kind = kind_of(types.get(module))
    rest = _rest(shape, stacked)
    role = functools.partial(Role, stacked=tuple(stacked))
    if _ADAPTER.search(path) and len(rest) == 2:
        return role("adapter", rest[:1], rest[1:])
    if _POSITION.search(path) or re.search(r"^(cls|(cls|class|mask)_?token)$", name):
        return role("position", (), rest)
    if kind == "Embed" or "embedding" in name:
        return role("embedding", rest[:1], rest[1:]) if len(rest) == 2 else None
    if _is_norm_type(types.get(module)):
        return role("norm", (), rest)
    if name in ("bias", "b"):
        return role("bias", (), rest)
    if len(rest) < 2:
        return role("scale", (), rest)
    fan_in = rest[:-1]
    fan_out = rest[-1:]
    heads = None
    if name == "weight":  # of PyTorch and Equinox
        fan_in = rest[1:]
        fan_out = rest[:1]
    elif len(rest) == 3 and _ATTENTION.search(path):
        fan_in = rest[:1]
        fan_out = rest[1:]
        heads = rest[1]
    elif len(rest) == 3 and re.search(r"(^|[._])(out|o|o_proj)\.\w+$", path):
        heads = rest[0]
    elif len(rest) == 3 and "Conv" not in kind:
        return None
    if _ROUTER.search(path):
        return role("router", fan_in, fan_out)
    if _HEAD.search(path):
        return role("head", fan_in, fan_out)
    if len(rest) > 3 or "Conv" in kind:
        is_depthwise = shape[rest[-2]] == 1 and len(rest) == 4 and name != "weight"
        return role("depthwise" if is_depthwise else "convolution", fan_in, fan_out)
    return role("hidden", fan_in, fan_out, heads=heads)


def _override(roles: Roles, leaves: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Replace the roles that a user has given."""
    for pattern, given in overrides.items():
        matched = [path for path in leaves if _matches(pattern, path)]
        where = f"paramwise_cfg.roles[{pattern!r}]"
        if not matched:
            raise ConfigError(
                f"`{where}` must be the path of a parameter, got none like it"
                f"{paths.closest_paths(pattern, leaves)}"
            )
        if not is_mapping(given) or given.get("role") not in KINDS:
            raise ConfigError(
                f"`{where}` must be dict(role=...) with one of {', '.join(KINDS)}, got {given!r}"
            )
        fields = {name: value for name, value in given.items() if name != "role"}
        names = [field.name for field in dataclasses.fields(Role)]
        for name, value in fields.items():
            if name not in names[1:]:
                raise ConfigError(f"`{where}` has no {name!r}{closest(str(name), names[1:])}")
            fields[name] = _parse_axes(f"{where}.{name}", name, value)
        for path in matched:
            rank = len(leaves[path].shape)
            used = [axis for name in names[1:4] for axis in fields.get(name, ())]
            if any(not 0 <= axis < rank for axis in used):
                raise ConfigError(
                    f"`{where}` must have axes from 0 to {rank - 1}, those of {path!r}, got {used}"
                )
            roles[path] = dataclasses.replace(
                roles.get(path, Role(given["role"])), kind=given["role"], **fields
            )


def _parse_axes(where: str, name: str, value: Any) -> Any:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if name in ("heads", "parts"):
        if not is_int and (name == "parts" or value is not None):
            raise ConfigError(f"`{where}` must be an int, got {value!r}")
        return value
    axes = [value] if is_int else value
    if not isinstance(axes, list | tuple) or not all(type(axis) is int for axis in axes):
        raise ConfigError(f"`{where}` must be axes, such as (0,), got {value!r}")
    return tuple(axes)


def _matches(pattern: str, path: str) -> bool:
    """Return whether a pattern with wildcards is a path, or a module above it."""
    expression = re.escape(pattern).replace(r"\*", ".*")
    return any(
        re.fullmatch(rf"{expression}(\..+)?", alias.lstrip("."))
        for alias in paths.path_aliases(path)
    )
