"""Programs of a config, compiled for the devices of a mesh, and what each costs on a device."""

import concurrent.futures
import math
import re
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import jax

from jengine import paths
from jengine.cli.memory_traffic import compute_loop_factor
from jengine.cli.topologies import Chip
from jengine.data import select_arrays
from jengine.runner import Runner
from jengine.runner.check import check_top_level
from jengine.runner.initial_state import StateInitializer
from jengine.runner.peak_flops import get_peak_flops
from jengine.sharding import Program, find_collectives
from jengine.train.flops import count_flops

PyTree = Any
Plan = dict[str, Any]  # as `jengine plan --json` prints it
_Program = tuple[Any, dict[str, PyTree]]  # traced, and its arguments on the devices by kind

_COMPILED_AT_ONCE = 2  # programs; each takes more than a GiB of the host's memory if it is large
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
# Without a GPU on which to try them, XLA may find no tiles for Triton's matrix products; cuBLAS then computes them.
_NO_TILES = "Couldn't find output tile sizes"
_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
_HOST_CALLBACK = re.compile(
    r'custom_call_target="\w*callback\w*"|= [^=]* (?:outfeed|infeed|send|recv)\((?!.*xla_megascale_runtime)'
)
_FLOAT64 = re.compile(r"\bf64\[")


def compile_plan(cfg: Mapping[str, Any], chip: Chip | None = None, training_only: bool = False) -> Plan:
    """Compile every program of a run and return what each costs on a device, as `jengine plan --json` prints it.

    Nothing is allocated on the devices and no weights are read: programs are compiled for shapes.

    Args:
      cfg: a resolved config, whose `parallel` has a mesh, perhaps with the devices of a topology.
      chip: device figures; None for CPUs, for which no time is estimated.
      training_only: compile only the programs for training iterations, the update and perhaps the accumulation.
    """
    with tempfile.TemporaryDirectory() as work_dir:
        settings = {"work_dir": work_dir, "log_level": "WARNING", "resume": False, "load_from": None}
        arguments, _ = check_top_level({**cfg, **settings}, Runner.__init__)
        runner = Runner(**{name: value for name, value in arguments.items() if name != "vars"})
        try:
            runner.prepare_training(abstract=True)
            runner.call_hook("before_run")
            runner.call_hook("before_train")
            return _compile_programs(runner, chip, training_only)
        finally:
            runner.close()


def _compile_programs(runner: Any, chip: Chip | None, training_only: bool) -> Plan:
    strategy = runner.strategy
    state = _with_shardings(runner.state, strategy.shardings(runner.state))
    batch, traced = _trace_training(runner, state, chunked=not training_only)
    if not training_only:
        initializer = StateInitializer(runner.model, strategy, runner.seed)
        example = select_arrays(runner.train_dataloader.example())
        init, _ = initializer.trace(example, runner.optim_wrapper, runner.hooks)
        traced = {"init": (init, {}), **traced}
        if runner.val_loop is not None:
            traced["evaluation"] = _trace_evaluation(runner, state)
    # The compiler uses one core for a program, and is not Python.
    with concurrent.futures.ThreadPoolExecutor(_COMPILED_AT_ONCE) as pool:
        compiled = {
            name: pool.submit(_compile, program, arguments, strategy.mesh.size, chip)
            for name, (program, arguments) in traced.items()
        }
        programs = {name: future.result() for name, future in compiled.items()}
    if "chunk" in programs:
        programs["chunk"]["steps"] = runner.train_loop.steps_per_call
    optimizer = runner.optim_wrapper  # or several by name, which do not accumulate
    return {
        "devices": strategy.mesh.size,
        "mesh": dict(strategy.mesh.shape),
        "examples_per_step": len(jax.tree.leaves(batch)[0]),
        "accumulative_counts": 1 if isinstance(optimizer, Mapping) else optimizer.accumulative_counts,
        "parameters": [
            {
                "path": path,
                "shape": list(leaf.shape),
                "spec": [list(axis) if isinstance(axis, tuple) else axis for axis in leaf.sharding.spec],
                "shard_shape": list(leaf.sharding.shard_shape(leaf.shape)),
                "bytes": _shard_bytes(leaf),
            }
            for path, leaf in paths.flatten(state.params).items()
        ],
        "programs": programs,
        "fits": None if chip is None else all(program["fits"] for program in programs.values()),
    }


