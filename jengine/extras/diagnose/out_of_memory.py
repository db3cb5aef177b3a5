"""Explain out-of-memory errors: in which program, what that needs, and how to need less."""

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import jax

from jengine.config import paths
from jengine.extras.diagnose.locate import locate_sizes
from jengine.model.selection import describe_array
from jengine.runner.lifecycle import step_failed
from jengine.versions import describe_device

_EXPLANATION = "the device ran out of memory"
_REMEDIES = (
    "  fewer examples at a time: `train_cfg.micro_batch=N`, or a smaller "
    "`train_dataloader.batch_size` with `optim_wrapper.accumulative_counts=N`, for the same "
    "gradients, or a smaller `val_dataloader.batch_size`",
    "  smaller intermediate results: `precision='bfloat16'`, and `nn.remat` in the model "
    "(`model.module.remat=True` of TransformerLM)",
    "  more devices: `parallel=dict(type='Pjit', mesh=dict(fsdp=N))` divides parameters, "
    "optimizer state and examples",
)


def explain_out_of_memory(error: BaseException, context: Mapping[str, Any]) -> None:
    """Name the program that ran out of memory, what it needs, and what needs less.

    Explainer. Its note comes first, and notes that blame a hook which only waited change.
    """
    # The same error passes several layers, each of which may explain it; once is enough.
    notes = getattr(error, "__notes__", ())
    if not is_out_of_memory(error) or any(_EXPLANATION in note for note in notes):
        return
    cfg = context.get("cfg")
    run: Any = context.get("run")
    if "program" in context:
        _add_note(error, *context["program"], cfg=cfg)
    elif "evaluation" in context:
        program = context["evaluation"] and context["evaluation"].program
        # else training ran out of memory, noticed here
        if program and not step_failed(run.state):
            _add_note(error, program.traced.name, program.step, program.traced.shapes)
    elif run is not None:
        noticed = step_failed(run.state)
        last = run.programs.last if noticed or run.programs.failed else None
        if last is None:
            _add_note(error, "a program other than the training step")
        else:
            _add_note(error, *last, noticed=noticed, cfg=cfg)


def _add_note(
    error: BaseException,
    name: str,
    program: Any = None,
    args: tuple[Any, ...] | None = None,
    *,
    noticed: bool = False,
    cfg: Any = None,
) -> None:
    """Add the note for a program.

    Args:
      error: the error that is or was caused by the device's.
      name: the program that failed: 'the training step'.
      program: what `jax.jit` returned, for the memory that it needs.
      args: the arguments, arrays or `jax.ShapeDtypeStruct`s; None if it was not called.
      noticed: whether the program failed on the device, so that a hook named in the error only
        waited for it.
      cfg: the config, for the settings that make the largest array as large as it is.
    """
    notes = getattr(error, "__notes__", ())
    device = jax.local_devices()[0]
    # CPUs have no statistics: there the memory of the machine is the limit.
    limit = (device.memory_stats() or {}).get("bytes_limit") or _host_memory(device)
    size = "" if limit is None else f" of {_format_bytes(limit)}"
    # compiling again would take as long and fail again
    is_of_compiler = "compil" in str(error).lower()
    memory, results = (
        (None, None) if args is None or is_of_compiler else _plan_memory(program, args)
    )
    lines = [f"{_EXPLANATION}: {describe_device(device)}{size}, in {name}"]
    lines += [] if memory is None else [f"  {_describe_plan(memory)}"]
    remedies = ["What needs less memory (docs/scale.md):", *_REMEDIES]
    if memory is not None and limit is not None:
        if memory.argument_size_in_bytes > limit:
            needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            remedies = _describe_excess(*(args or ()), limit=limit, cfg=cfg, needed=needed)
        elif memory.output_size_in_bytes - memory.alias_size_in_bytes > limit:
            # the state, which is created
            remedies = _describe_excess(results, limit=limit, cfg=cfg, needed=_count_bytes(results))
    error.__notes__ = [
        "\n".join([*lines, *remedies]),
        *(_mark_as_waiting(note) if noticed else note for note in notes),
    ]


def _mark_as_waiting(note: str) -> str:
    """Return a note that does not blame the hook which it names."""
    place, _, iteration = note.partition(" at iteration ")
    return f"noticed at iteration {iteration}" if place.startswith("in ") and iteration else note


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or the device's error that caused it, says that memory ran out."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def _describe_excess(state: Any, *others: Any, limit: int, cfg: Any, needed: int) -> list[str]:
    """Return what to change if the state, or the batch among `others`, do not fit into `limit`
    bytes.

    The program needs `needed` bytes, which a mesh divides over its devices; for `cfg` see
    `_add_note`.
    """
    if _count_bytes(others) > _count_bytes(state):
        return [
            "The batch alone is larger than the memory: set a smaller "
            "`train_dataloader.batch_size`."
        ]
    path, largest = max(paths.flatten(state).items(), key=lambda item: item[1].size)
    settings = locate_sizes(cfg, largest.shape)
    smaller = (
        ", ".join(f"`{path}`, now {value}" for path, value in settings.items()) or "`model.module`"
    )
    parts = -(-needed // limit)
    return [
        "The parameters and the state of the optimizer alone are larger than the memory, so "
        f"smaller batches do not help. The largest array is {path}, {describe_array(largest)}. "
        "What helps (docs/scale.md):",
        f"  a model with 1/{parts} of the memory: set a smaller {smaller}",
        f"{_REMEDIES[-1]}; N must be at least {parts} here",
    ]


def _count_bytes(tree: Any) -> int:
    return sum(leaf.size * getattr(leaf.dtype, "itemsize", 0) for leaf in jax.tree.leaves(tree))


def _host_memory(device: jax.Device) -> int | None:
    """Return the machine's memory for its CPU; None for another device, or if it is unknown."""
    with contextlib.suppress(ValueError, OSError, AttributeError):  # not a POSIX system
        return (
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            if device.platform == "cpu"
            else None
        )
    return None


def _plan_memory(program: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return a program's memory on each device, as compiled, and the result shapes.

    None if unknown.
    """
    with contextlib.suppress(Exception):  # the first error matters more
        lowered = program.lower(*args)
        return lowered.compile().memory_analysis(), lowered.out_info
    return None, None


def _describe_plan(memory: Any) -> str:
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        # a donated argument is an output too
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    }
    return (
        "on each device it needs "
        f"{', '.join(f'{part} {_format_bytes(size)}' for part, size in parts.items())}"
    )


def _format_bytes(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.2f} MiB"
