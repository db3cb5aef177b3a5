"""Test that what a process requests and exchanges in an event does not depend on the number of processes."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.requests import EVENTS, KINDS
from tests.parallel.test_processes import PATIENCE, environment

ROOT = pathlib.Path(__file__).parent.parent.parent
SCRIPT = """
import json
from benchmarks.requests import count_requests
print(json.dumps([count_requests(count, idle=0.5).tolist() for count in (4, COUNT)]))
"""


@pytest.fixture(scope="module", params=[8, pytest.param(16, marks=pytest.mark.many_processes)])
def counts(request):
    """What each of 4 and of more processes has counted, by event and kind; they fork from a process without JAX's threads."""
    command = [sys.executable, "-c", SCRIPT.replace("COUNT", str(request.param))]
    output = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, env=environment(1), cwd=ROOT, check=True
    ).stdout
    return [
        {
            event: dict(zip(KINDS, np.moveaxis(np.array(found)[:, i], 1, 0), strict=True))
            for i, event in enumerate(EVENTS)
        }
        for found in json.loads(output)
    ]


def most(counts, event, kind):
    return [int(found[event][kind].max()) for found in counts]


@pytest.mark.parametrize(
    ("event", "requests", "collectives"),
    [
        ("start", 1, 12),  # the thread that watches for failures; a header and the data of each of six exchanges
        ("other config", 0, 6),
        ("1,000 iterations", 0, 0),
        ("epoch", 0, 2),
        ("validation", 0, 6),
        ("idle", 0, 0),
    ],
)
def test_each_process_makes_as_many_requests_of_more_as_of_4(counts, event, requests, collectives):
    assert most(counts, event, "requests") == [requests, requests]
    assert most(counts, event, "collectives") == [collectives, collectives]


def test_each_process_makes_as_many_requests_for_a_save_of_more_as_of_4(counts):
    of_four, of_more = (found["save"]["requests"] for found in counts)
    np.testing.assert_array_equal(of_more[:4], of_four)
    np.testing.assert_array_equal(of_more[4:], of_four[3])
    assert most(counts, "save", "collectives") == [2, 2]
    assert max(of_four) < 30


def test_a_failure_is_one_request_of_the_process_and_one_barrier_of_each(counts):
    for found in counts:
        requests = found["failure"]["requests"]
        assert requests[1] <= 3  # it may wait in the barrier a second time
        assert set(np.delete(requests, 1)) == {1}


def test_only_two_processes_send_a_config_that_differs(counts):
    of_four, of_more = most(counts, "other config", "collective bytes")
    headers = 4 * 128  # three exchanges with a header, one of them with a hash, of each process
    assert of_more - of_four == (len(counts[1]["save"]["requests"]) - 4) * headers
