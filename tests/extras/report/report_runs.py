"""Write the log directories of runs, as a Runner writes them."""

import json

import numpy as np

from jengine.logging import Visualizer

VERSIONS = {"jengine": "0.1.0", "jax": "0.10.2"}


def train_row(step, **values):
    return {"lr": 0.1, "time": 0.5, "data_time": 0.01, **values, "epoch": 1 + step // 10, "iter": step, "mode": "train"}


def write_run(work_dir, rows, *, config=None, images=(), timestamp="20250131_120000", seed=0, **session):
    """Write a run and return its log directory.

    Args:
      rows: lines of the scalar file, with an `iter`.
      images: `(name, step)` of 4 x 6 images.
      session: changes to the session in `run.json`.
    """
    log_dir = work_dir / timestamp
    visualizer = Visualizer(save_dir=log_dir)
    visualizer.add_config(config or {})
    for row in rows:
        visualizer.add_scalars(row, step=row["iter"], file_path=f"{timestamp}.json")
    for name, step in images:
        visualizer.add_image(name, np.full((4, 6, 3), step, np.uint8), step)
    visualizer.close()
    session = {
        "started": "2025-01-31 12:00:00", "status": "finished", "versions": VERSIONS, "devices": "1 x cpu (cpu)",
        "iter": 40, "seconds": {"step": 3.0, "compile": 1.0}, **session,
    }  # fmt: skip
    record = {
        "seed": seed, "max_iters": 40, "max_epochs": 4, "epoch_length": 10, "sessions": [session],
        "model": {"tensors": 2, "parameters": 30, "bytes": 120},
        "groups": {"columns": ["group", "lr"], "rows": [["0", "0.1"]]},
    }  # fmt: skip
    (log_dir / "run.json").write_text(json.dumps(record))
    return log_dir


def losses(scale):
    """Return the lines of 40 iterations with a validation after each 10."""
    rows = []
    for step in range(1, 41):
        rows.append(train_row(step, loss=scale / step))
        if step % 10 == 0:
            metrics = {"loss": 2 * scale / step, "accuracy/top1": step / 100 / scale, "time": 0.1, "data_time": 0.1}
            rows.append({**metrics, "epoch": step // 10, "iter": step, "mode": "val"})
    return rows
