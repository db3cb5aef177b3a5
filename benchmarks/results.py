"""Store the results of the benchmarks: RESULTS.md, by section, and the ratios that later runs are compared with."""

import re
from typing import NamedTuple

TOLERANCE = 0.10  # how much worse a ratio may be than the accepted one; all ratios are costs: less is better


class Change(NamedTuple):
    """Compare a ratio of this run with the accepted one, None for a new one."""

    name: str
    accepted: float | None
    found: float

    @property
    def worse(self):
        """True if it is worse by more than the tolerance."""
        return self.accepted is not None and self.found > self.accepted * (1 + TOLERANCE)

    @property
    def verdict(self):
        """The verdict in a word."""
        if self.accepted is None:
            return "new"
        if self.worse:
            return "WORSE"
        return "better" if self.found < self.accepted / (1 + TOLERANCE) else ""


def judge(accepted, found):
    """Compare the ratios of a run with the accepted ones.

    Args:
      accepted: name -> ratio, as committed.
      found: name -> ratio, of this run; missing names are not compared.

    Returns:
      A `Change` for each name in `found`, in its order.
    """
    return [Change(name, accepted.get(name), value) for name, value in found.items()]


def best_of(first, second):
    """Return the lower ratio of two measurements of the same: disturbances only ever add."""
    return {name: min(value, second.get(name, value)) for name, value in first.items()}


def replace_section(document, title, body):
    """Return the document with the section `## title` replaced, or added at its end.

    Args:
      document: text in Markdown whose sections begin with `## `.
      title: of the section.
      body: its text, without the heading.
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
