import math
import types

import jax
import numpy as np
import pytest

from jengine.contrib.segmentation import SegVisualizationHook
from jengine.contrib.segmentation.visualization_hook import join_shards
from jengine.errors import ConfigError
from jengine.hooks import Hook
from jengine.visualization import LocalVisualizer, Visualizer

FILES = [f"/data/city_{i}.png" for i in range(10)]


class Recorder(LocalVisualizer):
    def __init__(self):
        super().__init__()
        self.drawn = []

    def add_datasample(self, name, image, data_sample=None, **kwargs):
        self.drawn.append((name, image, data_sample, kwargs))


def runner_with(metainfo=None):
    loop = types.SimpleNamespace(dataloader=types.SimpleNamespace(metainfo=metainfo))
    return types.SimpleNamespace(visualizer=Recorder(), val_loop=loop, test_loop=loop, train_loop=loop, iter=7)


def batch(number, rows=2, **more):
    """Batch `number` of images whose value is the number of the sample."""
    values = np.arange(number * rows, (number + 1) * rows, dtype=np.uint8)
    image = np.broadcast_to(values[:, None, None, None], (rows, 2, 2, 3))
    return {"image": image, "label": np.zeros((rows, 2, 2), np.int32), **more}


def run(hook, runner, mode, batches=5):
    for i in range(batches):
        getattr(hook, f"after_{mode}_iter")(
            runner, batch_idx=i, data_batch=batch(i), outputs=np.ones((2, 2, 2), np.int32)
        )


@pytest.fixture
def read_files(monkeypatch):
    """Files need not be there: each has the number in its name as its value, in twice the size of the labels."""
    number = lambda path: int(path.split("_")[-1].split(".")[0])  # noqa: E731
    monkeypatch.setattr(
        "jengine.contrib.segmentation.visualization_hook._read_rgb",
        lambda path: np.full((4, 4, 3), number(path), np.uint8),
    )


@pytest.mark.parametrize("mode", ["val", "test"])
def test_every_sample_of_a_batch_that_is_due_is_drawn_under_its_file(mode, read_files):
    runner = runner_with({"img_path": FILES})
    run(SegVisualizationHook(draw=True, interval=2), runner, mode)
    # five batches of two: the second and the fourth are due
    assert [name for name, *_ in runner.visualizer.drawn] == [f"{mode}_city_{i}.png" for i in (2, 3, 6, 7)]
    assert [image[0, 0, 0] for _, image, *_ in runner.visualizer.drawn] == [2, 3, 6, 7]
    assert all(kwargs["step"] == 7 for *_, kwargs in runner.visualizer.drawn)
    sample = runner.visualizer.drawn[0][2]
    assert sample["pred_sem_seg"].shape == sample["gt_sem_seg"].shape == (4, 4)  # enlarged to the file


def test_training_draws_nothing_and_a_hook_that_is_off_neither():
    runner = runner_with()
    hook = SegVisualizationHook(draw=True, interval=1)
    run(hook, runner, "train")
    assert hook.next_step(runner, 3) == math.inf  # nor keeps it iterations apart
    with pytest.warns(UserWarning, match="draw=False: nothing will be drawn"):
        off = SegVisualizationHook(interval=1)
    run(off, runner, "val")
    assert runner.visualizer.drawn == []


def test_show_takes_the_backends_away_and_warns():
    runner = runner_with()
    runner.visualizer.vis_backends = {"a": object()}
    with pytest.warns(UserWarning, match="the visualizer writes nothing any more"):
        hook = SegVisualizationHook(draw=True, interval=1, show=True, wait_time=0.5)
    hook.before_run(runner)
    assert runner.visualizer.vis_backends == {}
    run(hook, runner, "val", batches=1)
    assert {(k["show"], k["wait_time"]) for *_, k in runner.visualizer.drawn} == {(True, 0.5)}


def test_without_files_the_batchs_image_is_drawn_under_its_number():
    runner = runner_with({"classes": ("a", "b")})
    run(SegVisualizationHook(draw=True, interval=5), runner, "val")
    assert [(name, image[0, 0, 0]) for name, image, *_ in runner.visualizer.drawn] == [("val_8", 8), ("val_9", 9)]
    assert runner.visualizer.dataset_meta == {"classes": ("a", "b")}


def test_the_batch_says_which_samples_it_holds_and_what_is_padding():
    runner = runner_with()
    hook = SegVisualizationHook(draw=True, interval=1, prediction="seg")
    logits = np.zeros((2, 2, 2, 3), np.float32)
    logits[..., 1] = 1
    more = {"sample_idx": np.array([41, 40]), "mask": np.array([True, False])}
    hook.after_val_iter(runner, batch_idx=0, data_batch=batch(0, **more), outputs={"seg": logits})
    ((name, _, sample, _),) = runner.visualizer.drawn
    assert name == "val_41"
    assert (sample["pred_sem_seg"] == 1).all()


def test_processes_other_than_the_first_draw_nothing(monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    runner = runner_with()
    run(SegVisualizationHook(draw=True, interval=1), runner, "val")
    assert runner.visualizer.drawn == []


@pytest.mark.parametrize("spec", [jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()])
def test_the_rows_of_a_divided_array_are_joined_in_order(spec):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    values = np.arange(24).reshape(8, 3)
    found = join_shards(jax.device_put(values, jax.sharding.NamedSharding(mesh, spec)))
    assert found.tolist() == values.tolist()


def test_bad_arguments_and_missing_entries_are_refused():
    with pytest.raises(ConfigError, match="interval is at least 1"):
        SegVisualizationHook(draw=True, interval=0)
    with pytest.raises(TypeError, match=r"found 2\.0"):
        SegVisualizationHook(draw=True, interval=2.0)
    with pytest.raises(ConfigError, match="file systems; found the storage"):
        SegVisualizationHook(draw=True, backend_args=dict(backend="petrel"))
    assert SegVisualizationHook(draw=True, file_client_args=dict(backend="disk")).draw
    hook = SegVisualizationHook(draw=True, interval=1, prediction="segm", image="img")
    with pytest.raises(KeyError, match="did you mean 'seg'"):
        hook.after_val_iter(runner_with(), 0, batch(0), {"seg": np.zeros((2, 2, 2), np.int32)})
    with pytest.raises(KeyError, match="the batch has no 'img' to draw on"):
        hook.after_val_iter(runner_with(), 0, batch(0), {"segm": np.zeros((2, 2, 2), np.int32)})


def test_a_visualizer_that_cannot_draw_is_refused_before_training():
    runner = runner_with()
    runner.visualizer = Visualizer()
    with pytest.raises(ConfigError, match="visualizer=dict\\(type='LocalVisualizer'\\)"):
        SegVisualizationHook(draw=True).before_run(runner)


def test_its_priority_is_normal():
    assert SegVisualizationHook.priority == Hook.priority == "NORMAL"
