import pathlib
import sys

from ml_collections import ConfigDict

from jengine.config import MODELS, load_config, resolve


def test_a_dict_and_a_config_dict_load_equally(write):
    plain = write("a.py", "def get_config():\n    return dict(lr=0.1, opt=dict(type='SGD'))")
    typed = write(
        "b.py",
        """
        from ml_collections import ConfigDict
        def get_config():
            return ConfigDict(dict(lr=0.1, opt=dict(type='SGD')))
        """,
    )
    assert isinstance(load_config(plain), ConfigDict)
    assert load_config(plain).opt.type == "SGD"
    assert resolve(load_config(plain)) == resolve(load_config(typed)) == {"lr": 0.1, "opt": {"type": "SGD"}}


def test_keys_with_dots_and_the_order_of_a_dict_are_kept(write):
    path = write(
        "a.py", "def get_config():\n    return dict(z=1, custom_keys={'backbone.layer0': dict(lr_mult=0.1)}, a=2)"
    )
    cfg = load_config(path)
    assert list(cfg) == ["z", "custom_keys", "a"]
    assert cfg.custom_keys["backbone.layer0"].lr_mult == 0.1


def test_a_list_of_pairs_in_a_config_dict_stays_one(write):
    path = write(
        "a.py",
        """
        from ml_collections import ConfigDict
        def get_config():
            cfg = ConfigDict()
            cfg.custom_keys = [('backbone.layer0', dict(lr_mult=0.1)), ('head', dict(lr_mult=2.0))]
            return cfg
        """,
    )
    assert resolve(load_config(path)) == {
        "custom_keys": [("backbone.layer0", {"lr_mult": 0.1}), ("head", {"lr_mult": 2.0})]
    }


def test_an_override_reaches_everything_that_refers_to_the_value(write):
    path = write(
        "a.py",
        """
        from ml_collections import ConfigDict
        def get_config():
            cfg = ConfigDict(dict(batch=4))
            cfg.lr = cfg.get_ref('batch') * 0.5
            cfg.loaders = [dict(batch_size=cfg.get_ref('batch'))]
            return cfg
        """,
    )
    assert resolve(load_config(path)) == {"batch": 4, "lr": 2.0, "loaders": [{"batch_size": 4}]}
    assert resolve(load_config(path, ["batch=8"])) == {"batch": 8, "lr": 4.0, "loaders": [{"batch_size": 8}]}
    changed = resolve(load_config(path, ["loaders[0].batch_size=16"]))
    assert changed == {"batch": 16, "lr": 8.0, "loaders": [{"batch_size": 16}]}


def test_the_text_after_the_colon_is_the_argument(write):
    path = write("a.py", "def get_config(size='s'):\n    return dict(size=size)")
    assert load_config(f"{path}:large").size == "large"
    assert load_config(path).size == "s"


def test_the_directory_of_a_config_comes_first_while_it_loads_and_last_afterwards(write):
    text = "import sys\nfrom shared_part import lr\ndef get_config():\n    return dict(lr=lr, path=sys.path[0])"
    one = write("one/config.py", text)
    write("one/shared_part.py", "lr = 1.0")
    before = list(sys.path)
    assert load_config(one).to_dict() == {"lr": 1.0, "path": str(one.parent)}
    assert sys.path == [*before, str(one.parent)]
    load_config(one)
    assert sys.path == [*before, str(one.parent)]


def test_an_import_path_is_looked_up_next_to_the_config_that_was_loaded_last(write):
    for name in ("one", "two"):
        write(f"{name}/config.py", "def get_config():\n    return {}")
        write(f"{name}/lookup_part.py", f"def where():\n    return {name!r}")
    for name in ("one", "two", "one"):
        load_config(write(f"{name}/config.py", "def get_config():\n    return {}"))
        assert MODELS.get("lookup_part.where")() == name


def test_a_config_may_list_modules_of_another_directory(write):
    write("models/listed_net.py", "def net():\n    return 7")
    path = write("configs/a.py", "CONFIG_MODULES = {'../models': ['listed_net']}\ndef get_config():\n    return {}")
    load_config(path)
    assert MODELS.get("listed_net.net")() == 7


def test_modules_with_equal_names_in_two_directories_are_distinct_and_run_once(write):
    text = "from part import values\ndef get_config():\n    values.append(1)\n    return dict(values=list(values))"
    one, two = write("one/config.py", text), write("two/config.py", text)
    write("one/part.py", "values = [10]")
    write("two/part.py", "values = [20]")
    assert load_config(one)["values"] == [10, 1]
    assert load_config(two)["values"] == [20, 1]
    # The module of the first directory is the same object: it did not run again.
    assert load_config(one)["values"] == [10, 1, 1]


def test_an_override_does_not_change_a_list_of_an_imported_module(write):
    path = write("c/config.py", "from pipe import steps\ndef get_config():\n    return dict(steps=steps)")
    write("c/pipe.py", "steps = [dict(size=32)]")
    assert load_config(path, ["steps[0].size=64"]).steps[0]["size"] == 64
    assert load_config(path).steps[0]["size"] == 32


def test_a_class_of_the_file_itself_can_be_a_dataclass(write):
    path = write(
        "a.py",
        """
        from __future__ import annotations
        import dataclasses
        @dataclasses.dataclass
        class Hook:
            interval: int = 3
        def get_config():
            return dict(custom_hooks=[dict(type=Hook)])
        """,
    )
    hook = load_config(path).custom_hooks[0]["type"]
    assert hook().interval == 3


def test_the_home_directory_is_expanded(write, monkeypatch):
    path: pathlib.Path = write("a.py", "def get_config():\n    return dict(x=1)")
    monkeypatch.setenv("HOME", str(path.parent))
    assert load_config("~/a.py").x == 1
