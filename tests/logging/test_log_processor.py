"""Test log lines: MMEngine's formats, statistics and windows, tags, errors.

The expected lines are the output of MMEngine for the same numbers.
"""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config import LOG_PROCESSORS
from jengine.logging import HistoryBuffer, LogProcessor, MessageHub
from tests.refusals import check_refusal


def make_loop(size):
    return types.SimpleNamespace(epoch_length=size)


def make_runner(train=4, val=4, test=5, epoch=0, max_epochs=3, iteration=1, max_iters=12):
    return types.SimpleNamespace(
        message_hub=MessageHub("test"),
        train_loop=None if train is None else make_loop(train),
        val_loop=make_loop(val),
        test_loop=make_loop(test),
        epoch=epoch,
        max_epochs=max_epochs,
        iter=iteration,
        max_iters=max_iters,
    )


def log_training(runner, **scalars):
    scalars = {"lr": 0.1, "data_time": 0.0088, "loss": 0.0166, "time": 0.025, **scalars}
    runner.message_hub.update_scalars({f"train/{key}": value for key, value in scalars.items()})
    runner.message_hub.update_info("eta", 0.4)


def fields(line):
    """Return the scalars of a line as text, by name; only the tests of the format read its separators."""
    return dict(re.findall(r"([\w/]+): (\S+)", line))


def test_training_line():
    runner = make_runner()
    log_training(runner)
    tag, line = LogProcessor().get_log_after_iter(runner, 1, "train")
    assert line == "Epoch(train) [1][2/4]  lr: 1.0000e-01  eta: 0:00:00  time: 0.0250  data_time: 0.0088  loss: 0.0166"
    assert tag == {"lr": 0.1, "data_time": 0.0088, "loss": 0.0166, "time": 0.025, "epoch": 1, "iter": 2}


def test_other_scalars_follow_in_order_of_their_first_update():
    runner = make_runner(max_epochs=9)
    log_training(runner, loss_reg=0.3645, aux_acc=0.5)
    runner.message_hub.update_scalar("train/base_lr", 0.01)
    line = LogProcessor(num_digits=2).get_log_after_iter(runner, 1, "train")[1]
    expected = dict(lr="1.00e-01", base_lr="1.00e-02", eta="0:00:00", time="0.03", data_time="0.01", loss="0.02")
    assert list(fields(line).items()) == [*expected.items(), ("loss_reg", "0.36"), ("aux_acc", "0.50")]


@pytest.mark.parametrize(
    ("epoch", "max_epochs", "batch", "size", "header"),
    [
        (0, 10, 1, 20, "Epoch(train)  [1][ 2/20]  "),
        (9, 10, 19, 20, "Epoch(train) [10][20/20]  "),
        (8, 100, 8, 1000, "Epoch(train)   [9][   9/1000]  "),
    ],
)
def test_epoch_headers_are_aligned(epoch, max_epochs, batch, size, header):
    runner = make_runner(train=size, epoch=epoch, max_epochs=max_epochs)
    log_training(runner)
    assert LogProcessor().get_log_after_iter(runner, batch, "train")[1].startswith(header + "lr: ")


def test_training_line_by_iteration():
    runner = make_runner(iteration=19, max_iters=1000)
    log_training(runner)
    tag, line = LogProcessor(by_epoch=False).get_log_after_iter(runner, 3, "train")
    assert line.startswith("Iter(train) [  20/1000]  lr: ")
    assert tag["iter"] == 20
    assert "epoch" not in tag


def test_long_etas_are_shown_in_days_and_hours():
    runner = make_runner()
    log_training(runner)
    runner.message_hub.update_info("eta", 86400 + 3661.9)
    assert "eta: 1 day, 1:01:01 " in LogProcessor().get_log_after_iter(runner, 1, "train")[1]


def test_without_an_eta_times_are_shown_like_other_scalars():
    runner = make_runner()
    runner.message_hub.update_scalars({"train/lr": 0.1, "train/time": 0.5, "train/data_time": 0.25})
    line = LogProcessor().get_log_after_iter(runner, 1, "train")[1]
    assert fields(line) == {"lr": "1.0000e-01", "time": "0.5000", "data_time": "0.2500"}


