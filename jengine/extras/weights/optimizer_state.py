"""Optimizer state and step from another training loop: a Flax `TrainState`, or any pytree with an
optax state.

Chains differ from loop to loop, so states are matched by their fields: `opt_state.0.mu` has an
array for each parameter, which is for the `mu` of this run wherever that is in its chain; numbers
next to it, as `count`, go along.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jengine.checkpoint import arrays
from jengine.config.errors import ConfigError
from jengine.config.paths import flatten
from jengine.extras.weights.array_rules import RuleLike, parse_rules
from jengine.extras.weights.pretrained import load_pretrained
from jengine.extras.weights.rules import matches
from jengine.extras.weights.weight_source import WeightSource
from jengine.hooks.run import Run
from jengine.hooks.runner_protocol import Loader
from jengine.logging.tables import format_table
from jengine.optim.schedules.scheduler import Schedulers, flatten_schedulers
from jengine.parallel.processes import put_whole
from jengine.runner.loops import TrainLoop
from jengine.runner.resume_check import check_length
from jengine.runner.runner import Runner

Fields = dict[str, dict[str, str]]  # path of a field -> path of a parameter -> name of the array

_STEPS = ("step", "iter", "iteration", "global_step")
_FRESH = ("accumulated_grads",)  # a window of accumulation starts anew


@dataclasses.dataclass(frozen=True)
class OptimizerReport:
    """Report on how a stored optimizer state matches that of a run.

    Attributes:
      matched: path in the run's state to stored path, for fields with an array for each parameter,
        and for numbers.
      missing: fields of the run for which nothing is stored, or not for all parameters that were
        loaded.
      unused: stored paths for which the run has no place.
      step: the number of completed iterations; None if it is not stored.
      step_from: the path of the step.
    """

    matched: dict[str, str]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    step: int | None
    step_from: str

    def summary(self) -> str:
        """Return a table with one row for each field."""
        rows = [["loaded", path, stored] for path, stored in self.matched.items()]
        rows += [["step", str(self.step), self.step_from]] if self.step is not None else []
        rows += [["missing", path, ""] for path in self.missing]
        rows += [["not used", "", path] for path in self.unused]
        return format_table(
            ["optimizer", "of this run", "stored"], rows, align=["left", "left", "left"]
        )


def continue_other_loop(
    runner: Runner,
    source: WeightSource,
    loaded: Iterable[str],
    rename: Sequence[RuleLike] | str,
    item: str | None,
    strict: bool,
) -> None:
    """Load the optimizer state and the step of another training loop, and set the schedules and
    the data to it.

    Args:
      runner: the run, whose weights have been loaded.
      source: where they are from.
      loaded: paths of the parameters that were loaded.
      rename, item: see `load_optimizer`.
      strict: False starts what is missing anew.
    """
    state = runner.state
    opt_state, report = load_optimizer(
        source, state.opt_state, list(loaded), rename=rename, item=item
    )
    if not report.matched or (strict and report.missing):
        raise ConfigError(
            f"`load_from.optimizer` must be False for {source.label}: the state of the optimizer "
            f"does not fit; strict=False starts what is missing anew:\n{report.summary()}"
        )
    step = report.step or 0
    loop = runner.train_loop
    runner.state = state.replace(
        opt_state=opt_state, step=put_whole(np.asarray(step, np.int32), state.step.sharding)
    )
    _start_at(runner.run, loop, step)
    check_length(runner.run, loop, source.label, {"iter": loop.iter, "epoch": loop.epoch})
    if runner.param_schedulers is not None:
        seek_schedulers(runner.param_schedulers, iters=loop.iter, epochs=loop.epoch)
    runner.logger.info(
        f"Continue the training of {source.label} after {step} iterations:\n{report.summary()}"
    )


def load_optimizer(
    source: WeightSource,
    opt_state: Any,
    loaded: Collection[str],
    *,
    rename: Sequence[RuleLike] | str = (),
    item: str | None = None,
) -> tuple[Any, OptimizerReport]:
    """Load an optimizer state and the step that are stored next to the parameters.

    Args:
      source: where the parameters are from.
      opt_state: the run's state as a pytree of arrays.
      loaded: paths of the parameters that were loaded; the states of others start anew.
      rename, item: as for `load_pretrained`. States are renamed, permuted and stacked like their
        parameters.

    Returns:
      The state in the same structure, dtypes and placement, and the report.

    Raises:
      ValueError: two states of the same field are stored for a parameter, or a rule has a function
        of its own, which may not hold for a state.

    >>> import optax
    >>> from jengine.extras.weights.weight_source import open_weights
    >>> params = {"w": np.ones(2, np.float32)}
    >>> saved = {"params": params, "opt_state": optax.adam(0.1).init(params), "step": np.int32(7)}
    >>> state, report = load_optimizer(open_weights(saved), optax.adamw(0.1).init(params), ["w"])
    >>> report.step, report.matched["0.mu"]
    (7, 'opt_state.0.mu')
    """
    _check_rules(() if isinstance(rename, str) else rename)
    params, others = _divide(source.structs, item)
    stored = _find_fields(others, params)
    leaves = flatten(opt_state)
    own_fields = _find_fields({path: path for path in leaves}, loaded)
    matched: dict[str, str] = {}
    missing = []
    used = set[str]()
    for field, targets in own_fields.items():
        name = field.rpartition(".")[2]
        # `multi_transform` has one `mu` for each of its parts, with the parameters of that part
        sources = {
            path: entries for path, entries in stored.items() if path.rpartition(".")[2] == name
        }
        names = _join(name, sources)
        values = {param: leaves[path] for param, path in targets.items()}
        result, found = _load_field(source, names, values, rename)
        leaves |= {targets[param]: value for param, value in result.items()}
        if not found and name in _FRESH:
            continue
        if found:
            matched[field] = ", ".join(sources)
            used |= set(sources)
        if found < set(values):
            missing.append(
                field if not found else f"{field} of {', '.join(sorted(set(values) - found)[:3])}"
            )
    scalars = dict(_match_scalars(leaves, others, matched))
    parents = tuple(_prefix(field.split(".")[:-1]) for field in matched)
    numbers = [
        path for path, leaf in leaves.items() if np.ndim(leaf) == 0 and path.startswith(parents)
    ]
    # without its count, Adam corrects the bias again
    missing += [path for path in numbers if path not in scalars]
    wanted = {others[shown] for shown in scalars.values()}
    read = dict(source.read({name: source.structs[name] for name in wanted}))
    leaves |= {
        path: arrays.put_like(np.asarray(read[others[x]]), leaves[path])
        for path, x in scalars.items()
    }
    step, step_from = _find_step(source, others, [*scalars.values()])
    in_fields = {name for field in used for name in stored[field].values()}
    unused = [
        next((field for field in stored if shown.startswith(f"{field}.")), shown)
        for shown, name in others.items()
        if name not in in_fields and name not in wanted and shown != step_from
    ]
    restored = jax.tree.unflatten(jax.tree.structure(opt_state), list(leaves.values()))
    rest = tuple(dict.fromkeys(unused))
    return restored, OptimizerReport({**matched, **scalars}, tuple(missing), rest, step, step_from)


def _check_rules(rename: Sequence[RuleLike]) -> None:
    # `v` of Adam is squared: what a function does to a parameter need not hold for it
    own = [
        rule.shown
        for rule in parse_rules(rename)
        if rule.options.transform not in (None, "none", "transpose")
    ]
    if own:
        raise ValueError(
            f"`optimizer` must be False with a function on the arrays, got the rule {own[0]}"
        )


def _divide(
    structs: Mapping[str, jax.ShapeDtypeStruct], item: str | None
) -> tuple[list[str], dict[str, str]]:
    """Return the paths of the parameters, and the names of all other arrays by path.

    The last segment `value` is that of Flax's wrappers in Orbax, and belongs to none of these
    paths.
    """
    prefix = "" if item is None else f"{item}."
    below = {name: name.removeprefix(prefix) for name in structs if name.startswith(prefix)}
    # Flax's TrainState keeps the collection's name, its variables of other collections are beside
    # it.
    if any(path.startswith("params.") for path in below.values()):
        below = {
            name: path.removeprefix("params.")
            for name, path in below.items()
            if path.startswith("params.")
        }
    others = {name.removesuffix(".value"): name for name in structs if name not in below}
    return [path.removesuffix(".value") for path in below.values()], others


def _find_fields(names: Mapping[str, str], params: Collection[str]) -> Fields:
    """Return the paths that have arrays with the names of parameters below them."""
    known = set(params)
    fields = Fields()
    for path, name in names.items():
        for i, char in enumerate(path):
            # the longest one: `kernel` may be a parameter too
            if char == "." and path[i + 1 :] in known:
                fields.setdefault(path[:i], {})[path[i + 1 :]] = name
                break
    return fields


def _join(name: str, sources: Fields) -> dict[str, str]:
    """Return the arrays of a field by parameter.

    Several states may have one for a part of the parameters each.
    """
    joined: dict[str, str] = {}
    for path, entries in sources.items():
        # Masked chains store a moment in several branches, each for some of the parameters: they
        # must not overlap.
        if both := sorted(set(joined) & set(entries)):
            raise ValueError(
                f"`{name}` must be stored once for a parameter, got {joined[both[0]]!r} and "
                f"{path}.{both[0]}"
            )
        joined |= entries
    return joined


def _load_field(
    source: WeightSource,
    names: Mapping[str, str],
    values: Mapping[str, Any],
    rename: Sequence[RuleLike] | str,
) -> tuple[dict[str, Any], set[str]]:
    """Return the values of a field by parameter, and the parameters for which they are stored."""
    if not names:
        return dict(values), set()
    # a state of some parameters only does not have those of each rule
    if not isinstance(rename, str):
        rename = [rule for rule in rename if _applies(rule, names)]

    def read(structs: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[tuple[str, Any]]:
        by_name = {names[param]: param for param in structs}
        for name, array in source.read({names[param]: struct for param, struct in structs.items()}):
            yield by_name[name], array

    # An array for each parameter loads as parameters do: renamed, permuted, stacked
    structs = {param: source.structs[name] for param, name in names.items()}
    field = dataclasses.replace(source, structs=structs, read=read, meta={})
    # Not strict: what is missing starts anew
    result, _, report = load_pretrained(field, dict(values), rename=rename, strict=False)
    return result, set(report.matched)


def _applies(rule: RuleLike, names: Iterable[str]) -> bool:
    old = (rule[0],) if isinstance(rule[0], str) else tuple(rule[0])
    return "" in old or any(matches(name, *old) for name in names)


def _match_scalars(
    leaves: Mapping[str, Any], others: Collection[str], matched: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the numbers next to matched fields, and those in chains that have the same parts."""
    known = set(others)
    roots = list[tuple[str, str]]()
    for field, stored in matched.items():
        own = field.split(".")[:-1]
        other = stored.partition(", ")[0].split(".")[:-1]
        roots.append((_prefix(own), _prefix(other)))
        while own and other and own.pop() == other.pop():  # the same place in the same chain
            roots.append((_prefix(own), _prefix(other)))
    for path, leaf in leaves.items():
        for own_root, root in roots:
            name = root + path.removeprefix(own_root)
            if path.startswith(own_root) and name in known and np.ndim(leaf) == 0:
                yield path, name
                break


