"""Explain errors of models that look for an entry of the batch that stays on the host."""

from collections.abc import Mapping
from typing import Any

from jengine.config.errors import UnknownNameError


def list_host_entries(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return the entries that devices cannot store, if one was looked for. Explainer."""
    loader, entries = context.get("host_entries", ("", {}))
    if not entries or not isinstance(error, UnknownNameError):
        return None
    listed = ", ".join(f"{path} ({kind})" for path, kind in entries.items())
    return (
        f"{loader} yields entries that stay on the host, because devices cannot store strings, "
        f"dates and objects: {listed}; give the model numbers, with arrays of equal shapes in all "
        "samples"
    )
