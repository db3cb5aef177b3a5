"""Test that the collectives of a compiled program are read from its text."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jengine.sharding import Pjit, find_collectives, traffic
from jengine.sharding.collectives import Collective

# as written by XLA for CPU and for GPU, with asynchronous operations for the latter
TEXT = """
  %all-reduce.5 = (f32[16,8]{1,0}, bf16[16]{0}, f32[]) all-reduce(%dot.4, %b, %c), channel_id=1
  %all-gather.1 = f32[16,4]{1,0} all-gather(%param.9), dimensions={0}
  %x = f32[8,4]{1,0} copy(%w)
  %rs = f32[2,4]{1,0} reduce-scatter(%x), dimensions={0}
  %ags = (f32[4,4]{1,0}, f32[16,4]{1,0}) all-gather-start(%param), dimensions={0}
  %agd = f32[16,4]{1,0} all-gather-done(%ags)
  %ars = f32[8]{0} all-reduce-start(%y), to_apply=%add
  %p = pred[] all-reduce(%z), to_apply=%and
  %no = f32[] get-tuple-element(%all-reduce.5), index=2
"""


def test_kind_arrays_and_size_are_read():
    assert find_collectives(TEXT) == [
        Collective("all-reduce", 3, 4 * 128 + 2 * 16 + 4),
        Collective("all-gather", 1, 4 * 64),
        Collective("reduce-scatter", 1, 4 * 32),
        Collective("all-gather", 1, 4 * 64),
        Collective("all-reduce", 1, 4 * 8),
        Collective("all-reduce", 1, 1),
    ]


# each device uses only its slice of the first array of the all-reduce, in a fusion, and all of the second array
SLICED = """
%fused (param_0: f32[16,8], param_1: u32[]) -> f32[4,8] {
  %param_0 = f32[16,8]{1,0} parameter(0)
  %param_1 = u32[] parameter(1)
  %zero = s32[] constant(0)
  %start = s32[] convert(%param_1)
  %whole = f32[16,8]{1,0} bitcast(%param_0)
  ROOT %part = f32[4,8]{1,0} dynamic-slice(%whole, %start, %zero), dynamic_slice_sizes={4,8}
}

ENTRY %main (x: f32[16,8], number: u32[]) -> (f32[4,8], f32[8]) {
  %x = f32[16,8]{1,0} parameter(0)
  %number = u32[] parameter(1)
  %device_index = u32[] partition-id()
  %all-reduce.1 = (f32[16,8]{1,0}, f32[8]{0}) all-reduce(%x, %y), to_apply=%add
  %first = f32[16,8]{1,0} get-tuple-element(%all-reduce.1), index=0
  %second = f32[8]{0} get-tuple-element(%all-reduce.1), index=1
  %own = f32[4,8]{1,0} fusion(%first, %NUMBER), kind=kLoop, calls=%fused
  ROOT %out = (f32[4,8]{1,0}, f32[8]{0}) tuple(%own, %second)
}
"""


def test_an_all_reduce_of_which_each_device_uses_its_slice_is_a_reduce_scatter():
    assert find_collectives(SLICED.replace("NUMBER", "device_index")) == [
        Collective("reduce-scatter", 1, 4 * 128),
        Collective("all-reduce", 1, 4 * 8),
    ]


def test_an_all_reduce_with_the_same_slice_on_all_devices_or_with_other_uses_is_not_a_reduce_scatter():
    assert find_collectives(SLICED.replace("NUMBER", "number")) == [Collective("all-reduce", 2, 4 * 136)]
    other_use = SLICED.replace("NUMBER", "device_index").replace("tuple(%own, %second)", "tuple(%first, %second)")
    assert find_collectives(other_use) == [Collective("all-reduce", 2, 4 * 136)]


def test_the_traffic_of_an_all_reduce_is_twice_its_size():
    found = [Collective("all-reduce", 1, 100), Collective("all-gather", 1, 10), Collective("reduce-scatter", 1, 7)]
    assert traffic(found) == 217


def test_collectives_of_a_program_on_a_mesh_are_found():
    strategy = Pjit(devices=4)
    batch = strategy.put_batch({"x": np.ones((8, 5), np.float32)})
    compiled = jax.jit(lambda b: jnp.sum(b["x"], axis=0)).lower(batch).compile()
    assert find_collectives(compiled.as_text()) == [Collective("all-reduce", 1, 20)]


def test_explicit_and_implicit_reduce_scatters_are_found():
    mesh = Pjit(devices=4).mesh
    array = jax.device_put(np.ones((4, 8, 5), np.float32), NamedSharding(mesh, P("data")))

    def explicit(own):
        return jax.lax.psum_scatter(own[0], "data", tiled=True)

    programs = [
        jax.jit(jax.shard_map(explicit, mesh=mesh, in_specs=P("data"), out_specs=P("data"))),
        jax.jit(lambda array: array.sum(axis=0), out_shardings=NamedSharding(mesh, P("data"))),
    ]
    texts = [program.lower(array).compile().as_text() for program in programs]
    assert "reduce-scatter(" in texts[0]
    assert "reduce-scatter(" not in texts[1]
    for text in texts:
        assert find_collectives(text) == [Collective("reduce-scatter", 1, 4 * 8 * 5)]


# the start of the slice, which depends on the device, is computed before the loop; the other index is that of the step
LOOP = """
%body (state: (s32[], s32[], f32[16,8])) -> (s32[], s32[], f32[16,8]) {
  %state = (s32[], s32[], f32[16,8]{1,0}) parameter(0)
  %step = s32[] get-tuple-element(%state), index=0
  %start = s32[] get-tuple-element(%state), index=1
  %x = f32[16,8]{1,0} get-tuple-element(%state), index=2
  %sum = f32[16,8]{1,0} all-reduce(%x), to_apply=%add
  %own = f32[4,8]{1,0} dynamic-slice(%sum, %INDEX, %zero), dynamic_slice_sizes={4,8}
  ROOT %next = (s32[], s32[], f32[16,8]{1,0}) tuple(%step, %start, %new)
}

