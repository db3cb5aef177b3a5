"""`jengine plan`: the programs for a config, compiled for many devices, with memory, traffic and
time.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jengine.config.containers import resolve
from jengine.config.errors import ConfigError
from jengine.config.json_codec import encode
from jengine.config.load import load_config
from jengine.data.step_values import StepValues, is_step_values, parse_step_values
from jengine.evaluation.sections import split_dataloaders
from jengine.extras.plan import plan_search
from jengine.extras.plan.plan_process import PlanError, compile_candidates
from jengine.extras.plan.plan_report import format_plan, format_search
from jengine.extras.plan.program_costs import Plan, compile_plan
from jengine.extras.plan.topologies import Topology, check_compiler, parse_topology
from jengine.logging.console import write_line
from jengine.parallel.mesh import MeshSizes, build_mesh, find_data_shard


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the plan of a config, and return the exit code: 1 if it does not fit into the chips'
    memory.
    """
    # Before the config is read and JAX starts, which takes seconds.
    for name in ("devices", "processes", "slices"):
        if (number := getattr(args, name)) is not None and number < 1:
            raise ConfigError(f"--{name} must be at least 1, got {number}")
    if args.slices and args.topology is None:
        raise ConfigError(
            "--slices must be used with --topology, whose slices it counts; got --devices"
        )
    mesh = parse_mesh(args.mesh)
    if args.search:
        plans = _search(args, overrides, mesh)
        found = {"plans": plans}
        fits = plans[0]["fits"]
        text = format_search(plans, by_size=args.search == "batch")
    else:
        found = (_plan_on_cpus if args.topology is None else _plan_on_chips)(args, overrides, mesh)
        fits = found["fits"]
        text = format_plan(found)
    write_line(encode(found, indent=1) if args.json else text)
    # None on CPUs, whose memory is not that of the chips, is no failure.
    return 1 if fits is False else 0


def _plan_on_cpus(
    args: argparse.Namespace, overrides: Sequence[str], mesh: MeshSizes | None
) -> Plan:
    # The number of simulated devices is fixed at the first use of JAX, which is below.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    cfg = set_devices(resolve(load_config(args.config, overrides)), args.devices, mesh)
    parallel = cfg["parallel"]
    built = build_mesh(parallel.get("mesh"), args.devices, parallel.get("batch_axes"))
    return compile_plan(scale_batches(cfg, built, args.processes or 1))


