"""Labels and predictions as the entries that LocalVisualizer draws."""

import numpy as np
from numpy.typing import ArrayLike

from jengine.config.errors import ConfigError
from jengine.model.selection import describe_array


def to_entry(value: ArrayLike, argument: str) -> tuple[str, np.ndarray]:
    """Return the kind of an entry, 'label' or 'sem_seg', and the value to draw.

    Args:
      value: labels or predictions for one example: a class index int[] or a real number float[];
        logits float[C]; class indices int[H, W]; or logits float[H, W, C].
      argument: the argument that selects it, for the error message.

    Examples:
      >>> to_entry([0.1, 0.7, 0.2], "prediction")
      ('label', array(1))
    """
    array = np.asarray(value)
    # Integers are classes and floats are logits: nothing else distinguishes a mask [H, W] from
    # scores.
    is_index = array.dtype.kind in "biu"
    if array.ndim == 0:
        return "label", array if is_index else array.astype(np.float32)
    if array.ndim == 1 and not is_index:
        return "label", np.asarray(array.argmax())
    if array.ndim == 2 and is_index:
        return "sem_seg", array.astype(np.int64)
    if array.ndim == 3 and not is_index:
        return "sem_seg", array.argmax(axis=-1)
    raise ConfigError(
        f"`{argument}` must select a number, logits f[C], class indices i[H,W] or logits f[H,W,C] "
        f"of each example, got {describe_array(array)}"
    )
