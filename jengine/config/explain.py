"""The one call by which extras explain errors, which can neither replace nor hide an error.

An explainer is a function `(error, context) -> note, notes or None`, which an extra provides in the
section "explainers". Those of all extras are asked, in the order of their names. The context has
what is at hand where the error passes; each entry may be missing:

    cfg       the config
    loader    the path of the dataloader whose batch the error may be about
    examples  the entries of first batches with dtypes and shapes, by dataloader
    host_entries  the kinds of the entries that stay on the host, by dataloader and path
    checkpoint  the path of the checkpoint that is read, and its `meta`
    samples   the samples that could not be collated, and their `indices` in the dataset
    run       the Runner that ends because of the error
    evaluation  the `Evaluation` of the run that failed; None between two of them
    program   the name, the compiled function and the arguments of the program that failed
    changed   the arguments for which a program compiles again: names, those of the first call, new
              ones (see `RecompilationGuard`)
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from jengine.config.plugins import load_provided, provided

logger = logging.getLogger("jengine")


def explain(error: BaseException, **context: Any) -> None:
    """Add the notes of all explainers to an error.

    >>> error = ValueError("`CrossEntropy.label` must be an entry of the batch")
    >>> explain(error, cfg=dict(model=dict(loss=dict(type="CrossEntropy", label="y"))))
    >>> error.__notes__
    ['in the config at `model.loss.label`']
    """
    with _only_logged("The explainers could not be found"):
        for name in sorted(provided("explainers")):
            with _only_logged(f"The explainer {name!r} failed"):
                notes = load_provided("explainers", name)(error, context) or ()
                for note in (notes,) if isinstance(notes, str) else notes:
                    # an error passes several places that explain it
                    if note not in getattr(error, "__notes__", ()):
                        error.add_note(note)


@contextlib.contextmanager
def explained(**context: Any) -> Iterator[None]:
    """Add the notes of all explainers to an error of the body; see `explain`."""
    try:
        yield
    except Exception as error:
        explain(error, **context)
        raise


@contextlib.contextmanager
def _only_logged(what: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # also an interrupt: the user waits for the first error
        logger.debug(what, exc_info=error)
