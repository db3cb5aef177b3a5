"""Run the code blocks of all pages, build the parts of configs in them, and parse their commands."""

import pathlib
import re
import shlex
import shutil
import sys
import tomllib
import types
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jengine
from jengine import Runner, checkpoint, config
from jengine.cli.main import build_parser
from jengine.config import (
    DATASETS,
    FUNCTIONS,
    HOOKS,
    LOG_PROCESSORS,
    LOOPS,
    METRICS,
    MODELS,
    STRATEGIES,
    VISUALIZERS,
    paths,
)
from jengine.data import ArrayDataset, build_dataloader
from jengine.evaluation import build_evaluator
from jengine.evaluation.sections import split_dataloaders
from jengine.extras.networks import SmallCNN
from jengine.extras.report.run_table import read_table
from jengine.extras.weights import export_params
from jengine.extras.weights.array_rules import parse_rules
from jengine.logging import MessageHub
from jengine.model import CrossEntropy, FunctionalModel, LinenModel, NnxModel
from jengine.optim import build_optim_wrapper
from jengine.optim.schedules import build_param_schedulers, chain_of
from jengine.runner.config_checks import train_loop_config
from tests import run_again
from tests.docs_pages import PAGES, ROOT, TEXTS, blocks_of

# Pages whose code has tests of its own: in tests/test_docs.py, tests/config, tests/hooks, tests/optim and tests/parallel.
ELSEWHERE = (
    "devices.md",
    "distillation.md",
    "equinox.md",
    "finetuning.md",
    "hooks.md",
    "house.md",
    "imix.md",
    "optim.md",
    "optim_tutorial.md",
    "own_step.md",
    "predict.md",
)


PRETRAINED = pathlib.Path(__file__).parent.parent / "data" / "pretrained"


def execute(block):
    names = {}
    exec(block, names)
    return names


def build_sections(names):
    """Build the sections of a config among `names`; return the objects by name."""
    wrapper = build_optim_wrapper({"w": jnp.zeros(2)}, dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9)))
    length = dict(max_epochs=100, max_iters=10_000, epoch_length=100)
    builders = {
        "model": MODELS.build,
        "custom_hooks": lambda hooks: [build_hook(**hook) for hook in hooks],
        "default_hooks": lambda hooks: [build_hook(**hook) for hook in hooks.values() if hook],
        "optim_wrapper": lambda cfg: build_optim_wrapper({"predictor": {"w": jnp.zeros(2)}}, cfg),
        "param_scheduler": lambda cfg: build_param_schedulers(cfg, wrapper, **length),
        "train_dataloader": lambda cfg: build_dataloader(cfg, train=True),
        "val_dataloader": build_val_dataloaders,
        "train_cfg": lambda cfg: LOOPS.check(train_loop_config(cfg), runner=None, dataloader=None),
        "val_evaluator": build_evaluator,
        "visualizer": lambda cfg: VISUALIZERS.build({"type": "Visualizer", **cfg}, save_dir="images"),
        "log_processor": LOG_PROCESSORS.build,
        "parallel": STRATEGIES.build,
    }
    return {name: build(names[name]) for name, build in builders.items() if name in names}


def build_val_dataloaders(cfg):
    loaders = {name: build_dataloader(x, train=False) for name, x in split_dataloaders("val_dataloader", cfg).items()}
    return loaders.get("", loaders)


def build_hook(priority=None, **cfg):
    return HOOKS.build(cfg)


def class_names(objects):
    return [type(value).__name__ for value in objects]


