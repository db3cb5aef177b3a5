import json
import os
import signal

import jax
import numpy as np
import pytest

from jengine import checkpoint
from jengine.extras.imix import CheckPointHook, EMAIterHook, EvaluateHook, HookBase
from jengine.extras.imix.evaluate import is_better


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


def list_names(run_dir):
    return sorted(path.rsplit("/", 1)[-1] for path in checkpoint.list_checkpoints(run_dir))


def load_weight(run_dir, name):
    return float(checkpoint.load(run_dir / name).params["w"])


def test_checkpoints_are_saved_every_period_and_at_the_end(imix_runner, run_dir):
    imix_runner(4, total_epochs=4, checkpoint_config=dict(prefix="p", epoch_period=2)).train()
    assert list_names(run_dir) == ["p_epoch1_model", "p_epoch3_model", "p_model_final"]


def test_the_last_iteration_of_an_epoch_is_saved_as_the_epoch(imix_runner, run_dir):
    imix_runner(18, checkpoint_config=dict(prefix="p", iter_period=3)).train()
    assert list_names(run_dir) == ["p_epoch0_iter3_model", "p_epoch0_iter6_model", "p_epoch0_model", "p_model_final"]


def test_training_by_iterations_counts_from_zero(imix_runner, run_dir):
    imix_runner(4, max_iter=6, checkpoint_config=dict(prefix="p", iter_period=2)).train()
    assert list_names(run_dir) == ["p_iter0000001_model", "p_iter0000003_model", "p_model_final"]


def test_the_oldest_checkpoints_are_deleted_and_the_final_one_is_kept(imix_runner, run_dir):
    imix_runner(4, total_epochs=3, checkpoint_config=dict(prefix="p", max_num_checkpoints=1)).train()
    assert list_names(run_dir) == ["p_epoch2_model", "p_model_final"]


def test_the_default_prefix_names_model_and_dataset(imix_runner, run_dir):
    imix_runner(4, checkpoint_config={}).train()
    assert list_names(run_dir) == [
        "FunctionalModel_ArrayDataset_epoch0_model",
        "FunctionalModel_ArrayDataset_model_final",
    ]


def test_the_latest_checkpoint_is_restored_from_the_state():
    hook, other = CheckPointHook(), CheckPointHook()
    other.load_state_dict(hook.state_dict())
    assert other.name_at(0) is None
    other.load_state_dict({"kept": ["a"], "evicting": [], "saved": [3, "a"]})
    assert other.name_at(3) == "a"


def interrupt_after(iterations):
    class Interrupt(HookBase):
        def before_train_iter(self):
            if self.trainer.iter == iterations:
                raise InterruptedError("killed")

    return Interrupt()


def test_a_resumed_run_ends_like_an_uninterrupted_run(imix_runner, run_dir, tmp_path, test_data):
    settings = dict(
        optimizer=dict(type="SGD", lr=0.1, momentum=0.9),
        total_epochs=3,
        lr_config=dict(policy="WarmupCosineLR", max_iters=9, warmup_iters=4),
        checkpoint_config=dict(prefix="p", iter_period=2, max_num_checkpoints=2),
        log_config=dict(period=1, hooks=[dict(type="JSONLoggerHook")]),
        test_data=test_data,
    )
    full = imix_runner(6, work_dir=str(tmp_path / "full"), **settings).train()
    with pytest.raises(InterruptedError):
        imix_runner(6, custom_hooks=[interrupt_after(5)], **settings).train()
    assert list_names(run_dir) == ["best_result", "model_best", "p_epoch0_model", "p_epoch1_iter2_model"]
    resumed = imix_runner(6, resume_from=str(run_dir / "p_epoch0_model"), **settings).train()
    assert float(resumed.params["w"]) == float(full.params["w"])
    assert list_names(run_dir) == list_names(tmp_path / "full")
    for file, volatile in (
        ("training_status.json", {"data_time", "iter_time", "epoch_time"}),
        ("eval_result.json", set()),
    ):
        lines = [
            [{k: v for k, v in json.loads(line).items() if k not in volatile} for line in (path / file).open()]
            for path in (run_dir, tmp_path / "full")
        ]
        assert lines[0] == lines[1]


