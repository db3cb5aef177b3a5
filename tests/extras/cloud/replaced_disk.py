"""Train as one of two processes, lose the disk of the second one and all checkpoints, and train on from the copies:
`replaced_disk.py DIRECTORY ADDRESS INDEX`. The checkpoint of the first run is kept as DIRECTORY/expected.
"""

import os
import pathlib
import shutil
import sys

from jengine.parallel import launch
from jengine.parallel.processes import get_processes
from tests.crash import job

ITERATIONS = 12


def main(directory, address, index):
    launch("none", address, 2, index, timeout=60, heartbeat_timeout=10)
    disk = directory / f"disk_{index}"
    os.environ["JENGINE_TEST_DISK"] = str(disk)
    job.main(str(directory / "run"), ITERATIONS, save=0, local=5)
    if index == 0:
        shutil.move(directory / "run" / f"iter_{ITERATIONS}", directory / "expected")
        (directory / "run" / "last_checkpoint").unlink()
    else:
        shutil.rmtree(disk)
    get_processes().all_gather("the lost files", index)
    job.main(str(directory / "run"), ITERATIONS, save=0, local=5)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
