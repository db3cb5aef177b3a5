"""Mutate the configs and the documented API, and count where each mutant is refused.

    python -m benchmarks.mutants [1000] [--seed N] [--only N]

A mutant has one mistake: a misspelled key or type, a value of another type or out of range, a
  section in the wrong
place, two values swapped, a key added or removed, or the name of an entry that the data lack. Each
one trains for two iterations, in this process, with a validation and a checkpoint, in an empty
directory. The outcomes:

    constructor    refused by Runner(...) or Runner.from_cfg(...)
    train          refused by train(), with no file in the work dir
    late           refused after a file existed
    raw            refused with a message that lacks the place or the expectation
    accepted       trained; legal, where the mutant is still a config that one may mean (see
    `is_legal`) silent         trained, although it should not

The seed determines the mutants; `--only N` repeats one of them with its traceback.
"""

import argparse
import collections
import contextlib
import copy
import logging
import math
import os
import random
import re
import signal
import tempfile
import traceback
from typing import Any, NamedTuple

import jax

from benchmarks.mutant_cases import Config, api_calls, get_value, load_bases, set_value
from jengine import Runner
from jengine.hooks import Hook

SECONDS = 60  # after which a mutant counts as hanging
_CONFIGS = 0.7  # the part of the mutants that are configs; the others are calls
_WRONG_TYPES = ("text", 7, 0.5, None, [], {}, True, [3], {"a": 1})
_OUT_OF_RANGE = (-1, 0, -0.5, math.nan, math.inf, 10**30, -(10**30))
_OTHER_TYPES = ("Digits", "EMAHook", "SGD", "Accuracy", "StepLR")
# Any value may be meant: the user's own information, signed weights, and limits that may be beyond
# the run.
_UNBOUNDED = (
    "metainfo",
    "sown_losses",
    "max_keep_ckpts",
    "max_num_checkpoints",
    "num_batch_per_epoch",
    "patience",
    "stopping_threshold",
    "mesh",
    "device_prefetch",
    "begin_epoch",
    "ignore_index",
    "arrays.",
    "widths",
    "filename_tmpl",
    "save_dir",
)
# where the other type is legal too
_OF_ANY_KIND = ("label", "output", "topk", "widths", "strict", "by_epoch")
# legal in PyTorch too
_ZERO = ("label_smoothing", "lr", "eps", "gamma", "factor", "start_factor", "warmup_factor")
_FREE_KEYS = ("custom_keys", "vars", "mesh")  # whose keys are the user's
_SECTIONS = (
    "model",
    "train_dataloader",
    "val_dataloader",
    "train_cfg",
    "val_cfg",
    "val_evaluator",
    "optim_wrapper",
    "param_scheduler",
    "default_hooks",
    "custom_hooks",
    "visualizer",
    "randomness",
    "log_processor",
)
_EXPECTATION = re.compile(
    r"\bmust\b|did you mean|expected|needs the argument|pass rule=|\bonly\b|has no |unexpected "
    r"keyword|"
    r"required positional|with the first batch of"
)
_PLACE = re.compile(r"in the config at `|`[\w.\[\]]+`|\b[A-Z]\w+[.:] ?\w+|" + "|".join(_SECTIONS))


class Mutant(NamedTuple):
    """Hold a config with one mistake."""

    base: str
    kind: str
    path: str
    change: str
    cfg: Config


class StopHook(Hook):
    """End training after two iterations."""

    priority = "LOWEST"

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        """Set the flag, and fetch the loss, so that errors of the step belong to this mutant."""
        float(outputs["loss"])
        if runner.iter >= 1 and hasattr(runner.train_loop, "stop_training"):
            runner.train_loop.stop_training = True


def build(base: str, cfg: Config) -> Runner | None:
    """Return the Runner of a config, after its conversion if it is iMIX's; or make the call, and
    return None.
    """
    cfg = _copy(cfg)
    if base in api_calls():
        api_calls()[base][0](**cfg)
        return None
    if base.startswith("imix"):
        from jengine.extras.imix import from_imix

        cfg = from_imix(cfg)
    return Runner.from_cfg(cfg)


def mutate(seed: int) -> Mutant:
    """Return the mutant of a seed; seeds that have none are tried again with another."""
    rng = random.Random(seed)
    while True:
        names = [list(api_calls()), [name for name in load_bases() if name not in api_calls()]]
        name = rng.choice(names[rng.random() < _CONFIGS])
        cfg = _copy(load_bases()[name])
        kind, operator = rng.choice(list(_OPERATORS.items()))
        path = rng.choice(list(_paths(cfg)))
        change = operator(rng, cfg, path)
        if change is not None:
            return Mutant(name, kind, ".".join(map(str, path)), change, cfg)


