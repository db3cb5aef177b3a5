"""The example of an experiment, from the sweep to the exported model, with tiny sizes."""

import numpy as np
import pytest
from jax import export

from tests.examples.test_examples import ROOT, load_example
from tests.run_again import check_runs_again, find_runs, train_again

TINY = ["train_cfg.max_iters=8", "train_cfg.val_interval=4", "model.module.depth=1", "model.module.width=8"]
TINY += [
    "train_dataloader.batch_size=64",
    "param_scheduler[0].end=2",
    "param_scheduler[1].begin=2",
    "param_scheduler[1].end=8",
]


@pytest.mark.many_processes
def test_an_experiment_ends_with_a_table_and_the_exported_best_model(tmp_path, capsys):
    pytest.importorskip("sklearn")
    pytest.importorskip("flatbuffers")
    best = load_example("experiment").main(str(tmp_path), rates=(1e-5, 3e-2), seeds=1, overrides=TINY)
    assert best == {"optim_wrapper.optimizer.lr": 3e-2}
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5].split("|")[1].strip() == "lr"
    assert [line.split("|")[1].strip() for line in lines[-3:-1]] == ["0.03", "1e-05"]
    exported = export.deserialize(bytearray((tmp_path / "best.jax_export").read_bytes()))
    assert exported.call({"image": np.zeros((3, 8, 8, 1), np.float32)}).shape == (3, 10)
    first, second = find_runs(tmp_path)
    check_runs_again(first)
    check_runs_again(second)
    train_again(second)


def test_the_experiment_has_at_most_90_lines():
    assert len((ROOT / "examples" / "experiment.py").read_text().splitlines()) <= 90
