"""Measure MMEngine on PyTorch with its default hooks."""

import tempfile

import mmengine
import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner

from benchmarks.peers import bare_torch
from benchmarks.peers.common import LOG_EVERY, MOMENTUM, RATE, SLOW_ITERS, compare


class Model(BaseModel):
    """Define the network and its loss."""

    def __init__(self):
        super().__init__()
        self.net = bare_torch.make_net()

    def forward(self, x, y, mode="loss"):
        """Compute the loss by name."""
        return {"loss": torch.nn.functional.cross_entropy(self.net(x), y)}


class Data(torch.utils.data.DataLoader):
    """Yield the batches unchanged; a DataLoader, because MMEngine accepts nothing else."""

    def __init__(self, data):
        super().__init__(list(range(len(data))), batch_size=1)
        self.data = data

    def __iter__(self):
        return iter(self.data)


def run(data):
    """Train on the data once."""
    with tempfile.TemporaryDirectory() as work_dir:
        Runner(
            model=Model(),
            work_dir=work_dir,
            train_dataloader=Data(data),
            train_cfg=dict(by_epoch=False, max_iters=len(data)),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=RATE, momentum=MOMENTUM)),
            default_hooks=dict(
                logger=dict(type="LoggerHook", interval=LOG_EVERY),
                checkpoint=dict(
                    type="CheckpointHook", interval=10**9, save_last=False, by_epoch=False
                ),
            ),
            experiment_name=tempfile.mktemp(dir=""),
        ).train()


compare(
    {"bare": bare_torch.LOOP, "trainer": (run, bare_torch.pack)},
    mmengine.__version__,
    iters=SLOW_ITERS,
)