def _copy(value: Any) -> Any:
    """Return a copy of the dicts and lists, and the other objects themselves."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def _paths(value: Any, path: tuple = ()) -> Any:
    """Yield the path of every value in the dicts and lists."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        if isinstance(value, dict) and (str(key).startswith("test_") or key == "vars"):
            continue
        yield (*path, key)
        yield from _paths(item, (*path, key))


def _misspell(rng: random.Random, text: str) -> str:
    i = rng.randrange(len(text) - 1) if len(text) > 1 else 0
    swapped = text[:i] + text[i + 1 : i + 2] + text[i : i + 1] + text[i + 2 :]
    return swapped if swapped != text else text + "s"


def _misspelled_key(rng: random.Random, cfg: Config, path: tuple) -> str | None:
    parent = get_value(cfg, path[:-1])
    key = path[-1]
    if not isinstance(key, str) or (len(path) > 1 and path[-2] in _FREE_KEYS):
        return None
    new = _misspell(rng, key)
    parent[new] = parent.pop(key)
    return f"{key} -> {new}"


def _added_key(rng: random.Random, cfg: Config, path: tuple) -> str | None:
    value = get_value(cfg, path)
    if not isinstance(value, dict) or path[-1] in _FREE_KEYS:
        return None
    value["verbosity"] = 1
    return "verbosity=1"


def _removed_key(rng: random.Random, cfg: Config, path: tuple) -> str | None:
    removed = get_value(cfg, path[:-1]).pop(path[-1])
    return f"was {str(removed)[:60]}"


def _wrong_type(rng: random.Random, cfg: Config, path: tuple) -> str | None:
    old = get_value(cfg, path)
    new = rng.choice(_WRONG_TYPES)
    if isinstance(new, type(old)) and not isinstance(new, bool):
        return None
    set_value(cfg, path, copy.deepcopy(new))
    return f"{str(old)[:60]} -> {new!r}"


def _out_of_range(rng: random.Random, cfg: Config, path: tuple) -> str | None:
    old = get_value(cfg, path)
    new = rng.choice(_OUT_OF_RANGE)
    if not isinstance(old, int | float) or isinstance(old, bool) or new == old:
        return None
    if isinstance(old, float) and isinstance(new, int) and new > 0:
        return None  # a large rate is a number as good as any
    set_value(cfg, path, new)
    return f"{old} -> {new!r}"


def _wrong_section(rng: random.Random, cfg: Config, path: tuple) -> str | None:
    others = [name for name in _SECTIONS if name in cfg and name != path[0]]
    if len(path) != 1 or not others:
        return None
    other = rng.choice(others)
    cfg[path[0]] = _copy(cfg[other])
    return f"as {other}"


def _unknown_type(rng: random.Random, cfg: Config, path: tuple) -> str | None:
    if path[-1] != "type" or not isinstance(get_value(cfg, path), str):
        return None
    other = rng.choice([_misspell(rng, get_value(cfg, path)), *_OTHER_TYPES])
    if other == get_value(cfg, path):
        return None
    change = f"{get_value(cfg, path)} -> {other}"
    set_value(cfg, path, other)
    return change


def _swapped(rng: random.Random, cfg: Config, path: tuple) -> str | None:
    parent = get_value(cfg, path[:-1])
    others = [key for key in parent if key != path[-1]] if isinstance(parent, dict) else []
    if not others:
        return None
    other = rng.choice(others)
    parent[path[-1]], parent[other] = parent[other], parent[path[-1]]
    return f"with {other}"


def _wrong_name(rng: random.Random, cfg: Config, path: tuple) -> str | None:
    """Misspell a value that names something: an entry of the batch, a metric, a split, a choice."""
    old = get_value(cfg, path)
    if not isinstance(old, str) or path[-1] in ("type", "work_dir", "experiment_name", "prefix"):
        return None
    new = _misspell(rng, old)
    set_value(cfg, path, new)
    return f"{old} -> {new}"


def _entry_the_data_lack(rng: random.Random, cfg: Config, path: tuple) -> str | None:
    value = get_value(cfg, path)
    if not isinstance(value, dict) or value.get("type") not in ("CrossEntropy", "Accuracy"):
        return None
    name = rng.choice(["label", "prediction"])
    value[name] = rng.choice(["lable", "logits", "image.x", 3])
    return f"{name}={value[name]!r}"


