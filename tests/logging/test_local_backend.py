import json

import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config import dump_config, load_config, resolve
from jengine.logging import LocalVisBackend


def read_lines(path):
    def reject(constant):
        pytest.fail(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=reject) for line in path.read_text().splitlines()]


def test_scalars_are_json_lines_with_their_step(tmp_path):
    backend = LocalVisBackend(tmp_path / "vis_data")
    backend.add_scalar("loss", 0.5, step=3)
    backend.add_scalars({"lr": 0.1, "iter": 4}, step=4)
    assert read_lines(tmp_path / "vis_data" / "scalars.json") == [
        {"loss": 0.5, "step": 3},
        {"lr": 0.1, "iter": 4, "step": 4},
    ]


def test_scalars_are_also_appended_to_file_path(tmp_path):
    backend = LocalVisBackend(tmp_path)
    backend.add_scalars({"loss": 1.0}, step=1, file_path="20260101_000000.json")
    backend.add_scalars({"loss": 2.0}, step=2)
    assert read_lines(tmp_path / "20260101_000000.json") == [{"loss": 1.0, "step": 1}]
    assert read_lines(tmp_path / "scalars.json") == [{"loss": 1.0, "step": 1}, {"loss": 2.0, "step": 2}]


def test_step_in_the_dict_overrides_the_argument(tmp_path):
    LocalVisBackend(tmp_path).add_scalars({"acc": 1.0, "step": 7}, step=1)
    assert read_lines(tmp_path / "scalars.json") == [{"acc": 1.0, "step": 7}]


def test_numpy_and_jax_values_become_python_numbers(tmp_path):
    values = {
        "a": np.float32(0.5),
        "b": np.array([2]),
        "c": jnp.array(3.5, jnp.bfloat16),
        "d": np.arange(2),
        "e": np.bool_(True),
    }
    LocalVisBackend(tmp_path).add_scalars(values, step=np.int64(9))
    assert read_lines(tmp_path / "scalars.json") == [{"a": 0.5, "b": 2, "c": 3.5, "d": [0, 1], "e": True, "step": 9}]


def test_non_finite_values_are_written_as_valid_json_and_read_back_as_floats(tmp_path):
    LocalVisBackend(tmp_path).add_scalars({"a": float("nan"), "b": np.float32("inf"), "c": [-np.inf]}, step=1)
    (line,) = read_lines(tmp_path / "scalars.json")
    assert line == {"a": "NaN", "b": "Infinity", "c": ["-Infinity"], "step": 1}
    assert float(line["c"][0]) == -np.inf


def test_error_names_the_value_that_json_cannot_store_and_nothing_is_written(tmp_path):
    backend = LocalVisBackend(tmp_path / "vis_data")
    with pytest.raises(TypeError, match="`when` must be JSON-serializable .*, got object"):
        backend.add_scalars({"a": 1.0, "when": object()})
    assert not (tmp_path / "vis_data").exists()


def test_images_are_written_as_png_files_with_their_step(tmp_path):
    from PIL import Image

    image = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    backend = LocalVisBackend(tmp_path, img_save_dir="pictures")
    backend.add_image("val/cat", image, step=5)
    backend.add_image("grey", image[..., :1], step=0)
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "pictures" / "val" / "cat_5.png")), image)
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "pictures" / "grey_0.png")), image[..., 0])


def test_config_file_can_be_loaded(tmp_path):
    LocalVisBackend(tmp_path, config_save_file="run.py").add_config(dump_config({"a": {"b": 1}}))
    assert resolve(load_config(tmp_path / "run.py")) == {"a": {"b": 1}}


def test_wrong_file_names_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"`scalar_save_file` must be a \.json file, got 'scalars\.txt'"):
        LocalVisBackend(tmp_path, scalar_save_file="scalars.txt")
    with pytest.raises(ValueError, match=r"`config_save_file` must be a \.py file, got 'config\.json'"):
        LocalVisBackend(tmp_path, config_save_file="config.json")
    for name in ("scalars.json", "log.txt"):
        with pytest.raises(ValueError, match=r"`file_path` must be a \.json file other than scalars\.json"):
            LocalVisBackend(tmp_path).add_scalars({"a": 1}, 1, name)
    assert not (tmp_path / "scalars.json").exists()
