"""Sums on the device that stay exact over many batches."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Sum(NamedTuple):
    """A running sum and what its rounding has lost so far (Neumaier's variant of Kahan summation).

    A plain float32 sum drifts with the number of additions, and so the result would depend on the batch size; this
    one is good to float32's last digits however the addends are cut into batches. Integers are exact up to 2**47.
    """

    total: jax.Array  # float32[]
    lost: jax.Array  # float32[]

    @classmethod
    def zero(cls) -> "Sum":
        """The empty sum."""
        return cls(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))

    def add(self, value: jax.Array) -> "Sum":
        """The sum with `value` (a scalar of any real dtype) added; pure."""
        value = jnp.asarray(value).astype(jnp.float32)
        total = self.total + value
        sum_is_larger = jnp.abs(self.total) >= jnp.abs(value)
        larger = jnp.where(sum_is_larger, self.total, value)
        smaller = jnp.where(sum_is_larger, value, self.total)
        return Sum(total, self.lost + ((larger - total) + smaller))

    def value(self) -> float:
        """The number, in double precision, on the host."""
        total, lost = float(self.total), float(self.lost)
        return total + lost if np.isfinite(total) else total


class Mean(NamedTuple):
    """A weighted mean: two sums."""

    weighted: Sum  # sum of value * weight
    weight: Sum

    @classmethod
    def zero(cls) -> "Mean":
        """The mean of nothing yet."""
        return cls(Sum.zero(), Sum.zero())

    def add(self, weighted: jax.Array, weight: jax.Array) -> "Mean":
        """The mean with a batch's `sum(value * weight)` and `sum(weight)` added; pure."""
        return Mean(self.weighted.add(weighted), self.weight.add(weight))

    def value(self) -> float:
        """The mean, on the host; NaN without any weight."""
        weight = self.weight.value()
        return self.weighted.value() / weight if weight else float("nan")
