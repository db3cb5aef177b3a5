import re
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.cli import main
from jengine.config import load_config, resolve
from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.extras.plan.peak_flops import get_peak_flops
from jengine.extras.plan.plan import parse_mesh, scale_batches, set_devices
from jengine.extras.plan.plan_report import format_plan
from jengine.extras.plan.program_costs import compile_plan, estimate_time
from jengine.extras.plan.topologies import CHIPS
from jengine.model import FunctionalModel
from jengine.parallel import build_mesh
from jengine.runner import Runner
from tests.refusals import check_refusal

CONFIG = """
import jax.numpy as jnp
import numpy as np
from jengine.data import ArrayDataset
from jengine.evaluation.metric import BaseMetric
from jengine.model import FunctionalModel
from jengine.config import DATASETS, METRICS, MODELS


@DATASETS.register_module(force=True)
class PlanDataset(ArrayDataset):
    def __init__(self, size):
        super().__init__(dict(x=np.ones((size, 64), np.float32)))


@MODELS.register_module(force=True)
class PlanModel(FunctionalModel):
    def __init__(self):
        predict = lambda params, batch: jnp.tanh(batch["x"] @ params["up"]) @ params["down"] + params["bias"]
        super().__init__(
            lambda: {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 1)), "bias": jnp.zeros(())},
            lambda params, batch: jnp.square(predict(params, batch)).mean(axis=1),
            predict,
        )


@METRICS.register_module(force=True)
class PlanMean(BaseMetric):
    def init(self):
        return jnp.zeros(2)

    def update(self, state, predictions, batch):
        return state + jnp.stack([predictions.sum(), predictions.size])

    def compute(self, state):
        return {"mean": state[0] / state[1]}


def get_config():
    return dict(
        model=dict(type="PlanModel"),
        train_dataloader=dict(batch_size=8, dataset=dict(type="PlanDataset", size=64)),
        train_cfg=dict(max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.1)),
        parallel=dict(type="Pjit", fsdp_min_size=1024),
    )
"""
UP = 64 * 256 * 4  # bytes of the one large parameter
REST = 256 * 4 + 4  # of the two small ones


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "planned.py"
    path.write_text(CONFIG)
    return path


