"""Programs for a config, compiled for the devices in a mesh, and what each costs on a device."""

import concurrent.futures
import math
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config import paths
from jengine.data.host_entries import select_arrays
from jengine.data.masking import whole_batches
from jengine.extras.plan.collectives import Collective, find_collectives
from jengine.extras.plan.flops import count_flops
from jengine.extras.plan.hlo import Program
from jengine.extras.plan.memory_traffic import compute_loop_factor
from jengine.extras.plan.peak_flops import get_peak_flops
from jengine.extras.plan.topologies import Chip
from jengine.parallel.mesh_strategy import MeshStrategy
from jengine.parallel.placement import Rules
from jengine.runner.config_checks import read_top_level
from jengine.runner.runner import Runner
from jengine.train.initial_state import StateInitializer
from jengine.train.state import TrainState

PyTree = Any
Plan = dict[str, Any]  # as `jengine plan --json` prints it
# traced, and its arguments on the devices by kind
_Program = tuple[jax.stages.Traced, dict[str, PyTree]]

_COMPILED_AT_ONCE = 2  # programs; each takes more than a GiB of the host's memory if it is large
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
# On a GPU, XLA times Triton's kernels for matrix products against cuBLAS's, and mostly chooses the
# latter, which write their results to memory. Without a GPU it would take Triton's, and plan too
# little memory.
_COMPILER_OPTIONS: dict[str, dict[str, str | int | bool]] = {
    "gpu": {"xla_gpu_enable_triton_gemm": False}
}
_HOST_CALLBACK = re.compile(
    r'custom_call_target="\w*callback\w*"|= [^=]* '
    r"(?:outfeed|infeed|send|recv)\((?!.*xla_megascale_runtime)"
)
_FLOAT64 = re.compile(r"\bf64\[")


def compile_plan(
    cfg: Mapping[str, Any], chip: Chip | None = None, training_only: bool = False
) -> Plan:
    """Compile every program in a run and return what each costs on a device, as `jengine plan
    --json` prints it.

    Nothing is allocated on the devices and no weights are read: programs are compiled for shapes.

    Args:
      cfg: a resolved config, whose `parallel` has a mesh, perhaps with the devices of a topology.
      chip: device figures; None for CPUs, for which no time is estimated.
      training_only: compile only the programs for training iterations, the update and perhaps the
        accumulation.
    """
    with tempfile.TemporaryDirectory() as work_dir:
        settings = {
            "work_dir": work_dir,
            "log_level": "WARNING",
            "resume": False,
            "load_from": None,
        }
        arguments, _ = read_top_level({**cfg, **settings}, Runner.__init__)
        runner = Runner(**{name: value for name, value in arguments.items() if name != "vars"})
        try:
            runner.prepare_training(abstract=True)
            runner.hook_list.remove("timer")  # it watches a training, until its end
            runner.call_hook("before_run")
            runner.call_hook("before_train")
            return _compile_programs(runner, chip, training_only)
        finally:
            runner.close()


