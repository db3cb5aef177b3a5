"""Choose which side holds where the config of a resumed run and its checkpoint differ."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jengine.errors import ConfigError, config_path
from jengine.registry import check_arguments

Choice = Literal["checkpoint", "config", "error"]
DataChoice = Literal["closest", "exact"]


@dataclasses.dataclass(frozen=True)
class ResumePolicy:
    """Choose which settings hold after a resume, where those of the config and of the checkpoint differ.

    For each kind, 'checkpoint' continues as the run began, 'config' uses the config from the next iteration on, and
    'error' refuses to resume.

    Attributes:
      optimizer: the settings of the parameter groups (lr, weight_decay, betas, ...), and the type of the optimizer.
        With 'config', an optimizer whose state does not fit that of the checkpoint starts with a new state.
      schedules: the schedules and their settings. With 'config', values are set as if these schedules had run from the
        start.
      seed: the seed of the random numbers and of the order of the data.
      data: 'closest' continues as near to the position in the data as they allow, and logs what is repeated or skipped;
        'exact' refuses data whose position cannot be saved, and to resume with another batch size or dataset.
    """

    optimizer: Choice = "checkpoint"
    schedules: Choice = "checkpoint"
    seed: Choice = "checkpoint"
    data: DataChoice = "closest"


def parse_resume_policy(cfg: Mapping[str, Any] | None) -> ResumePolicy:
    """Return the policy from the config `resume_policy`.

    Raises:
      ConfigError: another choice. TypeError: another kind.
    """
    with config_path("resume_policy"):
        options = dict((cfg or {}).items())
        check_arguments(ResumePolicy, options)
        return ResumePolicy(**options)


def choose_seed(policy: ResumePolicy, configured: int | None, saved: int) -> int:
    """Return the seed of a resumed run.

    Args:
      policy: the policy.
      configured: the seed in the config; None if it has none.
      saved: the seed in the checkpoint.

    Raises:
      ConfigError: they differ, and `policy.seed` is 'error'.
    """
    if configured is None or configured == saved:
        return saved
    if policy.seed == "error":
        raise ConfigError(
            f"`randomness.seed` must be {saved}, the seed of the checkpoint, with resume_policy.seed='error', "
            f"got {configured}"
        )
    return configured if policy.seed == "config" else saved
