import io
import warnings

import numpy as np
import pytest

from jengine.logging import TensorboardVisBackend


def read_events(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(directory)).Reload()


def test_scalars_can_be_read_back_with_their_steps(tmp_path):
    backend = TensorboardVisBackend(tmp_path)
    backend.add_scalar("train/loss", 0.5, step=10)
    backend.add_scalars(
        {"train/loss": np.float32(0.25), "lr": np.array([0.125]), "step": 20}, step=20, file_path="x.json"
    )
    backend.close()
    events = read_events(tmp_path)
    assert sorted(events.Tags()["scalars"]) == ["lr", "train/loss"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(10, 0.5), (20, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("lr")] == [(20, 0.125)]


def test_values_that_are_not_numbers_are_skipped_with_one_warning(tmp_path):
    backend = TensorboardVisBackend(tmp_path)
    with pytest.warns(UserWarning, match="'name' is not written to TensorBoard: it must be a number, got str"):
        backend.add_scalars({"name": "resnet", "acc": 1.0}, step=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.add_scalars({"name": "resnet", "acc": 2.0}, step=2)
    backend.close()
    assert read_events(tmp_path).Tags()["scalars"] == ["acc"]


def test_images_can_be_read_back_pixel_for_pixel(tmp_path):
    from PIL import Image

    image = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    backend = TensorboardVisBackend(tmp_path)
    backend.add_image("sample", image, step=4)
    backend.close()
    (event,) = read_events(tmp_path).Images("sample")
    assert (event.step, event.height, event.width) == (4, 2, 3)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(event.encoded_image_string))), image)


def test_config_and_graph_are_written_as_text(tmp_path):
    backend = TensorboardVisBackend(tmp_path)
    backend.add_config("lr = 0.1\nmomentum = 0.9")
    backend.add_graph("lambda a: a")
    backend.close()
    events = read_events(tmp_path)
    (config,) = events.Tensors("config")
    assert config.tensor_proto.string_val[0] == b"    lr = 0.1\n    momentum = 0.9"
    assert events.Tensors("graph")[0].tensor_proto.string_val[0] == b"    lambda a: a"
    assert events.SummaryMetadata("config").plugin_data.plugin_name == "text"


def test_nothing_is_created_before_the_first_value(tmp_path):
    backend = TensorboardVisBackend(tmp_path / "vis_data")
    backend.close()
    assert not (tmp_path / "vis_data").exists()


def test_backend_can_be_closed_twice_and_written_to_again(tmp_path):
    backend = TensorboardVisBackend(tmp_path)
    backend.add_scalar("a", 1.0, step=1)
    backend.close()
    backend.close()
    backend.add_scalar("b", 2.0, step=2)
    backend.close()
    assert len(list(tmp_path.iterdir())) == 2
