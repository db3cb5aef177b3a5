"""`jengine model`: the layers of a config's model."""

import argparse
import shutil
from collections.abc import Sequence
from typing import Any

import jax

from jengine.cli.commands import load, temporary_runner
from jengine.config.errors import ConfigError
from jengine.config.plugins import load_provided, provided
from jengine.data.batch_check import Batch
from jengine.data.host_entries import select_arrays
from jengine.data.masking import whole_batches
from jengine.logging.console import write_line
from jengine.runner.runner import Runner

_WIDTH = 160  # columns, unless a terminal has fewer


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Print the layers with output shapes, parameters and FLOPs, and the FLOPs of a batch in
    training.
    """
    with temporary_runner(load(args, overrides)) as runner:
        loaders = (runner.train_dataloader, runner.val_dataloader, runner.test_dataloader)
        loader = next((each for each in loaders if each is not None), None)
        if loader is None:
            raise ConfigError(
                "the config must have a dataloader, for the shapes of a batch, got none"
            )
        loader = next(iter(loader.values())) if isinstance(loader, dict) else loader
        # One real batch: shapes decide the table, and no config states them.
        batch = select_arrays(loader.example())
        with whole_batches(loader.batch_axis is None):
            write_line(
                runner.model.tabulate(
                    batch, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
                ).rstrip()
            )
            print(_describe_flops(runner, batch))
        loader.close()


def _describe_flops(runner: Runner, batch: Batch) -> str:
    """Return the FLOPs of matrix products and convolutions for a batch, in the prediction and in
    training.
    """
    if "count_flops" not in provided("names"):
        return "The FLOPs are unknown: they need the extra `plan`."
    count_flops = load_provided("names", "count_flops")
    model = runner.model
    key = jax.random.key(0)
    params, state = jax.eval_shape(model.init, key, batch)

    def total(params: Any, state: Any) -> jax.Array | float:
        losses, _ = model.loss(params, state, batch, rng=key, hyperparams=runner.hyperparams)
        return sum(jax.numpy.sum(jax.tree.leaves(value)[0]) for value in losses.values())

    try:
        prediction = count_flops(
            jax.make_jaxpr(lambda p, s: model.predict(p, s, batch))(params, state)
        )
        training = count_flops(jax.make_jaxpr(jax.grad(total))(params, state))
    except Exception:  # a model of several optimizers, or with hyperparameters that hooks set
        return "The FLOPs of training are unknown: its loss needs more than a batch."
    return (
        "FLOPs of a batch, in matrix products and convolutions alone: "
        f"{sum(prediction.values()):.4g} in prediction, {sum(training.values()):.4g} in training."
    )
