"""Gradient clipping, by PyTorch's definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.optim import SGD, AmpOptimWrapper, OptimWrapper
from tests.refusals import check_refusal

GRADS = {"w": jnp.asarray((3.0, -4.0))}


def step(clip_grad):
    wrapper = OptimWrapper(SGD(lr=1.0), clip_grad=clip_grad)
    params = {"w": jnp.zeros(2)}
    updates, state = wrapper.update(GRADS, wrapper.init(params), params)
    return updates, wrapper.metrics(state, state)


# torch.nn.utils.clip_grad_norm_, which divides by the norm plus 1e-6
@pytest.mark.parametrize(
    ("clip_grad", "delta", "norm"),
    [
        ({"max_norm": 0.2}, (-0.119999976, 0.159999968), 5.0),
        ({"max_norm": 1, "norm_type": "inf"}, (-0.7499998125, 0.99999975), 4.0),
        ({"max_norm": 1, "norm_type": 1}, (-0.42857136734, 0.57142848979), 7.0),
        # |g|_3 = (27 + 64) ** (1/3) = 4.497941
        ({"type": "norm", "max_norm": 4.497941445275415, "norm_type": 3}, (-3.0, 4.0), 4.497941445),
        ({"max_norm": 10}, (-3.0, 4.0), 5.0),
        ({"max_norm": float("inf")}, (-3.0, 4.0), 5.0),
    ],
)
def test_clip_by_norm(clip_grad, delta, norm):
    before = dict(clip_grad)
    updates, metrics = step(clip_grad)
    np.testing.assert_allclose(updates["w"], delta, rtol=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(norm)
    assert clip_grad == before


@pytest.mark.parametrize("clip_grad", [{"clip_value": 0.2}, {"type": "value", "clip_value": 0.2}])
def test_clip_by_value_works_without_a_type_and_reports_no_norm(clip_grad):
    updates, metrics = step(clip_grad)
    np.testing.assert_allclose(updates["w"], (-0.2, 0.2), rtol=1e-7)
    assert metrics == {}


def test_norm_is_over_all_parameters_and_computed_after_unscaling():
    wrapper = AmpOptimWrapper(optimizer=SGD(lr=1.0), clip_grad={"max_norm": 2.5}, loss_scale="dynamic")
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    grads = {"a": jnp.float32(3 * 65536), "b": jnp.float32(-4 * 65536)}
    updates, state = wrapper.update(grads, wrapper.init(params), params)
    assert float(wrapper.metrics(state, state)["grad_norm"]) == pytest.approx(5.0)
    np.testing.assert_allclose([updates["a"], updates["b"]], (-1.5, 2.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("clip_grad", "error", "words"),
    [
        ({}, TypeError, ["ClipByNorm", "'max_norm'"]),
        ({"type": "value"}, TypeError, ["ClipByValue", "'clip_value'"]),
        ({"type": "foo", "max_norm": 1}, ValueError, ["'norm'", "'value'", "got 'foo'"]),
        ({"max_norm": 1, "clip_value": 1}, TypeError, ["ClipByValue", "'max_norm'"]),
        ({"max_nrom": 1}, TypeError, ["'max_nrom'", "did you mean 'max_norm'"]),
        ({"max_norm": -1}, ValueError, ["`clip_grad.max_norm`", "above 0", "got -1"]),
        ({"max_norm": 0}, ValueError, ["max_norm`", "above 0", "got 0"]),  # it would stop training
        ({"clip_value": 0.0}, ValueError, ["clip_value`", "above 0", "got 0.0"]),
        ({"max_norm": True}, TypeError, ["max_norm`", "above 0", "got True"]),
        ({"norm_type": 2}, TypeError, ["ClipByNorm", "'max_norm'"]),
        ({"max_norm": 1, "norm_type": 0}, ValueError, ["norm_type`", "above 0", "'inf'", "got 0"]),
        ({"max_norm": 1, "norm_type": "two"}, ConfigError, ["norm_type`", "above 0", "'inf'", "got 'two'"]),
        ({"max_norm": 1, "error_if_nonfinite": True}, ValueError, ["error_if_nonfinite`", "got True"]),
    ],
)
def test_invalid_clip_grad(clip_grad, error, words):
    check_refusal(lambda: OptimWrapper(SGD(lr=1.0), clip_grad=clip_grad), error, *words)
