import collections
import glob
import json
import math
import pathlib
import re
import sys
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from jengine.config import Registry, dump_config, load_config, parse_config, resolve, write_config
from jengine.config.dump import check_written
from jengine.config.errors import ConfigError
from jengine.config.modules import import_attribute


def dump_and_load(cfg, tmp_path):
    write_config(cfg, tmp_path / "dumped.py")
    return resolve(load_config(tmp_path / "dumped.py"))


def test_a_dumped_config_loads_as_an_equal_one(tmp_path):
    cfg = {
        "zeta": 1,
        "optim_wrapper": {
            "optimizer": {"type": "AdamW", "lr": 1.5e-4 * 4096 / 256, "betas": (0.9, 0.95), "tag": 'it\'s "x"\n'},
            "paramwise_cfg": {"custom_keys": {"backbone.layer0": {"lr_mult": 0.1}, ".cls_token": {"decay_mult": 0}}},
        },
        "hooks": [{"type": "A", "args": ()}, {"type": "B", "one": (1,)}, []],
        "none": None, "flag": True, "bytes": b"\x00", "inf": math.inf, "minus": -math.inf, "by_index": {0: "a", 1: "b"},
    }  # fmt: skip
    result = dump_and_load(cfg, tmp_path)
    assert result == cfg
    assert list(result) == list(cfg)
    assert result["hooks"][1]["one"] == (1,)
    assert math.isnan(dump_and_load({"x": math.nan}, tmp_path)["x"])


def test_references_are_written_as_their_values(tmp_path):
    cfg = ConfigDict({"lr": 1.0})
    cfg.half = cfg.get_ref("lr") * 0.5
    assert dump_and_load(cfg, tmp_path) == {"lr": 1.0, "half": 0.5}


def test_classes_and_functions_are_written_as_import_paths(tmp_path):
    cfg = {"type": collections.OrderedDict, "fn": glob.escape, "private": optax.adamw}
    assert dump_and_load(cfg, tmp_path) == {
        "type": "collections.OrderedDict",
        "fn": "glob.escape",
        "private": "optax.adamw",  # defined in optax._src.alias
    }


def test_paths_and_dtypes_are_written_as_strings(tmp_path):
    cfg = {"work_dir": pathlib.PurePosixPath("a/b"), "dtype": np.dtype("float32")}
    assert dump_and_load(cfg, tmp_path) == {"work_dir": "a/b", "dtype": "float32"}


def test_numpy_scalars_are_written_as_numbers(tmp_path):
    result = dump_and_load({"lr": np.float32(0.5), "n": np.int64(3)}, tmp_path)
    assert result == {"lr": 0.5, "n": 3}
    assert type(result["lr"]) is float


def test_a_value_that_cannot_be_written_becomes_a_note_with_a_warning_and_is_asked_for_later(tmp_path):
    with pytest.warns(UserWarning, match=r"`model\.transforms\[1\]` must be a literal or importable .*, got function"):
        result = dump_and_load({"model": {"transforms": ["ok", lambda x: x]}}, tmp_path)
    assert re.fullmatch("<not written: function .*<lambda>>", result["model"]["transforms"][1])
    with pytest.warns(UserWarning, match="`mean`, `std` must be .*, got ndarray"):
        result |= dump_and_load({"mean": np.zeros(2000), "std": np.ones(2000)}, tmp_path)
    message = r"`model\.transforms\[1\]` \(function .*<lambda>\), `mean` \(ndarray\), `std` \(ndarray\), which the run"
    with pytest.raises(ConfigError, match=message):
        check_written(result)


