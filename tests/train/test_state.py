import jax
import jax.numpy as jnp

from jengine.train import TrainState

STATE = TrainState(
    step=jnp.int32(3), params={"w": jnp.ones((2, 1000)), "b": jnp.ones(2)}, model_state={}, opt_state=(jnp.zeros(4), ()),
    hook_state={}, rng=jnp.zeros(2, jnp.uint32),
)  # fmt: skip
TEXT = "TrainState(step=3, params=2,002 in 2 arrays, model_state=0 in 0 arrays, opt_state=4 in 1 arrays, hook_state=0 in 0 arrays)"


def test_a_state_is_described_by_its_sizes_also_without_values():
    assert repr(STATE) == TEXT
    unknown = TEXT.replace("step=3", "step=?")
    assert repr(jax.eval_shape(lambda: STATE)) == unknown
    traced = []
    jax.eval_shape(lambda state: traced.append(repr(state)), STATE)
    assert traced == [unknown]


def test_a_donated_state_can_be_shown():
    state = jax.tree.map(jnp.copy, STATE)
    jax.tree.map(lambda x: x.delete(), state)
    assert repr(state) == TEXT.replace("step=3", "step=?")
