import dataclasses
import itertools
import json
import os
import pathlib
import signal

import pytest

from jengine.cli.main import main
from jengine.config.storage import storage_path
from jengine.extras.diagnose.profile_requests import PROFILE_REQUEST
from jengine.extras.diagnose.slowest_process import describe_slowest
from jengine.hooks import Hook
from jengine.hooks.run_record import read_sessions
from jengine.logging import Stopwatch


def traces(runner):
    """Return the directories of profiles that have a file for xprof."""
    return sorted(
        {path.parents[3].name for path in pathlib.Path(runner.log_dir).rglob("*.xplane.pb")}
    )


def read_log(runner):
    return (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()


@pytest.mark.parametrize(
    ("steps_per_call", "trace", "lines"), [(1, "iter_1", "2 iterations from 1"), (4, "iter_4", "4")]
)
def test_a_running_training_profiles_what_the_command_requests(
    make_runner, capsys, steps_per_call, trace, lines
):
    runner = make_runner(
        train_cfg=dict(by_epoch=False, max_iters=16, steps_per_call=steps_per_call)
    )
    os.makedirs(runner.work_dir)
    assert main(["profile", runner.work_dir, "--steps", "2"]) == 0
    assert "within about 20 s" in capsys.readouterr().out
    runner.train()
    assert traces(runner) == [trace]
    path = f"{runner.log_dir}/tf_tracing_logs/{trace}"
    assert f"Wrote a profile to {path}. To view it: xprof --logdir {path}\n" in read_log(runner)
    assert not os.path.exists(os.path.join(runner.work_dir, PROFILE_REQUEST))
    assert runner.programs.update.traces == (
        1 if steps_per_call == 1 else 0
    )  # a profile compiles nothing


def test_a_profile_at_a_url_is_requested_and_sent_there(make_runner, gs_bucket):
    work_dir = storage_path("work_dir", f"{gs_bucket}/run")
    (work_dir / "note.txt").write_text("makes the directory")
    assert main(["profile", str(work_dir), "--steps", "2"]) == 0
    runner = make_runner(work_dir=str(work_dir))
    runner.train()
    runner.close()
    trace = f"{runner.work_dir}/{runner.timestamp}/tf_tracing_logs/iter_1"
    assert f"Wrote a profile to {trace}. To view it: xprof --logdir {trace}\n" in read_log(runner)
    assert list(storage_path("trace", trace).glob("plugins/profile/*/*.xplane.pb"))
    assert not (work_dir / PROFILE_REQUEST).exists()


def test_a_signal_requests_a_profile_which_ends_with_the_training(make_runner):
    class Request(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if runner.iter == 4:
                signal.raise_signal(signal.SIGUSR2)  # to this thread, which handles it at once

    runner = make_runner(custom_hooks=[Request()], train_cfg=dict(by_epoch=False, max_iters=9))
    runner.train()
    (trace,) = traces(runner)
    # the next look, by the times of the steps; five iterations are more than are left
    assert trace in ("iter_5", "iter_6", "iter_7", "iter_8")
    assert f"Profiling 5 iterations from {trace[5:]} on, as requested." in read_log(runner)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_request_that_nobody_wrote_is_named_and_removed(make_runner):
    runner = make_runner()
    os.makedirs(runner.work_dir)
    path = pathlib.Path(runner.work_dir, PROFILE_REQUEST)
    path.write_text("now!")
    runner.train()
    assert f"{path} must be as `jengine profile` writes it, got 'now!'" in read_log(runner)
    assert not path.exists()
    assert not traces(runner)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["missing"], "WORK_DIR must be the directory of a run, got missing"),
        ([".", "--steps", "0"], "must be at least 1"),
    ],
)
def test_a_request_for_no_run_or_no_step_is_refused(capsys, arguments, error):
    assert main(["profile", *arguments]) == 2
    assert error in capsys.readouterr().err


def test_the_record_follows_a_long_run_and_a_resume_counts_the_lost_iterations(make_runner):
    now = itertools.count(
        0, 20
    )  # each reading is 20 s after the one before, so each exchange updates the record

    class Kill(Hook):
        priority = "LOWEST"

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if runner.iter == 6:
                runner.log_writer.flush()
                self.sessions = read_sessions(runner)
                self.record = pathlib.Path(runner.log_dir, "run.json").read_text()
                raise RuntimeError("stop")

    hooks = dict(logger=None, checkpoint=dict(type="CheckpointHook", interval=4, by_epoch=False))
    kill = Kill()
    killed = make_runner(default_hooks=hooks, custom_hooks=[kill])
    killed.run = dataclasses.replace(killed.run, stopwatch=Stopwatch(lambda: float(next(now))))
    with pytest.raises(RuntimeError, match="stop"):
        killed.train()
    assert (kill.sessions[0]["first_iter"], kill.sessions[0]["iter"]) == (0, 6)
    assert kill.sessions[0]["seconds"]["step"] >= 0

    pathlib.Path(killed.log_dir, "run.json").write_text(kill.record)  # as `kill -9` leaves it
    resumed = make_runner(default_hooks=dict(hooks, logger=dict(type="LoggerHook")), resume=True)
    resumed.train()
    assert (
        json.loads(pathlib.Path(resumed.log_dir, "run.json").read_text())["sessions"][1][
            "first_iter"
        ]
        == 4
    )
    hub = resumed.message_hub
    assert hub.get_scalar("speed/lost_iterations").current() == 2
    assert hub.get_scalar("speed/lost_seconds").current() > 0
    assert 0 < hub.get_scalar("speed/goodput").current() < 1
    assert "| lost steps |" in read_log(resumed)
    assert "over all sessions; 2 iterations were lost and ran again" in read_log(resumed)


def test_the_slowest_process_is_the_one_with_the_most_time_outside_the_step():
    reports = [(f"host{i}", own / 20) for i, own in enumerate((0.1, 0.2, 6.0, 0.2))]
    assert (
        describe_slowest(reports)
        == "process 2 on host2 (0.3000 s of data and hooks, median 0.0100)"
    )
