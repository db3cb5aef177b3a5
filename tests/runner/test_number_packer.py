import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.packed import unpack
from jengine.runner.hyperparams import Hyperparams
from jengine.runner.number_packer import NumberPacker


def put(value):
    return jnp.asarray(value)


def numbers_of(packed):
    return unpack(jax.tree.map(jnp.asarray, packed))


def test_numbers_come_back_as_they_were():
    numbers = {
        "lr": np.float32([1.0, 2.0]),
        "gen": {"decay": np.float32(7.0), "on": np.array(True)},
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "list": [np.float32([3.0]), np.int32(4)],
    }
    packed = NumberPacker(put)(numbers)
    assert [(array.shape, array.dtype) for array in packed.arrays] == [
        ((10,), np.float32),
        ((1,), np.bool_),
        ((1,), np.int32),
    ]
    found = numbers_of(packed)
    assert jax.tree.structure(found) == jax.tree.structure(numbers)
    for value, expected in zip(jax.tree.leaves(found), jax.tree.leaves(numbers), strict=True):
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)


def test_what_is_no_host_array_passes_by_itself():
    pack, device = NumberPacker(put), jnp.ones((2,))
    for lr in (1.0, 2.0):
        packed = pack({"lr": np.float32([lr]), "mask": device, "weak": 0.5})
        assert packed.rest == (device, 0.5)
        assert numbers_of(packed)["lr"] == lr
    assert pack({"lr": np.float32([2.0]), "mask": device, "weak": 0.25}).rest[1] == 0.25


def test_what_stands_is_sent_once_and_what_moves_never():
    sent = []

    def noted(value):
        sent.append(value.tolist())
        return jnp.asarray(value)

    pack = NumberPacker(noted)
    for i in range(6):
        packed = pack({"lr": np.float32([i]), "gen": {"count": np.int32([7])}})
        assert numbers_of(packed)["lr"] == i
        counts, rates = packed.arrays
        assert isinstance(rates, np.ndarray)
        assert isinstance(counts, jax.Array) == (i >= 3)
    assert sent == [[7]]
    assert numbers_of(pack({"lr": np.float32([5]), "gen": {"count": np.int32([8])}}))["gen"]["count"] == 8


def test_sending_a_number_compiles_nothing_again():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("jaxpr_to_mlir_module_duration") else None
    )
    step = jax.jit(lambda state, numbers: state + unpack(numbers)["lr"])
    state = jax.device_put(jnp.zeros((1,)), jax.devices()[0])
    pack = NumberPacker(put)
    state = step(state, pack({"lr": np.float32([0.5])}))
    before = len(compiled)
    kinds = set()
    for _ in range(6):
        packed = pack({"lr": np.float32([0.5])})
        kinds.add(type(packed.arrays[0]))
        state = step(state, packed)
    assert len(kinds) == 2
    assert len(compiled) == before
    assert state[0] == 3.5


def test_a_number_that_is_changed_where_it_is_is_sent_as_it_is_then():
    pack, array = NumberPacker(put), np.float32([1.0])
    for _ in range(6):
        assert numbers_of(pack({"x": array}))["x"] == 1.0
    array += 1
    assert numbers_of(pack({"x": array}))["x"] == 2.0
    array.setflags(write=False)
    for _ in range(6):
        assert numbers_of(pack({"x": array}))["x"] == 2.0


def test_a_step_that_is_still_to_run_keeps_its_numbers():
    pack = NumberPacker(put)
    first = pack({"lr": np.float32([1.0]), "decay": np.float32([3.0])})
    second = pack({"lr": np.float32([2.0]), "decay": np.float32([3.0])})
    assert numbers_of(first) == {"lr": 1.0, "decay": 3.0}
    assert numbers_of(second) == {"lr": 2.0, "decay": 3.0}


@pytest.mark.parametrize(
    "other",
    [{"x": np.float32([1.0, 2.0])}, {"x": np.int32([1])}, {"y": np.float32([1.0])}, {"x": 1.0}],
    ids=["shape", "dtype", "name", "not an array"],
)
def test_numbers_of_another_form_have_another_layout(other):
    pack = NumberPacker(put)
    first, second = pack({"x": np.float32([1.0])}), pack(other)
    assert second.layout != first.layout
    assert pack({"x": np.float32([1.0])}).layout == first.layout
    assert next(iter(numbers_of(second))) == next(iter(other))


def test_a_layout_says_what_it_holds():
    packed = NumberPacker(put)({"lr": np.float32([1.0]), "gen": {"on": np.array(True)}, "mask": jnp.ones(())})
    assert repr(packed.layout) == "gen.on bool[], lr float32[1], mask by itself"


def test_a_hyperparameter_that_is_counted_up_reaches_the_step():
    hyperparams, pack = Hyperparams(), NumberPacker(put)
    hyperparams["x"] = 1
    rows = []
    for _ in range(6):
        rows.append(dict(hyperparams))
        assert numbers_of(pack(dict(hyperparams)))["x"] == 1.0
    hyperparams["x"] += 1
    assert numbers_of(pack(dict(hyperparams)))["x"] == 2.0
    assert [row["x"] for row in rows] == [1.0] * 6  # what an iteration was planned with stays
