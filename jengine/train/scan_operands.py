"""Operands of scans in traced programs, whose parameters differ between versions of JAX."""

from collections.abc import Mapping
from typing import Any


def count_scan_operands(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many operands of a `scan` equation are constants, and how many are its carry.

    They come in this order, and before the arrays that are scanned.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, x: (c + x, c), 0.0, x))
    >>> (scan,) = program(jax.numpy.ones(3)).jaxpr.eqns
    >>> count_scan_operands(scan.params)
    (0, 1)
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()  # since jax 0.12
    return len(list(constants)), len(list(carry))