def _prefix(segments: Sequence[str]) -> str:
    return "".join(f"{segment}." for segment in segments)


def _find_step(
    source: WeightSource, others: Mapping[str, str], counts: Sequence[str]
) -> tuple[int | None, str]:
    """Return the number of completed iterations and its path: that of a step, or of the
    optimizer's count.
    """
    steps = [path for path in others if path.rpartition(".")[2] in _STEPS]
    # The shortest path: a step of the loop rather than one inside of the optimizer
    for path in [
        *sorted(steps, key=lambda path: path.count(".")),
        *(n for n in counts if n.endswith(".count")),
    ]:
        struct = source.structs[others[path]]
        if struct.shape == ():
            ((_, array),) = source.read({others[path]: struct})
            return int(np.asarray(array)), path
    return None, ""


def _start_at(run: Run, loop: TrainLoop, step: int) -> None:
    """Continue after `step` iterations of another loop: at that place in this run's order of the
    data.
    """
    loader = loop.dataloader
    length = loop.epoch_length if loop.by_epoch else loader.length
    loop.iter = step
    if length is None:  # a stream: what the other loop has read of it is unknown
        run.logger.warning(
            f"The data start from the beginning: {loader.kind} has no length, so no place of step "
            f"{step}."
        )
        return
    epoch, inner = divmod(step, length)
    loop.epoch, loop.epoch_start = (epoch, step - inner) if loop.by_epoch else (0, 0)
    loop.position = _seek_iteration(loader, step, loop.batches_per_iteration)


