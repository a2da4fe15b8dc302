"""The decode step of the 2B model as XLA compiles it for H200s, counted without one.

    python benchmarks/aot_h200.py --json aot.json

Needs the extra `cuda13`, no GPU. For the plain JAX path and the fused kernels, on one GPU and with one
lane on each of eight: kernel launches per token by kind, bytes, all-reduces, and how many kernels
run while each all-reduce is under way. Nothing here is a time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CASES = [
    ("xla", 1, True),
    ("fused", 1, True),
    ("layer", 1, True),
    ("xla", 8, True),
    ("fused", 8, True),
    ("layer", 8, True),
    ("xla", 8, False),
    ("fused", 8, False),
    ("token", 1, True),  # last: its one kernel takes minutes to compile
]
CONTEXT = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--dump", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        kernels, gpus, delayed = args.case
        print(json.dumps(count(kernels, int(gpus), delayed == "True", args.dump)))
        return
    rows: list[dict[str, Any]] = []
    for case in CASES:
        rows.append(run(*case))
        print_row(rows[-1])
        record = {"jax": version("jax"), "target": "H200", "context": CONTEXT, "rows": rows}
        if args.json:
            args.json.write_text(json.dumps(record, indent=2) + "\n")


def run(kernels: str, gpus: int, delayed: bool) -> dict[str, Any]:
    """One case in a process of its own: XLA reads its flags once."""
    with tempfile.TemporaryDirectory() as dump:
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_gpu_autotune_level=0"
        out = subprocess.run(
            [sys.executable, __file__, "--dump", dump, "--case", kernels, str(gpus), str(delayed)],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    row: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return row


def print_row(row: dict[str, Any]) -> None:
    kinds = ", ".join(f"{n} {kind}" for kind, n in row["launches"].items())
    rules = "delayed" if row["delayed"] else "undelayed"
    print(f"{row['kernels']} on {row['gpus']}, {rules}:", flush=True)
    print(f"  {row['kernel_launches']} kernels per token ({kinds})")
    print(f"  {row['argument_bytes']:,} bytes of arguments, {row['temp_bytes']:,} of temporaries")
    if row["gpus"] > 1:
        print(f"  {row['all_reduces']} all-reduces; kernels while under way: {row['in_flight']}")


# In the process of a case ------------------------------------------------------------------------


def count(kernels: str, gpus: int, delayed: bool, dump: Path) -> dict[str, Any]:
    """Compile one case and read what XLA wrote about it."""
    compiled = compile_step(kernels, gpus, delayed)
    memory = compiled.memory_analysis()
    [sequence] = dump.glob("*thunk_sequence.txt")
    launches, kinds, in_flight, waits = read(sequence.read_text())
    return {
        "kernels": kernels,
        "gpus": gpus,
        "delayed": delayed,
        "kernel_launches": launches,
        "launches": dict(kinds.most_common()),
        "all_reduces": waits,
        "in_flight": in_flight,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }


def compile_step(kernels: str, gpus: int, delayed: bool) -> Any:
    """From a token to the next on `gpus` H200s: all layers, head, greedy choice."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from decode.step import xla_step
    from laneformer_jax import Laneformer
    from laneformer_jax.cache import RingCache, ring_slots
    from laneformer_jax.exchange import Lanes
    from laneformer_jax.kernels import offline, step
    from laneformer_jax.kernels.backend import Backend
    from laneformer_jax.kernels.tuning import shipped
    from laneformer_jax.model import parameter_paths, parameter_specs
    from laneformer_jax.presets import preset
    from laneformer_jax.sharding import AXES, LANE

    # δ ≥ N with early communication: every sum is waited for, as in ordinary tensor parallelism.
    rules = {} if delayed else dict(broadcast_delay=15, use_early_comm=True)
    config = preset("laneformer-2b", **rules)
    model = nnx.eval_shape(lambda: Laneformer(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    graphdef, params = nnx.split(model)
    axis = LANE if gpus > 1 else None
    lanes = Lanes(config.num_lanes, axis)

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(), topology=f"1x1x{gpus}"
    )
    shape = [gpus if name == LANE else 1 for name in AXES]
    mesh = Mesh(
        np.array(topology.devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )

    run = step.Kernels(Backend(), shipped("sm_90"), kernels)

    def token_step(params: Any, token: Any, position: Any, state: Any) -> Any:
        model = nnx.merge(graphdef, params)
        if kernels != "xla":
            w_VD = model.lm_head.weight[...]
            out, state = step.decode_step(run, model, lanes, w_VD, token, position, state)
            return out.token, state
        cache = RingCache(*state, position[None])
        x_LBSD, cache = xla_step(model, lanes, token[None, None], cache)
        logits_v = model.logits(x_LBSD, lanes)[0, 0]  # of this device's rows
        best, row = jnp.max(logits_v), jnp.argmax(logits_v).astype(jnp.int32)
        if axis is None:
            return row, cache[:2]
        row = row + jax.lax.axis_index(axis) * len(logits_v)
        best_n, row_n = lanes.concatenate(jnp.stack([best, row.astype(jnp.float32)])[:, None])
        return row_n[jnp.argmax(best_n)].astype(jnp.int32), cache[:2]

    slots = tuple(ring_slots(config, i, CONTEXT, 1) for i in range(config.num_hidden_layers))

    def empty_state() -> Any:
        if kernels != "xla":
            return step.empty_state(run, config, slots, jnp.bfloat16, config.num_lanes)
        return RingCache.empty(config, 1, CONTEXT, 1, jnp.bfloat16, config.num_lanes)[:2]

    state = jax.eval_shape(empty_state)
    param_specs = parameter_specs(params, config)
    head = parameter_paths(param_specs)["lm_head.weight"]
    head.set_value(P(LANE))  # each device makes the logits of its rows
    by_lane = P(LANE) if axis else P()
    specs = (param_specs, P(), P(), jax.tree.map(lambda _: by_lane, state))
    number = jax.ShapeDtypeStruct((), jnp.int32)

    def placed(x: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    arguments = jax.tree.map(placed, (params, number, number, state), specs)
    if axis is not None:
        token_step = jax.shard_map(
            token_step, mesh=mesh, in_specs=specs, out_specs=(P(), specs[-1])
        )
    jitted = jax.jit(token_step, donate_argnums=3)
    return offline.lower(jitted, *arguments, target="sm_90").compile()


def target_config() -> str:
    """XLA's own description of an H200, which lies as text inside its plugin."""
    spec = find_spec("jax_plugins.xla_cuda13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("aot_h200: needs the CUDA plugin: pip install 'laneformer-jax[cuda13]'")
    plugin = Path(spec.submodule_search_locations[0]) / "xla_cuda_plugin.so"
    data = plugin.read_bytes()
    at = data.index(b'device_description_str: "NVIDIA H200')
    text = data[data.rfind(b"\0", 0, at) + 1 : data.index(b"\0", at)].decode()
    return text[text.rfind("gpu_device_info {", 0, text.index("NVIDIA H200")) :]


def read(sequence: str) -> tuple[int, Counter[str], list[int], int]:
    """Of XLA's list of what it launches: kernels, launches by name, kernels between start and end of
    each asynchronous all-reduce, and all all-reduces."""
    lines = sequence.splitlines()
    kinds: Counter[str] = Counter()
    kernels, started, in_flight, reduces = 0, {}, [], 0
    for line in lines:
        kind = re.search(r"\b(k[A-Z]\w+)", line)
        if kind is None:
            continue
        if kind[1] in ("kCustomKernel", "kKernel", "kGemm", "kCublasLtMatmul", "kCopy", "kMemzero"):
            kernels += 1
            name = re.search(r"\] (\S+)", line)
            assert name is not None, line
            kinds[re.sub(r"[_.\d]+$", "", name[1]) if kind[1] != "kCopy" else "copy"] += 1
        reduces += kind[1] in ("kAllReduce", "kCollectiveKernel")  # the latter is XLA's one-shot
        token = re.search(r"async_id=(\d+)", line)
        if token and "AsyncStart" in kind[1]:
            started[token[1]] = kernels
        elif token and "AsyncDone" in kind[1]:
            in_flight.append(kernels - started[token[1]])
    return kernels, kinds, in_flight, reduces


if __name__ == "__main__":
    main()
