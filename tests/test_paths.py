import numpy as np
import pytest

from jengine import paths


def test_paths_are_dotted_and_in_jax_order():
    tree = {"b": [np.zeros(1), np.ones(2)], "a": {"kernel": np.zeros(3)}}
    assert list(paths.flatten(tree)) == ["a.kernel", "b.0", "b.1"]
    assert paths.map_with_path(lambda path, x: f"{path}:{x.size}", tree)["b"] == ["b.0:1", "b.1:2"]


@pytest.mark.parametrize(
    ("path", "alias"),
    [
        ("backbone.layers_3.attn.kernel", "backbone.layers.3.attn.weight"),
        ("norm.scale", "norm.weight"),
        ("embed.embedding", "embed.weight"),
        ("head.bias", "head.bias"),
        ("pos_embed", "pos_embed"),
    ],
)
def test_torch_alias(path, alias):
    assert paths.torch_alias(path) == alias


def test_a_root_parameter_is_spelled_with_a_leading_dot():
    assert paths.spellings("pos_embed") == (".pos_embed", ".pos_embed")
    assert paths.spellings("layers_0.scale") == ("layers_0.scale", "layers.0.weight")
