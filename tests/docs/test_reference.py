"""Build every example of the reference, and read the pages that are generated from the registries."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("griffe")

import registry_pages
from config_examples import WITHOUT_EXAMPLE, example_of, in_its_place

from jengine.config import DATASETS, registry
from jengine.optim import build_optim_wrapper

PARAMS = {name: {"kernel": jnp.zeros((4, 4)), "bias": jnp.zeros(4)} for name in ("generator", "discriminator", "head")}
PARAMS["layers_0"] = {"kernel": jnp.zeros((4, 4))}
REGISTRIES = [entries for page in registry_pages.PAGES.values() for entries in page.registries]
ENTRIES = [(entries, name) for entries in REGISTRIES for name in registry_pages.list_names(entries)]


def build(entries, name, config):
    """Build the object of a config, with what the Runner passes."""
    if entries is registry.OPTIMIZERS:
        matrices = {"kernel": jnp.zeros((4, 4))}  # all that Muon trains
        wrapper = build_optim_wrapper(matrices, dict(optimizer=config))
        return jax.eval_shape(wrapper.tx.init, matrices)
    if entries is registry.OPTIM_WRAPPERS:
        return build_optim_wrapper(PARAMS, config)
    if entries is registry.OPTIM_WRAPPER_CONSTRUCTORS:
        cfg = {key: value for key, value in config.items() if key not in ("constructor", "paramwise_cfg")}
        rules = config.get("paramwise_cfg")
        return entries.build(dict(type=name, optim_wrapper_cfg=cfg, paramwise_cfg=rules))
    if entries is registry.PARAM_SCHEDULERS:
        optimizer = SimpleNamespace(param_groups=[dict(lr=0.1, momentum=0.9, weight_decay=0.1)])
        return entries.build({k: v for k, v in config.items() if k != "convert_to_iter_based"}, optimizer=optimizer)
    if entries is registry.DATA_SAMPLERS:
        return entries.build(config, dataset=range(8))
    if entries is registry.LOOPS:
        return entries.check(config, runner=None, dataloader=None, evaluator=None)
    if entries is registry.VISBACKENDS:  # building one would start a run of the service
        return entries.check(config, save_dir=None)
    if entries is registry.VISUALIZERS:
        return entries.build(config, save_dir="work_dirs")
    if (entries is DATASETS and name == "PseudoLabelDataset") or name in ("BLEU", "Quantized"):  # needs a package
        return entries.check(config)
    return entries.build(config)


@pytest.mark.parametrize(("entries", "name"), ENTRIES, ids=[name for _, name in ENTRIES])
def test_example_of_a_registered_name_builds(entries, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "language_weights.json").write_text('["head.weight"]')
    example = example_of(entries, name)
    if name in WITHOUT_EXAMPLE:
        assert example is None
    else:
        build(entries, name, eval(example, {"np": np}))
        compile(in_its_place(entries, name, example), name, "exec")


@pytest.mark.parametrize("page", registry_pages.PAGES.values(), ids=list(registry_pages.PAGES))
def test_every_argument_has_a_meaning(page):
    text = registry_pages.write_page(page)
    names = [name for entries in page.registries for name in registry_pages.list_names(entries)]
    assert [name for name in names if f"[`{name}`](#" not in text] == []
    assert re.findall(r"^\| `[^|]*` \|(?:[^|]|\\\|)*\|(?:[^|]|\\\|)*\|  \|$", text, flags=re.M) == []


def test_section_of_a_hook_has_its_stages_arguments_and_example():
    text = registry_pages.write_page(registry_pages.PAGES["hooks"])
    section = re.search(r"^### EMAHook$.*?(?=^### )", text, flags=re.M | re.S)[0]
    assert "- **Inside the step:** `traced_update`, `traced_accumulate`" in section
    assert "- **Chunks of steps:** no limit" in section
    assert "| `begin_iter` | an integer of at least 0 | `0` | the first iteration to average" in section
    assert 'custom_hooks = [dict(type="EMAHook", momentum=0.0002, begin_iter=500)]' in section
