import pytest

from laneformer_jax.errors import UserError
from laneformer_jax.hardware import DEVICES, find_device, find_node, from_kind


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_units_and_sources(device):
    # A figure in the wrong unit is off by 1000: all of these devices lie in narrow ranges.
    assert 50e9 < device.memory < 500e9
    assert 2e12 < device.memory_bandwidth < 20e12
    assert 500e12 < device.bf16_flops < 5000e12
    assert device.fp8_flops == pytest.approx(2 * device.bf16_flops, rel=1e-3)
    assert 100e9 < device.link_bandwidth < 2e12
    assert device.source.startswith(f"https://www.{device.vendor.lower()}.com/")
    assert device.peak_flops("bfloat16") == device.bf16_flops
    assert device.peak_flops("float8") == device.fp8_flops


def test_vendor_peaks_of_the_published_nodes():
    # Spec section 3: 38.4 and 42.4 TB/s for eight H200 and eight MI300X.
    assert 8 * DEVICES["h200"].memory_bandwidth == pytest.approx(38.4e12)
    assert 8 * DEVICES["mi300x"].memory_bandwidth == pytest.approx(42.4e12)


def test_nodes():
    node = find_node("h200x8")
    assert (node.device, node.count, node.name) == (DEVICES["h200"], 8, "h200x8")
    assert find_node("MI300Xx4").device is DEVICES["mi300x"]
    assert find_node("mi300x").count == 1
    assert find_device("B200") is DEVICES["b200"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("h20x8", "did you mean 'h200x8'?"),
        ("mi300", "did you mean 'mi300x'?"),
        ("tpu", "one of h200, mi300x, h100, b200"),
        ("h200x0", "has 0 devices; a node has 1 to 8"),
        ("h200x16", "has 16 devices"),
    ],
)
def test_unknown_nodes(name, part):
    with pytest.raises(UserError, match="hardware") as error:
        find_node(name)
    assert part in str(error.value)


def test_unknown_device():
    with pytest.raises(UserError, match=r"did you mean 'h100'\?"):
        find_device("h10")


def test_jax_device_kinds():
    assert from_kind("NVIDIA H100 80GB HBM3") is DEVICES["h100"]
    assert from_kind("AMD Instinct MI300X") is DEVICES["mi300x"]
    assert from_kind("NVIDIA H200") is DEVICES["h200"]
    assert from_kind("cpu") is None
