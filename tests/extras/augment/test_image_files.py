"""Images in files on a disk and at URLs, as samples of classification, detection and segmentation."""

import contextlib
import io
import json

import flax.linen as nn
import fsspec
import numpy as np
import pytest

from jengine import Runner
from jengine.config.storage import write_bytes
from jengine.data import DataLoader
from jengine.extras.augment import BaseDataset, ImageFolder, LoadImage
from jengine.model import CrossEntropy, LinenModel

Image = pytest.importorskip("PIL.Image")
COLORS = {"blue": (0, 0, 255), "red": (255, 0, 0)}


def encode_image(pixels, **options):
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8), **options).save(file, "PNG")
    return file.getvalue()


def write(path, content):
    with fsspec.open(path, "wb", auto_mkdir=True) as file:
        file.write(content)


@pytest.fixture(params=["disk", "memory", "gs_bucket"])
def root(request, tmp_path):
    """A place for images: a directory, or a URL."""
    if request.param == "gs_bucket":
        return f"{request.getfixturevalue('gs_bucket')}/images"
    return f"memory://{tmp_path.name}/images" if request.param == "memory" else str(tmp_path / "images")


@pytest.fixture
def colors(root):
    """Twelve images of two colors and several sizes, with a file that is no image."""
    for name, color in COLORS.items():
        for i in range(6):
            folder = "a/b" if i == 5 else "."
            write(f"{root}/{name}/{folder}/{i}.PNG".replace("/./", "/"), encode_image(np.full((4 + i, 6, 3), color)))
    write(f"{root}/red/notes.txt", b"no image")
    return root


def test_the_directory_of_an_image_is_its_class(colors):
    dataset = ImageFolder(colors)
    assert dataset.metainfo["classes"] == ["blue", "red"]
    assert [int(dataset[i]["label"]) for i in range(12)] == [0] * 6 + [1] * 6
    assert dataset.get_data_info(0)["img_path"] == f"{colors}/blue/0.PNG"
    assert dataset.get_data_info(11)["img_path"] == f"{colors}/red/a/b/5.PNG"
    for i in range(12):
        sample = dataset[i]
        assert set(sample) == {"image", "label", "sample_idx"}
        np.testing.assert_array_equal(sample["image"], np.full((4 + i % 6, 6, 3), COLORS["blue" if i < 6 else "red"]))
    assert ImageFolder(colors, indices=[6], size=(3, 5))[0]["image"].shape == (3, 5, 3)


class Net(nn.Module):
    @nn.compact
    def __call__(self, image, train: bool = False):
        return nn.Dense(2)(image.mean(axis=(1, 2)) / 255)


def test_a_run_trains_on_image_folders(colors, tmp_path):
    data = dict(type="ImageFolder", root=colors, size=(4, 4), pipeline=[lambda x: {**x, "image": x["image"] / 1.0}])
    loader = dict(dataset=data, batch_size=4, sampler=dict(type="DefaultSampler", shuffle=True))
    runner = Runner(
        LinenModel(Net(), CrossEntropy(), inputs="image"), tmp_path / "run",
        train_dataloader=loader, train_cfg=dict(max_epochs=8),
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.3)),
        default_hooks=dict(checkpoint=None),
    )  # fmt: skip
    runner.train()
    logits = np.asarray(runner.predict(dict(dataset=data, batch_size=6)))
    assert logits.argmax(-1).tolist() == [0] * 6 + [1] * 6


def test_images_and_label_maps_of_an_annotation_file(root):
    write(f"{root}/left/1.png", encode_image(np.full((4, 4, 3), 9)))
    labels = np.arange(16).reshape(4, 4) % 3
    write(f"{root}/maps/1.png", encode_image(labels))
    records = [dict(img_path="1.png", seg_map_path="1.png", boxes=[[0, 0, 2, 2]])]
    write(f"{root}/all.json", json.dumps(dict(metainfo={}, data_list=records)).encode())
    steps = [dict(type="LoadImage"), dict(type="LoadImage", path="seg_map_path", image="label", mode=None)]
    dataset = BaseDataset(
        "all.json", data_root=root, data_prefix=dict(img_path="left", seg_map_path="maps"), pipeline=steps
    )
    assert dataset[0]["image"].shape == (4, 4, 3)
    np.testing.assert_array_equal(dataset[0]["label"], labels)
    assert dataset[0]["boxes"] == [[0, 0, 2, 2]]
    resized = LoadImage(path="seg_map_path", image="label", mode=None, size=(2, 2))(dataset.get_data_info(0))["label"]
    assert set(resized.ravel()) <= {0, 1, 2}  # no class between two others


def test_images_at_urls_are_read_by_worker_processes(gs_bucket):
    for name in ("a", "b"):
        write_bytes(f"{gs_bucket}/{name}/1.png", encode_image(np.zeros((2, 2, 3))))
    with contextlib.closing(DataLoader(ImageFolder(gs_bucket), batch_size=2, num_workers=1)) as loader:
        (batch,) = loader
    assert batch["label"].tolist() == [0, 1]
