"""Test the drawing methods by the pixels that they change."""

import logging

import numpy as np
import pytest

from jengine.extras.drawing import LocalVisualizer
from jengine.extras.drawing.canvas import Canvas
from jengine.logging import Visualizer

pytest.importorskip("matplotlib")
SIZE = (40, 60)
GRAY = np.full((*SIZE, 3), 100, np.uint8)


@pytest.fixture
def canvas():
    canvas = Canvas()
    canvas.set_image(GRAY)
    return canvas


def changed(canvas):
    """Return where the picture is no longer gray: the first and last row and column."""
    rows, columns = np.nonzero((canvas.get_image() != 100).any(-1))
    return rows.min(), rows.max(), columns.min(), columns.max()


@pytest.mark.parametrize("image", [np.arange(7 * 5 * 3, dtype=np.uint8).reshape(7, 5, 3), np.ones((3, 2)), GRAY])
def test_the_picture_of_an_image_alone_is_the_image(image):
    canvas = Canvas()
    canvas.set_image(image)
    expected = image if image.ndim == 3 else np.full((3, 2, 3), 255, np.uint8)
    np.testing.assert_array_equal(canvas.get_image(), expected)


def test_boxes_have_their_edges_and_colors(canvas):
    drawn = canvas.draw_bboxes(
        np.array([[10, 5, 30, 25], [40, 5, 50, 15]]), edge_colors=["r", (0, 0, 255)], line_widths=1, alpha=1
    )
    assert drawn is canvas
    picture = canvas.get_image().astype(int)
    assert picture[15, 10, 0] > 150 > 100 > picture[15, 10, 2]  # the left edge, red
    assert picture[10, 40, 2] > 150 > 100 > picture[10, 40, 0]  # blue
    np.testing.assert_array_equal(picture[15, 20], [100, 100, 100])  # inside
    np.testing.assert_allclose(changed(canvas), (5, 25, 10, 50), atol=1)


def test_shapes_are_filled_and_blended(canvas):
    canvas.draw_polygons([[[0, 0], [20, 0], [20, 20], [0, 20]]], face_colors=(0, 255, 0), alpha=0.5)
    np.testing.assert_allclose(canvas.get_image()[10, 10], [50, 178, 50], atol=1)  # the mean of gray and green
    canvas.set_image(GRAY)
    canvas.draw_circles(np.array([30, 20]), np.array([8]), face_colors="b", alpha=1.0, line_widths=0)
    np.testing.assert_allclose(changed(canvas), (12, 27, 22, 37), atol=1)
    np.testing.assert_array_equal(canvas.get_image()[20, 30], [0, 0, 255])


def test_lines_points_and_texts_are_where_they_should_be(canvas):
    canvas.draw_lines(np.array([[5, 55]]), np.array([[20, 20]]), colors="r", line_widths=1)
    np.testing.assert_allclose(changed(canvas), (19, 20, 5, 55), atol=1)
    canvas.set_image(GRAY)
    canvas.draw_points(np.array([[10, 10], [50, 30]]), colors=["r", "b"], sizes=9)
    np.testing.assert_allclose(changed(canvas), (8, 32, 8, 52), atol=2)
    canvas.set_image(GRAY)
    canvas.draw_texts(["I", "I"], np.array([[10, 5], [40, 5]]), colors="w", bboxes=[dict(facecolor="k"), None])
    assert changed(canvas)[1] <= 30
    assert canvas.get_image()[:, :25].min() == 0  # only the first has a background
    assert canvas.get_image()[:, 35:].min() == 100


def test_masks_are_blended_over_the_shapes(canvas):
    mask = np.zeros(SIZE, bool)
    mask[:10, :20] = True
    canvas.draw_bboxes([0, 0, 60, 40], face_colors=(200, 200, 200), alpha=1.0, line_widths=0)
    canvas.draw_binary_masks(np.stack([mask, ~mask]), colors=[(255, 0, 0), (0, 0, 100)], alphas=[0.5, 1.0])
    picture = canvas.get_image()
    np.testing.assert_allclose(picture[5, 5], [227, 100, 100], atol=1)
    np.testing.assert_array_equal(picture[30, 30], [0, 0, 100])
    canvas.draw_points([30, 30], colors="w")  # drawing goes on
    np.testing.assert_array_equal(canvas.get_image()[30, 30], [255, 255, 255])


