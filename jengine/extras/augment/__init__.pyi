# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.augment.augments import CutMix as CutMix
from jengine.extras.augment.augments import MixUp as MixUp
from jengine.extras.augment.augments import RandomErasing as RandomErasing
from jengine.extras.augment.augments import SoftLabels as SoftLabels
from jengine.extras.augment.base_dataset import BaseDataset as BaseDataset
from jengine.extras.augment.base_dataset import force_full_init as force_full_init
from jengine.extras.augment.batch_augment import BatchAugmentHook as BatchAugmentHook
from jengine.extras.augment.dataset_wrappers import ClassBalancedDataset as ClassBalancedDataset
from jengine.extras.augment.dataset_wrappers import ConcatDataset as ConcatDataset
from jengine.extras.augment.dataset_wrappers import MixedDataset as MixedDataset
from jengine.extras.augment.dataset_wrappers import RepeatDataset as RepeatDataset
from jengine.extras.augment.image_files import ImageFolder as ImageFolder
from jengine.extras.augment.image_files import LoadImage as LoadImage
from jengine.extras.augment.image_files import read_image as read_image
from jengine.extras.augment.image_steps import BatchNormalize as BatchNormalize
from jengine.extras.augment.image_steps import Normalize as Normalize
from jengine.extras.augment.image_steps import Pad as Pad
from jengine.extras.augment.mean_teacher import MeanTeacherHook as MeanTeacherHook
from jengine.extras.augment.precise_bn import PreciseBNHook as PreciseBNHook
from jengine.extras.augment.preprocessed import PreprocessedModel as PreprocessedModel
from jengine.extras.augment.step_inputs import SetEpochInfoHook as SetEpochInfoHook
from jengine.extras.augment.step_inputs import WarmupParamHook as WarmupParamHook
from jengine.extras.augment.switch_recipe import PipelineSwitchHook as PipelineSwitchHook
from jengine.extras.augment.switch_recipe import SwitchRecipeHook as SwitchRecipeHook
from jengine.extras.augment.switched_loss import SwitchedLoss as SwitchedLoss
