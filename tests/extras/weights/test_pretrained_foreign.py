import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.extras.weights import load_pretrained, open_weights
from jengine.extras.weights.optimizer_state import load_optimizer
from tests.refusals import check_refusal

pytestmark = pytest.mark.foreign


def test_a_state_dict_of_pytorch_is_loaded_from_memory():
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    net[1].running_mean.fill_(4.0)
    target = {
        "0": {"kernel": np.zeros((3, 2), np.float32), "bias": np.zeros(2, np.float32)},
        "1": {"scale": np.zeros(2, np.float32), "bias": np.ones(2, np.float32)},
    }
    state = {"1": {"mean": np.zeros(2, np.float32), "var": np.zeros(2, np.float32)}}
    params, state, report = load_pretrained(net.state_dict(), target, state)
    np.testing.assert_array_equal(params["0"]["kernel"], net[0].weight.detach().numpy().T)
    np.testing.assert_array_equal(params["1"]["scale"], np.ones(2))
    np.testing.assert_array_equal(state["1"]["mean"], np.full(2, 4.0))
    assert report.ignored == ("1.num_batches_tracked",)


def test_the_module_itself_is_refused():
    torch = pytest.importorskip("torch")
    target = {"kernel": np.zeros((3, 2), np.float32)}
    check_refusal(lambda: load_pretrained(torch.nn.Linear(3, 2), target), TypeError, "weights must be", "Linear")


def test_modules_and_optimizer_states_of_equinox_files_are_loaded(tmp_path):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    fresh = eqx.filter(eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(1)), eqx.is_array)
    eqx.tree_serialise_leaves(tmp_path / "mlp.eqx", model)
    params, _, report = load_pretrained(tmp_path / "mlp.eqx", fresh)
    assert report.fits
    jax.tree.map(np.testing.assert_array_equal, params, eqx.filter(model, eqx.is_array))
    tx = optax.adamw(0.1)
    state = tx.init(eqx.filter(model, eqx.is_array))
    state = (state[0]._replace(count=state[0].count + 7, mu=jax.tree.map(jnp.ones_like, state[0].mu)), *state[1:])
    eqx.tree_serialise_leaves(tmp_path / "both.eqx", (model, state))
    source = open_weights(tmp_path / "both.eqx", structure=(model, state))
    params, _, report = load_pretrained(source, fresh, item="0")
    jax.tree.map(np.testing.assert_array_equal, params, eqx.filter(model, eqx.is_array))
    restored, found = load_optimizer(source, optax.adam(0.1).init(fresh), list(report.matched), item="0")
    jax.tree.map(np.testing.assert_array_equal, restored[0], state[0])
    assert found.step == 7
