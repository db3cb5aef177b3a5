import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jengine import checkpoint
from jengine.cli.main import main
from jengine.data import ArrayDataset
from jengine.extras.diagnose.traced_values import collect
from jengine.hooks import Hook
from jengine.model import LinenModel, NnxModel
from jengine.model.losses import CrossEntropy

STATISTICS = ("mean", "rms", "max", "zeros", "nonfinite")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.Dense(4, name="fc")(x)
        self.sow("intermediates", "before", y)
        return x + nn.relu(y), None


class Backward(nn.Module):
    """Layer whose output is finite, and whose gradient is not."""

    @nn.compact
    def __call__(self, x):
        return x + jnp.sqrt(0 * x)


class Stacked(nn.Module):
    breaks: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, name="stem")(x)
        blocks = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = blocks(name="blocks")(x, None)
        x = Backward(name="root")(x) if self.breaks else x
        return nn.Dense(3, name="head")(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        y = self.fc(x)
        self.sow(nnx.Intermediate, "before", y)
        return x + nnx.relu(y)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def data(**changes):
    random = np.random.RandomState(0)
    x = random.randn(16, 4).astype(np.float32)
    for index, value in changes.get("x", {}).items():
        x[index] = value
    return dict(batch_size=4, dataset=ArrayDataset(dict(x=x, y=random.randint(0, 3, 16))))


def settings(tmp_path, model, hook=None, **changes):
    return {
        **dict(
            model=model,
            train_dataloader=data(),
            train_cfg=dict(max_epochs=1),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
            custom_hooks=[] if hook is None else [dict(type="InspectHook", **hook)],
            visualizer=dict(vis_backends=[dict(type="LocalVisBackend", save_dir=str(tmp_path / "vis"))]),
        ),
        **changes,
    }


def linen(breaks=False):
    return LinenModel(Stacked(breaks), loss=CrossEntropy(label="y"), inputs="x")


def read(tmp_path):
    found = {}
    for line in (tmp_path / "vis" / "scalars.json").read_text().splitlines():
        values = json.loads(line)
        numbers = {key.removeprefix("inspect/"): x for key, x in values.items() if key.startswith("inspect/")}
        if numbers:
            found[values["step"]] = numbers
    return found


def statistics(array):
    array = np.asarray(array)
    return [array.mean(), np.sqrt(np.square(array).mean()), array.max(), (array == 0).mean(), 0.0]


def test_statistics_of_a_linen_step_are_those_of_numpy_for_each_layer_of_a_stack(make_runner, tmp_path):
    paths = ["activations", "grads.*.kernel", "updates", "params"]
    runner = make_runner(**settings(tmp_path, linen(), dict(paths=paths, interval=2)))
    runner.prepare_training()
    params = jax.device_get(runner.state.params)
    first = next(iter(runner.train_dataloader))
    runner.train()
    found = read(tmp_path)
    assert list(found) == [1, 3]
    x = first["x"] @ params["stem"]["kernel"] + params["stem"]["bias"]
    expected = {"stem": x}
    for layer in range(3):
        fc = params["blocks"]["fc"]
        y = x @ fc["kernel"][layer] + fc["bias"][layer]
        x = x + np.maximum(y, 0)
        expected |= {f"blocks.fc.{layer}": y, f"blocks.before.{layer}": y, f"blocks.{layer}": x}
    expected |= {"head": x @ params["head"]["kernel"] + params["head"]["bias"]}

    def loss(params):
        return linen().loss(params, {}, first, rng=jax.random.key(0), hyperparams={})[0]["loss"].mean()

    grads = jax.grad(loss)(params)
    expected |= {f"grads.blocks.fc.kernel.{i}": grads["blocks"]["fc"]["kernel"][i] for i in range(3)}
    expected |= {"grads.head.kernel": grads["head"]["kernel"], "updates.head.bias": -0.1 * grads["head"]["bias"]}
    expected["params.head.bias"] = params["head"]["bias"] - 0.1 * grads["head"]["bias"]
    for path, array in expected.items():
        numbers = [found[1][f"{path}/{name}"] for name in STATISTICS]
        np.testing.assert_allclose(numbers, statistics(array), rtol=1e-4, atol=1e-6, err_msg=path)
    assert "grads.head.bias/mean" not in found[1]


def test_statistics_of_an_nnx_step_are_those_of_numpy(make_runner, tmp_path):
    model = NnxModel(NnxNet, loss=CrossEntropy(label="y"), inputs="x")
    hook = dict(paths=["blocks.*"], interval=2, statistics=["rms"], bins=4, arrays=True)
    runner = make_runner(**settings(tmp_path, model, hook))
    runner.prepare_training()
    params = jax.device_get(runner.state.params)
    x = first = next(iter(runner.train_dataloader))["x"]
    runner.train()
    fc = params["blocks"]["0"]["fc"] if "0" in params["blocks"] else params["blocks"][0]["fc"]
    y = first @ fc["kernel"] + fc["bias"]
    x = first + np.maximum(y, 0)
    found = read(tmp_path)[1]
    assert {name.rpartition("/")[0] for name in found} == {
        f"blocks.{i}{rest}" for i in range(2) for rest in ("", ".fc", ".before")
    }
    for path, array in {"blocks.0.fc": y, "blocks.0.before": y, "blocks.0": x}.items():
        np.testing.assert_allclose(found[f"{path}/rms"], np.sqrt(np.square(array).mean()), rtol=1e-5)
    arrays = np.load(f"{runner.work_dir}/inspect/iter_1.npz")
    np.testing.assert_allclose(arrays["blocks.0"], x, rtol=1e-5, atol=1e-6)
    lines = map(json.loads, (tmp_path / "vis" / "histograms.json").read_text().splitlines())
    counts = {line["name"]: line["counts"] for line in lines if line["step"] == 1}
    assert counts["inspect/blocks.0"] == np.histogram(x, 4)[0].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        dict(parallel=dict(type="DataParallel", mesh=dict(data=2), devices=2)),
        dict(train_cfg=dict(max_epochs=1, steps_per_call=2)),
        dict(train_cfg=dict(max_epochs=1, micro_batch=2)),
    ],
)
def test_replicas_chunks_and_micro_batches_give_the_same_statistics_and_training(make_runner, tmp_path, changes):
    hook = dict(paths=["blocks", "updates.head.kernel"], interval=2)
    plain = make_runner(**settings(tmp_path / "without", linen(), **changes), work_dir=str(tmp_path / "0")).train()
    make_runner(**settings(tmp_path / "a", linen(), hook), work_dir=str(tmp_path / "1")).train()
    state = make_runner(**settings(tmp_path / "b", linen(), hook, **changes), work_dir=str(tmp_path / "2")).train()
    jax.tree.map(np.testing.assert_array_equal, plain.params, state.params)
    expected, found = read(tmp_path / "a"), read(tmp_path / "b")
    assert expected.keys() == found.keys()
    for step, numbers in expected.items():
        assert numbers.keys() == found[step].keys()
        for name, value in numbers.items():
            np.testing.assert_allclose(found[step][name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_the_argument_inspect_is_short_for_the_hook(make_runner, tmp_path):
    found = []
    for name, changes in (("hook", dict(hook=dict(paths=["blocks.fc", "loss"]))), ("argument", dict(inspect=["blocks.fc", "loss"]))):
        make_runner(**settings(tmp_path / name, linen(), **changes)).train()
        found.append(read(tmp_path / name))
    assert found[0] == found[1]
    assert "loss.loss/mean" in found[0][1]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "batch",
            r"In iteration 2, .* in the entry 'x' of the batch \(1 of 16 elements, in the example \d of the batch\)",
        ),
        (
            "backward",
            r"In iteration 0, .* in the backward pass, the gradient of the output of the layer 'blocks' \(Block\), "
            r"layer 2 of the stack, which is computed from the gradient of the output of the layer 'root' \(Backward\)",
        ),
        ("loss", r"In iteration 0, .* in the forward pass, the loss 'loss', computed from finite outputs of all layers"),
        (
            "diverges",
            r"In iteration 1, .* in the forward pass, the output of the layer 'blocks.fc' \(Dense\), layer 0 of the",
        ),
    ],
)
def test_a_loss_that_is_not_finite_names_the_first_bad_value(make_runner, tmp_path, case, expected):
    changes = {}
    if case == "batch":
        loader = data(x={(9, 2): np.inf})
        changes = dict(train_dataloader={**loader, "sampler": dict(type="DefaultSampler", shuffle=False)})
    if case == "diverges":
        changes = dict(optim_wrapper=dict(optimizer=dict(type="SGD", lr=1e20)))
    model = linen(case == "backward")
    if case == "loss":
        model = LinenModel(Stacked(), loss=lambda outputs, batch: jnp.log(-1 + 0 * outputs.sum()), inputs="x")
    runner = make_runner(**settings(tmp_path, model, **changes))
    with pytest.raises(FloatingPointError) as caught:
        runner.train()
    notes = "\n".join(caught.value.__notes__)
    assert re.search(expected, notes), notes


