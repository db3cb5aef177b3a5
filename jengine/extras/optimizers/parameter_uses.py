"""Roles of parameters, read from a model's traced loss: what each parameter is multiplied with,
added to or indexed by, and what comes before and after.

The program of a loss tells this for modules of any library, and for plain functions. Each value in
it is replaced by what is known of it (`Value`), and each operation by a rule.
"""

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.extend
import optax

from jengine.extras.optimizers.own_step import UpdateContext
from jengine.extras.optimizers.traced_arrays import (
    COUNT,
    EXPERTS,
    FIRST,
    HEADS,
    PART,
    WHOLE,
    Axes,
    Shape,
    Value,
    broadcasts,
    fold,
    labels_at,
    map_axes,
    match_axes,
    no_labels,
    owned_labels,
    regroup_axis,
    union,
)
from jengine.model.model import Model
from jengine.model.roles import Role
from jengine.optim.wrapper import OptimWrapper
from jengine.train.phases import Phase
from jengine.train.scan_operands import count_scan_operands
from jengine.train.state import TrainState
from jengine.train.traced_hooks import StepContext

_KEPT_ROOT = ("add", "max", "mul", "div", "integer_pow", "clamp", "copy", "convert_element_type")
_SORTS = ("top_k", "approx_top_k", "argmax", "argmin", "sort")


_CONSTANT = Value(is_count=True)  # an array; as good as data for the matrix that it is given to


