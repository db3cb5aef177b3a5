"""Test that a config with functions is written, runs again, and is loaded and exported."""

import functools
import importlib
import pathlib
import shutil
import sys

import jax
import numpy as np
import optax
import pytest

import jengine
from jengine.checkpoint import load
from jengine.cli import main
from jengine.config import (
    FUNCTIONS,
    METRICS,
    MODELS,
    PARAM_SCHEDULERS,
    TRANSFORMS,
    dump_config,
    load_config,
    parse_config,
    resolve,
)
from jengine.config.errors import ConfigError
from jengine.config.registry import resolve_functions
from jengine.runner import Runner

PARTS = """
import numpy as np
from flax import linen as nn


def half_error(outputs, batch, weight=1.0):
    return weight * (outputs[:, 0] - batch["y"]) ** 2


def rate(step):
    return 0.1 / (1 + step)


def stack(samples, pad_value):
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def double(sample):
    return {**sample, "x": 2 * sample["x"]}


def batches():
    for _ in range(2):
        yield {"x": np.ones((4, 2), np.float32), "y": np.ones(4, np.float32)}


class Net(nn.Module):
    act: object = nn.relu
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, dtype=self.dtype)(self.act(nn.Dense(4)(x)))


class Line:
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return {"x": np.float32([i / 16, 1]), "y": np.float32(i / 8)}
"""
CONFIG = """
import functools

import function_parts as parts
import jax.numpy as jnp
from flax import linen as nn


def get_config():
    loss = functools.partial(parts.half_error, weight=0.5)
    return dict(
        model=dict(type="LinenModel", module=dict(type=parts.Net, act=nn.tanh, dtype=jnp.float32), loss=loss, inputs="x"),
        train_dataloader=dict(
            batch_size=4, dataset=dict(type="TransformedDataset", dataset=dict(type=parts.Line), pipeline=[parts.double]),
            collate_fn=dict(type=parts.stack, pad_value=0),
        ),
        val_dataloader=parts.batches, val_cfg=dict(), val_evaluator=dict(type="MeanLoss", loss=parts.half_error),
        train_cfg=dict(max_epochs=1), optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        param_scheduler=parts.rate, randomness=dict(seed=0),
    )
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Train a config with functions in each place that takes them; its work dir is `work_dirs/first`."""
    root = tmp_path_factory.mktemp("project")
    (root / "function_parts.py").write_text(PARTS)
    (root / "config.py").write_text(CONFIG)
    assert main(["train", str(root / "config.py"), "--work-dir", str(root / "work_dirs" / "first")]) == 0
    return root


def test_functions_are_written_as_import_paths(project):
    cfg = parse_config((project / "work_dirs" / "first" / "config.py").read_text())
    assert cfg["param_scheduler"] == "function_parts.rate"
    assert cfg["val_dataloader"] == "function_parts.batches"
    assert cfg["val_evaluator"]["loss"] == "function_parts.half_error"
    assert cfg["model"]["loss"] == {"type": "function_parts.half_error", "weight": 0.5}
    assert cfg["model"]["module"] == {"type": "function_parts.Net", "act": "jax.numpy.tanh", "dtype": "float32"}
    assert cfg["train_dataloader"]["collate_fn"] == {"type": "function_parts.stack", "pad_value": 0}
    assert cfg["train_dataloader"]["dataset"]["pipeline"] == ["function_parts.double"]


def test_a_config_with_functions_runs_again_with_the_same_result(project, capsys):
    work_dirs = project / "work_dirs"
    assert main(["train", str(work_dirs / "first" / "config.py"), "--work-dir", str(work_dirs / "second")]) == 0
    first, second = (load(work_dirs / name / "epoch_1").params["Dense_0"]["kernel"] for name in ("first", "second"))
    np.testing.assert_array_equal(first, second)
    one, two = ((work_dirs / name / "config.py").read_text().replace("second", "first") for name in ("first", "second"))
    assert one == two
    copy = shutil.copytree(work_dirs / "second", work_dirs / "third")
    capsys.readouterr()
    resumed = ["train", str(copy / "config.py"), "--work-dir", str(copy), "--resume", "--config.train_cfg.max_epochs=2"]
    assert main(resumed) == 0
    differences = [line for line in capsys.readouterr().out.splitlines() if "in the checkpoint" in line]
    assert differences == ["  train_cfg.max_epochs: 2 in the config, 1 in the checkpoint"]