def _seek_iteration(loader: Loader, step: int, batches: int) -> Any:
    """Set the data to the place after `step` iterations with so many batches each, and return it.

    The loader then has the batch size of the last of them. Data without a length are set to their
    start.
    """
    loader.set_step(0)
    loader.set_epoch(0)
    if loader.length is None:
        return loader.state_dict()
    at = 0
    while at < step:
        position = loader.state_dict()
        if loader.set_step(at):
            loader.load_state_dict(position)  # the same example
            position = loader.state_dict()
        end = int(min(step, loader.next_change(at)))
        skipped = (end - at) * batches
        left = loader.length - position["position"]
        if loader.batch_sizes is not None and position["examples"] and skipped < left:
            # The position of a batch says nothing within a pass that has started with another size.
            examples = position["examples"] + skipped * (loader.batch_size or 0)
            loader.load_state_dict(
                {**position, "position": position["position"] + skipped, "examples": examples}
            )
        else:
            passes, start = divmod(skipped - left, loader.length)
            loader.set_epoch(position["epoch"] + 1 + passes, start)
        at = end
    return loader.state_dict()


def seek_schedulers(schedulers: Schedulers | None, iters: int, epochs: int) -> None:
    """Set the values that the schedules give after this many iterations and epochs."""
    for scheduler in (flat := flatten_schedulers(schedulers)):
        scheduler.seek(epochs if scheduler.by_epoch else iters)
    for chain in {id(scheduler.chain): scheduler.chain for scheduler in flat}.values():
        chain.refresh()
