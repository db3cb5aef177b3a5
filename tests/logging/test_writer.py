"""The thread that writes the log: order, bound, errors; and the hub as it sees it."""

import logging
import math
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from jengine.logging import AsyncWriter, MessageHub


@pytest.fixture
def writer():
    writer = AsyncWriter()
    yield writer
    writer.close()


def test_jobs_run_in_order_in_another_thread(writer):
    done, last = [], threading.Event()
    for i in range(20):
        writer.submit(lambda i=i: done.append((i, threading.current_thread())))
    writer.submit(last.set)
    assert last.wait(60)
    assert [i for i, _ in done] == list(range(20))
    assert threading.current_thread() not in [thread for _, thread in done]


def test_who_drains_runs_what_is_left(writer):
    done = []
    for i in range(20):
        writer.submit(lambda i=i: done.append(i))
    writer.drain()
    assert done == list(range(20))


def test_who_submits_one_job_too_many_runs_them_all(writer):
    done, started, go = [], threading.Event(), threading.Event()
    writer.submit(lambda: (started.set(), go.wait(60)))
    assert started.wait(60)  # the thread is busy, so that jobs pile up
    for _ in range(255):
        writer.submit(lambda: done.append(1))
    other = threading.Thread(target=writer.submit, args=(lambda: done.append(threading.current_thread()),))
    other.start()
    other.join(0.2)
    assert other.is_alive()  # it waits for the thread
    go.set()
    other.join(60)
    writer.drain()
    assert len(done) == 256


