"""Test-time augmentation in a Runner."""

from collections.abc import Mapping
from typing import Any

from jengine.config.containers import resolve
from jengine.config.errors import ConfigError
from jengine.extras.serving.prepare_tta import PrepareTTAHook
from jengine.runner.runner import Runner


def build_runner_with_tta(cfg: Any) -> Runner:
    """Return a Runner whose test merges predictions for several views on each batch.

    Args:
      cfg: a config for `Runner.from_cfg`, with `tta_model`, a config for a `BaseTTAModel`, which
        receives the run's model as `module`; and optionally `tta_pipeline`, which replaces the test
        data's transforms. Both may also be given under the key `vars`, which `Runner.from_cfg`
        ignores.

    Returns:
      The Runner; training and validation do not augment.

    Raises:
      ConfigError: `tta_model` or the test is missing.
    """
    plain = resolve(cfg)
    tta = {name: plain.pop(name) for name in ("tta_model", "tta_pipeline") if name in plain}
    tta = {**dict(plain.get("vars") or {}), **tta}
    if tta.get("tta_model") is None:
        raise ConfigError(
            "build_runner_with_tta: the config must have the key 'tta_model', the config of a "
            "BaseTTAModel, got none"
        )
    if plain.get("test_dataloader") is None:
        raise ConfigError(
            "build_runner_with_tta: the config must have the key 'test_dataloader', got none"
        )
    if tta.get("tta_pipeline") is not None:
        plain["test_dataloader"] = _replace_pipeline(plain["test_dataloader"], tta["tta_pipeline"])
    runner = Runner.from_cfg(plain)
    runner.register_hook(PrepareTTAHook(tta_cfg=tta["tta_model"]))
    return runner


def _replace_pipeline(loader: Any, pipeline: Any) -> Any:
    """Return a loader's config with a new pipeline, in the outermost dataset that has one, else
    around the dataset.
    """
    if not isinstance(loader, Mapping) or "dataset" not in loader:
        raise ConfigError(
            "build_runner_with_tta: with tta_pipeline, test_dataloader must be a dict with a "
            "`dataset`"
        )
    owner = loader["dataset"]
    while (
        isinstance(owner, Mapping)
        and "pipeline" not in owner
        and isinstance(owner.get("dataset"), Mapping)
    ):
        owner = owner["dataset"]
    if isinstance(owner, dict) and "pipeline" in owner:
        owner["pipeline"] = pipeline
        return loader
    return {
        **loader,
        "dataset": dict(type="TransformedDataset", dataset=loader["dataset"], pipeline=pipeline),
    }
