"""Test that a run ends with the error of the user, whatever the explainers of extras do."""

import pytest
from flax import nnx

from jengine.model import FunctionalModel, NnxModel
from tests.config.test_explain import explainers as explainers


class HalfNet(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(2, 2, rngs=rngs)
        self.layer(self.missing)


def fail(params, batch):
    raise LookupError("a mistake in the loss")


@pytest.mark.usefixtures("explainers")
def test_explainers_that_fail_do_not_replace_it(make_runner):
    model = FunctionalModel(init=lambda: {"w": 1.0}, loss=fail, predict=fail)
    with pytest.raises(LookupError, match="a mistake in the loss") as caught:
        make_runner(model=model).train()
    assert [note for note in caught.value.__notes__ if note in ("one", "two")] == ["one", "two"]


def test_a_mistake_in_the_constructor_of_a_network_is_shown(make_runner):
    with pytest.raises(AttributeError, match="missing"):
        make_runner(model=NnxModel(HalfNet, loss=lambda outputs, batch: 0.0)).train()
