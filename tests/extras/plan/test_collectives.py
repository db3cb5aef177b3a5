"""Test that the collectives of a compiled program are read from its text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jengine.extras.plan import Program, find_collectives, traffic
from jengine.extras.plan.collectives import Collective
from jengine.parallel import Pjit

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


def _compile_sums(program, *arguments):
    """Compile a function that is called on each of 4 devices with its row of an array, and may sum over `data`."""
    mesh = Pjit(devices=4).mesh
    rows = jax.device_put(np.ones((4, 5), np.float32), NamedSharding(mesh, P("data")))
    specs = (P("data"), *(P() for _ in arguments))
    mapped = jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return Program(jax.jit(mapped).lower(rows, *arguments).compile().as_text())


def _sum_over_data(x):
    return jnp.tanh(jax.lax.psum(x, "data"))


def test_a_collective_counts_in_each_iteration_of_the_loops_around_it():
    def step(carry, _):
        carry = _sum_over_data(carry)
        return jax.lax.fori_loop(0, 3, lambda i, x: _sum_over_data(x), carry), None

    found = find_collectives(program := _compile_sums(lambda row: _sum_over_data(jax.lax.scan(step, row, length=5)[0])))
    assert sorted(each.executions for each in found) == [1, 5, 15]
    assert traffic(found) == 21 * 2 * 20
    assert (program.unknown_loops, program.repeats) == (0, True)


def test_a_loop_of_unknown_length_counts_once_and_is_reported():
    program = _compile_sums(
        lambda row, n: jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, _sum_over_data(s[1])), (0, row))[1],
        jnp.int32(7),
    )
    assert find_collectives(program) == [Collective("all-reduce", 1, 20)]
    assert (program.unknown_loops, program.repeats) == (1, True)


def test_the_branches_of_a_conditional_count_once():
    def branch(row):
        return jax.lax.scan(lambda x, _: (_sum_over_data(x), None), row, length=3)[0]

    found = find_collectives(_compile_sums(lambda row, flag: jax.lax.cond(flag, branch, jnp.negative, row), True))
    assert found == [Collective("all-reduce", 1, 20, executions=3)]


# as written by XLA for TPUs, without the number of iterations
COUNTED = """
%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  %one = s32[] constant(STEP)
  %before = s32[]{:T(128)} get-tuple-element(%state), index=0
  %copied = s32[]{:T(128)S(6)} copy(%before)
  %after = s32[]{:T(128)} add(%copied, %one)
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %sum = f32[8]{0} all-reduce(%x), channel_id=1, to_apply=%add
  ROOT %next = (s32[]{:T(128)}, f32[8]{0}) tuple(%after, %sum)
}

%cond (state.1: (s32[], f32[8])) -> pred[] {
  %state.1 = (s32[], f32[8]{0}) parameter(0)
  %limit = s32[]{:T(128)} constant(LIMIT)
  %count = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%count, %limit), direction=DIRECTION
}

ENTRY %main (input: f32[8]) -> (s32[], f32[8]) {
  %input = f32[8]{0} parameter(0)
  %start = s32[]{:T(128)} constant(START)
  %init = (s32[]{:T(128)}, f32[8]{0}) tuple(%start, %input)
  ROOT %loop = (s32[]{:T(128)}, f32[8]{0}) while(%init), condition=%cond, body=%body
}
"""


@pytest.mark.parametrize(
    ("start", "limit", "step", "direction", "executions", "unknown"),
    [
        (0, 16, 1, "LT", 16, 0),
        (3, 17, 2, "LT", 7, 0),  # 3, 5, ..., 15
        (9, 0, -1, "GT", 9, 0),
        (0, 16, 1, "NE", 1, 1),
        (0, 16, -1, "LT", 1, 1),
        (0, 16, 0, "LT", 1, 1),
    ],
)
def test_the_iterations_of_a_loop_are_read_from_its_counter(start, limit, step, direction, executions, unknown):
    text = COUNTED
    for name, value in dict(START=start, LIMIT=limit, STEP=step, DIRECTION=direction).items():
        text = text.replace(name, str(value))
    program = Program(text)
    assert find_collectives(program) == [Collective("all-reduce", 1, 32, executions)]
    assert program.unknown_loops == unknown


def test_estimated_cycles_and_kernels_count_in_each_iteration_of_a_loop():
    lines = (
        '  %kernel = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"',
        '  %fused = f32[8]{0} fusion(%x), kind=kLoop, backend_config={"estimated_cycles":"250"}',
        '  %slow = f32[8]{0} fusion(%x), kind=kLoop, backend_config={"estimated_cycles":"9223372036854775807"}',
    )
    text = COUNTED.replace("START", "0").replace("LIMIT", "16").replace("STEP", "1").replace("DIRECTION", "LT")
    header = next(line for line in text.splitlines() if line.startswith("%body"))
    program = Program(text.replace(header, "\n".join((header, *lines))))
    assert program.estimate_cycles() == 16 * 250
    assert program.count_kernels() == {"tpu_custom_call": 16}
    assert Program(text).estimate_cycles() is None


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
  %first = bf16[16,8]{1,0} fusion(%a), kind=kCustom, calls=%start
  %second = bf16[16,8]{1,0} fusion(%b), kind=kCustom, calls=%middle
  %scattered = f32[4,8]{1,0} fusion(%c), kind=kCustom, calls=%all-reduce-scatter.7
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


# as written by XLA for two slices of TPUs, shortened
BETWEEN_SLICES = """
ENTRY %main (x: f32[256,1024]) -> f32[256,1024] {
  %x = f32[256,1024]{1,0} parameter(0)
  %send = (f32[256,8,128]{2,1,0:T(8,128)}, u32[], token[]) send(%x, %after), channel_id=2, is_host_transfer=true, KIND
  %recv = (f32[512,8,128]{2,1,0:T(8,128)}, u32[], token[]) recv(%after), channel_id=1, is_host_transfer=true, KIND
  %other = (f32[8]{0}, u32[], token[]) send(%y, %after), channel_id=3, is_host_transfer=true
}
""".replace(
    "KIND", 'frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}'
)


def test_a_collective_between_slices_is_found():
    assert find_collectives(BETWEEN_SLICES) == [Collective("all-reduce", 1, 4 * 256 * 1024)]
    gathered = BETWEEN_SLICES.replace("ALL_REDUCE", "ALL_GATHER")
    assert find_collectives(gathered) == [Collective("all-gather", 1, 2 * 4 * 256 * 1024)]
    permuted = BETWEEN_SLICES.replace("ALL_REDUCE", "ONE_TO_ONE")
    assert find_collectives(permuted) == [Collective("collective-permute", 1, 4 * 256 * 1024)]
