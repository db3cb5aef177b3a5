"""The metrics of the evaluators, for an error about one that no evaluator has."""

from collections.abc import Mapping
from typing import Any

from jengine.config.errors import closest
from jengine.config.scores import UnknownDirectionError
from jengine.evaluation.evaluator import build_evaluator


def suggest_metrics(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return the closest metric of `val_evaluator` if it does not have that of the error.

    Explainer.
    """
    section = (context.get("cfg") or {}).get("val_evaluator")
    if section is None or not isinstance(error, UnknownDirectionError):
        return None
    try:
        known = build_evaluator(section).names
    except (TypeError, KeyError, ValueError):  # evaluators by name
        sections = section.values() if isinstance(section, Mapping) else section
        known = tuple(name for each in sections for name in build_evaluator(each).names)
    if not known or any(name.endswith(error.metric) for name in known):
        return None
    return f"val_evaluator has no metric {error.metric!r}{closest(error.metric, known)}"
