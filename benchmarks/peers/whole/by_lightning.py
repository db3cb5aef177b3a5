"""Train with Lightning on PyTorch."""

import logging
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from benchmarks.peers.whole import torch_models
from benchmarks.peers.whole.tasks import read_arguments, write_result

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
name, task, data, directory = read_arguments()


class Module(lightning.LightningModule):
    """Define the network, its loss, its metric and its optimizer."""

    def __init__(self):
        super().__init__()
        self.net = torch_models.NETWORKS[name]()
        self.loss = torch_models.make_loss(task)
        self.total = 0.0

    def training_step(self, batch, index):
        """Compute and log the loss."""
        x, y = batch
        loss = self.loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def on_validation_epoch_start(self):
        """Begin a sum."""
        self.total = 0.0

    def validation_step(self, batch, index):
        """Add a batch to the sum."""
        x, y = batch
        self.total += float(torch_models.score(self.net(x), y, name))

    def on_validation_epoch_end(self):
        """Log the metric."""
        self.log("metric", self.total / data.test[1].size)

    def configure_optimizers(self):
        """Build the optimizer and the schedule."""
        optimizer, schedule = torch_models.make_optimizer(self, task)
        return [optimizer], [dict(scheduler=schedule, interval="step")]


torch.manual_seed(0)
module = Module()
trainer = lightning.Trainer(
    max_steps=task.steps,
    accelerator="cpu",
    logger=CSVLogger(directory),
    log_every_n_steps=task.log_every,
    val_check_interval=task.val_every,
    check_val_every_n_epoch=None,
    num_sanity_val_steps=0,
    gradient_clip_val=1.0,
    callbacks=[ModelCheckpoint(directory, every_n_train_steps=task.save_every, save_top_k=-1)],
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=directory,
)
trainer.fit(
    module,
    torch.utils.data.DataLoader(torch_models.Batches(data, task), batch_size=None),
    torch.utils.data.DataLoader(torch_models.TestBatches(data), batch_size=None),
)
write_result(directory, trainer.callback_metrics["metric"])
