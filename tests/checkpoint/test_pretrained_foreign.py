import numpy as np
import pytest

from jengine.checkpoint import load_pretrained

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
    with pytest.raises(TypeError, match="weights must be"):
        load_pretrained(torch.nn.Linear(3, 2), {"kernel": np.zeros((3, 2), np.float32)})