def _compile_programs(runner: Runner, chip: Chip | None, training_only: bool) -> Plan:
    strategy = runner.strategy
    state = _with_shardings(runner.state, strategy.shardings(runner.state))
    batch, traced = _trace(runner, state, training_only)
    # what a strategy such as `DiLoCo` runs between steps, and after how many of them
    rare = strategy.rare_programs(state) if hasattr(strategy, "rare_programs") else {}
    traced |= {name: (program, {"state": state}) for name, (program, _) in rare.items()}
    # The compiler uses one core for a program, and is not Python.
    with concurrent.futures.ThreadPoolExecutor(_COMPILED_AT_ONCE) as pool:
        compiled = {
            name: pool.submit(_compile, program, arguments, strategy.mesh.size, chip)
            for name, (program, arguments) in traced.items()
        }
        programs = {name: future.result() for name, future in compiled.items()}
    if "chunk" in programs:
        programs["chunk"]["steps"] = runner.train_loop.steps_per_call
    for name, (_, every) in rare.items():
        programs[name]["every"] = every
    optimizer = runner.optim_wrapper  # or several by name, which do not accumulate
    return {
        "devices": strategy.mesh.size,
        "mesh": dict(strategy.mesh.shape),
        "examples_per_step": (*jax.tree.leaves(batch)[0].shape, 1)[0],  # a scalar counts as one
        "accumulative_counts": 1
        if isinstance(optimizer, Mapping)
        else max(optimizer.counts.values),
        "parameters": [
            {
                "path": path,
                "shape": list(leaf.shape),
                "spec": [
                    list(axis) if isinstance(axis, tuple) else axis for axis in leaf.sharding.spec
                ],
                "shard_shape": list(leaf.sharding.shard_shape(leaf.shape)),
                "bytes": _shard_bytes(leaf),
            }
            for path, leaf in paths.flatten(state.params).items()
        ],
        "programs": programs,
        "fits": None if chip is None else all(program["fits"] for program in programs.values()),
    }


def _trace(
    runner: Runner, state: TrainState, training_only: bool
) -> tuple[PyTree, dict[str, _Program]]:
    """Return the batch for a step, and the programs by name, with a chunk if the run has chunks."""
    strategy = runner.strategy
    steps = runner.train_loop.steps_per_call
    loop = runner.val_loop
    loader = runner.train_dataloader
    count = runner.train_loop.batches_per_iteration
    # Shapes of a real batch; placed by the strategy as in training, since shardings decide the
    # collectives.
    example = select_arrays(loader.example())
    rules = loader.batch_rules
    taken = example if count == 1 else (example,) * count
    batch = _global_batch(strategy, taken, rules)
    batches = (
        _global_batch(strategy, taken, rules, steps) if steps > 1 and not training_only else None
    )
    built = runner.build_programs()

    def trace_steps(batch: PyTree, batches: PyTree) -> dict[str, _Program]:
        programs = built.trace(state, batch, runner.step_hyperparams(), batches)
        inputs = {"update": batch, "accumulate": batch, "chunk": batches}
        return {
            name: (program, {"state": state, "batch": inputs[name]})
            for name, program in programs.items()
        }

    traced = trace_steps(batch, batches)
    if training_only:
        return batch, traced
    known = [jax.tree.map(np.shape, batch)]
    change = loader.next_change(0)
    # a batch size or a length of examples that changes has programs of its own
    while math.isfinite(change):
        loader.set_step(int(change))
        other = select_arrays(loader.example())
        later = _global_batch(strategy, other if count == 1 else (other,) * count, rules)
        if (shapes := jax.tree.map(np.shape, later)) not in known:
            known.append(shapes)
            built.expect_shapes()
            names = trace_steps(later, None)
            traced |= {
                f"{name} from iteration {change}": program for name, program in names.items()
            }
        change = loader.next_change(int(change))
    loader.set_step(0)
    with whole_batches(rules is not None):
        initializer = StateInitializer(runner.model, strategy, runner.seed)
        init = initializer.trace(example, runner.optim_wrapper, runner.hooks)[0]
    traced = {"init": (init, {}), **traced}
    if loop is not None:
        variables = {"params": state.params, "model_state": state.model_state}
        for name, evaluation in loop.evaluations.items():
            val_loader = evaluation.dataloader
            val_batch = _global_batch(
                strategy, select_arrays(val_loader.example()), val_loader.batch_rules
            )
            metrics = jax.eval_shape(evaluation.evaluator.init)
            metrics = _with_shardings(metrics, jax.tree.map(lambda _: strategy.sharding(), metrics))
            program = evaluation.trace(state.params, state.model_state, metrics, val_batch)
            traced[f"evaluation {name}".rstrip()] = (
                program,
                {"variables": variables, "batch": val_batch},
            )
    return batch, traced