def test_the_command_plans_for_devices_that_do_not_exist(run_python, config, tmp_path):
    command = "import sys; from jengine.cli import main; sys.exit(main())"
    arguments = ["plan", str(config), "--devices", "4", "--mesh", "data=2,fsdp=2"]
    result = run_python(command, *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    out = result.stdout
    assert out.startswith("4 devices, mesh {'data': 2, 'fsdp': 2, 'tensor': 1}, 8 examples per step\n")
    assert re.search(r"\| up +\| \(64, 256\) +\| \(None, 'fsdp'\) +\| \(64, 128\) +\| 32.00 KiB ", out), out
    assert re.search(rf"\| 2 replicated +\|.*\| {REST / 1024:.2f} KiB ", out), out
    # Half of the large parameter and all of the small ones; Adam's two moments are as large.
    update = out[out.index("Program: update") :]
    parameters, optimizer = (
        float(re.search(rf"\| {kind} +\| ([\d.]+) KiB", update)[1]) for kind in ("parameters", "optimizer state")
    )
    assert parameters == round((UP / 2 + REST) / 1024, 2)
    assert 2 * (UP / 2 + REST) / 1024 <= optimizer < 2 * (UP / 2 + REST) / 1024 + 0.1
    assert re.search(r"\| batch +\| 512 B ", update), update  # 2 of the 8 examples of 64 float32
    assert re.search(r"[\d.e+]+ FLOPs per device, [\d.e+]+ in total", out)
    assert re.search(r"\| all-reduce +\| \d", out), out
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["planned.py"]


def test_data_parallel_accumulation_exchanges_only_the_loss_before_the_update(config):
    cfg = resolve(load_config(config, ["--config.optim_wrapper.accumulative_counts=2"]))
    cfg = set_devices({**cfg, "parallel": dict(type="DataParallel", impl="pmap")}, 2)
    text = format_plan(compile_plan(cfg, training_only=True))
    update, accumulate = text[text.index("Collectives (update") :].split("Program: accumulate")
    assert re.findall(r"\| all-reduce +\| (\d+) +\| (\d+) +\| (\d+ B) ", accumulate) == [("1", "1", "4 B")]
    size = int(re.search(r"\| all-reduce +\| 1 +\| \d +\| ([\d.]+) KiB", update)[1].split(".")[0])
    assert size == (UP + REST) // 1024  # the gradients once, with the loss


def test_the_outer_step_of_diloco_counts_once_in_its_number_of_iterations(config):
    cfg = resolve(load_config(config))
    cfg = set_devices({**cfg, "parallel": dict(type="DiLoCo", inner_steps=16)}, 2)
    plan = compile_plan(cfg, training_only=True)
    assert plan["programs"]["update"]["collectives"] == []
    text = format_plan(plan)
    assert "No collectives (update)." in text
    sent = 2 * (UP + REST)
    assert sum(row["traffic"] for row in plan["programs"]["outer step"]["collectives"]) == sent
    line = f"called every 16 iterations: {sent / 1024:.2f} KiB sent per device, {round(sent / 16) / 1024:.2f} KiB per iteration"
    assert line in text, text


@pytest.mark.parametrize(
    ("data", "tensor", "names"), [("data", "tensor", {}), ("rows", "columns", dict(batch_axes=("rows",)))]
)
def test_accumulation_on_data_and_tensor_axes_has_only_tensor_collectives(config, data, tensor, names):
    cfg = resolve(load_config(config, ["--config.optim_wrapper.accumulative_counts=2"]))
    cfg = {**cfg, "parallel": dict(type="DataParallel", rules=[("up", (None, tensor)), ("down", (tensor,))], **names)}
    text = format_plan(compile_plan(set_devices(cfg, 4, {data: 2, tensor: 2}), training_only=True))
    assert re.search(rf"\| up +\| \(64, 256\) +\| \(None, '{tensor}'\) +\| \(64, 128\) +\| 32.00 KiB ", text), text
    update, accumulate = text[text.index("Collectives (update") :].split("Program: accumulate")
    sizes = [re.search(r"\| all-reduce +\| \d +\| \d +\| ([\d.]+) (B|KiB)", part) for part in (update, accumulate)]
    assert (sizes[0][2], int(sizes[0][1].split(".")[0])) == (
        "KiB",
        (UP + 4 * 256) // 2 // 1024,
    )  # half of each gradient
    assert sizes[1][2] == "B"  # the output of 4 examples


@pytest.mark.parametrize(
    ("mesh", "processes", "shards"),
    [
        (dict(data=4), 4, 4),
        (dict(data=4), 2, 2),
        (dict(data=2, tensor=2), 4, 2),
        (dict(data=2, tensor=2), 2, 2),
        (dict(data=1, tensor=4), 4, 1),
    ],
)
def test_several_processes_read_a_batch_for_each_data_shard(config, mesh, processes, shards):
    cfg = set_devices(resolve(load_config(config)), 4, mesh)
    assert cfg["parallel"] == {"type": "Pjit", "fsdp_min_size": 1024, "mesh": mesh, "devices": 4}
    planned = scale_batches(cfg, build_mesh(mesh, 4), processes)
    assert planned["train_dataloader"]["batch_size"] == 8 * shards  # as `DataShard` counts the shards of a run
    assert cfg["train_dataloader"]["batch_size"] == 8


def test_the_state_is_abstract(config, tmp_path):
    cfg = set_devices(resolve(load_config(config)), 2)
    runner = Runner.from_cfg({**cfg, "work_dir": str(tmp_path / "run")})
    runner.prepare_training(abstract=True)
    assert {type(leaf) for leaf in jax.tree.leaves(runner.state)} == {jax.ShapeDtypeStruct}
    assert runner.state.params["up"].shape == (64, 256)


@pytest.mark.parametrize("text", ["data", "data=x", "data=2,=,", "data=2=3"])
def test_a_malformed_mesh_is_refused(text):
    with pytest.raises(
        ConfigError, match="--mesh must be a list of axes with their sizes, such as data=32,fsdp=8, got"
    ):
        parse_mesh(text)


def test_a_mesh_is_parsed():
    assert parse_mesh("data=-1,fsdp=8") == {"data": -1, "fsdp": 8}
    assert parse_mesh("data=-1,slices.data=2,fsdp=8") == {"data": -1, "fsdp": 8, "slices": {"data": 2}}
    assert parse_mesh(None) is None


@pytest.mark.parametrize(
    ("changes", "mesh", "words"),
    [
        (dict(train_cfg=None), None, ["train_cfg"]),
        (dict(train_dataloader=[1, 2]), None, ["nothing to plan"]),
        (dict(parallel=dict(type="SingleDevice")), None, ["DataParallel", "DiLoCo", "got SingleDevice"]),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused(config, changes, mesh, words):
    check_refusal(lambda: set_devices({**resolve(load_config(config)), **changes}, 2, mesh), ConfigError, *words)


def test_numbers_below_one_are_refused(config, capsys):
    assert main(["plan", str(config), "--devices", "0"]) == 2
    assert "--devices must be at least 1, got 0" in capsys.readouterr().err
    assert main(["plan", str(config), "--devices", "1", "--processes", "0"]) == 2
    assert "--processes must be at least 1, got 0" in capsys.readouterr().err
    assert main(["plan", str(config), "--topology", "v5e:2x2", "--slices", "0"]) == 2
    assert "--slices must be at least 1, got 0" in capsys.readouterr().err
    assert main(["plan", str(config), "--devices", "4", "--slices", "2"]) == 2
    assert "--slices must be used with --topology" in capsys.readouterr().err


def test_every_program_of_a_run_is_compiled(config):
    changes = ["optim_wrapper.accumulative_counts=2", "train_cfg.steps_per_call=4"]
    cfg = resolve(load_config(config, [f"--config.{change}" for change in changes]))
    loader = {**cfg["train_dataloader"], "dataset": dict(type="PlanDataset", size=16)}
    cfg = {**cfg, "val_dataloader": loader, "val_cfg": {}, "val_evaluator": [dict(type="PlanMean")]}
    plan = compile_plan(set_devices(cfg, 2))
    assert list(plan["programs"]) == ["init", "update", "accumulate", "chunk", "evaluation"]
    update, chunk = plan["programs"]["update"], plan["programs"]["chunk"]
    assert chunk["steps"] == 4
    assert chunk["memory"]["batch"] == 4 * update["memory"]["batch"]
    state = ("parameters", "optimizer state", "state of model and hooks")
    assert (
        sum(update["memory"][kind] for kind in state) <= update["donated_bytes"] + 100
    )  # the random key is not written
    assert (plan["fits"], update["has_float64"], update["host_callbacks"]) == (None, False, 0)


def test_a_plan_leaves_no_handler_and_no_thread_of_a_training(config):
    compile_plan(resolve(load_config(config, [])), training_only=True)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    assert "jengine-progress" not in [thread.name for thread in threading.enumerate()]


def test_the_programs_of_each_batch_size_of_a_run_are_listed(config):
    cfg = resolve(load_config(config))
    sizes = dict(type="StepValues", values=[4, 8, 4], milestones=[10, 20])
    loader = {**cfg["train_dataloader"], "dataset": dict(type="PlanDataset", size=16), "batch_size": sizes}
    loop = dict(by_epoch=False, max_iters=30)
    plan = compile_plan(set_devices({**cfg, "train_dataloader": loader, "train_cfg": loop}, 2))
    assert list(plan["programs"]) == ["init", "update", "update from iteration 10"]  # the third size is the first
    memory = [plan["programs"][name]["memory"]["batch"] for name in ("update", "update from iteration 10")]
    assert memory[1] == 2 * memory[0]


def test_a_plan_does_not_read_the_state_of_the_numerics_guard(config):
    cfg = {**resolve(load_config(config)), "custom_hooks": [dict(type="NumericsGuardHook")]}
    assert "update" in compile_plan(set_devices(cfg, 2), training_only=True)["programs"]


def _plan_layers(depth, predict):
    """Return the plan of `depth` layers of 32 x 32 that are sharded over 4 devices."""
    cfg = dict(
        model=FunctionalModel(
            lambda: {"layers": jnp.ones((depth, 32, 32))},
            lambda params, batch: jnp.square(predict(params["layers"], batch["x"])).mean(axis=1),
            lambda params, batch: predict(params["layers"], batch["x"]),
        ),
        train_dataloader=dict(batch_size=8, dataset=ArrayDataset(dict(x=np.ones((64, 32), np.float32)))),
        train_cfg=dict(max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        parallel=dict(type="Pjit", rules=[("layers", (None, None, "fsdp"))]),
    )
    return compile_plan(set_devices(cfg, 4, {"data": 1, "fsdp": 4}), training_only=True)


def test_collectives_and_memory_traffic_grow_with_the_number_of_scanned_layers():
    def predict(layers, x):
        return jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, layers)[0]

    four, sixteen = (_plan_layers(depth, predict)["programs"]["update"] for depth in (4, 16))
    exchanged = [sum(row["traffic"] for row in program["collectives"]) for program in (four, sixteen)]
    assert exchanged[0] > 4 * 32 * 32 * 4  # at least all layers once
    assert exchanged[1] == pytest.approx(4 * exchanged[0], rel=0.01)
    assert sixteen["bytes_accessed"] == pytest.approx(4 * four["bytes_accessed"], rel=0.05)
    assert four["compiler_flops"] is None  # the compiler counts one layer


def test_the_report_says_that_a_loop_of_unknown_length_counts_once():
    def predict(layers, x):
        limit = jax.lax.stop_gradient(x[0, 0])
        scale = jax.lax.while_loop(lambda scale: scale < limit, lambda scale: 2 * scale, jnp.float32(1))
        return (x @ layers[0]) * scale

    plan = _plan_layers(1, predict)
    assert plan["programs"]["update"]["unknown_loops"] == 1
    assert "warning: loops with an unknown number of iterations, which are counted as one: 1\n" in format_plan(plan)


def test_no_utilisation_is_given_where_only_the_flops_are_known():
    chip = CHIPS["v5e"]
    costs = dict(bytes_accessed=None, memory={}, collectives=[], unknown_loops=0, compiler_seconds=None)
    at_peak = {"float32": get_peak_flops(chip.kind)["float32"]}  # takes a second
    assert estimate_time(at_peak, costs, chip)["utilisation"] is None
    slower = estimate_time(at_peak, {**costs, "compiler_seconds": 4.0}, chip)
    assert (slower["seconds"], slower["utilisation"]) == (4.0, 0.25)
    assert estimate_time(at_peak, {**costs, "compiler_seconds": 4.0, "unknown_loops": 1}, chip)["utilisation"] is None


def test_a_search_requires_a_topology(config, capsys):
    assert main(["plan", str(config), "--devices", "2", "--search"]) == 2
    assert "--search must be used with --topology" in capsys.readouterr().err
