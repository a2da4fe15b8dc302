"""Arrays of an orbax item on one device, without orbax, whose import takes a command half a second.

Orbax itself reads them through tensorstore; what it keeps beside them is where they are.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore


def opened(item: Path) -> dict[str, tensorstore.TensorStore] | None:
    """The arrays of an item by path, none of them read yet; None unless it is a flat tree of zarr arrays."""
    try:
        about = json.loads((item / "_METADATA").read_text())
        if about["use_zarr3"]:
            return None
        keys = [entry["key_metadata"] for entry in about["tree_metadata"].values()]
        paths = [key["key"] for (key,) in keys]
        ocdbt = bool(about["use_ocdbt"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    futures = {}
    for path in paths:
        store = {"driver": "file", "path": f"{item / path}/"}
        if ocdbt:
            store = {"driver": "ocdbt", "base": f"file://{item}/", "path": f"{path}/"}
        spec = {"driver": "zarr", "kvstore": store}
        futures[path] = tensorstore.open(spec, open=True, read=True)
    try:
        return {path: future.result() for path, future in futures.items()}
    except ValueError:  # an array is not there, or no array
        return None


def read(
    stores: Mapping[str, tensorstore.TensorStore], target: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Each array of `target` (path -> `jax.ShapeDtypeStruct` with sharding), cast to its dtype."""
    reading = {path: stores[path].read() for path in target}
    return {
        path: jax.device_put(np.asarray(reading[path].result(), leaf.dtype), leaf.sharding)
        for path, leaf in target.items()
    }
