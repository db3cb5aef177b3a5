import re
import types

import pytest

from jengine.extras.report.notebook import NotebookProgress, plot

pytest.importorskip("IPython")


def test_a_plot_has_the_ranges_of_its_curve_and_leaves_out_what_is_not_finite():
    svg = plot([(10, 4.0), (20, float("nan")), (30, 1.0), (50, 2.0)])
    points = [tuple(map(float, point.split(","))) for point in re.search('points="(.*?)"', svg)[1].split()]
    assert re.findall(r">([\d.]+)</text>", svg) == ["4", "1", "10", "50"]
    (left, top), (middle, bottom), (right, third) = points
    assert middle == pytest.approx((left + right) / 2)
    assert third == pytest.approx(bottom - (bottom - top) / 3, abs=0.1)  # of the way from 1 to 4
    assert plot([(1, 2.0), (2, 2.0)]).count("polyline") == 1  # a constant has no range


def test_progress_is_redrawn_at_most_twice_a_second_and_at_the_end(monkeypatch):
    drawn, seconds = [], [0.0]
    handle = types.SimpleNamespace(update=lambda bar: drawn.append(repr(bar)))
    monkeypatch.setattr("IPython.display.display", lambda bar, display_id: handle)
    progress = NotebookProgress(total=200, completed=100, clock=lambda: seconds[0])
    progress.start()
    for step in range(1, 11):
        seconds[0] += 0.2
        progress.add_loss(100 + step, 1 / step)
        progress.update(100 + step)
    assert [text.split(" · ")[0] for text in drawn] == [f"iteration {100 + step} of 200" for step in (3, 6, 9)]
    assert drawn[0].split(" · ")[1:] == ["0:19 left", "loss 0.3333"]  # 97 iterations of 0.2 s
    progress.update(110)
    progress.stop()
    assert drawn[-1] == "iteration 110 of 200 · 0:18 left · loss 0.1"


def test_a_long_run_keeps_a_bounded_number_of_points_from_the_first_to_the_last():
    progress = NotebookProgress(total=None)
    for step in range(5000):
        progress.add_loss(step, float(step))
    x = [float(point.split(",")[0]) for point in re.search('points="(.*?)"', progress._repr_html_())[1].split()]
    assert 500 <= len(x) <= 1000
    assert x == sorted(x)
    assert re.findall(r">([\d,]+)</text>", progress._repr_html_())[-2:] == ["0", "4,999"]
