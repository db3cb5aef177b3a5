"""Write the reference pages of the registries: one section for each name, with its arguments and
an example.
"""

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import griffe
from config_examples import example_of, in_its_place

from jengine import train as averaging
from jengine.config import Registry, registry
from jengine.config.annotations import describe, parameters_of
from jengine.config.registry import is_built_in
from jengine.hooks import Hook, get_priority
from jengine.optim.schedules.formulas import INF

Entry = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Page:
    """Describe a page: its title, what it begins with, and the registries whose entries it
    lists.
    """

    title: str
    introduction: str
    registries: tuple[Registry, ...]


PAGES = {
    "hooks": Page(
        "Hooks",
        "A config lists hooks in `custom_hooks`, and replaces those that every run has in "
        "`default_hooks`: see [Hooks](../hooks.md).",
        (registry.HOOKS,),
    ),
    "optimizers": Page(
        "Optimizers",
        "The `optimizer` of an [optimizer wrapper](../optim.md). Names in lower case are the "
        "factories of optax, with optax's arguments.",
        (registry.OPTIMIZERS,),
    ),
    "wrappers": Page(
        "Optimizer wrappers",
        "`optim_wrapper` names a wrapper by its `type`, and by its `constructor` the class that "
        "sets learning rates "
        "and weight decays of single parameters: see [Optimizers](../optim.md).",
        (registry.OPTIM_WRAPPERS, registry.OPTIM_WRAPPER_CONSTRUCTORS),
    ),
    "schedulers": Page(
        "Schedulers",
        "`param_scheduler` is one of these or a list: see [Schedules](../schedules.md). All of "
        "them also accept "
        "`convert_to_iter_based=True`, for settings in epochs and changes at every iteration.",
        (registry.PARAM_SCHEDULERS,),
    ),
    "models": Page(
        "Models, networks and losses",
        "`model` is an adapter, with a network and a loss: see [Models](../model.md).",
        (registry.MODELS,),
    ),
    "data": Page(
        "Datasets, samplers and transforms",
        "The `dataset` and the `sampler` of a dataloader, and transforms of samples or batches: "
        "see [Data](../data.md).",
        (registry.DATASETS, registry.DATA_SAMPLERS, registry.TRANSFORMS),
    ),
    "metrics": Page(
        "Metrics",
        "`val_evaluator` and `test_evaluator` are one of these or a list: see "
        "[Evaluation](../evaluation.md).",
        (registry.METRICS, registry.EVALUATOR),
    ),
    "averages": Page(
        "Averages",
        "The `ema_type` of an `EMAHook`, which passes on their arguments: see "
        "[Averages](../ema.md).",
        (averaging.AVERAGES,),
    ),
    "loops": Page(
        "Loops and strategies",
        "`train_cfg`, `val_cfg` and `test_cfg` describe a loop (see [The Runner](../runner.md)), "
        "`parallel` the devices (see [Devices](../devices.md)).",
        (registry.LOOPS, registry.STRATEGIES),
    ),
    "visualization": Page(
        "Visualizers and logs",
        "`visualizer`, its `vis_backends`, and `log_processor`: see "
        "[Visualization](../visualization.md) and [Logging](../logging.md).",
        (registry.VISUALIZERS, registry.VISBACKENDS, registry.LOG_PROCESSORS),
    ),
}
_ORIGINS = {
    "jengine.extras.selfsup": "self-supervised learning",
    "jengine.extras.segmentation": "segmentation",
    "jengine.extras.imix": "iMIX",
    "optax": "optax",
    "jengine.extras.optimizers.aliases": "optax",
}
# Arguments that the Runner passes, by the name of the registry; Flax adds those of modules.
_SUPPLIED = {
    "parameter scheduler": ("optimizer",),
    "optimizer wrapper constructor": ("optim_wrapper_cfg",),
    "data sampler": ("dataset",),
    "loop": ("runner", "dataloader", "evaluator"),
    "model": ("parent", "name"),
    "visualization backend": ("save_dir",),
}


def write_page(page: Page) -> str:
    """Return a page as Markdown."""
    lines = [f"# {page.title}", "", page.introduction, ""]
    for entries in page.registries:
        sections = _group(entries)
        for origin, groups in sections.items():
            plural = (
                f"{entries.name[0].upper()}{entries.name[1:]}s"
                if origin == ""
                else f"From {origin}"
            )
            plural = plural.replace("strategys", "strategies").replace("Strategys", "Strategies")
            lines += [f"## {plural}", "", "| name | purpose |", "|---|---|"]
            for names in groups:
                links = ", ".join(f"[`{name}`](#{names[0].lower()})" for name in names)
                lines.append(f"| {links} | {_cell(_summary(entries.get(names[0])))} |")
            lines.append("")
            for names in groups:
                lines += [*_write_entry(entries, names), ""]
    return "\n".join(lines)


def list_names(entries: Registry) -> list[str]:
    """Return the names that jengine registers; a process may have registered others."""
    return [
        name
        for name in entries
        if is_built_in(getattr(entries.get(name), "family", entries.get(name)))
    ]


