"""Test `jengine predict` and `jengine ckpt export --jax-export`."""

import importlib.util
import io
import os
import zipfile

import fsspec
import numpy as np
import pytest

import jengine
from jengine.cli import main

CONFIG = """
import jax.numpy as jnp
import numpy as np
from jengine.data import ArrayDataset
from jengine.model import FunctionalModel
from jengine.config import DATASETS, MODELS


@DATASETS.register_module(force=True)
class PredictLine(ArrayDataset):
    def __init__(self, size):
        x = np.linspace(-1, 1, size, dtype=np.float32)
        super().__init__(dict(x=x, y=2 * x + 1))


@MODELS.register_module(force=True)
class PredictLineModel(FunctionalModel):
    def __init__(self):
        predict = lambda params, batch: params["w"] * batch["x"] + params["b"]
        super().__init__(
            lambda: {"w": jnp.zeros(()), "b": jnp.zeros(())},
            lambda params, batch: jnp.square(predict(params, batch) - batch["y"]),
            lambda params, batch: {"y": predict(params, batch), "half": predict(params, batch).astype(jnp.bfloat16)},
        )


@MODELS.register_module(force=True)
def predict_error():
    return lambda predictions, batch: jnp.square(predictions["y"] - batch["y"])


def get_config():
    def data(size):
        return dict(batch_size=8, dataset=dict(type="PredictLine", size=size))

    return dict(
        model=dict(type="PredictLineModel"),
        train_dataloader=dict(data(20), sampler=dict(type="DefaultSampler", shuffle=True)),
        train_cfg=dict(max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        val_dataloader=data(6), val_cfg=dict(), val_evaluator=dict(type="MeanLoss", loss=dict(type="predict_error")),
        default_hooks=dict(logger=None),
        custom_hooks=[dict(type="EMAHook", momentum=0.1)],
    )
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train for two epochs; return the directory of `config.py` and `work`, and a function that predicts x."""
    directory = tmp_path_factory.mktemp("line")
    (directory / "line.py").write_text(CONFIG)
    assert main(["train", str(directory / "line.py"), "--work-dir", str(directory / "work")]) == 0
    return directory, jengine.load_model(directory / "work")


def run_predict(directory, tmp_path, *options):
    arguments = [str(directory / "line.py"), str(directory / "work"), "--work-dir", str(tmp_path / "work")]
    return main(["predict", *arguments, "--out", str(tmp_path / "out.npz"), *options])


def line(size):
    return np.linspace(-1, 1, size, dtype=np.float32)


@pytest.mark.parametrize(
    ("options", "x"), [([], line(6)), (["--data", "train"], line(20)), (["--batch-size", "4"], line(6))]
)
def test_predictions_of_the_data_of_the_config_are_in_the_order_of_the_dataset(trained, tmp_path, capsys, options, x):
    directory, model = trained
    assert run_predict(directory, tmp_path, *options) == 0
    assert f"y float32[{len(x)}], written to {tmp_path / 'out.npz'}" in capsys.readouterr().out
    with np.load(tmp_path / "out.npz") as found:
        assert set(found) == {"y", "half"}
        np.testing.assert_allclose(found["y"], model(dict(x=x))["y"], rtol=1e-6)
        assert found["half"].dtype == np.float32  # NumPy has no bfloat16


@pytest.mark.parametrize("place", ["", "memory:/"])
def test_predictions_of_the_arrays_of_a_file(trained, tmp_path, place):
    directory, model = trained
    path = f"{place}{tmp_path}/data.npz"
    with fsspec.open(path, "wb") as file:
        np.savez(file, x=line(7))
    assert run_predict(directory, tmp_path, "--data", path, "--batch-size", "3") == 0
    with np.load(tmp_path / "out.npz") as found:
        np.testing.assert_allclose(found["y"], model(dict(x=line(7)))["y"], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "test"], "the config must have test_dataloader, got data for: val, train; choose with --data"),
        (
            ["--data", "other"],
            "`--data` must be one of test, val, train, a directory of images, an image or a pattern such as 'new/*.png'",
        ),
        (["--data", "other"], "got 'other', which does not exist"),
        (["--out", "out.txt"], "`--out` must be a .csv, .jsonl or .npz file, got 'out.txt'"),
        (["--out", "out.jsonl", "--data", "prompts.txt"], "`model` must be a TextGenerator"),
    ],
)
def test_bad_options_of_predict(trained, tmp_path, capsys, options, message):
    assert run_predict(trained[0], tmp_path, *options) == 2
    assert message in capsys.readouterr().err


