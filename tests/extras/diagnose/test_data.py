"""Test `jengine data`."""

import pathlib
import sys

import numpy as np
import pytest

from jengine.cli import main
from jengine.data import build_dataloader
from jengine.extras.diagnose.contact_sheet import to_uint8, write_contact_sheet
from jengine.extras.diagnose.drawn_batches import draw_batches

CONFIG = """
import itertools
import numpy as np
from jengine.data import ArrayDataset

IMAGES = np.arange(6 * 4 * 4 * 3, dtype=np.uint8).reshape(6, 4, 4, 3)
LABELS = np.array([0, 1, 2, 0, 1, 0])


def endless():
    for i in itertools.count():
        yield dict(x=np.full((2, 3), i, np.float32))


class Samples:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def mixed():
    for i in range(3):
        values = np.array([i, np.nan], np.float64)
        objects = np.array([{"box": i}, None], object)
        yield dict(
            image=dict(name=[f"{i}.png", "other.png"], day=np.array(["2024-05-01", "2024-05-02"], "M8[D]")),
            objects=objects, tokens=np.zeros((2, 4 + i), np.int64), values=values, valid=np.array([True, False]),
        )


def get_config():
    shapes = [dict(x=np.zeros(3)), dict(x=np.zeros(4))]
    return dict(
        model=dict(type="NotBuilt"),
        train_dataloader=dict(dataset=ArrayDataset(dict(image=IMAGES, label=LABELS), dict(classes=["a", "b", "c"])),
                              batch_size=2),
        val_dataloader=dict(dataset=ArrayDataset((IMAGES / 255.0, LABELS)), batch_size=4),
        vars=dict(
            endless=endless, iterator=endless(), mixed=mixed, empty=dict(dataset=iter([]), batch_size=2),
            failing=dict(dataset=Samples([dict(x=1.0)]), batch_size=2, sampler=[0, 0, 0, 5]),
            shapes=dict(dataset=Samples(shapes), batch_size=2, sampler=[0, 1]), large=lambda: iter([dict(id=np.array([2**40]))]),
            strings=lambda: iter([dict(name=["a", "b"])]),
        ),
    )
"""


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    (tmp_path / "images.py").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)