def test_feature_maps_are_reduced_sorted_and_arranged():
    features = np.zeros((4, 2, 2), np.float32)
    features[2, 0, 0], features[1, 1, 1] = 4.0, 2.0
    mean, largest = (Canvas.draw_featmap(features, channel_reduction=x) for x in ("squeeze_mean", "select_max"))
    np.testing.assert_array_equal(largest[0, 0], [128, 0, 0])  # the colors of jet: dark red for the largest, dark blue
    np.testing.assert_array_equal(largest[1, 1], [0, 0, 128])
    assert mean[1, 1, 1] > 250  # half of it, green
    grid = Canvas.draw_featmap(features, channel_reduction=None, topk=3, arrangement=(2, 2))
    np.testing.assert_array_equal(grid[:2, :2], largest)
    np.testing.assert_array_equal(grid[1, 3], [128, 0, 0])  # the second largest channel
    np.testing.assert_array_equal(grid[2:, 2:], 255)  # no fourth one
    np.testing.assert_array_equal(
        Canvas.draw_featmap(features[:3].clip(0, 1), channel_reduction=None, topk=-1)[0, 0], [0, 0, 255]
    )


def test_feature_maps_lie_over_an_image_of_another_size():
    features = np.zeros((1, 2, 2))
    over = Canvas.draw_featmap(features, overlaid_image=GRAY, alpha=0.5)
    assert over.shape == (*SIZE, 3)
    np.testing.assert_array_equal(over[0, 0], [50, 50, 114])  # half gray, half dark blue
    assert Canvas.draw_featmap(features, overlaid_image=GRAY, resize_shape=(6, 7)).shape == (6, 7, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: Canvas().get_image(), "call `set_image` first"),
        (lambda c: c.draw_bboxes([1, 2, 3]), r"`bboxes` must have the shape \(N, 4\) or \(4,\), got \(3,\)"),
        (lambda c: c.draw_bboxes([9, 2, 3, 4]), "left <= right"),
        (lambda c: c.draw_bboxes([1, 2, 3, 4], edge_colors=np.arange(4)), "a color must be a name or three integers"),
        (lambda c: c.draw_texts(["a", "b"], [[1, 2]]), "argument 2 is shorter"),
        (
            lambda c: c.draw_texts(["a", "b"], [[1, 2]] * 2, font_sizes=[1]),
            "`size` must have one entry per shape",
        ),
        (lambda c: c.draw_lines([[1, 2]], [[1, 2]] * 2), r"shape of x_datas, \(1, 2\), got \(2, 2\)"),
        (lambda c: c.draw_circles([1, 2], [1, 2]), "one entry per circle, 1"),
        (lambda c: c.draw_binary_masks(np.zeros((3, 3), bool)), r"the size of the image, \(40, 60\), got bool"),
        (lambda c: c.draw_featmap(np.zeros((2, 2))), r"must have the shape \[C, H, W\], got \(2, 2\)"),
        (lambda c: c.draw_featmap(np.zeros((2, 2, 2)), channel_reduction="mean"), "got 'mean'"),
        (lambda c: c.draw_featmap(np.zeros((6, 2, 2)), channel_reduction=None, topk=0), "a map with 6 channels, got 0"),
        (lambda c: c.draw_featmap(np.zeros((6, 2, 2)), channel_reduction=None), None),
        (
            lambda c: c.draw_featmap(np.zeros((6, 2, 2)), channel_reduction=None, topk=4, arrangement=(1, 2)),
            "room for topk=4 channels, got 1 x 2",
        ),
    ],
)
def test_wrong_arguments_are_refused(canvas, call, message):
    if message is None:
        call(canvas)
        return
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(canvas)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.draw_bboxes([50, 5, 61, 10]),
        lambda c: c.draw_texts("a", [5, 41]),
        lambda c: c.draw_lines([-1, 5], [2, 6]),
        lambda c: c.draw_circles([5, 20], [6]),
    ],
)
def test_shapes_beyond_the_image_are_a_warning(canvas, call):
    with pytest.warns(UserWarning, match="reaches beyond the image of 60 x 40 pixels"):
        call(canvas)


def test_without_a_display_the_picture_is_not_shown(canvas, monkeypatch, caplog):
    shown = []
    monkeypatch.setattr("PIL.ImageShow.show", lambda image, title: shown.append((image.size, title)) or True)
    for has_display in (False, True):
        monkeypatch.setattr("jengine.extras.drawing.display.has_display", lambda value=has_display: value)
        with caplog.at_level(logging.INFO):
            canvas.show(win_name="boxes")
    assert shown == [((60, 40), "boxes")]


def test_visualizers_are_found_by_name():
    first = LocalVisualizer.get_instance("first", image=GRAY)
    assert Visualizer.get_instance("first") is first is Visualizer.get_current_instance()
    assert first.instance_name == "first"
    second = Visualizer(name="second")
    assert Visualizer.get_current_instance() is second is Visualizer.get_instance("second")
    np.testing.assert_array_equal(first.draw_texts("", [0, 0]).get_image(), GRAY)