def test_a_signal_saves_the_progress_and_no_final_checkpoint(imix_runner, run_dir, tmp_path):
    class Signal(HookBase):
        def before_train_iter(self):
            if self.trainer.iter == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    settings = dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9), total_epochs=3)
    full = imix_runner(6, work_dir=str(tmp_path / "full"), **settings).train()
    with pytest.raises(SystemExit):
        imix_runner(6, custom_hooks=[Signal()], **settings).train()
    assert list_names(run_dir) == ["p_interrupted_model"]
    assert checkpoint.read_meta(run_dir / "p_interrupted_model")["meta"]["iter"] == 5
    resumed = imix_runner(6, resume_from=str(run_dir), **settings).train()
    assert float(resumed.params["w"]) == float(full.params["w"])


def read_results(run_dir):
    return [json.loads(line) for line in (run_dir / "eval_result.json").open()]


def fake_validations(monkeypatch, metrics):
    """Let successive validations return these metrics."""
    from jengine.runner import ValLoop

    results = iter(metrics)
    monkeypatch.setattr(ValLoop, "run", lambda self: next(results))


def test_each_epoch_writes_a_line_and_the_best_is_a_checkpoint(imix_runner, run_dir, test_data, monkeypatch):
    fake_validations(monkeypatch, [{"acc": 0.3}, {"acc": 0.7}, {"acc": 0.5}])
    settings = dict(checkpoint_config=dict(prefix="p"), test_data=test_data)
    imix_runner(4, total_epochs=3, optimizer=dict(type="SGD", lr=0.1), **settings).train()
    assert read_results(run_dir) == [
        dict(iter=2 * e + 1, max_iter=6, epoch=e, max_epoch=3, acc=acc, model_name=f"p_epoch{e}_model")
        for e, acc in enumerate((0.3, 0.7, 0.5))
    ]
    best, same = (checkpoint.load(run_dir / name) for name in ("best_result", "p_epoch1_model"))
    assert jax.tree.all(jax.tree.map(np.array_equal, best.state["params"], same.state["params"]))
    assert load_weight(run_dir, "best_result") != load_weight(run_dir, "p_epoch2_model")
    assert best.meta["meta"]["iter"] == same.meta["meta"]["iter"] == 4
    text = next(run_dir.glob("*/*.log")).read_text()
    assert "The best result (acc: 0.7000) is saved to best_result, its weights to model_best." in text
    weights = checkpoint.load(run_dir / "model_best")
    assert sorted(weights.state) == ["model_state", "params"]
    assert weights.params["w"] == best.params["w"]
    assert weights.meta["meta"]["iter"] == 4


def test_a_result_is_reduced_to_the_selected_metrics(imix_runner, run_dir, test_data, monkeypatch):
    metrics = [{"visdial/r@1": 0.9, "visdial/ndcg": 0.2}, {"visdial/r@1": 0.1, "visdial/ndcg": 0.4}]
    fake_validations(monkeypatch, metrics)
    runner = imix_runner(4, total_epochs=2, test_data=test_data)
    (hook,) = (hook for hook in runner.hooks if isinstance(hook, EvaluateHook))
    hook.metrics = ["ndcg"]
    runner.train()
    assert [
        sorted(set(line) - {"iter", "max_iter", "epoch", "max_epoch", "model_name"}) for line in read_results(run_dir)
    ] == [["visdial/ndcg"]] * 2
    assert checkpoint.read_meta(run_dir / "best_result")["meta"]["iter"] == 4  # by ndcg, not by the first metric


