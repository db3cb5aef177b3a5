import jax
import jax.numpy as jnp
import numpy as np

from jengine.runner.hyperparams import Hyperparams
from jengine.runner.standing_numbers import StandingNumbers


def test_what_stands_is_sent_once_and_what_moves_never():
    sent = []

    def put(value):
        sent.append(float(value[0]))
        return jnp.asarray(value)

    numbers = StandingNumbers(put)
    for i in range(6):
        out = numbers({"lr": np.float32([i]), "gen": {"decay": np.float32([7.0])}, "list": [np.float32(1)]})
        assert out["lr"][0] == i
        assert out["gen"]["decay"][0] == 7.0
        assert isinstance(out["lr"], np.ndarray)
        assert isinstance(out["gen"]["decay"], jax.Array) == (i >= 3)
        assert out["list"] == [1.0]
    assert sent == [7.0]
    assert numbers({"gen": {"decay": np.float32([8.0])}})["gen"]["decay"][0] == 8.0


def test_sending_a_number_compiles_nothing_again():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("jaxpr_to_mlir_module_duration") else None
    )
    step = jax.jit(lambda state, hp: state + hp["lr"])
    state = jax.device_put(jnp.zeros((1,)), jax.devices()[0])
    numbers = StandingNumbers(jnp.asarray)
    state = step(state, numbers({"lr": np.float32([0.5])}))
    before = len(compiled)
    kinds = set()
    for _ in range(6):
        hp = numbers({"lr": np.float32([0.5])})
        kinds.add(type(hp["lr"]))
        state = step(state, hp)
    assert len(kinds) == 2
    assert len(compiled) == before
    assert state[0] == 3.5


def test_a_number_that_is_changed_where_it_is_is_sent_as_it_is_then():
    numbers, array = StandingNumbers(jnp.asarray), np.float32([1.0])
    for _ in range(6):
        assert numbers({"x": array})["x"][0] == 1.0
    array += 1
    assert numbers({"x": array})["x"][0] == 2.0
    array.setflags(write=False)
    for _ in range(6):
        assert numbers({"x": array})["x"][0] == 2.0


def test_a_hyperparameter_that_is_counted_up_reaches_the_step():
    hyperparams, numbers = Hyperparams(), StandingNumbers(jnp.asarray)
    hyperparams["x"] = 1
    rows = []
    for _ in range(6):
        rows.append(dict(hyperparams))
        assert numbers(hyperparams)["x"] == 1.0
    hyperparams["x"] += 1
    assert numbers(hyperparams)["x"] == 2.0
    assert [row["x"] for row in rows] == [1.0] * 6  # what an iteration was planned with stays
