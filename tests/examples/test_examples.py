"""Every config and example trains for a few iterations."""

import functools
import importlib
import pathlib

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

from jengine import Runner, load_config, load_model
from jengine.cli import main
from jengine.config import format_config, parse_config, resolve, write_config
from jengine.config.modules import importable
from jengine.optim import OptimWrapper
from jengine.train import build_train_step, create_train_state
from tests.run_again import Again, check_runs_again, find_runs, has_checkpoint, train_again

ROOT = pathlib.Path(__file__).parent.parent.parent
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.py") if "def get_config" in path.read_text())
EXAMPLES = {
    "nnx_model": dict(max_epochs=2),
    "plain_functions": dict(max_iters=30),
    "own_loop": dict(epochs=1),
    "finetune_timm": dict(max_iters=100),
    "gan": dict(max_iters=30),
    "segment_digits": dict(max_epochs=2, train_images=128),
    "simsiam": dict(max_epochs=4),
    "densecl": dict(max_iters=30),
    "swav": dict(max_epochs=5),
    "deepcluster": dict(max_epochs=5),
    "odc": dict(max_epochs=5),
    "many_hooks": dict(max_epochs=6, target_accuracy=0.3),
    "imix_debug": dict(total_epochs=2),
    "shard_map_loop": dict(steps=60),
    "pmap_loop": dict(steps=60),
    "ppo": dict(max_iters=20, envs=8, length=32, save_every=10),
    "dpo": dict(max_iters=20, pretrain_iters=40),
    "pipeline": dict(max_epochs=2),
}


def load_example(name):
    """Return the module, importable under this name as next to a user's config."""
    with importable(ROOT / "examples"):
        return importlib.import_module(name)


@pytest.fixture(autouse=True)
def runs_again(request, tmp_path):
    """Check after each test that the config in the work dir describes the run, or that the log names what it lacks."""
    yield
    # environments on the host ask the Runner for its parameters
    again = Again(lacks=frozenset({"train_dataloader"} if "[host" in request.node.name else ()))
    for work_dir in find_runs(tmp_path):
        check_runs_again(work_dir, again)


def load_published(path):
    return resolve(load_config(f"{path}:toy" if path.stem == "lm" else str(path)))


def run_shortly(cfg, work_dir):
    """Train for four iterations with a validation and a checkpoint, and return the Runner."""
    by_epoch = cfg["train_cfg"].get("by_epoch", True)
    cfg["train_cfg"].update({"max_epochs": 1} if by_epoch else {"max_iters": 4, "val_interval": 2})
    cfg["train_dataloader"]["num_batch_per_epoch"] = 4
    for scheduler in cfg["param_scheduler"]:  # full-length schedules that end early
        scheduler.setdefault("end", 20)
    cfg["default_hooks"]["logger"] = dict(type="LoggerHook", interval=2)
    runner = Runner.from_cfg({**cfg, "work_dir": work_dir})
    runner.train()
    return runner


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_published_config_trains_validates_and_saves(path, tmp_path):
    pytest.importorskip("sklearn")
    runner = run_shortly(load_published(path), tmp_path)
    assert runner.state.step == 4
    assert runner.validations
    assert (tmp_path / "last_checkpoint").exists()
    results = runner.test()
    name, low, high = {"lm": ("loss", 0.0, 6.0), "instruct": ("perplexity", 1.0, 400.0)}.get(
        path.stem, ("accuracy/top1", 0.0, 1.0)
    )
    assert low <= results[name] <= high


@pytest.mark.many_processes
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_published_config_runs_again_is_loaded_and_exported(path, tmp_path):
    pytest.importorskip("sklearn")
    cfg = {**load_published(path), "randomness": dict(seed=0)}
    runner = run_shortly(cfg, tmp_path / "first")
    again = run_shortly(resolve(load_config(tmp_path / "first" / "config.py")), tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, again.state.params, runner.state.params)
    batch = next(iter(runner.test_dataloader))
    if path.stem != "lm":  # its bfloat16 numbers depend on the mesh
        found = load_model(tmp_path / "again")(batch)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, runner.predict([batch]))
    command = ["ckpt", "export", str(tmp_path / "again"), "--jax-export", str(tmp_path / "model.bin")]
    assert main([*command, "--platforms", "cpu", "--batch-size", "2"]) == 0