def test_losses_are_averaged_over_the_window_and_other_scalars_are_current():
    runner = make_runner()
    for value in range(1, 11):
        log_training(runner, loss=value, lr=1 / value, acc=value)
    tag, line = LogProcessor().get_log_after_iter(runner, 1, "train")
    assert tag["loss"] == 5.5  # (1 + ... + 10) / 10
    assert tag["lr"] == 0.1
    assert tag["acc"] == 10
    assert fields(line)["lr"] == "1.0000e-01"
    assert LogProcessor(window_size=4).get_log_after_iter(runner, 1, "train")[0]["loss"] == 8.5  # (7+8+9+10) / 4


def test_mean_pattern_selects_averaged_scalars():
    runner = make_runner()
    for value in (1.0, 3.0):
        log_training(runner, loss=value, acc=value)
    tag, _ = LogProcessor(mean_pattern="^acc").get_log_after_iter(runner, 1, "train")
    assert (tag["acc"], tag["loss"]) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("by_epoch", "mode", "expected"),
    [
        (True, "val", "Epoch(val) [1][ 2/10]    "),
        (True, "test", "Epoch(test) [ 2/10]    "),
        (False, "val", "Iter(val) [ 2/10]    "),
        (False, "test", "Iter(test) [ 2/10]    "),
    ],
)
def test_lines_of_validation_and_test_iterations_show_only_times(by_epoch, mode, expected):
    runner = make_runner(val=10, test=10, epoch=1, iteration=3)
    runner.message_hub.update_scalars({f"{mode}/data_time": 0.5, f"{mode}/time": 1.0, f"{mode}/acc": 0.9})
    runner.message_hub.update_info("eta", 40)
    tag, line = LogProcessor(by_epoch=by_epoch).get_log_after_iter(runner, 1, mode)
    assert line == expected + "eta: 0:00:40  time: 1.0000  data_time: 0.5000  "
    assert tag["iter"] == 4


def test_validation_iterations_do_not_show_metrics_of_the_previous_pass():
    runner = make_runner(epoch=1)
    runner.message_hub.update_scalars({"val/loss": 0.5, "val/acc": 1.0})
    assert fields(LogProcessor().get_log_after_iter(runner, 1, "val")[1]) == {}


def test_validation_metrics_are_not_averaged_over_passes():
    runner = make_runner(epoch=1)
    for loss in (4.0, 2.0):
        runner.message_hub.update_scalars({"val/loss": loss})
    tag, line = LogProcessor().get_log_after_epoch(runner, 3, "val")
    assert tag == {"loss": 2.0}
    assert fields(line) == {"loss": "2.0000"}


def test_line_after_validation_ends_with_the_times():
    runner = make_runner(epoch=1)
    for batch in range(4):
        runner.message_hub.update_scalars({"val/data_time": 0.001 * batch, "val/time": 0.002 * batch})
    runner.message_hub.update_scalars({"val/acc": 0.1})
    tag, line = LogProcessor().get_log_after_epoch(runner, 3, "val")
    assert line == "Epoch(val) [1][4/4]    acc: 0.1000  data_time: 0.0015  time: 0.0030"
    assert list(tag) == ["acc", "data_time", "time"]
    assert tag == pytest.approx({"acc": 0.1, "data_time": 0.0015, "time": 0.003})  # (0 + 1 + 2 + 3) / 4 thousandths


def test_times_after_validation_are_averaged_over_this_pass_only():
    runner = make_runner(val=2, epoch=2)
    runner.message_hub.update_scalar("val/time", 100.0)
    runner.message_hub.start_pass("val")
    for _ in range(2):
        runner.message_hub.update_scalar("val/time", 1.0)
    for last in (1, 2):  # the index of the last batch, or the number of batches
        assert LogProcessor().get_log_after_epoch(runner, last, "val")[0]["time"] == 1.0


def test_a_source_that_resembles_a_scalar_is_reported_once(caplog):
    runner = make_runner(val=10, epoch=1)
    runner.message_hub.update_scalars({"train/loss": 1.0, "val/accuracy": 0.5})
    entries = [dict(data_src=source, method_name="max", window_size=2) for source in ("losss", "accuracy", "momentum")]
    processor = LogProcessor(custom_cfg=entries)
    for _ in range(2):
        assert processor.get_log_after_iter(runner, 1, "train")[0] == {"epoch": 2, "iter": 2, "loss": 1.0}
    (record,) = caplog.records
    assert "no scalar 'losss' to log; did you mean 'loss'?" in record.getMessage()


