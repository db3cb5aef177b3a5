"""The settings of the model that make a checkpoint misfit on a resume."""

from collections.abc import Mapping
from typing import Any

from jengine.checkpoint.layout import read_meta
from jengine.config.description import flatten_description
from jengine.config.errors import CheckpointMismatchError
from jengine.config.fingerprint import compare_settings
from jengine.extras.diagnose.locate import PLACE

_MAX_LINES = 3


def name_model_settings(error: BaseException, context: Mapping[str, Any]) -> list[str]:
    """Return the settings of the model that differ from those of a checkpoint whose arrays do not
    fit, what to write to resume, and the place of the first in the config.
    """
    run = context.get("run")
    if not isinstance(error, CheckpointMismatchError) or run is None:
        return []
    saved: Any = read_meta(error.path).get("fingerprint")
    # Shapes that do not fit come from settings of the model; the others would hide them.
    differences = compare_settings(run.run.described.settings, saved) if saved else ()
    lines = {path: line for path, line in differences if path.startswith("model.")}
    if not lines:
        return []
    stored = flatten_description(saved["settings"])
    shown = list(lines)[:_MAX_LINES]
    changes = [f"set {path}={stored[path]!r}" for path in shown if path in stored]
    changes += [
        f"remove {path}"
        for path in shown
        if path in run.run.described.settings and path not in stored
    ]
    more = f", and {len(lines) - _MAX_LINES} more" if len(lines) > _MAX_LINES else ""
    advice = f"; to resume, {', '.join(changes)}{more}" if changes else ""
    listed = "; ".join(lines[path] for path in shown)
    return [f"the model has other settings, {listed}{more}{advice}", f"{PLACE}`{shown[0]}`"]
