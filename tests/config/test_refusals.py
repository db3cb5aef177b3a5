"""What configs, registries and their files refuse: a call, its error, and the words that must be in the message."""

import numpy as np
import pytest
from ml_collections import ConfigDict, config_dict

from jengine.config import (
    HOOKS,
    Registry,
    apply_overrides,
    check_keys,
    load_config,
    merge,
    parse_config,
    resolve,
)
from jengine.config.annotations import Count, check_values
from jengine.config.errors import ConfigError, config_path
from jengine.config.json_codec import encode, pack
from jengine.config.storage import StorageError, list_files, write_bytes
from tests.refusals import check_row

DOTTED = """
from ml_collections import ConfigDict
def get_config():
    return ConfigDict(dict(custom_keys={'backbone.layer0': dict(lr_mult=0.1)}))
"""
HINT = "your own values go under `vars`"


class Hammer:
    """Be registered."""

    def __init__(self, weight, handle="wood"):
        pass


def entry(x: Count):
    """Take one argument."""


def get_config(returned, arguments=""):
    return f"def get_config({arguments}):\n    return {returned}"


def within(path, call, *args):
    with config_path(*path):
        call(*args)


def build(cfg):
    registry = Registry("tool", "math")
    registry.register_module()(Hammer)
    registry.build(cfg)


def register_twice(module):
    registry = Registry("tool", "math")
    for _ in range(2):
        registry.register_module()(type("Saw", (), {"__module__": module}))


def delete(flag):
    merge({"optim_wrapper": {"optimizer": {"type": "SGD"}}}, {"optim_wrapper": {"optimizer": {"_delete_": flag}}})


def load_away_from_the_package(monkeypatch, tmp_path, path):
    monkeypatch.chdir(tmp_path)
    load_config(path)


def list_a_bucket_with(name, bucket):
    write_bytes(f"{bucket}/run/{name}", b"")
    list_files(f"{bucket}/run")


