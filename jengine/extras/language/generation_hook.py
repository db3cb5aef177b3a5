"""Samples of the text that the current model writes."""

from typing import Any

import numpy as np

from jengine.config.annotations import Count
from jengine.config.errors import ConfigError
from jengine.config.registry import HOOKS
from jengine.data.batch_check import Batch
from jengine.extras.language.records import Source
from jengine.extras.language.text_generator import find_generator
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol


@HOOKS.register_module()
class GenerationHook(Hook):
    """Logs what the current model writes after given prompts, every `interval` iterations and at
    the end.

    The model must be a `TextGenerator`, whose settings are used. The weights are those of a
    validation, such as the averages of an `EMAHook`. The program is compiled once.

    >>> hook = GenerationHook(prompts=["def ", "import "], interval=100)

    Args:
      prompts: a `.jsonl` file with records, a `.txt` file with one prompt in each line, or prompts.
      interval: iterations between two samples.

    Attributes:
      samples: the newest texts, one for each prompt.
    """

    def __init__(self, prompts: Source, interval: Count = 500) -> None:
        self.interval = interval
        self.samples: list[str] = []
        self._prompts = prompts

    def before_train(self, runner: RunnerProtocol) -> None:
        """Encode the prompts.

        Raises:
          ConfigError: the model is no `TextGenerator`, or a prompt has no tokens.
        """
        # Before training and not at the first interval, hours later.
        generator = find_generator(runner.model)
        if generator is None:
            raise ConfigError(
                "GenerationHook: `model` of the run must be a TextGenerator, "
                "dict(type='TextGenerator', model=..., tokenizer=...), got "
                f"{type(runner.model).__name__}"
            )
        self._generator = generator
        self._dataset = generator.make_prompts(self._prompts)

    def after_train_iter(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Batch = None, outputs: Any = None
    ) -> None:
        """Log samples if they are due."""
        if not (self.every_n_train_iters(runner, self.interval) or self.is_last_train_iter(runner)):
            return
        self.samples = self._generator.decode(np.asarray(runner.predict(self._dataset.arrays)))
        for prompt, text in zip(self._dataset.texts, self.samples, strict=True):
            runner.logger.info("Sample at iteration %d: %r -> %r", runner.iter + 1, prompt, text)

    def next_step(self, runner: RunnerProtocol, step: int) -> float:
        """Return the step of the next samples."""
        return min(self.next_multiple(self.interval, step), max(step, runner.max_iters - 1))
