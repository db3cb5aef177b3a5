import jax.numpy as jnp
import numpy as np
import pytest

from jengine.checkpoint import load_params

from .conftest import make_meta, make_state


@pytest.fixture
def path(checkpointer, tmp_path):
    state = make_state(2.0)
    state["hook_state"]["EMAHook"]["params"]["head"][0] = jnp.full(3, 5.0)
    path = checkpointer.save(tmp_path / "epoch_1", state, make_meta())
    checkpointer.wait()
    return path


def test_parameters_of_the_same_model_match_completely(path):
    params, report = load_params(path, make_state(0.0)["params"])
    np.testing.assert_array_equal(params["backbone"]["kernel"], np.full((8, 4), 2.0))
    assert report.fits
    assert str(report) == "4 match, 0 missing, 0 unexpected, 0 mismatched"


def test_averaged_parameters_load_from_the_state_of_their_hook(path):
    params, _ = load_params(path, make_state(0.0)["params"], item="hook_state.EMAHook.params")
    np.testing.assert_array_equal(params["head"][0], [5.0, 5.0, 5.0])


def test_a_partial_load_keeps_the_models_own_values_and_reports_them(path):
    target = {
        "backbone": {"kernel": jnp.zeros((8, 5)), "bias": jnp.ones(4, jnp.bfloat16)},
        "neck": jnp.full(1, 7.0),
    }
    params, report = load_params(path, target, strict=False)
    np.testing.assert_array_equal(params["backbone"]["kernel"], np.zeros((8, 5)))
    np.testing.assert_array_equal(params["backbone"]["bias"], np.zeros(4))
    np.testing.assert_array_equal(params["neck"], [7.0])
    assert report.matched == {"backbone.bias": "backbone.bias"}
    assert report.missing == ("neck",)
    assert report.unexpected == ("head.0", "head.1")


def test_prefixes_are_renamed_by_whole_segments(path):
    target = {
        "model": {"encoder": make_state(0.0)["params"]["backbone"]},
        "head": make_state(0.0)["params"]["head"],
    }
    params, report = load_params(path, target, rename=[("backbone", "model.encoder")])
    np.testing.assert_array_equal(params["model"]["encoder"]["kernel"], np.full((8, 4), 2.0))
    assert report.matched["model.encoder.kernel"] == "backbone.kernel"


def test_an_empty_name_adds_or_removes_a_prefix(path):
    backbone, head = make_state(0.0)["params"]["backbone"], make_state(0.0)["params"]["head"]
    params, report = load_params(
        path, {"module": {"backbone": backbone, "head": head}}, rename=[("", "module")]
    )
    assert report.fits
    params, report = load_params(path, backbone, rename=[("backbone", "")], strict=False)
    np.testing.assert_array_equal(params["kernel"], np.full((8, 4), 2.0))
    assert report.unexpected == ("head.0", "head.1")


def test_float_parameters_are_cast_to_the_dtype_of_the_model_and_reported(path):
    target = make_state(0.0)["params"]
    target["head"][0] = target["head"][0].astype(jnp.bfloat16)
    params, report = load_params(path, target)
    assert params["head"][0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(params["head"][0].astype(jnp.float32), [2.0, 2.0, 2.0])
    assert report.cast == {"head.0": ("float32[3]", "bfloat16[3]")}


def test_a_long_table_is_truncated(path):
    target = {f"layer_{i}": jnp.zeros(1) for i in range(50)}
    _, report = load_params(path, target, strict=False)
    assert len(report.missing) == 50
    assert "… and 30 more" in str(report)
