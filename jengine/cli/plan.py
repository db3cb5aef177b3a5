"""Run `jengine plan`: compile the programs of a config for many devices and print their memory, traffic and time."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    devices = parser.add_mutually_exclusive_group(required=True)
    devices.add_argument("--devices", type=int, metavar="N", help="number of CPU devices to compile for")
    devices.add_argument(
        "--topology", metavar="CHIP:SHAPE", help="chips to compile for: v5e:16x16, v5p:2x2x1, v6e:2x2, h100:8, a100:8, b200:8"
    )
    parser.add_argument("--mesh", metavar="AXIS=N,...", help="number of devices along data, fsdp and tensor")
    parser.add_argument(
        "--processes",
        type=int,
        metavar="P",
        help="number of processes, each of which reads batch_size examples (default: the hosts of the topology, or 1)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the plan of a config, and return the exit code: 1 if it does not fit into the memory of the chips.

    Raises:
      ConfigError: invalid options, a config without training, or a compiler that is not installed. PlanError: the
        programs cannot be compiled. RuntimeError: JAX is already initialized.
    """
    if min(args.devices or 1, 1 if args.processes is None else args.processes) < 1 or args.devices == 0:
        raise ConfigError(f"--devices and --processes must be at least 1, got {args.devices} and {args.processes}")
    mesh = parse_mesh(args.mesh)
    if args.topology is None:
        found = _plan_on_cpus(args, overrides, mesh)
    else:
        found = _plan_on_chips(args, overrides, mesh)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        from jengine.cli.plan_report import format_plan

        print(format_plan(found))
    return 1 if found["fits"] is False else 0


def _plan_on_cpus(args: argparse.Namespace, overrides: Sequence[str], mesh: Mapping[str, int] | None) -> dict[str, Any]:
    import jax

    from jengine.cli.program_costs import compile_plan
    from jengine.config import load_config, resolve

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    cfg = resolve(load_config(args.config, overrides))
    return compile_plan(set_devices(cfg, args.devices, mesh, args.processes or 1))


def _plan_on_chips(
    args: argparse.Namespace, overrides: Sequence[str], mesh: Mapping[str, int] | None
) -> dict[str, Any]:
    from jengine.cli.plan_process import PlanError, compile_candidates
    from jengine.cli.topologies import check_compiler, parse_topology

    topology = parse_topology(args.topology)
    check_compiler(topology)
    candidates = [{"mesh": mesh, "overrides": []}]
    (result,) = compile_candidates(args.config, overrides, topology, candidates, args.processes)
    if "error" in result:
        raise PlanError(f"{args.config} cannot be compiled for {topology}: {result['error']}\n{result['traceback'] if args.traceback else ''}".rstrip())
    for warning in result["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    return result["plan"]


def parse_mesh(text: str | None) -> dict[str, int] | None:
    """Parse `data=32,fsdp=8` to a dict.

    Raises:
      ConfigError: not of that form.
    """
    if text is None:
        return None
    pairs = [pair.split("=") for pair in text.split(",")]
    if not all(len(pair) == 2 and pair[1].lstrip("-").isdigit() for pair in pairs):
        raise ConfigError(f"--mesh must be a list of axes with their sizes, such as data=32,fsdp=8, got {text!r}")
    return {axis: int(size) for axis, size in pairs}


def set_devices(
    cfg: Mapping[str, Any], devices: int, mesh: Mapping[str, int] | None = None, processes: int = 1
) -> dict[str, Any]:
    """Return the config for many devices that all belong to one process.

    Args:
      cfg: a resolved config.
      devices: number of devices.
      mesh: number of devices along each axis; the config's own by default.
      processes: number of processes that read a batch each.

    Raises:
      ConfigError: the config has no training, its loader is not a config, or it runs on a single device.
    """
    loader = cfg.get("train_dataloader")
    if cfg.get("train_cfg") is None or not isinstance(loader, Mapping):
        raise ConfigError("there is nothing to plan: the config must have train_cfg, and train_dataloader as a config")
    parallel = dict(cfg.get("parallel") or {"type": "Pjit"})
    if parallel.get("type") == "SingleDevice":
        raise ConfigError("`parallel.type` must be Pjit or DataParallel, got SingleDevice")
    if mesh is not None:
        parallel["mesh"] = dict(mesh)
    if "impl" in parallel:  # pmap has the same traffic, but does not show it before it runs
        parallel["impl"] = "shard_map"
    train = {**loader, "batch_size": loader.get("batch_size", 1) * processes}
    return {**cfg, "parallel": {**parallel, "devices": devices}, "train_dataloader": train}
