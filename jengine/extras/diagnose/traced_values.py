"""Values inside a step by dotted path: outputs of layers, their gradients, and what is sown.

Layers mark their outputs with a primitive that does nothing. A marked step is traced, and its jaxpr
is evaluated again together with what was asked about each marked value: within scans over stacked
layers, checkpointed modules and branches too, where neither `sow` nor `capture_intermediates`
reaches.
"""

import collections
import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive
from jax.interpreters import ad, batching, mlir

from jengine.config.paths import flatten
from jengine.extras.diagnose.nnx_calls import path_of, wrapped_calls
from jengine.train.scan_operands import count_scan_operands

PyTree = Any
Visit = Callable[[str, jax.Array], PyTree]  # (path, marked array) -> small arrays; None to skip
GRADIENT = "gradient of "  # begins the path for the gradient of a layer's output
OUTPUT = "output"  # of the whole network

# Paths with a number for the call, counted in the trace: 'blocks.attn:2'
_counts: contextvars.ContextVar[collections.Counter[str] | None] = contextvars.ContextVar(
    "counts", default=None
)
# Values sown into collections that Linen drops, by path of the module
_sown: contextvars.ContextVar[dict[str, list[Any]]] = contextvars.ContextVar("sown")

_mark_p = Primitive("jengine_mark")
_mark_p.def_impl(lambda x, *, path: x)
_mark_p.def_abstract_eval(lambda x, *, path: x)
mlir.register_lowering(_mark_p, lambda ctx, x, *, path: [x])


def _batch(args: Any, dims: Any, *, path: str) -> Any:
    return _mark_p.bind(args[0], path=path), dims[0]


def _differentiate(primals: Any, tangents: Any, *, path: str) -> Any:
    (tangent,) = tangents
    if type(tangent) is not ad.Zero:
        tangent = _mark_p.bind(tangent, path=path)
    return _mark_p.bind(primals[0], path=path), tangent


def _transpose(cotangent: Any, x: Any, *, path: str) -> Any:
    if type(cotangent) is ad.Zero:
        return [cotangent]
    path = path if path.startswith(GRADIENT) else f"{GRADIENT}{path}"
    return [_mark_p.bind(cotangent, path=path)]


batching.primitive_batchers[_mark_p] = _batch
ad.primitive_jvps[_mark_p] = _differentiate
ad.primitive_transposes[_mark_p] = _transpose


class Seen(NamedTuple):
    """Where a marked value was computed."""

    size: int  # elements in one layer
    scan: int | None  # the scan, which has an axis for its iterations in front
    is_reversed: bool


