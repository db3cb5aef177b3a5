"""Test config files in which each top-level assignment is a key, as MMEngine's documentation writes them."""

import inspect
import logging

import pytest

from jengine.config import HOOKS, load_config, resolve
from jengine.config.errors import ConfigError
from jengine.extras.mmengine.mmengine_keys import SECTIONS
from jengine.runner import Runner
from tests.refusals import check_refusal

BASE = """
    data_root = 'data/digits'
    train_dataloader = dict(batch_size=4, dataset=dict(type='Digits', split='train'))
    optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9))
    default_hooks = dict(logger=dict(type='LoggerHook', interval=50))
"""


def load(path, overrides=()):
    return resolve(load_config(path, overrides))


def test_a_flat_file_inherits_replaces_and_reads_its_bases(write):
    write("_base_/digits.py", BASE)
    write("_base_/schedules/short.py", "max_epochs = 3\ntrain_cfg = dict(by_epoch=True, max_epochs=max_epochs)")
    path = write(
        "digits.py",
        """
        _base_ = ['_base_/digits.py', './_base_/schedules/short.py']
        _base_.train_dataloader.batch_size = 8
        train_dataloader = dict(dataset=dict(split=_base_.train_dataloader.dataset.split + '+'))
        optim_wrapper = dict(optimizer=dict(_delete_=True, type='AdamW', lr=_base_.optim_wrapper.optimizer.lr / 10))
        work_dir = 'runs/{{ fileBasenameNoExtension }}/{{_base_.max_epochs}}'
        train_cfg = dict(max_epochs={{_base_.max_epochs}} + 1, val_interval='{{ _base_.max_epochs }}')
        """,
    )
    assert load(path, ["optim_wrapper.optimizer.lr=0.5"]) == dict(
        train_dataloader=dict(batch_size=8, dataset=dict(type="Digits", split="train+")),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.5)),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=50)),
        train_cfg=dict(by_epoch=True, max_epochs=4, val_interval=3),
        work_dir="runs/digits/3",
        vars=dict(data_root="data/digits", max_epochs=3),
    )


def test_the_predefined_variables_are_those_of_the_file_and_of_the_environment(write, tmp_path, monkeypatch):
    monkeypatch.setenv("DIGITS_LR", "0.25")
    path = write(
        "digits.py",
        """
        work_dir = '{{ fileDirname }}/{{fileBasename}}{{ fileExtname }}'
        optim_wrapper = dict(optimizer=dict(type='{{$DIGITS_OPTIMIZER:SGD}}', lr={{'$DIGITS_LR:1'}}))
        """,
    )
    cfg = load(path)
    assert cfg["work_dir"] == f"{tmp_path.as_posix()}/digits.py.py"
    assert cfg["optim_wrapper"]["optimizer"] == dict(type="SGD", lr=0.25)
    with pytest.raises(ConfigError, match="the environment variable 'NO_SUCH' must be set for"):
        load(write("b.py", "work_dir = '{{$NO_SUCH:}}'"))


def test_a_new_style_file_reads_its_bases_by_imports(write):
    write("base/run.py", BASE)
    path = write(
        "digits.py",
        """
        from mmengine.config import read_base
        from mmengine.hooks import EMAHook
        with read_base():
            from .base.run import *
        optim_wrapper.update(dict(optimizer=dict(lr=0.2)))
        default_hooks = dict(timer=dict(type='IterTimerHook'))
        custom_hooks = [dict(type=EMAHook, momentum=0.1)]
        """,
    )
    cfg = load(path)
    assert cfg["optim_wrapper"] == dict(optimizer=dict(type="SGD", lr=0.2, momentum=0.9))
    assert cfg["default_hooks"] == dict(timer=dict(type="IterTimerHook")), "an assignment replaces"
    assert cfg["custom_hooks"] == [dict(type="EMAHook", momentum=0.1)]
    assert cfg["train_dataloader"]["batch_size"] == 4


def test_bases_are_imported_under_other_names(write):
    write("base/run.py", BASE)
    lines = (
        "from mmengine.config import read_base\nwith read_base():\n    from .base.run import optim_wrapper as base\n"
    )
    assert load(write("a.py", f"{lines}val_cfg = base.optimizer")) == dict(
        val_cfg=dict(type="SGD", lr=0.1, momentum=0.9), vars=dict(base=load(write("b.py", BASE))["optim_wrapper"])
    )


def test_a_deprecated_file_is_named(write, caplog):
    path = write("old.py", "_deprecation_ = dict(expected='new.py', reference='#5')\nwork_dir = 'w'")
    with caplog.at_level(logging.WARNING, "jengine"):
        assert load(path) == dict(work_dir="w")
    assert caplog.messages == [f"{path} is deprecated: expected new.py, reference #5"]


