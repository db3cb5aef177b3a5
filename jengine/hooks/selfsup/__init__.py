"""Self-supervised learning: the hooks of MMSelfSup, and the pure functions that models of theirs are made of."""

from jengine.hooks.selfsup.clustering import Kmeans as Kmeans
from jengine.hooks.selfsup.clustering import class_weights as class_weights
from jengine.hooks.selfsup.clustering import describe_clusters as describe_clusters
from jengine.hooks.selfsup.contrast import dense_match as dense_match
from jengine.hooks.selfsup.contrast import densecl_losses as densecl_losses
from jengine.hooks.selfsup.contrast import info_nce as info_nce
from jengine.hooks.selfsup.contrast import push as push
from jengine.hooks.selfsup.deepcluster import DeepClusterHook as DeepClusterHook
from jengine.hooks.selfsup.densecl import DenseCLHook as DenseCLHook
from jengine.hooks.selfsup.features import compare_features as compare_features
from jengine.hooks.selfsup.features import extract_features as extract_features
from jengine.hooks.selfsup.features import knn_accuracy as knn_accuracy
from jengine.hooks.selfsup.features import projection_accuracy as projection_accuracy
from jengine.hooks.selfsup.memory_bank import MemoryBank as MemoryBank
from jengine.hooks.selfsup.memory_bank import empty_bank as empty_bank
from jengine.hooks.selfsup.memory_bank import update_samples as update_samples
from jengine.hooks.selfsup.odc import ODCHook as ODCHook
from jengine.hooks.selfsup.simsiam import SimSiamHook as SimSiamHook
from jengine.hooks.selfsup.swav import SwAVHook as SwAVHook
from jengine.hooks.selfsup.swav_loss import SwAVQueue as SwAVQueue
from jengine.hooks.selfsup.swav_loss import empty_queue as empty_queue
from jengine.hooks.selfsup.swav_loss import sinkhorn as sinkhorn
from jengine.hooks.selfsup.swav_loss import swav_loss as swav_loss
from jengine.hooks.selfsup.views import random_view as random_view
