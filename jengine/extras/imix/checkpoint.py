"""iMIX's checkpoints by epoch and by iteration, under iMIX's names."""

import dataclasses
from typing import Any

from jengine.config.annotations import Count
from jengine.config.registry import HOOKS
from jengine.extras.imix.hook_base import HookBase
from jengine.hooks.runner_protocol import RunnerProtocol


@HOOKS.register_module()
@dataclasses.dataclass(eq=False, repr=False)
class CheckPointHook(HookBase):
    """Hook that saves checkpoints with the full training state.

    Names count epochs and iterations from 0: `<prefix>_epoch<e>_model` at the end of an epoch,
    `<prefix>_epoch<e>_iter<n>_model` after n iterations in an epoch, `<prefix>_iter<i>_model` when
    training by iterations, and `<prefix>_model_final` at the end of training.

    >>> CheckPointHook(epoch_period=2, max_num_checkpoints=3).epoch_period
    2

    Args:
      prefix: start of the names; by default `<model>_<dataset>`, the two class names.
      iter_period: iterations between two checkpoints, counted from the start of each epoch; None to
        save none.
      epoch_period: epochs between two checkpoints.
      max_num_checkpoints: number of recent checkpoints to keep besides `<prefix>_model_final`; None
        for all.
    """

    prefix: str | None = None
    iter_period: Count | None = None
    epoch_period: Count = 1
    max_num_checkpoints: Count | None = None

    def __post_init__(self) -> None:
        self._kept: list[str] = []
        self._evicting: list[str] = []
        # completed iterations, and the name of the latest checkpoint
        self._latest: tuple[int, str] | None = None

    def name_at(self, iteration: int) -> str | None:
        """Return the name of the latest checkpoint if it was saved after `iteration` iterations,
        else None.
        """
        return (
            self._latest[1] if self._latest is not None and self._latest[0] == iteration else None
        )

    def before_train(self) -> None:
        """Set the default prefix, and delete the checkpoints that an interrupted run should have
        deleted.
        """
        trainer = self.trainer
        if self.prefix is None:
            model = getattr(trainer.model, "module", trainer.model)
            dataset = getattr(
                trainer.train_loop.dataloader, "dataset", trainer.train_loop.dataloader
            )
            self.prefix = "_".join(
                getattr(value, "__name__", type(value).__name__) for value in (model, dataset)
            )
        # the names come from the resumed checkpoint
        trainer.checkpointer.evict(trainer.work_dir, self._evicting)
        self._evicting = []

    def after_train_iter(self) -> None:
        """Save every `iter_period` iterations.

        The ends of epochs and of training are saved anyway.
        """
        trainer = self.trainer
        if self.iter_period is None or self.is_last_train_iter(trainer):
            return
        if not trainer.train_loop.by_epoch:
            if self.every_n_train_iters(trainer, self.iter_period):
                self._save(f"iter{trainer.iter:07d}_model", trainer.epoch, trainer.iter + 1)
        # The end of an epoch has a checkpoint of its own, with the epoch in its name.
        elif self.every_n_inner_iters(self.inner_iter, self.iter_period) and not self.end_of_epoch(
            trainer.train_loop.dataloader, self.inner_iter
        ):
            self._save(
                f"epoch{trainer.epoch}_iter{self.inner_iter + 1}_model",
                trainer.epoch,
                trainer.iter + 1,
            )

    def after_train_epoch(self) -> None:
        """Save every `epoch_period` epochs."""
        if self.every_n_epochs(self.trainer, self.epoch_period):
            self._save(
                f"epoch{self.trainer.epoch}_model", self.trainer.epoch + 1, self.trainer.iter
            )

    def after_train(self) -> None:
        """Save the final checkpoint."""
        self._save("model_final", self.trainer.epoch, self.trainer.iter, final=True)

    def on_failure(self, runner: RunnerProtocol) -> None:
        """Do nothing: an error saves no final checkpoint, and `on_interrupt` has saved the
        state.
        """

    def on_interrupt(self, runner: RunnerProtocol) -> None:
        """Save the state before a signal or an error ends the run.

        The Runner calls this between two iterations.
        """
        self.bind(runner)
        if runner.iter > 0 and self.name_at(runner.iter) is None:
            self._save("interrupted_model", runner.epoch, runner.iter)

    def _save(self, name: str, epoch: int, iteration: int, *, final: bool = False) -> None:
        trainer = self.trainer
        name = f"{self.prefix}_{name}"
        if not final:
            kept = [*(other for other in self._kept if other != name), name]
            num_evicted = len(kept) - (self.max_num_checkpoints or len(kept))
            self._evicting = kept[:num_evicted]
            self._kept = kept[num_evicted:]
        # Set before saving, so that the checkpoint has the names to keep if the run ends while they
        # are deleted.
        self._latest = iteration, name
        trainer.logger.info(f"Saving checkpoint {name}")
        trainer.save_checkpoint(
            filename=name, meta={"epoch": epoch, "iter": iteration}, evict=self._evicting
        )
        self._evicting = []

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the checkpoints to keep and to delete, and the latest one."""
        return {"kept": list(self._kept), "evicting": list(self._evicting), "saved": self._latest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._kept = list(state_dict["kept"])
        self._evicting = list(state_dict["evicting"])
        if state_dict["saved"] is not None:
            iteration, name = state_dict["saved"]
            self._latest = iteration, name
