"""What cannot be loaded, exported or published: a call, its error, and the words that must be in the message."""

import importlib.util
import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jengine.checkpoint import CheckpointMismatchError, find_best_checkpoint, publish
from jengine.config import ConfigError
from jengine.extras.weights import (
    export_params,
    import_batch_stats,
    import_params,
    load_pretrained,
    locate_weights,
)
from tests.checkpoint.conftest import make_meta, make_state, save_and_wait
from tests.refusals import check_row
from tests.runner.conftest import squared_error

DENSE = {"kernel": np.ones((2, 2), np.float32)}
HEAD = {"head.weight": np.eye(2, dtype=np.float32)}


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A checkpoint of Orbax whose weights lie below `train.model`."""
    path = tmp_path_factory.mktemp("orbax") / "own"
    ocp.PyTreeCheckpointer().save(path, {"train": {"model": DENSE}, "step": 3})
    return path


@pytest.fixture
def saved(checkpointer, tmp_path):
    """A checkpoint of a run."""
    save_and_wait(checkpointer, tmp_path / "epoch_1", make_state(2.0), make_meta(hooks={}, message_hub={}))
    return tmp_path / "epoch_1"


@pytest.fixture
def files(tmp_path):
    """A directory with files that are no weights."""
    for name, content in (("model.pth", b"pickle"), ("torn.npz", b"PK"), ("torn.safetensors", b"no")):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "index.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    return tmp_path


def stack(*shape, second=(2, 3)):
    """Load two layers into one array of a shape."""
    weights = {"h.0.w": zeros(2, 3), "h.1.w": zeros(*second)}
    load_pretrained(weights, {"h": {"w": zeros(*shape)}}, rename=[(r"h\.(\d)", "h", dict(stack=0))])


def load_square(strict, neck=False):
    """Load a square matrix whose order nothing tells, beside one that keeps its order, as in GPT-2."""
    weights, target = dict(HEAD), {"head": {"kernel": zeros(2, 2)}}
    if neck:
        weights["neck.weight"], target["neck"] = zeros(2, 3), {"kernel": zeros(2, 3)}
    rename = [("neck", "neck", dict(transform="none"))] if neck else []
    load_pretrained(weights, target, rename=rename, strict=strict)


def import_torn(path):
    export_params({"head": DENSE}, path)
    os.truncate(path, path.stat().st_size - 1)
    import_params(path, {"head": DENSE})


def without_library(call, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    call()


def end_with_best(make_runner, wanted, save_best):
    """Build a Runner that shall end with its best weights, by one of two metrics."""
    make_runner(
        validates=True,
        train_cfg=dict(max_epochs=2, load_best_at_end=wanted),
        val_evaluator=[dict(type="MeanLoss", prefix=f"from{i}", loss=squared_error) for i in (2, 3)],
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", save_best=save_best)),
    )


def import_others(path, batch_stats=False):
    """Import other parameters, or statistics, than were exported."""
    export_params({"head": {"kernel": zeros(5, 3), "bias": zeros(3)}, "norm": {"scale": zeros(2)}}, path)
    if batch_stats:
        import_batch_stats(path, {"bn": {"mean": zeros(3)}})
    else:
        import_params(path, {"heads": {"kernel": zeros(5, 3)}, "head": {"kernel": zeros(5, 4), "bias": np.zeros(3, np.int32)}})


NET = "net.safetensors"
BEST = ["from2/loss", "from3/loss"]
STACKED = (CheckpointMismatchError, "h.w", "stored 2 x float32[2,3]", "the rule ('h", "2 of (2, 3)")
SQUARE = (CheckpointMismatchError, "head.kernel", "float32[2,2]", "(out, in) or (in, out)", "transform='transpose'")
REFUSED = {
    # files
    "a path of nothing": (lambda tmp_path: locate_weights(tmp_path / "nowhere"), FileNotFoundError, "nowhere", ".npz", ".safetensors", "nnx.Module"),
    "a directory of other files": (lambda files: locate_weights(files), FileNotFoundError, "model.pth", "Orbax"),
    "a pickle": (lambda files: locate_weights(files / "model.pth"), ValueError, "model.pth", "any code", "weights_only"),
    "a part of a zip": (lambda files: load_pretrained(files / "torn.npz", {"dense": DENSE}), ValueError, "torn.npz", "complete"),
    "a part of a file of safetensors": (lambda files: load_pretrained(files / "torn.safetensors", {"dense": DENSE}), ValueError, "torn.safetensors", "complete"),
    "an index with a file elsewhere": (lambda files: load_pretrained(files / "index.safetensors.index.json", {"dense": DENSE}), ValueError, "next to it", "'../secret.safetensors'"),
    "a text among arrays": (lambda: load_pretrained({"dense": {"name": "x", "bias": np.ones(2)}}, {"dense": DENSE}), TypeError, "weights", "dict in memory", "str at `dense.name`"),
    "an item of nothing": (lambda own: load_pretrained(own, DENSE, item="trian"), KeyError, "'trian'", "did you mean 'train'"),
    "an item that is an array": (lambda: load_pretrained({"kernel": np.ones((2, 2))}, DENSE, item="kernel"), KeyError, "no arrays below 'kernel'"),
    # shapes
    "a stack of another size": (lambda: stack(3, 2, 3), *STACKED, "expected float32[3,2,3]"),
    "a stack of another shape": (lambda: stack(2, 3, 2), *STACKED, "expected float32[2,3,2]"),
    "a stack of two shapes": (lambda: stack(2, 2, 3, second=(2, 4)), ValueError, "equal shapes", "'h.0.w'", "'h.1.w'"),
    **{
        f"a square matrix, {strict=}, {'beside another' if neck else 'alone'}": (lambda strict=strict, neck=neck: load_square(strict, neck), *SQUARE)
        for strict in (True, False) for neck in (True, False)
    },
    "tokens that are no grid": (
        lambda: load_pretrained({"pos": zeros(1, 18, 3)}, {"pos": zeros(1, 16, 3)}, interpolate=["pos"]), CheckpointMismatchError, "stored float32[1,18,3], expected float32[1,16,3]\n",
    ),
    # exports
    "statistics that are a switch": (lambda tmp_path: export_params({"a": DENSE}, tmp_path / NET, batch_stats=True), TypeError, "`batch_stats`", "model state", "got True"),
    "statistics of nothing": (lambda tmp_path: export_params({"a": DENSE}, tmp_path / NET, batch_stats={}), ValueError, "running statistics"),
    "a dtype that safetensors lacks": (
        lambda tmp_path: export_params({"a": {"kernel": jnp.ones(2, ml_dtypes.float8_e4m3fn)}}, tmp_path / NET), ValueError, "`a.kernel`", "safetensors", "float8_e4m3fn",
    ),
    "parameters of others": (
        lambda tmp_path: import_others(tmp_path / NET), CheckpointMismatchError,
        NET, "missing     heads.weight", "unexpected  norm.weight", "head.weight  stored float32[3,5], expected float32[4,5]", "head.bias  stored float32[3], expected int32[3]",
    ),
    "statistics that are not exported": (lambda tmp_path: import_others(tmp_path / NET, batch_stats=True), CheckpointMismatchError, NET, "missing     bn.running_mean"),
    "a file that is missing": (lambda tmp_path: import_params(tmp_path / NET, {"a": DENSE}), FileNotFoundError, NET),
    "a file that is cut": (lambda tmp_path: import_torn(tmp_path / NET), ValueError, NET, "complete safetensors file"),
    "an export without safetensors": (lambda tmp_path, monkeypatch: without_library(lambda: export_params({"a": DENSE}, tmp_path / NET), monkeypatch), ImportError, "pip install 'jengine[safetensors]'"),
    "an import without safetensors": (lambda tmp_path, monkeypatch: without_library(lambda: import_params(tmp_path / NET, {"a": DENSE}), monkeypatch), ImportError, "pip install 'jengine[safetensors]'"),
    # checkpoints
    "a misspelt key": (lambda saved: publish(saved, ["parms"]), KeyError, "'parms'", "did you mean 'params'"),
    "a key without arrays": (lambda saved: publish(saved, ["meta"]), ValueError, "`keys`", "state", "got ['meta']"),
    "the best of a run without save_best": (lambda saved: find_best_checkpoint(saved.parent), FileNotFoundError, "best checkpoint", "`save_best`"),
    **{
        f"load_best_at_end={wanted!r} with save_best={save_best}": (
            lambda make_runner, wanted=wanted, save_best=save_best: end_with_best(make_runner, wanted, save_best), ConfigError, "`train_cfg.load_best_at_end`", choices, "save_best",
        )
        for save_best, wanted, choices in ((None, True, "False"), (BEST[0], BEST[1], "False or 'from2/loss' or True"), (BEST, True, "False or 'from2/loss' or 'from3/loss'"))
    },
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_weights_that_do_not_fit_are_refused(row, request):
    check_row(request, *row)
