"""Support self-supervised learning as MMSelfSup does: its hooks, and pure functions to build such models from."""

from jengine.contrib.selfsup.clustering import Kmeans as Kmeans
from jengine.contrib.selfsup.clustering import class_weights as class_weights
from jengine.contrib.selfsup.clustering import describe_clusters as describe_clusters
from jengine.contrib.selfsup.deepcluster import DeepClusterHook as DeepClusterHook
from jengine.contrib.selfsup.densecl import DenseCLHook as DenseCLHook
from jengine.contrib.selfsup.features import compare_features as compare_features
from jengine.contrib.selfsup.features import extract_features as extract_features
from jengine.contrib.selfsup.features import knn_accuracy as knn_accuracy
from jengine.contrib.selfsup.features import projection_accuracy as projection_accuracy
from jengine.contrib.selfsup.losses import SwAVQueue as SwAVQueue
from jengine.contrib.selfsup.losses import dense_match as dense_match
from jengine.contrib.selfsup.losses import densecl_losses as densecl_losses
from jengine.contrib.selfsup.losses import empty_queue as empty_queue
from jengine.contrib.selfsup.losses import info_nce as info_nce
from jengine.contrib.selfsup.losses import push as push
from jengine.contrib.selfsup.losses import sinkhorn as sinkhorn
from jengine.contrib.selfsup.losses import swav_loss as swav_loss
from jengine.contrib.selfsup.memory_bank import MemoryBank as MemoryBank
from jengine.contrib.selfsup.memory_bank import empty_bank as empty_bank
from jengine.contrib.selfsup.memory_bank import update_samples as update_samples
from jengine.contrib.selfsup.odc import ODCHook as ODCHook
from jengine.contrib.selfsup.pseudo_labels import DeepClusterSampler as DeepClusterSampler
from jengine.contrib.selfsup.pseudo_labels import PseudoLabelDataset as PseudoLabelDataset
from jengine.contrib.selfsup.simsiam import SimSiamHook as SimSiamHook
from jengine.contrib.selfsup.swav import SwAVHook as SwAVHook
from jengine.contrib.selfsup.views import random_view as random_view
