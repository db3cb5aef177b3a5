"""Test that configs written for MMEngine run as they are."""

import pathlib

import pytest

from jengine.config import load_config
from jengine.config.mmengine_keys import drop_without_effect
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
    (line,) = [line for line in log.read_text().splitlines() if "Keys of MMEngine" in line]
    named = "default_scope env_cfg launcher randomness.deterministic train_dataloader.persistent_workers"
    assert all(f"{key} (" in line for key in [*named.split(), "train_dataloader.pin_memory"])


def test_keys_that_change_something_stay():
    cfg = dict(randomness=dict(seed=1), train_dataloader=dict(collate_fn=len, batch_size=2))
    assert drop_without_effect(cfg) == (cfg, "")
