import pytest

from jengine.extras.plan.peak_flops import compute_utilisation, get_peak_flops


@pytest.mark.parametrize(
    ("kind", "half", "single"),  # TFLOP/s, from the data sheets
    [
        ("NVIDIA A100-SXM4-80GB", 312, 156),
        ("NVIDIA H100 80GB HBM3", 989.4, 494.7),
        ("NVIDIA H100 PCIe", 756, 378),
        ("NVIDIA H200", 989.4, 494.7),
        ("NVIDIA L4", 121, 60),
        ("NVIDIA L40S", 362, 183),
        ("NVIDIA A10G", 70, 35),
        ("TPU v4", 275, 275),
        ("TPU v5 lite", 197, 197),
        ("TPU v5p", 459, 459),
        ("TPU v6 lite", 918, 918),
    ],
)
def test_the_peak_is_that_of_the_device(kind, half, single):
    peaks = get_peak_flops(kind)
    assert peaks["bfloat16"] == pytest.approx(half * 1e12)
    assert peaks["float32"] == pytest.approx(single * 1e12)


def test_a_device_has_peaks_only_for_its_dtypes():
    assert get_peak_flops("cpu") == {}
    assert set(get_peak_flops("Tesla V100-SXM2-16GB")) == {"float16", "float32"}
    assert set(get_peak_flops("Tesla T4")) == {"float16", "float32"}
    assert set(get_peak_flops("TPU v4")) == {"bfloat16", "float32"}


def test_utilisation_is_the_time_at_the_peak_over_the_time_taken():
    # 312 TFLOP of bfloat16 take an A100 a second, 78 of float32 half a second: on three, half a second
    flops = {"bfloat16": 312e12, "float32": 78e12}
    assert compute_utilisation(flops, seconds=2.0, device_kind="NVIDIA A100-SXM4-40GB", devices=3) == pytest.approx(
        0.25
    )


@pytest.mark.parametrize(
    ("flops", "kind"),
    [({"float32": 1e12}, "cpu"), ({"float64": 1e12}, "NVIDIA A100-SXM4-40GB"), ({}, "NVIDIA A100-SXM4-40GB")],
)
def test_without_a_peak_or_operations_there_is_no_utilisation(flops, kind):
    assert compute_utilisation(flops, seconds=1.0, device_kind=kind, devices=1) is None
