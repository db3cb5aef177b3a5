"""Test which parameter is sharded over which axis of the mesh, and the errors of rules and meshes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jengine.config.errors import ConfigError
from jengine.parallel import Placement, build_mesh
from jengine.parallel.mesh import choose_batch_axes
from tests.refusals import check_refusal

SHAPES = {
    "embed": {"embedding": (64, 8)},
    "layers_0": {"mlp": {"kernel": (8, 32), "bias": (32,)}},
    "layers_1": {"mlp": {"kernel": (8, 32), "bias": (32,)}},
}
PARAMS = jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
)
MESH = build_mesh(dict(data=2, fsdp=2, tensor=2))


def specs(placed):
    return {path: parameter.spec for path, parameter in placed.items() if parameter.spec != P()}


def test_the_longest_rule_applies_in_either_spelling():
    rules = [("mlp.weight", (None, "tensor")), ("layers.1.mlp.weight", ("tensor",)), ("embedding", ("fsdp", None))]
    placed = Placement(MESH, rules).place(PARAMS)
    assert specs(placed) == {
        "layers_0.mlp.kernel": P(None, "tensor"),
        "layers_1.mlp.kernel": P("tensor"),
        "embed.embedding": P("fsdp", None),
    }
    assert placed["layers_1.mlp.kernel"].reason == "layers.1.mlp.weight"


def test_large_parameters_are_sharded_along_their_largest_axis_without_a_rule():
    placed = Placement(MESH, [("layers_1", ())], fsdp_min_size=256).place(PARAMS)
    # 64 x 8 along the first axis, 8 x 32 along the second; rules take precedence; biases are small
    assert specs(placed) == {"embed.embedding": P("fsdp"), "layers_0.mlp.kernel": P(None, "fsdp")}


def test_an_axis_that_fsdp_does_not_divide_is_skipped():
    placed = Placement(MESH, fsdp_min_size=1).place({"w": jax.ShapeDtypeStruct((9, 4), jnp.float32)})
    assert placed["w"].spec == P(None, "fsdp")
    assert Placement(MESH, fsdp_min_size=1).place({"w": jax.ShapeDtypeStruct((9,), jnp.float32)})["w"].spec == P()


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([("kernel", (None, "tenzor"))], ["the mesh", "got 'tenzor'"]),
        ([("kernel", "tensor")], ["a pair"]),
        (["kernel"], ["to unpack"]),
    ],
)
def test_illegal_rules_are_refused(rules, words):
    check_refusal(lambda: Placement(MESH, rules).place(PARAMS), ValueError, *words)


def test_logical_axes_are_mapped_to_one_or_several_axes_of_the_mesh():
    names = {"embed.embedding": (("rows", "tensor"), "columns"), "layers_0.mlp.kernel": ("columns", "heads")}
    placed = Placement(MESH, logical_axes=dict(rows="fsdp", heads=("data", "tensor"))).place(PARAMS, names)
    assert specs(placed) == {
        "embed.embedding": P(("fsdp", "tensor"), None),
        "layers_0.mlp.kernel": P(None, ("data", "tensor")),
    }
    with pytest.raises(ConfigError, match="got 'tenzor'") as error:
        Placement(MESH, logical_axes=dict(heads="tenzor"))
    assert "at `logical_axes`" in str(error.value.__notes__)


def test_a_lookup_table_may_be_sharded_along_both_axes_where_xla_can_gather_it():
    Placement(MESH, [("embedding", ("fsdp", "tensor"))]).place(PARAMS)
    Placement(MESH, [("embedding", (None, ("fsdp", "tensor")))], tables_along_one_axis=True).place(PARAMS)


def test_a_rule_that_matches_nothing_is_a_warning_with_the_closest_name(caplog):
    with caplog.at_level("WARNING", logger="jengine"):
        placed = Placement(MESH, [("layers_0.mpl.kernel", (None, "tensor"))]).place(PARAMS)
    assert specs(placed) == {}
    assert "'layers_0.mpl.kernel' matches no parameter; closest: layers_0.mlp.kernel" in caplog.text


@pytest.mark.parametrize(
    ("mesh", "devices", "words"),
    [
        (dict(data=3), None, ["got 3"]),
        (dict(data=16), None, ["got 16"]),
        (dict(fsdp=3), None, ["got 3"]),
        (dict(data=-1, fsdp=-1), None, ["got data and fsdp"]),
        (dict(fdsp=2), None, ["one of", "got 'fdsp'", "did you mean 'fsdp'"]),
        (dict(data=0), None, ["got 0"]),
        (dict(slices=dict(data=2)), None, ["of processes", "got {'data': 2}"]),
        (None, 9, ["got 9"]),
    ],
)
def test_illegal_meshes_are_refused(mesh, devices, words):
    check_refusal(lambda: build_mesh(mesh, devices), ConfigError, *words)


def test_a_mesh_uses_all_devices_or_the_given_number():
    assert dict(build_mesh().shape) == dict(data=8, fsdp=1, tensor=1)
    assert dict(build_mesh(dict(fsdp=2, tensor=2)).shape) == dict(data=2, fsdp=2, tensor=2)
    assert dict(build_mesh(dict(data=1, fsdp=-1), devices=4).shape) == dict(data=1, fsdp=4, tensor=1)


def test_a_mesh_has_an_axis_of_experts_if_it_is_named_and_rules_may_name_it_always():
    rules = [("embedding", ("expert",)), ("kernel", (("fsdp", "expert"), "tensor"))]
    mesh = build_mesh(dict(data=1, expert=2, fsdp=2, tensor=2))
    assert build_mesh(dict(context=2)).axis_names == ("data", "fsdp", "context", "tensor")
    assert choose_batch_axes(mesh.axis_names) == ("data", "fsdp", "expert")
    divided, without = specs(Placement(mesh, rules).place(PARAMS)), specs(Placement(MESH, rules).place(PARAMS))
    assert divided["embed.embedding"] == P("expert")
    assert divided["layers_0.mlp.kernel"] == P(("fsdp", "expert"), "tensor")
    assert without["embed.embedding"] == P(None)
    assert without["layers_0.mlp.kernel"] == P("fsdp", "tensor")
