"""Does affinity-aware sharding give a better start? The loss of a delayed model before any retraining.

Trains a small dense byte-level model on the Python standard library's source, splits it into lanes with a
real delay under the contiguous, random and affinity layouts, and prints the held-out loss of each, per seed.

    python benchmarks/affinity.py --seeds 0 1 2 --steps 500
"""

import argparse
import dataclasses
import sys
import sysconfig
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from laneformer_jax import Laneformer, LaneformerConfig
from laneformer_jax.checkpoint import affinity, convert, dense, native, slices, verify
from laneformer_jax.model import parameter_paths

DENSE = LaneformerConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=128,
    num_lanes=1,
    broadcast_delay=1,
)
LENGTH, BATCH = 96, 8


def corpus() -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out bytes: every tenth file is held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for i, file in enumerate(files):
        parts[i % 10 == 0].append(file.read_bytes())
    train, held_out = (np.frombuffer(b"".join(p), np.uint8).astype(np.int32) for p in parts)
    return train, held_out


def mean_loss(model: Laneformer, ids: jax.Array) -> jax.Array:
    logits = model(ids[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def train(seed: int, steps: int, data: np.ndarray) -> Laneformer:
    model = Laneformer(DENSE, rngs=nnx.Rngs(seed))
    graphdef, params = nnx.split(model)
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, 30, steps, 3e-4)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
    state = tx.init(params)

    @jax.jit
    def step(params, state, ids):
        loss, grads = jax.value_and_grad(lambda p: mean_loss(nnx.merge(graphdef, p), ids))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    rng = np.random.default_rng(seed)
    for i in range(steps):
        starts = rng.integers(len(data) - LENGTH, size=BATCH)
        ids = np.stack([data[s : s + LENGTH] for s in starts])
        params, state, loss = step(params, state, ids)
        if i % 100 == 0:
            print(f"seed {seed} step {i} loss {float(loss):.3f}", file=sys.stderr, flush=True)
    return nnx.merge(graphdef, params)


def held_out_loss(config: LaneformerConfig, params: dict, batches: list[np.ndarray]) -> float:
    model = native.model_of(config, {p: jnp.asarray(v) for p, v in params.items()}, None)
    return float(np.mean([float(mean_loss(model, jnp.asarray(ids))) for ids in batches]))


def lanes_of(config: LaneformerConfig, order: list[slices.LayerOrder] | None) -> list[np.ndarray]:
    """The lane of each unit, by module."""
    out = []
    for i in range(config.num_hidden_layers):
        for j, units in enumerate((config.num_key_value_heads, config.intermediate_size)):
            lanes = affinity.contiguous_lanes(units, config.num_lanes)
            out.append(lanes if order is None else lanes[np.argsort(order[i][j])])
    return out


def one_seed(args: argparse.Namespace, seed: int) -> dict[str, tuple[float, float]]:
    """Held-out loss and estimated damage by layout."""
    data, held_out = corpus()
    rng = np.random.default_rng(seed)

    def draw(source: np.ndarray, batch: int) -> np.ndarray:
        starts = rng.integers(len(source) - LENGTH, size=batch)
        return np.stack([source[s : s + LENGTH] for s in starts])

    model = train(seed, args.steps, data)
    batches = [draw(held_out, BATCH) for _ in range(args.batches)]
    calibration = draw(data, 16)
    params = {p: np.asarray(v[...]) for p, v in parameter_paths(nnx.state(model)).items()}
    dense_loss = held_out_loss(DENSE, params, batches)
    found = {"dense": (dense_loss, 0.0)}
    with tempfile.TemporaryDirectory() as folder:
        native.save_inference(Path(folder) / "one", model)
        convert.export(Path(folder) / "one", Path(folder) / "dense", layout="llama")

        def split(order: list[slices.LayerOrder] | None) -> tuple[LaneformerConfig, dict]:
            source = dense.DenseFolder(Path(folder) / "dense", args.lanes, args.delay, order=order)
            return source.config, verify.read_all(source)

        config, contiguous = split(None)
        couplings = affinity.coupling_matrices(
            affinity.modules(config, contiguous, calibration), args.delay
        )
        orders: dict[str, list[slices.LayerOrder] | None] = {"contiguous": None}
        orders |= {f"random {i}": affinity.random_order(config, 10 * seed + i) for i in range(3)}
        orders["affinity"] = affinity.affinity_order(config, contiguous, calibration)
        for name, order in orders.items():
            _, params = split(order)
            # Under δ = N every layout is the dense model.
            merged = dataclasses.replace(config, broadcast_delay=config.num_hidden_layers)
            assert abs(held_out_loss(merged, params, batches) - dense_loss) < 1e-5, name
            damage = affinity.separated(couplings, lanes_of(config, order))
            found[name] = held_out_loss(config, params, batches), damage
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--delay", type=int, default=2)
    args = parser.parse_args()
    print("| seed | layout | starting loss, nats | estimated damage |\n|---|---|---|---|")
    for seed in args.seeds:
        for name, (loss, damage) in one_seed(args, seed).items():
            print(f"| {seed} | {name} | {loss:.4f} | {damage:.4f} |", flush=True)


if __name__ == "__main__":
    main()
