import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.contrib.selfsup import compare_features, extract_features, knn_accuracy, projection_accuracy, random_view
from jengine.data import DataLoader
from jengine.model import FunctionalModel

STILL = dict(shift=0, rotate=0, scale=0, contrast=0, noise=0)


@pytest.fixture
def images():
    return jnp.asarray(np.random.RandomState(0).rand(4, 5, 6, 2).astype(np.float32))


def test_without_strength_a_view_is_the_image(images):
    np.testing.assert_allclose(random_view(jax.random.key(0), images, **STILL), images, atol=1e-6)


def test_views_differ_from_key_to_key_and_from_image_to_image(images):
    same = jnp.broadcast_to(images[:1], images.shape)
    first, second = (random_view(jax.random.key(seed), same) for seed in (0, 1))
    assert first.shape == images.shape
    assert float(abs(first - second).max()) > 0.1
    assert float(abs(first[0] - first[1]).max()) > 0.1
    np.testing.assert_array_equal(first, random_view(jax.random.key(0), same))


def test_a_move_interpolates_and_brings_zeros_in():
    row = jnp.arange(1.0, 6.0).reshape(1, 1, 5, 1)
    # along the axis of one pixel any move within one brings in zeros too, so compare with what is left of it
    tall = jnp.broadcast_to(row, (1, 5, 5, 1))
    view = np.asarray(random_view(jax.random.key(3), tall, **{**STILL, "shift": 1.0}))[0, :, :, 0]
    inner = view[2]
    step = np.diff(inner[1:4])
    np.testing.assert_allclose(step, 1.0, atol=1e-5)  # a ramp stays a ramp
    assert abs(inner[2] - 3.0) <= 1.0


def test_a_change_of_contrast_multiplies(images):
    ratio = random_view(jax.random.key(0), images, **{**STILL, "contrast": 0.3}) / images
    np.testing.assert_allclose(ratio, jnp.broadcast_to(ratio[:, :1, :1, :1], ratio.shape), rtol=1e-5)
    assert 0.7 <= float(ratio.min()) < float(ratio.max()) <= 1.3


def test_noise_has_its_deviation(images):
    difference = random_view(jax.random.key(0), images, **{**STILL, "noise": 0.05}) - images
    assert float(difference.std()) == pytest.approx(0.05, rel=0.15)  # 240 numbers: a standard error of 5 %


def test_features_come_in_order_and_without_padding():
    data = [{"x": np.full((1, 2), i, np.float32)} for i in range(5)]
    model = FunctionalModel(
        init=lambda: {"w": jnp.full((), 2.0)},
        loss=lambda params, batch: params["w"],
        predict=lambda params, batch: {"features": params["w"] * batch["x"]},
    )
    found = extract_features(model, {"w": jnp.full((), 2.0)}, {}, DataLoader(data, 2))
    np.testing.assert_array_equal(found, np.repeat(2.0 * np.arange(5)[:, None], 2, axis=1))


def test_neighbours_vote():
    known = np.array([[0.0], [0.1], [5.0], [5.1], [5.2]])
    labels = np.array([0, 0, 1, 1, 1])
    asked = np.array([[0.05], [4.0], [5.05], [0.0]])
    assert knn_accuracy(known, labels, asked, np.array([0, 1, 1, 1]), k=1) == 0.75
    assert knn_accuracy(known, labels, asked, np.array([1, 1, 1, 1]), k=5) == 1.0


def test_projections_are_judged_by_their_mean_over_several():
    rng = np.random.RandomState(0)
    samples, labels = rng.randn(40, 3, 2), np.arange(40) % 2
    samples[labels == 1] += 20.0
    accuracy = projection_accuracy(samples[:30], labels[:30], samples[30:], labels[30:], size=4)
    assert accuracy == 1.0
    mixed = rng.permutation(labels)
    single = [
        knn_accuracy(
            samples[:30].reshape(30, -1) @ matrix, mixed[:30], samples[30:].reshape(10, -1) @ matrix, mixed[30:]
        )
        for matrix in (np.random.RandomState(seed).randn(6, 4) for seed in range(3))
    ]
    found = projection_accuracy(samples[:30], mixed[:30], samples[30:], mixed[30:], size=4, repeats=3)
    assert found == pytest.approx(np.mean(single))
    assert len(set(single)) > 1


def test_comparing_features_needs_a_trained_runner():
    with pytest.raises(ValueError, match="the runner must be trained"):
        compare_features(types.SimpleNamespace(state=None), train=None, test=None)