def _trace_training(runner: Any, state: Any, chunked: bool) -> tuple[PyTree, dict[str, _Program]]:
    """Return the batch for a step, and the training programs by name, with a chunk if the run has chunks."""
    steps = runner.train_loop.steps_per_call
    example = select_arrays(runner.train_dataloader.example())
    batch = _global_batch(runner.strategy, example)
    batches = _global_batch(runner.strategy, example, steps) if chunked and steps > 1 else None
    programs = runner.build_programs().trace(state, batch, runner.step_hyperparams(), batches)
    inputs = {"update": batch, "accumulate": batch, "chunk": batches}
    return batch, {name: (program, {"state": state, "batch": inputs[name]}) for name, program in programs.items()}


def _trace_evaluation(runner: Any, state: Any) -> _Program:
    strategy, loop = runner.strategy, runner.val_loop
    batch = _global_batch(strategy, select_arrays(loop.dataloader.example()))
    metrics = jax.eval_shape(loop.evaluator.init)
    metrics = _with_shardings(metrics, jax.tree.map(lambda _: strategy.sharding(), metrics))
    variables = {"params": state.params, "model_state": state.model_state}
    return loop.trace(*variables.values(), metrics, batch), {"variables": variables, "batch": batch}


def _with_shardings(tree: PyTree, shardings: PyTree) -> PyTree:
    """Return shapes, dtypes and shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _global_batch(strategy: Any, example: PyTree, steps: int | None = None) -> PyTree:
    """Return the batch of all processes, or a chunk of such batches, from one process's batch."""
    strategy.check_batch(example)
    leading = () if steps is None else (steps,)
    sharding = strategy.batch_sharding(chunked=steps is not None)

    def scale(x: Any) -> Any:
        shape = (*leading, x.shape[0] * strategy.data_shard.count, *x.shape[1:])
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return jax.tree.map(scale, example)


def _compile(traced: Any, arguments: Mapping[str, PyTree], devices: int, chip: Chip | None) -> Plan:
    """Compile a program and return what it costs on a device; without memory if the compiler cannot fit it."""
    flops = {kind: count / devices for kind, count in count_flops(traced.jaxpr).items()}
    start = time.monotonic()
    try:
        compiled, options = _compile_lowered(traced.lower())
    except jax.errors.JaxRuntimeError as error:
        if _OUT_OF_MEMORY not in str(error):
            raise
        return {"fits": False, "error": str(error).strip().splitlines()[0], "flops": sum(flops.values())}
    seconds = time.monotonic() - start
    plan = measure_program(compiled, arguments)
    plan.update(
        fits=None if chip is None else plan["total_memory"] <= chip.memory,
        flops=sum(flops.values()),
        compiler_options=options,
        compile_seconds=seconds,
    )
    if chip is not None:
        plan.update(estimate_time(flops, plan, chip))
    return plan


def measure_program(compiled: Any, arguments: Mapping[str, PyTree]) -> Plan:
    """Return what a compiled program takes on a device, and what it contains.

    >>> compiled = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((8, 8), "float32")).compile()
    >>> measure_program(compiled, {})["collectives"]
    []

    Args:
      compiled: `jax.jit(f).lower(...).compile()`.
      arguments: `state`, `variables` and `batch`, as far as the program has them, whose memory is listed by kind.
    """
    text = compiled.as_text()
    program = Program(text)
    memory = _measure_memory(compiled, arguments)
    costs = compiled.cost_analysis() or {}
    costs = costs[0] if isinstance(costs, list) else costs
    return {
        "memory": memory,
        "total_memory": sum(memory.values()),
        # The compiler counts the body of a loop once, so it has no estimate for a program whose loops repeat theirs.
        "compiler_flops": None if program.repeats else _positive(costs.get("flops")),
        "compiler_seconds": None if program.repeats else _positive(costs.get("optimal_seconds")),
        "bytes_accessed": _positive(costs.get("bytes accessed"), compute_loop_factor(program)),
        "collectives": _sum_collectives(find_collectives(program)),
        "unknown_loops": program.unknown_loops,
        "donated_bytes": compiled.memory_analysis().alias_size_in_bytes,
        "has_float64": _FLOAT64.search(text) is not None,
        "host_callbacks": len(_HOST_CALLBACK.findall(text)),
    }


