import gc
import json
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config import HOOKS
from jengine.extras.augment import MeanTeacherHook
from jengine.extras.diagnose import EmptyCacheHook, MemoryProfilerHook, ProfilerHook
from jengine.extras.drawing import NaiveVisualizationHook
from jengine.hooks import CheckInvalidLossHook, Hook
from jengine.train import StepContext
from tests.refusals import check_refusal
from tests.runner_fixture import QuickRunner


def run_two_epochs(hook, runner):
    """Call the stages of two epochs of four iterations, each followed by a validation of four."""
    for _ in range(2):
        for mode in ("train", "val"):
            getattr(hook, f"before_{mode}_epoch")(runner)
            for i in range(4):
                getattr(hook, f"after_{mode}_iter")(runner, batch_idx=i)
            getattr(hook, f"after_{mode}_epoch")(runner)


@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        (dict(), 4),  # after each epoch, of training and of validation
        (dict(after_epoch=False, before_epoch=True), 4),
        (dict(after_epoch=False, after_iter=True), 16),
        (dict(after_epoch=False), 0),
        (dict(before_epoch=True, after_iter=True), 24),
    ],
)
def test_garbage_is_collected_at_the_configured_stages(monkeypatch, runner, arguments, calls):
    counted = []
    monkeypatch.setattr(gc, "collect", lambda: counted.append("gc"))
    monkeypatch.setattr(jax, "clear_caches", lambda: counted.append("clear"))
    run_two_epochs(EmptyCacheHook(**arguments), runner)
    assert counted == ["gc"] * calls


