"""What can be asked of a run at any time: how far it is, and what it was described with."""

from collections.abc import Mapping
from typing import Any

import jax


class Progress:
    """What a Runner builds when it is needed, and the properties that only read; see `Runner`."""

    train_loop: Any = None
    val_loop: Any = None
    test_loop: Any = None
    optim_wrapper: Any = None
    param_schedulers: Any = None
    _sections: Mapping[str, Any]
    _first_iter: int

    def _loader(self, mode: str) -> Any:
        raise NotImplementedError

    @property
    def iter(self) -> int:
        """Training iterations done."""
        return 0 if self.train_loop is None else self.train_loop.iter

    @property
    def epoch(self) -> int:
        """Training epochs done; 0 throughout in an iteration loop."""
        return 0 if self.train_loop is None else self.train_loop.epoch

    @property
    def max_iters(self) -> int:
        """Training iterations of the whole run."""
        return 0 if self.train_loop is None else self.train_loop.max_iters

    @property
    def max_epochs(self) -> int:
        """Training epochs of the whole run; 1 in an iteration loop."""
        return 0 if self.train_loop is None else self.train_loop.max_epochs

    @property
    def train_dataloader(self) -> Any:
        """The loader of the training data, built at its first use."""
        return self._loader("train")

    @property
    def val_dataloader(self) -> Any:
        """The loader of the validation data, built at its first use."""
        return self._loader("val")

    @property
    def test_dataloader(self) -> Any:
        """The loader of the test data, built at its first use."""
        return self._loader("test")

    @property
    def iters_done_here(self) -> int:
        """Training iterations since `train` was called, without those of the run that it resumed."""
        return self.iter - self._first_iter

    @property
    def has_training(self) -> bool:
        """Whether the sections of a training were given."""
        return self._sections["train_cfg"] is not None

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes the logs."""
        return jax.process_index() == 0
