import math
import types

import jax
import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.config.storage import write_bytes
from jengine.extras.drawing import LocalVisualizer
from jengine.extras.segmentation import SegVisualizationHook
from jengine.hooks import Hook
from jengine.parallel.local_batch import concatenate_local_shards


class Recorder(LocalVisualizer):
    """Record the samples instead of drawing them."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def add_datasample(self, name, image, data_sample=None, **kwargs):
        self.drawn.append((name, image, data_sample, kwargs))


def make_runner(metainfo=None):
    loop = types.SimpleNamespace(dataloader=types.SimpleNamespace(metainfo=metainfo))
    return types.SimpleNamespace(visualizer=Recorder(), val_loop=loop, test_loop=loop, train_loop=loop, iter=7)


def make_batch(number, size=2, **entries):
    """Return batch `number`, of images whose pixels are the index of the sample."""
    indices = np.arange(number * size, (number + 1) * size, dtype=np.uint8)
    image = np.broadcast_to(indices[:, None, None, None], (size, 2, 2, 3))
    return {"image": image, "label": np.zeros((size, 2, 2), np.int32), **entries}


def call_after_iter(hook, runner, mode, num_batches=5):
    after_iter = getattr(hook, f"after_{mode}_iter")
    for i in range(num_batches):
        after_iter(runner, batch_idx=i, data_batch=make_batch(i), outputs=np.ones((2, 2, 2), np.int32))


@pytest.fixture
def image_files(tmp_path):
    """Write ten image files of twice the size of the labels, whose pixels are the index of the sample."""
    image_module = pytest.importorskip("PIL.Image")
    paths = [tmp_path / f"city_{i}.png" for i in range(10)]
    for i, path in enumerate(paths):
        image_module.fromarray(np.full((4, 4, 3), i, np.uint8)).save(path)
    return paths


@pytest.mark.parametrize("mode", ["val", "test"])
def test_every_sample_of_every_interval_th_batch_is_drawn_by_the_name_of_its_file(mode, image_files):
    runner = make_runner({"img_path": image_files})
    call_after_iter(SegVisualizationHook(draw=True, interval=2), runner, mode)
    # five batches of two: the second and the fourth are drawn
    assert [name for name, *_ in runner.visualizer.drawn] == [f"{mode}_city_{i}.png" for i in (2, 3, 6, 7)]
    assert [image[0, 0, 0] for _, image, *_ in runner.visualizer.drawn] == [2, 3, 6, 7]
    assert all(kwargs["step"] == 7 for *_, kwargs in runner.visualizer.drawn)
    sample = runner.visualizer.drawn[0][2]
    assert sample["pred_sem_seg"].shape == sample["gt_sem_seg"].shape == (4, 4)  # resized to the file's image


def test_the_file_is_where_backend_args_say(image_files, gs_bucket):
    for i, path in enumerate(image_files):
        write_bytes(f"{gs_bucket}/city_{i}.png", path.read_bytes())
    runner = make_runner({"img_path": [f"city/city_{i}.png" for i in range(10)]})
    settings = dict(backend="petrel", path_mapping={"city/": f"{gs_bucket}/"})
    call_after_iter(SegVisualizationHook(draw=True, interval=2, backend_args=settings), runner, "val")
    assert [(name, image[0, 0, 0]) for name, image, *_ in runner.visualizer.drawn] == [
        (f"val_city_{i}.png", i) for i in (2, 3, 6, 7)
    ]


def test_nothing_is_drawn_in_training_or_without_draw():
    runner = make_runner()
    hook = SegVisualizationHook(draw=True, interval=1)
    assert hook.next_step(runner, 3) == math.inf  # so that it does not split chunks of training steps
    with pytest.warns(UserWarning, match="draw=False: nothing will be drawn"):
        disabled = SegVisualizationHook(interval=1)
    call_after_iter(disabled, runner, "val")
    assert runner.visualizer.drawn == []


def test_show_removes_the_backends_and_warns():
    runner = make_runner()
    runner.visualizer.vis_backends = {"a": object()}
    with pytest.warns(UserWarning, match="the visualizer does not write anything"):
        hook = SegVisualizationHook(draw=True, interval=1, show=True, wait_time=0.5)
    hook.before_run(runner)
    assert runner.visualizer.vis_backends == {}
    call_after_iter(hook, runner, "val", num_batches=1)
    assert {(k["show"], k["wait_time"]) for *_, k in runner.visualizer.drawn} == {(True, 0.5)}


def test_without_files_the_image_of_the_batch_is_drawn_by_its_index():
    runner = make_runner({"classes": ("a", "b")})
    call_after_iter(SegVisualizationHook(draw=True, interval=5), runner, "val")
    assert [(name, image[0, 0, 0]) for name, image, *_ in runner.visualizer.drawn] == [("val_8", 8), ("val_9", 9)]
    assert runner.visualizer.dataset_meta == {"classes": ("a", "b")}


def test_the_batch_defines_the_sample_indices_and_the_padding():
    runner = make_runner()
    hook = SegVisualizationHook(draw=True, interval=1, prediction="seg")
    logits = np.zeros((2, 2, 2, 3), np.float32)
    logits[..., 1] = 1
    batch = make_batch(0, sample_idx=np.array([41, 40]), mask=np.array([True, False]))
    hook.after_val_iter(runner, batch_idx=0, data_batch=batch, outputs={"seg": logits})
    ((name, _, sample, _),) = runner.visualizer.drawn
    assert name == "val_41"
    assert (sample["pred_sem_seg"] == 1).all()


def test_processes_other_than_the_first_draw_nothing(monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    runner = make_runner()
    call_after_iter(SegVisualizationHook(draw=True, interval=1), runner, "val")
    assert runner.visualizer.drawn == []


@pytest.mark.parametrize("spec", [jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()])
def test_the_shards_of_an_array_are_concatenated_in_order(spec):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    values = np.arange(24).reshape(8, 3)
    result = concatenate_local_shards(jax.device_put(values, jax.sharding.NamedSharding(mesh, spec)))
    assert result.tolist() == values.tolist()


def test_bad_arguments_and_missing_entries_are_rejected():
    with pytest.raises(ConfigError, match="interval` must be an integer of at least 1, got 0"):
        SegVisualizationHook(draw=True, interval=0)
    with pytest.raises(TypeError, match=r"got 2\.0"):
        SegVisualizationHook(draw=True, interval=2.0)
    with pytest.raises(ConfigError, match=r"`backend_args` must be None or have backend='local', .*, got 'lmdb'"):
        SegVisualizationHook(draw=True, backend_args=dict(backend="lmdb"))
    assert SegVisualizationHook(draw=True, file_client_args=dict(backend="disk")).draw
    hook = SegVisualizationHook(draw=True, interval=1, prediction="segm", image="img")
    predictions = np.zeros((2, 2, 2), np.int32)
    with pytest.raises(KeyError, match="got 'segm'; the predictions have seg .* did you mean 'seg'"):
        hook.after_val_iter(make_runner(), 0, make_batch(0), {"seg": predictions})
    with pytest.raises(KeyError, match="prediction` must be an entry of .* got 'segm'; the predictions are i32"):
        hook.after_val_iter(make_runner(), 0, make_batch(0), predictions)
    with pytest.raises(KeyError, match="image` must be an entry of the batch, got 'img'"):
        hook.after_val_iter(make_runner(), 0, make_batch(0), {"segm": predictions})


def test_its_priority_is_normal():
    assert SegVisualizationHook.priority == Hook.priority == "NORMAL"
