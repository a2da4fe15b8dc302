from types import SimpleNamespace

import pytest

from laneformer_jax import topology
from laneformer_jax.hardware import find_device

TEXT = 'gpu_device_info {{\n  cores: {cores}\n}}\ndevice_description_str: "NVIDIA {name}"\n'


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    """A CUDA plugin as far as this module looks at it."""
    texts = [TEXT.format(name=name, cores=n) for n, name in enumerate(("H100 80GB HBM3", "H200"))]
    content = b"\x7fELF\0" + b"\0".join(text.encode() for text in texts) + b"\0code"
    (tmp_path / "xla_cuda_plugin.so").write_bytes(content)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(topology, "find_spec", lambda name: spec)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100", TEXT.format(name="H100 80GB HBM3", cores=0)),
        ("h200", TEXT.format(name="H200", cores=1)),
        ("b200", None),  # this plugin does not know it
        ("mi300x", None),
    ],
)
def test_a_gpu_is_described_by_the_plugin(plugin, name, expected):
    assert topology.target_config(find_device(name)) == expected


def test_without_the_plugin_there_is_no_description(monkeypatch):
    monkeypatch.setattr(topology, "find_spec", lambda name: None)
    assert topology.target_config(find_device("h200")) is None
