"""Compile the configs and examples with XLA's compilers for TPUs and GPUs, on a machine without either."""

import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks.language_model import MAXTEXT, compile_by_engine, summarize
from jengine import load_config
from jengine.extras.plan.plan_process import compile_candidates
from jengine.extras.plan.plan_search import iterate_meshes
from jengine.extras.plan.topologies import parse_topology
from tests.extras.plan.test_scale_page import memory_per_chip as memory_per_chip

pytestmark = pytest.mark.chips
pytest.importorskip("libtpu")
_HAS_GPU_COMPILER = importlib.util.find_spec("jax_cuda12_plugin") is not None
_HAS_CUDNN = _HAS_GPU_COMPILER and all(importlib.util.find_spec(name) for name in ("nvidia", "nvidia.cudnn"))

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
EXAMPLE_PROGRAMS = pathlib.Path(__file__).parent / "example_programs.py"
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
LOOPS = [name for name in EXAMPLES if name.endswith("_loop")]  # without a Runner
RUNS = [
    *(pytest.param(str(path), id=path.stem) for path in sorted(CONFIGS.glob("*.py"))),
    *(pytest.param(f"{EXAMPLE_PROGRAMS}:{name}", id=f"example-{name}") for name in EXAMPLES if name not in LOOPS),
]
CHIPS = [
    "v5e:2x2",
    pytest.param("h100:2", marks=pytest.mark.skipif(not _HAS_GPU_COMPILER, reason="requires jengine[gpu-compiler]")),
]
NETWORK = """
import jax.numpy as jnp
import numpy as np
from jengine.data import ArrayDataset
from jengine.model import FunctionalModel


def apply(params, batch):
    return jnp.tanh(batch["x"] @ params["up"]) @ params["down"]


def get_config(size="512"):
    size = int(size)
    model = FunctionalModel(
        lambda: {"up": jnp.ones((size, 4 * size)), "down": jnp.ones((4 * size, size))},
        lambda params, batch: jnp.square(apply(params, batch)).mean(axis=1),
        apply,
    )
    examples = np.broadcast_to(np.float32(1), (4096, size))
    return dict(
        model=model,
        train_dataloader=dict(batch_size=2048, dataset=ArrayDataset(dict(x=examples))),
        train_cfg=dict(max_epochs=2, steps_per_call=2),
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.1)),
        parallel=dict(type="DataParallel"),
    )
"""
UP = 512 * 2048 * 4  # bytes of each of the two parameters


@pytest.fixture(autouse=True)
def full_optimization(monkeypatch):
    """Compile as for users, in the processes of the compilers."""
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "network.py"
    path.write_text(NETWORK)
    return str(path)


def _plan(config, chips, *overrides, mesh=None, slices=1, **options):
    candidate = dict(mesh=mesh, overrides=[f"--config.{override}" for override in overrides])
    (result,) = compile_candidates(str(config), [], parse_topology(chips, slices), [candidate], **options)
    assert "plan" in result, result["error"] + result["traceback"]
    return result["plan"]


def _collectives(program):
    return {row["kind"]: row for row in program["collectives"] if row["size"] > 1024}  # without the losses


def _check_program(program):
    assert program["fits"] is True
    assert not program["has_float64"]
    assert program["host_callbacks"] == 0


def _check_donation(program, state):
    """Check that all of the state reuses its memory, and only metrics and a few scalars take more."""
    assert program["donated_bytes"] >= state - 100  # the random key is not written
    scalars = 16 * 512  # on a TPU each takes 512 bytes
    assert program["memory"]["outputs that reuse no input"] < max(state / 10, scalars)


@pytest.mark.parametrize("chips", CHIPS)
@pytest.mark.parametrize("config", RUNS)
def test_every_config_and_example_compiles_for_chips(config, chips):
    plan = _plan(config, chips)
    assert plan["fits"] is True
    has_validation = load_config(config).get("val_cfg") is not None
    # Several evaluations have names: "evaluation rows"
    assert {"init", "update", *(["evaluation"] if has_validation else [])} <= {
        name.partition(" ")[0] for name in plan["programs"]
    }
    for program in plan["programs"].values():
        _check_program(program)
        assert program["compile_seconds"] > 0
    update = plan["programs"]["update"]
    if config.endswith(":imix_debug"):
        assert update["donated_bytes"] == 0  # so that JAX can run a step with NaN again to find their origin
    else:
        kinds = ("parameters", "optimizer state", "state of model and hooks")
        _check_donation(update, sum(update["memory"][kind] for kind in kinds))


