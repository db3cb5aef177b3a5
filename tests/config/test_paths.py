import sys
import types
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jengine.config import paths


def test_paths_are_dotted_and_in_flattening_order():
    tree = {"b": [np.zeros(1), np.ones(2)], "a": {"kernel": np.zeros(3)}}
    assert list(paths.flatten(tree)) == ["a.kernel", "b.0", "b.1"]
    assert paths.map_with_path(lambda path, x: f"{path}:{x.size}", tree)["b"] == ["b.0:1", "b.1:2"]


def test_a_tree_has_paths_while_another_thread_imports_flax(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax.nnx", types.ModuleType("flax.nnx"))  # as it is at the start of its import
    assert paths.flatten({"w": 1}) == {"w": 1}


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


def test_names_of_root_parameters_start_with_a_dot():
    assert paths.path_aliases("pos_embed") == (".pos_embed", ".pos_embed")
    assert paths.path_aliases("layers_0.scale") == ("layers_0.scale", "layers.0.weight")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.layers[0](x))


NNX_PATHS = ["layers.0.bias", "layers.0.kernel", "norm.bias", "norm.scale"]


def test_an_nnx_state_has_the_paths_of_its_arrays():
    params = nnx.state(Net(nnx.Rngs(0)), nnx.Param)
    assert list(paths.flatten(params)) == NNX_PATHS
    assert list(paths.flatten(nnx.to_pure_dict(params))) == NNX_PATHS
    mapped = paths.map_with_path(lambda path, x, y: path, params, params)
    assert mapped["norm"]["scale"].get_value() == "norm.scale"
    assert jax.tree.structure(mapped) == jax.tree.structure(params)


def test_an_nnx_module_has_the_paths_of_its_state():
    assert list(paths.flatten(Net(nnx.Rngs(0)))) == sorted([*NNX_PATHS, "norm.mean", "norm.var"])


def test_nnx_gradients_and_the_trees_passed_to_optax_have_the_same_paths():
    module, optax_paths = Net(nnx.Rngs(0)), []

    def update(grads, state, params):
        optax_paths.extend([list(paths.flatten(grads)), list(paths.flatten(params))])
        return grads, state

    def init(params):
        optax_paths.append(list(paths.flatten(params)))
        return optax.EmptyState()

    _, grads = nnx.value_and_grad(lambda m: m(jnp.ones((3, 2))).sum())(module)
    optimizer = nnx.Optimizer(module, optax.GradientTransformation(init, update), wrt=nnx.Param)
    optimizer.update(module, grads)
    assert [list(paths.flatten(grads)), *optax_paths] == [NNX_PATHS] * 4


def test_boxed_linen_parameters_have_the_paths_of_their_arrays():
    kernel_init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
    params = nn.Dense(2, kernel_init=kernel_init).init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    assert list(paths.flatten({"head": params})) == ["head.bias", "head.kernel"]


def test_keys_and_fields_named_value_are_kept():
    class Pair(NamedTuple):
        key: int
        value: int

    assert list(paths.flatten({"value": {"value": 1}, "pair": Pair(1, 2)})) == ["pair.key", "pair.value", "value.value"]
    state = nnx.State({"value": nnx.Param(jnp.ones(1)), "net": {"value": {"a": nnx.Param(jnp.ones(1))}}})
    assert list(paths.flatten(state)) == ["net.value.a", "value"]
    nested_state = nnx.State({"table": nnx.Param({"value": jnp.ones(1), "b": jnp.ones(1)})})
    assert list(paths.flatten(nested_state)) == ["table.b", "table.value"]


def test_unwrapped_trees_have_the_same_paths_in_jax():
    params = nnx.state(Net(nnx.Rngs(0)), nnx.Param)
    unwrapped = jax.tree_util.tree_flatten_with_path(paths.unwrap({"params": params}))[0]
    assert [paths.dotted(path) for path, _ in unwrapped] == [f"params.{path}" for path in NNX_PATHS]