def mark(path: str, tree: PyTree) -> PyTree:
    """Mark the floating arrays of a tree, by the path and their own within the tree."""
    leaves = jax.tree.leaves(tree)
    treedef: Any = jax.tree.structure(tree)
    # a layer for `nn.scan` returns (output, None)
    names = [""] if isinstance(tree, tuple) and len(leaves) == 1 else list(flatten(tree))

    def mark_leaf(name: str, leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return _mark_p.bind(jnp.asarray(leaf), path=f"{path}.{name}" if name else path)

    return treedef.unflatten(map(mark_leaf, names, leaves))


@contextlib.contextmanager
def marked_layers() -> Iterator[None]:
    """Mark the outputs of all Linen and NNX modules that are called in the body, and sown values.

    Calls outside of this context, in other threads too, are not marked.
    """
    token = _counts.set(collections.Counter())
    sown = _sown.set(collections.defaultdict(list))
    try:
        with nn.intercept_methods(_mark_linen), _patched_modules():
            yield
    finally:
        _sown.reset(sown)
        _counts.reset(token)


def _mark_call(path: str, output: PyTree) -> PyTree:
    counts = _counts.get()
    if counts is None:
        return output
    path = path or OUTPUT
    counts[path] += 1
    return mark(f"{path}:{counts[path]}", output)


def _mark_linen(
    next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    output = next_fun(*args, **kwargs)
    if context.method_name != "__call__" or context.module.is_initializing():
        return output
    path = ".".join(context.module.path)
    if sown := _sown.get().pop(path, None):
        # What nothing depends on would leave the trace when it is differentiated
        output, _ = jax.lax.optimization_barrier((output, sown))
    return _mark_call(path, output)


@contextlib.contextmanager
def _patched_modules() -> Iterator[None]:
    """Let all NNX modules, and `sow` of both libraries, mark what they return within the body."""
    from flax import nnx

    def mark_nnx(module: Any, path: str, call: Callable[[], Any]) -> Any:
        return _mark_call(path, call())

    def sow_linen(self: Any, col: str, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if _counts.get() is not None and not self.is_initializing():
            value = _mark_call(".".join((*self.path, name)), value)
            _sown.get()[".".join(self.path)].append(value)
        return linen_sow(self, col, name, value, *args, **kwargs)

    def sow_nnx(self: Any, kind: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        own = path_of(self)
        value = _mark_call(f"{own}.{name}" if own else name, value)
        return nnx_sow(self, kind, name, value, *args, **kwargs)

    # Without their types, which do not let methods be replaced
    linen_module: Any = nn.Module
    nnx_module: Any = nnx.Module
    linen_sow = linen_module.sow
    nnx_sow = nnx_module.sow
    linen_module.sow = sow_linen
    nnx_module.sow = sow_nnx
    try:
        with wrapped_calls(mark_nnx):
            yield
    finally:
        linen_module.sow = linen_sow
        nnx_module.sow = nnx_sow


def collect(
    function: Callable[..., Any], visit: Visit, *args: Any
) -> tuple[dict[str, PyTree], dict[str, Seen]]:
    """Return what `visit` returns for each marked value in a function, by path, in the order of the
    computation, and where each is computed.

    Values within a scan have an axis for its iterations in front.

    Args:
      function: a pure function that marks values, as in `marked_layers`.
      visit: gets the path and the array.
      *args: arguments of the function: arrays or tracers.
    """
    with marked_layers():
        closed = jax.make_jaxpr(function)(*args)
    collector = _Collector(visit)
    found: dict[str, PyTree] = {}
    collector.evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), found)
    names = _number_calls(found)
    return (
        {names[path]: value for path, value in found.items()},
        {names[path]: collector.seen[path] for path in found},
    )


def base_path(path: str) -> str:
    """Return a path without the number of the call.

    >>> base_path("head:2.logits")
    'head.logits'
    """
    head, _, rest = path.partition(":")
    return head + rest.lstrip("0123456789")


def _number_calls(found: Mapping[str, Any]) -> dict[str, str]:
    """Return paths with the number of the call for the second and later ones alone: a trace may
    have called a layer more often than the step does.
    """
    counts: collections.Counter[str] = collections.Counter()
    names = {}
    for path in found:
        base = base_path(path)
        counts[base] += 1
        names[path] = base if counts[base] == 1 else f"{base}:{counts[base]}"
    return names


class _Collector:
    """Evaluation of jaxprs that passes marked values to `visit`."""

    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self.seen: dict[str, Seen] = {}
        self._has_marks: dict[int, bool] = {}
        self._scans: list[tuple[int, bool]] = []
        self._num_scans = 0

    def evaluate(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], found: dict[str, PyTree]
    ) -> list[Any]:
        """Return the outputs, and add what was found in the order of the computation."""
        env: dict[Any, Any] = {}
        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            values = [x.val if isinstance(x, Literal) else env[x] for x in eqn.invars]
            with eqn.ctx.manager:
                outputs = self._evaluate_equation(eqn, values, found)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [x.val if isinstance(x, Literal) else env[x] for x in jaxpr.outvars]

    def _evaluate_equation(
        self, eqn: Any, values: list[Any], found: dict[str, PyTree]
    ) -> Sequence[Any]:
        if eqn.primitive is _mark_p:
            self._add(eqn.params["path"], values[0], found)
            return values
        name = eqn.primitive.name
        if self._marks_in(eqn):
            if name == "scan":
                return self._evaluate_scan(eqn, values, found)
            if name == "cond":
                return self._evaluate_cond(eqn, values, found)
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            consts = getattr(inner, "consts", ())
            inner = getattr(inner, "jaxpr", inner)
            # of a loop of unknown length, or mapped over devices: the values have no place outside
            if name in _INLINED and len(inner.invars) == len(values):
                if eqn.params.get("differentiated"):  # computed again, instead of kept
                    values = list(jax.lax.optimization_barrier(tuple(values)))
                return self.evaluate(inner, consts, values, found)
        outputs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
        return outputs if eqn.primitive.multiple_results else [outputs]

    def _add(self, path: str, value: jax.Array, found: dict[str, PyTree]) -> None:
        # A checkpointed module computes its values again for the gradients
        if path in self.seen:
            return
        if (result := self._visit(base_path(path), value)) is not None:
            scan, is_reversed = self._scans[0] if self._scans else (None, False)
            self.seen[path] = Seen(value.size, scan, is_reversed)
            found[path] = result

    def _evaluate_scan(
        self, eqn: Any, values: list[Any], found: dict[str, PyTree]
    ) -> Sequence[Any]:
        params = eqn.params
        inner: ClosedJaxpr = params["jaxpr"]
        first, carried = count_scan_operands(params)
        consts = values[:first]
        carry = values[first : first + carried]
        xs = values[first + carried :]
        self._num_scans += 1
        self._scans.append((self._num_scans, params["reverse"]))
        before = dict(self.seen)

        def body(carry: Any, x: Any) -> Any:
            self.seen = dict(before)  # the body may be traced several times
            inside: dict[str, PyTree] = {}
            outputs = self.evaluate(inner.jaxpr, inner.consts, [*consts, *carry, *x], inside)
            order.clear()
            order.update(dict.fromkeys(inside))
            return outputs[: len(carry)], (outputs[len(carry) :], inside)

        order: dict[str, None] = {}
        names = ("length", "reverse", "unroll")
        carry, (ys, inside) = jax.lax.scan(
            body, carry, xs, **{name: params[name] for name in names}
        )
        self._scans.pop()
        found.update({path: inside[path] for path in order})
        return [*carry, *ys]

    def _evaluate_cond(
        self, eqn: Any, values: list[Any], found: dict[str, PyTree]
    ) -> Sequence[Any]:
        before = dict(self.seen)
        seen: dict[str, Seen] = {}
        shapes: dict[str, PyTree] = {}
        order: dict[str, None] = {}

        def branch(inner: ClosedJaxpr, *args: Any) -> Any:
            self.seen = dict(before)
            inside: dict[str, PyTree] = {}
            outputs = self.evaluate(inner.jaxpr, inner.consts, args, inside)
            order.update(dict.fromkeys(inside))
            seen.update(self.seen)
            # What another branch computes is unknown here
            unknown = {
                path: jax.tree.map(_unknown, shape)
                for path, shape in shapes.items()
                if path not in inside
            }
            return outputs, {**inside, **unknown}

        branches = [functools.partial(branch, inner) for inner in eqn.params["branches"]]
        for each in branches:
            shapes |= jax.eval_shape(each, *values[1:])[1]
        outputs, inside = jax.lax.switch(values[0], branches, *values[1:])
        self.seen = seen
        found.update({path: inside[path] for path in order})
        return outputs

    def _marks_in(self, eqn: Any) -> bool:
        return any(self._marks_in_jaxpr(inner) for inner in _inner_jaxprs(eqn))

    def _marks_in_jaxpr(self, jaxpr: Jaxpr) -> bool:
        key = id(jaxpr)
        if key not in self._has_marks:
            self._has_marks[key] = any(
                eqn.primitive is _mark_p or self._marks_in(eqn) for eqn in jaxpr.eqns
            )
        return self._has_marks[key]


# calls that compute the same within the caller
_INLINED = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
    "checkpoint",
)


def _inner_jaxprs(eqn: Any) -> Iterator[Jaxpr]:
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each


def _unknown(shape: jax.ShapeDtypeStruct) -> jax.Array:
    fill = jnp.nan if jnp.issubdtype(shape.dtype, jnp.inexact) else 0
    return jnp.full(shape.shape, fill, shape.dtype)