VARIANTS = [f"lm.py:{size}" for size in ("toy", "tiny", "124m", "1b", "7b", "moe")]
VARIANTS += ["finetune_vit.py:vit.safetensors", "instruct.py:weights/Llama-3.2-1B"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_config_that_a_variant_leaves_is_equal(variant, tmp_path):
    cfg = resolve(load_config(f"{ROOT / 'configs'}/{variant}"))
    text, problems = format_config(cfg)
    assert problems == []
    assert parse_config(text) == cfg
    write_config(text, tmp_path / "written.py")
    assert resolve(load_config(tmp_path / "written.py")) == cfg


BY_HAND = {"own_loop", "shard_map_loop", "pmap_loop"}  # loops without a Runner, which leave no config
AGAIN = {  # the others, with sizes for a checkpoint
    "finetune_timm": dict(max_iters=2),
    "nnx_model": dict(max_epochs=5),
    "plain_functions": dict(max_iters=3),
    "gan": dict(max_iters=3),
    "segment_digits": dict(max_epochs=1, train_images=64),
    "simsiam": dict(max_epochs=1),
    "densecl": dict(max_iters=3),
    "swav": dict(max_epochs=1),
    "deepcluster": dict(max_epochs=1),
    "odc": dict(max_epochs=1),
    "many_hooks": dict(max_epochs=5, target_accuracy=1.0),
    "imix_debug": dict(total_epochs=1),
    "ppo": dict(max_iters=10, envs=8, length=32),
    "dpo": dict(max_iters=2, pretrain_iters=2),
    "pipeline": dict(max_epochs=1),
}


def test_every_config_and_example_is_tested_and_trains_again():
    flat = {"segment_vit", "simsiam_lars"}  # in tests/test_docs_recipes.py
    assert {path.stem for path in (ROOT / "configs").glob("*.py")} == {path.stem for path in CONFIGS} | flat
    names = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"experiment"}  # it has test_experiment.py
    assert names == {*EXAMPLES} == {*AGAIN, *BY_HAND}


@pytest.mark.many_processes
@pytest.mark.parametrize("name", AGAIN)
def test_the_config_that_an_example_leaves_trains_again_and_is_exported(name, tmp_path):
    work_dir = tmp_path / "first"
    load_example(name).main(work_dir=str(work_dir), **AGAIN[name])
    again = Again(exports=name not in ("gan", "ppo"))  # they predict nothing
    for run in find_runs(tmp_path):
        train_again(run, again)
    assert has_checkpoint(work_dir)


def test_the_nnx_example_learns(tmp_path):
    assert load_example("nnx_model").main(work_dir=tmp_path, **EXAMPLES["nnx_model"])["accuracy/top1"] > 0.7


def test_the_plain_functions_example_increases_its_penalty_and_averages_weights(tmp_path):
    runner = load_example("plain_functions").main(work_dir=tmp_path, **EXAMPLES["plain_functions"])
    assert runner.hyperparams["l2"] == pytest.approx(1e-3 * 29 / 30)
    assert runner.programs.update.traces == 1
    average = runner.state.hook_state["Average"]["kernel"]
    assert 0 < float(abs(average).sum()) < float(abs(runner.state.params["kernel"]).sum())


def test_the_own_loop_example_learns():
    assert load_example("own_loop").main(**EXAMPLES["own_loop"]) > 0.15


@pytest.mark.parametrize(
    ("max_iters", "accuracy"), [(30, 0.15), pytest.param(100, 0.6, marks=pytest.mark.many_processes)]
)  # 0.1 by chance; a full run reaches 0.89
def test_the_finetuning_example_trains_updates_of_a_transformer_in_timms_layout(tmp_path, max_iters, accuracy):
    safetensors = pytest.importorskip("safetensors.numpy")
    runner = load_example("finetune_timm").main(work_dir=str(tmp_path), max_iters=max_iters)
    assert runner.validations[-1][2]["accuracy/top1"] > accuracy
    stored = safetensors.load_file(tmp_path / "pretrained" / "timm.safetensors")
    assert stored["blocks.1.attn.qkv.weight"].shape == (96, 32)
    assert stored["pos_embed"].shape == (1, 37, 32)  # of a 6x6 grid; that of the run is 4x4
    frozen = runner.state.model_state["frozen"]
    np.testing.assert_array_equal(frozen["layers_1"]["fc1"]["kernel"], stored["blocks.1.mlp.fc1.weight"].T)
    exported = safetensors.load_file(tmp_path / "model.safetensors")
    assert exported["layers.1.fc1.weight"].shape == (64, 32)
    assert not np.array_equal(exported["layers.1.fc1.weight"], stored["blocks.1.mlp.fc1.weight"])


