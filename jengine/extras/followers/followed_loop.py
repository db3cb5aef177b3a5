"""Validation loop of a run whose checkpoints are evaluated by other processes."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jengine.config.annotations import is_mapping
from jengine.config.errors import ConfigError
from jengine.config.registry import LOOPS
from jengine.evaluation.evaluator import Evaluator
from jengine.extras.followers.follow_hook import FollowHook
from jengine.hooks.runner_protocol import Loader, RunnerProtocol
from jengine.runner.eval_loops import ValLoop

_NAME = "FollowedValLoop"


@LOOPS.register_module()
class FollowedValLoop(ValLoop):
    """Validation loop that does nothing during training: followers evaluate the checkpoints.

    `val_cfg=dict(follow=True)` in a config means this loop. It adds a `FollowHook` to the run.

    Args:
      runner, dataloader, evaluator: as in `ValLoop`.
      follow: True starts a follower beside the trainer, on its CPUs; a dict has environment
        variables for it, such as `dict(JAX_PLATFORMS="cuda", CUDA_VISIBLE_DEVICES="1")`;
        'elsewhere' starts none, for `jengine test CONFIG WORK_DIR --follow` on other machines.
      **settings: as in `ValLoop`.
    """

    def __init__(
        self,
        runner: RunnerProtocol,
        dataloader: Loader | Mapping[str, Loader],
        evaluator: Evaluator | Mapping[str, Evaluator],
        follow: Literal[True, "elsewhere"] | Mapping[str, str] = True,
        **settings: Any,
    ) -> None:
        super().__init__(runner, dataloader, evaluator, **settings)
        for name, evaluation in self.evaluations.items():
            if evaluation.settings.interval is not None:
                raise ConfigError(
                    f"`val_cfg.{name}.interval` must be left out with `follow`, which evaluates "
                    f"each checkpoint, got {evaluation.settings.interval}"
                )
        runner.register_hook(FollowHook(follow))

    def run(self, names: Sequence[str] | None = None) -> dict[str, float]:
        """Validate, or do nothing during training."""
        return super().run(names) if self.runner.train_loop is None else {}


def read_follow(cfg: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a config in which the key `follow` of `val_cfg` has chosen the loop."""
    section = cfg.get("val_cfg")
    if not is_mapping(section) or "follow" not in section:
        return cfg, ""
    rest = {name: value for name, value in section.items() if name != "follow"}
    if section["follow"] is False:
        return {**cfg, "val_cfg": rest}, ""
    if rest.setdefault("type", _NAME) not in (_NAME, FollowedValLoop):
        raise ConfigError(f"`val_cfg.type` must be left out with `follow`, got {section['type']!r}")
    return {**cfg, "val_cfg": {**rest, "follow": section["follow"]}}, ""


def is_followed(cfg: Mapping[str, Any]) -> bool:
    """Return whether followers validate a run, from its config after `read_follow`."""
    section = cfg.get("val_cfg")
    return is_mapping(section) and section.get("type") in (_NAME, FollowedValLoop)