def test_jobs_that_wait_for_nothing_are_run_by_who_submits(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("jengine.logging.writer.time.perf_counter", lambda: clock[0])
    writer = AsyncWriter(waits=False)
    done = []

    def submit(name):
        writer.submit(lambda: done.append((name, threading.current_thread())))

    submit("first")
    assert done == [("first", threading.current_thread())]
    submit("soon after")
    submit("soon after, too")
    assert len(done) == 1
    clock[0] += 0.06
    submit("later")
    assert [name for name, _ in done] == ["first", "soon after", "soon after, too", "later"]
    assert {thread for _, thread in done} == {threading.current_thread()}
    submit("last")
    clock[0] += 1.0  # nobody comes any more
    while len(done) < 5:
        time.sleep(0.01)
    assert done[4][0] == "last"
    assert done[4][1] is not threading.current_thread()
    writer.close()


def test_a_job_may_drain(writer):
    done = []
    writer.submit(lambda: (writer.drain(), done.append(1)))
    writer.submit(lambda: done.append(2))
    writer.drain()
    assert done == [1, 2]


def test_the_parts_of_jobs_are_run_in_turns(writer):
    done, started, go = [], threading.Event(), threading.Event()

    def in_parts(name):
        done.append((name, 1))
        yield
        done.append((name, 2))
        if name == "a":
            raise ZeroDivisionError
        yield
        done.append((name, 3))

    writer.submit(lambda: (started.set(), go.wait(60)))
    assert started.wait(60)
    for name in ("a", "b"):
        writer.submit(lambda name=name: in_parts(name))
    writer.submit(lambda: done.append("whole"))
    go.set()
    writer.drain()
    assert done == ["whole", ("a", 1), ("b", 1), ("a", 2), ("b", 2), ("b", 3)]
    with pytest.raises(ZeroDivisionError):
        writer.check()


def test_an_error_of_a_job_is_told_once_and_later_jobs_run(writer):
    done = []
    writer.submit(lambda: 1 / 0)
    writer.submit(lambda: done.append(1))
    writer.drain()
    with pytest.raises(ZeroDivisionError):
        writer.check()
    writer.check()
    assert done == [1]


def test_other_lines_come_after_those_that_were_submitted_before(writer):
    lines, go = [], threading.Event()

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logger = logging.Logger("test")
    logger.addHandler(Keep())
    logger.handlers[0].addFilter(writer)
    writer.submit(lambda: (go.wait(60), logger.info("from the thread")))
    threading.Timer(0.05, go.set).start()
    logger.info("after it")
    assert lines == ["from the thread", "after it"]


def test_a_closed_writer_starts_again(writer):
    done = []
    writer.submit(lambda: done.append(1))
    writer.close()
    writer.submit(lambda: done.append(2))
    writer.close()
    assert done == [1, 2]


def test_a_snapshot_shows_its_moment_and_is_read_before_the_hub_is():
    hub, found = MessageHub("test"), []

    def read():
        found.append((snapshot.get_scalar("train/loss").current(), snapshot.get_info("eta")))
        snapshot.close()

    hub.update_scalar("train/loss", jnp.float32(1.0))
    hub.update_info("eta", 5)
    snapshot = hub.snapshot(read)
    hub.update_scalar("train/loss", jnp.float32(2.0))
    hub.update_info("eta", 4)
    assert hub.get_scalar("train/loss").data[0].tolist() == [1.0, 2.0]
    assert found == [(1.0, 5)]


def test_a_snapshot_that_nobody_reads_loses_nothing():
    hub = MessageHub("test")
    hub.update_scalar("x", 1.0)
    snapshot = hub.snapshot(lambda: snapshot.close())
    assert hub.get_scalar("x").current() == 1.0


def test_an_unknown_scalar_of_a_snapshot_names_the_closest():
    hub = MessageHub("test")
    hub.update_scalar("train/loss", 1.0)
    with pytest.raises(KeyError, match="did you mean 'train/loss'"):
        hub.snapshot(lambda: None).get_scalar("train/los")


def test_a_snapshot_of_an_earlier_iteration_leaves_out_what_came_later():
    hub = MessageHub("test")
    hub.update_scalar("lr", 0.0)
    hub.iteration = 3
    hub.update_scalar("due", 7.0)
    hub.update_scalar_batch("lr", np.arange(4.0), range(1, 4), first=0)
    hub.update_scalar_batch("loss", jnp.arange(5.0), range(4), first=0)
    hub.update_scalar_batch("grad_norm", [jnp.float32(i) for i in range(4)], [1, 3], first=0)
    found, snapshot = [], hub.snapshot(lambda: None)
    for iteration in (0, 2, math.inf):
        snapshot.at(iteration)
        found.append({key: history.data[0].tolist() for key, history in snapshot.log_scalars.items()})
    assert hub.fetches == 1
    assert found == [
        {"lr": [0.0], "loss": [0.0]},
        {"lr": [0.0, 1.0, 2.0], "loss": [0.0, 1.0, 2.0], "grad_norm": [1.0]},
        {"lr": [0.0, 1.0, 2.0, 3.0], "loss": [0.0, 1.0, 2.0, 3.0], "grad_norm": [1.0, 3.0], "due": [7.0]},
    ]


def test_a_series_adds_the_rows_that_count():
    hub = MessageHub("test")
    hub.update_scalar_batch("train/loss", jnp.arange(5.0), [0, 2, 3], first=0)
    hub.update_scalar("train/loss", jnp.float32(9.0))
    assert hub.get_scalar("train/loss").data[0].tolist() == [0.0, 2.0, 3.0, 9.0]
    assert hub.fetches == 1


def test_series_that_nobody_reads_do_not_pile_up():
    hub = MessageHub("test", capacity=8)
    for i in range(20):
        hub.update_scalar_batch("x", jnp.arange(3.0), range(3), first=3 * i)
        assert len(hub._waiting) < 4
    assert hub.get_scalar("x").updates == 60


def test_what_has_gathered_is_fetched_when_an_iteration_begins_and_not_among_those_taken_together():
    hub = MessageHub("test", capacity=40)
    for start, fetches in ((0, 0), (15, 0), (30, 1)):
        hub.begin(start)
        assert hub.fetches == fetches  # from half of the capacity on
        hub.update_scalar_batch("x", jnp.arange(15.0), range(15), first=start)
    snapshot = hub.snapshot(lambda: None)
    snapshot.at(34)
    assert snapshot.get_scalar("x").updates == 35