def test_names_cannot_add_lines():
    runner = make_runner(val=10, epoch=1)
    runner.message_hub.update_scalars({"train/a\nb_lr": 0.1, "train/loss\n2026": 1.0, "val/acc\r\n\x1b[2J": 0.9})
    assert LogProcessor().get_log_after_iter(runner, 1, "train")[1].endswith(r"a\nb_lr: 1.0000e-01  loss\n2026: 1.0000")
    assert LogProcessor().get_log_after_epoch(runner, 2, "val")[1].endswith(r"acc\r\n\x1b[2J: 0.9000")


@pytest.mark.parametrize(
    ("by_epoch", "mode", "header"),
    [
        (True, "val", "Epoch(val) [1][10/10]    "),
        (True, "test", "Epoch(test) [5/5]    "),
        (False, "val", "Iter(val) [10/10]    "),
        (False, "test", "Iter(test) [5/5]    "),
    ],
)
def test_line_after_a_pass_includes_infos(by_epoch, mode, header):
    runner = make_runner(val=10, epoch=1)
    hub = runner.message_hub
    hub.update_scalars({f"{mode}/accuracy": 0.9, f"{mode}/data_time": 1.0})
    hub.update_info_dict({f"{mode}/recall": {"cat": 1, "dog": 0}, f"{mode}/cm": np.array([1, 2, 3]), "seed": 1})
    processor = LogProcessor(by_epoch=by_epoch)
    tag, line = processor.get_log_after_epoch(runner, 2, mode)
    assert line == header + "accuracy: 0.9000  recall: {'cat': 1, 'dog': 0}  cm: \n[1 2 3]\n  data_time: 1.0000"
    assert tag == {"accuracy": 0.9, "data_time": 1.0}
    tag, _ = processor.get_log_after_epoch(runner, 2, mode, with_non_scalar=True)
    assert list(tag) == ["accuracy", "recall", "cm", "data_time"]


def test_without_training_the_epoch_is_0():
    runner = make_runner(train=None)
    runner.message_hub.update_scalar("val/acc", 0.5)
    tag, line = LogProcessor().get_log_after_iter(runner, 1, "val")
    assert line.startswith("Epoch(val) [0][2/4]")
    assert (tag["epoch"], tag["iter"]) == (0, 0)
    assert LogProcessor().get_log_after_epoch(runner, 3, "val")[1].startswith("Epoch(val) [0][4/4]")


def test_lines_only_show_scalars_of_their_loop():
    runner = make_runner(epoch=1)
    runner.message_hub.update_scalars({"val/acc": 0.5, "validity": 1.0, "values/x": 2.0, "train/loss": 3.0})
    assert LogProcessor().get_log_after_epoch(runner, 3, "val")[0] == {"acc": 0.5}


def test_with_hierarchy_tag_names_include_the_loop():
    runner = make_runner(epoch=1)
    log_training(runner)
    runner.message_hub.update_scalars({"val/acc": 0.5, "val/time": 1.0})
    runner.message_hub.update_info("val/cm", "x")
    cfg = [{"data_src": "loss", "method_name": "max", "log_name": "loss_max"}]
    processor = LogProcessor(log_with_hierarchy=True, custom_cfg=cfg)
    tag, line = processor.get_log_after_iter(runner, 1, "train")
    assert set(tag) == {
        "train/lr", "train/data_time", "train/loss", "train/time", "train/loss_max", "epoch", "iter",
    }  # fmt: skip
    assert (fields(line)["loss"], fields(line)["loss_max"]) == ("0.0166", "0.0166")
    tag, line = processor.get_log_after_epoch(runner, 3, "val", with_non_scalar=True)
    assert tag == {"val/acc": 0.5, "val/cm": "x", "val/time": 1.0}
    assert fields(line) == {"val/acc": "0.5000", "val/cm": "x", "val/time": "1.0000"}