REFUSED = {
    # files
    "a key with a dot in a ConfigDict": (lambda write: load_config(write("a.py", DOTTED)), ValueError, "backbone.layer0", "a.py"),
    "an argument that the config does not take": (lambda write: load_config(f"{write('a.py', get_config({}))}:large"), TypeError, "takes 0", "1 was given"),
    "an argument that the config needs": (lambda write: load_config(write("a.py", get_config({}, "size"))), TypeError, "'size'"),
    "modules in a list": (lambda write: load_config(write("a.py", f"CONFIG_MODULES = ['x']\n{get_config({})}")), ConfigError, "`CONFIG_MODULES`", "dict", "['x']"),
    "a file of another name": (lambda write: load_config(write("configs/resnet50.py", get_config({})).with_name("resnet5.py")), FileNotFoundError, "resnet5.py'", "did you mean", "configs/resnet50.py'"),
    "a config of the package, misspelt": (lambda tmp_path, monkeypatch: load_away_from_the_package(monkeypatch, tmp_path, "configs/digits_cn.py"), FileNotFoundError, "did you mean 'configs/digits_cnn.py'"),
    "a config of the package without its directory": (lambda tmp_path, monkeypatch: load_away_from_the_package(monkeypatch, tmp_path, "digits_cnn.py"), FileNotFoundError, "did you mean 'configs/digits_cnn.py'"),
    "a file without the function": (lambda write: load_config(write("a.py", "config = {}")), ConfigError, "a.py", "`get_config"),
    "a list": (lambda write: load_config(write("a.py", get_config([]))), ConfigError, "ConfigDict", "got list"),
    "a file of another language": (lambda write: load_config(write("c.toml", "lr: 1")), ConfigError, "c.toml", "Python"),
    "an error in the file": (lambda write: load_config(write("a.py", get_config("lr"))), NameError, "'lr'", "a.py"),
    "a file of a bucket outside of its directory": (lambda s3_bucket: list_a_bucket_with("state/../../../.bashrc", s3_bucket), StorageError, "'..'"),
    # texts of a run
    **{
        f"the code {value}": (lambda value=value: parse_config(get_config(f"{{'a': {value}}}")), ConfigError, "`dump_config`")
        for value in ("__import__('os').getcwd()", "open('x')", "float(print())", "name", "[")
    },
    **{
        f"{type(value).__name__} in JSON": (lambda value=value: encode({"Mine": [value]}, "hooks"), TypeError, "`hooks.Mine.0`", "JSON")
        for value in ({1, 2}, object(), np.array(["2020-01-01"], np.datetime64), 1j, np.complex64(1))
    },
    "a key of JSON that is a number": (lambda: encode({3: 1}, "hooks"), TypeError, "`hooks`", "got 3"),
    "a set in a packed state": (lambda: pack({"Mine": [{1}]}, "hooks"), TypeError, "`hooks.Mine.0`", "got set"),
    # merging
    **{
        f"_delete_={flag!r}": (lambda flag=flag: delete(flag), TypeError, "`_delete_`", "True or False", f"got {flag!r}")
        for flag in ("no", "False", 0.5, 0, None)
    },
    "_delete_ at the top": (lambda: merge({"a": 1}, {"_delete_": "no"}), TypeError, "`_delete_`", "got 'no'"),
    "a list of pairs": (lambda: merge({}, [("a", 1)]), TypeError, "ConfigDict", "got list"),
    "no base": (lambda: merge(None, {}), TypeError, "ConfigDict", "got NoneType"),
    "one string of overrides": (lambda: apply_overrides({"a": 1}, "a=2"), TypeError, "list", "strings"),
    "a placeholder without a value": (
        lambda: resolve(ConfigDict({"model": {"num_classes": config_dict.required_placeholder(int)}})),
        config_dict.RequiredValueError, "`model.num_classes`",
    ),
    # keys and values
    "a value within a list": (lambda: within(("custom_hooks", 0), check_values, "Entry", entry, {"x": 0}), ConfigError, "`custom_hooks[0].x`", "got 0"),
    "a misspelt key": (lambda: check_keys({"optim_wraper": {}}, ("optim_wrapper", "vars"), hint=HINT), ConfigError, "'optim_wraper'", "did you mean 'optim_wrapper'"),
    "an unknown key": (lambda: check_keys({"zzz": {}}, ("optim_wrapper", "vars"), hint=HINT), ConfigError, "'zzz'", "optim_wrapper, vars", HINT),
    "an unknown key of a section": (lambda: within(("train_cfg",), check_keys, ["zzz"], ["a", "b"]), ConfigError, "`train_cfg`", "'zzz'", "a, b"),
    # registries
    "a misspelt hook": (lambda: HOOKS.get("CheckpointHok"), KeyError, "'CheckpointHok'", "did you mean 'CheckpointHook'"),
    "an unknown hook": (lambda: HOOKS.get("Zzz"), KeyError, "CheckpointHook, ", "DistSamplerSeedHook, "),
    "two classes of the package with one name": (lambda: register_twice("jengine.tools"), KeyError, "'Saw'", "jengine.tools.Saw", "force=True"),
    "two classes of a project with one name": (lambda: register_twice("project.tools"), KeyError, "'Saw'", "project.tools.Saw", "force=True"),
    "a misspelt argument": (lambda: build(dict(type="Hammer", handel="oak")), TypeError, "Hammer", "'handel'", "did you mean 'handle'"),
    "a config without an argument": (lambda: build(dict(type="Hammer")), TypeError, "Hammer", "'weight'"),
    "a name whose class needs an argument": (lambda: build("Hammer"), TypeError, "Hammer", "'weight'"),
    "a config without a type": (lambda: build(dict(weight=1)), TypeError, "'type'", "['weight']"),
    "a comma after a config": (lambda: build((dict(type="Hammer", weight=1),)), TypeError, "tool", "'type'", "got tuple"),
    "a number as a config": (lambda: build(3), TypeError, "tool", "'type'", "got int"),
    "the decorator without parentheses": (lambda: Registry("tool", "math").register_module(Hammer), TypeError, "Hammer'", "@register_module()"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_a_config_cannot_be_is_refused(row, request):
    check_row(request, *row)
