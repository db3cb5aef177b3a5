"""Settings of a run, described in each checkpoint, and compared with it by a resumed run."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jengine.config.construction import has_unwritable, to_config
from jengine.config.containers import is_level
from jengine.config.description import describe, flatten_description
from jengine.config.dump import simplify
from jengine.config.errors import CheckpointMismatchError
from jengine.config.json_codec import Json

_FLAGS = (
    "jax_enable_x64",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
)
# Different between any two runs, or compared elsewhere
_NOT_COMPARED = (
    "randomness",
    "resume",
    "load_from",
    "work_dir",
    "experiment_name",
    "log_level",
    "cfg",
)
_CODE = ".code"  # changed code is found by the hash of the programs
_KINDS = (".type", ".function")
_MAX_LINES = 3  # of settings in an error


def describe_settings(arguments: Mapping[str, Any], cfg: Any) -> dict[str, Json]:
    """Return a description of the Runner's arguments and the config passed with them, before
    anything has run.
    """
    settings = {
        name: value
        for name, value in arguments.items()
        if name not in _NOT_COMPARED and value is not None
    }
    for name, value in (cfg or {}).items():
        # A Runner from a config gets its sections as arguments too; only what differs from them, or
        # is more, is described a second time.
        if name not in _NOT_COMPARED and value is not arguments.get(name):
            settings[f"cfg.{name}" if name in arguments else name] = value
    described = {}
    for name, value in settings.items():
        config = to_config(value)  # as in the file that the run leaves, unless it has data
        described[name] = describe(_as_written(value if has_unwritable(config) else config))
    return {**described, "jax.config": describe(read_flags())}


def _as_written(value: Any) -> Any:
    """Return a value as `dump_config` writes it, with what import paths name: a run from that
    file is the same.
    """
    value = simplify(value)
    if is_level(value):
        return {key: _as_written(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_as_written, value))
    if isinstance(value, str):
        module, _, name = value.rpartition(".")
        # In `sys.modules` alone: a string that merely looks like a path must not import anything.
        found = (
            getattr(sys.modules.get(module), name, None) if module and name.isidentifier() else None
        )
        return found if callable(found) else value
    return value


def read_flags() -> dict[str, Any]:
    """Return the jax options that change numbers."""
    return {name: getattr(jax.config, name) for name in _FLAGS}


@contextlib.contextmanager
def name_model_settings(
    settings: dict[str, Json], saved: Mapping[str, Any] | None
) -> Iterator[None]:
    """Name the settings of the model that differ from a fingerprint in a CheckpointMismatchError
    inside.
    """
    try:
        yield
    except CheckpointMismatchError as error:
        # Shapes that do not fit come from settings of the model; the others would hide them.
        differences = [] if saved is None else compare_settings(settings, saved)
        lines = {path: line for path, line in differences if path.startswith("model.")}
        if saved is None or not lines:
            raise
        cause = _describe_cause(lines, settings, saved)
        named = CheckpointMismatchError(error.path, error.report, "", error.new_run, cause)
        named.add_note(f"in the config at `{next(iter(lines))}`")
        raise named from None


def _describe_cause(
    lines: Mapping[str, str], settings: dict[str, Json], saved: Mapping[str, Any]
) -> str:
    """Return the settings that differ, by path, and what to write to resume."""
    own = flatten_description(settings)
    stored = flatten_description(saved["settings"])
    shown = list(lines)[:_MAX_LINES]
    changes = [f"set {path}={stored[path]!r}" for path in shown if path in stored]
    changes += [f"remove {path}" for path in shown if path in own and path not in stored]
    more = f", and {len(lines) - _MAX_LINES} more" if len(lines) > _MAX_LINES else ""
    advice = f"; to resume, {', '.join(changes)}{more}" if changes else ""
    return f"the model has other settings, {'; '.join(lines[path] for path in shown)}{more}{advice}"


def compare_settings(
    settings: dict[str, Json], saved: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the path and both values of each of the described `settings` that differs from the
    fingerprint `saved`.
    """
    own, other = (flatten_description(side) for side in (settings, saved["settings"]))
    replaced: list[str] = []  # objects of another kind, so that their arguments differ anyway
    for path in sorted(
        own.keys() | other.keys(), key=lambda path: (not path.endswith(_KINDS), path)
    ):
        if (
            own.get(path) == other.get(path)
            or path.endswith(_CODE)
            or path.startswith(tuple(replaced))
        ):
            continue
        if path.endswith(_KINDS):
            replaced.append(f"{path.rpartition('.')[0]}.")
        new, old = (repr(side[path]) if path in side else "not set" for side in (own, other))
        yield path, f"{path}: {new} in the config, {old} in the checkpoint"
