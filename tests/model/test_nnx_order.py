"""Test the order in which NNX modules are listed."""

from flax import nnx

from jengine.model.nnx_state import list_module_types


class Block(nnx.Module):
    def __init__(self, rngs):
        self.second = nnx.Linear(2, 2, rngs=rngs)
        self.first = nnx.LayerNorm(2, rngs=rngs)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Linear(2, 2, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(11)])
        self.a_head = nnx.Dict(z=nnx.Linear(2, 2, rngs=rngs), b=nnx.Linear(2, 2, rngs=rngs))


def test_modules_are_listed_in_the_order_of_their_definition():
    types = list_module_types(Net(nnx.Rngs(0)))
    blocks = [f"blocks.{i}{part}" for i in range(11) for part in ("", ".second", ".first")]
    assert list(types) == ["", "stem", "blocks", *blocks, "a_head", "a_head.z", "a_head.b"]
    assert (types["blocks.10.first"], types["a_head.b"]) == ("LayerNorm", "Linear")
