"""Test `jengine predict` of image files and of rows, as people have them."""

import csv
import json

import numpy as np
import PIL.Image
import pytest

from jengine.cli import main
from jengine.config import ConfigError
from jengine.extras.augment.inputs import is_inputs, open_inputs, read_rows
from jengine.extras.serving.shown import add_classes

# The logits are (0, 2) for a bright image and (2, 0) for a dark one.
CONFIG = """
import jax.numpy as jnp
from jengine.config import MODELS
from jengine.model import FunctionalModel


@MODELS.register_module(force=True)
class BrightnessModel(FunctionalModel):
    def __init__(self):
        logits = lambda params, batch: params["w"] * jnp.stack([1 - self.brightness(batch), self.brightness(batch)], 1)
        super().__init__(lambda: {"w": jnp.full((), 2.0)}, lambda params, batch: 0 * logits(params, batch)[:, 0], logits)

    def brightness(self, batch):
        return batch["image"].mean((1, 2, 3))


def get_config():
    scale = dict(type="Normalize", mean=0, std=255)
    data = dict(batch_size=2, dataset=dict(type="ImageFolder", root="ROOT/known", size=(4, 4), pipeline=[scale]))
    return dict(
        model=dict(type="BrightnessModel"), train_dataloader=data, train_cfg=dict(max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        val_dataloader=data, val_cfg=dict(), val_evaluator=dict(type="Accuracy"), default_hooks=dict(logger=None),
    )
"""