def test_a_run_with_functions_is_loaded_and_exported(project, tmp_path, capsys):
    work_dir = project / "work_dirs" / "first"
    batch = {"x": np.ones((3, 2), np.float32)}
    # Its network is of an imported module, and a prediction does not call the loss
    outputs = jengine.load_model(work_dir)(batch)
    assert outputs.shape == (3, 1)
    del sys.modules["function_parts"]  # as in another process
    assert main(["ckpt", "export", str(work_dir), "--jax-export", str(tmp_path / "out.bin"), "--trust"]) == 0, capsys
    assert (tmp_path / "out.bin").stat().st_size > 1000


def test_what_cannot_run_again_is_one_line_with_the_way_out(tmp_path, capsys):
    def make(): ...

    class Anything:
        def __init__(self, fn): ...

    cfg = dict(
        a=eval("lambda outputs: outputs"),
        b=dict(type=Anything, fn=sorted),
        c=optax.adam(0.1),
        d=np.ones(2000),
        e=dict(loss=make),
    )
    with pytest.warns(UserWarning, match="the file says only what it was") as warned:
        written = parse_config(dump_config(cfg))
    for value in (written["a"], written["b"]["type"], written["c"], written["d"], written["e"]["loss"]):
        assert value.startswith("<not written: ")
    assert written["b"]["fn"] == "builtins.sorted"
    texts = {str(warning.message).split("`")[1]: str(warning.message) for warning in warned}
    assert set(texts) == {"a", "b.type", "b.fn", "c", "d", "e.loss"}
    assert "got function <lambda>: write `dict(type=..., **arguments)`" in texts["a"]
    assert "builtins.sorted for the argument `fn`, which has no annotation `Callable`" in texts["b.fn"]
    assert "got ndarray: write `dict(type=..., **arguments)`" in texts["d"]


CLOSURES = """
import jax


def make_loss(weight):
    def loss(x):
        calls.append(weight)
        return weight * x
    return loss


def scaled(factor):
    return lambda x: factor * x


calls = []


def error(x):
    return x**2


errors, compiled, double = jax.vmap(error), jax.jit(error), lambda x: 2 * x
"""


@pytest.fixture
def closures(tmp_path, monkeypatch):
    (tmp_path / "closures.py").write_text(CLOSURES)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("closures")
    del sys.modules["closures"]


def test_functions_with_a_name_in_a_module_are_written_as_its_path(closures):
    cfg = dict(named=[closures.errors, closures.compiled, closures.double, jax.jit(closures.error)])
    written = parse_config(dump_config(cfg))
    assert written["named"] == ["closures.errors", "closures.compiled", "closures.double", "closures.error"]


def test_a_function_that_another_one_made_is_not_written_but_its_config_is(closures):
    schedule = optax.cosine_decay_schedule(0.1, decay_steps=100)
    cfg = dict(loss=closures.make_loss(0.5), scaled=closures.scaled(2), schedule=schedule, mapped=jax.vmap(closures.error))
    with pytest.warns(UserWarning, match="the file says only what it was") as warned:
        dump_config(cfg)
    texts = [str(warning.message) for warning in warned]
    assert closures.calls == []
    assert [text.split(" ")[0] for text in texts] == ["`loss`", "`scaled`", "`schedule`", "`mapped`"]
    assert all("write `dict(type=..., **arguments)` with a class or function at the top" in text for text in texts)

    config = dict(type=closures.make_loss, weight=0.5)
    rate = dict(type="optax.cosine_decay_schedule", init_value=0.1, decay_steps=100)
    written = parse_config(dump_config(dict(loss=config, schedule=rate)))
    assert written == dict(loss=dict(type="closures.make_loss", weight=0.5), schedule=rate)
    assert FUNCTIONS.build_function(written["loss"])(3) == 1.5
    built = FUNCTIONS.build_function(written["schedule"])
    assert [float(built(step)) for step in (0, 50)] == [float(schedule(step)) for step in (0, 50)]


