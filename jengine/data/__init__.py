"""Datasets, samplers, loaders, adapters for foreign data, and the path to the device.

A `DataLoader` yields batches with a position that a checkpoint can store; `BatchStream` puts them
on the devices ahead of the step. Imports `config` and `logging`.
"""

from jengine.config.plugins import lazy_names as _lazy_names
from jengine.data.batch_check import BatchCheck as BatchCheck
from jengine.data.batch_stream import BatchStream as BatchStream
from jengine.data.batch_stream import prefetch_to_device as prefetch_to_device
from jengine.data.build import build_dataloader as build_dataloader
from jengine.data.build import check_dataloader as check_dataloader
from jengine.data.collate import default_collate as default_collate
from jengine.data.collate import stack_batches as stack_batches
from jengine.data.host_entries import list_host_entries as list_host_entries
from jengine.data.host_entries import put_arrays as put_arrays
from jengine.data.host_entries import select_arrays as select_arrays
from jengine.data.iterables import IterableLoader as IterableLoader
from jengine.data.loader import DataLoader as DataLoader
from jengine.data.masking import MaskedTuple as MaskedTuple
from jengine.data.pipeline import Compose as Compose
from jengine.data.pipeline import Pipeline as Pipeline
from jengine.data.pipeline import TransformedDataset as TransformedDataset
from jengine.data.samplers import DefaultSampler as DefaultSampler
from jengine.data.samplers import InfiniteSampler as InfiniteSampler
from jengine.data.step_values import StepValues as StepValues

provides = {  # imported on use, as what extras provide
    "DATASETS": {
        "ArrayDataset": "jengine.data.datasets",
        "Digits": "jengine.data.datasets",
    },
}
__getattr__, __dir__ = _lazy_names(__name__, provides)
