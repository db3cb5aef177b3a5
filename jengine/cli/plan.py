"""Run `jengine plan`: compile a config's step for many devices on this machine and print their memory and traffic."""

import argparse
import math
from collections.abc import Mapping
from typing import Any

from jengine.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="number of devices to plan for")
    parser.add_argument("--mesh", metavar="AXIS=N,...", help="number of devices along data, fsdp and tensor")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="P",
        help="number of processes, each of which reads batch_size examples",
    )


def run(args: argparse.Namespace, cfg: Mapping[str, Any]) -> None:
    """Print the plan of `cfg` on `args.devices` simulated devices.

    Raises:
      ConfigError: invalid options, or a config without training. RuntimeError: JAX is already initialized.
    """
    if args.devices < 1 or args.processes < 1:
        raise ConfigError(f"--devices and --processes must be at least 1, got {args.devices} and {args.processes}")
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    print(plan(set_devices(cfg, args.devices, parse_mesh(args.mesh), args.processes)))


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


def plan(cfg: Mapping[str, Any]) -> str:
    """Return the costs of a step of `cfg` on each device as text: sharding, memory, FLOPs and collectives.

    Nothing is allocated on the devices: the step is compiled for the shapes of the state and of the batch.
    """
    import tempfile

    from jengine.runner import Runner

    with tempfile.TemporaryDirectory() as work_dir:
        runner = Runner.from_cfg({**cfg, "work_dir": work_dir, "log_level": "WARNING"})
        runner.prepare_training(abstract=True)
        runner.call_hook("before_run")
        runner.call_hook("before_train")
        text = _report(runner)
        runner.visualizer.close()
    return text


def _report(runner: Any) -> str:
    import jax

    from jengine.data import select_arrays

    strategy = runner.strategy
    batch = strategy.put_batch(select_arrays(runner.train_dataloader.example()))
    examples = len(jax.tree.leaves(batch)[0])
    state = _to_structs(runner.state, strategy.shardings(runner.state))
    inputs = (state, batch, {**runner.optim_wrapper.hyperparams, **runner.hyperparams})
    compiled_steps = runner.build_programs()
    programs = {"update": compiled_steps.update}
    if runner.optim_wrapper.accumulates:
        programs["accumulate"] = compiled_steps.accumulate
    devices = strategy.mesh.size
    parts = [
        f"{devices} devices, mesh {dict(strategy.mesh.shape)}, {examples} examples per step",
        _format_params(state),
    ]
    for name, pure in programs.items():
        compiled = strategy.compile_train_step(pure).lower(*inputs).compile()
        parts += [_format_costs(name, compiled, devices), _format_collectives(name, compiled)]
    return "\n\n".join(parts)


def _to_structs(state: Any, shardings: Any) -> Any:
    """Return the shapes, dtypes and shardings of the state."""
    import jax

    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def _format_params(state: Any) -> str:
    """Return the table of sharded parameters, with one row for all replicated ones."""
    from jengine import paths
    from jengine.logging import format_table

    rows, replicated, replicated_size = [], 0, 0
    for path, leaf in paths.flatten(state.params).items():
        shape = tuple(leaf.shape)
        shard = leaf.sharding.shard_shape(shape)
        size = math.prod(shard) * leaf.dtype.itemsize
        if shard == shape:
            replicated, replicated_size = replicated + 1, replicated_size + size
        else:
            rows.append([path, str(shape), str(tuple(leaf.sharding.spec)), str(shard), _format_bytes(size)])
    rows.append([f"{replicated} replicated", "", "", "", _format_bytes(replicated_size)])
    columns = ["parameter", "shape", "spec", "shard shape", "bytes per device"]
    return format_table(columns, rows, title="Sharding of the parameters")


def _format_costs(name: str, compiled: Any, devices: int) -> str:
    """Return the table of memory per device, and FLOPs."""
    from jengine.logging import format_table

    memory = compiled.memory_analysis()
    donated = memory.alias_size_in_bytes  # outputs reuse the memory of donated inputs
    sizes = {
        "state, batch and hyperparameters": memory.argument_size_in_bytes,
        "outputs other than the state": memory.output_size_in_bytes - donated,
        "temporary buffers": memory.temp_size_in_bytes,
    }
    rows = [[label, _format_bytes(size)] for label, size in {**sizes, "total": sum(sizes.values())}.items()]
    costs = compiled.cost_analysis()
    flops = (costs[0] if isinstance(costs, list) else costs).get("flops", 0.0)
    table = format_table(["memory per device", "bytes"], rows, title=f"Program: {name}")
    return f"{table}\n{flops:.4g} FLOPs per device, {flops * devices:.4g} in total"


def _format_collectives(name: str, compiled: Any) -> str:
    """Return the table of collectives by kind."""
    from jengine.logging import format_table
    from jengine.sharding import find_collectives

    all_collectives = find_collectives(compiled.as_text())
    if not all_collectives:
        return f"No collectives ({name})."
    rows = []
    for kind in dict.fromkeys(collective.kind for collective in all_collectives):
        group = [collective for collective in all_collectives if collective.kind == kind]
        arrays = sum(collective.arrays for collective in group)
        sizes = sum(collective.size for collective in group), sum(collective.traffic for collective in group)
        rows.append([kind, str(len(group)), str(arrays), *map(_format_bytes, sizes)])
    columns = ["collective", "count", "arrays", "bytes of arrays", "bytes sent per device"]
    return format_table(columns, rows, title=f"Collectives ({name}; one in a loop counts once)")


def _format_bytes(number: float) -> str:
    """Return a number of bytes with a suitable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:,.0f} B" if unit == "B" else f"{number:,.2f} {unit}"
