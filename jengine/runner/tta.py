"""A Runner whose test augments the data."""

from collections.abc import Mapping
from typing import Any

from jengine.config import resolve
from jengine.errors import ConfigError
from jengine.hooks import PrepareTTAHook
from jengine.runner.runner import Runner


def build_runner_with_tta(cfg: Any) -> Runner:
    """A Runner from a config whose test predicts several views of each batch and merges them.

    Args:
      cfg: a config as `Runner.from_cfg` takes it, with `tta_model`, the config of a `BaseTTAModel`, which gets the
        run's model as `module`; and perhaps `tta_pipeline`, transforms that the test data go through in the place of
        those that they have. Both may also stand under the key `vars`, where `Runner.from_cfg` lets them pass. It is
        left as it was.

    Returns:
      The Runner; training and validation go without the augmentation.

    Raises:
      ConfigError: no `tta_model`, or no test.
    """
    plain = resolve(cfg)
    own = {name: plain.pop(name) for name in ("tta_model", "tta_pipeline") if name in plain}
    own = {**dict(plain.get("vars") or {}), **own}
    if own.get("tta_model") is None:
        raise ConfigError(
            "build_runner_with_tta: the config needs the key 'tta_model', dict(type=...) of a BaseTTAModel"
        )
    if plain.get("test_dataloader") is None:
        raise ConfigError("build_runner_with_tta: the config describes no test: it needs the key 'test_dataloader'")
    if own.get("tta_pipeline") is not None:
        plain["test_dataloader"] = _with_pipeline(plain["test_dataloader"], own["tta_pipeline"])
    runner = Runner.from_cfg(plain)
    runner.register_hook(PrepareTTAHook(tta_cfg=own["tta_model"]))
    return runner


def _with_pipeline(loader: Any, pipeline: Any) -> Any:
    """A config of a loader with another pipeline: that of the outermost dataset that has one, else one around it."""
    if not isinstance(loader, Mapping) or "dataset" not in loader:
        raise ConfigError("build_runner_with_tta: tta_pipeline needs a test_dataloader that is a dict with a `dataset`")
    owner = loader["dataset"]
    while isinstance(owner, Mapping) and "pipeline" not in owner and isinstance(owner.get("dataset"), Mapping):
        owner = owner["dataset"]
    if isinstance(owner, dict) and "pipeline" in owner:
        owner["pipeline"] = pipeline
        return loader
    return {**loader, "dataset": dict(type="TransformedDataset", dataset=loader["dataset"], pipeline=pipeline)}