def report(capsys, *options, config="images.py"):
    """Return the lines about the loader by label, and the rows of the table by entry."""
    assert main(["data", config, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    facts = {line[2:23].strip(): line[23:] for line in lines[1:] if line.startswith("  ")}
    return lines, facts, {row[0]: row[1:] for row in table[1:]}


@pytest.fixture
def use(tmp_path):
    """Return a function that writes a config with an object of `vars` as the training data, and returns its path."""

    def write(name):
        code = f"    config = get_images()\n    return dict(config, train_dataloader=config['vars']['{name}'])\n"
        (tmp_path / "other.py").write_text(
            f"import runpy\nget_images = runpy.run_path({str(tmp_path / 'images.py')!r})['get_config']\n"
            f"def get_config():\n{code}"
        )
        return "other.py"

    return write


def test_the_digits_are_described_without_building_the_model(capsys):
    pytest.importorskip("sklearn")
    digits = pathlib.Path(__file__).parents[3] / "configs" / "digits_cnn.py"
    options = ["--batches", "3", "--config.model.module.type=NotBuilt"]
    lines, facts, entries = report(capsys, *options, config=str(digits))
    assert lines[0] == "train_dataloader: DataLoader(Digits)"
    assert (facts["examples"], facts["batch size"], facts["batches per epoch"]) == ("1,438", "64", "22")
    assert facts["position"] == "exact: a resumed run continues with the same examples"
    assert facts["labels `label`"].startswith("10 classes in 192 examples, 0 to 9; fewest: ")
    assert "(128 in " in facts["speed after it"]
    assert entries["image"][:2] == ["float32", "[64, 8, 8, 1]"]
    assert entries["image"][2].startswith("0 to 1, mean 0.3")
    assert entries["label"] == ["int32", "[64]", "0 to 9", "device"]


def test_padding_is_not_counted_and_a_pass_may_end_early(capsys):
    lines, facts, entries = report(capsys, "--loader", "val", "--config.val_cfg={'epoch_length': 1}")
    assert lines[0] == "val_dataloader: DataLoader(ArrayDataset)"
    assert facts["batches per epoch"] == "1, from `val_cfg.epoch_length`"
    assert facts[""] == "the pass over the data ended after 2 of 10 batches"
    assert "(2 in " in facts["speed after it"]
    assert facts["labels `1`"] == "3 classes in 6 examples, 0 to 2; fewest: 1 of class 2, most: 3 of class 0"
    assert entries["0"] == ["float64", "[4, 4, 4, 3]", entries["0"][2], "device, as float32"]
    assert entries["1"] == ["int64", "[4]", "0 to 2", "device, as int32"]
    assert entries["mask"] == ["bool", "[4]", "0.75 of them True", "device"]


def test_a_stream_has_no_length_and_its_position_is_not_saved(capsys, use):
    lines, facts, entries = report(capsys, "--batches", "5", config=use("endless"))
    assert lines[0] == "train_dataloader: function endless"
    assert "examples" not in facts
    assert facts["batch size"] == "2"
    assert facts["batches per epoch"] == "unknown; `train_cfg.epoch_length` sets it"
    assert facts["position"].startswith("replayed: it is not saved; ")
    assert entries == {"x": ["float32", "[2, 3]", "0 to 4, mean 2", "device"]}


def test_the_advice_for_an_exact_position_is_printed(capsys, use):
    _, facts, _ = report(capsys, "--batches", "1", config=use("iterator"))
    assert facts["position"] == "lost: it is not saved; a resumed run continues with what the data yield next"
    assert facts[""] == (
        "for an exact position: pass the object that the iterator was made of, or a function that returns a new iterator"
    )
    assert "speed after it" not in facts


def test_host_entries_are_listed_with_examples_and_reasons(capsys, use):
    lines, _, entries = report(capsys, config=use("mixed"))
    assert entries == {
        "image.day": ["datetime64[D]", "[2]", "2024-05-01, 2024-05-02, 2024-05-01, ...", "host"],
        "image.name": ["str", "[2]", "'0.png', 'other.png', '1.png', ...", "host"],
        "objects": ["object", "[2]", "{'box': 0}, None, {'box': 1}, ...", "host"],
        "tokens": ["int64", "[2, 4-6]", "0 to 0", "device, as int32"],
        "valid": ["bool", "[2]", "0.5 of them True", "device"],
        "values": ["float64", "[2]", "0 to 2, mean 1; 3 not finite", "device, as float32"],
    }
    assert lines[-4:] == [
        "Shapes vary between batches: the step is compiled for each shape.",
        "`image.day` stays on the host, for hooks and host metrics: JAX has no arrays of dates.",
        "`image.name` stays on the host, for hooks and host metrics: JAX has no arrays of strings.",
        "`objects` stays on the host, for hooks and host metrics: JAX has no arrays of Python objects.",
    ]


def test_batches_beyond_the_memory_limit_are_drawn_but_not_kept():
    batches = [dict(x=np.full(8, i, np.float32)) for i in range(5)]  # 32 bytes each
    drawn = draw_batches(build_dataloader(batches, train=True), 4, "train_dataloader", max_bytes=64)
    assert drawn.examples == [8, 8, 8, 8]
    np.testing.assert_array_equal(drawn.entries["x"], [[0] * 8, [1] * 8])


def test_an_error_of_the_dataset_names_the_batch_and_the_line_of_the_code(capsys, use, tmp_path):
    line = CONFIG.splitlines().index("        return self.samples[index]") + 1
    assert main(["data", use("failing")]) == 1
    shown = capsys.readouterr().err.splitlines()
    assert shown[1] == f'  File "{tmp_path / "images.py"}", line {line}, in __getitem__'
    assert shown[-5:-1] == [
        "IndexError: list index out of range", "in sample 5 of Samples", "in batch 1", "in the config at `train_dataloader`",
    ]  # fmt: skip
    with pytest.raises(IndexError, match="list index out of range"):
        main(["data", use("failing"), "--traceback"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "`train_dataloader` must yield at least one batch, got none"),
        ("large", "`train_dataloader` must yield integers that fit in int32, got 1099511627776"),
        ("strings", "the arrays of a batch or a dataset must share their leading axis, got no array"),
        ("shapes", "samples of a batch must have the same structure and shapes, got 'x' of (3,) in"),
    ],
)
def test_batches_that_a_run_refuses_are_errors(capsys, use, name, message):
    assert main(["data", use(name)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batches", "0"], "`--batches` must be at least 1, got 0"),
        (["--loader", "test"], "the config must have test_dataloader, got data for: train, val; choose with --loader"),
        (["--sheet", "a.jpg"], "`--sheet` must be a .png file, got 'a.jpg'"),
        (["--config.train_dataloader.batch_size=0"], "in the config at `train_dataloader"),
    ],
)
def test_bad_options(capsys, options, message):
    assert main(["data", "images.py", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_contact_sheet_is_written_on_demand(capsys, tmp_path):
    image = pytest.importorskip("PIL.Image")
    report(capsys)
    assert not list(tmp_path.glob("*.png"))
    lines, *_ = report(capsys, "--sheet")
    assert lines[-1] == "6 images of `image` written to images_train.png"
    assert image.open("images_train.png").size == (3 * 132 + 4, 2 * 146 + 4)  # 128 pixels, margins of 4, captions
    lines, *_ = report(capsys, "--loader", "val", "--sheet", "out/val.png")  # no padding, which repeats examples
    assert lines[-1] == "6 images of `0` written to out/val.png"


def test_a_contact_sheet_requires_images(capsys, use):
    pytest.importorskip("PIL.Image")
    assert main(["data", use("endless"), "--sheet"]) == 2
    assert "`--sheet` must be given for data with images" in capsys.readouterr().err


def test_without_pillow_the_extra_is_named_before_anything_is_drawn(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["data", "images.py", "--sheet"]) == 2
    error = capsys.readouterr().err
    assert error == "jengine: MissingPackageError: --sheet requires Pillow: pip install 'jengine[draw]'\n"


def test_pixels_of_a_contact_sheet_are_those_of_the_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    red, half = np.zeros((2, 2, 4), np.uint8), np.full((256, 128, 4), 255, np.uint8)
    red[:] = (255, 0, 0, 255)
    write_contact_sheet(str(tmp_path / "a.png"), [red, half], ["", ""])
    pixels = np.asarray(image.open(tmp_path / "a.png"))
    assert pixels.shape == (136, 268, 3)
    np.testing.assert_array_equal(pixels[4:132, 4:132], np.broadcast_to((255, 0, 0), (128, 128, 3)))
    np.testing.assert_array_equal(pixels[:, 132:], np.full((136, 136, 3), 255))


def test_floats_are_scaled_by_the_range_of_all_images():
    first, second = np.array([[[-1.0], [1.0]]]), np.array([[[3.0], [np.nan]]])
    scaled = to_uint8([first, second])
    np.testing.assert_array_equal(scaled[0].ravel(), [0, 128])
    np.testing.assert_array_equal(scaled[1].ravel(), [255, 0])
    np.testing.assert_array_equal(to_uint8([np.full((1, 1, 1), 7.0)])[0], [[[0]]])
    np.testing.assert_array_equal(to_uint8([np.full((1, 1, 1), 7, np.uint8)])[0], [[[7]]])
