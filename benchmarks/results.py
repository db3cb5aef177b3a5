"""Compare the ratios of benchmarks with the accepted ones, and update sections of RESULTS.md."""

import re
from typing import NamedTuple

TOLERANCE = 0.10  # relative; all ratios are costs: lower is better


class Change(NamedTuple):
    """Describe a measured ratio and the accepted one; None for a new ratio."""

    name: str
    accepted: float | None
    measured: float

    @property
    def worse(self):
        """True if the ratio is worse by more than the tolerance."""
        return self.accepted is not None and self.measured > self.accepted * (1 + TOLERANCE)

    @property
    def verdict(self):
        """The verdict: 'new', 'WORSE', 'better' or empty."""
        if self.accepted is None:
            return "new"
        if self.worse:
            return "WORSE"
        return "better" if self.measured < self.accepted / (1 + TOLERANCE) else ""


def compare_ratios(accepted, measured):
    """Compare the ratios of a run with the accepted ones.

    Args:
      accepted: name -> ratio, as committed.
      measured: name -> ratio, of this run; missing names are not compared.

    Returns:
      A `Change` for each name in `measured`, in the same order.
    """
    return [Change(name, accepted.get(name), value) for name, value in measured.items()]


def lower_of(first, second):
    """Return the lower ratio of two measurements by name, because noise only adds time."""
    return {name: min(value, second.get(name, value)) for name, value in first.items()}


def replace_section(document, title, body):
    """Replace the section `## title` of a document, or append it.

    Args:
      document: Markdown text whose sections start with `## `.
      title: the title of the section.
      body: the text of the section, without the heading.

    Returns:
      The new document.
    """
    section = f"## {title}\n\n{body.strip()}\n"
    parts = re.split(r"(?m)^(?=## )", document)
    for i, part in enumerate(parts):
        if part.startswith(f"## {title}\n"):
            parts[i] = section
            break
    else:
        parts.append(section)
    return "\n".join(part.strip() + "\n" for part in parts if part.strip())
