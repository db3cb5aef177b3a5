import jax.numpy as jnp
import optax
import pytest

from jengine.extras.diagnose.masks import explain_masks

PARAMS = {"w": jnp.ones(2)}


def error_of(tx):
    with pytest.raises(ValueError) as caught:
        tx.init(PARAMS)
    return caught.value


def test_a_mask_of_another_structure_is_explained():
    error = error_of(optax.masked(optax.trace(0.9), {"other": True}))
    assert "must be a function of parameters" in explain_masks(error, {})


def test_an_error_of_the_masked_transformation_is_not_about_the_mask():
    def fail(params):
        raise ValueError("no momentum for these parameters")

    broken = optax.GradientTransformation(fail, optax.identity().update)
    for tx in (optax.masked(broken, {"w": True}), optax.multi_transform({"a": broken}, {"w": "a"})):
        assert explain_masks(error_of(tx), {}) is None