@pytest.mark.usefixtures("only_new_garbage")
def test_compiled_functions_are_dropped_only_with_clear_caches(monkeypatch, runner):
    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(True))
    EmptyCacheHook(clear_caches=True).after_train_epoch(runner)
    assert cleared == [True]
    with pytest.raises(ValueError, match="clear_caches needs after_iter=False"):
        EmptyCacheHook(clear_caches=True, after_iter=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_loss_is_checked_at_the_interval(runner, bad, caplog):
    hook = CheckInvalidLossHook(interval=50)
    assert [hook.next_step(runner, step) for step in (0, 49, 50)] == [49, 49, 99]
    runner.train_loop.iter = 49
    hook.after_train_iter(runner, 0, outputs={"loss": 1.0})
    with pytest.raises(AssertionError, match=f"the loss must be finite, got {float(bad)} in iteration 49") as caught:
        hook.after_train_iter(runner, 0, outputs={"loss": bad})
    assert isinstance(caught.value, FloatingPointError)
    assert "the loss became infinite or NaN!" in caplog.text


def test_memory_is_logged_at_the_interval_in_each_mode(runner, caplog):
    caplog.set_level("INFO")
    hook = MemoryProfilerHook(interval=2)
    assert hook.next_step(runner, 0) == 1
    hook.after_train_iter(runner, batch_idx=1)
    for mode in ("val", "test"):
        for index in range(5):
            getattr(hook, f"after_{mode}_iter")(runner, batch_idx=index)
    assert len(caplog.records) == 5
    assert all(record.getMessage().startswith("Memory available: ") for record in caplog.records)
    assert " process: " in caplog.text


def test_devices_that_report_their_memory_are_logged_and_the_process_without_psutil(runner, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    stats = {"bytes_in_use": 5 * 2**20, "peak_bytes_in_use": 7 * 2**20}
    device = types.SimpleNamespace(platform="gpu", id=3, memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    caplog.set_level("INFO")
    MemoryProfilerHook(interval=1).after_train_iter(runner, batch_idx=0)
    assert caplog.records[0].getMessage().startswith("Memory process_peak: ")
    assert "gpu:3: 5 MB (peak 7 MB)" in caplog.text


def train_teacher(hook, weights):
    """Return the teacher's weight before and after each step, and its last state; `weights` are the model's after the steps."""
    state = hook.init_traced_state({"w": jnp.float32(0)}, {"mean": jnp.float32(0)})
    seen, after, before = [], [], 0.0
    for i, weight in enumerate(weights):
        nothing = dict(rng=jax.random.key(0), batch=None, opt_state=None, step=jnp.int32(i))
        ctx = StepContext(
            params={"w": jnp.float32(before)}, model_state={"mean": jnp.float32(before)}, hyperparams={"lr": 1.0},
            hook_state=state, **nothing,
        )  # fmt: skip
        ctx = hook.traced_batch(ctx)
        seen.append(float(ctx.hyperparams["teacher"]["params"]["w"]))
        moved = dict(params={"w": jnp.float32(weight)}, model_state={"mean": jnp.float32(weight)})
        state = hook.traced_update(ctx.replace(**moved)).hook_state
        after.append(float(state.params["w"]))
        before = weight
    return seen, after, state


def test_the_teacher_follows_the_model_and_reaches_the_loss():
    # 0, then half of the way to each weight
    seen, after, state = train_teacher(MeanTeacherHook(momentum=0.5), [8.0, 8.0, 16.0])
    assert after == [4.0, 6.0, 11.0]
    assert seen == [0.0, 4.0, 6.0]
    assert state.model_state is None


def test_the_teacher_and_its_model_state_are_updated_at_the_interval():
    hook = MeanTeacherHook(momentum=0.5, interval=2, skip_buffer=False)
    _, after, state = train_teacher(hook, [8.0, 8.0, 8.0, 8.0])
    assert after == [0.0, 4.0, 4.0, 6.0]
    assert float(state.model_state["mean"]) == 6.0


@pytest.mark.parametrize(("evaluates", "expected"), [(True, 5.0), (False, 1.0)])
def test_the_teacher_is_evaluated_if_configured(runner, evaluates, expected):
    hook = MeanTeacherHook(evaluate_on_teacher=evaluates)
    own = hook.init_traced_state({"w": jnp.float32(5.0)}, {})
    runner.state = runner.state.replace(hook_state={"MeanTeacherHook": own})
    found = hook.eval_variables(runner, {"": ({"w": jnp.float32(1.0)}, {})})
    assert float(found[""][0]["w"]) == expected


class FakeVisualizer:
    """Record the calls of a visualizer."""

    def __init__(self):
        self.graphs, self.samples, self.dataset_meta = [], [], None

    def add_graph(self, model):
        self.graphs.append(model)

    def add_datasample(self, name, image, data_sample, draw_gt, draw_pred, step):
        self.samples.append((name, image, data_sample, draw_gt, draw_pred, step))


def run_test(hook, batches, files=None):
    loader = types.SimpleNamespace(metainfo=None if files is None else dict(img_path=files))
    loop = types.SimpleNamespace(dataloader=loader)
    runner = types.SimpleNamespace(visualizer=FakeVisualizer(), test_loop=loop, iter=7, model="the model")
    hook.before_train(runner)
    hook.before_test_epoch(runner)
    for i, batch in enumerate(batches):
        hook.after_test_iter(runner, i, data_batch=batch, outputs=np.arange(len(batch["image"])) + 10 * i)
    return runner.visualizer


def test_every_second_batch_is_drawn_under_the_names_of_its_files():
    hook = NaiveVisualizationHook(interval=2, draw_gt=False)
    batches = [{"image": np.full((3, 2, 2, 3), i, np.uint8)} for i in range(5)]
    files = [f"data/img/{i}.jpg" for i in range(15)]
    drawn = run_test(hook, batches, files)
    assert [name for name, *_ in drawn.samples] == ["3.jpg", "4.jpg", "5.jpg", "9.jpg", "10.jpg", "11.jpg"]
    assert {(gt, pred, step) for *_, gt, pred, step in drawn.samples} == {(False, True, 7)}
    assert [dict(sample) for _, _, sample, *_ in drawn.samples] == [{"pred_label": i} for i in (10, 11, 12, 30, 31, 32)]
    assert drawn.dataset_meta == {"img_path": files}
    assert drawn.graphs == ["the model"]
    assert NaiveVisualizationHook.priority == "LOWEST"


def test_the_preprocessing_of_an_image_is_reverted():
    original = np.array([[[10, 20, 30], [40, 50, 60]]], np.uint8)  # 1 high, 2 wide
    padded = np.zeros((1, 2, 4, 3), np.float32)
    padded[0, :1, :2] = (original - 100.0) / 50.0
    batch = {
        "image": padded, "scale": np.array([[2, 1]]), "ori_width": np.array([4]), "ori_height": np.array([2]),
        "sample_idx": np.array([6]),
    }  # fmt: skip
    hook = NaiveVisualizationHook(img_norm_cfg=dict(mean=[100.0] * 3, std=[50.0] * 3))
    (name, image, *_), = run_test(hook, [batch]).samples  # fmt: skip
    assert name == "sample_6"
    assert image.shape == (2, 4, 3)
    np.testing.assert_array_equal(image[0, [0, 3]], original[0])


def test_segmentations_are_restored_with_their_image():
    labels = np.zeros((1, 2, 4), np.int32)
    labels[0, 0, :2] = [1, 2]
    batch = {
        "image": np.zeros((1, 2, 4, 3), np.float32), "label": labels, "scale": np.array([[2, 1]]),
        "ori_width": np.array([4]), "ori_height": np.array([2]),
    }  # fmt: skip
    hook = NaiveVisualizationHook()
    logits = np.eye(3)[[[[0, 2]]]]  # float[1, 1, 2, 3], half of the size of the image
    data_sample = hook.make_data_sample({key: value[0] for key, value in batch.items()}, logits[0])
    assert data_sample["gt_sem_seg"].tolist() == [[1, 1, 2, 2], [1, 1, 2, 2]]
    assert data_sample["pred_sem_seg"].tolist() == [[0] * 4] * 2  # the class 2 is in the padding
    assert list(NaiveVisualizationHook(draw_pred=False).make_data_sample({"image": labels[0]}, None)) == []


def test_images_from_0_to_1_are_drawn_in_full_brightness():
    (_, image, *_), = run_test(NaiveVisualizationHook(), [{"image": np.full((1, 1, 1, 1), 0.5, np.float32)}]).samples  # fmt: skip
    assert image.tolist() == [[[128]]]


def test_padding_of_a_batch_is_not_drawn():
    batch = {"image": np.zeros((3, 1, 1, 3), np.uint8), "mask": np.array([True, True, False])}
    assert [name for name, *_ in run_test(NaiveVisualizationHook(), [batch]).samples] == ["sample_0", "sample_1"]


@pytest.fixture
def trace_calls(monkeypatch):
    """Record the calls of `jax.profiler`."""
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path, **options: calls.append(path.rsplit("/", 1)[1]))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


@pytest.fixture
def run_profiled(tmp_path):
    """Return a function that trains three epochs of four iterations with a hook."""

    def run_profiled(hook):
        runner = QuickRunner(tmp_path / "run", [hook], epochs=3, epoch_length=4)
        runner.train()
        return runner

    return run_profiled


@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        (dict(), ["iter_0", "stop"]),
        (dict(by_epoch=False, profile_times=2), ["iter_0", "stop"]),
        (dict(schedule=dict(skip_first=3, active=2)), ["iter_3", "stop"]),
        (
            dict(by_epoch=False, schedule=dict(wait=1, warmup=1, active=2, repeat=2)),
            ["iter_2", "stop", "iter_6", "stop"],
        ),
        (
            dict(by_epoch=False, schedule=dict(active=5, repeat=0)),
            ["iter_0", "stop", "iter_5", "stop", "iter_10", "stop"],
        ),
    ],
)
def test_iterations_are_traced_according_to_the_schedule(run_profiled, trace_calls, arguments, calls):
    run_profiled(ProfilerHook(**arguments))
    assert trace_calls == calls


