import pytest

from jengine.extras.report import measure_goodput


def session(first, last, **seconds):
    return dict(first_iter=first, iter=last, seconds=seconds)


def test_goodput_is_the_share_of_steps_over_all_sessions():
    goodput = measure_goodput([session(0, 10, step=6.0, compile=2.0), session(10, 20, step=6.0, setup=2.0)])
    assert goodput.seconds == {"step": 12.0, "compile": 2.0, "setup": 2.0}
    assert (goodput.share, goodput.total, goodput.lost_iterations, goodput.sessions) == (0.75, 16.0, 0, 2)


def test_iterations_between_the_last_save_and_a_kill_are_lost_with_their_time():
    # 5 of 20 iterations ran again: a quarter of the time of steps, data and hooks, but not of compiling
    killed = session(0, 20, step=8.0, input=4.0, compile=6.0)
    goodput = measure_goodput([killed, session(15, 20, step=2.0)])
    assert goodput.seconds == {"step": 8.0, "compile": 6.0, "input": 3.0}
    assert (goodput.lost_seconds, goodput.lost_iterations) == (3.0, 5)
    assert goodput.share == pytest.approx(8.0 / 20.0)


def test_a_resume_from_an_old_checkpoint_loses_iterations_of_several_sessions():
    sessions = [session(0, 10, step=10.0), session(8, 12, step=4.0), session(5, 20, step=15.0)]
    goodput = measure_goodput(sessions)
    assert goodput.lost_iterations == 5 + 4
    assert goodput.seconds["step"] == 5.0 + 0.0 + 15.0


def test_no_session_has_no_goodput():
    assert measure_goodput([]).share == 0.0
