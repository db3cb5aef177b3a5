import types

import pytest

from jengine.logging import MessageHub, PhaseTimer


@pytest.fixture
def fake_runner():
    """Return a fake Runner with the attributes that small hooks use, which computes nothing."""
    loop = types.SimpleNamespace(dataloader=range(10), by_epoch=True, epoch_length=10, repeats_data=False)
    return types.SimpleNamespace(
        message_hub=MessageHub("fake"), iter=0, epoch=0, max_iters=10, max_epochs=1, param_schedulers=None,
        train_loop=loop, val_loop=loop, test_loop=loop, log_lines=[], phase_timer=PhaseTimer(),
    )  # fmt: skip
