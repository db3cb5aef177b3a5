import subprocess
import sys

import pytest

from jengine.checkpoint.retention import keep_regular


@pytest.mark.parametrize(
    ("numbers", "latest", "every", "kept"),
    [
        ([5, 10, 15, 20], 2, -1, [15, 20]),
        ([5, 10], 2, -1, [5, 10]),
        ([1, 2, 3, 4, 5, 6, 7], 2, 3, [3, 6, 7]),
        ([3, 5, 7, 8], 1, 4, [8]),
        (
            [10, 20, 7],
            1,
            10,
            [10, 20, 7],
        ),  # a run that was resumed earlier: the newest is the last one saved, not the greatest
        ([7], 1, 5, [7]),
        ([], 1, 5, []),
        ([1, 2, 3], -1, -1, [1, 2, 3]),
    ],
)
def test_the_newest_and_the_multiples_are_kept(numbers, latest, every, kept):
    assert list(keep_regular(numbers, latest=latest, every=every)) == kept


@pytest.mark.parametrize("latest", [1, 2, 5])
@pytest.mark.parametrize("every", [-1, 1, 3])
def test_the_latest_is_never_lost_however_a_run_prunes(latest, every):
    kept = []
    for number in range(1, 12):
        kept = list(keep_regular([*kept, number], latest=latest, every=every))
        assert kept[-1] == number


def test_all_reasons_are_returned():
    assert keep_regular([4, 5, 6, 8], latest=2, every=4, unit="iterations") == {
        4: "every 4 iterations",
        6: "one of the latest 2",
        8: "the latest, every 4 iterations",
    }
    assert keep_regular([1, 2], latest=-1) == {1: "all are kept", 2: "all are kept"}


def test_keeping_all_does_not_import_orbax():
    code = (
        "import sys; from jengine.checkpoint.retention import keep_regular\n"
        "keep_regular([1, 2], latest=-1); print('orbax.checkpoint' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "False\n"
    )
