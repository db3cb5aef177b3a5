import dataclasses
import functools

import numpy as np
import optax
import pytest
from flax import nnx

from jengine.config.annotations import checked
from jengine.config.description import Unwritable, describe, flatten_description, hash_array
from jengine.hooks import Hook
from jengine.model import FunctionalModel

HERE = "tests.config.test_description"


@checked
class Rate:
    def __init__(self, rate, unit="s", **others):
        self.inverse = 1 / rate


class HalfRate(Rate):
    def __init__(self):
        super().__init__(0.5)


class Twice(Rate):
    def __init__(self, rate):
        super().__init__(2 * rate)


@dataclasses.dataclass
class Size:
    width: int = 1
    height: int = 1


class Halves(Hook):
    def __init__(self, factor):
        self.rate = (factor,)


class Unknown:
    def __init__(self, value):
        self.value = value


def scaled(factor):
    return lambda x: factor * x


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Rate(0.5), {"type": f"{HERE}.Rate", "rate": 0.5}),
        (Rate(2, "h", precise=True), {"type": f"{HERE}.Rate", "rate": 2, "unit": "h", "precise": True}),
        (HalfRate(), {"type": f"{HERE}.HalfRate"}),
        (Size(height=3), {"type": f"{HERE}.Size", "height": 3}),
        (Halves(Size(2)), {"type": f"{HERE}.Halves", "factor": {"type": f"{HERE}.Size", "width": 2}}),
        (functools.partial(max, key=abs), {"type": "builtins.max", "key": "builtins.abs"}),
        (FunctionalModel(dict, loss=max), {"type": "jengine.model.FunctionalModel", "init": "builtins.dict", "loss": "builtins.max"}),
    ],
)  # fmt: skip
def test_an_object_is_described_by_the_arguments_of_its_constructor(value, expected):
    assert describe({"items": [value]}) == {"items": [expected]}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Twice(1), "Twice"),
        (Unknown(1), "Unknown"),
        (np.zeros(2000), "ndarray"),
        (list(range(2000)), "list of 2,000 items"),
        (scaled(2), "function scaled.<locals>.<lambda>"),
        (functools.partial(max, 1), "functools.partial with positional arguments"),
        (optax.adam(1e-3), "GradientTransformationExtraArgs"),
        (nnx.Linear(1, 1, rngs=nnx.Rngs(0)), "Linear"),
    ],
)
def test_what_a_config_cannot_have_says_what_it_is(value, kind):
    described = describe([value])[0]
    assert isinstance(described, Unwritable)
    assert described.kind == kind


def test_an_attribute_that_was_set_on_an_object_later_is_not_lost_in_silence():
    model = FunctionalModel(init=dict, loss=max)
    model.loss_lambda = 0.5
    assert describe(model).kind == "FunctionalModel with 'loss_lambda' set later"


def test_what_a_config_cannot_have_is_compared_by_its_content():
    one, two = (flatten_description(describe({"loss": scaled(factor)})) for factor in (1, 2))
    assert one == {"loss": "<function scaled.<locals>.<lambda>>", "loss.factor": 1}
    assert two == {**one, "loss.factor": 2}
    arrays = [np.arange(5000), np.arange(5000) + (np.arange(5000) == 2500)]
    first, second = (flatten_description(describe({"x": array}))["x"] for array in arrays)
    assert first.startswith("<ndarray int64[5000] ")
    assert first != second


def test_a_function_that_closes_over_itself_is_described():
    def again(x):
        return again(x)

    assert list(flatten_description(describe(again), "call")) == ["call", "call.again"]


@pytest.mark.parametrize("shape", [(7,), (1000, 300), (3, 400_000)])
def test_an_array_of_any_size_is_described_by_its_values(shape):
    array = np.zeros(shape)
    other = array.copy()
    other[0] = 1.0
    assert hash_array(array) == hash_array(array.copy())
    assert hash_array(array) != hash_array(other)
    assert hash_array(array) != hash_array(array.astype(np.float32))
