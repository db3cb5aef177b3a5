"""Outputs of layers, for modules of any library: the products with each parameter in a program."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jengine.train.scan_operands import count_scan_operands

_PRODUCTS = ("dot_general", "conv_general_dilated", "gather", "ragged_dot_general")
# operations after which an array is still the parameter, in another form
_VIEWS = ("convert_element_type", "copy", "reshape", "transpose", "squeeze", "broadcast_in_dim")


def find_outputs(
    function: Callable[[Mapping[str, jax.Array]], Any], params: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Return what each matrix, kernel or table is multiplied to, without its bias.

    >>> params = {"layer.kernel": jax.numpy.eye(2)}
    >>> x = jax.numpy.ones((1, 2))
    >>> find_outputs(lambda params: jax.numpy.sum(x @ params["layer.kernel"]), params)
    {'layer': Array([[1., 1.]], dtype=float32)}

    Args:
      function: a function of the parameters by path; it is traced, and this may be traced, too.
      params: the parameters.

    Returns:
      Arrays by module; of those that are called several times `module#1` and so on, of layers in a
      scan `module[0]` and so on.
    """
    program = jax.make_jaxpr(function)(params)
    interpreter = _Interpreter()
    labels = sorted(params)  # as JAX flattens a dict
    leaves = [params[path] for path in labels]
    interpreter.run(program.jaxpr, program.consts, leaves, labels)
    return interpreter.outputs


class _Interpreter:
    """Interpreter of a program, in which some arrays have the path of a parameter as a label."""

    def __init__(self) -> None:
        self.outputs: dict[str, jax.Array] = {}

    def run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Any],
        labels: Sequence[str | None],
        suffix: str = "",
    ) -> tuple[list[Any], list[str | None]]:
        """Return the outputs of a program with their labels."""
        env: dict[Any, tuple[Any, str | None]] = {}
        names = [*[None] * len(consts), *labels]
        for var, value, label in zip(
            [*jaxpr.constvars, *jaxpr.invars], [*consts, *args], names, strict=True
        ):
            env[var] = value, label

        def read(var: Any) -> tuple[Any, str | None]:
            return (var.val, None) if hasattr(var, "val") else env[var]

        for eqn in jaxpr.eqns:
            pairs = [read(var) for var in eqn.invars]
            results, found = self._apply(
                eqn, [value for value, _ in pairs], [label for _, label in pairs], suffix
            )
            env.update(zip(eqn.outvars, zip(results, found, strict=True), strict=True))
        pairs = [read(var) for var in jaxpr.outvars]
        return [value for value, _ in pairs], [label for _, label in pairs]

    def _apply(
        self, eqn: Any, values: list[Any], labels: list[str | None], suffix: str
    ) -> tuple[Sequence[Any], Sequence[str | None]]:
        name = eqn.primitive.name
        if name == "scan":
            return self._scan(eqn, values, labels, suffix)
        for program in eqn.params.values():
            jaxpr = getattr(program, "jaxpr", program)
            # calls; not the branches of a condition, or the addition of a scatter
            if hasattr(jaxpr, "eqns") and len(jaxpr.invars) == len(values):
                consts = getattr(program, "consts", ())
                return self.run(jaxpr, consts, values, labels, suffix)
        results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
        results = results if eqn.primitive.multiple_results else [results]
        known = [label for label in labels if label is not None]
        if name in _VIEWS and known:
            return results, known
        if name in _PRODUCTS and len(known) == 1:
            self._record(known[0], suffix, results[0])
        return results, [None] * len(results)

    def _scan(
        self, eqn: Any, values: list[Any], labels: list[str | None], suffix: str
    ) -> tuple[Sequence[Any], Sequence[str | None]]:
        params = eqn.params
        first, carried = count_scan_operands(params)
        second = first + carried
        body = params["jaxpr"]
        carry = values[first:second]
        rows = []
        steps = range(params["length"])
        for index in reversed(steps) if params["reverse"] else steps:
            inputs = [*values[:first], *carry, *(x[index] for x in values[second:])]
            outputs, _ = self.run(body.jaxpr, body.consts, inputs, labels, f"{suffix}[{index}]")
            carry = outputs[: second - first]
            rows.append(outputs[second - first :])
        rows = rows[::-1] if params["reverse"] else rows
        stacks = [jax.numpy.stack(column) for column in zip(*rows, strict=True)]
        results = [*carry, *stacks]
        return results, [None] * len(results)

    def _record(self, path: str, suffix: str, output: Any) -> None:
        name = first = f"{path.rpartition('.')[0] or path}{suffix}"
        count = 0
        while name in self.outputs:
            count += 1
            name = f"{first}#{count}"
        self.outputs[name] = output
