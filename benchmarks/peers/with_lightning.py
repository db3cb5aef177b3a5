"""Measure Lightning on PyTorch with its CSV logger."""

import logging
import tempfile
import warnings

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger

from benchmarks.peers import bare_torch
from benchmarks.peers.common import LOG_EVERY, SLOW_ITERS, compare

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    """Define the network, its loss and its optimizer."""

    def __init__(self):
        super().__init__()
        self.net = bare_torch.make_net()

    def training_step(self, batch, batch_idx):
        """Compute and log the loss."""
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        """Build the optimizer."""
        return bare_torch.make_optimizer(self.parameters())


def run(data):
    """Train on the data once."""
    with tempfile.TemporaryDirectory() as work_dir:
        lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=CSVLogger(work_dir),
            log_every_n_steps=LOG_EVERY,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=work_dir,
        ).fit(Module(), data)


compare(
    {"bare": bare_torch.LOOP, "trainer": (run, bare_torch.pack)},
    lightning.__version__,
    iters=SLOW_ITERS,
)