@pytest.mark.parametrize(
    ("schedule", "first"),  # the first iteration that is traced, from each of the first twelve on
    [
        (None, [0, 1, *[math.inf] * 10]),
        (dict(skip_first=3, active=2), [3, 3, 3, 3, 4, *[math.inf] * 7]),
        (dict(wait=1, warmup=1, active=2, repeat=2), [2, 2, 2, 3, 6, 6, 6, 7, *[math.inf] * 4]),
        (dict(wait=1, active=2, repeat=0), [1, 1, 2, 4, 4, 5, 7, 7, 8, 10, 10, 11]),
        (dict(wait=10**9, active=1), [10**9] * 12),  # without a search step by step
    ],
)
def test_the_profiler_returns_the_next_step_to_trace(schedule, first):
    hook = ProfilerHook(by_epoch=False, profile_times=2, schedule=schedule)
    assert [hook.next_step(None, i) for i in range(12)] == first


def test_the_path_of_each_trace_is_passed_on(run_profiled, trace_calls, caplog):
    caplog.set_level("INFO")
    paths = []
    runner = run_profiled(ProfilerHook(on_trace_ready=paths.append))
    assert paths == [f"{runner.log_dir}/tf_tracing_logs/iter_0"]
    run_profiled(ProfilerHook(on_trace_ready=dict(type="tb_trace", dir_name="/elsewhere")))
    assert "ProfilerHook: wrote the trace /elsewhere/iter_0" in caplog.text


