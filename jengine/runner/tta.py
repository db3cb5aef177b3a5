"""Build a Runner whose test augments the data."""

from collections.abc import Mapping
from typing import Any

from jengine.config import resolve
from jengine.errors import ConfigError
from jengine.hooks import PrepareTTAHook
from jengine.runner.runner import Runner


def build_runner_with_tta(cfg: Any) -> Runner:
    """Return a Runner from a config whose test predicts several views of each batch and merges them.

    Args:
      cfg: a config for `Runner.from_cfg`, with `tta_model`, the config of a `BaseTTAModel`, which gets the
        run's model as `module`; and optionally `tta_pipeline`, transforms of the test data that replace
        the configured ones. Both may also be given under the key `vars`, which `Runner.from_cfg` ignores. It is
        not modified.

    Returns:
      The Runner; training and validation do not augment.

    Raises:
      ConfigError: `tta_model` or the test is missing.
    """
    plain = resolve(cfg)
    own = {name: plain.pop(name) for name in ("tta_model", "tta_pipeline") if name in plain}
    own = {**dict(plain.get("vars") or {}), **own}
    if own.get("tta_model") is None:
        raise ConfigError(
            "build_runner_with_tta: the config needs the key 'tta_model', dict(type=...) of a BaseTTAModel"
        )
    if plain.get("test_dataloader") is None:
        raise ConfigError("build_runner_with_tta: the config needs the key 'test_dataloader'")
    if own.get("tta_pipeline") is not None:
        plain["test_dataloader"] = _with_pipeline(plain["test_dataloader"], own["tta_pipeline"])
    runner = Runner.from_cfg(plain)
    runner.register_hook(PrepareTTAHook(tta_cfg=own["tta_model"]))
    return runner


def _with_pipeline(loader: Any, pipeline: Any) -> Any:
    """Return the config of a loader with another pipeline: in the outermost dataset that has one, else around it."""
    if not isinstance(loader, Mapping) or "dataset" not in loader:
        raise ConfigError("build_runner_with_tta: tta_pipeline needs a test_dataloader that is a dict with a `dataset`")
    owner = loader["dataset"]
    while isinstance(owner, Mapping) and "pipeline" not in owner and isinstance(owner.get("dataset"), Mapping):
        owner = owner["dataset"]
    if isinstance(owner, dict) and "pipeline" in owner:
        owner["pipeline"] = pipeline
        return loader
    return {**loader, "dataset": dict(type="TransformedDataset", dataset=loader["dataset"], pipeline=pipeline)}
