"""The thread that writes the log: order, bound, errors; and the hub as it sees it."""

import logging
import threading

import jax.numpy as jnp
import pytest

from jengine.logging import LogWriter, MessageHub


@pytest.fixture
def writer():
    writer = LogWriter()
    yield writer
    writer.close()


def test_jobs_run_in_order_in_another_thread(writer):
    done = []
    for i in range(20):
        writer.submit(lambda i=i: done.append((i, threading.current_thread())))
    writer.drain()
    assert [i for i, _ in done] == list(range(20))
    assert threading.current_thread() not in [thread for _, thread in done]


def test_who_submits_a_third_job_waits_for_the_first(writer):
    go, submitted = threading.Event(), []
    writer.submit(lambda: go.wait(60))

    def submit_more():
        for i in range(3):
            writer.submit(lambda: None)
            submitted.append(i)

    other = threading.Thread(target=submit_more)
    other.start()
    other.join(0.2)
    assert len(submitted) <= 2  # one may have been taken over by the thread, one waits
    go.set()
    other.join(60)
    assert submitted == [0, 1, 2]


def test_a_job_may_be_run_at_once_but_not_before_others(writer):
    done, go = [], threading.Event()
    writer.submit(lambda: done.append(threading.current_thread()), at_once=True)
    assert done == [threading.current_thread()]
    writer.submit(lambda: go.wait(60))
    writer.submit(lambda: done.append(threading.current_thread()), at_once=True)
    assert len(done) == 1
    go.set()
    writer.drain()
    assert done[1] is not threading.current_thread()


def test_what_a_cpu_makes_is_at_hand(monkeypatch):
    hub = MessageHub("test")
    for value in (1.0, jnp.float32(2.0)):
        hub.update_scalar("x", value)
        snapshot = hub.snapshot()
        assert snapshot.at_hand
        snapshot.close()
    monkeypatch.setattr("jengine.logging.hub_snapshot.on_host", lambda array: False)
    hub.update_scalar("x", jnp.float32(3.0))
    snapshot = hub.snapshot()
    assert not snapshot.at_hand
    snapshot.close()


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


def test_a_snapshot_shows_its_moment_and_the_hub_waits_until_it_is_read():
    hub = MessageHub("test")
    hub.update_scalar("train/loss", jnp.float32(1.0))
    hub.update_info("eta", 5)
    snapshot = hub.snapshot()
    hub.update_scalar("train/loss", jnp.float32(2.0))
    hub.update_info("eta", 4)
    found = []
    reader = threading.Thread(target=lambda: found.append(hub.get_scalar("train/loss").current()))
    reader.start()
    assert snapshot.get_scalar("train/loss").current() == 1.0
    assert snapshot.get_info("eta") == 5
    assert found == []
    snapshot.close()
    reader.join(60)
    assert found == [2.0]
    assert hub.get_scalar("train/loss").data[0].tolist() == [1.0, 2.0]


def test_a_snapshot_that_nobody_reads_loses_nothing():
    hub = MessageHub("test")
    hub.update_scalar("x", 1.0)
    hub.snapshot().close()
    assert hub.get_scalar("x").current() == 1.0


def test_an_unknown_scalar_of_a_snapshot_names_the_closest():
    hub = MessageHub("test")
    hub.update_scalar("train/loss", 1.0)
    snapshot = hub.snapshot()
    with pytest.raises(KeyError, match="did you mean 'train/loss'"):
        snapshot.get_scalar("train/los")
    snapshot.close()


def test_a_series_adds_the_rows_that_count():
    hub = MessageHub("test")
    hub.update_series("train/loss", jnp.arange(5.0), [0, 2, 3])
    hub.update_scalar("train/loss", jnp.float32(9.0))
    assert hub.get_scalar("train/loss").data[0].tolist() == [0.0, 2.0, 3.0, 9.0]
    assert hub.fetches == 1


def test_series_that_nobody_reads_do_not_pile_up():
    hub = MessageHub("test", capacity=4)
    for _ in range(20):
        hub.update_series("x", jnp.arange(3.0), range(3))
        assert len(hub._waiting) < 4
    assert hub.get_scalar("x").updates == 60