def test_the_gan_example_trains_both_networks_in_one_program(tmp_path):
    gan = load_example("gan")
    runner = gan.main(work_dir=tmp_path, **EXAMPLES["gan"])
    assert runner.programs.update.traces == 1
    counts = {name: int(optax.tree.get(state, "count")) for name, state in runner.state.opt_state.items()}
    assert counts == {"disc": 60, "gen": 30}
    assert runner.optim_wrapper.get_lr() == {"disc.lr": [4e-4], "gen.lr": [1e-3]}  # after the warm-up
    text = next(tmp_path.glob("*/*.log")).read_text()
    assert "disc.lr: 4.0000e-04 gen.lr:" in text or "Saving checkpoint" in text


def test_the_preference_example_has_the_loss_of_the_paper():
    dpo = load_example("dpo")
    model = dpo.PreferenceModel(nn.Sequential([nn.Embed(dpo.NUMBERS, 8), nn.Dense(dpo.NUMBERS)]))
    batch = {name: x[:4] for name, x in dpo.Answers(True).arrays.items()}
    params, reference = (model.init(jax.random.key(i), batch)[0] for i in range(2))

    def log_prob(weights, tokens):
        logits = np.asarray(model.module.apply({"params": weights}, tokens[:, :-1]), np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return np.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0].sum(axis=1)

    ratios = [log_prob(params, batch[name]) - log_prob(reference, batch[name]) for name in ("chosen", "rejected")]
    margin = 0.1 * (ratios[0] - ratios[1])
    wrapper = OptimWrapper(optax.sgd(0.0))
    state = create_train_state(params, {}, wrapper, rng=jax.random.key(0))
    hyperparams = {**wrapper.hyperparams, "reference": dict(params=reference, model_state={})}
    _, metrics = build_train_step(model, wrapper)(state, batch, hyperparams)
    np.testing.assert_allclose(metrics["loss"], np.log1p(np.exp(-margin)).mean(), rtol=1e-5)  # equation 7
    np.testing.assert_allclose(metrics["margin"], margin.mean(), rtol=1e-4)


@pytest.mark.many_processes
def test_the_preference_example_counts_up_in_the_end(tmp_path):
    dpo = load_example("dpo")
    runner = dpo.main(work_dir=str(tmp_path), **EXAMPLES["dpo"])
    margins = runner.message_hub.get_scalar("train/margin").data[0]
    assert abs(margins[0]) < 1e-5  # the model starts as the reference
    assert margins[-1] > 1
    assert dpo.measure(runner) > 0.8  # 0.5 before


@pytest.mark.parametrize("stages", [2, 4])
def test_the_pipeline_example_has_the_values_and_gradients_of_one_device(stages):
    pipeline = load_example("pipeline").pipeline
    rng = np.random.default_rng(0)
    params = dict(w=rng.standard_normal((stages, 4, 4)), b=rng.standard_normal((stages, 4)))
    x = rng.standard_normal((12, 3, 4))

    def loss(params, x):
        return (pipeline(lambda p, x: np.tanh(1) * x + jax.nn.tanh(x @ p["w"] + p["b"]), params, x, 6) ** 3).sum()

    step = jax.value_and_grad(loss, argnums=(0, 1))
    expected = jax.jit(step)(params, x)
    mesh = jax.make_mesh((stages,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:stages])
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda params, x: step(params, x)).lower(params, x).compile()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), compiled(params, x), expected)
    assert compiled.as_text().count(" collective-permute(") == 2  # one loop forward, one backward


@pytest.mark.many_processes
def test_the_pipeline_example_trains_as_on_one_device_with_a_stage_on_each(tmp_path):
    main = load_example("pipeline").main
    runs = [main(work_dir=str(tmp_path / str(n)), stages=n, **EXAMPLES["pipeline"]) for n in (1, 2)]
    losses = [run.message_hub.get_scalar("train/loss").data[0] for run in runs]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    kernel = runs[1].state.params["blocks"]["Dense_0"]["kernel"]
    assert kernel.shape == (2, 32, 128)
    assert kernel.addressable_shards[0].data.shape == (1, 32, 128)


PPO_ON_HOST = pytest.param("host", None, marks=pytest.mark.many_processes)
PPO_ON_DEVICES = pytest.param("host", dict(type="DataParallel", devices=4), marks=pytest.mark.many_processes)


@pytest.mark.parametrize(("env", "parallel"), [("jax", None), PPO_ON_HOST, PPO_ON_DEVICES])
def test_the_ppo_example_learns_and_resumes_with_the_same_bits(tmp_path, env, parallel):
    train = functools.partial(load_example("ppo").main, env, parallel=parallel, **EXAMPLES["ppo"])
    runner = train(work_dir=tmp_path / "whole")
    returns = runner.message_hub.get_scalar("train/return").data[0]
    assert returns[-5:].mean() > 3 * returns[:3].mean()
    again = train(work_dir=tmp_path / "resumed", resume=str(tmp_path / "whole" / "iter_10"))
    whole, resumed = (jax.tree.leaves(jax.device_get(run.state)) for run in (runner, again))
    assert all(np.array_equal(a, b) for a, b in zip(whole, resumed, strict=True))
    np.testing.assert_array_equal(again.message_hub.get_scalar("train/return").data[0], returns)


