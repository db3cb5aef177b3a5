"""Match between the traced states of a run's hooks and those in a checkpoint."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

PyTree = Any


class HookStateMatch(NamedTuple):
    """Match between the hook states of a run and those in a checkpoint."""

    states: dict[str, PyTree]  # of this run, restricted to hooks with a state in the checkpoint
    missing: list[str]  # hooks of this run without a state in the checkpoint
    unused: list[str]  # hooks with a state in the checkpoint that this run does not have
    # stored prefix -> prefix in the training state, where they differ
    rename: list[tuple[str, str]]
    ignore: list[str]  # stored prefixes that this run does not use


def match_hook_states(
    states: Mapping[str, PyTree], stored: Iterable[str], exchanged: Mapping[str, str]
) -> HookStateMatch:
    """Match the run's traced states by hook to the dotted paths that a checkpoint has stored.

    In `exchanged` are items that were swapped with parts of a hook's state for the checkpoint, such
    as `{'params': 'hook_state.EMAHook.params'}`. They are swapped back; without the hook only the
    item is restored.
    """

    def hook_name(path: str) -> str:
        return path.split(".")[1]

    paths = [path for path in stored if path.startswith("hook_state.")]
    stored_hooks = {hook_name(path) for path in paths}
    rename = []
    ignore = []
    # Both directions: where weights and their average change places, the hook's state takes the
    # weights.
    for item, source in exchanged.items():
        rename.append((source, item))
        if hook_name(source) in states:
            rename.append((item, source))
        else:
            ignore.append(item)
    sources = tuple(f"{source}." for source in exchanged.values())
    ignore += [
        path for path in paths if hook_name(path) not in states and not path.startswith(sources)
    ]
    # A hook without arrays has nothing to restore, so that it may be new.
    missing = [
        name
        for name, state in states.items()
        if name not in stored_hooks and jax.tree.leaves(state)
    ]
    found = {name: state for name, state in states.items() if name not in missing}
    return HookStateMatch(found, missing, sorted(stored_hooks - set(states)), rename, ignore)
