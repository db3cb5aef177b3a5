"""What makes the processes of a run one run: one name and seed, one end."""

import contextlib
import dataclasses
from collections.abc import Iterator

from jengine.parallel.processes import Alone, Processes
from jengine.runner.interrupts import Interrupts
from jengine.runner.workdir import Identity

# Clocks, drawn seeds and what a file system shows of a work dir differ between hosts.
_SHARED = ("log_dir", "timestamp", "experiment_name", "seed", "resume_from")


def share(identity: Identity, processes: Alone | Processes) -> Identity:
    """Who the run is, as process 0 has found it."""
    mine = {name: getattr(identity, name) for name in _SHARED}
    return dataclasses.replace(identity, **processes.exchange("the name of the run", mine)[0])


@contextlib.contextmanager
def ending_together(processes: Alone | Processes, interrupts: Interrupts) -> Iterator[None]:
    """An error inside ends all processes, unless all have agreed to end here.

    Raises:
      ProcessError: the error is the consequence of another process's, which it names.
    """
    try:
        yield
    except BaseException as error:
        if not interrupts.agreed:
            processes.fail(error)
        raise
