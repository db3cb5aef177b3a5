"""Test that configs written for MMEngine run as they are."""

import pathlib

import pytest

from jengine.config import load_config, resolve
from jengine.config.errors import ConfigError
from jengine.extras.mmengine.mmengine_keys import drop_without_effect
from jengine.runner import Runner

FLAT = """
    default_scope = 'mmpretrain'
    env_cfg = dict(cudnn_benchmark=False, mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0))
    launcher = 'none'
    vis_backends = [dict(type='LocalVisBackend')]
    visualizer = dict(type='Visualizer', vis_backends=vis_backends)
    randomness = dict(seed=1, deterministic=False)
    model = dict(
        type='LinenModel', module=dict(type='SmallCNN', num_classes=10, widths=(2,)), loss=dict(type='CrossEntropy')
    )
    dataset_type = 'Digits'
    train_dataloader = dict(
        batch_size=64, num_workers=0, persistent_workers=False, pin_memory=True,
        dataset=dict(type=dataset_type, split='train'), sampler=dict(type='DefaultSampler', shuffle=True),
        collate_fn=dict(type='default_collate'),
    )
    optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1, momentum=0.9))
    param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=3)]
    train_cfg = dict(type='mmengine.IterBasedTrainLoop', max_iters=4)
    default_hooks = dict(logger=dict(type='LoggerHook', interval=2), checkpoint=dict(type='CheckpointHook', interval=-1))
    custom_hooks = [dict(type='mmengine.EMAHook', momentum=0.1)]
    load_from = None
    resume = False
"""


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_flat_config_trains_and_one_line_names_the_keys_without_effect(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    path = tmp_path / "digits.py"
    path.write_text("\n".join(line[4:] for line in FLAT.splitlines()))
    cfg = load_config(path, [f"work_dir={tmp_path / 'run'}"])
    runner = Runner.from_cfg(cfg)
    runner.train()
    assert runner.iter == 4
    (log,) = pathlib.Path(tmp_path, "run").glob("*/*.log")
    summary = log.read_text().partition("that are changed or have no effect here:\n")[2]
    named = "default_scope env_cfg launcher randomness.deterministic randomness.diff_rank_seed "
    named += "train_dataloader.persistent_workers train_dataloader.pin_memory train_dataloader.collate_fn"
    lines = [line.split(":")[0].strip() for line in summary.splitlines()]
    assert lines[: lines.index("train_dataloader.collate_fn") + 1] == [
        key for key in named.split() if key != "randomness.diff_rank_seed"
    ]


def test_keys_that_change_something_stay():
    cfg = dict(randomness=dict(seed=1), train_dataloader=dict(collate_fn=len, batch_size=2))
    assert drop_without_effect(cfg) == (cfg, [])


RUN = """
model = dict(type='FunctionalModel', init='jax.random.bits', loss='operator.sub')
train_dataloader = dict(
    batch_size=4, dataset='Digits', worker_init_fn=dict(type='init_worker'), timeout=3, pin_memory=True,
    batch_sampler=dict(type='AspectRatioBatchSampler'), collate_fn=dict(type='pseudo_collate'),
)
val_dataloader = dict(batch_size=4, dataset='Digits')
val_evaluator = [dict(type='Accuracy', collect_device='gpu'), dict(type='MeanLoss', loss='operator.sub', collect_dir='/tmp')]
"""
# What the runtime and schedule files of public packages have besides the usual hooks
PUBLIC = {
    "classification": (
        "default_hooks = dict(visualization=dict(type='VisualizationHook', enable=False))\n"
        "visualizer = dict(type='UniversalVisualizer', vis_backends=[dict(type='LocalVisBackend')])\n"
        "optim_wrapper = dict(optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.1), paramwise_cfg=dict(norm_decay_mult=0.0))\n"
        "train_cfg = dict(by_epoch=True, max_epochs=3, val_interval=1)\nval_cfg = dict()\n"
        "auto_scale_lr = dict(base_batch_size=1024)",
        ["default_hooks.visualization", "visualizer.type", "auto_scale_lr"],
    ),
    "segmentation": (
        "vis_backends = [dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]\n"
        "visualizer = dict(type='SegLocalVisualizer', name='visualizer', alpha=0.7, vis_backends=vis_backends)\n"
        "log_processor = dict(by_epoch=False)\ntta_model = dict(type='SegTTAModel')\n"
        "optimizer = dict(type='SGD', lr=0.01)\n"
        "optim_wrapper = dict(type='OptimWrapper', optimizer=optimizer, clip_grad=None)\n"
        "param_scheduler = [dict(type='PolyLR', eta_min=1e-4, power=0.9, begin=0, end=8, by_epoch=False)]\n"
        "default_hooks = dict(visualization=dict(type='SegVisualizationHook', draw=True),\n"
        "                     logger=dict(type='LoggerHook', interval=50, log_metric_by_epoch=False))\n"
        "train_cfg = dict(type='IterBasedTrainLoop', max_iters=8, val_interval=4)\nval_cfg = dict(type='ValLoop')",
        ["visualizer.type", "tta_model"],
    ),
    "self-supervised": (
        "log_processor = dict(window_size=10, custom_cfg=[dict(data_src='', method='mean', windows_size='global')])\n"
        "visualizer = dict(type='SelfSupVisualizer', vis_backends=[dict(type='LocalVisBackend')], name='visualizer')\n"
        "optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='LARS', lr=4.8, momentum=0.9))\n"
        "train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=2)\nval_cfg = dict()",
        ["log_processor.custom_cfg[0]"],
    ),
    "video": (
        "visualizer = dict(type='ActionVisualizer', vis_backends=[dict(type='AimVisBackendOfOld')][:0])\n"
        "optim_wrapper = dict(constructor='TSMOptimWrapperConstructor', paramwise_cfg=dict(fc_lr5=True),\n"
        "                     optimizer=dict(type='SGD', lr=0.01), clip_grad=dict(max_norm=40, norm_type=2))\n"
        "train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=2, val_begin=1)\nval_cfg = dict(type='ValLoop')",
        ["visualizer.type", "optim_wrapper.constructor"],
    ),
    "detection": (
        "default_hooks = dict(optimizer=dict(type='OptimizerHook', grad_clip=None),\n"
        "                     timer=dict(_scope_='mmdet', type='IterTimerHook'),\n"
        "                     visualization=dict(type='DetVisualizationHook'))\n"
        "visualizer = dict(type='DetLocalVisualizer', vis_backends=[dict(type='LocalVisBackend')], name='visualizer')\n"
        "optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.02))\n"
        "train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=2)\nval_cfg = dict(type='ValLoop')",
        ["default_hooks.optimizer", "default_hooks.visualization", "visualizer.type", "_scope_"],
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_runtime_and_schedule_files_of_public_packages_load_as_they_are(name, tmp_path, capsys):
    pytest.importorskip("sklearn")
    text, changed = PUBLIC[name]
    common = "default_scope = 'mm'\nenv_cfg = dict(cudnn_benchmark=False)\nload_from = None\nresume = False\n"
    (tmp_path / "public.py").write_text(f"work_dir = {str(tmp_path)!r}\n{common}{text}\n{RUN}")
    Runner.from_cfg(load_config(tmp_path / "public.py"))
    summary = capsys.readouterr().out.partition("that are changed or have no effect here:\n")[2]
    paths = {line.split(":")[0].strip() for line in summary.splitlines() if line.startswith("  ")}
    loader = ["worker_init_fn", "timeout", "pin_memory", "batch_sampler", "collate_fn"]
    expected = {*changed, "default_scope", "env_cfg", *(f"train_dataloader.{key}" for key in loader)}
    assert paths == {*expected, "val_evaluator[0].collect_device", "val_evaluator[1].collect_dir"}


BOARD = "[dict(type='TensorboardVisBackend')]"
LOCAL = "[dict(type='LocalVisBackend')]"


@pytest.mark.parametrize(
    ("base", "child", "expected"),
    [
        ("", f"vis_backends = {BOARD}", None),
        ("", f"vis_backends = {BOARD}\nvisualizer = dict(type='Visualizer')", None),
        ("", f"vis_backends = {BOARD}\nvisualizer = dict(vis_backends=vis_backends)", ["TensorboardVisBackend"]),
        ("", f"vis_backends = {BOARD}\nvisualizer = dict(vis_backends={LOCAL})", None),  # nothing reads it
        ("", f"vis_backends = {BOARD}\nvisualizer = dict(vis_backends={BOARD})", ["TensorboardVisBackend"]),  # a dump
        (f"vis_backends = {LOCAL}\nvisualizer = dict(vis_backends=vis_backends)", f"vis_backends = {BOARD}", None),
        (
            f"vis_backends = {LOCAL}\nvisualizer = dict(vis_backends=vis_backends)",
            f"visualizer = dict(vis_backends={BOARD})",
            ["TensorboardVisBackend"],
        ),
        (f"vis_backends = {BOARD}", "vis_backends = None", []),
    ],
)
def test_backends_at_the_top_level_are_those_of_the_visualizer_or_an_error(tmp_path, base, child, expected):
    (tmp_path / "base.py").write_text(f"work_dir = 'w'\n{base}")
    (tmp_path / "child.py").write_text(f"_base_ = 'base.py'\n{child}")
    cfg = resolve(load_config(tmp_path / "child.py"))
    if expected is None:
        with pytest.raises(ConfigError, match=r"`vis_backends` must be in `visualizer`, .*Tensorboard"):
            drop_without_effect(cfg)
        return
    cfg, _ = drop_without_effect(cfg)
    assert "vis_backends" not in cfg
    assert [backend["type"] for backend in cfg.get("visualizer", {}).get("vis_backends", [])] == expected


@pytest.mark.parametrize("unset", ["None", "dict(_delete_=True)"])
@pytest.mark.parametrize("place", ["data_preprocessor = {}", "model = dict(data_preprocessor={})"])
def test_an_inherited_data_preprocessor_can_be_unset(tmp_path, unset, place):
    (tmp_path / "base.py").write_text(place.format("dict(mean=[0.5], std=[0.2])"))
    model = "model = dict(type='FunctionalModel', init='jax.random.bits', loss='operator.sub')\n"
    own = place.format(unset).replace("model = dict(", model.replace(")\n", ", "))
    own = own if own.startswith("model") else model + own
    (tmp_path / "child.py").write_text(f"_base_ = 'base.py'\nwork_dir = {str(tmp_path)!r}\n{own}\n")
    cfg = load_config(tmp_path / "child.py")
    Runner.from_cfg(cfg)
    kept, _ = drop_without_effect(resolve(cfg))
    assert kept == dict(
        work_dir=str(tmp_path), model=dict(type="FunctionalModel", init="jax.random.bits", loss="operator.sub")
    )


def test_unknown_names_that_are_not_of_public_packages_stay_errors(tmp_path):
    cfg = dict(visualizer=dict(type="LocalVisulizer"), custom_hooks=[dict(type="VisualisationHook")])
    assert drop_without_effect(cfg) == (cfg, [])


def test_activation_checkpointing_at_the_top_level_is_an_argument_of_the_innermost_model():
    model = dict(type="LinenModel", module=dict(type="SmallCNN"))
    nested = dict(type="PreprocessedModel", steps=[], model=model)
    expected = {**nested, "model": {**model, "activation_checkpointing": ["layers.*"]}}
    cfg, changes = drop_without_effect(dict(model=nested, activation_checkpointing=["layers.*"]))
    assert (cfg, [change.path for change in changes]) == (dict(model=expected), ["activation_checkpointing"])
    assert drop_without_effect(dict(model=model, activation_checkpointing=None))[0] == dict(model=model)
    with pytest.raises(ConfigError, match="`activation_checkpointing` must be given once, .* and another list in it"):
        drop_without_effect(dict(model=expected, activation_checkpointing=["conv*"]))
