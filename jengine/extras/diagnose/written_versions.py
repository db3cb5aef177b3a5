"""Explain errors while a checkpoint is read: what had another version when it was written."""

from collections.abc import Mapping
from typing import Any

from jengine.versions import environment_versions


def name_versions(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return what has another version now, if a checkpoint was read. Explainer."""
    if "checkpoint" not in context:
        return None
    path, meta = context["checkpoint"]
    now = environment_versions()
    others = [
        f"{name} {version}, now {now.get(name)}"
        for name, version in meta.get("versions", {}).items()
        if version != now.get(name)
    ]
    return f"{path} was written with other versions: {'; '.join(others)}" if others else None