def write_image(path, value, size=8):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.new("RGB", (size, size), (value,) * 3).save(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a directory with `config.py`, a run in `work`, and new images in `new`."""
    root = tmp_path_factory.mktemp("brightness")
    for name, value in (("dark/a", 0), ("light/b", 255)):
        write_image(root / f"known/{name}.png", value)
    write_image(root / "new/1.png", 255)
    write_image(root / "new/deep/2.jpg", 0, size=6)
    (root / "new/notes.txt").write_text("no image")
    (root / "config.py").write_text(CONFIG.replace("ROOT", str(root)))
    assert main(["train", str(root / "config.py"), "--work-dir", str(root / "work")]) == 0
    return root


@pytest.fixture
def predict(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(trained)

    def predict(data, out=None, *options):
        command = ["predict", "config.py", "work", "--work-dir", str(tmp_path / "work"), "--data", data, *options]
        code = main([*command, *(["--out", str(tmp_path / out)] if out else [])])
        said = capsys.readouterr()
        return (said.out if code == 0 else said.err), tmp_path / (out or "")

    return predict


def test_a_directory_of_images_is_predicted_with_the_pipeline_of_the_validation(predict):
    said, path = predict("new", "out.csv")
    assert "| new/1.png      | light     | 0.8808      |" in said
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["file"], row["predicted"]) for row in rows] == [("new/1.png", "light"), ("new/deep/2.jpg", "dark")]
    assert float(rows[0]["probability"]) == pytest.approx(1 / (1 + np.exp(-2)), abs=1e-6)
    assert (float(rows[0]["predictions.0"]), float(rows[0]["predictions.1"])) == (0, 2)


@pytest.mark.parametrize("data", ["new/1.png", "new/*.png"])
def test_one_image_and_a_pattern_of_images(predict, data):
    _, path = predict(data, "deep/out.jsonl")
    (line,) = path.read_text().splitlines()
    row = json.loads(line)
    assert (row["file"], row["predicted"], row["predictions"]) == ("new/1.png", "light", [0, 2])


def test_rows_may_have_paths_beside_their_file(predict, trained):
    (trained / "new/rows.csv").write_text("img_path,name\n1.png,first\ndeep/2.jpg,second\n")
    said, path = predict("new/rows.csv", "out.npz")
    assert "| 1.png      | first  | light     |" in said
    np.testing.assert_allclose(np.load(path)["predictions"], [[0, 2], [2, 0]], atol=1e-6)


def test_the_table_of_the_config_data_counts_the_examples(predict):
    said, _ = predict("val")
    assert "| 0       | dark      |" in said
    assert "--out FILE.csv, .jsonl or .npz writes all of them" in said


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("work/epoch_1/", "`--data` must have image files"),
        ("nowhere/*.png", "got nothing at nowhere/*.png"),
        ("nowhere.png", "`--data` must exist, got nowhere.png, which does not"),
        ("new/paths.jsonl", "`LoadImage.path` must be an entry of the samples, got 'img_path' for ['file', 'sample_idx']"),
        ("new/wide.csv", "`--data` must have 2 values in each row, got 3 in row 2 of new/wide.csv"),
        ("new/bad.jsonl", "`--data` must have one JSON object in each line, got line 2 of new/bad.jsonl"),
        ("new/empty.csv", "`--data` must have at least one row, got none in new/empty.csv"),
    ],
)
def test_data_that_cannot_be_read_are_one_sentence(predict, trained, data, message):
    (trained / "new/paths.jsonl").write_text('{"file": "1.png"}\n')
    (trained / "new/wide.csv").write_text("a,b\n1,2\n1,2,3\n")
    (trained / "new/bad.jsonl").write_text('{"a": 1}\n[1]\n')
    (trained / "new/empty.csv").write_text("a,b\n")
    assert message in predict(data)[0]


def config_with(dataset):
    return dict(val_dataloader=dict(dataset=dataset, batch_size=2))


def test_images_without_a_pipeline_are_read_like_those_of_the_validation(trained):
    images = np.zeros((3, 6, 6, 1), np.float32)
    images[0, 0] = 1
    data = str(trained / "new/1.png")
    inputs = open_inputs(data, config_with(dict(type="ArrayDataset", arrays=dict(picture=images, label=np.arange(3)))))
    assert inputs.note.endswith("6 x 6 pixels, gray, float32 from 0 to 1")
    sample = inputs.dataset[0]["picture"]
    assert (sample.shape, sample.dtype, sample.max()) == ((6, 6, 1), np.float32, 1)
    shifted = dict(type="ArrayDataset", arrays=dict(image=images - 0.5))
    with pytest.raises(ConfigError, match="must have a pipeline with LoadImage for images of float32 from -0.5 to 0.5"):
        open_inputs(data, config_with(shifted))
    with pytest.raises(ConfigError, match="or samples with one image .* got no image"):
        open_inputs(data, config_with(dict(type="ArrayDataset", arrays=dict(x=np.zeros(3)))))


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_columns_become_entries_with_the_dtypes_of_the_validation(tmp_path, name):
    texts = {
        "rows.csv": "id,age,x0,x1\na,3,1,2.5\nb,4,3,4\n",
        "rows.jsonl": '{"id": "a", "age": 3, "x": [1, 2.5]}\n\n{"id": "b", "age": 4, "x": [3, 4]}\n',
    }
    (tmp_path / name).write_text(texts[name])
    arrays = dict(x=np.zeros((5, 2), np.float32), age=np.zeros(5, np.float32), label=np.zeros(5, np.int32))
    inputs = open_inputs(str(tmp_path / name), config_with(dict(type="ArrayDataset", arrays=arrays)))
    sample = inputs.dataset[1]
    assert {key: (value.tolist(), value.dtype.name) for key, value in sample.items()} == {
        "x": ([3, 4], "float32"), "age": (4, "float32"),
    }  # fmt: skip
    assert [row["id"] for row in inputs.rows] == ["a", "b"]


def test_rows_keep_texts_and_read_numbers(tmp_path):
    (tmp_path / "rows.csv").write_text('\ufeffname,"a,b",count\n007,x,1\nbond,y,2\n')
    assert read_rows(str(tmp_path / "rows.csv")) == [
        {"name": "007", "a,b": "x", "count": 1}, {"name": "bond", "a,b": "y", "count": 2},
    ]  # fmt: skip


def test_classes_are_shown_for_classifiers_alone():
    logits = np.log([[1.0, 3.0]])
    assert add_classes(logits, dict(val_evaluator=[dict(type="Accuracy")]), None) == [{"predicted": 1, "probability": 0.75}]
    assert add_classes(logits, dict(val_evaluator=[dict(type="MeanSquaredError")]), ["a", "b"]) == [{}]
    assert not is_inputs("val")
