import pytest

from jengine.cli import main
from jengine.extras.diagnose.schedule import plot

CONFIG = """
def get_config():
    return dict(
        train_cfg=dict(by_epoch=False, max_iters=20),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.2, weight_decay=0.1)),
        param_scheduler=dict(type="LinearLR", start_factor=0.5, by_epoch=False, end=11),
    )
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "c.py"
    path.write_text(CONFIG)
    return str(path)


def test_varying_values_are_drawn_and_constant_ones_listed(config, capsys):
    assert main(["schedule", config]) == 0
    out = capsys.readouterr().out
    assert out.startswith("lr: 0.1 to 0.2, between 0.1 and 0.2\n")
    assert "constant: weight_decay 0.1, beta1 0.9, beta2 0.999" in out


def test_a_png_is_saved_on_demand(config, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["schedule", config, "--png", str(tmp_path / "s.png")]) == 0
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_is_drawn_as_text():
    assert plot([0.0, 1.0, 2.0, 1.0], "x", height=3) == (
        "x: 0 to 1, between 0 and 2\n"
        "2 |  *\n"
        "  | * *\n"
        "0 |*\n"
        "  +----\n"
        "   0  3"
    )  # fmt: skip
    assert plot([1.0] * 500, "y").splitlines()[0] == "y: 1 to 1, between 1 and 1"


def test_a_value_that_training_would_refuse_is_an_error(tmp_path, capsys):
    path = tmp_path / "negative.py"
    path.write_text(CONFIG.replace('dict(type="LinearLR", start_factor=0.5, by_epoch=False, end=11)', "lambda step: 1.0 - step / 10"))
    assert main(["schedule", str(path)]) != 0
    assert "`lr` must be finite and at least 0, got -0.1 from `param_scheduler` in iteration 12" in capsys.readouterr().err
