"""Check arguments against annotations."""

import collections.abc
import math
import os
import subprocess
import sys
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from jengine.config import HOOKS
from jengine.config.annotations import (
    Ascending,
    Count,
    CountOrNever,
    Decay,
    NonNegative,
    Range,
    check_values,
    checked,
)
from jengine.config.errors import ConfigError


def check(annotation, value):
    def entry(x):
        pass

    entry.__annotations__ = {"x": annotation}
    check_values("Entry", entry, {"x": value})


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, np.int64(3)),
        (float, 3),
        (float, np.float32(0.5)),
        (float, jnp.float32(0.5)),
        (Count, 1),
        (CountOrNever, -1),
        (Decay, 0),
        (Annotated[float, Range(gt=0, le=math.inf)], math.inf),
        (bool | None, None),
        (str | os.PathLike[str], os.path),
        (collections.abc.Callable[[int], int], len),
        (collections.abc.Sequence[tuple[int, Count]], [(0, 1), [2, 3]]),
        (collections.abc.Mapping[str, Count], ml_collections.ConfigDict({"a": 1})),
        (tuple[int, ...], [1, 2]),
        (list[int], (1, 2)),
        (Annotated[collections.abc.Sequence[tuple[int, int]], Ascending()] | None, [(1, 9), [3, 2]]),
        (dict, ml_collections.ConfigDict()),
        (type[Exception], ValueError),
        ("NameOfATypeCheckerAlone", object()),
        (Any, object()),
    ],
)
def test_values_that_fit(annotation, value):
    if annotation == str | os.PathLike[str]:
        value = "path"
    check(annotation, value)


@pytest.mark.parametrize(
    ("annotation", "value", "error", "message"),
    [
        (int, True, TypeError, "`Entry.x` must be an integer, got True"),
        (int, 1.0, TypeError, "`Entry.x` must be an integer, got 1.0"),
        (float, "1e-3", TypeError, "`Entry.x` must be a number, got '1e-3'"),
        (float, np.bool_(True), TypeError, "`Entry.x` must be a number, got "),
        (float, jax.random.key(0), TypeError, "`Entry.x` must be a number, got "),
        (bool, "False", TypeError, "`Entry.x` must be True or False, got 'False'"),
        (bool, 1, TypeError, "`Entry.x` must be True or False, got 1"),
        (Count, 0, ConfigError, "`Entry.x` must be an integer of at least 1, got 0"),
        (Count | None, 0, ConfigError, "`Entry.x` must be an integer of at least 1 or None, got 0"),
        (CountOrNever, 0, ConfigError, "`Entry.x` must be -1 or an integer of at least 1, got 0"),
        (Decay, 1.0, ConfigError, "`Entry.x` must be a number in [0, 1), got 1.0"),
        (NonNegative, math.nan, ConfigError, "`Entry.x` must be a number of at least 0, got nan"),
        (NonNegative, math.inf, ConfigError, "`Entry.x` must be a number of at least 0, got inf"),
        (Literal["min", "max"], "mix", ConfigError, "`Entry.x` must be 'min' or 'max', got 'mix'"),
        (Literal["min", "max"], 3, TypeError, "`Entry.x` must be 'min' or 'max', got 3"),
        (collections.abc.Sequence[str], "name", TypeError, "`Entry.x` must be a list, got 'name'"),
        (collections.abc.Sequence[Count], [1, 0], ConfigError, "`Entry.x[1]` must be an integer of at least 1, got 0"),
        (collections.abc.Mapping[str, Count], {"a": 0}, ConfigError, "`Entry.x.a` must be an integer of at least 1, got 0"),
        (collections.abc.Sequence[tuple[str, Count]] | None, [("a", 0)], ConfigError, "`Entry.x[0][1]` must be an integer"),
        (tuple[int, int], (1,), ConfigError, "`Entry.x` must be a list of 2 items (an integer, an integer), got (1,)"),
        (dict, ({"a": 1},), TypeError, "`Entry.x` must be a dict, got ({'a': 1},); remove the comma after `dict(...)`"),
        (collections.abc.Callable, 3, TypeError, "`Entry.x` must be a function, got 3"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit(annotation, value, error, message):
    with pytest.raises(error) as caught:
        check(annotation, value)
    assert str(caught.value).startswith(message)


def test_a_default_fits_whatever_its_annotation_is():
    @checked
    def entry(x: int = None):  # noqa: RUF013 - as users write it
        return x

    assert entry() is entry(None) is None


def test_an_annotation_that_cannot_be_resolved_does_not_switch_off_the_others(tmp_path, monkeypatch):
    (tmp_path / "users_hooks.py").write_text(
        """from __future__ import annotations
import dataclasses
from typing import TYPE_CHECKING
from jengine.config.annotations import Count
from jengine.hooks import Hook
from jengine.config import HOOKS
if TYPE_CHECKING:
    from somewhere import Thing

@HOOKS.register_module()
class HookOfAUser(Hook):
    def __init__(self, thing: Thing | None = None, interval: Count = 1, log: bool = False, *more: Thing.Part):
        self.interval = interval

class Derived(HookOfAUser):
    pass

@dataclasses.dataclass
class Record:
    thing: Thing
    interval: Count

class Callable:
    def __call__(self, thing: Thing, interval: Count):
        pass
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    import users_hooks

    for entry in (users_hooks.HookOfAUser, users_hooks.Derived, users_hooks.Record, users_hooks.Callable()):
        check_values("Entry", entry, {"thing": object(), "interval": 2})
        with pytest.raises(TypeError, match=r"`Entry\.interval` must be an integer of at least 1, got 'minus one'"):
            check_values("Entry", entry, {"thing": object(), "interval": "minus one"})
    for cfg in (dict(type="HookOfAUser"), dict(type="users_hooks.Derived")):
        assert HOOKS.build({**cfg, "thing": 3}).interval == 1
        with pytest.raises(TypeError, match="interval` must be an integer of at least 1, got 'minus one'"):
            HOOKS.build({**cfg, "interval": "minus one"})
        with pytest.raises(TypeError, match="log` must be True or False, got 'no'"):
            HOOKS.build({**cfg, "log": "no"})


def test_calls_of_a_checked_class_are_checked_and_those_of_its_subclasses():
    @checked
    class Entry:
        def __init__(self, x: Count):
            self.x = x

    class Sub(Entry):
        def __init__(self):
            super().__init__(0)

    assert Entry(2).x == 2
    for make in (lambda: Entry(0), lambda: Entry(x=0), Sub):
        with pytest.raises(ConfigError, match=r"`Entry\.x` must be an integer of at least 1, got 0"):
            make()
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        Entry()
    with pytest.raises(TypeError, match="unexpected keyword argument 'xx'"):
        Entry(xx=1)


def test_nothing_heavy_is_imported():
    code = "import sys, jengine.config.annotations; print(*{'pydantic', 'beartype', 'msgspec', 'numpy', 'jax'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == ""
