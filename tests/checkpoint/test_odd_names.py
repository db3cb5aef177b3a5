"""Test that each name of a directory works on a disk, and that a bucket's URL works or is refused."""

import contextlib
import os

import jax.numpy as jnp
import pytest

from jengine import checkpoint
from jengine.checkpoint import Checkpointer, find_latest, restore

from .conftest import make_meta

NAMES = [
    "run[1]", "lr=[1,2]", "a*b", "a?b", "**", "a\\b", "{a,b}", "{0}", "%41", "%s", "a b", " a", "a ", "a#b", "a;b",
    "~x", "-x", "a.", "..a", "a\nb", "$HOME", "ünï 日本 😀", "a'b\"c", "x" * 255,
]  # fmt: skip
IN_BUCKETS = ["{a,b} ünï 日本 😀/%41 a'b\"c a\\b.", "x" * 699 + " "]


def save_two(work_dir):
    with contextlib.closing(Checkpointer(work_dir)) as checkpointer:
        for iteration in (1, 2):
            state = {"params": {"w": jnp.arange(3.0) * iteration, "b": jnp.ones(5)}}
            evict = [f"iter_{iteration - 1}"]
            checkpointer.save(
                f"{work_dir}/iter_{iteration}", state, make_meta(iteration), evict=evict
            )
    assert find_latest(work_dir, checksums=True) == f"{work_dir}/iter_2"
    assert [os.path.basename(path) for path in checkpoint.list_checkpoints(work_dir)] == ["iter_2"]
    assert checkpoint.load(work_dir).params["w"].tolist() == [0.0, 2.0, 4.0]
    target = {"params": {"w": jnp.zeros(3), "b": jnp.zeros(5)}}
    assert restore(f"{work_dir}/iter_2", target)[0]["params"]["w"].tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_directory_of_any_name_on_a_disk_has_checkpoints_that_can_be_read(tmp_path, name):
    (tmp_path / "run1" / "iter_1" / "state" / "ocdbt.process_7").mkdir(
        parents=True
    )  # which the patterns match
    (tmp_path / "aXb").mkdir()
    save_two(str(tmp_path / name))
    assert sorted(os.listdir(tmp_path)) == sorted({"run1", "aXb", name})


@pytest.mark.parametrize("name", IN_BUCKETS, ids=lambda name: ascii(name[:9]))
@pytest.mark.parametrize("bucket", ["gs_bucket", "s3_bucket"])
def test_names_that_buckets_take_have_checkpoints_that_can_be_read(request, bucket, name):
    save_two(f"{request.getfixturevalue(bucket)}/{name}")
