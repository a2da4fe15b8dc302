"""One of two processes of four devices that save a model together. Keeps apart what it held itself.

save_in_two.py FOLDER PORT INDEX
"""

import sys
from pathlib import Path

import jax
import numpy as np

from laneformer_jax.checkpoint.training import TrainingCheckpoints
from laneformer_jax.presets import preset
from laneformer_jax.sharding import make_mesh
from train.processes import join
from train.step import Plan, init_params


def held(item: str, arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """This process's parts by item, path and place, each once."""
    parts = {}
    for path, array in arrays.items():
        for shard in array.addressable_shards:
            sides = [
                side.indices(size)[:2] for side, size in zip(shard.index, array.shape, strict=True)
            ]
            name = "|".join([item, path, *(f"{start}:{stop}" for start, stop in sides)])
            parts[name] = np.asarray(shard.data)
    return parts


def main() -> None:
    folder, port, index = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    jax.config.update("jax_num_cpu_devices", 4)
    join(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=index)
    config = preset("tiny", hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    plan = Plan(config, make_mesh(2, 2, fsdp=2))
    params, mean = init_params(plan, 0), init_params(plan, 1)
    checkpoints = TrainingCheckpoints(folder)
    checkpoints.save(1, params, {"mean": mean}, config, {})
    checkpoints.wait()
    checkpoints.close()
    np.savez(folder / f"parts-{index}.npz", **held("params", params), **held("mean", mean))


if __name__ == "__main__":
    main()
