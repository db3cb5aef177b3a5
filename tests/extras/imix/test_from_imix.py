import copy

import pytest

from jengine.config.errors import ConfigError
from jengine.extras.imix import from_imix
from jengine.runner import Runner
from tests.refusals import check_refusal


def make_config(**changes):
    return {
        "model": dict(type="LinenModel", module=dict(type="SmallCNN"), loss=dict(type="CrossEntropy")),
        "work_dir": "run",
        "train_data": dict(samples_per_gpu=8, workers_per_gpu=2, data=dict(type="Digits")),
        "optimizer": dict(type="SGD", lr=0.1),
        "total_epochs": 3,
        **changes,
    }


def test_every_key_is_converted():
    cfg = make_config(
        test_data=dict(samples_per_gpu=4, data=dict(type="Digits", split="test"), post_processor=dict(metrics=[dict(type="Accuracy")])),
        optimizer_config=dict(grad_clip=dict(max_norm=2)),
        lr_config=dict(policy="WarmupCosineLR", max_iters=100, warmup_iters=7),
        gradient_accumulation_steps=4,
        log_config=dict(period=5, hooks=[dict(type="JSONLoggerHook")]),
        checkpoint_config=dict(iter_period=10),
        eval_iter_period=5,
        custom_hooks=[dict(type="EMAIterHook", level="LOW")],
        load_from="weights",
        resume_from="here",
        seed=3,
    )  # fmt: skip
    before = copy.deepcopy(cfg)
    arguments = from_imix(cfg)
    assert cfg == before
    assert arguments["train_dataloader"] == dict(batch_size=8, num_workers=2, dataset=dict(type="Digits"))
    assert arguments["val_dataloader"]["batch_size"] == 4
    assert arguments["train_cfg"] == dict(by_epoch=True, max_epochs=3, val_begin=4)
    assert arguments["optim_wrapper"] == dict(
        type="OptimWrapper", accumulative_counts=4, clip_grad=dict(max_norm=2), optimizer=dict(type="SGD", lr=0.1)
    )
    assert arguments["param_scheduler"] == [dict(type="WarmupCosineLR", max_iters=100, warmup_iters=7)]
    assert arguments["default_hooks"] == dict(timer=None, logger=None, param_scheduler=None, checkpoint=None)
    assert arguments["custom_hooks"] == [
        dict(type="OptimizerHook", grad_clip=dict(max_norm=2), gradient_accumulation_steps=4),
        dict(type="LRSchedulerHook", is_lr_accumulation=True),
        dict(type="IterationTimerHook", warmup_iter=7),
        dict(type="PeriodicLogger", loggers=[dict(type="JSONLoggerHook")], log_config_period=5),
        dict(type="CheckPointHook", iter_period=10),
        dict(type="EvaluateHook", eval_iter_period=5),
        dict(type="EMAIterHook", level="LOW"),
    ]
    assert (arguments["load_from"], arguments["resume"], arguments["randomness"]) == ("weights", "here", dict(seed=3))


def test_half_precision_and_iterations():
    arguments = from_imix(make_config(total_epochs=None, max_iter=50, by_iter=True, fp16=dict(init_scale=4.0)))
    assert arguments["optim_wrapper"]["type"] == "AmpOptimWrapper"
    assert arguments["optim_wrapper"]["loss_scale"] == dict(init_scale=4.0)
    assert arguments["train_cfg"] == dict(by_epoch=False, max_iters=50, val_begin=51)
    assert from_imix(make_config(fp16=True))["optim_wrapper"]["loss_scale"] == "dynamic"
    assert "val_dataloader" not in arguments


def test_results_on_visdial_are_reduced_to_ndcg():
    data = dict(samples_per_gpu=4, post_processor=dict(metrics=[dict(type="VisDialMetric")]))
    hooks = [
        from_imix(make_config(test_data={**data, "data": dict(type=kind)}))["custom_hooks"][-1]
        for kind in ("VisDialDataset", "VQADataset")
    ]
    assert hooks == [
        dict(type="EvaluateHook", eval_iter_period=None, metrics=["ndcg"]),
        dict(type="EvaluateHook", eval_iter_period=None),
    ]


def test_by_iter_false_trains_by_epochs():
    assert from_imix(make_config(by_iter=False))["train_cfg"]["by_epoch"] is True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(optimiser={}), ["unknown key", "'optimiser'", "did you mean 'optimizer'"]),
        (dict(optimizer=None), ["'optimizer'"]),
        (dict(max_iter=10), ["`total_epochs`", "`max_iter`", "got 3 and 10"]),
        (dict(total_epochs=None), ["got None and None"]),
        (dict(by_iter=True), ["`by_iter`", "max_iter", "total_epochs", "got True"]),
        (dict(lr_config=dict(max_iters=3)), ["`lr_config`", "`policy`"]),
        (dict(momentum_config=dict(eta_min=0.1)), ["`momentum_config`", "`policy`"]),
        (dict(train_data=dict(data={})), ["`train_data`", "'samples_per_gpu'"]),
        (dict(train_data=dict(data={}, sample_per_gpu=1)), ["did you mean 'samples_per_gpu'"]),
        (dict(log_config=dict(interval=3)), ["`log_config`", "'interval'"]),
        (dict(test_data=dict(samples_per_gpu=1, data={})), ["`test_data`", "post_processor"]),
    ],
)
def test_bad_configs_are_rejected(changes, words):
    check_refusal(lambda: from_imix(make_config(**changes)), ConfigError, *words)


def test_a_runner_can_be_built_from_the_arguments(tmp_path):
    runner = Runner.from_cfg(from_imix(make_config(work_dir=str(tmp_path))))
    assert len([hook for hook in runner.hooks if type(hook).__module__.startswith("jengine.extras.imix")]) == 5
