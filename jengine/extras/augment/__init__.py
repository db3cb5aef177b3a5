"""Images and augmentation, and hooks that change what is trained.

Readers, transforms, dataset wrappers, CutMix and MixUp in the step; a mean teacher, inputs of the
step and batch statistics.
"""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.extras.augment.plugin import provides

__getattr__, __dir__ = _lazy_names(__name__, provides)
