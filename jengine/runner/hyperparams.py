"""Scalars that the host hands to the compiled step at each call."""

from typing import Any

import numpy as np


class Hyperparams(dict[str, np.float32]):
    """A dict of scalars by name, each a np.float32: of one dtype, so that a new value never means a new trace.

    They are no arrays, which `hyperparams["x"] += 1` would change where a step that is still to run reads them.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        """Sets a scalar.

        Raises:
          TypeError: `value` is not one number.
        """
        array = np.asarray(value)
        if array.size != 1 or not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
            raise TypeError(f"the hyperparameter {name!r} is one number, found {value!r}")
        super().__setitem__(name, np.float32(array.item()))
