"""What configs in MMEngine's style refuse: a call, its error, and the words that must be in the message."""

import pytest

from jengine.config import load_config, resolve
from jengine.config.errors import ConfigError
from jengine.extras.mmengine.mmengine_keys import drop_without_effect
from jengine.logging import build_logger, print_log
from jengine.runner import Runner
from tests.refusals import check_row

RUN = "model = dict()\nwork_dir = 'w'\n"
BACKENDS = "vis_backends = [dict(type='LocalVisBackend')]\nvisualizer = dict(vis_backends=vis_backends)\n"


def build(write, text):
    Runner.from_cfg(load_config(write("a.py", RUN + text)))


def drop_backends(write):
    path = write("a.py", BACKENDS + RUN)
    drop_without_effect(resolve(load_config(path, ["visualizer=None", "vis_backends=[{'type': 'A'}]"])))


def log_to(name):
    build_logger("engine")
    print_log("x", logger=name)


REFUSED = {
    # files
    "a list": (lambda write: load_config(write("a.json", "[1]")), ConfigError, "dict", "got list", "a.json"),
    "a file of another kind": (lambda write: load_config(write("a.toml", "x = 1")), ConfigError, "Python file", "a.toml"),
    **{
        f"a deep file of {suffix}": (lambda write, suffix=suffix: load_config(write(f"deep.{suffix}", "[" * 1_000_000)), ConfigError, "deep", f"deep.{suffix}")
        for suffix in ("json", "yaml")
    },
    # sections
    "misspelt sections": (
        lambda write: build(write, "optim_wraper = dict()\ntrain_dataloder = dict()"), ConfigError,
        "'optim_wraper'; did you mean 'optim_wrapper'", "'train_dataloder'; did you mean 'train_dataloader'",
    ),
    **{
        f"a comma after {section}": (lambda write, section=section: build(write, f"{section} = dict(type='A'),"), ConfigError, f"`{section}`", "tuple", "comma")
        for section in ("train_cfg", "visualizer", "auto_scale_lr", "log_processor", "train_dataloader", "custom_imports", "model")
    },
    "a data preprocessor": (lambda write: build(write, "data_preprocessor = dict(mean=[0.5], std=[0.2])"), ConfigError, "`data_preprocessor`", "type='PreprocessedModel'", "'Normalize'"),
    "backends without a visualizer": (drop_backends, ConfigError, "`vis_backends`", "`visualizer`"),
    # calls
    "a logger that was not built": (lambda: log_to("engin"), ValueError, "'engin'"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_a_config_of_mmengine_cannot_be_is_refused(row, request):
    check_row(request, *row)