def test_custom_imports_register_classes(write):
    write("own_flat_hooks.py", "from jengine.hooks import Hook\nfrom jengine.config import HOOKS\n@HOOKS.register_module()\nclass FlatHook(Hook): pass")  # fmt: skip
    cfg = load(write("a.py", "custom_imports = dict(imports=['own_flat_hooks'])\nwork_dir = 'w'"))
    assert cfg == dict(work_dir="w")
    assert HOOKS.build(dict(type="FlatHook")).priority == "NORMAL"
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        load(write("b.py", "custom_imports = dict(imports='no_such_module')\nwork_dir = 'w'"))
    with pytest.raises(TypeError, match="`custom_imports.allow_failed_imports` must be True or False, got 'no'"):
        load(
            write("c.py", "custom_imports = dict(imports='no_such_module', allow_failed_imports='no')\nwork_dir = 'w'")
        )


def test_variables_that_change_nothing_are_named_once(write, caplog):
    write("base.py", "num_classes = 10\nmodel = dict(type='MyModel', num_classes=num_classes)")
    path = write("a.py", "_base_ = 'base.py'\nnum_classes = 20\nauthor = 'me'\nsplit = 'x'\nwork_dir = split")
    with caplog.at_level(logging.WARNING, "jengine"):
        cfg = load(path)
    assert cfg["model"]["num_classes"] == 10
    assert cfg["vars"] == dict(num_classes=20, author="me", split="x")
    unread, late = [record.getMessage() for record in caplog.records]
    assert unread == "a.py: nothing reads author, which go to `vars`."
    assert late.startswith(
        "a.py: setting num_classes has no effect, because a base file has already read the old value"
    )


def test_a_base_may_have_get_config(write):
    write("base.py", "def get_config():\n    return dict(work_dir='w', train_cfg=dict(max_epochs=2))")
    assert load(write("a.py", "_base_ = 'base.py'\ntrain_cfg = dict(max_epochs=3)")) == dict(
        work_dir="w", train_cfg=dict(max_epochs=3)
    )


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            ("_base_ = ['bse.py']", "a = 1"),
            ["JSON", "YAML", "got '", "bse.py", "'; did you mean '", "base.py"],
        ),
        (("_base_ = ['base.py', 'base.py']", "a = 1"), ["got ['a'] twice"]),
        (("_base_ = 'base.py'", "_base_ = 'a.py'"), ["got", "a.py", "base.py"]),
        (("_base_ = 'no_such_package::x.py'", ""), ["got 'no_such_package::x.py'"]),
        (("", ""), ["`get_config"]),
    ],
)
def test_a_flat_file_that_cannot_be_loaded_is_an_error_that_names_the_file(write, files, words):
    write("base.py", files[1])
    check_refusal(lambda: load(write("a.py", files[0])), ConfigError, *words)


def test_the_sections_of_a_flat_file_are_the_arguments_of_the_runner():
    assert {*SECTIONS} == {*inspect.signature(Runner).parameters, "vars"} - {"cfg"}


@pytest.mark.parametrize("suffix", [".py", ".json"])
def test_delete_alone_unsets_a_key_of_the_base(write, suffix):
    write("base.py", BASE)
    texts = {
        ".py": "_base_ = 'base.py'\ndefault_hooks = dict(_delete_=True)\noptim_wrapper = dict(optimizer=dict(_delete_=True))",
        ".json": '{"_base_": "base.py", "default_hooks": {"_delete_": true}, "optim_wrapper": {"optimizer": {"_delete_": true}}}',
    }
    cfg = load(write(f"child{suffix}", texts[suffix]))
    assert "default_hooks" not in cfg
    assert cfg["optim_wrapper"] == {"optimizer": {}}  # below the top level it is an empty dict, as in MMEngine


def test_import_star_of_a_base_file_gives_the_classes_that_it_imports(write):
    write(
        "_base_/loop.py",
        "from mmengine.runner import IterBasedTrainLoop\nfrom jengine.hooks import EMAHook\nlength = 3",
    )
    write("_base_/run.py", "from mmengine.config import read_base\nwith read_base():\n    from .loop import *\n")
    path = write(
        "child.py",
        """
        with read_base():
            from ._base_.run import *
        train_cfg = dict(type=IterBasedTrainLoop, max_iters=length)
        custom_hooks = [dict(type=EMAHook)]
        """,
    )
    cfg = load(path)
    assert cfg["train_cfg"] == dict(type="IterBasedTrainLoop", max_iters=3)
    assert cfg["custom_hooks"][0]["type"].__name__ == "EMAHook"
    assert cfg["vars"] == dict(length=3)