_OPERATORS = {
    "misspelled key": _misspelled_key,
    "added key": _added_key,
    "removed key": _removed_key,
    "wrong type": _wrong_type,
    "out of range": _out_of_range,
    "wrong section": _wrong_section,
    "unknown type": _unknown_type,
    "swapped": _swapped,
    "wrong name": _wrong_name,
    "no such entry": _entry_the_data_lack,
}


class Outcome(NamedTuple):
    """Say where a mutant was refused, and with which text."""

    name: str
    text: str = ""
    is_raw: bool = False


def run(base: str, cfg: Config) -> Outcome:
    """Train a config for two iterations in an empty directory, and say where it is refused."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as directory, open(os.devnull, "w") as null:
        os.chdir(directory)
        cfg = cfg if base in api_calls() else {"work_dir": os.path.join(directory, "run"), **cfg}
        stage = "constructor"
        try:
            with contextlib.redirect_stdout(null), contextlib.redirect_stderr(null), _limit():
                runner = build(base, cfg)
                if runner is not None:
                    stage = "train"
                    runner.register_hook(StopHook())
                    runner.train()
        except Exception as error:
            if os.listdir(directory):
                stage = "late"
            notes = [
                note for note in getattr(error, "__notes__", ()) if not note.startswith("-----")
            ]
            text = f"{type(error).__name__}: {' | '.join([str(error), *notes])}"
            is_raw = not (_EXPECTATION.search(text) and _PLACE.search(text))
            return Outcome(stage, text, is_raw)
        finally:
            os.chdir(before)
            _close_logs()
    return Outcome("accepted")


@contextlib.contextmanager
def _limit() -> Any:
    def stop(signum: int, frame: Any) -> None:
        raise TimeoutError(f"still running after {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _close_logs() -> None:
    for handler in list(logging.getLogger("jengine").handlers):
        if isinstance(handler, logging.FileHandler):
            handler.close()


def is_legal(mutant: Mutant) -> bool:
    """Return whether an accepted mutant is a config that one may mean."""
    if mutant.path.split(".")[-1] in _OF_ANY_KIND or mutant.path.startswith("metainfo"):
        return True
    if mutant.kind == "wrong section":  # one loader as the other
        return "dataloader" in mutant.path and "dataloader" in mutant.change
    if mutant.path.endswith(("interval", "period")) and mutant.change.endswith("-> -1"):
        return True  # never, as in MMEngine
    if mutant.kind == "wrong type":
        old, new = mutant.change.rsplit(" -> ", 1)
        return new == "None" or (new in ("7", "0.5") and _is_number(old))
    if mutant.kind == "unknown type":
        return mutant.change.endswith(_OTHER_TYPES)
    if mutant.base in api_calls() and (
        mutant.kind in ("wrong name", "no such entry") or "10000000" in mutant.change
    ):
        return True  # only a run can know
    if mutant.change.endswith("-> 0") and mutant.path.split(".")[-1] in _ZERO:
        return True
    if mutant.path.endswith("level"):
        return True  # iMIX's hooks warn, and use NORMAL
    return mutant.kind in ("removed key", "swapped") or any(
        name in mutant.path for name in _UNBOUNDED
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def main() -> None:
    """Run the mutants and print the counts, and those that were not refused as they should be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first mutant; the others follow"
    )
    parser.add_argument("--only", type=int, help="the seed of the only mutant")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if args.only is not None:
        mutant = mutate(args.only)
        print(mutant[:4])
        logging.disable(logging.NOTSET)
        try:
            is_call = mutant.base in api_calls()
            runner = build(
                mutant.base,
                mutant.cfg if is_call else {"work_dir": tempfile.mkdtemp(), **mutant.cfg},
            )
            if runner is None:
                return
            runner.register_hook(StopHook())
            runner.train()
        except Exception:
            traceback.print_exc()
        return
    counts: collections.Counter = collections.Counter()
    for seed in range(args.seed, args.seed + args.count):
        mutant = mutate(seed)
        outcome = run(mutant.base, mutant.cfg)
        name = outcome.name
        if name == "accepted" and not is_legal(mutant):
            name = "silent"
        elif outcome.is_raw:
            name = "raw"
        counts[name] += 1
        if name not in ("constructor", "train"):
            print(
                f"{seed} {name} ({outcome.name}): {' | '.join(mutant[:4])}  {outcome.text[:300]!r}",
                flush=True,
            )
        if seed % 100 == 99:
            jax.clear_caches()
    refused = sum(counts.values()) - counts["accepted"]
    good = counts["constructor"] + counts["train"]
    print(
        f"{dict(counts)}: {good} of {refused} refused before a file existed ({good / refused:.1%})"
    )


if __name__ == "__main__":
    main()
