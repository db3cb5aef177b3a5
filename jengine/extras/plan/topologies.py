"""Chips that a config can be compiled for without having one, and the devices they make up."""

import importlib.util
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from jengine.config.errors import ConfigError, closest

_GIB = 2**30
_GPUS_PER_HOST = 8
# JAX takes this fraction of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is set.
_GPU_MEMORY_FRACTION = 0.75


# GPUs are described to XLA's compiler, which otherwise queries the device that it compiles for. The
# figures are from NVIDIA's data sheets and whitepapers for H100 SXM, H200 SXM, A100 SXM 80 GB and
# HGX B200, and from the compute capability table in the CUDA C++ programming guide.
_RUNTIME = (
    'platform_name: "CUDA" runtime_version { major: 12 minor: 8 } dnn_version_info { major: 9 '
    "minor: 8 }"
)


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
    "h100": GpuTarget(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 228, 50, 80 * 10**9, 3_350 * 10**9
    ),
    "h200": GpuTarget("NVIDIA H200", (9, 0), 132, 128, 1.98, 228, 50, 141 * 10**9, 4_800 * 10**9),
    "a100": GpuTarget(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 164, 40, 80 * 10**9, 2_039 * 10**9
    ),
    "b200": GpuTarget(
        "NVIDIA B200", (10, 0), 148, 128, 1.965, 228, 126, 180 * 10**9, 7_700 * 10**9
    ),
}


def format_target(target: GpuTarget) -> str:
    """Return the text of a GpuTargetConfigProto, `target_config` of
    `jax.experimental.topologies.get_topology_desc`.
    """
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


class Chip(NamedTuple):
    """Chip figures."""

    platform: str  # 'tpu' or 'gpu'
    kind: str  # JAX's name of the device
    memory: int  # bytes that a program can use
    bandwidth: float  # of its memory, bytes per second
    # to other chips, bytes that it sends per second over all links; between GPUs of one host
    links: float


# TPUs: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm. GPUs: as above; NVLink in one
# direction.
_LINKS = {"h100": 450e9, "h200": 450e9, "a100": 300e9, "b200": 900e9}
CHIPS = {
    "v5e": Chip("tpu", "TPU v5 lite", 16 * _GIB, 819e9, 200e9),
    "v5p": Chip("tpu", "TPU v5", 95 * _GIB, 2765e9, 600e9),
    "v6e": Chip("tpu", "TPU v6 lite", 32 * _GIB, 1640e9, 448e9),
    **{
        name: Chip(
            "gpu", gpu.kind, int(gpu.memory * _GPU_MEMORY_FRACTION), gpu.bandwidth, _LINKS[name]
        )
        for name, gpu in GPU_TARGETS.items()
    },
}
_EXTRAS = {"tpu": "tpu-compiler", "gpu": "gpu-compiler"}
# Any one of them.
_COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")}


class Topology(NamedTuple):
    """Chips and how they are connected."""

    name: str  # a key of `CHIPS`
    # of a TPU slice, along two or three dimensions; hosts and GPUs per host for GPUs
    shape: tuple[int, ...]
    slices: int = 1  # number of such slices

    @property
    def chip(self) -> Chip:
        """The chip figures."""
        return CHIPS[self.name]

    @property
    def size(self) -> int:
        """The number of chips."""
        return self.slices * math.prod(self.shape)

    @property
    def slice_name(self) -> str:
        """The chips in one slice, as `parse_topology` accepts them."""
        shape = (self.size,) if self.chip.platform == "gpu" else self.shape
        return f"{self.name}:{'x'.join(map(str, shape))}"

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables for a process that compiles, to set before it imports JAX."""
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3"}
        common = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", **quiet}
        if self.chip.platform == "gpu":
            return common
        return {
            **common,
            # no request to a metadata server that only Google's hosts have
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": f"{self.name}-{math.prod(self.shape)}",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
            # its lock file is for chips, which this process does not use
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }

    def devices(self) -> list[Any]:
        """Return the devices, which compile but do not run."""
        try:
            if self.chip.platform == "gpu":
                shape = "x".join(map(str, (1, *self.shape)))
                target = format_target(GPU_TARGETS[self.name])
                settings = {"topology": shape, "target_config": target}
                return topologies.get_topology_desc(self.name, platform="cuda", **settings).devices
            options: dict[str, Any] = {"num_slices": self.slices} if self.slices > 1 else {}
            if math.prod(self.shape) == 1:
                # The default of several chips per host does not fit a single one.
                options["chips_per_host_bounds"] = [1, 1, 1]
            return topologies.get_topology_desc(self.slice_name, platform="tpu", **options).devices
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"--topology must be chips that the compiler supports, got {self}: {error}"
            ) from error

    def __str__(self) -> str:
        return self.slice_name if self.slices == 1 else f"{self.slices} slices of {self.slice_name}"


def parse_topology(text: str, slices: int = 1) -> Topology:
    """Parse the chips in a slice, such as `v5e:16x16` TPUs or `h100:8` GPUs.

    >>> parse_topology("v5e:4x4", slices=2).size
    32
    """
    name, _, size = text.partition(":")
    if name not in CHIPS:
        raise ConfigError(
            f"--topology must begin with one of {', '.join(CHIPS)}, got "
            f"{text!r}{closest(name, CHIPS)}"
        )
    is_gpu = CHIPS[name].platform == "gpu"
    form = r"\d+" if is_gpu else r"\d+x\d+x\d+" if name == "v5p" else r"\d+x\d+"
    shape = tuple(map(int, size.split("x"))) if re.fullmatch(form, size) else ()
    if not shape or not all(shape):
        example = f"{name}:8" if is_gpu else "v5p:2x2x1" if name == "v5p" else f"{name}:4x4"
        raise ConfigError(f"--topology must be of the form {example}, got {text!r}")
    if is_gpu:
        (count,) = shape
        if count > _GPUS_PER_HOST and count % _GPUS_PER_HOST:
            raise ConfigError(
                f"--topology must be at most {_GPUS_PER_HOST} GPUs or a multiple of it, got "
                f"{text!r}"
            )
        if slices > 1:
            raise ConfigError(
                f"--slices must be left out for GPUs, got {slices}; --topology "
                f"{name}:{slices * count} has them all"
            )
        # (hosts, GPUs per host)
        shape = (max(count // _GPUS_PER_HOST, 1), min(count, _GPUS_PER_HOST))
    return Topology(name, shape, slices)


def check_compiler(topology: Topology) -> None:
    """Check that XLA's compiler for these chips is installed."""
    platform = topology.chip.platform
    if not any(_is_installed(module) for module in _COMPILERS[platform]):
        raise ConfigError(
            f"--topology {topology} requires XLA's compiler for {platform.upper()}s: "
            f"pip install 'jengine[{_EXTRAS[platform]}]'"
        )


def _is_installed(module: str) -> bool:
    """Return whether a module is there, without importing it: a compiler takes seconds, and this
    process needs none.
    """
    package = module.partition(".")[0]
    return (
        importlib.util.find_spec(package) is not None
        and importlib.util.find_spec(module) is not None
    )
