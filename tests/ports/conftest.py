"""Compare public training scripts with the same model and loss in jengine.

Each test has a script in the style of its authors, reduced to a tiny network and synthetic data: the model, the loss,
and a loop of its own that returns the loss of each iteration. The glue is the function that moves it into jengine.
"""

import ast
import inspect
import textwrap

import jax
import numpy as np
import pytest

MAX_GLUE = 15  # lines
TOLERANCE = {1: 1e-6, 4: 1e-5}  # relative, by the number of devices: sums over a batch have another order on several


def count_glue(glue):
    """Return the number of lines in a function that are code, apart from its signature."""
    source = textwrap.dedent(inspect.getsource(glue))
    (function,) = ast.parse(source).body
    lines = source.splitlines()[function.body[0].lineno - 1 :]
    return len([line for line in lines if line.strip() and not line.strip().startswith("#")])


@pytest.fixture(params=[1, 4], ids=["one_device", "four_devices"])
def check_port(request, tmp_path, record_property):
    """Return a function that compares the losses of a script's own loop with those of its port, and returns the run."""
    devices = request.param
    parallel = None if devices == 1 else dict(type="Pjit", mesh=dict(data=devices), devices=devices)

    def check(glue, own_loop, *data, names=("loss",)):
        """Compare.

        Args:
          glue: function of `data` and further arguments for the Runner, which it returns.
          own_loop: function of `data` and the key of the run, which returns the losses of each iteration.
          data: what both get, such as the initial parameters and the batches.
          names: the names of the losses in the log, if there are several.
        """
        lines = count_glue(glue)
        assert lines <= MAX_GLUE
        runner = glue(
            *data, work_dir=tmp_path, parallel=parallel, log_level="ERROR", default_hooks=dict(checkpoint=None)
        )
        runner.prepare_training()
        expected = np.asarray(jax.device_get(own_loop(*data, key=runner.state.key)), np.float64).reshape(-1, len(names))
        runner.train()
        found = np.stack([runner.message_hub.get_scalar(f"train/{name}").data[0] for name in names], axis=1)
        assert found.shape == expected.shape
        # the cost of a GAN crosses zero: near it, a tenth of the mean magnitude counts
        magnitude = np.maximum(np.abs(expected), 0.1 * np.abs(expected).mean(axis=0))
        difference = np.max(np.abs(found - expected) / magnitude)
        print(f"\nport {request.node.name}: {lines} lines, {difference:.1e}")
        assert expected.std(axis=0).min() > 0
        assert difference <= TOLERANCE[devices]
        return runner

    return check