def test_the_step_is_computed_again_from_the_newest_checkpoint(make_runner, tmp_path):
    class Poison(Hook):
        def after_train_epoch(self, runner):
            x[9, 2] = np.nan

    loader = data()
    x = loader["dataset"].arrays["x"]
    changes = dict(train_dataloader=loader, train_cfg=dict(max_epochs=2), custom_hooks=[Poison()])
    changes["default_hooks"] = dict(checkpoint=dict(type="CheckpointHook", interval=1))
    runner = make_runner(**settings(tmp_path, linen(), **changes))
    with pytest.raises(FloatingPointError) as caught:
        runner.train()
    notes = "\n".join(caught.value.__notes__)
    assert re.search(r"In iteration [4-7], .* in the entry 'x' of the batch .*repeated from .*/epoch_1", notes), notes
    assert checkpoint.find_latest(runner.work_dir).endswith("epoch_1")  # there is no epoch_2


def test_the_numerics_guard_names_the_first_bad_value(make_runner, tmp_path):
    guard = dict(type="NumericsGuardHook", max_in_row=1, interval=1)
    runner = make_runner(**settings(tmp_path, linen(True), custom_hooks=[guard]))
    with pytest.raises(FloatingPointError) as caught:
        runner.train()
    assert re.search(r"In iteration 0, .* backward .* the layer 'root' \(Backward\)", "\n".join(caught.value.__notes__))
    assert runner.iter == 0


