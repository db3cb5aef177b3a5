"""Images and augmentation: readers, transforms, dataset wrappers, CutMix and MixUp in the step."""

from jengine.config.plugins import lazy_names
from jengine.extras.augment.plugin import provides

__getattr__, __dir__ = lazy_names(__name__, provides)