def test_a_function_of_a_script_is_found_within_the_script_only(monkeypatch):
    def loss(outputs, batch): ...

    loss.__module__, loss.__qualname__ = "__main__", "loss"
    monkeypatch.setattr(sys.modules["__main__"], "loss", loss, raising=False)
    with pytest.warns(UserWarning, match="function loss of a script or notebook: write"):
        written = parse_config(dump_config(dict(loss=loss)))
    assert FUNCTIONS.build_function(written["loss"]) is loss  # as in the notebook that trains and then loads
    monkeypatch.delattr(sys.modules["__main__"], "loss")
    with pytest.raises(KeyError, match="the script that runs now has no 'loss', which the config names as a part of"):
        FUNCTIONS.build_function(written["loss"])


@pytest.mark.parametrize(
    ("registry", "config", "key"),
    [
        (MODELS, dict(type="SwitchedLoss", losses=["operator.sub", dict(type="CrossEntropy")]), "losses"),
        (MODELS, dict(type="FunctionalModel", init="operator.neg", loss={"g": "operator.sub"}), "loss"),
        (METRICS, dict(type="MeanLoss", loss="CrossEntropy"), "loss"),
    ],
)
def test_names_become_functions_where_functions_are_accepted(registry, config, key):
    found = resolve_functions(registry.get(config["type"]), {key: config[key]})[key]
    flat = list(found.values()) if key == "loss" and "type" not in found else found
    assert flat == {"type": "CrossEntropy"} or all(callable(item) or hasattr(item, "items") for item in flat)


def test_a_function_with_some_arguments_waits_for_the_others():
    partial = FUNCTIONS.build_function(dict(type="math.isclose", a=1.0, rel_tol=0.5))
    assert isinstance(partial, functools.partial)
    assert partial(b=1.4)
    schedule = FUNCTIONS.build_function(
        dict(type="optax.linear_schedule", init_value=0, end_value=1, transition_steps=4)
    )
    assert schedule(1) == 0.25  # all arguments are given: the function is called
    assert TRANSFORMS.build_function("builtins.abs") is abs
    with pytest.raises(TypeError, match="isclose has no argument 'tol'; did you mean 'rel_tol'"):
        FUNCTIONS.build_function(dict(type="math.isclose", tol=1.0))
    with pytest.raises(KeyError, match="function must be a registered name or an import path, got 'maths.sqrt'"):
        FUNCTIONS.build_function("maths.sqrt")


def test_a_schedule_is_also_a_name_or_a_config_of_a_function(tmp_path):
    model = dict(type="FunctionalModel", init="jax.random.bits", loss="operator.sub")
    for schedule in ("math.sin", dict(type="optax.cosine_decay_schedule", init_value=0.1, decay_steps=9)):
        cfg = dict(model=model, work_dir=tmp_path, train_dataloader=[np.ones(2)], train_cfg=dict(max_epochs=1))
        runner = Runner(**cfg, optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)), param_scheduler=schedule)
        assert runner.is_training_configured
    with pytest.raises(KeyError, match="parameter scheduler must be .* got 'math.sinn'"):
        Runner(**cfg, optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)), param_scheduler="math.sinn")


def test_only_pure_functions_of_a_foreign_config_are_called(tmp_path):
    from jengine.extras.serving.trust import only_known_classes

    with only_known_classes("checkpoint"):
        assert FUNCTIONS.build_function("optax.l2_loss") is optax.l2_loss
        for config in ("os.system", "pathlib.os.mkdir", dict(type="os.mkdir", path=str(tmp_path / "made"))):
            with pytest.raises(ConfigError, match="must name registered classes or networks of imported modules"):
                FUNCTIONS.build_function(config)(str(tmp_path / "made"))
    assert not (tmp_path / "made").exists()
    assert PARAM_SCHEDULERS.build_function("math.sin") is __import__("math").sin


def test_the_configs_in_the_pages_are_written_and_read_again():
    for page in ("start.md", "config.md"):
        text = (pathlib.Path(__file__).parents[2] / "docs" / page).read_text()
        blocks = [block.split("```")[0] for block in text.split("```python\n")[1:] if "def get_config" in block]
        for block in blocks:
            if "import mnist" in block:  # inherits from the page's first config
                continue
            names = {}
            exec(block, names)
            cfg = resolve(names["get_config"]())
            assert parse_config(dump_config(cfg)) == cfg


def test_a_written_config_is_loaded_with_the_modules_of_its_functions(project):
    sys.modules.pop("function_parts", None)
    cfg = load_config(project / "work_dirs" / "first" / "config.py")
    assert FUNCTIONS.build_function(cfg.param_scheduler)(1) == 0.05
