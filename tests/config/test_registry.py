import functools
from typing import Annotated

import pytest

import jengine.config.registry
from jengine.config import Registry
from jengine.config.annotations import Range, check_values, parameters_of
from jengine.config.errors import (
    ArgumentError,
    UnknownNameError,
    closest,
    config_path,
    current_config_path,
)


@pytest.fixture
def tools():
    registry = Registry("tool", "math")  # any module that registers nothing
    registry.register_module()(Hammer)
    return registry


class Hammer:
    def __init__(self, weight, handle="wood"):
        self.weight = weight
        self.handle = handle


def test_a_name_can_be_registered_again_only_with_force(tools):
    with pytest.raises(KeyError, match="'Hammer' is already registered"):
        tools.register_module()(Hammer)
    replacement = type("Hammer", (), {})
    assert tools.register_module(force=True)(replacement) is replacement
    assert tools.get("Hammer") is replacement


def test_scoped_names_and_import_paths_resolve(tools):
    assert tools.get("mmengine.Hammer") is Hammer
    assert tools.get("collections.OrderedDict").__name__ == "OrderedDict"


def test_a_registry_shares_its_entries_with_its_parent(tmp_path, monkeypatch):
    tools = Registry("tool")
    (tmp_path / "more_tools.py").write_text(
        "from jengine.config.registry import find_registry_of_the_test as registry\n"
        "@registry.register_module()\nclass Saw:\n    def __init__(self, teeth):\n        self.teeth = teeth\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    saws = Registry("saw", parent=tools, scope="sawmill", locations=["more_tools"])
    monkeypatch.setattr("jengine.config.registry.find_registry_of_the_test", saws, raising=False)
    tools.register_module(module=Hammer)
    assert saws.build(dict(type="forge.Hammer", _scope_="forge", weight=2)).weight == 2
    assert tools.build(dict(type="sawmill.Saw", teeth=24)).teeth == 24
    assert list(tools) == list(saws) == ["Hammer", "Saw"]
    with pytest.raises(KeyError, match="saw 'Hammer' is already registered"):
        saws.register_module()(Hammer)


def test_build_does_not_modify_the_config(tools):
    cfg = dict(type="Hammer", weight=2)
    assert tools.build(cfg).weight == 2
    assert cfg == dict(type="Hammer", weight=2)


def test_the_config_takes_precedence_over_extra_arguments(tools):
    hammer = tools.build(dict(type=Hammer, weight=2), weight=5, handle="steel")
    assert (hammer.weight, hammer.handle) == (2, "steel")


def test_errors_have_a_note_with_the_config_path():
    with pytest.raises(ValueError, match="boom") as error, config_path("custom_hooks", 0):  # noqa: PT012
        assert current_config_path() == "custom_hooks[0]"
        with config_path("interval"):
            raise ValueError("boom")
    assert error.value.__notes__ == ["in the config at `custom_hooks[0].interval`"]
    assert current_config_path() == ""


def test_unknown_name_error_prints_its_message():
    assert str(UnknownNameError("plain text")) == "plain text"


def test_closest_falls_back_to_all_names():
    assert closest("qqqq", ["b", "a"]) == "; expected one of: a, b"
    assert closest("sgd", ["SGD", "Adam"]) == "; did you mean 'SGD'?"
    assert closest("Adamw", ["Adam", "AdamW", "SGD"]) == "; did you mean 'AdamW'?"


def test_a_new_process_imports_no_extra_for_names_of_the_core_and_prefers_hooks_of_its_own(run_python):
    code = """
import sys
from jengine.hooks import Hook
from jengine.config import HOOKS
@HOOKS.register_module()
class CheckInvalidLossHook(Hook):
    def __init__(self, interval=50): self.interval = interval
@HOOKS.register_module()
class SwAVHook(Hook): ...
print(type(HOOKS.build(dict(type='CheckInvalidLossHook'))).__module__, HOOKS.get('SwAVHook').__module__)
import jengine.runner
print([name for name in sys.modules if name.startswith("jengine.extras")])
HOOKS.get('DenseCLHok')
"""
    process = run_python(code)
    assert process.stdout == "__main__ __main__\n[]\n", process.stderr
    assert "did you mean 'DenseCLHook'" in process.stderr


def test_a_name_of_an_extra_imports_its_module_alone_with_any_scope(run_python):
    code = """
import sys
from jengine.config import HOOKS
print("SwAVHook" in HOOKS, "jengine.extras.selfsup.swav" in sys.modules, HOOKS.get("mmselfsup.SwAVHook").__module__)
print("jengine.extras.selfsup.odc" in sys.modules, "jengine.extras.imix.ema" in sys.modules)
"""
    process = run_python(code)
    assert process.stdout.split() == ["True", "False", "jengine.extras.selfsup.swav", "False", "False"], process.stderr


def make_class(name, module):
    return type(name, (), {"__module__": module})


@pytest.mark.parametrize("user_first", [True, False])
def test_a_class_of_the_user_replaces_a_built_in_with_a_line_in_the_log(user_first, caplog):
    registry = Registry("tool", "math")
    built_in, users = make_class("Saw", "jengine.tools"), make_class("Saw", "project.tools")
    with caplog.at_level("INFO", "jengine"):
        for entry in (users, built_in) if user_first else (built_in, users):
            registry.register_module()(entry)
    assert registry.get("Saw") is users
    assert [record.getMessage() for record in caplog.records] == [
        "The tool project.tools.Saw replaces jengine's jengine.tools.Saw."
    ]


def test_check_reports_what_build_would_without_building():
    registry = Registry("tool", "math")
    built = []

    @registry.register_module()
    class Drill:
        def __init__(self, power, size: int = 1):
            built.append(power)

    registry.check(dict(type="Drill", size=2), power=None)
    with pytest.raises(TypeError, match=r"`Drill\.size` must be an integer, got 'big'"):
        registry.check(dict(type="Drill", size="big"), power=None)
    assert built == []
    assert registry.build("Drill", power=3) is not None
    assert built == [3]


def test_every_registered_bool_takes_a_bool_only():
    registries = {value for value in vars(jengine.config.registry).values() if isinstance(value, Registry)}
    entries = {registry.get(name) for registry in registries for name in registry}
    arguments = [(entry, *item) for entry in entries for item in parameters_of(entry).items()]
    bools = [
        (entry, name)
        for entry, name, p in arguments  # a mask of optax, which may be True, is a tree; `bool | str` takes any name
        if p.annotation is bool or (p.annotation != bool | str and isinstance(p.default, bool) and entry.__module__.startswith("jengine"))
    ]
    assert len(bools) > 100
    accepted = []
    for entry, name in bools:
        for value in ("no", "False", 0.5, 2, 0):
            try:
                check_values(entry.__name__, entry, {name: value})
            except (TypeError, ValueError):  # the latter for a choice of names beside True and False
                continue
            accepted.append((entry.__name__, name, value))
    assert accepted == []


def test_a_class_is_registered_without_a_decorator_and_under_several_names():
    registry = Registry("tool", "math")
    assert registry.register_module(module=Hammer) is Hammer
    assert registry.register_module(["Mallet", "Gavel"], module=Hammer) is Hammer
    assert registry.register_module(name="Maul")(Hammer) is Hammer
    assert {registry.get(name) for name in ("Hammer", "Mallet", "Gavel", "Maul")} == {Hammer}
    with pytest.raises(KeyError, match="'Gavel' is already registered"):
        registry.register_module("Gavel", module=Hammer)


def test_a_registry_without_a_package_refuses_what_is_no_entry():
    registry = Registry("tool")
    assert registry.register_module(module=Hammer) is registry.get("Hammer") is Hammer
    assert list(registry) == ["Hammer"]
    with pytest.raises(TypeError, match="tool must be looked up by a name, got None"):
        registry.get(None)


@pytest.mark.parametrize("by_function", [False, True])
def test_a_built_object_is_validated_once(tools, by_function):
    class Counted(Range):
        def __contains__(self, value):
            seen.append(value)
            return super().__contains__(value)

    seen = []
    Length = Annotated[int, Counted(ge=1)]

    class Rope:
        def __init__(self, length: Length):
            self.length = length

    def make_rope(length: Length):
        return length

    tools.register_module(name="Rope", module=make_rope if by_function else Rope)
    tools.build(dict(type="Rope", length=3))
    assert seen == [3]
    with pytest.raises(ArgumentError, match="length. must be an integer of at least 1, got 0"):
        tools.build(dict(type="Rope", length=0))


def test_a_partial_is_registered_under_the_name_of_its_function_or_another(tools):
    with pytest.raises(KeyError, match="'Hammer' is already registered"):
        tools.register_module(module=functools.partial(Hammer, weight=3))
    light = functools.partial(Hammer, weight=1)
    assert tools.register_module("Light", module=light) is light
    assert tools.build(dict(type="Light")).weight == 1
    assert tools.build(dict(type="Light", handle="oak")).handle == "oak"
    with pytest.raises(TypeError, match="Hammer has no argument 'handel'; did you mean 'handle'"):
        tools.build(dict(type="Light", handel="oak"))
