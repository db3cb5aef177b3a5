import numpy as np
import pytest

from jengine.config.description import describe, flatten_description, hash_array


class Refuses(list):
    """Stand in for data that fail or take long when they are read."""

    def __iter__(self):
        raise OSError("the disk is gone")

    def __getattribute__(self, name):
        if name == "__dict__":
            raise OSError("the disk is gone")
        return super().__getattribute__(name)


class Rate:
    def __init__(self, rate, unit="s", seen=0):
        self.rate = rate
        self._unit = unit
        self.count = seen


def test_an_object_is_described_by_the_arguments_that_it_keeps():
    own = describe(Rate(0.5))
    assert own == {"type": "tests.config.test_description.Rate", "rate": 0.5, "unit": "s"}
    assert flatten_description([own])["[0].rate"] == 0.5


def test_data_that_cannot_be_read_are_described_by_their_class():
    assert describe({"data": Refuses([1])}) == {"data": "tests.config.test_description.Refuses"}


def test_a_value_that_contains_itself_is_described():
    rate = Rate(1.0)
    rate.rate = [rate]
    assert describe(rate)["rate"] == ["tests.config.test_description.Rate"]


@pytest.mark.parametrize("shape", [(7,), (1000, 300), (3, 400_000)])
def test_an_array_of_any_size_is_described_by_its_values(shape):
    array = np.zeros(shape)
    other = array.copy()
    other[0] = 1.0
    assert hash_array(array) == hash_array(array.copy())
    assert hash_array(array) != hash_array(other)
    assert hash_array(array) != hash_array(array.astype(np.float32))


def test_docstrings_and_positions_are_no_part_of_the_code_of_a_function():
    one, two = (
        'def f(x):\n    """Add one."""\n    return x + 1',
        '\n\ndef f(x):\n    """Increase x."""\n    return x + 1',
    )
    sources = [one, two, two.replace("x + 1", "x + 2")]
    codes = []
    for source in sources:
        scope = {"__name__": "mine"}
        exec(source, scope)
        codes.append(describe(scope["f"])["code"])
    assert codes[0] == codes[1] != codes[2]
