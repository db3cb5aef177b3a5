"""Test runs of two processes on this machine."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import time

import jax
import numpy as np
import pytest

from jengine import checkpoint
from jengine.config.storage import list_files, read_bytes
from tests.forks import start_script
from tests.parallel import train_script

PATIENCE = 180.0  # seconds; on an idle machine every wait takes less than ten


def free_port(start=20000, stop=32000):
    """Return a free port outside the ephemeral range, so that no other program gets it before it is used."""
    while True:
        port = random.SystemRandom().randrange(start, stop)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def address():
    return f"127.0.0.1:{free_port()}"


def environment(devices):
    """Return the environment of a process with `devices` fake devices; XLA uses the last count in its flags."""
    return {**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"}


@pytest.fixture
def run(tmp_path):
    """Run the script as several processes and return the exit code and output of each."""
    processes = []

    def start(count, *options, devices=1, own_options=None, work_dir="run", url=None):
        env, coordinator = environment(devices), address()
        for index in range(count):
            own = (own_options or {}).get(index, [])
            arguments = [f"count={count}", f"index={index}", f"address={coordinator}", f"save={tmp_path}"]
            output = tmp_path / f"{work_dir}_{index}.out"
            output.unlink(missing_ok=True)
            command = [train_script.__file__, url or tmp_path / work_dir, *arguments, *options, *own]
            processes.append(start_script(*command, output=output, env=env))
        codes = [process.wait(PATIENCE) for process in processes[-count:]]
        return [(code, (tmp_path / f"{work_dir}_{index}.out").read_text()) for index, code in enumerate(codes)]

    yield start
    for process in processes:
        process.kill()


def load_results(tmp_path, index, count):
    return dict(np.load(tmp_path / f"process_{index}_of_{count}.npz"))


def ended_at(output):
    return re.findall(r"^ended at .*", output, re.MULTILINE)


def test_two_processes_train_and_validate_like_one_with_as_many_devices(run, tmp_path):
    options = ["seed=3", "several=yes"]  # evaluations of 11 and of 6 examples; tests/extras/cloud/test_launchers.py has a single one
    train_script.main(tmp_path / "one", *options, "devices=4", f"save={tmp_path}")
    for code, output in run(2, *options, devices=2):
        assert code == 0, output
    expected, first, second = (load_results(tmp_path, *case) for case in [(0, 1), (0, 2), (1, 2)])
    assert np.abs(expected["w"]).max() > 0.3
    samples = {name: int(value) for name, value in expected.items() if name.endswith("samples")}
    assert samples == {"clean/samples": 11, "other/samples": 6}
    for name, value in expected.items():
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        np.testing.assert_allclose(first[name], value, rtol=1e-5, err_msg=name)
    run_dir = tmp_path / "run"
    assert len(list(run_dir.glob("*/*.log"))) == len(list(run_dir.glob("*/vis_data/scalars.json"))) == 1
    lines = next(run_dir.glob("*/vis_data/scalars.json")).read_text().splitlines()
    assert len(lines) == len(next((tmp_path / "one").glob("*/vis_data/scalars.json")).read_text().splitlines())


def test_processes_end_if_one_stands_still_in_a_hook_of_a_resume(run, tmp_path, monkeypatch):
    train_script.main(tmp_path / "run", "epochs=1", "devices=2", "seed=0")
    monkeypatch.setenv("JENGINE_STALL_TIMEOUT", "4")
    outputs = run(2, "epochs=2", "resume=yes", "still=1")
    assert [code for code, _ in outputs] == [1, 1], outputs
    message = "process 1 made no progress for 4 s (JENGINE_STALL_TIMEOUT), and others wait for it (hooks at"
    for _, output in outputs:
        assert message in output
    assert time.time() - float(re.search(r"stands still at (\S+)", outputs[1][1])[1]) < 60  # 8 s on an idle machine


def test_processes_train_without_the_preemption_service_and_say_that_signals_end_one_alone(run, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", "0")
    outputs = run(2, "seed=3", own_options={0: ["stop=0"]})
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert "JAX's preemption service is off (JAX_ENABLE_PREEMPTION_SERVICE)" in outputs[0][1]
    for _, output in outputs:  # early stopping on one process stops both after the validation
        assert ended_at(output) == ["ended at 4 seed 3"]
    outputs = run(2, "epochs=2", "seed=0", "max_time=1h")
    assert [code for code, _ in outputs] == [1, 1], outputs
    for _, output in outputs:
        assert "`train_cfg.max_time` must be None for several processes without JAX's preemption service" in output


@pytest.mark.parametrize(
    ("action", "process", "codes"),
    [
        ("terminate", 1, [143, 143]),
        pytest.param("interrupt", 0, [-signal.SIGINT, 143], marks=pytest.mark.many_processes),
        pytest.param("terminate_twice", -1, [143, 143], marks=pytest.mark.many_processes),
    ],
)
def test_a_signal_ends_both_at_the_same_iteration_and_one_process_resumes(run, tmp_path, capfd, action, process, codes):
    outputs = run(2, "epochs=2000", f"action={action}", f"process={process}", "iteration=6")
    assert [code for code, _ in outputs] == codes, outputs
    ends = [ended_at(output) for _, output in outputs]
    assert ends[0] == ends[1]  # both also have the seed that process 0 has drawn
    iteration, seed = map(int, re.findall(r"\d+", ends[0][0]))
    assert 7 <= iteration < 2000
    assert checkpoint.read_meta(checkpoint.find_latest(tmp_path / "run"))["meta"]["iter"] == iteration
    if action == "terminate":
        train_script.main(tmp_path / "run", "resume=yes", f"epochs={iteration // 4 + 1}", "devices=2")
        assert ended_at(capfd.readouterr().out) == [f"ended at {4 * (iteration // 4 + 1)} seed {seed}"]


@pytest.mark.many_processes
def test_both_save_by_the_clock_of_process_0_and_end_together_after_max_time(run, tmp_path):
    outputs = run(2, "epochs=20000", "every=0.2s", "max_time=4s")
    assert [code for code, _ in outputs] == [143, 143], outputs
    ends = [ended_at(output) for _, output in outputs]
    assert ends[0] == ends[1]
    iteration = int(re.findall(r"\d+", ends[0][0])[0])
    kept = [checkpoint.read_meta(path)["meta"]["iter"] for path in checkpoint.list_checkpoints(tmp_path / "run")]
    assert len(kept) == 3
    assert max(kept) == iteration
    assert "Interrupted by train_cfg.max_time='4s', to be started again (exit code 143)" in outputs[0][1]


@pytest.mark.parametrize(("failing", "count"), [(0, 2), pytest.param(1, 3, marks=pytest.mark.many_processes)])
def test_an_error_on_one_process_ends_the_others_within_seconds_with_its_message(run, failing, count):
    outputs = run(count, "epochs=2000", "action=fail", f"process={failing}", "iteration=6")
    ended = time.time()
    assert [code for code, _ in outputs] == [1] * count, outputs
    _, output = outputs.pop(failing)
    assert ended - float(re.search(r"fails at (\S+)", output)[1]) < 15  # 4 s on an idle machine
    assert "KeyError: 'colour'" in output
    assert "in raise_error" in output  # with the traceback
    for _, output in outputs:
        # the iteration is that of the error, whichever this process has reached
        message = (
            rf"This process ends because process {failing} \(pid \d+ on host .*\) failed: "
            r"KeyError: 'colour' \(in \w+\.\w+ at iteration 6 "
        )
        assert re.search(message, output), output


@pytest.mark.parametrize(("victim", "count"), [(0, 2), pytest.param(2, 3, marks=pytest.mark.many_processes)])
def test_a_process_that_is_killed_ends_the_others_within_the_heartbeat_timeout(run, victim, count):
    outputs = run(count, "epochs=2000", "action=kill", f"process={victim}", "iteration=6")
    ended = time.time()
    code, output = outputs.pop(victim)
    assert code == -9
    assert ended - float(re.search(r"killed at (\S+)", output)[1]) < 30  # heartbeats are missed after 10 s
    # JAX ends the others, and names the process; process 0, which runs the coordination service, is the leader task
    named = "the leader task|Socket closed" if victim == 0 else rf"stopped sending heartbeats\):\n{victim}\n"
    for code, output in outputs:
        assert code == -6
        assert re.search(named, output), output


@pytest.mark.many_processes
def test_a_run_in_a_bucket_that_moves_between_1_2_4_and_1_processes_has_the_losses_of_one(run, tmp_path, gs_bucket):
    """The global batch stays; the shares of the processes change, and on one they take several micro-batches."""
    train_script.main(tmp_path / "whole", "seed=3", "iters=12", "examples=30", "devices=1")  # 3 batches, 6 left over
    expected, url = losses_of(tmp_path / "whole"), f"{gs_bucket}/run"
    assert len(expected) == 12
    before = 0
    for iterations, count in ((2, 1), (5, 2), (7, 4), (12, 1)):  # within the first pass, the second and the third
        options = [*(["micro=2"] if count == 1 else []), "seed=3", f"iters={iterations}", "examples=30", "resume=yes"]
        for code, output in run(count, *options, url=url):
            assert code == 0, output
        if before:
            assert (
                f"The run continues at the same example with the same global batch of 8: {8 // count} examples on each "
                f"of {count} data shards, instead of {8 // before} on {before}." in (tmp_path / "run_0.out").read_text()
            )
        before = count
    np.testing.assert_allclose(losses_of(url), expected, rtol=1e-6)


@pytest.mark.many_processes
def test_killed_processes_continue_from_their_copies_on_local_disks_with_the_same_bits(
    run, tmp_path, gs_bucket, monkeypatch
):
    monkeypatch.setenv("JENGINE_LEASE_SECONDS", "5")  # which the killed run has
    options = ["seed=3", "iters=40", "every=500h", "fsdp=yes"]
    for code, output in run(2, *options, work_dir="whole"):
        assert code == 0, output
    expected = checkpoint.load(tmp_path / "whole").state
    url = f"{gs_bucket}/run"
    options.append(f"local={tmp_path}/disk")
    run(2, *options, "action=kill", "process=-1", "iteration=23", url=url)
    assert checkpoint.find_latest(url) is None
    for index in (0, 1):
        assert (next(tmp_path.glob(f"disk/*/process_{index}_of_2")) / "iter_15").is_dir()
    for code, output in run(2, *options, "resume=yes", url=url):
        assert code == 0, output
    assert re.search(r"Resumed from .*/process_0_of_2/iter_(15|20)", (tmp_path / "run_0.out").read_text())
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load(url).state, expected)
    assert losses_of(url) == losses_of(tmp_path / "whole")  # no line lost, although none had been sent before the copy


def losses_of(work_dir):
    (name,) = [name for name in list_files(work_dir) if name.endswith("vis_data/scalars.json")]
    lines = map(json.loads, read_bytes(f"{work_dir}/{name}").decode().splitlines())
    return [line["loss"] for line in lines if "lr" in line]