def test_custom_statistics_replace_or_extend_the_defaults():
    runner = make_runner(iteration=9)
    for value in range(10):
        runner.message_hub.start_iteration(value, epoch_start=value // 4 * 4)
        log_training(runner, loss=value, acc=value)
    cfg = [
        {"data_src": "loss", "method_name": "mean", "window_size": "global"},
        {"data_src": "loss", "method_name": "max", "window_size": 3, "log_name": "loss_max"},
        {"data_src": "train/acc", "method_name": "mean", "window_size": "epoch", "log_name": "acc_epoch"},
        {"data_src": "unlogged", "method_name": "min"},
    ]
    tag, line = LogProcessor(custom_cfg=cfg).get_log_after_iter(runner, 1, "train")
    assert tag["loss"] == 4.5  # (0 + ... + 9) / 10
    assert tag["loss_max"] == 9
    assert tag["acc_epoch"] == 8.5  # the two batches of this epoch: (8 + 9) / 2
    assert "unlogged" not in tag
    assert list(fields(line))[-4:] == ["loss", "acc", "loss_max", "acc_epoch"]


def test_global_window_covers_values_beyond_the_ring():
    runner = make_runner()
    history = runner.message_hub.log_scalars["train/loss"] = HistoryBuffer(capacity=4)
    for value in range(11):
        history.update(value)
    cfg = [{"data_src": "loss", "method_name": "mean", "window_size": "global"}]
    assert (
        LogProcessor(window_size=4, custom_cfg=cfg).get_log_after_iter(runner, 1, "train")[0]["loss"] == 5.0
    )  # 55 / 11


def make_epoch_means(*names):
    return [{"data_src": name, "method_name": "mean", "window_size": "epoch"} for name in names]


def test_a_scalar_that_is_not_reported_in_each_iteration_has_a_mean_over_its_values_in_the_epoch():
    runner, processor = make_runner(), LogProcessor(custom_cfg=make_epoch_means("norm"))
    means = []
    for i in range(8):
        runner.iter = i
        runner.message_hub.start_iteration(i, epoch_start=i // 4 * 4)
        log_training(runner, **({"norm": float(i)} if i in (1, 3, 6) else {}))
        tag, line = processor.get_log_after_iter(runner, i % 4, "train")
        means.append(tag.get("norm"))
        assert ("norm" in line) == ("norm" in tag)
    assert means == [None, 1.0, 1.0, 2.0, None, None, 6.0, 6.0]


def test_the_mean_of_a_validation_metric_is_over_this_validation():
    runner, processor = make_runner(val=100, epoch=1), LogProcessor(custom_cfg=make_epoch_means("acc"))
    for accuracy in (0.25, 0.75):
        runner.message_hub.start_pass("val")
        runner.message_hub.update_scalar("val/acc", accuracy)
        assert processor.get_log_after_epoch(runner, 99, "val")[0]["acc"] == accuracy


def test_an_epoch_longer_than_the_history_has_an_exact_mean():
    runner, processor = make_runner(), LogProcessor(custom_cfg=make_epoch_means("loss"))
    for i in range(30_000):
        runner.message_hub.start_iteration(i, epoch_start=i // 15_000 * 15_000)
        runner.message_hub.update_scalar("train/loss", float(i % 15_000))
    runner.iter = 29_999
    assert processor.get_log_after_iter(runner, 14_999, "train")[0]["loss"] == 7499.5


def test_windows_of_the_log_are_kept_whole(monkeypatch):
    monkeypatch.setattr(HistoryBuffer, "_statistics", dict(HistoryBuffer._statistics))

    @HistoryBuffer.register_statistics
    def median(buffer, window_size=None):
        return float(np.median(buffer.data[0][-window_size:]))

    entries = [
        {"data_src": "loss", "method_name": "mean", "window_size": 20_000},
        {"data_src": "train/norm", "method_name": "median", "window_size": "epoch"},
    ]
    processor = LogProcessor(window_size=300, custom_cfg=entries)
    runner = make_runner(iteration=24_999)
    runner.message_hub.keep(processor.windows)
    for i in range(25_000):
        runner.message_hub.update_scalars({"train/loss": float(i), "train/norm": float(i), "train/time": float(i)})
    resumed = make_runner(iteration=24_999)
    resumed.message_hub.keep(processor.windows)
    resumed.message_hub.load_state_dict(runner.message_hub.state_dict())
    for each in (runner, resumed):
        tag = processor.get_log_after_iter(each, 24_999, "train")[0]
        assert (tag["loss"], tag["norm"], tag["time"]) == (14_999.5, 12_499.5, 24_849.5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("loss_scale", 4.0), ("loss_scale_disc", 4.0), ("loss", 3.0), ("loss_scale1", 3.0), ("multi_loss_scale", 3.0)],
)
def test_the_scale_of_mixed_precision_is_no_loss(name, expected):
    runner = make_runner()
    for value in (2.0, 4.0):
        runner.message_hub.update_scalar(f"train/{name}", value)
    assert LogProcessor().get_log_after_iter(runner, 1, "train")[0][name] == expected


def test_custom_times_after_validation_replace_the_mean():
    runner = make_runner(epoch=1)
    for value in (1.0, 5.0):
        runner.message_hub.update_scalars({"val/time": value, "val/data_time": value})
    cfg = [{"data_src": "val/time", "method_name": "max"}]
    tag, _ = LogProcessor(custom_cfg=cfg).get_log_after_epoch(runner, 1, "val")
    assert tag == {"data_time": 3.0, "time": 5.0}


def test_one_line_requires_one_transfer():
    runner = make_runner()
    for step in range(10):
        log_training(runner, loss=jnp.float32(step), acc=jnp.float32(step), grad_norm=jnp.float32(1))
    for calls in (1, 2):
        LogProcessor(log_with_hierarchy=True).get_log_after_iter(runner, 1, "train")
        assert runner.message_hub.fetches == calls
        log_training(runner, loss=jnp.float32(0))


def test_memory_is_shown_if_devices_report_it(monkeypatch):
    def make_device(stats):
        return types.SimpleNamespace(memory_stats=lambda: stats)

    peaks = [{"peak_bytes_in_use": 3 * 1024**2}, {"peak_bytes_in_use": 100 * 1024**2 + 5}, None]
    monkeypatch.setattr(jax, "local_devices", lambda: [make_device(stats) for stats in peaks])
    runner = make_runner()
    log_training(runner)
    tag, line = LogProcessor().get_log_after_iter(runner, 1, "train")
    assert tag["memory"] == 100
    assert fields(line)["memory"] == "100"


def test_it_can_be_built_from_a_config():
    processor = LOG_PROCESSORS.build({"type": "LogProcessor", "window_size": 50, "by_epoch": False})
    assert (processor.window_size, processor.by_epoch, processor.custom_cfg) == (50, False, [])


def test_custom_cfg_is_not_modified():
    cfg = [{"data_src": "loss", "method_name": "max", "window_size": "global"}]
    runner = make_runner()
    log_training(runner)
    processor = LogProcessor(custom_cfg=cfg)
    for _ in range(2):
        processor.get_log_after_iter(runner, 1, "train")
    assert cfg == processor.custom_cfg == [{"data_src": "loss", "method_name": "max", "window_size": "global"}]


@pytest.mark.parametrize(
    ("entries", "by_epoch", "error", "words"),
    [
        (
            [{"data_src": "a", "method_name": "max"}] * 2,
            True,
            AssertionError,
            ["got 'a' twice"],
        ),
        ([{"data_src": "a", "log_name": "c"}, {"data_src": "b", "log_name": "c"}], True, KeyError, ["'method_name'"]),
        (
            [{"data_src": source, "log_name": "c", "method_name": "max"} for source in "ab"],
            True,
            AssertionError,
            ["got 'c' twice"],
        ),
        ([{"method_name": "max"}], True, KeyError, ["'data_src'"]),
        (
            [{"data_src": "a", "method_name": "max", "window_size": "epoch"}],
            False,
            AssertionError,
            ["`window_size`", "'epoch'", "by_epoch=False"],
        ),
        ([{"data_src": "a", "method_name": "max"}], False, KeyError, ["'window_size'"]),
        (
            [{"data_src": "a", "method_name": "max", "window_size": []}],
            True,
            TypeError,
            ["at least 1", "'epoch'"],
        ),
        ([{"data_src": "a", "method_name": "max", "window_size": "all"}], True, ValueError, ["got 'all'"]),
        ([{"data_src": "a", "method_name": "max", "window_size": 0}], True, ValueError, ["got 0"]),
        ([{"data_src": "a", "method_name": "maxx"}], True, KeyError, ["did you mean 'max'"]),
        (
            [{"data_src": "a", "method_name": "max", "window": 3}],
            True,
            TypeError,
            ["'window'", "did you mean 'window_size'"],
        ),
    ],
)
def test_invalid_custom_cfg_is_rejected_with_its_config_path(entries, by_epoch, error, words):
    check_refusal(lambda: LogProcessor(by_epoch=by_epoch, custom_cfg=entries), error, *words, "custom_cfg[")


@pytest.mark.parametrize(("window", "error"), [(0, ValueError), ("epoch", TypeError), (2.5, TypeError)])
def test_window_size_must_be_a_positive_int(window, error):
    with pytest.raises(error, match="window_size` must be"):
        LogProcessor(window_size=window)
