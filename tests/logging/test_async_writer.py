"""Test the background writer: order, bound and errors."""

import threading

import pytest

from jengine.logging import AsyncWriter, async_writer


@pytest.fixture
def writer():
    writer = AsyncWriter()
    yield writer
    writer.close()


def test_jobs_run_in_order_in_another_thread(writer):
    done = []
    for i in range(20):
        writer.submit(lambda i=i: done.append((i, threading.current_thread())))
    writer.flush()
    assert [i for i, _ in done] == list(range(20))
    assert threading.current_thread() not in [thread for _, thread in done]


def test_submit_blocks_while_the_queue_is_full(writer):
    done, started, release = [], threading.Event(), threading.Event()
    writer.submit(lambda: (started.set(), release.wait(60)))
    assert started.wait(60)
    for _ in range(256):
        writer.submit(done.append, 1)
    submitter = threading.Thread(target=writer.submit, args=(done.append, 2))
    submitter.start()
    submitter.join(0.2)
    assert submitter.is_alive()
    release.set()
    submitter.join(60)
    writer.flush()
    assert done == [1] * 256 + [2]


def test_a_job_may_flush(writer):
    done = []
    writer.submit(lambda: (writer.flush(), done.append(1)))
    writer.submit(done.append, 2)
    writer.flush()
    assert done == [1, 2]


def test_error_of_a_job_is_raised_once_by_the_next_call_and_later_jobs_run(writer):
    done, submitted = [], threading.Event()
    writer.submit(lambda: (submitted.wait(60), 1 / 0))
    writer.submit(done.append, 1)
    submitted.set()
    with pytest.raises(ZeroDivisionError):
        writer.flush()
    writer.flush()
    assert done == [1]
    failed = threading.Event()
    writer.submit(lambda: failed.set() or 1 / 0)
    writer.close()
    with pytest.raises(ZeroDivisionError):
        writer.submit(done.append, 2)


def test_closed_writer_can_be_used_again(writer):
    done = []
    writer.submit(done.append, 1)
    writer.close()
    assert done == [1]
    writer.submit(done.append, 2)
    writer.close()
    assert done == [1, 2]


def test_jobs_after_the_first_wait_for_a_pause_or_for_whoever_needs_them(writer, monkeypatch):
    monkeypatch.setattr(async_writer, "_PAUSE", 60)
    done, ran = [], threading.Event()
    writer.submit(ran.set)
    assert ran.wait(60)  # at once
    for i in range(3):
        writer.submit(done.append, i)
    assert done == []
    writer.flush()
    assert done == [0, 1, 2]
    writer.submit(done.append, 3)
    writer.close()
    assert done == [0, 1, 2, 3]
