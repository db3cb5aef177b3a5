import io

import numpy as np
import pytest

from jengine.config import VISUALIZERS
from jengine.extras.selfsup import SelfSupVisualizer

Image = pytest.importorskip("PIL.Image")

IMAGE = np.full((8, 8, 3), 100, np.uint8)


def test_a_mask_of_patches_is_drawn_black_over_the_image():
    picture = SelfSupVisualizer(alpha=0.75).draw(IMAGE, {"gt_mask": np.array([[1, 0], [0, 1]])})
    assert picture[..., 0].tolist() == np.kron([[25, 100], [100, 25]], np.ones((4, 4))).tolist()  # 100 * (1 - 0.75)
    uneven = SelfSupVisualizer(alpha=1).draw(IMAGE[:, :7], {"gt_mask": np.array([[True, False, False]])})
    assert (uneven[0, :, 0] == 0).tolist() == [True, True, False, False, False, False, False]


def test_boxes_of_patches_are_drawn_as_red_lines_on_the_whole_image():
    whole = np.full((16, 16, 3), 50, np.uint8)
    entries = {"gt_unpatched_img": whole, "gt_patch_box": np.array([[2.0, 2.0, 12.0, 12.0]])}
    picture = SelfSupVisualizer(alpha=0.5).draw(IMAGE, entries)
    assert picture.shape == (16, 16, 3)
    red = [152, 25, 25]  # (50 + 255) / 2, 50 / 2
    assert [picture[7, x].tolist() for x in (1, 2, 4, 5)] == [[50] * 3, red, red, [50] * 3]
    assert SelfSupVisualizer(line_width=1).draw(IMAGE, entries)[7, 4].tolist() == [50] * 3


def test_the_masked_image_is_left_of_the_reconstruction(tmp_path):
    visualizer = VISUALIZERS.build(dict(type="SelfSupVisualizer", alpha=1, save_dir=tmp_path))
    sample = {"gt_mask": np.ones((2, 2)), "pred_unpatched_img": np.full((8, 8, 3), 0.2, np.float32)}
    visualizer.add_datasample("a", IMAGE, sample, step=4)
    picture = np.asarray(Image.open(io.BytesIO((tmp_path / "vis_data" / "vis_image" / "a_4.png").read_bytes())))
    assert picture[0, :, 0].tolist() == [0] * 8 + [51] * 8


def test_the_entries_of_local_visualizer_are_drawn_and_others_refused():
    visualizer, labels = SelfSupVisualizer(palette=[(0, 0, 255)]), np.zeros((8, 8), int)
    picture = visualizer.draw(IMAGE, {"gt_sem_seg": labels}, with_labels=False)
    assert picture[0, 0, 2] == 224  # 100 * 0.2 + 255 * 0.8
    with pytest.raises(KeyError, match="SelfSupVisualizer: a sample has no entry 'gt_masks'; did you mean 'gt_mask'"):
        SelfSupVisualizer().draw(IMAGE, {"gt_masks": np.ones((2, 2))})
