import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config import MODELS
from jengine.data import Pipeline
from jengine.extras.augment import BatchNormalize, Normalize, Pad
from jengine.extras.augment.image_steps import normalize
from jengine.extras.networks import SmallCNN
from jengine.model import FunctionalModel, LinenModel, PreprocessedModel, get_model

IMAGE = np.random.RandomState(0).randint(0, 256, (5, 6, 3), np.uint8)
MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]


@pytest.mark.parametrize("bgr_to_rgb", [False, True])
def test_images_are_normalized_as_by_mmcv(bgr_to_rgb):
    # mmcv.imnormalize: cvtColor if to_rgb, subtract mean, multiply by 1 / std
    expected = ((IMAGE[..., ::-1] if bgr_to_rgb else IMAGE).astype(np.float32) - MEAN) / STD
    settings = dict(mean=MEAN, std=STD, bgr_to_rgb=bgr_to_rgb)
    sample = Normalize(**settings)({"image": IMAGE, "label": 3})
    np.testing.assert_allclose(sample["image"], expected, rtol=1e-5, atol=1e-6)
    assert sample["label"] == 3
    assert sample["image"].dtype == np.float32
    batch = jax.jit(BatchNormalize(**settings))({"image": IMAGE[None]})
    np.testing.assert_allclose(batch["image"][0], expected, rtol=1e-5, atol=1e-6)


def test_images_are_padded_at_the_bottom_and_on_the_right():
    padded = Pad(size_divisor=4, pad_val=7)({"image": IMAGE})["image"]
    assert padded.shape == (8, 8, 3)
    np.testing.assert_array_equal(padded[:5, :6], IMAGE)
    assert (padded[5:] == 7).all()
    assert (padded[:, 6:] == 7).all()
    pipeline = Pipeline([dict(type="Normalize", mean=0, std=1, image=0), dict(type="Pad", size=[6, 6], image=0)])
    assert pipeline((IMAGE, "name"))[0].shape == (6, 6, 3)
    with pytest.raises(ValueError, match=r"`Pad.size` must be at least that of each image, \(5, 6\), got \(4, 8\)"):
        Pad(size=(4, 8))({"image": IMAGE})
    with pytest.raises(ValueError, match="one of size and size_divisor must be given, got None and None"):
        Pad()
    with pytest.raises(ValueError, match="one number for each of the 3 channels"):
        normalize(IMAGE, [1, 2], 1, False)


def test_a_model_gets_its_steps_in_training_and_prediction():
    inner = FunctionalModel(
        init=lambda rng, batch: {"w": jnp.ones(batch["image"].shape[-1])},
        loss=lambda params, batch: {"loss": (batch["image"] * params["w"]).sum(axis=(1, 2, 3))},
        predict=lambda params, batch: batch["image"][:, 0, 0],
    )
    model = MODELS.build(
        dict(
            type="PreprocessedModel",
            model=inner,
            steps=[lambda batch: {"image": batch["image"][:, :2]}, dict(type="BatchNormalize", mean=100, std=2)],
        )
    )
    batch = {"image": np.full((4, 3, 3, 2), 110, np.uint8)}
    params, state = model.init(jax.random.key(0), batch)
    losses, _ = model.loss(params, state, batch, rng=jax.random.key(0), hyperparams={})
    np.testing.assert_allclose(losses["loss"], [5.0 * 2 * 3 * 2] * 4)
    np.testing.assert_allclose(model.predict(params, state, batch), np.full((4, 2), 5.0))
    assert get_model(model) is inner
    table = PreprocessedModel(LinenModel(SmallCNN(widths=(2,)), loss=len), [lambda b: {"image": b["image"][..., :1]}])
    assert "float32[4,3,3,1]" in table.tabulate({"image": np.zeros((4, 3, 3, 2), np.float32)})