def _with_shardings(tree: PyTree, shardings: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def _global_batch(
    strategy: MeshStrategy, example: PyTree, rules: Rules | None, steps: int | None = None
) -> PyTree:
    """Return the batch of all processes, or a chunk of such batches, from one process's batch."""
    leading = () if steps is None else (steps,)
    if rules is not None:  # each process has the whole batch
        shapes = jax.eval_shape(
            lambda: jax.tree.map(lambda x: jnp.broadcast_to(x, (*leading, *np.shape(x))), example)
        )
        return _with_shardings(
            shapes, strategy.whole_batch_shardings(shapes, rules, chunked=steps is not None)
        )
    sharding = strategy.batch_sharding(chunked=steps is not None)

    def scale(x: np.ndarray | jax.Array) -> jax.ShapeDtypeStruct:
        # Each process reads its share of the rows; the program sees them all.
        shape = (*leading, x.shape[0] * strategy.data_shard.count, *x.shape[1:])
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        sharding.shard_shape(shape)  # JAX's error if it cannot be divided
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return jax.tree.map(scale, example)


def _compile(
    traced: jax.stages.Traced, arguments: Mapping[str, PyTree], devices: int, chip: Chip | None
) -> Plan:
    """Compile a program and return what it costs on a device.

    Without memory if the compiler cannot fit it.
    """
    flops = {kind: count / devices for kind, count in count_flops(traced.jaxpr).items()}
    start = time.monotonic()  # the program is traced already
    options = _COMPILER_OPTIONS.get(chip.platform, {}) if chip else {}
    try:
        compiled = traced.lower().compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        if _OUT_OF_MEMORY not in str(error):
            raise
        return {
            "fits": False,
            "error": str(error).strip().splitlines()[0],
            "flops": sum(flops.values()),
        }
    seconds = time.monotonic() - start
    plan = measure_program(compiled, arguments)
    # Compiled but too large happens too: some compilers do not stop at the limit.
    fits = None if chip is None else plan["total_memory"] <= chip.memory
    plan.update(fits=fits, flops=sum(flops.values()), compile_seconds=seconds)
    return plan if chip is None else {**plan, **estimate_time(flops, plan, chip)}


def measure_program(compiled: jax.stages.Compiled, arguments: Mapping[str, PyTree]) -> Plan:
    """Return what a compiled program takes on a device, and what it contains.

    >>> compiled = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((8, 8), "float32")).compile()
    >>> measure_program(compiled, {})["collectives"]
    []

    `arguments` are `state`, `variables` and `batch`, as far as the program has them, whose memory
    is listed by kind.
    """
    text = compiled.as_text() or ""
    program = Program(text)
    memory_stats: Any = compiled.memory_analysis()  # which the platforms of `jengine plan` all have
    memory = _measure_memory(memory_stats, arguments)
    costs = compiled.cost_analysis() or {}
    # A list or a dict, depending on the version of JAX and the backend.
    costs = costs[0] if isinstance(costs, list) else costs
    return {
        "memory": memory,
        "total_memory": sum(memory.values()),
        # Arguments that the state keeps there, and what a policy of rematerialization offloads.
        "host_memory": memory_stats.host_argument_size_in_bytes
        + memory_stats.host_temp_size_in_bytes,
        # The compiler counts the body of a loop once, so it has no estimate for a program whose
        # loops repeat theirs.
        "compiler_flops": None if program.repeats else _positive(costs.get("flops")),
        "compiler_seconds": None if program.repeats else _positive(costs.get("optimal_seconds")),
        "bytes_accessed": _positive(costs.get("bytes accessed"), compute_loop_factor(program)),
        "cycles": program.estimate_cycles(),
        "kernels": program.count_kernels(),
        "collectives": _sum_collectives(find_collectives(program)),
        "unknown_loops": program.unknown_loops,
        "donated_bytes": memory_stats.alias_size_in_bytes,
        "has_float64": _FLOAT64.search(text) is not None,
        "host_callbacks": len(_HOST_CALLBACK.findall(text)),
    }


def _measure_memory(memory: Any, arguments: Mapping[str, PyTree]) -> dict[str, int]:
    """Return the bytes that a device holds while the program runs, by kind, from XLA's
    `CompiledMemoryStats`.
    """
    parts: dict[str, PyTree] = {}
    if (state := arguments.get("state")) is not None:
        parts["parameters"] = state.params
        parts["optimizer state"] = state.opt_state
        parts["state of model and hooks"] = (
            state.model_state,
            state.hook_state,
            state.step,
            state.rng,
        )
    names = {"variables": "parameters and state of the model", "batch": "batch"}
    parts |= {name: arguments[key] for key, name in names.items() if key in arguments}
    # CPUs count the memory of the host, which is theirs, as that of the device.
    has_host = memory.host_argument_size_in_bytes > 0
    kinds = {name: _shard_bytes(part, on_device_only=has_host) for name, part in parts.items()}
    # XLA reports only the sum of the arguments.
    kinds["hyperparameters and padding"] = max(
        memory.argument_size_in_bytes - sum(kinds.values()), 0
    )
    # outputs reuse the memory of donated inputs
    kinds["outputs that reuse no input"] = max(
        memory.output_size_in_bytes - memory.alias_size_in_bytes, 0
    )
    kinds["temporary buffers"] = memory.temp_size_in_bytes
    kinds["program"] = memory.generated_code_size_in_bytes
    return kinds


def _shard_bytes(tree: PyTree, on_device_only: bool = False) -> int:
    """Return the bytes of one device, with those that are in the memory of its host unless
    `on_device_only`.
    """
    leaves = [
        leaf
        for leaf in jax.tree.leaves(tree)
        if not on_device_only or leaf.sharding.memory_kind in (None, "device")
    ]
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )


