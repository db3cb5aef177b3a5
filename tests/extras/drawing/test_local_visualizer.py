import io

import numpy as np
import pytest

from jengine.config import VISUALIZERS
from jengine.extras.drawing import LocalVisualizer, display
from jengine.extras.drawing.draw import (
    default_palette,
    draw_boxes,
    draw_masks,
    draw_sem_seg,
    draw_texts,
    place_side_by_side,
    to_rgb,
)
from jengine.extras.drawing.samples import to_entry
from jengine.logging import Visualizer, build_logger

Image = pytest.importorskip("PIL.Image")

RED, BLUE = (255, 0, 0), (0, 0, 255)


def read(path):
    return np.asarray(Image.open(io.BytesIO(path.read_bytes())))


@pytest.fixture
def visualizer(tmp_path):
    return LocalVisualizer(save_dir=tmp_path, classes=("sky", "road"), palette=(RED, BLUE))


def test_class_colors_are_blended_with_the_image():
    image = np.full((1, 3, 3), 100, np.uint8)
    drawn = draw_sem_seg(image, np.array([[0, 1, 255]]), [RED, BLUE], alpha=0.5)
    assert drawn[0, 0].tolist() == [177, 50, 50]  # (100 + 255) / 2 truncated, 100 / 2
    assert drawn[0, 1].tolist() == [50, 50, 177]
    assert drawn[0, 2].tolist() == [100, 100, 100]  # 255 is not a class


def test_default_palette_is_the_pascal_voc_color_map():
    # the first five colors of the VOC development kit's color map
    assert default_palette(5) == [(0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0), (0, 0, 128)]


def test_masks_and_boxes_are_drawn_at_their_positions():
    image = np.zeros((8, 8, 3), np.uint8)
    mask = np.zeros((1, 8, 8), bool)
    mask[0, 2:4, 2:4] = True
    masked = draw_masks(image, mask, [RED], alpha=0.5)
    assert masked[2, 2].tolist() == [127, 0, 0]
    assert masked.any(axis=-1).sum() == 4
    boxed = draw_boxes(image, np.array([[1, 1, 6, 6]]), [BLUE])
    assert boxed[1, 3].tolist() == list(BLUE)
    assert boxed[3, 3].tolist() == [0, 0, 0]
    assert draw_boxes(image, np.zeros((0, 4)), []).sum() == 0


def test_images_of_all_dtypes_are_converted_to_rgb():
    assert to_rgb(np.array([[0.0, 0.5, 2.0]], np.float32))[0, :, 0].tolist() == [0, 128, 255]
    assert to_rgb(np.full((1, 1, 4), 7, np.uint8)).tolist() == [[[7, 7, 7]]]
    with pytest.raises(TypeError, match="got int32"):
        to_rgb(np.zeros((1, 1, 3), np.int32))
    with pytest.raises(ValueError, match=r"got \(1, 1, 2\)"):
        to_rgb(np.zeros((1, 1, 2), np.uint8))


def test_ground_truth_is_drawn_left_of_the_prediction(visualizer, tmp_path):
    labels = np.zeros((4, 4), int)
    sample = {"gt_sem_seg": labels, "pred_sem_seg": labels + 1}
    visualizer.add_datasample("a", np.zeros((4, 4), np.uint8), sample, step=3, with_labels=False)
    picture = read(tmp_path / "vis_data" / "vis_image" / "a_3.png")
    assert picture.shape == (4, 8, 3)
    assert picture[0, 0].tolist() == [204, 0, 0]  # 255 * 0.8
    assert picture[0, 4].tolist() == [0, 0, 204]
    visualizer.add_datasample("b", np.zeros((4, 4), np.uint8), sample, draw_gt=False, with_labels=False)
    assert read(tmp_path / "vis_data" / "vis_image" / "b_0.png").shape == (4, 4, 3)


def test_zoomed_pictures_show_class_names(tmp_path):
    zoomed = LocalVisualizer(zoom=10, palette=(RED,), classes=("sky",))
    labels = {"pred_sem_seg": np.zeros((6, 6), int)}
    without_names = zoomed.draw(np.zeros((6, 6), np.uint8), labels, with_labels=False)
    with_names = zoomed.draw(np.zeros((6, 6), np.uint8), labels)
    assert without_names.shape == (60, 60, 3)
    assert len(np.unique(without_names.reshape(-1, 3), axis=0)) == 1
    assert (with_names != without_names).any()


def test_instances_are_drawn_with_labels_and_scores(visualizer):
    instances = dict(boxes=np.array([[1, 1, 28, 28]]), labels=np.array([1]), scores=np.array([0.9]))
    picture = visualizer.draw(np.zeros((30, 30, 3), np.uint8), {"pred_instances": instances})
    assert picture[28, 14].tolist() == list(BLUE)
    without_labels = visualizer.draw(np.zeros((30, 30, 3), np.uint8), {"pred_instances": instances}, with_labels=False)
    assert (picture != without_labels).any()
    masks = np.ones((1, 30, 30), bool)
    assert visualizer.draw(np.zeros((30, 30, 3), np.uint8), {"gt_instances": {"masks": masks}})[0, 0].tolist() == [
        127,
        0,
        0,
    ]


def test_class_names_and_colors_come_from_the_dataset():
    visualizer = LocalVisualizer(alpha=1)
    visualizer.dataset_meta = {"classes": ("a", "b"), "palette": [(1, 2, 3), (4, 5, 6)]}
    picture = visualizer.draw(np.zeros((1, 1), np.uint8), {"gt_sem_seg": np.array([[1]])}, with_labels=False)
    assert picture.tolist() == [[[4, 5, 6]]]