@pytest.mark.parametrize("chips", CHIPS)
@pytest.mark.parametrize("name", LOOPS)
def test_the_step_of_every_example_with_a_loop_of_its_own_compiles_for_chips(name, chips):
    command = [sys.executable, str(EXAMPLE_PROGRAMS), name, chips]
    environment = {**os.environ, **parse_topology(chips).environment}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    program = json.loads(result.stdout)
    _check_program(program)
    _check_donation(program, program["state_bytes"])
    gradients = 0 if name == "own_loop" else (64 * 128 + 128 * 10) * 4  # own_loop has one device
    sizes = {row["kind"]: row["size"] for row in program["collectives"]}
    assert sizes.keys() == ({"all-reduce"} if gradients else set())
    assert gradients <= sizes.get("all-reduce", 0) <= 1.01 * gradients


def test_attention_is_the_kernel_of_tpus_with_no_more_scores_than_its_tiles():
    command = [sys.executable, str(EXAMPLE_PROGRAMS), "attention", "v5e:2x2"]
    environment = {**os.environ, **parse_topology("v5e:2x2").environment}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    program = json.loads(result.stdout)
    assert program["kernels"] == 3  # forward, and the gradients for queries and for keys and values
    assert program["temporary"] < 8 * 2048 * 2048 * 2  # all scores of a chip


# With long sequences the compiler gathers two kernels of a layer once more, for less memory.
@pytest.mark.parametrize("tokens", MAXTEXT)
def test_the_transformer_takes_no_more_than_that_of_maxtext(tokens):
    costs, limits = summarize(compile_by_engine(*map(int, tokens.split("x")))), MAXTEXT[tokens]
    assert costs["kernels"] == limits["kernels"]
    for name in ("mcycles", "arguments", "temporary"):
        assert costs[name] <= 1.02 * limits[name], name
    for name in ("all-gather", "collective-permute", "all-to-all", "sent"):
        assert costs.get(name, 0) <= 1.001 * limits[name], name
    assert costs.keys() - {"seconds", "all-reduce"} <= limits.keys()  # no other kind of exchange


@pytest.mark.skipif(not _HAS_CUDNN, reason="requires jengine[gpu-compiler] and nvidia-cudnn-cu12")
def test_attention_is_cudnns_on_gpus():
    sizes = "model.module.vocab_size=512", "model.module.width=256", "train_dataloader.dataset.length=256"
    mesh = dict(data=1, fsdp=8, tensor=1)
    plan = _plan(f"{CONFIGS / 'lm.py'}:toy", "h100:8", *sizes, mesh=mesh, training_only=True)
    kernels = plan["programs"]["update"]["kernels"]
    assert sum(count for name, count in kernels.items() if name.startswith("__cudnn")) == 2 * 3  # each block, see above


def test_embedded_tokens_are_exchanged_and_not_the_embedding():
    words, width, examples, length = 32768, 256, 32, 128
    sizes = f"model.module.vocab_size={words}", f"model.module.width={width}", "parallel.fsdp_min_size=1024"
    data = f"train_dataloader.batch_size={examples}", f"train_dataloader.dataset.length={length}"
    mesh = dict(data=1, fsdp=4, tensor=1)
    plan = _plan(f"{CONFIGS / 'lm.py'}:toy", "v5e:2x2", *sizes, *data, mesh=mesh, training_only=True)
    collectives = _collectives(plan["programs"]["update"])
    assert collectives["all-to-all"]["size"] == 2 * examples // 4 * length * width * 2  # tokens of a chip and gradients
    # The head is gathered in bfloat16, forward and backward; the embedding, as large, is not.
    assert collectives["all-gather"]["size"] < 3 * words * width * 2


@pytest.mark.parametrize("chips", CHIPS)
def test_an_axis_of_experts_exchanges_tokens_in_the_place_of_the_parameters_of_all_experts(chips):
    width, hidden, experts, examples, length = 256, 512, 4, 4, 128
    sizes = dict(width=width, mlp_width=hidden, experts=experts, vocab_size=512, heads=4, depth=2)
    data = f"train_dataloader.batch_size={examples}", f"train_dataloader.dataset.length={length}"
    overrides = [*(f"model.module.{name}={value}" for name, value in sizes.items()), *data]
    config, size = f"{CONFIGS / 'lm.py'}:moe", parse_topology(chips).size
    meshes = dict(data=1, fsdp=size), dict(data=1, fsdp=1, expert=size)
    without, divided = (
        _plan(config, chips, *overrides, mesh=mesh, training_only=True)["programs"]["update"] for mesh in meshes
    )
    parameters = 2 * experts * 3 * width * hidden * 2  # in bfloat16, in two layers
    gathered, kept = (_collectives(program)["all-gather"]["size"] for program in (without, divided))
    assert gathered - kept > parameters
    assert divided["flops"] == without["flops"]
    assert divided["memory"]["parameters"] == without["memory"]["parameters"]


