"""What buckets, downloads and launchers refuse: a call, its error, and the words that must be in the message."""

import os
import types

import pytest
from orbax.checkpoint.checkpoint_managers import AnySavePolicy, ContinuousCheckpointingPolicy

from jengine.config.errors import ConfigError
from jengine.extras.cloud import LocalCheckpointHook
from jengine.extras.cloud.launchers import find_settings
from jengine.extras.language import TokenWindows
from jengine.hooks import CheckpointHook
from tests.refusals import check_row


def save_by_a_policy_of_one_process():
    hook = CheckpointHook(save_policy=AnySavePolicy([ContinuousCheckpointingPolicy()]))
    hook.before_train(types.SimpleNamespace(processes=types.SimpleNamespace(count=2), work_dir="", iter=0))


def read_tokens_of_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "tokens.npy")
    TokenWindows(str(tmp_path / "tokens.npy"), length=3)


REFUSED = {
    "a bucket that does not exist": (lambda make_runner, google_storage: make_runner(work_dir="gs://nobody/run"), ConfigError, "`work_dir`", "gs://nobody/run"),
    "a URL as a local disk": (lambda: LocalCheckpointHook("gs://bucket", interval=5), ConfigError, "LocalCheckpointHook.directory`", "'gs://bucket'"),
    "a pipe of tokens": (read_tokens_of_a_pipe, ConfigError, "regular file", "pipe"),
    "a policy of one process for two": (save_by_a_policy_of_one_process, ConfigError, "ContinuousCheckpointingPolicy", "several processes"),
    "a coordinator without a port": (lambda: find_settings("none", {}, "host", 2, 0), ConfigError, "--coordinator", "HOST:PORT", "'host'"),
    "a coordinator whose port is a text": (lambda: find_settings("none", {}, "a:b", 2, 0), ConfigError, "--coordinator", "HOST:PORT", "'a:b'"),
    "a misspelt launcher": (lambda: find_settings("slrum", {}), ConfigError, "--launcher", "'slrum'", "did you mean 'slurm'"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_a_cloud_cannot_do_is_refused(row, request):
    check_row(request, *row)
