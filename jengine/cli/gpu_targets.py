"""GPU descriptions for XLA's compiler, which otherwise queries the device that it compiles for.

The figures are from NVIDIA's data sheets and whitepapers for H100 SXM, A100 SXM 80 GB and HGX B200, and from the
compute capability table in the CUDA C++ programming guide.
"""

from typing import NamedTuple

_RUNTIME = 'platform_name: "CUDA" runtime_version { major: 12 minor: 8 } dnn_version_info { major: 9 minor: 8 }'


class GpuTarget(NamedTuple):
    """GPU figures that the compiler uses."""

    kind: str  # JAX's name of the device
    capability: tuple[int, int]  # CUDA compute capability
    multiprocessors: int
    cores: int  # of float32, in a multiprocessor
    clock: float  # GHz, boost
    shared_memory: int  # KiB in a multiprocessor; a block may use 1 KiB less
    l2_cache: int  # MiB
    memory: int  # bytes
    bandwidth: int  # bytes per second


GPU_TARGETS = {
    "h100": GpuTarget("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 228, 50, 80 * 10**9, 3_350 * 10**9),
    "a100": GpuTarget("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 164, 40, 80 * 10**9, 2_039 * 10**9),
    "b200": GpuTarget("NVIDIA B200", (10, 0), 148, 128, 1.965, 228, 126, 180 * 10**9, 7_700 * 10**9),
}


def format_target(target: GpuTarget) -> str:
    """Return the text of a GpuTargetConfigProto, `target_config` of `jax.experimental.topologies.get_topology_desc`."""
    major, minor = target.capability
    return f"""
    gpu_device_info {{
      cuda_compute_capability {{ major: {major} minor: {minor} }}
      core_count: {target.multiprocessors}
      fpus_per_core: {target.cores}
      clock_rate_ghz: {target.clock}
      threads_per_warp: 32
      threads_per_block_limit: 1024
      threads_per_core_limit: 2048
      block_dim_limit_x: 2147483647
      block_dim_limit_y: 65535
      block_dim_limit_z: 65535
      registers_per_core_limit: 65536
      registers_per_block_limit: 65536
      shared_memory_per_block: {48 * 2**10}
      shared_memory_per_block_optin: {(target.shared_memory - 1) * 2**10}
      shared_memory_per_core: {target.shared_memory * 2**10}
      l2_cache_size: {target.l2_cache * 2**20}
      memory_bandwidth: {target.bandwidth}
      device_memory_size: {target.memory}
    }}
    device_description_str: "{target.kind}"
    {_RUNTIME}
    """
