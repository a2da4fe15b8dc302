"""Which neurons and kv heads of a dense model should share a lane, before it is split.

A lane of the split model reads its stream without what other lanes wrote in the last 2δ modules. For a unit
that writes (a feed-forward neuron, or a kv head with its query heads) and a later one that reads, the damage
of separating them is estimated to first order as

    Σ over tokens of  |∂loss/∂z_r · (w_r ⊙ γ)·w_c · a_c / rms|

with z_r a row of the reader's input matrices w_r behind the norm γ, and a_c the activation of a column w_c of
the writer's output matrix. Units are then dealt to lanes of equal size so that little damage lies between
lanes: one module at a time, given all others, which is an assignment problem with an exact solution, for kv
heads the same as trying all partitions. The idea is arXiv 2609.13846's; the details are ours.

Shapes: T tokens, R reading rows of a module, C writing columns, U units, L lanes, D hidden, N layers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment

from laneformer_jax import rope
from laneformer_jax.attention import attend, visibility
from laneformer_jax.checkpoint.slices import LayerOrder, merge_columns, merge_rows
from laneformer_jax.checkpoint.sources import Params
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError
from laneformer_jax.norms import rms_normalise
from laneformer_jax.tokenizer import Tokenizer

_SWEEPS = 8
_CALIBRATION = (8, 256)  # sequences × tokens
_ROWS = 4096  # of a coupling matrix at a time


class Module(NamedTuple):
    """What coupling needs to know of one module on T calibration tokens.

    reads: [R, D] rows times the norm's weight. gradients: [T, R] |∂loss/∂z| / rms. read_units: [R] the unit
    of each row. writes: [D, C]. activations: [T, C] |a|. write_units: [C]. units: how many there are.
    """

    reads: np.ndarray
    gradients: np.ndarray
    read_units: np.ndarray
    writes: np.ndarray
    activations: np.ndarray
    write_units: np.ndarray
    units: int


# Orders


def affinity_order(config: LaneformerConfig, params: Params, ids: np.ndarray) -> list[LayerOrder]:
    """An order of every layer's units that keeps coupled ones in one lane.

    Args:
        config: the split model.
        params: its parameters in contiguous order, by dotted path.
        ids: int [B, S] calibration tokens.
    """
    couplings = coupling_matrices(modules(config, params, ids), config.broadcast_delay)
    counts = [config.num_key_value_heads, config.intermediate_size] * config.num_hidden_layers
    lanes = deal(couplings, counts, config.num_lanes)
    orders = [np.argsort(lane, kind="stable") for lane in lanes]
    return [LayerOrder(a, b) for a, b in zip(orders[::2], orders[1::2], strict=True)]


def calibration_ids(path: str | Path, tokenizer: Tokenizer, config: LaneformerConfig) -> np.ndarray:
    """int [B, S] tokens from the beginning of a text file: up to 8 sequences of up to 256.

    Raises:
        UserError: a file that cannot be read or is too short.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"calibration: {path} cannot be read as text ({error})") from None
    batch, length = _CALIBRATION
    length = min(length, config.max_position_embeddings)
    ids = tokenizer.encode_array(text[: 16 * batch * length])
    batch = min(batch, len(ids) // length)
    if batch == 0:
        raise UserError(f"calibration: {path} gives {len(ids)} tokens, needs {length} at least")
    return ids[: batch * length].reshape(batch, length)


def random_order(config: LaneformerConfig, seed: int) -> list[LayerOrder]:
    """A random order of every layer's units, to compare with."""
    rng = np.random.default_rng(seed)
    return [
        LayerOrder(
            rng.permutation(config.num_key_value_heads), rng.permutation(config.intermediate_size)
        )
        for _ in range(config.num_hidden_layers)
    ]


def contiguous_lanes(units: int, lanes: int) -> np.ndarray:
    """The lane of each unit as a model is split without reordering."""
    return np.arange(units) // (units // lanes)


# Couplings


def coupling_matrices(found: list[Module], delay: int) -> dict[tuple[int, int], np.ndarray]:
    """Damage [U_reader, U_writer] by module numbers (reader, writer), attention and MLP alternating.

    Only pairs that a lane misses: writers of the 2δ modules before the reader, and not of the first δ layers,
    whose outputs are summed at once.
    """
    out = {}
    for reader in range(len(found)):
        for writer in range(max(reader - 2 * delay, 2 * delay), reader):
            out[reader, writer] = coupling(found[reader], found[writer])
    return out


def coupling(reader: Module, writer: Module) -> np.ndarray:
    """Damage [U_reader, U_writer] of separating a unit of `reader` from one of `writer`."""
    out = np.zeros((reader.units, writer.units))
    by_unit = np.argsort(writer.write_units, kind="stable")
    starts = np.searchsorted(writer.write_units[by_unit], np.arange(writer.units))
    for begin in range(0, len(reader.reads), _ROWS):
        rows = slice(begin, begin + _ROWS)
        weights = np.abs(reader.reads[rows] @ writer.writes)
        damage = weights * (reader.gradients[:, rows].T @ writer.activations)
        columns = np.add.reduceat(damage[:, by_unit], starts, axis=1)
        np.add.at(out, reader.read_units[rows], columns)
    return out


def separated(couplings: Mapping[tuple[int, int], np.ndarray], lanes: list[np.ndarray]) -> float:
    """Damage between units in different lanes; `lanes` holds the lane of each unit, by module."""
    return float(
        sum(
            (damage * (lanes[reader][:, None] != lanes[writer])).sum()
            for (reader, writer), damage in couplings.items()
        )
    )


# Dealing units to lanes


def deal(
    couplings: Mapping[tuple[int, int], np.ndarray], counts: list[int], num_lanes: int
) -> list[np.ndarray]:
    """The lane of each unit, by module: equal shares, little damage between lanes.

    The first round places each module beside those already placed, later ones beside all others, until a
    round brings nothing. Never worse than the contiguous order.
    """
    contiguous = [contiguous_lanes(count, num_lanes) for count in counts]
    lanes, placed = list(contiguous), set()
    best, least = contiguous, separated(couplings, contiguous)
    for _ in range(_SWEEPS):
        for module, count in enumerate(counts):
            gain = np.zeros((count, num_lanes))
            for (reader, writer), damage in couplings.items():
                if reader == module and writer in placed:
                    gain += damage @ np.eye(num_lanes)[lanes[writer]]
                elif writer == module and reader in placed:
                    gain += damage.T @ np.eye(num_lanes)[lanes[reader]]
            if gain.any():
                lanes[module] = balanced_assignment(gain)
            placed.add(module)
        now = separated(couplings, lanes)
        if now >= least * (1 - 1e-6):
            break
        best, least = list(lanes), now
    return best


def balanced_assignment(gain_UL: np.ndarray) -> np.ndarray:
    """The lane of each unit that maximises the summed gain with U/L units in every lane; exact."""
    units, lanes = gain_UL.shape
    seats = np.repeat(gain_UL, units // lanes, axis=1)
    _, seat = linear_sum_assignment(seats, maximize=True)
    return np.asarray(seat) // (units // lanes)


# Calibration


def modules(config: LaneformerConfig, params: Params, ids: np.ndarray) -> list[Module]:
    """Attention and MLP of every layer, in order, measured on the dense model of a split one."""
    flat = {path: jnp.asarray(_flat(path, value), jnp.float32) for path, value in params.items()}
    shape = (*ids.shape, config)
    probes = _probes(shape)
    gradients, (activations, rms) = jax.jit(jax.grad(_loss, has_aux=True), static_argnums=3)(
        probes, flat, jnp.asarray(ids), config
    )
    tokens = ids.size
    kv_heads, d = config.num_key_value_heads, config.head_size
    group = config.num_attention_heads // kv_heads
    q_units = np.repeat(np.arange(kv_heads), group * d)
    kv_units = np.repeat(np.arange(kv_heads), d)
    neurons = np.arange(config.intermediate_size)
    found = []
    for i in range(config.num_hidden_layers):
        for kind, norm, rows, out, read_units, write_units, units in (
            (
                "attention",
                "attention_norm",
                ("wq", "wk", "wv"),
                "wo",
                np.concatenate((q_units, kv_units, kv_units)),
                q_units,
                kv_heads,
            ),
            (
                "feed_forward",
                "ffn_norm",
                ("w1", "w3"),
                "w2",
                np.concatenate((neurons, neurons)),
                neurons,
                config.intermediate_size,
            ),
        ):
            at = f"layers.{i}.{kind}"
            gamma = flat[f"layers.{i}.{norm}.weight"]
            z = np.concatenate(
                [np.asarray(gradients[f"{at}.{name}"]).reshape(tokens, -1) for name in rows], axis=1
            )
            found.append(
                Module(
                    np.concatenate([np.asarray(flat[f"{at}.{n}.weight"] * gamma) for n in rows]),
                    np.abs(z) / np.asarray(rms[at]).reshape(tokens, 1),
                    read_units,
                    np.asarray(flat[f"{at}.{out}.weight"]),
                    np.abs(np.asarray(activations[at])).reshape(tokens, -1),
                    write_units,
                    units,
                )
            )
    return found


def _flat(path: str, value: np.ndarray) -> np.ndarray:
    if value.ndim < 3:
        return value
    return (
        merge_columns(value) if path.endswith((".wo.weight", ".w2.weight")) else merge_rows(value)
    )


def _probes(shape: tuple[int, int, LaneformerConfig]) -> dict[str, jax.Array]:
    batch, seq, config = shape
    q = config.num_attention_heads * config.head_size
    kv = config.num_key_value_heads * config.head_size
    sizes = {"attention.wq": q, "attention.wk": kv, "attention.wv": kv}
    sizes |= dict.fromkeys(("feed_forward.w1", "feed_forward.w3"), config.intermediate_size)
    return {
        f"layers.{i}.{name}": jnp.zeros((batch, seq, size))
        for i in range(config.num_hidden_layers)
        for name, size in sizes.items()
    }


def _loss(
    probes: dict[str, jax.Array],
    flat: dict[str, jax.Array],
    ids: jax.Array,
    config: LaneformerConfig,
) -> tuple[jax.Array, Any]:
    """Next-token loss of the dense model; zero probes are added to what every reading row gives."""
    batch, seq = ids.shape
    d, kv_heads = config.head_size, config.num_key_value_heads
    positions = jnp.broadcast_to(jnp.arange(seq), (batch, seq))
    cos, sin = rope.angles(positions, config)
    activations, rms = {}, {}
    x = flat["tok_embeddings.weight"][ids]
    for i in range(config.num_hidden_layers):

        def read(module: str, norm: str, names: tuple[str, ...], i: int = i) -> list[jax.Array]:
            at = f"layers.{i}.{module}"
            h = rms_normalise(x, config.norm_eps)  # noqa: B023  used within the round
            rms[at] = jnp.sqrt(jnp.mean(x * x, axis=-1) + config.norm_eps)  # noqa: B023
            h = h * flat[f"layers.{i}.{norm}.weight"]
            return [h @ flat[f"{at}.{n}.weight"].T + probes[f"{at}.{n}"] for n in names]

        at = f"layers.{i}.attention"
        q, k, v = read("attention", "attention_norm", ("wq", "wk", "wv"))
        q, k, v = (z.reshape(1, batch, seq, -1, d) for z in (q, k, v))
        if config.qk_norm:
            q = rms_normalise(q, config.norm_eps) * flat[f"{at}.q_norm.weight"]
            k = rms_normalise(k, config.norm_eps) * flat[f"{at}.k_norm.weight"]
        q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
        mask = visibility(jnp.arange(seq), jnp.arange(seq), config.window(i))
        mixed = attend(q.reshape(1, batch, seq, kv_heads, -1, d), k, v, mask)
        activations[at] = mixed.reshape(batch, seq, -1)
        x = x + activations[at] @ flat[f"{at}.wo.weight"].T

        at = f"layers.{i}.feed_forward"
        gate, up = read("feed_forward", "ffn_norm", ("w1", "w3"))
        activations[at] = jax.nn.silu(gate) * up
        x = x + activations[at] @ flat[f"{at}.w2.weight"].T
    head = flat.get("lm_head.weight", flat["tok_embeddings.weight"])
    logits = rms_normalise(x, config.norm_eps) * flat["norm.weight"] @ head.T
    log_p = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    loss = -jnp.mean(jnp.take_along_axis(log_p, ids[:, 1:, None], axis=-1))
    return loss, (activations, rms)
