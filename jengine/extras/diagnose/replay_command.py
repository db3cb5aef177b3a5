"""`jengine replay`: a training step that the numerics guard dropped, repeated to find the first
bad values.
"""

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from jengine.cli.commands import load, temporary_runner
from jengine.extras.diagnose.check import CheckError, StepChecks
from jengine.extras.diagnose.failing_examples import describe_samples
from jengine.extras.diagnose.replay import Findings, read_dump, replay_step
from jengine.parallel.pjit import Pjit
from jengine.train.step import build_train_step, with_flat_metrics

_MAX_PATHS = 20


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Replay the dump `args.dump` with the model and optimizer in the config, and print the
    findings.
    """
    cfg = load(args, overrides)
    dump = read_dump(args.dump)
    with temporary_runner(cfg) as runner:
        strategy = runner.strategy
        parts = runner.model, runner.build_optimizer(), runner.hooks
        arguments = dump["state"], dump["batch"], dump["hyperparams"]
        settings = dict(
            update=bool(dump["update"]),
            phases=cfg["train_cfg"].get("phases"),
            # replicas exist only within the step that their strategy compiles
            compile_step=jax.jit if strategy.replicas is None else strategy.compile_train_step,
        )
        iteration = int(dump["state"].step)
        # `out_sharding=` in a model requires the mesh
        is_explicit = isinstance(strategy, Pjit) and AxisType.Explicit in strategy.mesh.axis_types
        with jax.set_mesh(strategy.mesh) if is_explicit else contextlib.nullcontext():
            if args.check:
                print(_check(strategy, parts, arguments, settings))
                return
            findings = replay_step(*parts, *arguments, bisect=args.bisect, **settings)
        print(describe(iteration, findings))
        if findings.examples is None:
            return
        print(describe_bad_examples(findings.examples))
        samples = describe_samples(
            runner.train_dataloader, iteration, findings.examples, dump["batch"]
        )
        if samples:
            print(f"  {samples}")


def _check(
    strategy: Any, parts: Sequence[Any], arguments: Sequence[Any], settings: Mapping[str, Any]
) -> str:
    """Return the first check that the step fails."""
    model, wrapper, hooks = parts
    step = build_train_step(
        model,
        wrapper,
        [hook for hook in hooks if not hook.update_on_skipped_steps],
        update=settings["update"],
        phases=settings["phases"],
    )
    flat = with_flat_metrics(step)
    program = StepChecks(strategy).check_program(
        settings["compile_step"](flat), flat, wrapper, has_examples=True
    )
    try:
        program(*arguments)
    except CheckError as error:
        return "\n  ".join([str(error), *getattr(error, "__notes__", ())])
    return f"the step of iteration {int(arguments[0].step)}: every check passed"


def describe_bad_examples(examples: Sequence[int]) -> str:
    """Return the text that the command prints for the examples that `--bisect` has found.

    >>> describe_bad_examples([2, 5])
    'examples in the batch that alone make the loss or a gradient not finite: 2, 5'
    """
    if not examples:
        return "no example alone makes the loss or a gradient not finite"
    return (
        "examples in the batch that alone make the loss or a gradient not finite: "
        f"{', '.join(map(str, examples))}"
    )


def describe(iteration: int, findings: Findings) -> str:
    """Return the text that the command prints for `findings`."""
    lines = [f"the step of iteration {iteration}:"]
    lines += [f"  {name}: {value:g}" for name, value in findings.metrics.items()]
    if not findings.non_finite:
        return "\n".join([*lines, "every number is finite"])
    lines.append("not finite, in the order of the computation:")
    shown = list(findings.non_finite.items())[:_MAX_PATHS]
    lines += [f"  {path}: {count} element{'s' * (count > 1)}" for path, count in shown]
    if len(findings.non_finite) > len(shown):
        lines.append(f"  and {len(findings.non_finite) - len(shown)} more")
    if findings.operation:
        lines.append(f"first operation:\n  {findings.operation}")
    return "\n".join(lines)