def _compile_lowered(lowered: Any) -> tuple[Any, dict[str, bool]]:
    """Return the compiled program, and the options with which it could be compiled."""
    try:
        return lowered.compile(), {}
    except jax.errors.JaxRuntimeError as error:
        if _NO_TILES not in str(error):
            raise
    return lowered.compile(compiler_options=_WITHOUT_TRITON), _WITHOUT_TRITON


def _measure_memory(compiled: Any, arguments: Mapping[str, PyTree]) -> dict[str, int]:
    """Return the bytes that a device holds while the program runs, by kind."""
    memory = compiled.memory_analysis()
    kinds: dict[str, int] = {}
    state = arguments.get("state")
    if state is not None:
        kinds["parameters"] = _shard_bytes(state.params)
        kinds["optimizer state"] = _shard_bytes(state.opt_state)
        kinds["state of model and hooks"] = _shard_bytes((state.model_state, state.hook_state, state.step, state.rng))
    if "variables" in arguments:
        kinds["parameters and state of the model"] = _shard_bytes(arguments["variables"])
    if "batch" in arguments:
        kinds["batch"] = _shard_bytes(arguments["batch"])
    kinds["hyperparameters and padding"] = max(memory.argument_size_in_bytes - sum(kinds.values()), 0)
    # outputs reuse the memory of donated inputs
    kinds["outputs that reuse no input"] = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
    kinds["temporary buffers"] = memory.temp_size_in_bytes
    kinds["program"] = memory.generated_code_size_in_bytes
    return kinds


def _shard_bytes(tree: PyTree) -> int:
    """Return the bytes on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _sum_collectives(collectives: Any) -> list[dict[str, Any]]:
    """Return the collectives in a program by kind; one in a loop counts in each iteration."""
    rows: dict[str, dict[str, Any]] = {}
    for each in collectives:
        row = rows.setdefault(each.kind, {"kind": each.kind, "count": 0, "arrays": 0, "size": 0, "traffic": 0})
        row["count"] += each.executions
        row["arrays"] += each.arrays * each.executions
        row["size"] += each.size * each.executions
        row["traffic"] += each.traffic
    return list(rows.values())


def estimate_time(flops: Mapping[str, float], plan: Plan, chip: Chip) -> Plan:
    """Return the estimated seconds for a program: the compiler's, and a lower bound from the chip's peaks.

    Args:
      flops: FLOPs on a device, by dtype.
      plan: other costs, see `measure_program`.
      chip: chip figures.
    """
    peaks = get_peak_flops(chip.kind)
    known = {kind: count for kind, count in flops.items() if kind in peaks}
    limits = {
        "compute": sum(count / peaks[kind] for kind, count in known.items()),
        "memory": (plan["bytes_accessed"] or sum(plan["memory"].values())) / chip.bandwidth,
        "links": sum(row["traffic"] for row in plan["collectives"]) / chip.links,
    }
    limited_by = max(limits, key=lambda name: limits[name])
    seconds = max(limits[limited_by], plan["compiler_seconds"] or 0.0)
    # If nothing takes longer than the FLOPs at their peak, only the estimate is full, not the chip.
    is_known = len(known) == len(flops) and not plan["unknown_loops"] and limits["compute"] < seconds
    return {
        "bound_seconds": limits[limited_by],
        "bound_by": limited_by,
        "seconds": seconds,
        "utilisation": limits["compute"] / seconds if is_known else None,
    }


def _positive(number: float | None, factor: float = 1.0) -> float | None:
    """Return a cost times a factor; None where the compiler gives none, which may be a negative number."""
    return float(number) * factor if number is not None and number > 0 else None
