"""Test-time augmentation: predictions over several views of each batch."""

from typing import Any

from jengine.config.errors import config_path
from jengine.config.registry import HOOKS, MODELS
from jengine.extras.serving.tta import BaseTTAModel
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol


@HOOKS.register_module()
class PrepareTTAHook(Hook):
    """Test-time augmentation in the test; training and validation use the plain model.

    Args:
      tta_cfg: config of a `BaseTTAModel`, which receives the model as `module`.
    """

    def __init__(self, tta_cfg: Any) -> None:
        self.tta_cfg = tta_cfg

    def before_test(self, runner: RunnerProtocol) -> None:
        """Use the augmented model in the test."""
        with config_path("tta_cfg"):
            model = MODELS.build(self.tta_cfg, module=runner.model)
            if not isinstance(model, BaseTTAModel):
                raise TypeError(
                    f"PrepareTTAHook: tta_cfg must build a BaseTTAModel, got {type(model).__name__}"
                )
        runner.test_loop.predict_with(model)  # only there: a validation has another loop