def test_the_optimizer_state_and_the_inputs_of_blocks_are_in_the_memory_of_the_host():
    sizes = "model.module.width=256", "model.module.heads=4", "model.module.depth=4", "parallel.fsdp_min_size=1024"
    settings = "parallel.offload=optimizer", "model.module.remat=offload"
    config, mesh = f"{CONFIGS / 'lm.py'}:toy", dict(data=1, fsdp=4, tensor=1)
    on_chips, on_host = (
        _plan(config, "v5e:2x2", *overrides, mesh=mesh, training_only=True)["programs"]["update"]
        for overrides in (sizes, (*sizes, *settings))
    )
    moments = 2 * on_chips["memory"]["parameters"]
    assert on_chips["host_memory"] == 0
    assert on_host["host_memory"] >= 0.99 * moments
    assert on_host["memory"]["optimizer state"] < 0.01 * on_chips["memory"]["optimizer state"]


def test_tokens_of_an_example_are_divided_and_logits_are_never_gathered():
    words, width, length, depth = 32768, 256, 8192, 2
    sizes = f"model.module.vocab_size={words}", f"model.module.width={width}", "model.module.heads=2"
    data = "train_dataloader.batch_size=1", f"train_dataloader.dataset.length={length}"
    mesh = dict(data=1, fsdp=1, context=2, tensor=2)
    plain, chunked = (
        _plan(f"{CONFIGS / 'lm.py'}:toy", "v5e:2x2", *sizes, *data, *chunk, mesh=mesh, training_only=True)["programs"][
            "update"
        ]
        for chunk in ((), ("model.module.logits_chunk=1024",))
    )
    keys = 2 * length * width // 2 * 2  # and values, of the heads of a chip, in bfloat16
    for program in (plain, chunked):
        gathered = _collectives(program)["all-gather"]["size"]
        head = words // 2 * width * 2  # the words of a chip
        assert program["kernels"] == {"tpu_custom_call": 4 * depth}  # forward, again, and two for the gradients
        assert 2 * depth * keys < gathered < 2 * depth * keys + 2 * head + 2e6  # forward and again in the backward pass
    logits = length // 2 * words // 2 * 2  # of the tokens and words of a chip
    temporaries = [program["memory"]["temporary buffers"] for program in (plain, chunked)]
    assert temporaries[1] < logits / 4 < logits < temporaries[0]


@pytest.mark.parametrize("chips", CHIPS)
def test_replicas_exchange_losses_while_they_accumulate_and_each_gradient_once_in_the_update(network, chips):
    plan = _plan(network, chips, "optim_wrapper.accumulative_counts=2")
    assert list(plan["programs"]) == ["init", "update", "accumulate", "chunk"]
    assert _collectives(plan["programs"]["accumulate"]) == {}
    update = _collectives(plan["programs"]["update"])
    assert list(update) == ["all-reduce"]
    assert 2 * UP <= update["all-reduce"]["size"] < 2.01 * UP


@pytest.mark.parametrize("chips", CHIPS)
def test_sharded_parameters_are_gathered_and_their_gradients_reduced_and_scattered(network, chips):
    size = parse_topology(chips).size
    plan = _plan(network, chips, "parallel.type=Pjit", mesh=dict(data=1, fsdp=size))
    update = plan["programs"]["update"]
    assert update["memory"]["parameters"] == 2 * UP // size
    assert _collectives(update)["reduce-scatter"]["size"] == 2 * UP
    assert "all-reduce" not in _collectives(update)


def test_between_slices_only_gradients_are_exchanged(network):
    mesh = dict(data=-1, fsdp=4, slices=dict(data=2))
    plan = _plan(network, "v5e:2x2", "parallel.type=Pjit", mesh=mesh, slices=2, training_only=True)
    assert plan["mesh"] == dict(data=2, fsdp=4, tensor=1)
    update = plan["programs"]["update"]
    assert _collectives(update)["reduce-scatter"]["size"] == 2 * UP  # within a slice
    assert _collectives(update)["all-reduce"]["size"] == pytest.approx(2 * UP / 4, rel=0.01)  # a shard, between them
    assert update["host_callbacks"] == 0


@pytest.mark.parametrize(("chips", "slices"), [("v5e:4x4", 2), ("v5p:4x4x4", 1)])
def test_all_meshes_of_a_search_compile(network, chips, slices):
    topology = parse_topology(chips, slices)
    candidates = [dict(mesh=mesh, overrides=[]) for mesh in iterate_meshes(topology.size, True, slices)]
    overrides = ["--config.parallel.type=Pjit", "--config.train_dataloader.batch_size=64"]
    results = list(compile_candidates(network, overrides, topology, candidates, training_only=True))
    assert len(results) == len(candidates) > 5
    assert [result.get("error") for result in results] == [None] * len(results)


