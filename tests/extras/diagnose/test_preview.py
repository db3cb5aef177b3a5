import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.extras.diagnose.schedule import preview_schedules

SGD = dict(optimizer=dict(type="SGD", lr=1.0, momentum=0.9))


def test_the_curves_are_the_values_of_each_iteration():
    curves = preview_schedules(
        dict(
            train_cfg=dict(by_epoch=False, max_iters=6),
            optim_wrapper={**SGD, "paramwise_cfg": dict(custom_keys={"head": dict(lr_mult=0.1)})},
            param_scheduler=dict(type="MultiStepLR", by_epoch=False, milestones=[2, 4], gamma=0.1),
        )
    )
    assert curves["lr"] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert curves["momentum"] == [0.9] * 6


def test_the_length_of_an_epoch_is_that_of_the_data_or_given():
    cfg = dict(
        train_cfg=dict(max_epochs=3),
        train_dataloader=dict(batch_size=2, dataset=ArrayDataset(dict(x=np.arange(4)))),
        optim_wrapper=SGD,
        param_scheduler=[dict(type="StepLR", step_size=1, gamma=0.5)],
    )
    assert preview_schedules(cfg)["lr"] == pytest.approx([1, 1, 0.5, 0.5, 0.25, 0.25])
    assert preview_schedules({**cfg, "train_dataloader": None}, epoch_length=1)["lr"] == pytest.approx([1, 0.5, 0.25])


def test_an_iteration_loop_needs_no_data():
    cfg = dict(train_cfg=dict(by_epoch=False, max_iters=2), train_dataloader="unused", optim_wrapper=SGD)
    assert preview_schedules(cfg)["lr"] == [1.0, 1.0]


def test_curves_of_several_optimizers_are_prefixed_with_their_names():
    curves = preview_schedules(
        dict(
            train_cfg=dict(by_epoch=False, max_iters=3),
            optim_wrapper=dict(constructor="MultiOptimWrapperConstructor", gen=SGD, disc={**SGD, "modules": ["d"]}),
            param_scheduler=dict(
                gen=dict(type="ConstantLR", factor=0.5, end=2, by_epoch=False),
                disc=dict(type="ExponentialLR", gamma=0.5, by_epoch=False),
            ),
        )
    )
    assert curves["gen.lr"] == pytest.approx([0.5, 1, 1])
    assert curves["disc.lr"] == pytest.approx([1, 0.5, 0.25])
