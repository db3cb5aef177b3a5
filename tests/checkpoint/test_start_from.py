"""Test which weights a run starts from without an extra that reads others."""

import pathlib
import shutil

import pytest

import jengine

ROOT = pathlib.Path(jengine.__file__).parent

RUN = """
import flax.linen as nn, jax, numpy as np
from jengine import Runner
from jengine.hooks import Hook

class Net(nn.Module):
    width: int = 3
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(3, name="body")(x))
        return nn.Dense(self.width, name="head")(x).sum(1)

def build(work_dir, width=3, **settings):
    data = [{"x": np.full(3, i, np.float32), "y": np.float32(1)} for i in range(4)]
    model = dict(type="LinenModel", module=Net(width), inputs="x", loss=lambda out, batch: (out - batch["y"]) ** 2)
    return Runner(
        model, work_dir, train_dataloader=dict(batch_size=2, dataset=data), train_cfg=dict(max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.01)), custom_hooks=[dict(type="EMAHook", momentum=0.5), Record()],
        **settings)

class Record(Hook):
    def before_train(self, runner):
        Record.state = jax.device_get(runner.state)

def load(work_dir, width=3, **settings):
    build(work_dir, width, **settings).train()
    return Record.state

trained = jax.device_get(build("work_dirs/first").train())
average = jax.device_get(trained.hook_state["EMAHook"].params)
equal = lambda one, other: jax.tree.map(np.testing.assert_array_equal, one, other)
"""


FITTING = """
state = load("work_dirs/second", load_from="work_dirs/first")
equal(state.params, average)
equal(state.model_state, trained.model_state)
raw = load("work_dirs/third", load_from=dict(path="work_dirs/first", raw=True))
equal(raw.params, trained.params)
assert (int(state.step), int(raw.step)) == (0, 0)
"""
OTHERS = """
try: load("work_dirs/fourth", 5, load_from="work_dirs/first")
except ValueError as error: print(error)
state = load("work_dirs/fifth", 5, load_from=dict(path="work_dirs/first", strict=False))
equal(state.params["body"], average["body"])
assert state.params["head"]["kernel"].shape == (3, 5)
"""
REFUSED = """
np.savez("w.npz", w=np.zeros(2))
for load_from in (average, dict(path="work_dirs/first", rename=[("body", "stem")]), "w.npz", dict(path="work_dirs/first", strict="no")):
    try: build("work_dirs/sixth", load_from=load_from)
    except (TypeError, ValueError, OSError) as error: print("refused:", error, *error.__notes__)
"""


@pytest.fixture(scope="module")
def printed(run_python, tmp_path_factory):
    """What the parts print, with a copy of jengine without the extra `weights`; the errors come last."""
    directory = tmp_path_factory.mktemp("without")
    ignore = shutil.ignore_patterns("__pycache__", "weights")
    shutil.copytree(ROOT, directory / "jengine", ignore=ignore)
    code = RUN + "".join(f"{part}print('end of part')\n" for part in (FITTING, OTHERS, REFUSED))
    done = run_python(code, cwd=directory)
    return [*done.stdout.split("end of part\n"), done.stderr]


def test_a_run_starts_from_the_average_or_the_trained_weights_of_a_checkpoint(printed):
    assert len(printed) > 2, printed[-1]  # the part has ended


def test_weights_of_another_model_are_an_error_that_lists_them_or_loaded_in_part(printed):
    assert len(printed) > 3, printed[-1]
    text = printed[1]
    assert "does not fit: 6 match, 0 missing, 0 unexpected, 2 mismatched" in text
    assert "params.head.kernel  stored float32[3,3], expected float32[3,5]" in text
    assert "WARNING - Loaded the averaged weights of" in text


def test_other_weights_and_rules_need_an_extra(printed):
    assert len(printed) > 4, printed[-1]
    memory, rules, file, strict = (line for line in printed[2].splitlines() if "refused:" in line)
    for line in (memory, rules):
        assert (
            "`load_from` must be a checkpoint or dict(path=, strict=, raw=) without an extra for other weights, got {"
            in line
        )
    assert "w.npz is neither a checkpoint (state/, meta.json, manifest.json)" in file
    assert "Weights in other formats need an extra that reads them." in file
    assert "`load_from.strict` must be True or False, got 'no'" in strict