def test_values_in_branches_are_collected():
    variables = nn.Dense(2).init(jax.random.key(0), jnp.ones((1, 2)))

    def function(x):
        return jax.lax.cond(x.sum() > 0, lambda x: nn.relu(nn.Dense(2).apply(variables, x)), lambda x: x, x)

    found = jax.jit(lambda x: collect(function, lambda path, x: x.sum(), x)[0])(jnp.ones((1, 2)))
    (value,) = found.values()
    np.testing.assert_allclose(value, nn.Dense(2).apply(variables, jnp.ones((1, 2))).sum(), rtol=1e-6)


def test_the_command_prints_a_table_of_a_batch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import numpy as np\n"
        "from jengine.data import ArrayDataset\n"
        "def get_config():\n"
        "    x = np.arange(32, dtype=np.float32).reshape(8, 4)\n"
        "    return dict(\n"
        "        model=dict(type='LinenModel', module=dict(type='flax.linen.Dense', features=2), inputs='x',\n"
        "            loss=dict(type='CrossEntropy', label='y')),\n"
        "        train_dataloader=dict(batch_size=4, sampler=dict(type='DefaultSampler', shuffle=False),\n"
        "            dataset=dict(type=ArrayDataset, arrays=dict(x=x, y=np.zeros(8, np.int64)))),\n"
        "        train_cfg=dict(max_epochs=1),\n"
        "        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)))\n"
    )
    assert main(["inspect", "net.py", "--path", "batch.x", "grads.*"]) == 0
    output = capsys.readouterr().out
    row = next(line for line in output.splitlines() if "batch.x" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "batch.x", "[4, 4]", "float32", "7.5", "8.803", "15", "6.25 %", "0 %",
    ]
    assert "grads.kernel" in output
    assert "params" not in output
