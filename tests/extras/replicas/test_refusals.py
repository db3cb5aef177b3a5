"""What replicas refuse: a call, its error, and the words that must be in the message."""

import pytest

from jengine.config.errors import ConfigError
from tests.parallel.conftest import make_loader
from tests.refusals import check_row


def replicas(make_run, batch_size=16, **settings):
    return make_run(dict(type="DataParallel", **settings), train_dataloader=make_loader(batch_size))


REFUSED = {
    "a misspelt implementation": (lambda make_run: replicas(make_run, impl="pmapp"), ConfigError, "impl`", "'shard_map' or 'pmap'", "got 'pmapp'"),
    "more devices than there are": (lambda make_run: replicas(make_run, devices=16), ConfigError, "devices", "at most 8", "got 16"),
    "a batch of 12 on 8 devices": (lambda make_run: replicas(make_run, 12, devices=8).train(), ValueError, "8 times"),
    "a batch of 4 on 4 replicas of 2 devices": (lambda make_run: replicas(make_run, 4, mesh=dict(fsdp=2)).train(), ValueError, "8 times", "dimension size is 4", "(4, 8)"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_replicated_is_refused(row, request):
    check_row(request, *row)