ENTRY %main (x: f32[16,8]) -> f32[16,8] {
  %input = f32[16,8]{1,0} parameter(0)
  %zero.1 = s32[] constant(0)
  %device_index = u32[] partition-id()
  %offset = s32[] convert(%device_index)
  %init = (s32[], s32[], f32[16,8]{1,0}) tuple(%zero.1, %offset, %input)
  ROOT %loop = (s32[], s32[], f32[16,8]{1,0}) while(%init), condition=%cond, body=%body
}
"""


def test_a_slice_in_a_loop_is_that_of_the_device_if_its_start_was_computed_from_the_device_before():
    assert find_collectives(LOOP.replace("%INDEX", "%start")) == [Collective("reduce-scatter", 1, 4 * 128)]
    assert find_collectives(LOOP.replace("%INDEX", "%step")) == [Collective("all-reduce", 1, 4 * 128)]


# as written by XLA for TPUs: an all-gather that runs while two fusions compute, and a fused reduce-scatter
FUSED = """
%start (p: bf16[4,8]) -> bf16[16,8] {
  ROOT %all-gather.1 = bf16[16,8]{1,0} all-gather(%p), channel_id=3, dimensions={0}
}
%middle (q: bf16[4,8]) -> bf16[16,8] {
  ROOT %all-gather.2 = bf16[16,8]{1,0} all-gather(%q), channel_id=3, dimensions={0}
}
%all-reduce-scatter.7 (input: f32[16,8]) -> f32[4,8] {
  %all-reduce.1 = f32[16,8]{1,0} all-reduce(%input), channel_id=4, to_apply=%add
  ROOT %slice = f32[4,8]{1,0} dynamic-slice(%all-reduce.1, %offset, %zero), dynamic_slice_sizes={4,8}
}
ENTRY %main (x: f32[16,8]) -> f32[] {
  %all-reduce.2 = f32[]{:T(128)} all-reduce(%loss), channel_id=5, to_apply=%add
  %all-reduce.3 = f32[]{:T(128)} all-reduce(%norm), channel_id=5, to_apply=%add
}
"""


def test_the_parts_of_an_asynchronous_collective_of_a_tpu_count_once():
    assert find_collectives(FUSED) == [
        Collective("all-gather", 1, 2 * 128),
        Collective("reduce-scatter", 1, 4 * 128),
        Collective("all-reduce", 1, 4),
        Collective("all-reduce", 1, 4),
    ]
