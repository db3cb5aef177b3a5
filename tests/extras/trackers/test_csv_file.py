import csv

import numpy as np

from jengine.extras.trackers import CSVVisBackend
from jengine.logging import Visualizer


def read_rows(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_each_number_has_its_own_row_with_the_step(tmp_path):
    backend = CSVVisBackend(tmp_path)
    backend.add_scalars({"train/loss": np.float32(0.5), "step": 99}, step=10, file_path="x.json")
    backend.add_scalars({"val/accuracy": 1.0, "note": 'a, "b"'}, step=2)
    assert read_rows(tmp_path / "scalars.csv") == [
        ["step", "name", "value"],
        ["10", "train/loss", "0.5"],
        ["2", "val/accuracy", "1.0"],
        ["2", "note", 'a, "b"'],
    ]
    assert not (tmp_path / "x.json").exists()


def test_each_bin_of_a_histogram_has_its_own_row(tmp_path):
    visualizer = Visualizer([CSVVisBackend(tmp_path)])
    visualizer.add_histogram("w", np.array([0.0, 1.0, 1.0, 4.0]), step=7, bins=2)
    visualizer.close()
    rows = (tmp_path / "histograms.csv").read_text()
    assert rows == "step,name,low,high,count\n7,w,0.0,2.0,3\n7,w,2.0,4.0,1\n"


def test_images_and_config_are_written_to_files(tmp_path):
    backend = CSVVisBackend(tmp_path)
    backend.add_image("cat", np.zeros((2, 3, 3), np.uint8), step=5)
    backend.add_config("lr = 0.1\n")
    assert (tmp_path / "vis_image" / "cat_5.png").is_file()
    assert (tmp_path / "config.py").read_text() == "lr = 0.1\n"


def test_resuming_discards_rows_written_after_the_checkpoint(tmp_path):
    backend = CSVVisBackend(tmp_path)
    backend.add_scalar("a", 1.0, step=1)
    saved = backend.state_dict()
    backend.add_scalar("a", 2.0, step=2)
    resumed = CSVVisBackend(tmp_path)
    resumed.load_state_dict(saved, step=1)
    resumed.add_scalar("a", 3.0, step=2)
    assert read_rows(tmp_path / "scalars.csv") == [["step", "name", "value"], ["1", "a", "1.0"], ["2", "a", "3.0"]]


def test_resuming_before_the_first_row_discards_all_rows(tmp_path):
    backend = CSVVisBackend(tmp_path)
    saved = backend.state_dict()
    backend.add_scalar("a", 1.0, step=1)
    resumed = CSVVisBackend(tmp_path)
    resumed.load_state_dict(saved, step=0)
    resumed.add_scalar("a", 2.0, step=1)
    assert read_rows(tmp_path / "scalars.csv") == [["step", "name", "value"], ["1", "a", "2.0"]]