CALL = """
import sys
sys.modules["jengine"] = sys.modules["flax"] = None  # importing either raises an error
import numpy as np
from jax import export
model = export.deserialize(open(sys.argv[1], "rb").read())
np.savez(sys.argv[2], y=model.call({"x": np.linspace(-1, 1, 7, dtype=np.float32)})["y"])
"""


@pytest.mark.skipif(importlib.util.find_spec("flatbuffers") is None, reason="needs flatbuffers")
def test_jax_export_writes_an_artifact_that_runs_without_the_model(run_python, trained, tmp_path, capsys):
    directory, model = trained
    work, file = str(directory / "work"), str(tmp_path / "line.jaxexport")
    assert main(["ckpt", "export", work, "--jax-export", file]) == 0
    out = capsys.readouterr().out
    assert "x float32[batch] -> half bfloat16[batch], y float32[batch]\n" in out
    assert f"epoch_2 on cpu, cuda, tpu: {(tmp_path / 'line.jaxexport').stat().st_size:,} bytes" in out
    done = run_python(CALL, file, tmp_path / "found.npz")
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "found.npz")["y"], model(dict(x=line(7)))["y"], rtol=1e-6)
    options = ["--input", "x=float32[]", "--batch-size", "4", "--platforms", "cpu", "--raw"]
    assert main(["ckpt", "export", work, "--jax-export", file, *options]) == 0
    assert "x float32[4] -> half bfloat16[4], y float32[4]\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "`jengine ckpt export` must have either FILE or --jax-export FILE"),
        (["a.safetensors", "--jax-export", "b"], "`jengine ckpt export` must have either FILE or --jax-export FILE"),
        (["a.safetensors", "--platforms", "cpu"], "`--platforms` must be given with --jax-export"),
        (["a.safetensors", "--trust"], "`--trust` must be given with --jax-export"),
        (["--jax-export", "b", "--input", "x=float"], "`--input` must be NAME=DTYPE[SHAPE], such as image=float32"),
        (["--jax-export", "b", "--batch-stats"], "`--batch-stats` must be left out with --jax-export"),
        (["--jax-export", "b", "--platforms", "gpu"], "`--platforms` must be of cpu, cuda, rocm, tpu, got 'gpu'"),
    ],
)
def test_bad_options_of_export(trained, capsys, options, message):
    assert main(["ckpt", "export", str(trained[0] / "work"), *options]) == 2
    assert message in capsys.readouterr().err


def write_member(path, shape, content=b"1234"):
    """Write an .npz file with one array, whose header claims a shape."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, dict(descr="<f4", fortran_order=False, shape=shape))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header.getvalue() + content)


HOSTILE = {
    "missing": (lambda path: None, "No such file or directory"),
    "text": (lambda path: path.write_text("hello"), "is not a complete .npz file of arrays"),
    "a pipe": (os.mkfifo, "it must be a regular file, not a pipe or a device"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it must be a regular file, not a pipe or a device"),
    "a directory": (lambda path: path.mkdir(), "Is a directory"),
    "a pickle": (lambda path: np.savez(path, x=np.array([{}])), "must have no Python objects, whose pickles may run"),
    "more than the file has": (lambda path: write_member(path, (10**12,)), "but the file ends before"),
    "more than there is": (lambda path: write_member(path, (2**62, 2**62)), "but the file ends before"),
    "a negative length": (lambda path: write_member(path, (-1,)), "but the file ends before"),
    "text for arrays": (lambda path: np.savez(path, x=np.array(["a"])), "must have arrays of numbers, got <U1 for 'x'"),
    "no arrays": (lambda path: np.savez(path), "must have arrays with one length, the number of examples, got {}"),
    "two lengths": (lambda path: np.savez(path, x=np.ones(3), y=np.ones(4)), "got {'x': 3, 'y': 4}"),
    "a scalar": (lambda path: np.savez(path, x=np.float32(3)), "got {'x': None}"),
    "no examples": (lambda path: np.savez(path, x=np.ones(0)), "got {'x': 0}"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_data_from_anyone_are_read_or_refused_in_one_sentence(trained, tmp_path, capsys, case):
    make, message = HOSTILE[case]
    make(tmp_path / "data.npz")
    assert run_predict(trained[0], tmp_path, "--data", str(tmp_path / "data.npz")) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "`--data` must" in lines[0] or "it must be a regular file" in lines[0]
    assert message in lines[0]


def test_damaged_data_are_refused(trained, tmp_path, capsys):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.ones(100_000, np.float32))
    content = bytearray(path.read_bytes())
    content[200_000] ^= 255
    path.write_bytes(content)
    assert run_predict(trained[0], tmp_path, "--data", str(path)) == 2
    assert "data.npz is damaged at 'x': Bad CRC-32" in capsys.readouterr().err