def test_the_segmentation_example_learns_and_draws_predictions(tmp_path):
    pytest.importorskip("PIL")
    metrics = load_example("segment_digits").main(work_dir=tmp_path, **EXAMPLES["segment_digits"])
    assert metrics["mIoU"] > 0.4  # predicting background everywhere gives 0.88 / 3
    image_names = sorted(path.name for path in tmp_path.glob("*/vis_data/vis_image/*.png"))
    assert image_names == sorted(f"val_{i}_8.png" for i in range(96, 128))  # the fourth batch of 32, at iteration 8


def test_the_simsiam_example_fixes_the_predictor_and_learns_features(tmp_path):
    runner, learned, random = load_example("simsiam").main(work_dir=tmp_path, **EXAMPLES["simsiam"])
    assert runner.programs.update.traces == 1
    rates = {bool(group.get("fix_lr")): group["lr"] for group in runner.optim_wrapper.param_groups}
    assert rates[True] == 0.1
    assert rates[False] == pytest.approx(0.0146447, abs=1e-6)  # 0.1 * (1 + cos(3 pi / 4)) / 2 in the fourth epoch
    assert 0.6 < learned <= 1.0  # 0.1 by chance; a full run beats the random projections
    assert random == pytest.approx(0.929, abs=0.005)


def test_the_densecl_example_turns_on_the_dense_loss_without_recompilation(tmp_path):
    runner, learned, _ = load_example("densecl").main(work_dir=tmp_path, **EXAMPLES["densecl"])
    assert runner.programs.update.traces == 1
    assert float(runner.hyperparams["loss_lambda"]) == 0.5
    assert 0.8 < learned <= 1.0


@pytest.fixture(params=[5, pytest.param(20, marks=pytest.mark.many_processes)], ids=["5 epochs", "20 epochs"])
def train_beyond_projections(request, tmp_path):
    """Run an example; in 20 epochs the worst of the seeds 0 to 4 reached 0.9833 (swav), 0.9694 (deepcluster) and 0.9721 (odc)."""

    def run(name):
        runner, learned, random = load_example(name).main(work_dir=tmp_path, **{**EXAMPLES[name], "max_epochs": request.param})
        assert runner.programs.update.traces == 1
        assert random == pytest.approx(0.929, abs=0.005)
        assert learned > (random + 0.03 if request.param == 20 else 0.8)
        return runner

    return run


def test_the_swav_example_beats_random_projections_with_its_queue_in_use(train_beyond_projections, tmp_path):
    runner = train_beyond_projections("swav")
    queue = runner.state.hook_state["SwAVHook"]
    assert queue.use_queue
    assert queue.rows.shape == (2, 384, 128)  # two views, three batches of 128
    assert (tmp_path / "queue.npy").exists()


def test_the_deepcluster_example_beats_random_projections_with_its_clusters(train_beyond_projections, tmp_path):
    runner = train_beyond_projections("deepcluster")
    epochs = {int(path.stem.split("_")[-1]) for path in tmp_path.glob("cluster_epoch_*.npy")}
    assert epochs == {runner.max_epochs // 5 * i for i in range(6)}
    assert set(runner.train_dataloader.dataset.pseudo_labels) == set(range(40))


def test_the_odc_example_beats_random_projections_with_changing_labels(train_beyond_projections, tmp_path):
    runner = train_beyond_projections("odc")
    labels = runner.state.model_state["bank"].labels
    assert (labels != np.load(tmp_path / "cluster_epoch_0.npy")).mean() > 0.1  # compared with k-means before training
    assert set(labels.tolist()) == set(range(40))
    assert runner.state.model_state["loss_weight"].sum() == pytest.approx(1.0)


def test_own_loops_over_devices_train_equally_under_shard_map_and_pmap():
    accuracies = {name: load_example(name).main(**EXAMPLES[name]) for name in ("shard_map_loop", "pmap_loop")}
    assert min(accuracies["shard_map_loop"]) > 0.85  # of the weights, and of their average, which lags behind
    # up to compiler-dependent rounding, which may change the prediction of one or two of the 359 digits
    assert accuracies["pmap_loop"] == pytest.approx(accuracies["shard_map_loop"], abs=0.01)