def _sum_collectives(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    """Return the collectives in a program by kind; one in a loop counts in each iteration."""
    rows: dict[str, dict[str, Any]] = {}
    for each in collectives:
        row = rows.setdefault(
            each.kind,
            {"kind": each.kind, "count": 0, "arrays": 0, "size": 0, "largest": 0, "traffic": 0},
        )
        row["count"] += each.executions
        row["arrays"] += each.arrays * each.executions
        row["size"] += each.size * each.executions
        row["largest"] = max(row["largest"], each.size)
        row["traffic"] += each.traffic
    return list(rows.values())


def estimate_time(flops: Mapping[str, float], plan: Plan, chip: Chip) -> Plan:
    """Return the estimated seconds for a program, with FLOPs by dtype and the costs from
    `measure_program`.

    They are the compiler's, and a lower bound from the chip's peaks.
    """
    peaks = get_peak_flops(chip.kind)
    # Without a peak for the dtype, FLOPs cannot be turned into seconds.
    known = {kind: count for kind, count in flops.items() if kind in peaks}
    limits = {
        "compute": sum(count / peaks[kind] for kind, count in known.items()),
        "memory": (plan["bytes_accessed"] or sum(plan["memory"].values())) / chip.bandwidth,
        "links": sum(row["traffic"] for row in plan["collectives"]) / chip.links,
    }
    limited_by = max(limits, key=lambda name: limits[name])
    # Compute, memory and links work at the same time, so that the slowest decides.
    seconds = max(limits[limited_by], plan["compiler_seconds"] or 0.0)
    # If nothing takes longer than the FLOPs at their peak, only the estimate is full, not the chip.
    is_known = (
        len(known) == len(flops) and not plan["unknown_loops"] and limits["compute"] < seconds
    )
    return {
        "bound_seconds": limits[limited_by],
        "bound_by": limited_by,
        "seconds": seconds,
        "utilisation": limits["compute"] / seconds if is_known else None,
    }


def _positive(number: float | None, factor: float = 1.0) -> float | None:
    """Return a cost times a factor.

    None where the compiler gives none, which may be a negative number.
    """
    return float(number) * factor if number is not None and number > 0 else None