def test_the_newest_trace_is_also_written_as_json(run_profiled, tmp_path):
    run_profiled(ProfilerHook(by_epoch=False, json_trace_path=tmp_path / "traces" / "newest.json"))
    names = {
        event.get("name") for event in json.loads((tmp_path / "traces" / "newest.json").read_text())["traceEvents"]
    }
    assert "process_name" in names


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(profile_times=2), ValueError, ["profile_times", "by_epoch=True", "got 2"]),
        (dict(by_epoch=False, schedule=dict(activ=1)), TypeError, ["'activ'", "did you mean 'active'"]),
        (
            dict(by_epoch=False, schedule=dict(active=0)),
            ValueError,
            ["`schedule.active`", "at least 1"],
        ),
        (dict(on_trace_ready=dict(type="log_trace")), ValueError, ["got the type 'log_trace': PyTorch's table"]),
        (dict(on_trace_ready=dict(type="tb_trace", dirname="x")), ValueError, ["did you mean 'dir_name'"]),
        (dict(on_trace_ready=3), TypeError, ["on_trace_ready`", "None", "got 3"]),
        (dict(with_stack=True), TypeError, ["with_stack"]),
    ],
)
def test_invalid_arguments_of_the_profiler_are_refused(arguments, error, words):
    check_refusal(lambda: HOOKS.build(dict(type="ProfilerHook", **arguments)), error, *words)


@pytest.mark.parametrize(
    ("cfg", "error", "words"),
    [
        (dict(type="WarmupParamHook", param_name="a", value=1.0, warmup_epochs=0), ValueError, ["warmup_epochs`", "above 0", "got 0"]),
        (dict(type="PreciseBNHook", num_samples=0), ValueError, ["num_samples`", "at least 1"]),
        (dict(type="SwitchRecipeHook", schedule=[dict(action_epoch=0)]), ValueError, ["`schedule[0].action_epoch`", "at least 1", "got 0"]),
        (dict(type="SwitchRecipeHook", schedule=[dict(action_epoch=2, los=1)]), ValueError, ["did you mean 'loss'"]),
        (dict(type="SwitchRecipeHook", schedule=[dict(action_epoch=2, loss=1)] * 2), ValueError, ["action_epoch", "got 2 twice"]),
        (dict(type="SwitchRecipeHook", schedule=[dict(action_epoch=2, hyperparams=dict(mixup=0))]), ValueError, ["action_epoch=1", "got 'mixup' first in epoch 2"]),
        (dict(type="SwitchRecipeHook", schedule=[dict(action_epoch=2, batch_augments=dict(augment=[]))]), ValueError, ["did you mean 'augments'"]),
        (dict(type="SwitchRecipeHook", schedule=[dict(action_epoch=2, batch_augments=dict(augments=[]))]), ValueError, ["got []"]),
        (dict(type="SwitchRecipeHook", schedule=[dict(action_epoch=2, batch_augments=dict(augments=[max], probs=[2]))]), ValueError, ["got [2]"]),
        (dict(type="SwitchRecipeHook", schedule=[dict(action_epoch=2, batch_augments=3)]), TypeError, ["a function"]),
        (dict(type="SwitchRecipeHook", schedule=[dict(action_epoch=2, train_pipeline="Flip")]), TypeError, ["of transforms"]),
        (dict(type="PipelineSwitchHook", switch_epoch=-1, switch_pipeline=[]), ValueError, ["switch_epoch`", "at least 0", "got -1"]),
        (dict(type="PipelineSwitchHook", switch_epoch=1, switch_pipeline=[3]), TypeError, ["a sample"]),
        (dict(type="NaiveVisualizationHook", interval=0), ValueError, ["interval`", "at least 1"]),
        (dict(type="MeanTeacherHook", momentum=2.0), AssertionError, ["momentum"]),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused_with_the_legal_values(cfg, error, words):
    check_refusal(lambda: HOOKS.build(cfg), error, *words)


def test_class_priorities_are_those_of_the_documentation():
    expected = dict(
        RuntimeInfoHook=10, IterTimerHook=50, DistSamplerSeedHook=50, LoggerHook=60, ParamSchedulerHook=70, CheckpointHook=90,
        EMAHook=50, EmptyCacheHook=50, NaiveVisualizationHook=100, ProfilerHook=90, EarlyStoppingHook=100, PreciseBNHook=40,
    )  # fmt: skip
    from jengine.hooks import get_priority

    assert {name: get_priority(HOOKS.get(name).priority) for name in expected} == expected
    assert issubclass(HOOKS.get("EmptyCacheHook"), Hook)