def _group(entries: Registry) -> dict[str, list[list[str]]]:
    """Return the names by origin, '' first; names of one class, or of variants of one schedule,
    are a group.
    """
    groups: dict[Any, list[str]] = {}
    for name in list_names(entries):
        entry = entries.get(name)
        key = getattr(entry, "family", entry), _origin(entry), getattr(entry, "skips_zero", False)
        groups.setdefault(key, []).append(name)
    sections: dict[str, list[list[str]]] = {"": []}
    for (_, origin, _), names in groups.items():
        sections.setdefault(origin, []).append(
            sorted(names, key=lambda name: (not name.endswith("LR"), name))
        )
    return {origin: sections[origin] for origin in ("", *_ORIGINS.values()) if sections.get(origin)}


def _origin(entry: Entry) -> str:
    module = getattr(entry, "family", entry).__module__
    return next((title for package, title in _ORIGINS.items() if module.startswith(package)), "")


def _write_entry(entries: Registry, names: list[str]) -> Iterator[str]:
    """Yield the lines of the section of one class or function, under all of its names."""
    entry = entries.get(names[0])
    example = example_of(entries, names[0])
    yield f"### {names[0]}"
    yield ""
    if len(names) > 1:
        yield f"Also: {', '.join(f'`{name}`' for name in names[1:])}."
        yield ""
    yield from _describe_text(entry)
    if example is not None and entries.name == "hook":
        yield from _write_stages(entries.build(eval(example)))
    yield from _write_arguments(entries, entry)
    if example is not None:
        yield from ("```python", in_its_place(entries, names[0], example), "```", "")


def _describe_text(entry: Entry) -> Iterator[str]:
    """Yield the text of a docstring before its sections; of optax, whose texts are long, the
    first sentence.
    """
    if _origin(entry) == "optax":
        yield from (_summary(entry), "")
        return
    for section in _sections(entry):
        if section.kind.value == "text":
            yield from (section.value.replace(" …", " ..."), "")


def _summary(entry: Entry) -> str:
    return (inspect.getdoc(entry) or "").split("\n\n")[0].replace("\n", " ")


def _sections(source: Any) -> list[Any]:
    docstring = griffe.Docstring(inspect.cleandoc(source.__doc__ or ""))
    return docstring.parse("google", warnings=False)


def _write_stages(hook: Hook) -> Iterator[str]:
    """Yield when a hook acts."""
    stages = hook.get_triggered_stages()
    points = hook.get_traced_points()
    priority = f"{get_priority(hook.priority)}"
    rows = {
        "Priority": f"{hook.priority} ({priority})" if isinstance(hook.priority, str) else priority,
        "Stages": ", ".join(f"`{stage}`" for stage in stages),
        "Inside the step": ", ".join(f"`{point}`" for point in points),
        "Chunks of steps": _limits_of_chunks(hook, stages),
    }
    yield from (f"- **{name}:** {value}" for name, value in rows.items() if value)
    yield ""


def _limits_of_chunks(hook: Hook, stages: list[str]) -> str:
    if not {"before_train_iter", "after_train_iter"} & set(stages):
        return "no limit"
    if hook.acts_on != "state" or hook.every == -1:
        return "no limit"
    if hook.every is not None or type(hook).next_step is not Hook.next_step:
        return "end at the iterations at which it acts"
    return "limited to one step each"


def _write_arguments(entries: Registry, entry: Entry) -> Iterator[str]:
    supplied = _SUPPLIED.get(entries.name, ())
    texts = _argument_texts(entry)
    parameters = {
        name: p
        for name, p in parameters_of(entry).items()
        if name not in supplied
        and (p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or name in texts)
    }
    if not parameters:
        yield from ("It has no arguments.", "")
        return
    is_foreign = _origin(entry) == "optax"  # whose annotations are long unions of array types
    columns = (
        ["argument", "default"] if is_foreign else ["argument", "must be", "default", "meaning"]
    )
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            cells = [f"`**{name}`", "", "", texts.get(name, "")]
        else:
            cells = [
                f"`{name}`",
                describe(parameter.annotation),
                _default(parameter),
                texts.get(name, ""),
            ]
        shown = [cells[0], cells[2]] if is_foreign else cells
        yield f"| {' | '.join(map(_cell, shown))} |"
    yield ""


def _argument_texts(entry: Entry) -> Mapping[str, str]:
    """Return what the docstrings of a class, its bases and the settings of a schedule have about
    each argument.
    """
    sources = [*inspect.getmro(entry)] if isinstance(entry, type) else [entry]
    family = getattr(entry, "family", None)
    texts: dict[str, str] = {}
    for parameter in inspect.signature(entry).parameters.values():
        for settings in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(settings, type):  # a dataclass, whose fields are arguments
                sources += inspect.getmro(settings)
    for source in [*sources, *(inspect.getmro(family) if family else ())]:
        for section in _sections(source):
            if source is not object and section.kind.value in ("parameters", "attributes"):
                for item in section.value:
                    for name in item.name.split(","):
                        texts.setdefault(
                            name.strip().lstrip("*"), item.description.replace("\n", " ")
                        )
    return texts


def _default(parameter: inspect.Parameter) -> str:
    value = parameter.default
    if value is parameter.empty:
        return "required"
    if value == INF:
        return "the end of the run"
    if isinstance(value, types.FunctionType | type):
        return f"`{value.__name__}`"
    return f"`{value!r}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