def small_config(path="configs/digits_cnn.py"):
    """Return a config of the repository, shortened to two iterations of a small network."""
    cfg = config.resolve(config.load_config(ROOT / path))
    cfg["model"]["module"].update(widths=(4,), dropout=0.0)
    cfg["train_dataloader"]["num_batch_per_epoch"] = 2
    cfg.update(train_cfg=dict(max_epochs=1), param_scheduler=None, visualizer=None, work_dir="work_dirs/digits")
    return cfg


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run of two iterations on the digits, with a checkpoint."""
    runner = Runner.from_cfg({**small_config(), "work_dir": str(tmp_path_factory.mktemp("digits"))})
    runner.train()
    return runner


def test_every_page_with_code_has_a_test():
    pages = {page for page in PAGES if blocks_of(page, "python")}
    own = re.findall(r'run_page\(\s*"(\w+\.md)"', pathlib.Path(__file__).read_text())
    assert pages == {*own, *ELSEWHERE}
    assert {*pages, "README.md"} == set(run_again.PAGES)


def test_languages_of_blocks_are_those_that_are_tested():
    languages = {language for text in PAGES.values() for language in re.findall(r"^```(\w+)$", text, flags=re.M)}
    assert languages <= {"python", "bash", "text", "py"}
    for page in PAGES:
        for block in blocks_of(page, "py"):  # code of other libraries, which are not installed
            compile(block, page, "exec")


def test_figures_of_the_comparison_are_those_measured():
    measured = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    rows = re.findall(r"^\| (.+?) \| ([\d.]+) \| ([\d.]+) \| ([-+][\d.]+) \|$", PAGES["comparison.md"], flags=re.M)
    assert len(rows) >= 4
    for row in rows:
        assert re.search(r"\s+".join(map(re.escape, row)), measured), row


@pytest.mark.parametrize("page", [page for page in TEXTS if blocks_of(page, "bash")])
def test_commands_of_a_page_exist(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in "".join(blocks_of(page, "bash")).splitlines():
        words = shlex.split(line, comments=True)
        if "jengine" in words and "install" not in words:
            _, rest = build_parser().parse_known_args(words[words.index("jengine") + 1 :])
            assert all(argument.startswith("--config.") for argument in rest), line
        elif words[:1] == ["make"]:
            assert words[1] in targets, line
        elif words[:1] == ["python"] and words[1] != "-m":
            assert (ROOT / words[1]).exists(), line
        elif words[:2] == ["pip", "install"]:
            assert set(re.findall(r"\w+", "".join(re.findall(r"\[(.*)\]", line)))) <= set(extras), line
        else:
            assert words[:3] in ([], ["python", "-m", "build"]), line


def test_paths_and_links_of_the_page_for_agents_exist():
    links = re.findall(r"\]\(([^)#]+)", TEXTS["AGENTS.md"])
    paths = re.findall(r"`(?:\S+ )*((?:jengine|tests|configs|examples|docs|benchmarks)/[\w/.]*)`", TEXTS["AGENTS.md"])
    assert len(links) > 5 < len(paths)
    assert [path for path in [*links, *paths] if not (ROOT / path).exists()] == []


def test_sweeps_page(run_page, tmp_path, monkeypatch, capsys):
    from tests.extras.report.report_runs import write_run

    for name, lr, score in (("a", 1e-3, 0.8), ("b", 3e-3, 0.9)):
        scores = [{"accuracy/top1": score, "iter": 1, "mode": "val"}]
        write_run(tmp_path / "runs" / name, scores, config={"optim_wrapper": {"optimizer": {"lr": lr}}})
    monkeypatch.setattr(jengine, "sweep", lambda *args, **settings: read_table(["runs"]), raising=False)
    names = run_page("sweeps.md")
    assert next(names["get_sweep"]()) == {"lr": 1e-3, "weight_decay": 1e-4}
    assert capsys.readouterr().out.splitlines()[-1].startswith("{'optim_wrapper.optimizer.lr': 0.003} 0.9 ")


def test_checkpoints_page(run_page, capsys):
    def arrays(**shapes):
        return {name: {"kernel": np.ones(shape, np.float32)} for name, shape in shapes.items()}

    stored = arrays(encoder=(8, 64), stem=(3, 8), last=(64, 64), head=(64, 10))
    statistics = {"batch_stats": {"bn": {"mean": np.zeros(8, np.float32), "var": np.ones(8, np.float32)}}}
    meta = {"meta": {"epoch": 5, "iter": 100}}
    saver = checkpoint.Checkpointer("work_dirs/digits")
    saver.save("work_dirs/digits/epoch_5", {"params": stored, "model_state": statistics}, meta)
    saver.close()
    target = {**arrays(backbone=(8, 64), stem=(3, 8), last=(64, 64), head=(64, 100)), "neck": {"bias": np.zeros(4)}}
    (export,) = [block for block in blocks_of("checkpoints.md", "python") if "export_params" in block]
    before = {export.split("\n")[0]: dict(params=stored, model_state=statistics)}
    names = run_page("checkpoints.md", dict(params=target), before)
    assert names["ckpt"].meta["meta"]["epoch"] == 5
    jax.tree.map(np.testing.assert_array_equal, names["params"], stored)
    (hook,) = build_sections(names)["default_hooks"]
    assert [metric[:2] for metric in hook.monitored_metrics()] == [("save_best", "acc")]
    assert HOOKS.build(names["local"]).interval == 50
    for name in ("timed", "by_policy"):
        assert HOOKS.build(names[name]).file_names == {("", "iter_{}")}
    assert checkpoint.load("work_dirs/mine").meta["meta"]["iter"] == 100
    printed = capsys.readouterr().out.splitlines()
    assert "\n".join(printed[:3]) in PAGES["checkpoints.md"]  # the table below the block


def test_coming_from_page(run_page):
    names = run_page("coming_from.md")
    (*_, (_, _, metrics)) = names["runner"].validations
    assert metrics["accuracy/top1"] >= 0.8
    assert names["accuracy"] >= 0.8  # of the loop in plain JAX
    assert names["runner"].epoch < 20
    assert checkpoint.find_latest("work_dirs/task")


def test_config_page(run_page, tmp_path, monkeypatch):
    first, _, _, inherited, in_mmengines_style, _ = blocks_of("config.md", "python")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mnist.py").write_text(first)
    (tmp_path / "configs" / "mnist_lion.py").write_text(inherited)
    base = (
        "train_dataloader = dict(batch_size=32)\noptim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9))"
    )
    (tmp_path / "configs" / "mnist_base.py").write_text(base)
    (tmp_path / "configs" / "mnist_adamw.py").write_text(in_mmengines_style)
    monkeypatch.syspath_prepend(tmp_path / "configs")
    focal = types.ModuleType("my_losses")
    focal.focal = lambda outputs, batch, gamma: (outputs - batch) ** gamma
    monkeypatch.setitem(sys.modules, "my_losses", focal)
    names = run_page("config.md", skipped=[in_mmengines_style], names={"my_losses": focal})
    assert FUNCTIONS.build_function(names["loss"])(3.0, 1.0) == 4.0  # gamma=2
    assert FUNCTIONS.build_function(names["param_scheduler"])(0) == 0.1
    assert names["cfg"].optim_wrapper.optimizer.lr == 3e-4
    assert names["cfg"].custom_hooks[0]["momentum"] == 1e-3
    assert names["small"].custom_hooks[0].momentum == 1e-3
    lion = config.load_config("configs/mnist_lion.py")
    assert config.resolve(lion)["optim_wrapper"]["optimizer"] == dict(type="Lion", lr=1e-4)
    adamw = config.resolve(config.load_config("configs/mnist_adamw.py"))
    assert adamw["optim_wrapper"]["optimizer"] == dict(type="AdamW", lr=1e-3)
    assert (adamw["train_dataloader"]["batch_size"], adamw["work_dir"]) == (64, "runs/mnist_adamw")


def test_batches_page(run_page):
    names = run_page("batches.md")
    batch = dict(x=np.eye(2), label=np.array([0, 1]), weight=np.array([1.0, 0.0]))
    total, weight = names["weighted_loss"]({"w": np.eye(2)}, batch)["loss"]
    assert (float(total), float(weight)) == (pytest.approx(np.log(1 + np.exp(-1))), 1)


@pytest.mark.foreign
def test_graphs_of_the_batches_page_train(run_page):
    pytest.importorskip("jraph")
    names = run_page("batches.md")
    (block,) = blocks_of("batches.md", "py")
    exec(compile(block, "batches.md", "exec"), names)
    losses = names["runner"].message_hub.get_scalar("train/loss").data[0]
    assert losses[-1] < losses[0]


def test_data_page(run_page):
    names = run_page("data.md")
    built = build_sections(names)
    assert built["val_dataloader"].batch_size == 64
    assert len(names["loader"]) == 45  # 1,438 digits of the training split in batches of 32
    assert names["batch"]["image"].shape == (32, 8, 8, 1)


def test_how_do_i_page(run_page):
    names = run_page("how_do_i.md")
    settings = names["runner"].optim_wrapper.param_settings
    assert not any(name.startswith("conv0") for name in settings)
    assert settings["head.kernel"]["lr"] == 1e-2
    built = build_sections(names)
    assert built["train_dataloader"].batch_size == 64
    assert class_names(built["val_evaluator"].metrics) == ["Accuracy", "Confidence"]


def test_storage_page(run_page, tmp_path):
    names = run_page("storage.md")
    assert len(names["windows"]) == 7  # of 128 of 1,000 tokens
    runner = SimpleNamespace(is_main_process=True, local_dir=str(tmp_path), epoch=2)
    names["NoteHook"]().after_train_epoch(runner)
    assert (tmp_path / "notes.txt").read_text() == "epoch 2 is complete\n"


def test_ema_page(run_page):
    names = run_page("ema.md")
    (hook,) = build_sections(vars(names["config"]))["custom_hooks"]
    assert type(hook).__name__ == "EarlyStoppingHook"
    assert float(names["HalfLife"](updates=1).weight(0)) == 0.5
    assert int(names["state"].steps) == 1


def test_evaluation_page(run_page):
    names = run_page("evaluation.md")
    metric = METRICS.build("MeanAbsoluteDeviation")
    batch = {"target": jnp.array([1.0, 5.0, 9.0]), "mask": jnp.array([True, True, False])}
    assert metric.compute(metric.update(metric.init(), jnp.array([2.0, 2.0, 0.0]), batch)) == {"mean": 2.0}
    loaders = build_val_dataloaders(names["val_dataloader"])
    assert {name: loader.length for name, loader in loaders.items()} == {"clean": 3, "robust": 1}
    first, *_, last = (metrics["frechet_distance"] for _, _, metrics in names["runner"].validations)
    assert last < first  # the samples of the VAE approach the data
    own = build_evaluator(names["val_evaluator"][:2])  # the third metric is of a library that may not be installed
    assert own.names == ("accuracy", "average")


def test_rl_page(run_page):
    names = run_page("rl.md")
    returns = names["runner"].message_hub.get_scalar("train/return").data[0]
    assert returns[-10:].mean() > returns[5:15].mean()
    positions = np.asarray(names["replicas"].state.model_state)
    assert positions.shape == (jax.device_count(), 8)
    assert len(np.unique(positions)) == positions.size  # each replica has environments of its own
    assert names["agent"].state.params["w"] != 0
    counts = {name: int(optax.tree.get(state, "count")) for name, state in names["delayed"].state.opt_state.items()}
    assert counts == {"critic": 21, "actor": 10}


def test_scale_page(run_page, tmp_path):
    names = run_page("scale.md", dict(config=config.load_config(f"{ROOT / 'configs' / 'lm.py'}:toy")))
    dataset = config.resolve(names["config"])["train_dataloader"]["dataset"]
    np.save(tmp_path / "tokens.npy", np.arange(5000, dtype=np.uint16))
    windows = DATASETS.build({**dataset, "tokens": str(tmp_path / "tokens.npy")})
    assert windows[1]["targets"].tolist() == list(range(2049, 4097))


def test_language_page(run_page):
    names = run_page("language.md")
    row, tokenizer = names["row"], names["tokenizer"]
    assert {name: x.shape for name, x in row.items()} == dict.fromkeys(
        ["tokens", "targets", "segment_ids", "positions", "num_bytes"], (32,)
    )
    losses = names["runner"].message_hub.get_scalar("train/loss").data[0]
    assert losses[-1] < losses[0] / 2
    _, iteration, metrics = names["runner"].validations[-1]
    assert (iteration, metrics["questions/exact_match"]) == (60, 1.0)
    assert names["answers"][1].startswith(" math")
    assert names["tokens"].shape == (1, 8)
    assert {path.rpartition(".")[2] for path in paths.flatten(names["state"].params)} == {"lora_a", "lora_b"}
    with pytest.raises(FileNotFoundError, match=r"code\.jsonl"):
        build_dataloader(
            names["train_dataloader"] | {"dataset": names["train_dataloader"]["dataset"] | {"tokenizer": "bytes"}},
            train=True,
        )
    assert isinstance(tokenizer.decode(names["tokens"][0]), str)
    assert names["sampled"].shape == (1, 16)


def test_logging_page(run_page, monkeypatch):
    names = run_page("logging.md")
    assert names["line"].endswith("lr: 1.0000e-01  eta: 0:00:30  time: 0.0500  data_time: 0.0100  loss: 4.5000")
    loss = MessageHub.get_instance("demo").get_scalar("train/loss")
    assert float(loss.statistics("span")) == 9.0
    LOG_PROCESSORS.build(dict(type="LogProcessor", custom_cfg=names["custom_cfg"]))


def test_model_page(run_page, trained):
    class Linear(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(64, 10, rngs=rngs)

        def __call__(self, image):
            return self.linear(image.reshape(len(image), -1))

    adapters = dict(
        LinenModel=LinenModel, NnxModel=NnxModel, FunctionalModel=FunctionalModel, CrossEntropy=CrossEntropy
    )
    functions = dict(init=lambda: {"w": jnp.zeros(())}, loss=lambda params, batch: params["w"] * batch["image"].mean())
    sown = blocks_of("model.md", "python")[4].split("\n")[0]
    before = {
        blocks_of("model.md", "python")[3].split("\n")[0].rstrip(): dict(module=Linear),
        sown: dict(linen_module=SmallCNN(), nnx_module=Linear),
        "from jengine.model import FunctionalModel, autocast": dict(
            network=lambda params, image: params["w"] * image, **functions
        ),
    }
    before["FunctionalModel(init, loss, predict=None, module_types=None, train_step=None, trainable=None)"] = functions
    images = np.zeros((2, 8, 8, 1), np.float32)
    names = dict(adapters, module=SmallCNN(), loss=CrossEntropy(), nn=nn, runner=trained, images=images, paths=paths)
    names = run_page("model.md", names, before)
    assert names["logits"].shape == (2, 10)
    batch = dict(image=np.full((2, 3), 2.0, np.float32), target=np.zeros((2, 3), np.float32))
    losses, _ = names["model"].loss({"w": jnp.float32(3)}, {}, batch, rng=jax.random.key(0), hyperparams={})
    assert float(jnp.mean(jax.tree.leaves(losses)[0])) == 36.0  # (3 * 2 - 0)^2


def test_more_hooks_page(run_page):
    def augment(batch, rng):
        return batch

    names = run_page("more_hooks.md", dict(erase=augment, blur=augment, shift=lambda sample: sample))
    names.update(fit=lambda outputs, batch: outputs, extra=lambda outputs, batch: batch)
    assert names["loss"](1.0, 4.0, {"loss_lambda": 0.5}) == {"loss_fit": 1.0, "loss_extra": 2.0}
    built = build_sections(vars(names["config"]))
    assert class_names([built["model"], *built["custom_hooks"]]) == ["LinenModel", "PrepareTTAHook"]
    image = np.arange(4.0).reshape(1, 2, 2, 1)
    flipped = names["FlipTTA"](LinenModel(SmallCNN(), CrossEntropy())).augment({"image": image})[1]["image"]
    np.testing.assert_array_equal(flipped[0, :, :, 0], [[1, 0], [3, 2]])


def test_notebooks_page(run_page, trained):
    pytest.importorskip("plotly")
    shutil.copytree(trained.work_dir, "work_dirs/digits_cnn")
    assert repr(run_page("notebooks.md")["page"]) == "Report(digits_cnn)"
    assert pathlib.Path("report.html").stat().st_size > 1e6


def test_own_loop_page(run_page):
    names = run_page("own_loop.md")
    assert names["results"]["accuracy/top1"] > 0.8
    averages = names["run"].state.hook_state["EMAHook"].params
    batch = dict(image=np.stack([names["val_loader"].dataset[i]["image"] for i in range(8)]))
    np.testing.assert_array_equal(names["predict"](batch), names["model"].predict(averages, {}, batch))
    assert [epoch for epoch, _, _ in names["runner"].validations] == [1, 2, 3, 4, 5, 6]
    assert pathlib.Path("work_dirs/own_loop_in_a_runner/epoch_6").is_dir()
    block = blocks_of("own_loop.md", "python")[0].replace("work_dirs/own_loop", "killed")
    execute(block.replace("while run.epoch < epochs", "while run.epoch < 2"))
    resumed = execute(block)
    assert pathlib.Path(resumed["latest"]).name == "epoch_2"
    jax.tree.map(np.testing.assert_array_equal, resumed["run"].state, names["run"].state)


def test_pretrained_page(run_page, trained, tmp_path):
    params = dict(trained.state.params)
    export_params(params, tmp_path / "vit.safetensors")
    shutil.copytree(PRETRAINED / "llama", tmp_path / "weights" / "Llama-3.2-1B")
    shutil.copytree(PRETRAINED / "convnext", tmp_path / "weights" / "convnext-tiny-224")
    names = run_page("pretrained.md", dict(params=params), {"from jengine.extras import weights": dict(rename=[])})
    assert names["load_from"] == dict(path="old_run/state", item="model", optimizer=True)
    assert class_names([MODELS.build(names["model"])]) == ["LinenModel"]
    rules, timm = blocks_of("pretrained.md", "python")[1:3]
    assert [rule.options.stack for rule in parse_rules(execute(rules)["rename"])] == [0, None, None, None, None]
    assert re.sub(*execute(timm)["rename"][1], "blocks.3.mlp.fc1.weight") == "layers_3.fc1.weight"
    np.testing.assert_array_equal(names["params"]["conv0_0"]["kernel"], params["conv0_0"]["kernel"])


def test_runner_page(run_page):
    first = blocks_of("runner.md", "python")[0].split("\n")[0]
    model = FunctionalModel(lambda: {"w": jnp.zeros(2)}, lambda params, batch: (batch["x"] @ params["w"] - 1) ** 2)
    data = ArrayDataset(dict(x=np.ones((8, 2), np.float32)))
    own = dict(
        model=model,
        work_dir="work_dirs/own",
        dataloader=dict(batch_size=4, dataset=data),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
    )
    names = dict(Runner=Runner, load_config=small_config, data=dict(image=np.zeros((3, 8, 8, 1), np.float32)))
    names = run_page("runner.md", names, {first: own})
    assert int(names["state"].step) == 2
    assert names["arrays"].shape == (3, 10)
    assert set(names["metrics"]) == {"accuracy/top1", "loss"}


def test_schedules_page(run_page, capsys):
    names = run_page("schedules.md", dict(optax=optax))
    printed = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert printed == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert names["chain"].at(30)[0]["lr"] == pytest.approx(0.01)
    wrapper = build_optim_wrapper({"w": jnp.zeros(2)}, dict(optimizer=dict(type="SGD", lr=0.1)))
    cfg = dict(type="InverseSqrtLR", by_epoch=False, warmup=2)
    build_param_schedulers(cfg, wrapper, max_epochs=None, max_iters=9, epoch_length=None)
    assert chain_of(wrapper).at([0, 1, 7])[0]["lr"].tolist() == pytest.approx([0.05, 0.1, 0.05])
    assert names["schedulers"][0].state_dict() == names["state"][0]
    # the last one is an optax schedule; the list before it is the first example
    source = blocks_of("schedules.md", "python")
    for block in (source[0], source[3].split("\n")[0]):
        parts = {"optax": optax}
        exec(block, parts)
        build_sections(parts)
    for line in [source[2], *source[3].splitlines()[1:]]:
        build_sections({"param_scheduler": eval(line.replace("\n", " "), {"optax": optax})})


def test_segmentation_page(run_page):
    names = run_page("segmentation.md")
    built = build_sections(vars(names["config"]))
    assert class_names([built["visualizer"], *built["default_hooks"]]) == ["LocalVisualizer", "SegVisualizationHook"]
    assert list(pathlib.Path("work_dirs/images").rglob("*.png"))


def test_selfsup_page(run_page):
    names = run_page("selfsup.md")
    assert float(names["runner"].hyperparams["loss_lambda"]) == 0.5
    assert names["runner"].programs.update.traces == 1
    features = jnp.eye(64)[:2]
    names.update(encode=lambda params, batch: features, compare=lambda features, labels: features.sum())
    losses, state = names["loss"]({}, names["model_state"], {"index": jnp.array([0, 3])})
    assert float(losses["loss"]) == 2.0
    np.testing.assert_allclose(np.asarray(state["bank"].features)[0], features[0], atol=1e-6)
    image_module = pytest.importorskip("PIL.Image")
    assert image_module.open("work_dirs/masks/vis_data/vis_image/first_1.png").size == (64, 32)


def test_parts_of_configs_on_the_selfsup_page():
    hooks = []
    for block in blocks_of("selfsup.md", "python"):
        if "custom_hooks = [" in block:
            parts = {}
            exec(block, parts)
            hooks += class_names(build_sections(parts)["custom_hooks"])
    assert hooks == ["SimSiamHook", "SwAVHook", "DeepClusterHook"]


def test_speed_page(run_page, trained, tmp_path):
    runner = Runner.from_cfg({**small_config(), "work_dir": str(tmp_path / "speed")})
    names = run_page("speed.md", dict(runner=runner))
    assert runner.iter == 2
    build_sections(names)


def test_start_page(run_page, tmp_path):
    names = run_page("start.md")
    cfg = config.resolve(names["get_config"]())
    runner = Runner.from_cfg({**cfg, "work_dir": str(tmp_path / "start")})
    assert runner.is_training_configured
    assert cfg["train_cfg"]["max_epochs"] == 20


def test_visualization_page(run_page):
    names = run_page("visualization.md")
    assert [(row["step"], row["loss"]) for row in names["rows"]] == [(10, 0.5)]
    assert "ClassVisualizer" in VISUALIZERS
