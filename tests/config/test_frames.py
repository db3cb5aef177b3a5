import traceback

import jax
import numpy as np
import pytest

from jengine import Runner, load_config
from jengine.data import ArrayDataset
from jengine.model import FunctionalModel
from jengine.optim import SGD, OptimWrapper


@pytest.fixture(autouse=True)
def filtering():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", before)


def loss(params, batch):
    return batch["x"] @ params["w"][:, None, 0]


def files(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def settings(tmp_path):
    data = ArrayDataset({"x": np.ones((8, 1), np.float32)})
    model = FunctionalModel(lambda: {"w": jax.numpy.ones(1)}, loss=loss, predict=None)
    return dict(model=model, work_dir=tmp_path, train_dataloader=dict(dataset=data, batch_size=4),
                optim_wrapper=OptimWrapper(SGD(lr=0.1)), train_cfg=dict(max_epochs=1))  # fmt: skip


def test_an_error_of_arguments_has_only_the_line_of_the_call(tmp_path):
    with pytest.raises(TypeError, match="max_epoch") as caught:
        Runner(**settings(tmp_path) | dict(train_cfg=dict(max_epoch=2)))
    assert files(caught.value) == [__file__]
    assert "JAX_TRACEBACK_FILTERING=off" in caught.value.__notes__[-1]
    with pytest.raises(FileNotFoundError) as caught:
        load_config(tmp_path / "missing.py")
    assert files(caught.value) == [__file__]


def test_an_error_in_the_step_has_the_lines_of_the_user(tmp_path):
    with pytest.raises(IndexError) as caught:
        Runner(**settings(tmp_path)).train()
    assert files(caught.value) == [__file__, __file__]
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "loss"
    assert not any(note.startswith("----") for note in caught.value.__notes__)


def test_all_frames_stay_with_jaxs_setting_and_for_errors_that_nobody_raised(tmp_path, monkeypatch):
    monkeypatch.setattr("jengine.runner.runner.agree_on_identity", None)  # a fault of the engine
    with pytest.raises(TypeError) as caught:
        Runner(**settings(tmp_path))
    assert len(files(caught.value)) > 1
    monkeypatch.undo()
    jax.config.update("jax_traceback_filtering", "off")
    with pytest.raises(TypeError) as caught:
        Runner(**settings(tmp_path) | dict(train_cfg=dict(max_epoch=2)))
    assert len(files(caught.value)) > 3
