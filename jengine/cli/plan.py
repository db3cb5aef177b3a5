"""`jengine plan`: compiles a config's step for many devices on this machine and says what each of them will hold."""

import argparse
import math
from collections.abc import Mapping
from typing import Any

from jengine.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="how many devices to plan for")
    parser.add_argument("--mesh", metavar="AXIS=N,...", help="devices along data, fsdp and tensor")
    parser.add_argument(
        "--processes", type=int, default=1, metavar="P", help="processes, each of which reads batch_size rows"
    )


def run(args: argparse.Namespace, cfg: Mapping[str, Any]) -> None:
    """Prints the plan of `cfg` on `args.devices` fake devices.

    Raises:
      ConfigError: options that make no sense, or a config that does not train. RuntimeError: JAX has been used.
    """
    if args.devices < 1 or args.processes < 1:
        raise ConfigError(f"--devices and --processes are at least 1, found {args.devices} and {args.processes}")
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    print(plan(on_devices(cfg, args.devices, read_mesh(args.mesh), args.processes)))


def read_mesh(text: str | None) -> dict[str, int] | None:
    """`data=32,fsdp=8` as a dict.

    Raises:
      ConfigError: not of that form.
    """
    if text is None:
        return None
    pairs = [pair.split("=") for pair in text.split(",")]
    if not all(len(pair) == 2 and pair[1].lstrip("-").isdigit() for pair in pairs):
        raise ConfigError(f"--mesh is a list of axes with their sizes, data=32,fsdp=8; found {text!r}")
    return {axis: int(size) for axis, size in pairs}


def on_devices(
    cfg: Mapping[str, Any], devices: int, mesh: Mapping[str, int] | None = None, processes: int = 1
) -> dict[str, Any]:
    """The config as it runs on many devices, seen from one process that has them all.

    Args:
      cfg: a resolved config.
      devices: how many.
      mesh: devices along the axes; the config's own by default.
      processes: how many processes read a batch each.

    Raises:
      ConfigError: the config trains nothing, its loader is no config, or it asks for one device.
    """
    loader = cfg.get("train_dataloader")
    if cfg.get("train_cfg") is None or loader is None or not hasattr(loader, "items"):
        raise ConfigError("there is nothing to plan: the config needs train_cfg and train_dataloader, as a config")
    parallel = dict((cfg.get("parallel") or {"type": "Pjit"}).items())
    if parallel.get("type") == "SingleDevice":
        raise ConfigError("the config asks for a SingleDevice: plan is for Pjit or DataParallel")
    if mesh is not None:
        parallel["mesh"] = dict(mesh)
    if "impl" in parallel:  # a pmap exchanges the same, but shows nothing before it runs
        parallel["impl"] = "shard_map"
    train = dict(loader.items())
    train["batch_size"] = train.get("batch_size", 1) * processes
    return {**cfg, "parallel": {**parallel, "devices": devices}, "train_dataloader": train}


def plan(cfg: Mapping[str, Any]) -> str:
    """What a step of `cfg` needs, as text: placement, memory, FLOPs and exchanges, of each device.

    Nothing is allocated on the devices: the step is compiled for the form of the state and of the batch.
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

    strategy = runner.strategy
    batch = strategy.put_batch(next(iter(runner.train_dataloader)))
    rows = len(jax.tree.leaves(batch)[0])
    state = _placed(runner.state, strategy.shardings(runner.state))
    inputs = (state, batch, {**runner.optim_wrapper.hyperparams, **runner.hyperparams})
    compiled_steps = runner.build_programs()
    programs = {"update": compiled_steps.update}
    if runner.optim_wrapper.accumulates:
        programs["accumulate"] = compiled_steps.accumulate
    parts = [f"{strategy.mesh.size} devices, mesh {dict(strategy.mesh.shape)}, {rows} rows a step", _placement(state)]
    for name, pure in programs.items():
        compiled = strategy.compile_train_step(pure).lower(*inputs).compile()
        parts += [_costs(name, compiled, strategy.mesh.size), _exchanges(name, compiled)]
    return "\n\n".join(parts)


def _placed(state: Any, shardings: Any) -> Any:
    """The form of the state, with where it lies."""
    import jax

    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def _placement(state: Any) -> str:
    """The table of parameters that are divided, and one row for all of which every device has a copy."""
    from jengine import paths
    from jengine.logging import format_table

    rows, copies, copied = [], 0, 0
    for path, leaf in paths.flatten(state.params).items():
        whole = tuple(leaf.shape)
        share = leaf.sharding.shard_shape(whole)
        size = math.prod(share) * leaf.dtype.itemsize
        if share == whole:
            copies, copied = copies + 1, copied + size
        else:
            rows.append([path, str(whole), str(tuple(leaf.sharding.spec)), str(share), _bytes(size)])
    rows.append([f"{copies} with a copy on every device", "", "", "", _bytes(copied)])
    columns = ["parameter", "shape", "divided as", "on a device", "bytes on a device"]
    return format_table(columns, rows, title="Placement of the parameters")


def _costs(name: str, compiled: Any, devices: int) -> str:
    """Memory and work of one device."""
    from jengine.logging import format_table

    memory = compiled.memory_analysis()
    kept = memory.alias_size_in_bytes  # what is donated makes room for what comes out
    sizes = {
        "state, batch and numbers": memory.argument_size_in_bytes,
        "results beside the new state": memory.output_size_in_bytes - kept,
        "while it computes": memory.temp_size_in_bytes,
    }
    rows = [[what, _bytes(size)] for what, size in {**sizes, "all": sum(sizes.values())}.items()]
    costs = compiled.cost_analysis()
    flops = (costs[0] if isinstance(costs, list) else costs).get("flops", 0.0)
    table = format_table(["memory of a device", "bytes"], rows, title=f"Program: {name}")
    return f"{table}\n{flops:.4g} FLOPs on a device, {flops * devices:.4g} in all"


def _exchanges(name: str, compiled: Any) -> str:
    """How much of what kind devices exchange."""
    from jengine.logging import format_table
    from jengine.sharding import collectives

    found = collectives(compiled.as_text())
    if not found:
        return f"No exchange between devices ({name})."
    rows = []
    for kind in dict.fromkeys(one.kind for one in found):
        these = [one for one in found if one.kind == kind]
        sizes = sum(one.size for one in these), sum(one.traffic for one in these)
        rows.append([kind, str(len(these)), str(sum(one.arrays for one in these)), *map(_bytes, sizes)])
    columns = ["exchange", "how many", "arrays", "bytes of arrays", "bytes a device sends"]
    return format_table(columns, rows, title=f"Exchanges ({name}; those in a loop count once)")


def _bytes(number: float) -> str:
    """A number of bytes in a unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:,.0f} B" if unit == "B" else f"{number:,.2f} {unit}"
