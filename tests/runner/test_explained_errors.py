"""Test that a run ends with the error of the user, whatever the explainers of extras do."""

import pytest

from jengine.model import FunctionalModel
from tests.config.test_explain import explainers as explainers


def fail(params, batch):
    raise LookupError("a mistake in the loss")


@pytest.mark.usefixtures("explainers")
def test_explainers_that_fail_do_not_replace_it(make_runner):
    model = FunctionalModel(init=lambda: {"w": 1.0}, loss=fail, predict=fail)
    runner = make_runner(model=model)
    with pytest.raises(LookupError, match="a mistake in the loss") as caught:
        runner.train()
    assert [note for note in caught.value.__notes__ if note in ("one", "two")] == ["one", "two"]
    assert runner.iter == 0
