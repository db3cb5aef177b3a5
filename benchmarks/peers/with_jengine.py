"""Measure the Runner with its default hooks."""

import tempfile

import jengine
from benchmarks.cases import TinyMLP
from benchmarks.peers import bare_jax
from benchmarks.peers.common import LOG_EVERY, MOMENTUM, RATE, compare
from jengine.model import CrossEntropy, LinenModel


def run(data, **train_cfg):
    """Train on the data once."""
    with tempfile.TemporaryDirectory() as work_dir:
        jengine.Runner(
            LinenModel(TinyMLP(), CrossEntropy()),
            work_dir,
            train_dataloader=data,
            train_cfg=dict(by_epoch=False, max_iters=len(data), **train_cfg),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=RATE, momentum=MOMENTUM)),
            default_hooks=dict(logger=dict(type="LoggerHook", interval=LOG_EVERY), checkpoint=None),
        ).train()


def pack(x, y):
    """Convert a batch for the model."""
    return {"image": x, "label": y}


chunks = (lambda data: run(data, steps_per_call=10), pack)
loops = {"bare": bare_jax.LOOP, "trainer": (run, pack), "chunks of 10": chunks}
compare(loops, jengine.__version__)