@pytest.mark.parametrize("chips", CHIPS)
def test_what_layers_in_a_loop_exchange_grows_with_their_number(chips):
    overrides = "model.module.width=256", "model.module.heads=4", "parallel.fsdp_min_size=1024"
    config, mesh = f"{CONFIGS / 'lm.py'}:toy", dict(data=1, fsdp=parse_topology(chips).size)
    three, five, seven = (
        _plan(config, chips, *overrides, f"model.module.depth={depth}", mesh=mesh, training_only=True)["programs"][
            "update"
        ]
        for depth in (3, 5, 7)
    )
    sizes = [sum(row["size"] for row in program["collectives"]) for program in (three, five, seven)]
    assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0], rel=0.01)
    assert sizes[1] - sizes[0] > sizes[0] / 3
    assert five["unknown_loops"] == 0


@pytest.mark.parametrize("chips", CHIPS)
def test_a_chunk_with_accumulation_and_the_guard_exchanges_as_much_in_a_step_as_an_update_does(network, chips):
    sharded = "parallel.type=Pjit", "optim_wrapper.accumulative_counts=2"
    mesh = dict(data=1, fsdp=parse_topology(chips).size)
    plain = _plan(network, chips, *sharded, mesh=mesh)["programs"]
    guarded = _plan(network, chips, *sharded, "custom_hooks=[{'type': 'NumericsGuardHook'}]", mesh=mesh)["programs"]
    for programs in (plain, guarded):
        for name in ("update", "accumulate", "chunk"):
            exchanged, steps = _collectives(programs[name]), programs[name].get("steps", 1)
            assert exchanged["reduce-scatter"]["size"] == 2 * UP * steps  # not in each branch of the chunk
            assert exchanged["all-gather"]["size"] <= 2.01 * UP * steps
            assert "all-reduce" not in exchanged


@pytest.mark.parametrize("chips", ["v5e:2x4", *(pytest.param("h100:8", marks=chip.marks) for chip in CHIPS[1:])])
def test_a_transformer_gathers_no_more_with_the_guard_than_without(chips):
    sizes = dict(width=384, depth=6, heads=6, mlp_width=1024, vocab_size=6144)
    overrides = [f"model.module.{name}={value}" for name, value in sizes.items()]
    overrides += ["optim_wrapper.accumulative_counts=2", "train_cfg.steps_per_call=4"]
    config, mesh = f"{CONFIGS / 'lm.py'}:toy", dict(data=2, fsdp=4, tensor=1)
    plain = _plan(config, chips, *overrides, mesh=mesh)
    guarded = _plan(config, chips, *overrides, "custom_hooks=[{'type': 'NumericsGuardHook'}]", mesh=mesh)
    assert sum(math.prod(parameter["shape"]) for parameter in plain["parameters"]) == pytest.approx(15e6, rel=0.05)
    for name in ("update", "accumulate", "chunk"):
        before, after = (_collectives(plan["programs"][name]) for plan in (plain, guarded))
        assert before.keys() == after.keys() >= {"all-gather", "reduce-scatter"}
        for kind in before:
            assert after[kind]["size"] <= 1.05 * before[kind]["size"]


def test_the_formula_of_the_page_about_scale_has_the_memory_of_a_chip(memory_per_chip):
    size = dict(width=1024, depth=8, mlp_width=4096, vocab_size=16384)
    module = [f"model.module.{name}={value}" for name, value in dict(size, heads=8).items()]
    data = "train_dataloader.batch_size=8", "train_dataloader.dataset.length=1024"
    plan = _plan(
        f"{CONFIGS / 'lm.py'}:1b", "v5e:2x2", *module, *data, mesh=dict(data=1, fsdp=4, tensor=1), training_only=True
    )
    total = sum(memory_per_chip(8, 1024, **size, fsdp=4).values())
    assert plan["programs"]["update"]["total_memory"] == pytest.approx(total, rel=0.1)


def test_the_compiler_estimates_the_time_on_a_tpu(network):
    update = _plan(network, "v5e:2x2")["programs"]["update"]
    # forward and backward of two products, without the gradient of the input: 5 products of 512 examples
    assert update["flops"] == 5 * 2 * 512 * 512 * 2048
    assert update["seconds"] >= update["flops"] / 197e12
    assert 0 < update["utilisation"] <= 1


def test_the_exit_code_is_1_if_a_config_does_not_fit(network):
    command = "import sys; from jengine.cli import main; sys.exit(main())"
    arguments = ["plan", f"{network}:32768", "--topology", "v5e:1x1", "--json"]
    result = subprocess.run([sys.executable, "-c", command, *arguments], capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    plan = json.loads(result.stdout)
    assert plan["fits"] is False
    assert "Ran out of memory" in plan["programs"]["update"]["error"]  # parameters and Adam: 96 GiB
