"""What a model costs, from its config alone: parameters, bytes and floating-point operations.

Letters as in the spec: D hidden_size, F intermediate_size, V vocab_size, N layers, H query heads,
K key/value heads, d head size, W window. FLOPs count a multiply and an add as two, matrix products
only (norms, softmax and element-wise work are left out), and for attention only the keys that the
mask lets through.
"""

from __future__ import annotations

from laneformer_jax.config import LaneformerConfig

PREFILL_CHUNK = 512  # prompt tokens that the decode engine takes up at once
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def parameter_groups(config: LaneformerConfig) -> dict[str, int]:
    """Parameters by role; they add up to `config.num_parameters()`. A tied head counts 0."""
    d, n, f = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    groups = {
        "embedding": config.vocab_size * d,
        "attention": n * d * heads * config.head_size,
        "mlp": n * 3 * d * f,
        "head": 0 if config.tie_word_embeddings else _head_parameters(config),
    }
    groups["norms"] = config.num_parameters() - sum(groups.values())
    return groups


def decode_weight_bytes(config: LaneformerConfig, dtype: str = "bfloat16") -> int:
    """Bytes of weights that one decoded token reads at batch 1: all but the embedding table, of
    which it reads one row. A tied table is read as the head."""
    unread = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return (config.num_parameters() - unread) * BYTES[dtype]


def kv_bytes_per_position(config: LaneformerConfig, dtype: str = "bfloat16") -> int:
    """Bytes of keys and values of one position in one layer."""
    return 2 * config.num_key_value_heads * config.head_size * BYTES[dtype]


def kv_cache_bytes(config: LaneformerConfig, context: int, dtype: str = "bfloat16") -> int:
    """Bytes of keys and values that decoding reads at `context` positions; a sliding layer has W at most."""
    return kv_bytes_per_position(config, dtype) * sum(_visible(config, context))


def kv_ring_bytes(
    config: LaneformerConfig, context: int, ahead: int, dtype: str = "bfloat16"
) -> int:
    """Bytes of the engine's cache with room for `context` positions, of which at most `ahead` are written
    at once: a sliding layer keeps as many slots more than W, so that none is overwritten too early."""
    slots = (min(context, (config.window(layer) or context) + ahead) for layer in _layers(config))
    return kv_bytes_per_position(config, dtype) * sum(slots)


def decode_flops(config: LaneformerConfig, context: int) -> int:
    """FLOPs of decoding one token with `context` positions in the cache, its own included."""
    keys = sum(_visible(config, context))
    return 2 * _matmul_parameters(config) + _flops_per_key(config) * keys


def training_flops(config: LaneformerConfig, sequence: int) -> float:
    """FLOPs per token of a training step on unpacked sequences of `sequence` tokens.

    Forward once and backward twice; what rematerialisation computes again is not counted, so that
    FLOP/s made from it are model FLOP/s.
    """
    keys = sum(_mean_visible(config, layer, sequence) for layer in _layers(config))
    return 3 * (2 * _matmul_parameters(config) + _flops_per_key(config) * keys)


def waited_lane_sums(config: LaneformerConfig) -> int:
    """Lane sums that the next operation waits for: those of the early layers with early
    communication, or the last one with `ladder_residual`, and the lane mean before the head. The
    others have time: δ layers, or one module."""
    early = sum(config.sums_now(layer) for layer in _layers(config))
    return 2 * early + config.ladder_residual + (config.lm_head_type == "replicate")


def _layers(config: LaneformerConfig) -> range:
    return range(config.num_hidden_layers)


def _head_parameters(config: LaneformerConfig) -> int:
    lanes = config.num_lanes if config.lm_head_type == "lane" else 1
    return config.vocab_size * config.hidden_size * lanes


def _matmul_parameters(config: LaneformerConfig) -> int:
    groups = parameter_groups(config)
    return groups["attention"] + groups["mlp"] + _head_parameters(config)


def _visible(config: LaneformerConfig, context: int) -> list[int]:
    """Keys that the newest of `context` positions sees, by layer."""
    return [min(config.window(layer) or context, context) for layer in _layers(config)]


def _mean_visible(config: LaneformerConfig, layer: int, sequence: int) -> float:
    """Mean over a sequence of the keys seen in `layer`: position i sees min(i + 1, W)."""
    w = min(config.window(layer) or sequence, sequence)
    return (w * (w + 1) / 2 + (sequence - w) * w) / sequence


def _flops_per_key(config: LaneformerConfig) -> int:
    """Score and weighted value of one query-key pair in every query head."""
    return 4 * config.num_attention_heads * config.head_size
