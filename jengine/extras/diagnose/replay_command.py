"""`jengine replay`: a training step that the numerics guard dropped, repeated to find the first
bad values.
"""

import argparse
import contextlib
from collections.abc import Sequence

import jax
from jax.sharding import AxisType

from jengine.cli.commands import load
from jengine.extras.diagnose.replay import Findings, read_dump, replay_step
from jengine.extras.diagnose.short_runs import temporary_runner
from jengine.parallel.pjit import Pjit

_MAX_PATHS = 20


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Replay the dump `args.dump` with the model and optimizer in the config, and print the
    findings.
    """
    cfg = load(args, overrides)
    dump = read_dump(args.dump)
    with temporary_runner(cfg) as runner:
        strategy = runner.strategy
        # `out_sharding=` in a model requires the mesh
        is_explicit = isinstance(strategy, Pjit) and AxisType.Explicit in strategy.mesh.axis_types
        with jax.set_mesh(strategy.mesh) if is_explicit else contextlib.nullcontext():
            findings = replay_step(
                runner.model,
                runner.build_optimizer(),
                runner.hooks,
                dump["state"],
                dump["batch"],
                dump["hyperparams"],
                update=bool(dump["update"]),
                phases=cfg["train_cfg"].get("phases"),
                # replicas of DataParallel exist only within its own compiled step
                compile_step=strategy.compile_train_step if strategy.axis_name else jax.jit,
            )
    print(describe(int(dump["state"].step), findings))


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
