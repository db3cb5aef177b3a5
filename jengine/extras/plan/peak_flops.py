"""Compare a run's floating-point rate with the accelerator's peak."""

import re
from collections.abc import Mapping
from typing import Any

from jengine.extras.plan.flops import step_flops

# Dense peaks in TFLOP/s: products in 16 bits, and in float32 as JAX computes them by default, which
# means TensorFloat-32 from Ampere on and bfloat16 on TPUs. GPUs: NVIDIA's data sheets and
# whitepapers, halved if given "with sparsity". TPUs:
# https://cloud.google.com/tpu/docs/system-architecture-tpu-vm, with the figures per chip halved for
# v2 and v3, where a device is one of two cores. The first pattern that matches the device kind
# applies.
_PEAKS: tuple[tuple[str, float, float], ...] = (
    (r"\bB200\b", 2250.0, 1125.0),
    (r"\bH200 NVL\b", 835.5, 417.5),
    (r"\b(H200|GH200|H100 80GB HBM3|H800)\b", 989.4, 494.7),
    (r"\bH100 NVL\b", 835.5, 417.5),
    (r"\bH100 PCIe\b", 756.0, 378.0),
    (r"\bH100\b", 989.4, 494.7),
    (r"\bA(100|800)\b", 312.0, 156.0),
    (r"\bA40\b", 149.7, 74.8),
    (r"\bA30\b", 165.0, 82.0),
    (r"\bA10G\b", 70.0, 35.0),
    (r"\bA10\b", 125.0, 62.5),
    (r"\bL40S\b", 362.0, 183.0),
    (r"\bL40\b", 181.0, 90.5),
    (r"\bL4\b", 121.0, 60.0),
    (r"\bRTX 4090\b", 165.2, 82.6),
    (r"\bRTX 3090\b", 71.0, 35.6),
    (r"\bV100-PCIE\b", 112.0, 14.0),
    (r"\bV100\b", 125.0, 15.7),
    (r"\bT4\b", 65.0, 8.1),
    (r"^TPU v2$", 22.5, 22.5),
    (r"^TPU v3$", 61.5, 61.5),
    (r"^TPU v4 lite$", 137.0, 137.0),
    (r"^TPU v4$", 275.0, 275.0),
    (r"^TPU v5( lite|e)$", 197.0, 197.0),
    (r"^TPU v5p?$", 459.0, 459.0),
    (r"^TPU v6( lite|e)$", 918.0, 918.0),
)
_WITHOUT_BFLOAT16 = r"\b(V100|T4)\b"


def get_peak_flops(device_kind: str) -> dict[str, float]:
    """Return the peak operations per second of one device, by operand dtype.

    {} for an unknown device.

    Args:
      device_kind: JAX's device name, `jax.Device.device_kind`.
    """
    for pattern, half, single in _PEAKS:
        if re.search(pattern, device_kind):
            peaks = {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12}
            # GPUs before Ampere emulate bfloat16: a share of the peak of float16 would mean
            # nothing.
            if re.search(_WITHOUT_BFLOAT16, device_kind):
                del peaks["bfloat16"]
            if device_kind.startswith("TPU"):
                del peaks["float16"]
            return peaks
    return {}


def compute_utilisation(
    flops: Mapping[str, float], seconds: float, device_kind: str, devices: int
) -> float | None:
    """Return the fraction of the devices' peak that a step reached: the time at the peak over the
    actual time.

    This is the model FLOPs utilisation of PaLM (https://arxiv.org/abs/2204.02311, appendix B), with
    the operations counted in the step itself. Each dtype is compared with its own peak.

    Args:
      flops: step operations over all devices by operand dtype, as returned by `count_flops`.
      seconds: step time.
      device_kind: JAX's device name.
      devices: device count.

    Returns:
      A fraction of 1; None without operations to count or a known peak.
    """
    peaks = get_peak_flops(device_kind)
    if not flops or not peaks.keys() >= flops.keys():
        return None
    return sum(count / peaks[kind] for kind, count in flops.items()) / devices / seconds


def report_flops(
    runner: Any, seconds: Mapping[str, float], speed: float
) -> tuple[dict[str, tuple[float, str]], list[str]]:
    """Return the FLOPs per second over all devices and their utilisation, for the report at the
    end of a run.

    Args:
      runner: the run.
      seconds: the time of this session by phase.
      speed: iterations per second; 0 for a session without iterations.
    """
    flops = step_flops(runner.programs) if speed else {}
    if not flops:
        return {}, []
    rate = speed * sum(flops.values())
    rates = {"flops_per_second": (rate, format_flops(rate))}
    devices = runner.state.step.sharding.device_set
    kind = next(iter(devices)).device_kind
    if (share := compute_utilisation(flops, 1.0 / speed, kind, len(devices))) is not None:
        rates["model_flops_utilisation"] = (share, f"{share:.1%} of the devices' peak")
    return rates, []


def format_flops(value: float) -> str:
    """Return a rate as text.

    >>> format_flops(1.25e12)
    '1.2 TFLOP/s'
    """
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:,.1f} {prefix}FLOP/s"
    return f"{value:,.0f} FLOP/s"
