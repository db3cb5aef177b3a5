"""Run the code of the pages and of the README."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
import site_pages

from jengine import Runner
from jengine.cli import main
from jengine.config import LOOPS, load_config, resolve
from jengine.data import ArrayDataset, Digits
from jengine.model import FunctionalModel
from tests.docs_pages import blocks_of
from tests.run_again import check_runs_of_page

DOCS = pathlib.Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize(
    "page",
    [
        "optim_tutorial.md",
        "own_step.md",
        *(pytest.param(page, marks=pytest.mark.many_processes) for page in ("finetuning.md", "distillation.md")),
    ],
)
def test_page_runs_from_top_to_bottom(page, run_page):
    run_page(page)


def test_the_page_on_finetuning_runs_without_its_run_with_lora(run_page):
    run_page("finetuning.md", only=lambda block: not re.search(r'type="LoRA"|adapter\.|qwix', block))


def test_hooks_of_the_hooks_page_run_in_chunks(run_page):
    names = run_page("hooks.md")
    programs, losses = names["runner"].programs, names["runner"].message_hub.get_scalar("train/loss").data[0]
    assert (programs.chunk.traces, programs.update.traces) == (1, 0)
    assert names["store"].losses == pytest.approx({20: losses[19], 40: losses[39], 60: losses[59]})
    assert float(names["smallest"].smallest) == pytest.approx(losses.min())
    assert float(names["runner"].hyperparams["noise"]) == pytest.approx(1 - 59 / 60)


def test_loop_of_the_runner_page_validates_after_each_pass(tmp_path, monkeypatch):
    assert "" not in LOOPS  # the first look-up imports the entries
    monkeypatch.setattr(LOOPS, "_entries", dict(LOOPS._entries))  # removes that of the page afterwards
    page = (DOCS / "runner.md").read_text()
    (block,) = [x for x in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "LOOPS" in x]
    names = {"__name__": "docs.runner"}
    exec(compile(block, "runner.md", "exec"), names)
    data = dict(batch_size=4, dataset=ArrayDataset(dict(x=np.ones((20, 2), np.float32))))
    runner = Runner(
        FunctionalModel(lambda: {"w": jnp.zeros(2)}, loss=_linear, predict=_linear),
        tmp_path,
        train_dataloader=data,
        train_cfg=dict(type=names["PassLoop"], max_iters=12, steps_per_call=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        val_dataloader=data,
        val_cfg=dict(),
        val_evaluator=dict(type="MeanLoss", loss=lambda predictions, batch: predictions),
    )
    runner.train()
    assert [iteration for _, iteration, _ in runner.validations] == [5, 10, 12]  # passes of 5 iterations


def test_model_with_several_outputs_of_the_model_page_trains_on_tuples(tmp_path):
    page = (DOCS / "model.md").read_text()
    (block,) = [x for x in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "class Backbone" in x]
    names = {"__name__": "docs.model"}
    exec(compile(block, "model.md", "exec"), names)
    data = dict(batch_size=24, dataset=names["dataset"])
    runner = Runner(
        names["model"],
        tmp_path,
        train_dataloader=data,
        train_cfg=dict(max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        val_dataloader=data,
        val_cfg=dict(),
        val_evaluator=names["val_evaluator"],
    )
    runner.train()
    assert runner.validations[-1][2] == {"accuracy/top1": 1.0}  # all labels are 0, and equal logits rank by index


def _linear(params, batch):
    return batch["x"] @ params["w"]


def save_picture(path, image):
    path.parent.mkdir()
    PIL.Image.fromarray((image[..., 0] * 255).round().astype(np.uint8)).save(path)


def test_code_of_the_predict_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = resolve(load_config(DOCS.parent / "configs" / "digits_cnn.py"))
    cfg["train_dataloader"]["num_batch_per_epoch"] = 1
    changes = dict(train_cfg=dict(max_epochs=1), val_dataloader=None, val_cfg=None, val_evaluator=None, visualizer=None)
    dataset = Digits("test")
    images = dataset.arrays["image"][:70]
    names = dict(dataset=dataset, images=images, batches=[dict(image=images)])
    names["runner"] = Runner.from_cfg({**cfg, **changes, "work_dir": "work_dirs/digits_cnn"})
    names["runner"].train()
    from_run, sampling, loaded, artifact = re.findall(
        r"```python\n(.*?)```", (DOCS / "predict.md").read_text(), flags=re.DOTALL
    )
    exec(compile(from_run, "predict.md", "exec"), names)
    expected = names["predictions"]
    assert expected.shape == (70, 10)
    exec(compile(sampling, "predict.md", "exec"), names)
    exec(compile(loaded, "predict.md", "exec"), names)
    np.testing.assert_allclose(names["logits"], expected, rtol=1e-4, atol=1e-5)
    save_picture(tmp_path / "pictures/0.png", images[0])
    (inferencer,) = re.findall(r"```py\n(.*?)```", (DOCS / "predict.md").read_text(), flags=re.DOTALL)
    *definitions, call = inferencer.strip().splitlines()
    exec(compile("\n".join(definitions), "predict.md", "exec"), names)
    assert eval(call, names) == {"predictions": [str(expected[0].argmax())], "visualization": None}
    pytest.importorskip("flatbuffers")
    assert (
        main(["ckpt", "export", "work_dirs/digits_cnn", "--jax-export", "digits.jaxexport", "--platforms", "cpu"]) == 0
    )
    exec(compile(artifact, "predict.md", "exec"), names)
    np.testing.assert_allclose(names["predict"](dict(image=images)), expected, rtol=1e-4, atol=1e-5)
    check_runs_of_page("predict.md", tmp_path)


def test_readme_example_runs(run_page):
    (block,) = blocks_of("README.md", "python")
    names = run_page("README.md", replace=("max_epochs=20", "max_epochs=2"))
    (errors,) = [metrics["mse"] for _, _, metrics in names["runner"].validations]
    assert errors < 5  # of the sum of eight sines, whose variance is 3.5
    assert len(block.strip().splitlines()) <= 30


def test_readme_links_to_pages_that_exist():
    readme = (DOCS.parent / "README.md").read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", readme):
        assert (DOCS.parent / link).exists(), link
    assert {"start.md", "how_do_i.md", "config.md"} <= set(re.findall(r"docs/(\w+\.md)", readme))


def test_each_page_is_once_in_the_menu_of_the_site():
    pages = [path.stem for path in DOCS.glob("*.md")]
    groups = site_pages.list_groups(pages)
    menu = [*site_pages.START, *site_pages.GUIDES, *(page for members in groups.values() for page in members)]
    assert len(menu) == len(set(menu))
    assert set(pages) <= set(menu)
    assert "own_step" in groups["Training techniques"]


def test_the_first_page_of_the_site_has_a_script_that_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"```python\n(.*?)```", (DOCS / "_gen" / "index.md").read_text(), flags=re.DOTALL)
    names = {"__name__": "first"}
    exec(compile(script.replace("max_epochs=20", "max_epochs=2"), "first.py", "exec"), names)
    ((_, _, metrics),) = names["runner"].validations
    assert metrics["accuracy/top1"] > 0.5  # 0.91 after 20 epochs


def test_hook_of_the_contributing_page_records_losses_in_chunks(tmp_path):
    page = (DOCS.parent / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names = {"__name__": "contributing"}
    exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    hook = names["RecordLossHook"](interval=4)
    runner = Runner(
        FunctionalModel(lambda: {"w": jnp.zeros(2)}, loss=_linear, predict=_linear),
        tmp_path,
        train_dataloader=dict(batch_size=4, dataset=ArrayDataset(dict(x=np.ones((32, 2), np.float32)))),
        train_cfg=dict(max_epochs=1, steps_per_call=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        custom_hooks=[hook],
    )
    runner.train()
    # the loss is w0 + w1, and each of them falls by the learning rate in each of the steps before
    assert hook.losses == pytest.approx({4: -0.6, 8: -1.4})


def test_figures_of_the_readme_are_those_of_the_results():
    root = DOCS.parent
    results, readme = (root / "benchmarks" / "RESULTS.md").read_text(), (root / "README.md").read_text()
    peers = results.partition("\n## Peers")[2].partition("\n## ")[0]
    measured = re.findall(r"^(\S.*?) {2,}([\d.]+) +([\d.]+) +([+-][\d.]+) ", peers, flags=re.MULTILINE)
    table = readme.partition("|---|---|---|---|\n")[2].partition("\n\n")[0]
    assert [tuple(cell.strip() for cell in row.split("|")[1:-1]) for row in table.splitlines()] == [
        (name.strip(), *figures) for name, *figures in measured
    ]
    ratio, interval = re.findall(
        r"^vit +plain .*? Runner .*? ([\d.]+) (\([\d.]+-[\d.]+\))", results, flags=re.MULTILINE
    )[0]
    assert f"is {ratio} {interval} times that of a hand-written loop" in " ".join(readme.split())
