"""Saves by epochs and by iterations, under iMIX's names."""

import os
from typing import Any

from jengine.annotations import Count
from jengine.contrib.imix.hook_base import HookBase
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS


@HOOKS.register_module()
class CheckPointHook(HookBase):
    """Saves checkpoints of everything, from which a run is resumed.

    Epochs and iterations count from 0: `<prefix>_epoch<e>_model` at the end of an epoch, within one, after n iterations
    of it, `<prefix>_epoch<e>_iter<n>_model`; in a training by iterations `<prefix>_iter<i>_model`; and
    `<prefix>_model_final` where training ends.

    Args:
      prefix: what the names begin with; by default `<model>_<dataset>`, after their classes.
      iter_period: iterations between two checkpoints, counted anew in each epoch; None for none.
      epoch_period: epochs between two checkpoints.
      max_num_checkpoints: how many are kept, the newest, besides `<prefix>_model_final`, which stays; None for all.

    Raises:
      ValueError: a number below 1.
    """

    def __init__(
        self,
        prefix: str | None = None,
        iter_period: Count | None = None,
        epoch_period: Count = 1,
        max_num_checkpoints: Count | None = None,
    ) -> None:
        self.prefix = prefix
        self.iter_period = iter_period
        self.epoch_period = epoch_period
        self.max_num_checkpoints = max_num_checkpoints
        self._kept: list[str] = []
        self._evicting: list[str] = []
        self._saved: tuple[int, str] | None = None  # iterations done, and the name, of the newest

    def name_at(self, iteration: int) -> str | None:
        """The checkpoint that was saved after `iteration` iterations; None if the newest is of another moment."""
        return self._saved[1] if self._saved is not None and self._saved[0] == iteration else None

    def before_train(self) -> None:
        """Settles the prefix, and removes what a run that was killed has left."""
        trainer = self.trainer
        if self.prefix is None:
            model = getattr(trainer.model, "module", trainer.model)
            dataset = getattr(trainer.train_loop.dataloader, "dataset", trainer.train_loop.dataloader)
            self.prefix = f"{_name_of(model)}_{_name_of(dataset)}"
        for name in self._evicting:
            trainer.checkpointer.delete(os.path.join(trainer.work_dir, name))
        self._evicting = []

    def after_train_iter(self) -> None:
        """Saves within an epoch, or in a training by iterations, unless something else saves at that moment."""
        trainer = self.trainer
        if self.iter_period is None or self.is_last_train_iter(trainer):
            return
        if not trainer.train_loop.by_epoch:
            if self.every_n_train_iters(trainer, self.iter_period):
                self._save(f"iter{trainer.iter:07d}_model", trainer.epoch, trainer.iter + 1)
        elif self.every_n_inner_iters(self.inner_iter, self.iter_period) and not self.end_of_epoch(
            trainer.train_loop.dataloader, self.inner_iter
        ):
            name = f"epoch{trainer.epoch}_iter{self.inner_iter + 1}_model"
            self._save(name, trainer.epoch, trainer.iter + 1)

    def after_train_epoch(self) -> None:
        """Saves at the end of an epoch."""
        if self.every_n_epochs(self.trainer, self.epoch_period):
            self._save(f"epoch{self.trainer.epoch}_model", self.trainer.epoch + 1, self.trainer.iter)

    def after_train(self) -> None:
        """Saves the end."""
        self._save("model_final", self.trainer.epoch, self.trainer.iter, final=True)

    def on_failure(self, runner: Runner) -> None:
        """An error is no end to save; `on_interrupt` has saved what there was."""

    def on_interrupt(self, runner: Runner) -> None:
        """Saves what a signal or an error would lose; called by the Runner between two iterations."""
        self.bind(runner)
        if runner.iter > 0 and self.name_at(runner.iter) is None:
            self._save("interrupted_model", runner.epoch, runner.iter)

    def _save(self, name: str, epoch: int, iteration: int, *, final: bool = False) -> None:
        trainer, name = self.trainer, f"{self.prefix}_{name}"
        if not final:
            kept = [*(other for other in self._kept if other != name), name]
            surplus = len(kept) - (self.max_num_checkpoints or len(kept))
            self._evicting, self._kept = kept[:surplus], kept[surplus:]
        self._saved = iteration, name
        trainer.logger.info(f"Saving checkpoint {name}")
        trainer.save_checkpoint(
            filename=name,
            meta={"epoch": epoch, "iter": iteration},
            evict=[os.path.join(trainer.work_dir, other) for other in self._evicting],
        )
        self._evicting = []

    def state_dict(self) -> dict[str, Any]:
        """Which checkpoints there are."""
        return {"kept": list(self._kept), "evicting": list(self._evicting), "saved": self._saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave, in the run that is resumed."""
        self._kept, self._evicting = list(state_dict["kept"]), list(state_dict["evicting"])
        if state_dict["saved"] is not None:
            iteration, name = state_dict["saved"]
            self._saved = iteration, name


def _name_of(thing: Any) -> str:
    return getattr(thing, "__name__", type(thing).__name__)