def test_without_a_display_pictures_are_written_to_files_with_one_log_line(visualizer, tmp_path, monkeypatch):
    monkeypatch.setattr(display, "has_display", lambda: False)
    build_logger(log_file=str(tmp_path / "run.log"))
    for name in ("a", "b"):
        visualizer.add_datasample(name, np.zeros((2, 2), np.uint8), show=True, step=5)
    assert read(tmp_path / "vis_data" / "vis_image" / "b_5.png").shape == (2, 2, 3)
    text = (tmp_path / "run.log").read_text()
    assert text.count(f"There is no display: pictures are written to {tmp_path / 'vis_data' / 'vis_image'}") == 1


def test_with_a_display_the_picture_is_shown_and_no_file_is_written(visualizer, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(display, "has_display", lambda: True)
    monkeypatch.setattr("PIL.ImageShow.show", lambda image, title: shown.append((image.size, title)) or True)
    visualizer.add_datasample("a", np.zeros((2, 3), np.uint8), show=True)
    assert shown == [((3, 2), "a")]
    assert not (tmp_path / "vis_data").exists()


def test_out_file_is_written_instead_of_the_backends(visualizer, tmp_path):
    visualizer.add_datasample("a", np.zeros((2, 2), np.uint8), out_file=tmp_path / "x" / "y.png")
    assert (tmp_path / "x" / "y.png").exists()
    assert not (tmp_path / "vis_data").exists()


def test_processes_other_than_the_first_draw_nothing(visualizer, tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    visualizer.add_datasample("a", np.zeros((2, 2), np.uint8), out_file=tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_it_can_be_built_from_a_config():
    assert isinstance(VISUALIZERS.build(dict(type="LocalVisualizer", zoom=2)), Visualizer)


def text_pixels(picture, image):
    """Return the rows and columns in which a picture differs from an image."""
    return np.nonzero((picture != image).any(axis=-1))


def test_texts_at_the_edge_are_moved_inside_the_image():
    image = np.zeros((20, 60, 3), np.uint8)
    centered = draw_texts(image, [(30, 10)], ["road"], [RED])
    rows, columns = text_pixels(centered, image)
    height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
    assert abs((rows.min() + rows.max()) / 2 - 10) <= 1
    assert abs((columns.min() + columns.max()) / 2 - 30) <= 1
    for position in [(0, 0), (59, 19), (-5, 40)]:
        rows, columns = text_pixels(draw_texts(image, [position], ["road"], [RED]), image)
        assert (np.ptp(rows) + 1, np.ptp(columns) + 1) == (
            height,
            width,
        )  # nothing of it is outside
    boxed = draw_boxes(image, np.array([[50, 15, 59, 19]]), [RED], ["road"])
    assert np.ptp(text_pixels(boxed, image)[1]) + 1 >= width


def test_texts_are_reduced_and_then_cut_to_fit_small_images():
    wide, narrow, tiny = (np.zeros((12, width, 3), np.uint8) for width in (60, 20, 12))
    full = text_pixels(draw_texts(wide, [(0, 0)], ["road"], [RED]), wide)
    reduced = text_pixels(draw_texts(narrow, [(0, 0)], ["road"], [RED]), narrow)
    assert np.ptp(full[1]) + 1 > 20 > np.ptp(reduced[1])
    np.testing.assert_array_equal(
        draw_texts(tiny, [(5, 6)], ["road and sky"], [RED]),
        draw_texts(tiny, [(5, 6)], ["road and sea"], [RED]),
    )
    speck = np.zeros((2, 2, 3), np.uint8)
    assert (draw_texts(speck, [(0, 0)], ["road"], [RED]) == speck).all()


def test_the_class_of_an_image_is_written_above_it(visualizer):
    image = np.full((8, 8, 3), 100, np.uint8)
    picture = visualizer.draw(image, {"gt_label": np.int32(0), "pred_label": np.int64(1)})
    strip = len(picture) - 8
    np.testing.assert_array_equal(picture[strip:, :8], image)
    assert picture[:strip].max() > 200  # white text on black
    assert picture[strip:, 8:].max() == 0  # widened for the text
    only = visualizer.draw(image, {"gt_label": 0, "pred_label": 1}, draw_gt=False)
    assert strip > len(only) - 8 > 0  # one line
    same = LocalVisualizer(classes=("x", "road")).draw(image, {"pred_label": 1})
    np.testing.assert_array_equal(only, same)  # the name of the class, not its index
    assert (visualizer.draw(image, {"pred_label": 1}, with_labels=False) == image).all()


def test_a_number_is_written_with_four_digits():
    image = np.zeros((4, 4), np.uint8)
    visualizer = LocalVisualizer()
    np.testing.assert_array_equal(
        visualizer.draw(image, {"pred_label": np.float32(1 / 3)}),
        visualizer.draw(image, {"pred_label": 0.33331}),
    )


def test_pictures_of_different_heights_are_placed_next_to_each_other():
    low, high = np.full((1, 2, 3), 5, np.uint8), np.full((3, 1, 3), 7, np.uint8)
    placed = place_side_by_side([low, high])
    assert placed[..., 0].tolist() == [[5, 5, 7], [0, 0, 7], [0, 0, 7]]


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (np.int32(3), "label", 3),
        (np.float32(0.5), "label", 0.5),
        (np.array([0.1, 0.9]), "label", 1),
        (np.array([[1, 0]]), "sem_seg", [[1, 0]]),
        (np.array([[[0.1, 0.9], [0.9, 0.1]]]), "sem_seg", [[1, 0]]),
    ],
)
def test_labels_and_predictions_of_an_example_become_a_class_or_class_indices(value, kind, expected):
    found, entry = to_entry(value, "Hook.label")
    assert found == kind
    assert entry.tolist() == expected
