import pytest

from jengine.config.errors import ConfigError
from jengine.extras.plan.peak_flops import get_peak_flops
from jengine.extras.plan.topologies import (
    CHIPS,
    GPU_TARGETS,
    check_compiler,
    format_target,
    parse_topology,
)
from tests.refusals import check_refusal


@pytest.mark.parametrize(
    ("text", "shape", "size"),
    [
        ("v5e:16x16", (16, 16), 256),
        ("v5p:2x2x4", (2, 2, 4), 16),
        ("v6e:1x1", (1, 1), 1),
        ("h100:2", (1, 2), 2),
        ("b200:16", (2, 8), 16),
    ],
)
def test_chips_are_parsed_and_printed(text, shape, size):
    topology = parse_topology(text)
    assert (topology.shape, topology.size, str(topology)) == (shape, size, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("v5:2x2", ["--topology", "v5e", "v5p", "v6e", "h100", "h200"]),
        ("v5e", ["v5e", "4x4", "got 'v5e'"]),
        ("v5e:2x2x1", ["v5e", "4x4", "got 'v5e:2x2x1'"]),
        ("v5e:0x2", ["v5e", "4x4", "got 'v5e:0x2'"]),
        ("v5p:4x4", ["v5p", "2x2x1", "got 'v5p:4x4'"]),
        ("h100:2x2", ["h100", "got 'h100:2x2'"]),
        ("h100:12", ["GPUs", "got 'h100:12'"]),
    ],
)
def test_other_chips_are_refused(text, words):
    check_refusal(lambda: parse_topology(text), ConfigError, *words)


def test_several_slices_of_tpus_are_counted_and_those_of_gpus_are_hosts():
    topology = parse_topology("v5e:4x4", slices=2)
    assert (topology.size, str(topology), topology.slice_name) == (32, "2 slices of v5e:4x4", "v5e:4x4")
    assert topology.environment["TPU_ACCELERATOR_TYPE"] == "v5e-16"
    with pytest.raises(ConfigError, match="--slices must be left out for GPUs, got 2; --topology h100:16 has them all"):
        parse_topology("h100:8", slices=2)


@pytest.mark.parametrize("name", CHIPS)
def test_the_peak_of_every_chip_is_known(name):
    assert get_peak_flops(CHIPS[name].kind)["bfloat16"] > 1e14


def test_only_tpus_need_the_variables_of_libtpu():
    assert parse_topology("v5e:2x4").environment["TPU_ACCELERATOR_TYPE"] == "v5e-8"
    assert not [name for name in parse_topology("h100:2").environment if name.startswith("TPU_WORKER")]


def test_the_text_of_a_gpu_has_its_figures_in_the_units_of_xla():
    text = format_target(GPU_TARGETS["h100"])
    assert "compute_capability { major: 9 minor: 0 }" in text
    assert "shared_memory_per_block_optin: 232448\n" in text  # 227 KiB
    assert "l2_cache_size: 52428800\n" in text
    assert 'device_description_str: "NVIDIA H100 80GB HBM3"' in text


@pytest.mark.parametrize(("text", "extra"), [("v5e:2x2", "tpu-compiler"), ("h100:8", "gpu-compiler")])
def test_a_missing_compiler_is_reported_with_its_extra(text, extra, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"--topology {text} requires .* pip install 'jengine\[{extra}\]'"):
        check_compiler(parse_topology(text))
