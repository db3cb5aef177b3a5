import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.hooks import Hook
from jengine.parallel import SingleDevice
from tests.refusals import check_refusal


class Watch(Hook):
    """Record each validation and each iteration."""

    def __init__(self):
        self.validations = []
        self.iters = []
        self.epoch_calls = 0

    def before_train_epoch(self, runner):
        self.epoch_calls += 1

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.iters.append((runner.epoch, batch_idx, runner.iter))

    def before_val(self, runner):
        self.validations.append(runner.epoch if runner.train_loop.by_epoch else runner.iter)


def run(make_runner, **train_cfg):
    watch = Watch()
    runner = make_runner(train_cfg=train_cfg, custom_hooks=[watch], validates=True)
    runner.train()
    return watch, runner


@pytest.mark.parametrize(
    ("train_cfg", "expected"),
    [
        (dict(max_epochs=7, val_interval=3), [3, 6, 7]),
        (dict(max_epochs=7, val_begin=3, val_interval=2), [4, 6, 7]),
        (dict(max_epochs=3, val_begin=5), []),
        (dict(max_epochs=3, val_begin=0, val_interval=2), [0, 2, 3]),  # MMEngine ignores val_begin=0
        (dict(max_epochs=10, val_interval=4, dynamic_intervals=[(5, 2), (8, 1)]), [4, 6, 7, 8, 9, 10]),
        (dict(by_epoch=False, max_iters=10, val_begin=5, val_interval=4), [8, 10]),
        (dict(by_epoch=False, max_iters=12, val_interval=5, dynamic_intervals=[(11, 2)]), [5, 10, 12]),
        (dict(by_epoch=False, max_iters=3, val_begin=0), [0, 3]),
    ],
)
def test_validations_run_at_the_same_times_as_in_mmengine(make_runner, train_cfg, expected):
    watch, runner = run(make_runner, **train_cfg)
    assert watch.validations == expected
    assert [
        epoch if runner.train_loop.by_epoch else iteration for epoch, iteration, _ in runner.validations
    ] == expected


@pytest.mark.parametrize(
    ("train_cfg", "where"),
    [
        (dict(max_epochs=2, val_begin=3), "val_begin=3 is beyond its 2 epochs"),
        (dict(by_epoch=False, max_iters=8, val_begin=9), "val_begin=9 is beyond its 8 iterations"),
    ],
)
def test_what_lies_beyond_the_end_of_a_run_is_named_before_it(make_runner, caplog, train_cfg, where):
    hook = dict(type="CheckpointHook", interval=9, by_epoch=train_cfg.get("by_epoch", True), save_last=False)
    runner = make_runner(train_cfg=train_cfg, default_hooks=dict(checkpoint=hook), validates=True)
    runner.train()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    length = where.split("its ")[1]
    assert warnings[:2] == [
        f"CheckpointHook saves nothing in this run of {length}: the first checkpoint would be after 9, save_last is "
        "False, and there is no save_best.",
        f"The training loop never validates: train_cfg.{where}.",
    ]
    assert runner.validations == []


