"""Every hook is used in an example, a config or a recipe in docs/ that the tests run, and works on real data there."""

import ast
import importlib
import importlib.util
import json
import math
import pathlib
import re

import numpy as np
import optax
import pytest

from jengine import Runner, hooks, load_config
from jengine.checkpoint import list_checkpoints, load
from jengine.config import resolve
from jengine.config.plugins import list_extras
from jengine.hooks.hook_list import DEFAULT_HOOKS

ROOT = pathlib.Path(__file__).parent.parent.parent
BASES = {"EvaluatedParamsHook", "Hook", "HookBase"}
WRITERS = {"CommonMetricLoggerHook", "JSONLoggerHook", "TensorboardLoggerHook"}


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exported_hooks():
    """Return the names of all public hooks, and of iMIX's writers."""
    extras = [importlib.import_module(f"jengine.extras.{extra}") for extra in list_extras()]
    names = {
        name
        for package in (hooks, *extras)
        for name in dir(package)
        if _is_hook(getattr(package, name, None)) and getattr(package, name).__name__ == name
    }
    return (names | WRITERS) - BASES


def _is_hook(value):
    return isinstance(value, type) and issubclass(value, hooks.Hook)


def used_names():
    """Return all strings in examples and configs, and the names of the default hooks."""
    names = {hook["type"] for hook in DEFAULT_HOOKS.values()}
    # the hooks that from_imix adds
    names |= {"OptimizerHook", "LRSchedulerHook", "IterationTimerHook", "PeriodicLogger", "CheckPointHook"}
    names |= {"EvaluateHook", "Fp16OptimizerHook", "MomentumSchedulerHook"}
    names |= {"OptunaPruningHook", "FollowHook"}  # which `jengine sweep --search` and `val_cfg=dict(follow=True)` add
    for path in (ROOT / "docs").glob("*.md"):
        blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
        names |= set(re.findall(r"type=\"(\w+)\"", "".join(blocks)))
    for path in [*(ROOT / "configs").glob("*.py"), *(ROOT / "examples").glob("*.py")]:
        tree = ast.parse(path.read_text())
        names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str}
    return names


def test_every_hook_is_used_in_an_example_a_config_or_a_recipe():
    assert len(exported_hooks()) >= 45
    assert exported_hooks() - used_names() == set()


@pytest.fixture(scope="module")
def many_hooks(tmp_path_factory):
    """Train the example with many hooks until it is better than chance; its recipe changes in the third epoch."""
    pytest.importorskip("PIL")
    work_dir = tmp_path_factory.mktemp("many_hooks")
    runner, accuracy = load_example("many_hooks").main(max_epochs=6, target_accuracy=0.3, work_dir=work_dir)
    return runner, accuracy, work_dir, next(work_dir.glob("*/*.log")).read_text()


def read_scalars(work_dir):
    (path,) = work_dir.glob("*/vis_data/scalars.json")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_all_hooks_share_one_compiled_step(many_hooks):
    runner, *_ = many_hooks
    assert runner.programs.update.traces == 1
    assert len(runner.hooks) == 25


def test_training_stops_early_and_the_test_merges_several_views(many_hooks):
    runner, accuracy, _, log = many_hooks
    last = runner.validations[-1][2]["accuracy/top1"]
    assert runner.epoch < 6
    assert "Training stops early: accuracy/top1 is" in log
    assert last > 0.3 >= max((metrics["accuracy/top1"] for _, _, metrics in runner.validations[:-1]), default=0)
    assert accuracy > 0.3
    assert accuracy != last  # the same weights on the same digits, with one shift and with five


def test_hyperparameters_reach_the_step(many_hooks):
    runner, _, work_dir, log = many_hooks
    rows = [row for row in read_scalars(work_dir) if "loss" in row]
    assert {row["epoch_of_the_step"] for row in rows} == set(range(runner.epoch))
    assert all(float(row["dropped_steps"]) == 0 for row in rows)
    # after the warm-up of two epochs, and with the recipe of the third epoch
    assert runner.hyperparams["teacher_weight"] == pytest.approx(0.2)
    switched = {name: runner.hyperparams[name] for name in ("smoothing", "loss_index", "augment_index")}
    assert switched == dict(smoothing=0.0, loss_index=1, augment_index=0)
    assert runner.train_dataloader.dataset.pipeline.transforms == []
    assert "SwitchRecipeHook: changed hyperparams, loss, batch_augments from epoch 3 on" in log
    assert "PipelineSwitchHook: changed the pipeline from epoch 2 on" in log
    losses = [row["loss_label"] for row in rows]
    assert max(losses[:4]) > math.log(10) * 0.8  # cross entropy at first; the Brier score is at most 2
    assert losses[-1] < 2


