"""Run `jengine plan`: compile the programs of a config for many devices and print their memory, traffic and time."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.cli.topologies import Topology, check_compiler, parse_topology
from jengine.errors import ConfigError
from jengine.json_codec import encode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    devices = parser.add_mutually_exclusive_group(required=True)
    devices.add_argument("--devices", type=int, metavar="N", help="number of CPU devices to compile for")
    devices.add_argument(
        "--topology",
        metavar="CHIP:SHAPE",
        help="chips to compile for: v5e:16x16, v5p:2x2x1, v6e:2x2, h100:8, a100:8, b200:8",
    )
    parser.add_argument("--slices", type=int, metavar="N", help="number of TPU slices of --topology (default: 1)")
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="number of devices along data, fsdp and tensor, or axes of the config; slices.AXIS=N: of slices",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="P",
        help="number of processes, each of which reads batch_size examples (default: the hosts of the topology, or 1)",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="try meshes, rematerialization and batch sizes on the chips of --topology, and rank those that fit",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the plan of a config, and return the exit code: 1 if it does not fit into the memory of the chips.

    Raises:
      ConfigError: invalid options, a config without training, or a compiler that is not installed. PlanError: the
        programs cannot be compiled. RuntimeError: JAX is already initialized.
    """
    for name in ("devices", "processes", "slices"):
        if (number := getattr(args, name)) is not None and number < 1:
            raise ConfigError(f"--{name} must be at least 1, got {number}")
    if args.slices and args.topology is None:
        raise ConfigError("--slices must be used with --topology, whose slices it counts; got --devices")
    mesh = parse_mesh(args.mesh)
    if args.search:
        plans = _search(args, overrides, mesh)
        found, fits = {"plans": plans}, plans[0]["fits"]
    else:
        plans = []
        found = (_plan_on_cpus if args.topology is None else _plan_on_chips)(args, overrides, mesh)
        fits = found["fits"]
    if args.json:
        print(encode(found, indent=1))
    else:
        from jengine.cli.plan_report import format_plan, format_search

        print(format_search(plans) if args.search else format_plan(found))
    return 1 if fits is False else 0


def _plan_on_cpus(args: argparse.Namespace, overrides: Sequence[str], mesh: Mapping[str, Any] | None) -> dict[str, Any]:
    import jax

    from jengine.cli.program_costs import compile_plan
    from jengine.config import load_config, resolve
    from jengine.sharding import build_mesh

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    cfg = set_devices(resolve(load_config(args.config, overrides)), args.devices, mesh)
    parallel = cfg["parallel"]
    built = build_mesh(parallel.get("mesh"), args.devices, parallel.get("batch_axes"))
    return compile_plan(scale_batches(cfg, built, args.processes or 1))


def _plan_on_chips(
    args: argparse.Namespace, overrides: Sequence[str], mesh: Mapping[str, Any] | None
) -> dict[str, Any]:
    from jengine.cli.plan_process import PlanError, compile_candidates

    topology = _parse_chips(args)
    candidates: list[dict[str, Any]] = [{"mesh": mesh, "overrides": []}]
    (result,) = compile_candidates(args.config, overrides, topology, candidates, args.processes)
    if "error" in result:
        details = f"\n{result['traceback']}" if args.traceback else ""
        raise PlanError(f"{args.config} cannot be compiled for {topology}: {result['error']}{details}")
    for warning in result["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    return result["plan"]


def _search(args: argparse.Namespace, overrides: Sequence[str], mesh: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    from jengine.cli import plan_search
    from jengine.config import load_config, resolve

    if args.topology is None:
        raise ConfigError("--search must be used with --topology, since it compares the time on chips; got --devices")
    topology = _parse_chips(args)
    cfg = resolve(load_config(args.config, overrides))
    _check_plannable(cfg)
    space = plan_search.build_space(cfg, topology, mesh)
    compile_all = plan_search.compile_with(space, args.config, overrides, topology, args.processes)
    return plan_search.search(space, compile_all, report=lambda line: print(line, file=sys.stderr, flush=True))


def _parse_chips(args: argparse.Namespace) -> Topology:
    topology = parse_topology(args.topology, args.slices or 1)
    check_compiler(topology)
    return topology


def parse_mesh(text: str | None) -> dict[str, Any] | None:
    """Parse `data=32,fsdp=8,slices.data=2` to a dict with the number of slices in a dict of its own, `slices`.

    Raises:
      ConfigError: not of that form.
    """
    if text is None:
        return None
    pairs = [pair.split("=") for pair in text.split(",")]
    if not all(len(pair) == 2 and pair[1].lstrip("-").isdigit() for pair in pairs):
        raise ConfigError(f"--mesh must be a list of axes with their sizes, such as data=32,fsdp=8, got {text!r}")
    sizes = {axis: int(size) for axis, size in pairs}
    slices = {axis.removeprefix("slices."): sizes.pop(axis) for axis in list(sizes) if axis.startswith("slices.")}
    return {**sizes, "slices": slices} if slices else sizes


def set_devices(cfg: Mapping[str, Any], devices: int, mesh: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the config for many devices that all belong to one process.

    Args:
      cfg: a resolved config.
      devices: number of devices.
      mesh: see `build_mesh`; the config's own by default.

    Raises:
      ConfigError: the config has no training, its loader is not a config, or it runs on a single device.
    """
    _check_plannable(cfg)
    parallel = dict(cfg.get("parallel") or {"type": "Pjit"})
    if parallel.get("type") == "SingleDevice":
        raise ConfigError("`parallel.type` must be Pjit or DataParallel, got SingleDevice")
    if mesh is not None:
        parallel["mesh"] = dict(mesh)
    if "impl" in parallel:  # pmap has the same traffic, but does not show it before it runs
        parallel["impl"] = "shard_map"
    return {**cfg, "parallel": {**parallel, "devices": devices}}


def scale_batches(cfg: Mapping[str, Any], mesh: Any, processes: int) -> dict[str, Any]:
    """Return the config with the batches that the processes read for the devices which here belong to one process.

    Args:
      cfg: a resolved config.
      mesh: its `jax.sharding.Mesh`.
      processes: number of processes, with equally many devices each.

    Raises:
      ConfigError: the devices cannot be divided over the processes, or the mesh cannot be; see `find_data_shard`.
    """
    import jax

    from jengine.sharding.mesh import find_data_shard

    devices = sorted(mesh.devices.flat, key=lambda device: (device.process_index, device.id))
    if len(devices) % processes:
        raise ConfigError(f"--processes must divide the {len(devices)} devices, got {processes}")
    process_of = {device: i * processes // len(devices) for i, device in enumerate(devices)}
    axes = (cfg.get("parallel") or {}).get("batch_axes")
    here = find_data_shard(mesh, jax.process_index(), axes)
    shards = find_data_shard(mesh, 0, axes, process_of).count // here.count
    loaders = {
        name: {**loader, "batch_size": loader.get("batch_size", 1) * shards}
        for name in ("train_dataloader", "val_dataloader")
        if isinstance(loader := cfg.get(name), Mapping)
    }
    return {**cfg, **loaders}


def _check_plannable(cfg: Mapping[str, Any]) -> None:
    """Raise ConfigError for a config without training, or whose training data are not a config."""
    if cfg.get("train_cfg") is None or not isinstance(cfg.get("train_dataloader"), Mapping):
        raise ConfigError("there is nothing to plan: the config must have train_cfg, and train_dataloader as a config")
