# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.distill.distill_hook import DistillHook as DistillHook
from jengine.extras.distill.distilled_model import DistillSettings as DistillSettings
from jengine.extras.distill.distilled_model import DistilledModel as DistilledModel
from jengine.extras.distill.distilled_model import FeatureSettings as FeatureSettings
from jengine.extras.distill.frozen_model import FrozenModel as FrozenModel
from jengine.extras.distill.frozen_model import FrozenModelHook as FrozenModelHook