def _plan_on_chips(
    args: argparse.Namespace, overrides: Sequence[str], mesh: MeshSizes | None
) -> Plan:
    topology = _parse_chips(args)
    candidates: list[dict[str, Any]] = [{"mesh": mesh, "overrides": []}]
    # In a process of its own: XLA's compilers read their settings from the environment when they
    # load.
    (result,) = compile_candidates(args.config, overrides, topology, candidates, args.processes)
    if "error" in result:
        details = f"\n{result['traceback']}" if args.traceback else ""
        raise PlanError(
            f"{args.config} cannot be compiled for {topology}: {result['error']}{details}"
        )
    for warning in result["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    return result["plan"]


def _search(
    args: argparse.Namespace, overrides: Sequence[str], mesh: MeshSizes | None
) -> list[Plan]:
    # CPU devices have no bandwidth that says anything about a chip's.
    if args.topology is None:
        raise ConfigError(
            "--search must be used with --topology, since it compares the time on chips; got "
            "--devices"
        )
    topology = _parse_chips(args)
    cfg = resolve(load_config(args.config, overrides))
    _check_plannable(cfg)
    only_batch = args.search == "batch"
    space = (plan_search.batch_space if only_batch else plan_search.build_space)(
        cfg, topology, mesh
    )

    def compile_all(candidates: Sequence[plan_search.Candidate]) -> list[Plan]:
        requests = [
            {"mesh": dict(each.mesh), "overrides": space.overrides(each)} for each in candidates
        ]
        results = compile_candidates(
            args.config, overrides, topology, requests, args.processes, training_only=True
        )
        return [
            plan_search.describe_result(each, result)
            for each, result in zip(candidates, results, strict=True)
        ]

    search = plan_search.search_batch if only_batch else plan_search.search
    return search(space, compile_all, report=lambda line: print(line, file=sys.stderr, flush=True))


def _parse_chips(args: argparse.Namespace) -> Topology:
    topology = parse_topology(args.topology, args.slices or 1)
    check_compiler(topology)
    return topology


def parse_mesh(text: str | None) -> MeshSizes | None:
    """Parse mesh axes, with the number of slices in a separate dict.

    >>> parse_mesh("data=32,fsdp=8,slices.data=2")
    {'data': 32, 'fsdp': 8, 'slices': {'data': 2}}
    """
    if text is None:
        return None
    pairs = [pair.split("=") for pair in text.split(",")]
    if not all(len(pair) == 2 and pair[1].lstrip("-").isdigit() for pair in pairs):
        raise ConfigError(
            f"--mesh must be a list of axes with their sizes, such as data=32,fsdp=8, got {text!r}"
        )
    sizes = {axis: int(size) for axis, size in pairs}
    slices = {
        axis.removeprefix("slices."): sizes.pop(axis)
        for axis in list(sizes)
        if axis.startswith("slices.")
    }
    return {**sizes, "slices": slices} if slices else sizes


def set_devices(
    cfg: Mapping[str, Any], devices: int, mesh: MeshSizes | None = None
) -> dict[str, Any]:
    """Return a resolved config for many devices that all belong to one process.

    `mesh` replaces the config's own.

    >>> loader = dict(batch_size=8, dataset=dict(type="MyData"))
    >>> set_devices(
    ...     dict(train_cfg=dict(max_epochs=1), train_dataloader=loader), 4, mesh=dict(data=4)
    ... )["parallel"]
    {'type': 'Pjit', 'mesh': {'data': 4}, 'devices': 4}
    """
    _check_plannable(cfg)
    # the default strategy has no collectives to plan
    parallel = dict(cfg.get("parallel") or {"type": "Pjit"})
    if parallel.get("type") == "SingleDevice":
        raise ConfigError("`parallel.type` must be Pjit, DataParallel or DiLoCo, got SingleDevice")
    if mesh is not None:
        parallel["mesh"] = dict(mesh)
    return {**cfg, "parallel": {**parallel, "devices": devices}}


def scale_batches(
    cfg: Mapping[str, Any], mesh: jax.sharding.Mesh, processes: int
) -> dict[str, Any]:
    """Return the config with the batches that `processes` processes would read for devices that
    here belong to one.
    """
    # Neighbours in this order belong to one process, as on a real cluster.
    devices = sorted(mesh.devices.flat, key=lambda device: (device.process_index, device.id))
    if len(devices) % processes:
        raise ConfigError(f"--processes must divide the {len(devices)} devices, got {processes}")
    process_of = {device: i * processes // len(devices) for i, device in enumerate(devices)}
    axes = (cfg.get("parallel") or {}).get("batch_axes")
    here = find_data_shard(mesh, jax.process_index(), axes)
    shards = find_data_shard(mesh, 0, axes, process_of).count // here.count

    def scale(loader: Any) -> Any:
        if (
            not isinstance(loader, Mapping)
            or loader.get("batch_axis", 0) is None
            or "global_batch_size" in loader
        ):
            return loader  # its batch is that of all processes
        size = loader.get("batch_size", 1)
        if is_step_values(size):
            steps = parse_step_values(size)
            return {
                **loader,
                "batch_size": StepValues(
                    [value * shards for value in steps.values], steps.milestones
                ),
            }
        return {**loader, "batch_size": size * shards}

    # Only batches that processes read together grow; `test_dataloader` has no program here.
    loaders = split_dataloaders("val_dataloader", cfg.get("val_dataloader"))
    scaled = {name: scale(loader) for name, loader in loaders.items()}
    evaluated = scaled[""] if list(scaled) == [""] else scaled
    return {
        **cfg,
        "train_dataloader": scale(cfg.get("train_dataloader")),
        "val_dataloader": evaluated,
    }


def _check_plannable(cfg: Mapping[str, Any]) -> None:
    if cfg.get("train_cfg") is None or not isinstance(cfg.get("train_dataloader"), Mapping):
        raise ConfigError(
            "there is nothing to plan: the config must have train_cfg, and train_dataloader as a "
            "config"
        )
