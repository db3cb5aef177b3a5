
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import DataLoader
from jengine.extras.selfsup import (
    extract_features,
    knn_accuracy,
    projection_accuracy,
    random_view,
)
from jengine.model import FunctionalModel

NO_CHANGE = dict(shift=0, rotate=0, scale=0, contrast=0, noise=0)


@pytest.fixture
def images():
    return jnp.asarray(np.random.RandomState(0).rand(4, 5, 6, 2).astype(np.float32))


def test_with_zero_strengths_a_view_is_the_image(images):
    np.testing.assert_allclose(random_view(jax.random.key(0), images, **NO_CHANGE), images, atol=1e-6)


def test_views_differ_between_keys_and_between_images(images):
    repeated = jnp.broadcast_to(images[:1], images.shape)
    first, second = (random_view(jax.random.key(seed), repeated) for seed in (0, 1))
    assert first.shape == images.shape
    assert float(abs(first - second).max()) > 0.1
    assert float(abs(first[0] - first[1]).max()) > 0.1
    np.testing.assert_array_equal(first, random_view(jax.random.key(0), repeated))


def test_a_shift_interpolates_and_fills_with_zeros():
    ramp = jnp.arange(1.0, 6.0).reshape(1, 1, 5, 1)
    # in an image of one row a vertical shift mixes in zeros everywhere, so look at the middle of five equal rows
    image = jnp.broadcast_to(ramp, (1, 5, 5, 1))
    view = np.asarray(random_view(jax.random.key(3), image, **{**NO_CHANGE, "shift": 1.0}))[0, :, :, 0]
    middle = view[2]
    np.testing.assert_allclose(np.diff(middle[1:4]), 1.0, atol=1e-5)  # a ramp stays a ramp
    assert abs(middle[2] - 3.0) <= 1.0


def test_a_change_of_contrast_multiplies_all_pixels_of_an_image(images):
    ratio = random_view(jax.random.key(0), images, **{**NO_CHANGE, "contrast": 0.3}) / images
    np.testing.assert_allclose(ratio, jnp.broadcast_to(ratio[:, :1, :1, :1], ratio.shape), rtol=1e-5)
    assert 0.7 <= float(ratio.min()) < float(ratio.max()) <= 1.3


def test_noise_has_its_standard_deviation(images):
    difference = random_view(jax.random.key(0), images, **{**NO_CHANGE, "noise": 0.05}) - images
    assert float(difference.std()) == pytest.approx(0.05, rel=0.15)  # 240 values: a standard error of 5 %


def test_features_are_in_order_and_without_padding():
    data = [{"x": np.full((1, 2), i, np.float32)} for i in range(5)]
    model = FunctionalModel(
        init=lambda: {"w": jnp.full((), 2.0)},
        loss=lambda params, batch: params["w"],
        predict=lambda params, batch: {"features": params["w"] * batch["x"]},
    )
    features = extract_features(model, {"w": jnp.full((), 2.0)}, {}, DataLoader(data, 2))
    np.testing.assert_array_equal(features, np.repeat(2.0 * np.arange(5)[:, None], 2, axis=1))


def test_neighbors_vote():
    features = np.array([[0.0], [0.1], [5.0], [5.1], [5.2]])
    labels = np.array([0, 0, 1, 1, 1])
    test_features = np.array([[0.05], [4.0], [5.05], [0.0]])
    assert knn_accuracy(features, labels, test_features, np.array([0, 1, 1, 1]), k=1) == 0.75
    assert knn_accuracy(features, labels, test_features, np.array([1, 1, 1, 1]), k=5) == 1.0


def test_the_accuracy_of_projections_is_a_mean_over_matrices():
    rng = np.random.RandomState(0)
    samples, labels = rng.randn(40, 3, 2), np.arange(40) % 2
    samples[labels == 1] += 20.0
    accuracy = projection_accuracy(samples[:30], labels[:30], samples[30:], labels[30:], size=4)
    assert accuracy == 1.0
    shuffled = rng.permutation(labels)
    single = [
        knn_accuracy(
            samples[:30].reshape(30, -1) @ matrix, shuffled[:30], samples[30:].reshape(10, -1) @ matrix, shuffled[30:]
        )
        for matrix in (np.random.RandomState(seed).randn(6, 4) for seed in range(3))
    ]
    mean = projection_accuracy(samples[:30], shuffled[:30], samples[30:], shuffled[30:], size=4, repeats=3)
    assert mean == pytest.approx(np.mean(single))
    assert len(set(single)) > 1
