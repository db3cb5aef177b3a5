"""Says that it was called."""

from jengine.hooks.imix.hook_base import HookBase
from jengine.registry import HOOKS


@HOOKS.register_module()
class TextLoggerHook(HookBase):
    """Logs a text before training, after each iteration and after training: a hook to see the order of others by.

    Args:
      text: the text.
    """

    def __init__(self, text: str = "") -> None:
        self.text = text

    def before_train(self) -> None:
        """Logs the text."""
        self.trainer.logger.info(f"before_train:{self.text}")

    def after_train_iter(self) -> None:
        """Logs the text."""
        self.trainer.logger.info(f"after_train_iter:{self.text}")

    def after_train(self) -> None:
        """Logs the text."""
        self.trainer.logger.info(f"after_train:{self.text}")
