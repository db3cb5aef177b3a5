"""Test work dirs and checkpoints with files that another program, or a stranger, has put there."""

import os

import pytest

from jengine.checkpoint import (
    CorruptCheckpointError,
    find_checkpoint,
    read_meta,
)
from jengine.checkpoint.manifest import seal
from jengine.cli import main


@pytest.mark.parametrize("name", ["last_checkpoint", "current_run"])
@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"]
)
def test_a_pipe_or_a_device_in_a_work_dir_is_no_pointer(tmp_path, name, make, capsys):
    make(tmp_path / name)
    is_pointer = name == "last_checkpoint"
    error, message = (
        (CorruptCheckpointError, "last_checkpoint .*it must be a regular file")
        if is_pointer
        else (FileNotFoundError, "neither a checkpoint .* nor a work dir with complete checkpoints")
    )
    with pytest.raises(error, match=message):
        find_checkpoint(tmp_path)
    assert main(["ckpt", "ls", str(tmp_path)]) in (0, 2)


META = {
    "deep": "[" * 200_000,
    "deep in a state": '{"meta": {"iter": 3}, "hooks": ' + '{"a":' * 300 + "1" + "}" * 300 + "}",
    "a list": "[1]",
    "a list of facts": '{"meta": [1]}',
    "a list of hooks": '{"meta": {"iter": 3}, "hooks": [1]}',
    "an array of objects": '{"meta": {"iter": 3}, "hooks": {"a": {"__jengine__": "array", "data": '
    '{"__jengine__": "bytes", "data": "AAAAAAAAAAA="}, "dtype": "O", "shape": [1]}}}',
    "an array that is too large": '{"meta": {"iter": 3}, "hooks": {"a": {"__jengine__": "array", "data": '
    '{"__jengine__": "bytes", "data": "AAAA"}, "dtype": "u1", "shape": [1000000000000]}}}',
    "an array without its data": '{"meta": {"iter": 3}, "hooks": {"a": {"__jengine__": "array"}}}',
}


@pytest.mark.parametrize("case", META)
def test_metadata_that_no_run_has_written_is_one_clear_error(tmp_path, case, capsys):
    directory = tmp_path / "iter_3"
    (directory / "state").mkdir(parents=True)
    (directory / "meta.json").write_text(META[case])
    seal(directory, run="a", is_latest=True, iteration=3)
    with pytest.raises(CorruptCheckpointError, match="iter_3 is corrupt: meta.json") as caught:
        read_meta(directory, states=True)
    assert len(str(caught.value)) < 400
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    # the list reads no arrays
    assert ("meta.json is unreadable" in capsys.readouterr().out) == ("array" not in case)
