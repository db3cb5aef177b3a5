"""What augmentations, images and further hooks refuse: a call, its error, and the words that must be in the message."""

import jax.numpy as jnp
import pytest

from jengine.config import ConfigError
from jengine.extras.augment import ConcatDataset, ImageFolder, LoadImage, SwitchedLoss, read_image
from jengine.extras.diagnose import ProfilerHook
from jengine.extras.drawing import NaiveVisualizationHook
from jengine.extras.serving import BaseTTAModel
from jengine.model import FunctionalModel
from tests.refusals import check_row
from tests.runner_fixture import QuickRunner


@pytest.fixture
def images(tmp_path):
    """A directory of files, some of which are no images."""
    for name, content in (("cat/1.png", b"not an image"), ("dog/1.bin", b""), ("flat/1.png", b"")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def average(outputs, batch):
    return outputs


def model():
    return FunctionalModel(lambda: {"w": jnp.zeros(())}, lambda params, batch: params["w"])


def warm_up(name):
    return dict(type="WarmupParamHook", param_name=name, value=0.5, warmup_epochs=1)


REFUSED = {
    # images
    "a directory of nothing": (lambda tmp_path: ImageFolder(str(tmp_path / "none")), FileNotFoundError, "`root`", "directory", "none"),
    "images without classes": (lambda images: ImageFolder(str(images / "flat")), ConfigError, "directory for each class", "flat", "1.png"),
    "a class without images": (lambda images: ImageFolder(str(images)), ConfigError, "images", "none in", "/dog"),
    "a file that is no image": (lambda images: read_image(str(images / "cat" / "1.png")), ValueError, "cat/1.png", "identify"),
    "an image that is missing": (lambda images: read_image(str(images / "cat" / "2.png")), FileNotFoundError, "2.png"),
    "a URL of nothing": (lambda: ImageFolder("memory://none/images"), FileNotFoundError, "`root`", "directory", "memory://none/images"),
    "an image that is missing at a URL": (lambda: read_image("memory://none/2.png"), FileNotFoundError, "2.png"),
    "a sample without its path": (lambda: LoadImage(path="file")({"img_path": "a.png"}), ConfigError, "`LoadImage.path`", "'file'"),
    "a path for a sample": (lambda: LoadImage()("cat/a.png"), ConfigError, "'img_path'", "'cat/a.png'"),
    "a backend of MMEngine": (lambda: LoadImage(backend_args=dict(backend="lmdb")), ConfigError, "`backend_args`", "backend=", "'lmdb'"),
    "a number as a dataset": (lambda: ConcatDataset([0]), TypeError, "`datasets`", "configs", "got 0"),
    # hooks
    "a picture of no image": (lambda: NaiveVisualizationHook().after_test_iter(None, 0, data_batch={"x": 1}), KeyError, "'image'", "x int"),
    "a profile longer than the run": (
        lambda tmp_path: QuickRunner(tmp_path / "run", [ProfilerHook(by_epoch=False, profile_times=13)], epochs=3).train(), ValueError, "12 iterations", "got 13",
    ),
    "a switched loss without its hook": (lambda: SwitchedLoss([average, average])(jnp.ones(()), {}, {}), KeyError, "`hyperparams`", "'loss_index'", "SwitchRecipeHook", "`loss`"),
    "one loss to switch": (lambda: SwitchedLoss([average]), ValueError, "two or more", "got 1"),
    "a warm-up of the learning rate": (lambda make_runner: make_runner(custom_hooks=[warm_up("learning_rate")]).train(), ValueError, "optimizer", "'learning_rate'"),
    "an augmentation of nothing": (lambda: BaseTTAModel(model()).predict({}, {}, {}), NotImplementedError, "`augment(batch)`"),
    "a merge of nothing": (lambda: BaseTTAModel(model()).merge_preds([]), NotImplementedError, "`merge_preds(predictions)`"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_augmented_is_refused(row, request):
    check_row(request, *row)
