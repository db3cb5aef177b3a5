"""Test what the command line says about arguments of other programs, and the shortcuts of `train`."""

import pytest

from jengine.cli import main
from jengine.config import ConfigError
from tests.refusals import check_refusal

CONFIG = """
def get_config():
    return dict(
        model=None,
        train_cfg=dict(max_epochs=2),
        train_dataloader=dict(batch_size=4, dataset=None),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        CHANGES,
    )
"""


@pytest.fixture
def write(tmp_path):
    def write(**changes):
        text = CONFIG.replace("        CHANGES,\n", "".join(f"        **dict({k}={v}),\n" for k, v in changes.items()))
        if changes:  # instead of those above
            lines = text.splitlines(keepends=True)
            text = "".join(line for line in lines if not line.strip().startswith(tuple(f"{k}=" for k in changes)))
        (tmp_path / "small.py").write_text(text)
        return str(tmp_path / "small.py")

    return write


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("--config optim_wrapper.optimizer.lr=1", "unknown argument --config; write --config.optim_wrapper.optimizer.lr=1"),
        ("--config train_cfg.max_epochs 3", "write --config.train_cfg.max_epochs=3"),
        ("--config.custom_hooks=[dict(type='EMAHook')]", "write --config.custom_hooks=\"[{'type': 'EMAHook'}]\""),
        ("--seed 1", "unknown argument --seed; write --config.randomness.seed=1"),
        ("--weight-decay=0.1", "write --config.optim_wrapper.optimizer.weight_decay=0.1"),
        ("--max_iters 5", "write --config.train_cfg.max_iters=5"),
        ("--batch_size 8", "unknown argument --batch_size; write --batch-size 8"),
        ("--amp", "write --config.precision=bfloat16"),
        ("--fp16", "write --config.precision=float16"),
        ("--workers 4", "write --config.train_dataloader.num_workers=4"),
        ("--gpus 2", """--config.parallel="{'type': 'DataParallel', 'devices': 2}" takes the first 2"""),
        ("--device cpu", "JAX_PLATFORMS=cpu in the environment"),
        ("--output_dir runs", "write --work-dir runs"),
        ("--ckpt-path a/b", "write --resume a/b"),
        ("--optim_wrapper.optimizer.lr=0.1", "write --config.optim_wrapper.optimizer.lr=0.1"),
        ("train_cfg.max_epochs=2", "write --config.train_cfg.max_epochs=2"),
        ("custom_hooks[0].interval=2", 'write --config.custom_hooks[0].interval=2'),
        ("--chek", "unknown argument --chek; did you mean '--check'?"),
        ("--resumee=x", "did you mean '--resume'?"),
        ("--config.train_cfg.max_epochs 2", "must have its value after '=': write --config.train_cfg.max_epochs=2"),
        ("--config.train_cfg.max_epochs", "write --config.train_cfg.max_epochs=VALUE"),
        ("--config.parallel=dict(type='Pjit',mesh=dict(data=[2]))", """="{'type': 'Pjit', 'mesh': {'data': [2]}}\""""),
        ("--config.parallel=dict(type=Pjit)", "must have a literal after '=': write --config.parallel=VALUE"),
    ],
)  # fmt: skip
def test_an_argument_of_another_program_names_the_setting(capsys, arguments, hint):
    with pytest.raises(SystemExit) as exit_:
        main(["train", "missing.py", *arguments.split(" ")])
    assert exit_.value.code == 2
    assert hint in capsys.readouterr().err


def test_commands_have_hints_for_their_own_options(capsys):
    for command, hint in (
        (["predict", "c.py", "work", "--lr", "1"], "write --config.optim_wrapper.optimizer.lr=1"),
        (["ckpt", "rm", "work", "a", "--forse"], "did you mean '--force'?"),
        (["table", "work", "--lr=1"], "unknown argument --lr=1; --help lists the options"),
    ):
        with pytest.raises(SystemExit):
            main(command)
        assert hint in capsys.readouterr().err


def test_the_help_of_train_shows_how_values_are_set(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert text.count("jengine train CONFIG --config.") == 4
    assert "--batch-size N        --config.train_dataloader.batch_size" in text


def resolved(config, *arguments):
    from jengine.cli.commands import load
    from jengine.cli.parser import build_parser

    args, rest = build_parser().parse_known_args(["train", config, *arguments])
    return load(args, rest)


def test_shortcuts_set_the_usual_values(write):
    cfg = resolved(write(), "--lr", "1e-3", "--epochs", "5", "--batch-size", "64", "--config.optim_wrapper.optimizer.momentum=0.9")
    assert cfg["optim_wrapper"]["optimizer"] == {"type": "SGD", "lr": 1e-3, "momentum": 0.9}
    assert (cfg["train_cfg"]["max_epochs"], cfg["train_dataloader"]["batch_size"]) == (5, 64)
    cfg = resolved(write(optim_wrapper='dict(optimizer=dict(type="adam", learning_rate=1.0))'), "--lr", "0.5")
    assert cfg["optim_wrapper"]["optimizer"] == {"type": "adam", "learning_rate": 0.5}
    cfg = resolved(write(train_dataloader="dict(global_batch_size=8, dataset=[1])"), "--batch-size", "64")
    assert cfg["train_dataloader"] == {"global_batch_size": 64, "dataset": [1]}


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        (dict(train_cfg="dict(max_iters=9)"), "--epochs 3", ["--config", ".train_cfg.max_iters=9"]),
        (
            dict(optim_wrapper="dict(a=dict(optimizer=dict(lr=1)), b=dict(optimizer=dict(lr=2)))"), "--lr 3",
            ["got several: --config.optim_wrapper.a.optimizer.lr=, --config.optim_wrapper.b.optimizer.lr="],
        ),
        (dict(optim_wrapper="len"), "--lr 3", ["`optim_wrapper.optimizer`", "got builtin"]),
        (dict(train_dataloader="[1, 2]"), "--batch-size 3", ["`--batch-size`", "`train_dataloader.dataset`"]),
        ({}, "--lr 3 --config.optim_wrapper.optimizer.lr=2", ["`optim_wrapper.optimizer.lr`", "got --lr and"]),
    ],
)  # fmt: skip
def test_a_shortcut_without_one_meaning_is_an_error(write, changes, arguments, words):
    check_refusal(lambda: resolved(write(**changes), *arguments.split()), ConfigError, *words)


def test_a_setting_one_level_too_high_names_its_place(write, capsys):
    config = write(
        model='dict(type="LinenModel", module=dict(type="SmallCNN", num_classes=2), loss=dict(type="CrossEntropy"))',
        train_dataloader="[dict()]",
    )
    assert main(["train", config, "--config.optim_wrapper.lr=0.1"]) == 2
    assert "did you mean `optim_wrapper.optimizer.lr`?" in capsys.readouterr().err
