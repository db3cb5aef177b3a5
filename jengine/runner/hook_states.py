"""Match hook states to checkpoint entries; a hook without an entry starts from the weights."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from jengine.runner.runner_protocol import Runner
from jengine.train.traced_hooks import TracedHooks

PyTree = Any


class Placement(NamedTuple):
    """Describe how the hook states of a run match those of a checkpoint."""

    states: dict[str, PyTree]  # of this run, where the checkpoint has them too
    missing: list[str]  # hooks of this run without a state in the checkpoint
    left_out: list[str]  # hooks with a state in the checkpoint that this run does not have
    rename: list[tuple[str, str]]  # stored prefix -> prefix in the training state, where they differ
    ignore: list[str]  # stored prefixes that this run does not use


def place_hook_states(own: Mapping[str, PyTree], stored: Iterable[str], exchanged: Mapping[str, str]) -> Placement:
    """Match the hook states of a run to the entries of a checkpoint.

    Args:
      own: the run's traced states by hook.
      stored: the dotted paths of the checkpoint's arrays.
      exchanged: items of the state that were exchanged for parts of a hook's when the checkpoint was saved, as
        `{'params': 'hook_state.EMAHook.params'}`. They are exchanged back; without the hook only the item is fetched.
    """
    paths = [path for path in stored if path.startswith("hook_state.")]
    there = {_hook_of(path) for path in paths}
    rename, ignore = [], []
    for item, source in exchanged.items():
        rename.append((source, item))
        if _hook_of(source) in own:
            rename.append((item, source))
        else:
            ignore.append(item)
    sources = tuple(f"{source}." for source in exchanged.values())
    ignore += [path for path in paths if _hook_of(path) not in own and not path.startswith(sources)]
    missing = [name for name, state in own.items() if name not in there and jax.tree.leaves(state)]
    return Placement(
        states={name: state for name, state in own.items() if name not in missing},
        missing=missing,
        left_out=sorted(there - set(own)),
        rename=rename,
        ignore=ignore,
    )


def start_hook_states(runner: Runner, names: Iterable[str], params: PyTree, model_state: PyTree) -> dict[str, PyTree]:
    """Return initial states for the hooks called `names`, made from the given weights, on the device."""
    wanted = set(names)

    def make(params: PyTree, model_state: PyTree) -> dict[str, PyTree]:
        states = TracedHooks(runner.hooks).init(params, model_state)
        return {name: state for name, state in states.items() if name in wanted}

    return runner.strategy.compile_init(make, params, model_state)(params, model_state) if wanted else {}


def _hook_of(path: str) -> str:
    return path.split(".")[1]
