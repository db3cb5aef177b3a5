"""What a compiled program exchanges is read from its text."""

import jax
import jax.numpy as jnp
import numpy as np

from jengine.parallel import Pjit, collectives, traffic
from jengine.parallel.collectives import Collective

# lines as XLA writes them for CPU and for GPU, the latter with operations started and done
TEXT = """
  %all-reduce.5 = (f32[16,8]{1,0}, bf16[16]{0}, f32[]) all-reduce(%dot.4, %b, %c), channel_id=1
  %all-gather.1 = f32[16,4]{1,0} all-gather(%param.9), dimensions={0}
  %rs = f32[2,4]{1,0} reduce-scatter(%x), dimensions={0}
  %ags = (f32[4,4]{1,0}, f32[16,4]{1,0}) all-gather-start(%param), dimensions={0}
  %agd = f32[16,4]{1,0} all-gather-done(%ags)
  %ars = f32[8]{0} all-reduce-start(%y), to_apply=%add
  %p = pred[] all-reduce(%z), to_apply=%and
  %no = f32[] get-tuple-element(%all-reduce.5), index=2
"""


def test_kinds_arrays_and_bytes_are_read():
    assert collectives(TEXT) == [
        Collective("all-reduce", 3, 4 * 128 + 2 * 16 + 4),
        Collective("all-gather", 1, 4 * 64),
        Collective("reduce-scatter", 1, 4 * 8),
        Collective("all-gather", 1, 4 * 64),
        Collective("all-reduce", 1, 4 * 8),
        Collective("all-reduce", 1, 1),
    ]


def test_an_all_reduce_costs_twice_its_size_on_the_wire():
    exchanges = [Collective("all-reduce", 1, 100), Collective("all-gather", 1, 10)]
    assert traffic(exchanges) == 210


def test_a_program_on_a_mesh_tells_its_exchange():
    strategy = Pjit(devices=4)
    batch = strategy.put_batch({"x": np.ones((8, 5), np.float32)})
    compiled = jax.jit(lambda b: jnp.sum(b["x"], axis=0)).lower(batch).compile()
    assert collectives(compiled.as_text()) == [Collective("all-reduce", 1, 20)]