def test_results_within_epochs_and_in_a_training_by_iterations(imix_runner, run_dir, test_data):
    imix_runner(10, eval_iter_period=2, test_data=test_data).train()
    assert [line["iter"] for line in read_results(run_dir)] == [1, 3, 4]  # after 2 and 4 iterations, and the epoch of 5
    imix_runner(10, max_iter=5, eval_iter_period=2, test_data=test_data).train()
    assert [line["iter"] for line in read_results(run_dir)] == [1, 3, 4]
    assert "epoch" not in read_results(run_dir)[0]
    # only the hook validates, and only once at each iteration
    assert load_weight(run_dir, "best_result") == load_weight(run_dir, "p_model_final")


def test_a_disabled_evaluation_writes_nothing(imix_runner, run_dir, test_data):
    runner = imix_runner(4, is_run_eval=False, test_data=test_data)
    runner.register_hook(dict(type="EvaluateHook", is_run_eval=False))
    runner.train()
    assert runner.validations == []
    assert not (run_dir / "eval_result.json").exists()


def test_a_period_that_does_not_divide_the_checkpoint_period_is_replaced(imix_runner, run_dir, test_data):
    runner = imix_runner(12, eval_iter_period=3, checkpoint_config=dict(prefix="p", iter_period=2), test_data=test_data)
    runner.train()
    assert [line["iter"] for line in read_results(run_dir)] == [1, 3, 5]
    assert "eval_iter_period=3 does not divide the iter_period=2" in next(run_dir.glob("*/*.log")).read_text()


@pytest.mark.parametrize(
    ("metrics", "better"),
    [
        ({"acc": 0.8, "f1": 0.0}, True),
        ({"acc": 0.7, "f1": 0.6}, True),
        ({"acc": 0.7, "f1": 0.5}, False),
        ({"acc": 0.6, "f1": 0.9}, False),
        ({"acc": float("nan"), "f1": 0.9}, False),
    ],
)
def test_results_are_compared_by_the_first_metric_that_differs(metrics, better):
    assert is_better(metrics, {"acc": 0.7, "f1": 0.5}) is better


def test_a_smaller_loss_is_better():
    assert is_better({"loss": 0.1}, {"loss": 0.2})
    assert not is_better({"loss": 0.3}, {"loss": 0.2})
    assert is_better({"loss": 0.3}, {"loss": float("nan")})
    assert is_better({"loss": 0.3}, {})
    assert not is_better({"loss": float("nan")}, {})  # NaN is never the best


def test_the_average_is_updated_in_the_step_and_saved_after_each_epoch(imix_runner, run_dir):
    runner = imix_runner(
        2,
        total_epochs=2,
        optimizer=dict(type="SGD", lr=1.0),
        checkpoint_config=dict(prefix="p"),
        custom_hooks=[dict(type="EMAIterHook", decay=0.9), dict(type="EMAEpochHook", level=40)],
    )
    state = runner.train()
    # the first of two iterations sets w from 0 to 1
    assert list_names(run_dir) == ["ema_epoch_0", "ema_epoch_1", "p_epoch0_model", "p_epoch1_model", "p_model_final"]
    assert [load_weight(run_dir, f"ema_epoch_{k}") for k in (0, 1)] == pytest.approx([0.1, 0.19])
    assert float(state.params["w"]) == 1.0
    assert load_weight(run_dir, "p_epoch0_model") == 1.0  # not averaged
    assert not checkpoint.find_latest(run_dir).endswith("ema_epoch_1")


def test_an_average_of_1_and_2_with_decay_0_9_is_1_1():
    hook = EMAIterHook(decay=0.9)
    average = hook.init_traced_state({"w": np.float32(1.0)}, {"mean": np.float32(1.0), "count": np.int32(1)})
    from jengine.train import StepContext

    ctx = StepContext(
        step=0, rng=None, batch=None, hyperparams={}, params={"w": np.float32(2.0)},
        model_state={"mean": np.float32(2.0), "count": np.int32(2)}, opt_state=None, hook_state=average,
    )  # fmt: skip
    updated = hook.traced_accumulate(ctx).hook_state
    assert float(updated.params["w"]) == pytest.approx(1.1)
    assert float(updated.model_state["mean"]) == pytest.approx(1.1)
    assert int(updated.model_state["count"]) == 2  # integers are copied
