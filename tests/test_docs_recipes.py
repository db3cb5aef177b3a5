"""Run the recipes of the pages on segmentation and self-supervised learning, and their configs."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from jengine import Runner
from jengine.config import OPTIMIZERS, load_config, resolve
from jengine.optim import build_optim_wrapper
from tests.run_again import check_run

ROOT = pathlib.Path(__file__).parent.parent
PARAMS = {
    "backbone": {
        "patch_embed": {"kernel": jnp.ones((3, 3, 1, 4)), "bias": jnp.ones(4)},
        "pos_embed": jnp.ones((1, 4, 4)),
        "cls_token": jnp.ones((1, 1, 4)),
        "layers_0": {"fc": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}, "norm": {"scale": jnp.ones(4)}},
        "layers_1": {"fc": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}, "norm": {"scale": jnp.ones(4)}},
        "bn": {"scale": jnp.ones(4)},
    },
    "head": {"kernel": jnp.ones((4, 2))},
}


def read_blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)


def build_wrappers(page):
    """Return the settings by parameter of each `optim_wrapper` with a real rate in a page."""
    blocks = [block for block in read_blocks(page) if block.startswith("optim_wrapper = dict(\n    optimizer=")]
    names = [{} for _ in blocks]
    for block, variables in zip(blocks, names, strict=True):
        exec(compile(block, page, "exec"), variables)
    return [build_optim_wrapper(PARAMS, variables["optim_wrapper"]).param_settings for variables in names]


def test_the_segmentation_recipes_set_decays_and_rates():
    vit, layers = build_wrappers("segmentation.md")
    decays = {path: setting["weight_decay"] for path, setting in vit.items()}
    assert decays["backbone.pos_embed"] == decays["backbone.layers_1.norm.scale"] == 0
    assert decays["backbone.layers_1.fc.kernel"] == 0.01
    rates = {path: setting["lr"] for path, setting in layers.items()}
    assert rates["head.kernel"] == pytest.approx(1e-4)
    assert rates["backbone.layers_1.fc.kernel"] == pytest.approx(1e-4 * 0.9)
    assert rates["backbone.patch_embed.kernel"] == pytest.approx(1e-4 * 0.9**3)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_self_supervised_recipes_set_decays_rates_and_exclusions():
    wrappers = [w for w in build_wrappers("selfsup.md") if "backbone.bn.scale" in w]
    lars, mae, finetuning = (w for w in wrappers if w["head.kernel"]["lr"] != 0.05)
    assert lars["backbone.bn.scale"]["lars_exclude"] is True
    assert lars["head.kernel"]["lr"] == 4.8
    assert mae["backbone.cls_token"]["weight_decay"] == 0
    assert mae["head.kernel"]["lr"] == pytest.approx(0.0024)
    assert finetuning["head.kernel"]["lr"] == pytest.approx(2e-3)
    assert finetuning["backbone.layers_1.fc.kernel"]["lr"] == pytest.approx(2e-3 * 0.65)
    assert finetuning["backbone.layers_1.fc.bias"]["weight_decay"] == 0


def test_the_segmentation_config_trains_validates_and_draws(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("PIL")
    cfg = resolve(load_config(ROOT / "configs" / "segment_vit.py", [f"work_dir={tmp_path}"]))
    cfg["train_cfg"].update(max_iters=4, val_interval=4)
    cfg["custom_hooks"][0]["begin_iter"] = 2
    cfg["param_scheduler"] = []
    cfg["default_hooks"]["visualization"]["interval"] = 5
    for mode in ("val", "test"):
        cfg[f"{mode}_dataloader"]["num_batch_per_epoch"] = 5
    runner = Runner.from_cfg(cfg)
    runner.train()
    assert {"aAcc", "mIoU", "mAcc"} <= {*runner.validations[-1][2]}
    rates = {path: setting["lr"] for path, setting in runner.optim_wrapper.param_settings.items()}
    assert rates["decode_head.kernel"] == pytest.approx(3e-3)
    assert rates["backbone.patch_embed.kernel"] == pytest.approx(3e-3 * 0.8**4)
    assert len(list(tmp_path.glob("*/vis_data/vis_image/*.png"))) == 64  # the fifth batch
    check_run(tmp_path)


def test_the_self_supervised_config_trains_with_a_constant_rate_of_the_predictor(tmp_path):
    pytest.importorskip("sklearn")
    cfg = resolve(load_config(ROOT / "configs" / "simsiam_lars.py", [f"work_dir={tmp_path}"]))
    cfg["train_cfg"]["max_epochs"] = 2
    cfg["train_dataloader"].update(num_batch_per_epoch=2, batch_size=16)
    cfg["param_scheduler"] = [dict(type="ExponentialLR", gamma=0.5)]
    runner = Runner.from_cfg(cfg)
    runner.train()
    rates = {path: setting["lr"] for path, setting in runner.optim_wrapper.param_settings.items()}
    assert (rates["predictor.fc0.kernel"], rates["backbone.fc0.kernel"]) == (1.0, 0.5)
    assert -1 <= runner.message_hub.get_scalar("train/loss").current() <= 1
    predictions = runner.predict({"image": jnp.zeros((3, 8, 8, 1))}, batch_size=3)
    assert jax.tree.map(jnp.shape, predictions) == {"features": (3, 16)}
    check_run(tmp_path)


def test_an_optimizer_and_a_loop_of_ones_own_run_as_their_pages_show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "" not in OPTIMIZERS  # the first look-up imports the entries
    monkeypatch.setattr(OPTIMIZERS, "_entries", dict(OPTIMIZERS._entries))  # removes that of the page afterwards
    first, *others = read_blocks("optim.md")
    (own,) = [block for block in others if "SignMomentum" in block]
    names = {"__name__": "docs.optim"}
    exec(compile(first, "optim.md", "exec"), names)
    exec(compile(own, "optim.md", "exec"), names)
    wrapper = names["wrapper"]
    updates, _ = wrapper.tx.update({"w": jnp.array([3.0, -2.0])}, wrapper.tx.init({"w": jnp.zeros(2)}))
    assert updates["w"].tolist() == pytest.approx([-0.01, 0.01])
    (loop,) = [block for block in read_blocks("checkpoints.md") if "checkpoint.restore(" in block]
    names = {}
    exec(compile(loop, "checkpoints.md", "exec"), names)
    assert names["meta"]["data_position"] == 100
    assert names["state"]["params"]["w"].tolist() == [1, 1, 1]


def test_the_flat_config_of_the_config_page_loads(tmp_path):
    (block,) = [block for block in read_blocks("config.md") if "mnist_adamw" in block]
    (tmp_path / "mnist_base.py").write_text(
        "train_dataloader = dict(batch_size=128)\noptim_wrapper = dict(optimizer=dict(type='SGD', momentum=0.9))"
    )
    (tmp_path / "mnist_adamw.py").write_text(block)
    assert resolve(load_config(tmp_path / "mnist_adamw.py")) == dict(
        train_dataloader=dict(batch_size=256),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3)),
        train_cfg=dict(by_epoch=True, max_epochs=5),
        work_dir="runs/mnist_adamw",
        vars=dict(max_epochs=5),
    )
