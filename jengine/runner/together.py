"""Coordinate the processes of a run: one name and seed, one end."""

import contextlib
import dataclasses
from collections.abc import Iterator

from jengine.parallel.processes import Processes, SingleProcess
from jengine.runner.interrupts import Interrupts
from jengine.runner.workdir import Identity

# Clocks, drawn seeds and views of a shared file system differ between hosts.
_SHARED = ("log_dir", "timestamp", "experiment_name", "seed", "resume_from")


def broadcast_identity(identity: Identity, processes: SingleProcess | Processes) -> Identity:
    """Return the identity of the run as found by process 0."""
    mine = {name: getattr(identity, name) for name in _SHARED}
    return dataclasses.replace(identity, **processes.all_gather("the name of the run", mine)[0])


@contextlib.contextmanager
def abort_all_on_error(processes: SingleProcess | Processes, interrupts: Interrupts) -> Iterator[None]:
    """End all processes on an error inside, unless all have agreed to end here.

    Raises:
      ProcessError: the error was caused by another process, which the message names.
    """
    try:
        yield
    except BaseException as error:
        if not interrupts.agreed:
            processes.fail(error)
        raise
