# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.optim.transforms.accumulate import AccumulateState as AccumulateState
from jengine.optim.transforms.accumulate import accumulate_gradients as accumulate_gradients
from jengine.optim.transforms.clip import ClipByNormState as ClipByNormState
from jengine.optim.transforms.clip import clip_by_norm as clip_by_norm
from jengine.optim.transforms.clip import global_norm as global_norm
from jengine.optim.transforms.fields import get_field as get_field
from jengine.optim.transforms.groups import GroupHyperparamsState as GroupHyperparamsState
from jengine.optim.transforms.groups import add_decayed_weights_by_rule as add_decayed_weights_by_rule
from jengine.optim.transforms.groups import scale_by_group_learning_rate as scale_by_group_learning_rate
from jengine.optim.transforms.loss_scale import LossScaleState as LossScaleState
from jengine.optim.transforms.loss_scale import dynamic_loss_scale as dynamic_loss_scale