@dataclasses.dataclass
class Uses:
    """What has been seen of a parameter."""

    shape: Shape
    kinds: set[str] = dataclasses.field(default_factory=set)
    fan_in: set[int] = dataclasses.field(default_factory=set)
    is_fed: bool = False  # whether what is summed depends on the batch
    entries: set[int] = dataclasses.field(default_factory=set)  # axes of a look-up table
    stacked: set[int] = dataclasses.field(default_factory=set)
    indexed: set[int] = dataclasses.field(default_factory=set)  # axes of which one index is taken
    heads: set[int] = dataclasses.field(default_factory=set)
    # what the products are cut into along an axis: (axis, size, whole or first part) -> slices
    cuts: dict[tuple[int, int, str], set[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    # by operation, whether its other operand is data that no matrix has seen
    sees_data: dict[tuple[int, ...], bool] = dataclasses.field(default_factory=dict)
    added_to: int = 0  # products, bits
    is_chosen: bool = False  # whether the largest of the products are chosen


def trace_roles(
    program: jax.extend.core.ClosedJaxpr,
    params: Mapping[str, Any],
    stacked: Mapping[str, Sequence[int]],
    fed: int,
) -> dict[str, Role]:
    """Return the roles of the parameters that a program uses in a way that tells them.

    Args:
      program: of the losses, from `jax.make_jaxpr`; its first argument is `params`.
      params: arrays or shapes by dotted path.
      stacked: axes along which layers are stacked by path, as far as they are known.
      fed: how many arrays follow the parameters in which the data are; the others are the model's.
    """
    paths = list(params)
    tracer = _Tracer([tuple(leaf.shape) for leaf in params.values()])
    # a dict is flattened in the order of its keys
    bits = [paths.index(path) for path in sorted(paths)]
    views = [
        Value(
            views=((bit, tuple(frozenset([axis]) for axis in range(params[paths[bit]].ndim))),),
            is_live=True,
        )
        for bit in bits
    ]
    given = [
        Value(no_labels(var), is_activation=True, is_fed=index < fed, is_live=True)
        for index, var in enumerate(program.jaxpr.invars[len(views) :])
    ]
    outputs = tracer.run(program.jaxpr, [_CONSTANT] * len(program.consts), [*views, *given])
    ends = functools.reduce(operator.or_, (value.ends for value in outputs), 0)
    roles = {path: tracer.role(bit, ends, stacked.get(path, ())) for bit, path in enumerate(paths)}
    return {path: role for path, role in roles.items() if role is not None}


def outline_step(
    model: Model, params: Any, model_state: Any, batch: Any, rng: jax.Array, names: Sequence[str]
) -> Any:
    """Return the metrics of a model's own training step, in which nothing is updated.

    The arguments are those of a loss, and the names of the optimizers.
    """
    state = TrainState(
        jax.numpy.int32(0), params, model_state, {}, {}, jax.random.key_data(rng)
    )  # fmt: skip
    ctx = _Outline(
        batch=batch,
        rng=rng,
        shared_rng=rng,
        hyperparams=collections.defaultdict(lambda: 1.0),
        optimizers={name: OptimWrapper(optax.identity()) for name in names or ("",)},
        axis_name=None,
        _hooks=None,  # type: ignore[arg-type]  # of the methods that are replaced
        _constrain=lambda tree, _: tree,
        _gather_tables=None,  # type: ignore[arg-type]
    )
    return model.train_step(state, batch, ctx)[1]


class _Outline(UpdateContext):
    """Context of a training step that computes losses and keeps the parameters."""

    def _differentiate(self, state: TrainState, phase: Phase) -> StepContext:
        losses, new_state = phase.loss(
            state.params, state.model_state, self.batch, rng=self.rng, hyperparams=self.hyperparams
        )
        total = sum(jax.numpy.mean(x) for x in jax.tree.leaves(losses))
        return self._context(state).replace(
            grads=jax.tree.map(jax.numpy.zeros_like, state.params),
            metrics=collections.OrderedDict({**losses, "loss": total}),
            model_state=new_state,
        )

    def _finish(
        self, state: TrainState, phase: Phase, ctx: StepContext, has_loss: bool = True
    ) -> tuple[TrainState, Any]:
        return state.replace(model_state=ctx.model_state), collections.OrderedDict(ctx.metrics)


class _Tracer:
    """Interpreter of a program on `Value`s, which records the uses of the parameters."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.uses = [Uses(shape) for shape in shapes]
        # the operation, in the operations around it: a loop runs until nothing changes, and its
        # last round is right
        self.where: list[int] = []
        self.followed = 0  # matrices of which another one takes the product

    # -------------------- programs

    def run(self, jaxpr: Any, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]:
        """Return the outputs of a program."""
        env: dict[Any, Value] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
        )

        def read(var: Any) -> Value:
            return Value() if hasattr(var, "val") else env[var]

        for eqn in jaxpr.eqns:
            self.where.append(id(eqn))
            outputs = self._apply(eqn, [read(var) for var in eqn.invars])
            self.where.pop()
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _apply(self, eqn: Any, values: list[Value]) -> list[Value]:
        rule = getattr(self, f"_{eqn.primitive.name}", None)
        if rule is not None:
            result = rule(eqn, values)
            return result if isinstance(result, list) else [result]
        for program in eqn.params.values():
            jaxpr = getattr(program, "jaxpr", program)
            # not, for instance, the addition of a scatter
            if hasattr(jaxpr, "eqns") and len(jaxpr.invars) == len(values):
                return self._call(program, values)
        shapes = [tuple(var.aval.shape) for var in eqn.invars]
        out = [tuple(var.aval.shape) for var in eqn.outvars]
        if all(broadcasts(shape, out[0]) for shape in shapes):
            return [self._elementwise(eqn, values)] * len(out)
        return [self._mix(eqn, values, len(shape)) for shape in out]

    def _call(self, program: Any, values: Sequence[Value]) -> list[Value]:
        consts = [_CONSTANT] * len(getattr(program, "consts", ()))
        return self.run(getattr(program, "jaxpr", program), consts, values)

    def _loop(self, body: Callable[..., list[Value]], carry: list[Value]) -> list[Value]:
        """Return the outputs of `body(carry)`, which begin with the carry, when nothing changes."""
        while True:
            outputs = body(carry)
            joined = [self._join(*pair) for pair in zip(carry, outputs, strict=False)]
            if joined == carry:
                return outputs
            carry = joined

    def _scan(self, eqn: Any, values: list[Value]) -> list[Value]:
        consts, carries = count_scan_operands(eqn.params)
        rows = []
        for value in values[consts + carries :]:
            for bit, axes in value.views:
                self.uses[bit].stacked |= axes[0]
            rows.append(map_axes(value, lambda axes: axes[1:]))
        outputs = self._loop(
            lambda carry: self._call(eqn.params["jaxpr"], [*values[:consts], *carry, *rows]),
            values[consts : consts + carries],
        )
        stack = lambda value: map_axes(value, lambda axes: (frozenset(), *axes))  # noqa: E731
        return [*outputs[:carries], *map(stack, outputs[carries:])]

    def _while(self, eqn: Any, values: list[Value]) -> list[Value]:
        first = eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]

        def body(carry: list[Value]) -> list[Value]:
            self._call(eqn.params["cond_jaxpr"], [*values[:first], *carry])
            return self._call(eqn.params["body_jaxpr"], [*values[first:second], *carry])

        return self._loop(body, values[second:])

    def _cond(self, eqn: Any, values: list[Value]) -> list[Value]:
        branches = [self._call(branch, values[1:]) for branch in eqn.params["branches"]]
        return [functools.reduce(self._join, outputs) for outputs in zip(*branches, strict=True)]

    def _join(self, a: Value, b: Value) -> Value:
        """Return what holds for both."""
        if a == b:
            return a
        is_activation = a.is_activation or b.is_activation
        if is_activation:
            self._note("data", [a, b])  # an initial state
        return Value(
            labels=union(a.labels, b.labels),
            views=() if is_activation or a.views != b.views else a.views,
            is_activation=is_activation,
            is_fed=a.is_fed or b.is_fed,
            is_live=a.is_live or b.is_live,
            before=a.before | b.before,
            ends=a.ends | b.ends,
            product=a.product & b.product,
            is_root=a.is_root and b.is_root,
            is_normal=a.is_normal and b.is_normal,
            is_count=a.is_count and b.is_count,
            is_one_hot=a.is_one_hot and b.is_one_hot,
        )

    # -------------------- products

    def _dot_general(self, eqn: Any, values: list[Value]) -> Value:
        (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
        ranks = [var.aval.ndim for var in eqn.invars[:2]]
        contracted = (tuple(left), tuple(right))
        batch = (tuple(left_batch), tuple(right_batch))
        free = [
            tuple(i for i in range(rank) if i not in (*contracted[side], *batch[side]))
            for side, rank in enumerate(ranks)
        ]
        kernel = self._choose_kernel(values)
        if kernel is None:
            return self._multiply_activations(values, contracted, batch, free)
        other = 1 - kernel
        x = values[other]
        w = values[kernel]
        if not x.is_activation:
            self._note("data", [x])
        made = 0
        for bit, axes in w.views:
            use = self.uses[bit]
            summed = frozenset().union(*(axes[i] for i in contracted[kernel]))
            each = frozenset().union(*(axes[i] for i in batch[kernel]))
            if x.is_one_hot:
                use.entries |= summed
                use.kinds.add("lookup")
                made |= 1 << bit
                continue
            for i, j in zip(contracted[other], contracted[kernel], strict=True):
                if EXPERTS in labels_at(x.labels, i):  # the sum over experts, each a matrix
                    summed -= axes[j]
                    each |= axes[j]
            if not summed or len(summed | each) == len(use.shape):
                use.fan_in |= summed
                use.kinds.add("mul")
                continue
            if not self._sums(use, summed, x):
                continue
            made |= 1 << bit
            use.stacked |= each
            for i, j in zip(batch[other], batch[kernel], strict=True):
                if axes[j]:  # experts: their first matrices have outputs for each
                    self._stack_labels(owned_labels(x.labels, i))
            for i, j in zip(contracted[other], contracted[kernel], strict=True):
                if HEADS in labels_at(x.labels, i) and len(axes[j]) == 1:
                    use.heads |= axes[j]
        labels = {
            other: [labels_at(x.labels, i) for i in free[other]],
            kernel: [self._labels_of(w, i) for i in free[kernel]],
        }
        first = [
            labels_at(x.labels, i) | self._labels_of(w, j)
            for i, j in zip(batch[other], batch[kernel], strict=True)
        ]
        return self._make_product(x, w, made, (*first, *labels[0], *labels[1]), "matrix")

    def _ragged_dot_general(self, eqn: Any, values: list[Value]) -> Value:
        """Record one matrix for each group of rows."""
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        x, w = values[:2]
        (_, contracted), _ = numbers.dot_dimension_numbers
        made = 0
        for bit, axes in w.views:
            use = self.uses[bit]
            if not self._sums(use, frozenset().union(*(axes[i] for i in contracted)), x):
                continue
            made |= 1 << bit
            use.stacked |= frozenset().union(*(axes[i] for i in numbers.rhs_group_dimensions))
        groups = numbers.rhs_group_dimensions
        free = [i for i in range(eqn.invars[1].aval.ndim) if i not in (*contracted, *groups)]
        rows = [frozenset[Any]()] * (eqn.outvars[0].aval.ndim - len(free))
        labels = (*rows, *(self._labels_of(w, i) for i in free))
        return self._make_product(x, w, made, labels, "matrix")

    def _conv_general_dilated(self, eqn: Any, values: list[Value]) -> Value:
        x, w = values
        numbers = eqn.params["dimension_numbers"]
        output, inputs, *spatial = numbers.rhs_spec
        rank = eqn.outvars[0].aval.ndim
        if not w.views:
            return self._mix(eqn, values, rank)
        if not x.is_activation:
            self._note("data", [x])
        kernel = eqn.invars[1].aval.shape
        groups = eqn.params["feature_group_count"]
        made = 0
        for bit, axes in w.views:
            use = self.uses[bit]
            if self._sums(use, axes[inputs].union(*(axes[i] for i in spatial)), x):
                made |= 1 << bit
            if len(axes[output]) > 1:  # `vmap` merges stacked kernels along the outputs
                use.stacked.add(min(axes[output]))
                groups //= use.shape[min(axes[output])]
        is_depthwise = groups > 1 and kernel[inputs] == 1
        labels = [frozenset[Any]()] * rank
        labels[numbers.out_spec[1]] = self._labels_of(w, output)
        kind = "depthwise" if is_depthwise else "convolution"
        return self._make_product(x, w, made, tuple(labels), kind)

    def _sums(self, use: Uses, axes: frozenset[int], x: Value) -> bool:
        """Note the axes over which a matrix sums, and return whether these were the first ones.

        The backward pass of a loss with gradients in it sums over the others, and so does an
        estimate of the matrix's norm, which does not depend on the batch.
        """
        if not use.fan_in or (x.is_fed and not use.is_fed):
            use.fan_in = set(axes)
            use.is_fed = x.is_fed
        return use.fan_in == axes

    def _make_product(self, x: Value, w: Value, made: int, labels: Axes, kind: str) -> Value:
        is_constant = x.is_count and not (x.is_activation or x.views)
        if not made:  # no axis is summed over, or no output is left: a vector that scales
            made_before = x.before
            ends = x.ends
            product = 0
        else:
            made_before = x.before | w.before | made
            ends = made
            product = made
            self.followed |= x.before | w.before
        for bit, _ in w.views:
            if made >> bit & 1:
                use = self.uses[bit]
                use.kinds.add(kind)
                use.sees_data[tuple(self.where)] = not x.before and (x.is_fed or is_constant)
        return Value(
            labels,
            is_activation=True,
            is_fed=x.is_fed or is_constant,
            is_live=True,
            before=made_before,
            ends=ends,
            product=product,
        )

    def _multiply_activations(
        self,
        values: Sequence[Value],
        contracted: Sequence[Shape],
        batch: Sequence[Shape],
        free: Sequence[Shape],
    ) -> Value:
        heads = []
        for i, j in zip(*batch, strict=True):
            labels = labels_at(values[0].labels, i) | labels_at(values[1].labels, j)
            owned = owned_labels(values[0].labels, i) | owned_labels(values[1].labels, j)
            if EXPERTS in labels:
                self._stack_labels(owned)
            for label in owned:
                # an axis for heads, not one for heads and their sizes
                if label[2] != PART and self._has_outputs(label[0], 2):
                    self.uses[label[0]].heads.add(label[1])
            heads.append(labels | {HEADS} if owned else labels)
        rest = [labels_at(values[side].labels, i) for side in (0, 1) for i in free[side]]
        return fold(values[:2])._replace(
            labels=(*heads, *rest), views=(), product=0, is_one_hot=False, is_normal=False
        )

    def _choose_kernel(self, values: Sequence[Value]) -> int | None:
        """Return which operand is the kernel: the parameter, or of two the right one."""
        candidates = [i for i in (0, 1) if values[i].views]
        plain = [i for i in candidates if not values[i].is_activation] or candidates
        return plain[-1] if plain else None

    def _stack_labels(self, labels: Iterable[Any]) -> None:
        for label in labels:  # the router's outputs are numbers for experts, not matrices
            if label[2] == WHOLE and not self.uses[label[0]].is_chosen:
                self.uses[label[0]].stacked.add(label[1])

    def _labels_of(self, w: Value, i: int) -> frozenset[Any]:
        found = set()
        for bit, axes in w.views:
            for axis in axes[i]:
                found.add((bit, axis, WHOLE))
        return frozenset(found)

    # -------------------- look-ups and layouts

    def _gather(self, eqn: Any, values: list[Value]) -> Value:
        table, index = values
        numbers = eqn.params["dimension_numbers"]
        rank = eqn.outvars[0].aval.ndim
        if not table.views:
            return self._mix(eqn, values, rank)
        sizes = eqn.params["slice_sizes"]
        chosen = [i for i in numbers.start_index_map if sizes[i] == 1]
        dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        kept = iter(i for i in range(len(sizes)) if i not in dropped)
        sources: list[int | None] = [
            next(kept) if i in numbers.offset_dims else None for i in range(rank)
        ]
        if not index.is_fed:
            rows = [i for i in range(rank) if sources[i] is None]
            if not rows:
                for bit, axes in table.views:
                    self.uses[bit].indexed |= frozenset().union(*(axes[i] for i in chosen))

            def select(axes: Axes) -> Axes:
                indexed = frozenset().union(*(axes[i] for i in chosen))
                return tuple(
                    axes[source] if source is not None else indexed if rows and k == rows[-1]
                    else frozenset()
                    for k, source in enumerate(sources)
                )  # fmt: skip

            return map_axes(table, select)
        made = 0
        for bit, axes in table.views:
            made |= 1 << bit
            self.uses[bit].entries |= frozenset().union(*(axes[i] for i in chosen))
            each = (axes[i] for i in numbers.operand_batching_dims)
            self.uses[bit].stacked |= frozenset().union(*each)
        labels = tuple(
            frozenset[Any]() if i is None else self._labels_of(table, i) for i in sources
        )
        return self._make_product(index, table, made, labels, "lookup")._replace(product=0)

    def _dynamic_slice(self, eqn: Any, values: list[Value]) -> Value:
        if values[0].views and any(value.is_fed for value in values[1:]):
            sizes = eqn.params["slice_sizes"]
            for bit, axes in values[0].views:
                whole = eqn.invars[0].aval.shape
                cut = (axes[i] for i, size in enumerate(sizes) if size == 1 < whole[i])
                self.uses[bit].entries |= frozenset().union(*cut)
                self.uses[bit].kinds.add("lookup")
        return values[0]

    def _slice(self, eqn: Any, values: list[Value]) -> Value:
        shape = eqn.invars[0].aval.shape
        starts = eqn.params["start_indices"]
        limits = eqn.params["limit_indices"]
        for i, (start, limit) in enumerate(zip(starts, limits, strict=True)):
            if (start, limit) != (0, shape[i]) and set(eqn.params["strides"] or ()) <= {1}:
                self._note_cut(owned_labels(values[0].labels, i), shape[i], start, limit)
        return values[0]

    def _split(self, eqn: Any, values: list[Value]) -> list[Value]:
        axis = eqn.params["axis"]
        start = 0
        for size in map(int, eqn.params["sizes"]):
            whole = eqn.invars[0].aval.shape[axis]
            self._note_cut(owned_labels(values[0].labels, axis), whole, start, start + size)
            start += size
        return [values[0]] * len(eqn.outvars)

    def _unstack(self, eqn: Any, values: list[Value]) -> list[Value]:
        axis = eqn.params["axis"]
        count = len(eqn.outvars)
        for start in range(count):
            self._note_cut(owned_labels(values[0].labels, axis), count, start, start + 1)
        return [self._drop(values[0], [axis], eqn.invars[0].aval.ndim)] * count

    def _note_cut(self, labels: Iterable[Any], size: int, start: int, limit: int) -> None:
        for label in labels:
            if label[2] != PART:
                use = self.uses[label[0]]
                if label[2] == FIRST or use.shape[label[1]] == size:
                    cuts = use.cuts.setdefault((label[1], size, label[2]), set())
                    cuts.add((start, limit))

    def _squeeze(self, eqn: Any, values: list[Value]) -> Value:
        dims = [i % eqn.invars[0].aval.ndim for i in eqn.params["dimensions"]]
        return self._drop(values[0], dims, eqn.invars[0].aval.ndim)

    def _drop(self, value: Value, dims: Sequence[int], rank: int) -> Value:
        for bit, axes in value.views:
            use = self.uses[bit]
            use.indexed |= {a for i in dims for a in axes[i] if use.shape[a] > 1}
        return map_axes(value, lambda axes: tuple(axes[i] for i in range(rank) if i not in dims))

    def _transpose(self, eqn: Any, values: list[Value]) -> Value:
        order = eqn.params["permutation"]
        return map_axes(values[0], lambda axes: tuple(axes[i] for i in order))

    def _broadcast_in_dim(self, eqn: Any, values: list[Value]) -> Value:
        rank = len(eqn.params["shape"])
        place = {new: old for old, new in enumerate(eqn.params["broadcast_dimensions"])}
        return map_axes(
            values[0],
            lambda axes: tuple(axes[place[i]] if i in place else frozenset() for i in range(rank)),
        )

    def _reshape(self, eqn: Any, values: list[Value]) -> Value:
        old = eqn.invars[0].aval.shape
        new = eqn.outvars[0].aval.shape
        if (order := eqn.params["dimensions"]) is not None:
            values = [map_axes(values[0], lambda axes: tuple(axes[i] for i in order))]
            old = tuple(old[i] for i in order)
        groups = match_axes(old, new)
        dropped = [i for before, after in groups if not after for i in before]
        for bit, axes in values[0].views:
            use = self.uses[bit]
            use.indexed |= {a for i in dropped for a in axes[i] if use.shape[a] > 1}

        def regroup(axes: Axes) -> Axes:
            found: list[frozenset[Any]] = [frozenset()] * len(new)
            for before, after in groups:
                for position, j in enumerate(after):
                    parts = [axes[i] for i in before]
                    found[j] = regroup_axis(parts, position, len(after))
                    if len(after) == 1 and self._are_heads(parts):
                        found[j] |= {HEADS}
            return tuple(found)

        return map_axes(values[0], regroup)

    def _are_heads(self, parts: Sequence[frozenset[Any]]) -> bool:
        """Return whether merged axes are query heads in groups, whose axis was split."""
        if len(parts) < 2 or HEADS not in parts[0]:
            return False
        owners = {label[:2] for label in owned_labels(tuple(parts), 0) if label[2] == FIRST}
        return any(
            self._has_outputs(bit, 2) and all((bit, axis, PART) in labels for labels in parts[1:])
            for bit, axis in owners
        )

    def _has_outputs(self, bit: int, count: int) -> bool:
        use = self.uses[bit]
        return len(use.shape) - len(use.fan_in | use.stacked) >= count

    def _concatenate(self, eqn: Any, values: list[Value]) -> Value:
        if any(value.is_activation for value in values):
            self._note("data", values)
            return fold(values)._replace(views=(), product=0)
        views = {bit: axes for value in values for bit, axes in value.views}
        return fold(values)._replace(views=tuple(views.items()))

    def _stack(self, eqn: Any, values: list[Value]) -> Value:
        axis = eqn.params["axis"]
        rows = [map_axes(x, lambda axes: (*axes[:axis], frozenset(), *axes[axis:])) for x in values]
        return self._concatenate(eqn, rows)

    def _select_n(self, eqn: Any, values: list[Value]) -> Value:
        if any(value.is_activation for value in values[1:]):
            self._note("data", values)
        return self._elementwise(eqn, values, "select")

    def _iota(self, eqn: Any, values: list[Value]) -> Value:
        labels = list(no_labels(eqn.outvars[0]))
        labels[eqn.params["dimension"]] = frozenset([COUNT])
        return Value(tuple(labels), is_count=True)

    def _eq(self, eqn: Any, values: list[Value]) -> Value:
        is_compared = any(v.is_count and not (v.is_activation or v.views) for v in values)
        result = self._elementwise(eqn, values)
        if is_compared and result.before:  # the index is one that a router has chosen
            mark = {frozenset([COUNT]): frozenset([EXPERTS])}
            result = map_axes(result, lambda axes: tuple(mark.get(axis, axis) for axis in axes))
        return result._replace(is_one_hot=is_compared, is_normal=False)

    # -------------------- everything else

    def _elementwise(self, eqn: Any, values: Sequence[Value], kind: str = "") -> Value:
        name = eqn.primitive.name
        activations = [value for value in values if value.is_activation]
        views = [value for value in values if value.views and not value.is_activation]
        result = fold(values)
        is_product = name in ("mul", "div")
        roots = [value.is_root for value in values]
        if activations:
            for value in views:
                others = [x for x in values if x is not value]
                is_norm = is_product and any(x.is_root or x.is_normal for x in (value, *others))
                after_norm = name in ("add", "sub") and any(x.is_normal for x in others)
                use = kind or ("norm" if is_norm or after_norm else name)
                if use == "norm" and not is_norm:
                    use = "norm add"
                if use not in ("norm", "norm add", "select"):
                    use = "add" if use in ("add", "sub", "add_any") else "mul"
                self._note(use, [value])
                for bit, _ in value.views:
                    self.uses[bit].added_to |= result.product
            if is_product and len(activations) > 1:
                for i, axis in enumerate(result.labels):
                    if EXPERTS in axis:
                        self._stack_labels(owned_labels(result.labels, i))
            result = result._replace(views=self._modulated(eqn, values))
        elif views:
            largest = max(self._size(value) for value in views)
            small = [value for value in views if self._size(value) < largest]
            self._note("add" if name in ("add", "sub") else "mul", small)
            large = {
                bit: axes for value in views if value not in small for bit, axes in value.views
            }
            result = result._replace(views=tuple(large.items()))
        is_power = name in ("sqrt", "rsqrt") or (name == "pow" and len(views) < 2)
        if is_power:
            result = result._replace(is_root=result.is_live, is_normal=False)
        else:
            plain = [v for v in values if (v.is_activation or v.views) and not v.is_root]
            is_root = any(roots) and name in _KEPT_ROOT and not any(v.is_activation for v in plain)
            is_divided = is_product and any(roots) and bool(plain)
            is_kept = len(activations) <= 1 and any(value.is_normal for value in values)
            result = result._replace(
                is_root=is_root, is_normal=is_divided or (is_kept and name not in _SORTS)
            )
        return result._replace(
            product=result.product if len(activations) == 1 else 0,
            is_one_hot=name in ("convert_element_type", "copy") and result.is_one_hot,
        )

    def _modulated(self, eqn: Any, values: Sequence[Value]) -> tuple[tuple[int, Axes], ...]:
        """Return the views of a matrix that is multiplied by factors for its inputs or outputs.

        Such factors are computed from the data, and what follows is a matrix for each example.
        """
        if eqn.primitive.name not in ("mul", "div", "convert_element_type", "copy"):
            return ()
        shapes = [tuple(var.aval.shape) for var in eqn.invars]
        for value, shape in zip(values, shapes, strict=True):
            others = [other for other in shapes if other is not shape]
            for _, axes in value.views:
                own = [i for i, size in enumerate(shape) if axes[i] and size > 1]
                is_wider = any(not other or other[i] == 1 for other in others for i in own)
                if len(own) > 1 and (is_wider or not others):
                    return value.views
        return ()

    def _mix(self, eqn: Any, values: Sequence[Value], rank: int) -> Value:
        """Return the result of an operation along axes."""
        if any(value.is_activation for value in values):
            self._note("data", values)
        labels = next((value.labels for value in values if len(value.labels) == rank), ())
        return fold(values)._replace(
            labels=labels,
            views=(),
            product=0,
            is_root=False,
            is_normal=False,
            is_one_hot=False,
        )

    def _reduce(self, eqn: Any, values: list[Value]) -> list[Value]:
        axes = [i % eqn.invars[0].aval.ndim for i in eqn.params["axes"]]
        rank = eqn.invars[0].aval.ndim
        results = []
        for value in values[: len(eqn.outvars)]:
            kept = tuple(labels_at(value.labels, i) for i in range(rank) if i not in axes)
            results.append(self._mix(eqn, [value], 0)._replace(labels=kept))
        return results

    _reduce_sum = _reduce_max = _reduce_min = _reduce_prod = _reduce_and = _reduce_or = _reduce

    def _argmax(self, eqn: Any, values: list[Value]) -> list[Value]:
        for axis in eqn.params["axes"]:
            self._note_choice(values[0], axis)
        return self._reduce(eqn, values)

    _argmin = _argmax

    def _top_k(self, eqn: Any, values: list[Value]) -> list[Value]:
        rank = eqn.invars[0].aval.ndim
        axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", rank - 1))
        self._note_choice(values[0], axis)
        return [self._mix(eqn, values, rank) for _ in eqn.outvars]

    _approx_top_k = _top_k

    def _sort(self, eqn: Any, values: list[Value]) -> list[Value]:
        for value in values[: eqn.params["num_keys"]]:
            self._note_choice(value, eqn.params["dimension"])
        mixed = self._mix(eqn, values, eqn.outvars[0].aval.ndim)
        return [mixed] * len(eqn.outvars)

    def _note_choice(self, value: Value, axis: int) -> None:
        for label in owned_labels(value.labels, axis):
            self.uses[label[0]].is_chosen = True

    def _note(self, kind: str, values: Iterable[Value]) -> None:
        for value in values:
            for bit, _ in value.views:
                self.uses[bit].kinds.add(kind)

    def _size(self, value: Value) -> int:
        return max(math.prod(self.uses[bit].shape) for bit, _ in value.views)

    # -------------------- roles

    def role(self, bit: int, ends: int, known: Sequence[int]) -> Role | None:
        """Return the role of a parameter, from its uses and the matrices at the end.

        `known` are axes along which layers are stacked.
        """
        use = self.uses[bit]
        rank = len(use.shape)
        summed = use.entries or use.fan_in
        stacked = {axis % rank for axis in known} | use.stacked | (use.indexed - summed)
        rest = [axis for axis in range(rank) if axis not in stacked]
        fan_in = [axis for axis in rest if axis in summed]
        fan_out = tuple(axis for axis in rest if axis not in fan_in)
        kind = self._kind(bit, ends, rest)
        if kind is None:
            return None
        # an axis for heads beside that of their sizes, not one for both
        groups = [group for group in (fan_in, fan_out) if len(group) > 1]
        heads = min((axis for group in groups for axis in group if axis in use.heads), default=None)
        matched = self._match_product(use)
        if kind == "bias" and matched is not None:
            product, axes = matched
            stacked |= {i for i, axis in enumerate(axes) if axis in product.stacked}
            heads = next((i for i, axis in enumerate(axes) if axis in product.heads), None)
            fan_out = tuple(axis for axis in fan_out if axis not in stacked)
        if kind in ("norm", "bias", "position") or (kind == "scale" and "mul" not in use.kinds):
            fan_in = []
        return Role(
            kind, tuple(fan_in), fan_out, tuple(sorted(stacked)), heads, _count_parts(use, fan_out)
        )

    def _kind(self, bit: int, ends: int, rest: Sequence[int]) -> str | None:
        use = self.uses[bit]
        kinds = use.kinds
        is_long = sum(use.shape[axis] > 1 for axis in rest) > 1
        if "lookup" in kinds:
            return "embedding"
        if kinds & {"matrix", "convolution", "depthwise"}:
            is_followed = self.followed >> bit & 1
            if "depthwise" in kinds:
                return "depthwise"
            if ends >> bit & 1 and not is_followed:
                return "head"
            if use.is_chosen:
                return "router"
            if any(use.sees_data.values()):
                return "input"
            return "convolution" if "convolution" in kinds else "hidden"
        if not rest:
            return "scale" if kinds else None
        if kinds & {"data", "select"}:
            return "position"
        if kinds & {"norm"}:
            return "norm"
        if "norm add" in kinds:
            return "position" if is_long else "norm"
        if "mul" in kinds:
            return "scale"
        if "add" in kinds:
            return "position" if is_long and self._match_product(use) is None else "bias"
        return None

    def _match_product(self, use: Uses) -> tuple[Uses, list[int]] | None:
        """Return the matrix to whose product a bias is added, and its axes in the bias."""
        for bit, product in enumerate(self.uses):
            if use.added_to >> bit & 1:
                axes = [axis for axis in range(len(product.shape)) if axis not in product.fan_in]
                for dropped in (product.indexed, set()):
                    kept = [axis for axis in axes if axis not in dropped]
                    if tuple(product.shape[axis] for axis in kept) == use.shape:
                        return product, kept
        return None


def _count_parts(use: Uses, fan_out: Sequence[int]) -> int:
    for (axis, size, _), cuts in use.cuts.items():
        widths = {limit - start for start, limit in cuts}
        is_even = len(widths) == 1 and sum(limit - start for start, limit in cuts) == size
        if fan_out and axis == fan_out[0] and is_even and len(cuts) > 1:
            return len(cuts)
    return 1