def test_averages_follow_the_weights(many_hooks):
    runner, *_ = many_hooks
    states, params = runner.state.hook_state, runner.state.params
    for name in ("EMAHook", "MeanTeacherHook"):
        difference = np.abs(np.asarray(states[name].params["head"]["kernel"]) - np.asarray(params["head"]["kernel"]))
        assert 0 < difference.max() < 1, name
    assert int(states["EMAHook"].steps) == runner.iter


def test_the_statistics_of_the_norms_belong_to_the_last_weights(many_hooks):
    runner, *_ = many_hooks
    loader = runner.train_dataloader.copy_at_epoch(runner.epoch - 1)
    images = np.concatenate([batch["image"] for batch, _ in zip(loader, range(4), strict=False)])  # 512 samples
    kernel = np.asarray(runner.state.params["conv0_0"]["kernel"])  # [3, 3, 1, 8]
    padded = np.pad(images[..., 0], ((0, 0), (1, 1), (1, 1)))
    patches = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    convolved = np.einsum("nyxij,ijc->nyxc", patches, kernel[:, :, 0])
    statistics = runner.state.model_state["batch_stats"]["bn0_0"]
    np.testing.assert_allclose(statistics["mean"], convolved.mean(axis=(0, 1, 2)), atol=1e-4)


def test_profiles_memory_and_images_are_written(many_hooks):
    runner, _, work_dir, log = many_hooks
    assert log.count("Memory available: ") >= runner.epoch  # every eleventh training iteration, once per epoch
    assert len(list(work_dir.glob("*/tf_tracing_logs/iter_2/plugins/profile/*/*.xplane.pb"))) == 1
    assert (next(work_dir.glob("*/vis_data")) / "graph.txt").read_text()
    images = list(work_dir.glob("*/vis_data/vis_image/*.png"))
    assert len(images) == 359 - 2 * 128  # of the third and last batch of the test


def test_the_debugging_hooks_of_imix_write_traces_images_and_histograms(tmp_path):
    pytest.importorskip("PIL")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runner = load_example("imix_debug").main(total_epochs=2, work_dir=tmp_path)
    assert runner.programs.update.traces == 1
    assert len(list(tmp_path.glob("traces/profiler-trace-iter2/plugins/profile/*/*.xplane.pb"))) == 1
    log = next(tmp_path.glob("*/*.log")).read_text()
    assert log.count("after_train_iter: all other hooks have run") == 22  # two epochs of eleven
    events = EventAccumulator(str(tmp_path / "runs"), size_guidance=dict(images=0, histograms=0)).Reload()
    steps = [0, 5, 10, 15, 20]
    assert [event.step for event in events.Images("digit")] == steps
    assert [event.step for event in events.Histograms("head")] == steps
    assert events.Histograms("head")[0].histogram_value.num == 160  # the kernel of 16 by 10
    names = {path.rsplit("/", 1)[-1] for path in list_checkpoints(tmp_path)}
    assert {"best_result", "digits_epoch1_model", "digits_model_final"} <= names
    averaged = load(tmp_path / "ema_epoch_1").params["head"]["kernel"]
    assert 0 < np.abs(np.asarray(averaged) - np.asarray(runner.state.params["head"]["kernel"])).max() < 0.5


def test_half_precision_training_of_imix_schedules_learning_rate_and_momentum(tmp_path):
    cfg = resolve(load_config(str(ROOT / "configs" / "imix_fp16.py")))
    cfg["train_cfg"] = dict(by_epoch=False, max_iters=20, val_begin=21)
    for hook in cfg["custom_hooks"]:
        if hook["type"] == "EvaluateHook":
            hook["eval_iter_period"] = 10
    runner = Runner.from_cfg({**cfg, "work_dir": tmp_path})
    state = runner.train()
    assert float(optax.tree.get(state.opt_state, "loss_scale")) <= 1024.0
    rows = [json.loads(line) for line in (tmp_path / "training_status.json").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [9, 19]
    warmup = 0.001 * 0.1 + 0.9  # the tenth update: nine tenths of the warm-up, which starts at a thousandth
    assert rows[1]["lr"] == pytest.approx(0.2 * warmup * (1 + math.cos(math.pi * 9 / 150)) / 2, rel=1e-6)
    momentum = 0.9 * (0.9 + 0.1 * 9 / 49)  # from 0.9 to 1.0 times the value in 49 steps
    assert runner.message_hub.get_scalar("train/momentum").current() == pytest.approx(momentum, rel=1e-4)
    results = [json.loads(line) for line in (tmp_path / "eval_result.json").read_text().splitlines()]
    assert [row["iter"] for row in results] == [9, 19]
    assert results[-1]["accuracy/top1"] > 0.3
