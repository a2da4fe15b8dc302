"""Meshes of GPUs that are not here, to compile for. Needs the extra `cuda13`, no GPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from jax.sharding import AxisType, Mesh

from laneformer_jax.hardware import Device
from laneformer_jax.sharding import AXES


def target_config(device: Device) -> str | None:
    """XLA's own description of a GPU, which lies as text inside its CUDA plugin; None without that."""
    spec = find_spec("jax_plugins.xla_cuda13") if find_spec("jax_plugins") else None
    if spec is None or not spec.submodule_search_locations:
        return None
    name = f"{device.vendor} {device.name}"
    data = (Path(spec.submodule_search_locations[0]) / "xla_cuda_plugin.so").read_bytes()
    at = data.find(f'device_description_str: "{name}'.encode())
    if at < 0:
        return None
    text = data[data.rfind(b"\0", 0, at) + 1 : data.index(b"\0", at)].decode()
    return text[text.rfind("gpu_device_info {", 0, text.index(name)) :]


def absent_mesh(target: str, shape: tuple[int, ...]) -> Mesh:
    """A mesh, of the axes of `sharding.AXES`, of so many GPUs of one host that `target` describes."""
    from jax.experimental import topologies

    count = int(np.prod(shape))
    described = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"1x1x{count}"
    )
    devices: np.ndarray = np.array(described.devices).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
