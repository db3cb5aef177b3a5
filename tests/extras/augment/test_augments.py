"""MixUp, CutMix, random erasing and soft labels, against timm's formulas written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.extras.augment import CutMix, MixUp, RandomErasing, SoftLabels
from jengine.extras.augment.augments import cut_mask
from jengine.extras.augment.batch_augments import BatchAugment, build_batch_augment
from tests.refusals import check_refusal

IMAGES = np.random.RandomState(0).rand(6, 9, 7, 2).astype(np.float32)
LABELS = np.eye(6, dtype=np.float32)  # the share of an example is what is left of its label
BATCH = {"image": IMAGES, "label": LABELS}
KEYS = jax.random.split(jax.random.key(3), 40)


def timm_box(lam, height, width, row, column):
    """timm.data.mixup.rand_bbox, with the center given; and the corrected share."""
    ratio = np.sqrt(1 - lam)
    cut_h, cut_w = int(height * ratio), int(width * ratio)
    top, bottom = np.clip(row - cut_h // 2, 0, height), np.clip(row + cut_h // 2, 0, height)
    left, right = np.clip(column - cut_w // 2, 0, width), np.clip(column + cut_w // 2, 0, width)
    return top, bottom, left, right, 1 - (bottom - top) * (right - left) / (height * width)


def test_soft_labels_are_those_of_timm():
    # timm.data.mixup.one_hot: off = smoothing / C, on = 1 - smoothing + off
    labels = np.array([2, 0, 7])
    soft = SoftLabels(num_classes=4, smoothing=0.1)({"label": labels}, KEYS[0])["label"]
    expected = np.full((3, 4), 0.025, np.float32)
    expected[0, 2] = expected[1, 0] = 0.925
    np.testing.assert_allclose(soft[:2], expected[:2], rtol=1e-6)
    assert np.isnan(soft[2]).all()  # no class: the loss says so
    with pytest.raises(ValueError, match=r"`SoftLabels.label` must be class indices, got 'label', f32\[6,6\]"):
        SoftLabels(num_classes=6)(BATCH, KEYS[0])


@pytest.mark.parametrize("mode", ["batch", "elem"])
def test_mixup_is_that_of_timm(mode):
    mixed = jax.jit(MixUp(alpha=0.8, mode=mode))(BATCH, KEYS[0])
    lam = np.diag(mixed["label"])
    assert len(set(lam.tolist())) == (1 if mode == "batch" else 6)
    # x * lam + x.flip(0) * (1 - lam), and the same for the targets
    lam_image = lam[:, None, None, None]
    np.testing.assert_allclose(mixed["image"], IMAGES * lam_image + IMAGES[::-1] * (1 - lam_image), rtol=1e-5)
    np.testing.assert_allclose(mixed["label"], LABELS * lam[:, None] + LABELS[::-1] * (1 - lam[:, None]), rtol=1e-5)


def test_rectangles_of_cutmix_are_those_of_timm():
    random = np.random.RandomState(0)
    shares, centers = random.rand(200).astype(np.float32), random.randint(0, [9, 7], (200, 2))
    masks = np.asarray(cut_mask(jnp.asarray(shares), jnp.asarray(centers.T), 9, 7))
    for share, (row, column), mask in zip(shares, centers, masks, strict=True):
        top, bottom, left, right, corrected = timm_box(share, 9, 7, row, column)
        expected = np.zeros((9, 7), bool)
        expected[top:bottom, left:right] = True
        np.testing.assert_array_equal(mask, expected)
        assert 1 - mask.mean() == pytest.approx(corrected)


@pytest.mark.parametrize("mode", ["batch", "elem"])
def test_cutmix_mixes_labels_by_the_area_that_is_left(mode):
    mixed = jax.jit(CutMix(mode=mode))(BATCH, KEYS[1])
    is_own, is_other = mixed["image"] == IMAGES, mixed["image"] == IMAGES[::-1]
    assert (is_own | is_other).all()
    share = is_own.all(axis=-1).mean(axis=(1, 2))
    assert len(set(share.tolist())) > (mode == "elem")
    np.testing.assert_allclose(np.diag(mixed["label"]), share, rtol=1e-6)
    np.testing.assert_allclose(mixed["label"].sum(axis=1), 1, rtol=1e-6)


def test_the_share_is_drawn_from_a_beta_distribution_with_the_given_probability():
    mix = jax.jit(jax.vmap(lambda rng: MixUp(alpha=0.4, prob=0.75)(BATCH, rng)["label"][0, 0]))
    shares = np.asarray(mix(jax.random.split(jax.random.key(0), 4000)))
    assert np.mean(shares == 1) == pytest.approx(0.25, abs=0.02)
    drawn = shares[shares < 1]
    assert drawn.mean() == pytest.approx(0.5, abs=0.03)
    assert drawn.var() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), abs=0.01)  # of Beta(0.4, 0.4)


@pytest.mark.parametrize("fill", ["zeros", "color", "pixels"])
def test_erased_rectangles_have_the_area_and_ratio_of_the_settings(fill):
    images = np.full((400, 32, 24, 3), 9.0, np.float32)  # no noise is as large
    erase = RandomErasing(prob=0.5, area=(0.1, 0.2), aspect_ratio=(0.5, 2.0), fill=fill)
    erased = np.asarray(jax.jit(erase)({"image": images}, KEYS[0])["image"])
    masks = (erased != 9).any(axis=-1)
    hit = masks.any(axis=(1, 2))
    assert hit.mean() == pytest.approx(0.5, abs=0.08)
    heights, widths = masks[hit].any(axis=2).sum(axis=1), masks[hit].any(axis=1).sum(axis=1)
    np.testing.assert_array_equal(heights * widths, masks[hit].sum(axis=(1, 2)))  # rectangles
    assert 0.1 - 0.02 < (heights * widths / (32 * 24)).min() < 0.12
    assert 0.18 < (heights * widths / (32 * 24)).max() < 0.2 + 0.02
    assert 0.4 < (heights / widths).min() < 0.65
    assert 1.6 < (heights / widths).max() < 2.4
    assert masks[:, 0].any()
    assert masks[:, -1].any()
    assert masks[:, :, 0].any()
    assert masks[:, :, -1].any()
    noise = erased[masks]
    expected_values = {"zeros": 1, "color": 3 * hit.sum(), "pixels": noise.size}[fill]
    assert len(np.unique(noise)) == pytest.approx(expected_values, rel=0.01)
    if fill != "zeros":
        assert noise.mean() == pytest.approx(0, abs=0.15)
        assert noise.std() == pytest.approx(1, abs=0.1)


def test_a_rectangle_that_never_fits_erases_nothing():
    erase = RandomErasing(prob=1.0, area=(1.0, 1.0))
    np.testing.assert_array_equal(erase(BATCH, KEYS[0])["image"], IMAGES)
    with pytest.raises(ValueError, match=r"`RandomErasing.area` must be \(least, greatest\), got \(0.5, 0.1\)"):
        RandomErasing(area=(0.5, 0.1))


def test_entries_of_a_tuple_are_mixed_by_index():
    mixed = MixUp(image=0, label=1)((IMAGES, LABELS, "kept"), KEYS[0])
    np.testing.assert_array_equal(mixed[0], MixUp()(BATCH, KEYS[0])["image"])
    assert mixed[2] == "kept"


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({**BATCH, "label": np.arange(6)}, ["`MixUp.label`", "'SoftLabels'"]),
        (
            {**BATCH, "image": IMAGES[..., 0]},
            ["`MixUp.image`", "[B, H, W, C]", "got 'image', f32[6,9,7]"],
        ),
        ({**BATCH, "image": IMAGES.astype(np.uint8)}, ["integers first"]),
    ],
)
def test_batches_that_cannot_be_mixed_are_refused(batch, words):
    check_refusal(lambda: MixUp()(batch, KEYS[0]), ValueError, *words)


def test_one_of_several_is_drawn_and_must_keep_the_form():
    mix = build_batch_augment(dict(augments=[dict(type="MixUp", alpha=1.0), dict(type="CutMix")], probs=[0.5, 0.3]))
    draw = jax.jit(jax.vmap(lambda rng: mix(BATCH, rng)["image"]))
    images = np.asarray(draw(jax.random.split(jax.random.key(0), 200)))
    is_cut = (images == IMAGES) | (images == IMAGES[::-1])
    assert np.mean(is_cut.all(axis=(1, 2, 3, 4))) == pytest.approx(0.5, abs=0.1)  # CutMix, or nothing
    soft = BatchAugment([SoftLabels(num_classes=6)], [0.5])
    with pytest.raises(ValueError, match="'label' .* a BatchAugmentHook before it may change them"):
        soft({"label": np.arange(6)}, KEYS[0])
