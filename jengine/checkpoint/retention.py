"""Rules for which regular checkpoints to keep: by interval and by recency."""

from collections.abc import Sequence


def keep_regular(
    numbers: Sequence[int], *, latest: int, every: int = -1, unit: str = "epochs"
) -> dict[int, str]:
    """Select the regular checkpoints to keep.

    Args:
      numbers: the epoch or iteration of each checkpoint, oldest save first.
      latest: how many of the newest to keep; -1 for all.
      every: keep multiples of this number for good; -1 for none.
      unit: 'epochs' or 'iterations', for the reasons.

    Returns:
      The numbers to keep, in the same order, with the reasons. The newest is always among them.

    >>> keep_regular([2, 3, 4, 5], latest=2, every=2)
    {2: 'every 2 epochs', 4: 'one of the latest 2, every 2 epochs', 5: 'the latest'}
    """
    if latest == -1:
        return dict.fromkeys(numbers, "all are kept")
    reasons = {}
    for age, number in zip(range(len(numbers) - 1, -1, -1), numbers, strict=True):
        # Both rules may hold for a checkpoint, and the list of them tells which setting keeps it.
        texts = (
            ["the latest" if age == 0 else f"one of the latest {latest}"] if age < latest else []
        )
        if every != -1 and number % every == 0:
            texts.append(f"every {every} {unit}")
        if texts:
            reasons[number] = ", ".join(texts)
    return reasons
