"""`jengine inspect`: the values inside the step for one batch, as a table."""

import argparse
from collections.abc import Sequence

import jax

from jengine.cli.commands import load, temporary_runner
from jengine.config.errors import ConfigError
from jengine.extras.diagnose.inspection import (
    STATISTICS,
    compile_inspection,
    put_batch,
    read_statistics,
    split_layers,
)
from jengine.logging.console import write_line
from jengine.logging.tables import format_table


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Compute a training step for the first batch and print the values at the paths."""
    cfg = load(args, overrides)
    if args.checkpoint is not None:
        cfg["load_from"] = args.checkpoint
    with temporary_runner(cfg) as runner:
        if not runner.is_training_configured:
            raise ConfigError(
                "the config must have train_dataloader, train_cfg and optim_wrapper, got none: "
                "there is no step"
            )
        runner.prepare_training()
        runner.load_or_resume()
        loader = runner.train_dataloader
        count = runner.train_loop.batches_per_iteration
        example = loader.example()
        batch = put_batch(runner, example if count == 1 else (example,) * count)
        loader.close()
        program, kinds = compile_inspection(runner, args.path)
        # A step of a fresh run or of the checkpoint, with the rates of a run's first iteration
        _, values = program(runner.state, batch, runner.step_hyperparams())
        values = jax.device_get(values)
        columns = ["path", "shape", "dtype", *STATISTICS]
        rows = []
        for path in kinds:
            for name, value in split_layers(values, {path: kinds[path]}).items():
                numbers = read_statistics(value)
                kind = kinds[path]
                rows.append(
                    [
                        name,
                        str(list(kind.shape)),
                        kind.dtype,
                        *(f"{numbers[key]:.4g}" for key in STATISTICS[:3]),
                        *(f"{100 * numbers[key]:.3g} %" for key in STATISTICS[3:]),
                    ]
                )
        write_line(format_table(columns, rows, title="Values of a training step"))