def test_small_arrays_are_written_with_their_dtype_and_library(tmp_path):
    arrays = {"mean": np.array([[0.1, np.inf]], np.float32), "anchors": jnp.array([1, 2], jnp.int8), "one": np.ones(())}
    result = dump_and_load(arrays, tmp_path)
    for name, array in arrays.items():
        assert type(result[name]) is type(array)
        assert result[name].dtype == array.dtype
        np.testing.assert_array_equal(result[name], array)
    assert parse_config(dump_config(arrays))["mean"].shape == (1, 2)
    assert parse_config(dump_config(arrays), arrays=False) == {
        "mean": [[float(np.float32(0.1)), np.inf]],
        "anchors": [1, 2],
        "one": 1.0,
    }
    assert json.loads(dump_config({"anchors": arrays["anchors"]}, tmp_path / "config.json")) == {"anchors": [1, 2]}


def test_a_class_of_the_config_file_itself_is_written_as_its_import_path(write, tmp_path):
    path = write("own.py", "class Outer:\n    class Hook: pass\ndef get_config():\n    return dict(hook=Outer.Hook)")
    hook = load_config(path)["hook"]
    text = dump_config({"hook": hook}, tmp_path / "run" / "config.py")
    assert "CONFIG_MODULES = {'..': ['own']}" in text
    assert f"CONFIG_MODULES = {{'{tmp_path}': ['own']}}" in dump_config({"hook": hook})
    write_config(text, tmp_path / "run" / "config.py")
    loaded = resolve(load_config(tmp_path / "run" / "config.py"))
    assert loaded == {"hook": "own.Outer.Hook"}
    assert import_attribute(loaded["hook"]) is hook


def test_a_class_of_a_config_file_with_the_name_of_a_library_cannot_be_written(write, tmp_path):
    path = write("optax.py", "class Hook: pass\ndef get_config():\n    return dict(hook=Hook)")
    with pytest.warns(UserWarning, match="`hook` must be .*, got type"):
        assert dump_and_load(load_config(path), tmp_path)["hook"] == "<not written: type Hook>"
    assert sys.modules["optax"] is optax


def test_names_registered_in_the_users_modules_are_written_with_their_modules(tmp_path, monkeypatch):
    registry = Registry("tool", "math")
    module = types.ModuleType("project_tools")
    registry.register_module("DumpedSaw")(type("DumpedSaw", (), {"__module__": "project_tools"}))
    registry.register_module("DumpedAxe")(type("DumpedAxe", (), {"__module__": "__main__"}))
    monkeypatch.setitem(sys.modules, "project_tools", module)
    assert "CONFIG_MODULES = {'': ['project_tools']}" in dump_config({"tool": {"type": "DumpedSaw"}})
    with pytest.warns(UserWarning, match=r"`tool\.type` must be registered in a module .* 'DumpedAxe', .* in a script"):
        dump_config({"tool": {"type": "DumpedAxe"}})
    assert "CONFIG_MODULES" not in dump_config({"hook": {"type": "EMAHook"}, "file": "project_tools.npz"})


def test_long_dicts_have_one_line_per_item():
    text = dump_config({"short": {"a": 1}, "long": {f"key_{i}": "x" * 20 for i in range(8)}})
    assert "        'short': {'a': 1},\n" in text
    assert "            'key_7': 'xxxxxxxxxxxxxxxxxxxx',\n" in text


def test_writing_creates_the_directory_and_accepts_text(tmp_path):
    text = dump_config({"a": 1})
    write_config(text, tmp_path / "new" / "config.py")
    assert (tmp_path / "new" / "config.py").read_text() == text


def test_a_failed_write_leaves_the_old_file_unchanged(tmp_path, monkeypatch):
    target = tmp_path / "config.py"
    write_config({"a": 1}, target)

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_config({"a": 2}, target)
    assert resolve(load_config(target)) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["config.py"]


def test_a_written_config_is_parsed_without_running_it():
    cfg = dict(a=[1, (2.5,), float("inf")], b={"x.y": None, 3: True}, c=-float("inf"), d=b"x", e=..., f=1 + 2j)
    assert parse_config(dump_config(cfg)) == cfg
    assert math.isnan(parse_config(dump_config(dict(a=float("nan"))))["a"])
