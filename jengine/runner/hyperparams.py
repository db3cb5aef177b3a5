"""Scalars that the host hands to the compiled step at each call."""

from typing import Any

import numpy as np


class Hyperparams(dict[str, np.ndarray]):
    """A dict of scalars by name, each a float32 array, so that a new value never means a new trace."""

    def __setitem__(self, name: str, value: Any) -> None:
        """Sets a scalar.

        Raises:
          TypeError: `value` is not one number.
        """
        array = np.asarray(value)
        if array.size != 1 or not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
            raise TypeError(f"the hyperparameter {name!r} is one number, found {value!r}")
        super().__setitem__(name, array.astype(np.float32).reshape(()))