def test_the_epoch_loop_counts_batches_within_the_epoch(make_runner):
    watch, runner = run(make_runner, max_epochs=2)
    assert watch.iters == [(i // 4, i % 4, i) for i in range(8)]
    assert (runner.epoch, runner.iter, runner.max_epochs, runner.max_iters) == (2, 8, 2, 8)


def test_the_iteration_loop_repeats_the_data(make_runner):
    watch, runner = run(make_runner, by_epoch=False, max_iters=10)
    assert watch.iters == [(0, i, i) for i in range(10)]
    assert watch.epoch_calls == 1
    assert (runner.epoch, runner.max_epochs) == (0, 1)


def test_stop_training_ends_both_loops_after_the_validation(make_runner):
    class Stop(Hook):
        def after_val_epoch(self, runner, metrics=None):
            runner.train_loop.stop_training = True

    for train_cfg, iters in ((dict(max_epochs=5), 4), (dict(by_epoch=False, max_iters=9, val_interval=3), 3)):
        runner = make_runner(train_cfg=train_cfg, custom_hooks=[Stop()], validates=True)
        runner.train()
        assert runner.iter == iters


def test_every_epoch_has_another_order_and_a_rerun_the_same(make_runner):
    class Batches(Hook):
        def __init__(self):
            self.seen = []

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            self.seen.append(np.asarray(data_batch["x"]))

    def orders(**changes):
        hook = Batches()
        make_runner(custom_hooks=[hook], **changes).train()
        return np.concatenate(hook.seen[:4]), np.concatenate(hook.seen[4:])

    first, second = orders()
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(np.sort(first, axis=0), np.sort(second, axis=0))
    np.testing.assert_array_equal(orders(), (first, second))
    np.testing.assert_array_equal(orders(train_cfg=dict(by_epoch=False, max_iters=8)), (first, second))
    without, again = orders(default_hooks=dict(checkpoint=None, logger=None, sampler_seed=None))
    np.testing.assert_array_equal(without, again)  # without the hook the epoch of the data does not change


def test_training_matches_numpy(make_runner):
    state = make_runner(train_dataloader=dict(batch_size=16, dataset=make_runner().train_dataloader.dataset)).train()
    data = make_runner().train_dataloader.dataset[np.arange(16)]
    w, b = np.zeros(2), 0.0
    for _ in range(2):  # one batch an epoch, two epochs, lr 0.1
        error = data["x"] @ w + b - data["y"]
        w, b = w - 0.1 * 2 * data["x"].T @ error / 16, b - 0.1 * 2 * error.mean()
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-5)
    np.testing.assert_allclose(state.params["b"], b, rtol=1e-5)


def test_val_and_test_run_alone(make_runner):
    dataset = make_runner(validates=True).val_dataloader.dataset
    runner = make_runner(
        train_dataloader=None,
        train_cfg=None,
        optim_wrapper=None,
        test_dataloader=dict(batch_size=4, dataset=dataset),
        test_cfg=dict(),
        test_evaluator=dict(type="MeanLoss", loss=lambda p, b: (p - b["y"]) ** 2, prefix="exact"), validates=True,
    )
    y = dataset[np.arange(6)]["y"]
    np.testing.assert_allclose(runner.val()["loss"], np.mean(y**2), rtol=1e-6)  # parameters start at zero
    np.testing.assert_allclose(runner.test()["exact/loss"], np.mean(y**2), rtol=1e-6)
    with pytest.raises(RuntimeError, match="nothing to train"):
        runner.train()


def test_the_last_validation_batch_is_padded_and_does_not_count(make_runner):
    whole = make_runner(val_dataloader=dict(batch_size=6, dataset=make_runner(validates=True).val_dataloader.dataset), validates=True).val()
    np.testing.assert_allclose(make_runner(validates=True).val()["loss"], whole["loss"], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "error", "words", "path"),
    [
        (dict(train_cfg=dict(max_epochs=0)), ValueError, ["[1, 2147483647]", "got 0"], "train_cfg"),
        (dict(train_cfg=dict(max_epochs=2, val_interval=0)), ValueError, ["val_interval`", "at least 1"], "train_cfg"),
        (dict(train_cfg=dict(max_epoch=2)), TypeError, ["'max_epoch'", "did you mean 'max_epochs'"], "train_cfg"),
        (dict(train_cfg=dict(by_epoch=False, max_epochs=2)), ConfigError, ["by_epoch`", "max_epochs", "got False"], "train_cfg"),
        (
            dict(train_cfg=dict(by_epoch=False, max_epochs=2, max_iters=8)),
            ConfigError,
            ["max_epochs", "max_iters", "got max_epochs=2 and max_iters=8", "max_epochs=None", "--config", ".train_cfg.by_epoch=False"],
            "train_cfg",
        ),
        (dict(train_cfg=dict(type="EpochBasedTrainLoop", by_epoch=True, max_epochs=2)), ConfigError, ["remove one"], "train_cfg"),
        (dict(train_cfg=dict(max_epochs=2.5)), TypeError, ["an integer in", "got 2.5"], "train_cfg"),
        (dict(optim_wrapper=dict(optimizer=(dict(type="SGD", lr=1.0),))), TypeError, ["a dict"], "optim_wrapper.optimizer"),
        (dict(optim_wrapper=dict(optimizer=dict(type="SDG", lr=1.0))), KeyError, ["did you mean 'SGD'"], "optim_wrapper.optimizer.type"),
        (dict(optim_wrapper=dict(optimizer=dict(type="SGD", lrr=1.0))), TypeError, ["did you mean 'lr'"], "optim_wrapper.optimizer"),
        (dict(train_dataloader=dict(batch_sise=4, dataset=[1])), TypeError, ["did you mean 'batch_size'"], "train_dataloader"),
        (dict(val_evaluator=dict(type="Acuracy")), KeyError, ["did you mean 'Accuracy'"], "val_evaluator.type"),
        (dict(model=lambda x: x), TypeError, ["Flax module"], "model"),
        (dict(precision="bf16"), ValueError, ["'bfloat16'", "got 'bf16'"], "precision"),
        (dict(randomness=dict(sed=1)), ConfigError, ["did you mean 'seed'"], "randomness"),
        (dict(parallel=dict(type="SingleDevice", device=99)), ValueError, ["got 99"], "parallel"),
        (dict(param_scheduler=[dict(type="LinearLR"), dict(type="CosinLR")]), KeyError, ["scheduler"], "param_scheduler[1].type"),
    ],
)  # fmt: skip
def test_an_invalid_section_is_refused_with_its_path_before_any_compilation(
    make_runner, changes, error, words, path, monkeypatch
):
    def no_compile(*args, **kwargs):
        pytest.fail("the model was compiled before the config was checked")

    monkeypatch.setattr(SingleDevice, "compile_init", no_compile)
    check_refusal(lambda: make_runner(**changes, validates=True).train(), error, *words, f"`{path}`")


def test_an_incomplete_section_is_refused(make_runner, tmp_path):
    with pytest.raises(
        ConfigError,
        match="val sections must be complete or absent, got `val_dataloader` and `val_cfg` without `val_evaluator`; either give ",
    ):
        make_runner(val_evaluator=None, validates=True)
    with pytest.raises(ConfigError, match="`optim_wrapper` must be given with param_scheduler"):
        make_runner(train_dataloader=None, train_cfg=None, optim_wrapper=None, param_scheduler=[], validates=True)
    assert not (tmp_path / "run").exists()


def test_a_batch_of_another_shape_stops_the_run_with_the_change(make_runner):
    from jengine.train import RecompilationError

    batches = [{"x": np.ones((n, 2), np.float32), "y": np.ones(n, np.float32)} for n in (4, 4)]
    batches[1]["x"] = np.ones((4, 3), np.float32)
    runner = make_runner(train_dataloader=batches)
    with pytest.raises(RecompilationError, match=r"batch\.x: was float32\[4,2\], is float32\[4,3\]"):
        runner.train()
    assert (runner.iter, runner.programs.update.traces) == (1, 1)


def test_auto_scale_lr_follows_the_batch_size(make_runner):
    runner = make_runner(auto_scale_lr=dict(enable=True, base_batch_size=16))
    runner.train()
    assert runner.optim_wrapper.get_lr() == {"lr": [0.025]}
