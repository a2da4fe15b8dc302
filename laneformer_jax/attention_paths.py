"""Which attention runs: the plain one, the chunked one, or cuDNN's, by sequence length and device.

Shapes: L lanes of this device, B batch, S sequence, K kv heads of a lane, G queries per kv head,
d head size.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from laneformer_jax.attention import attend, visibility
from laneformer_jax.attention_chunked import OUTPUT, chunked_attend

Path = Literal["plain", "chunked", "cudnn"]

PLAIN_UP_TO = 255  # tokens; a whole row of scores is faster while it is short
MOST_MASK_BYTES = 2**30  # of a mask that is shared by all lanes, heads and layers of a kind


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sight:
    """Who may see whom when a sequence attends to itself, before it is made into a mask."""

    key_valid_BS: jax.Array | None
    segment_BS: jax.Array | None

    def mask(self, seq: int, window: int | None) -> jax.Array:
        """[B or 1,S,S]."""
        index_S = jnp.arange(seq, dtype=jnp.int32)
        segment_BS = self.segment_BS
        return visibility(index_S, index_S, window, self.key_valid_BS, segment_BS, segment_BS)


def choose(
    batch: int, seq: int, head_size: int, dtype: jnp.dtype, whole: bool, device: str
) -> Path:
    """The path for a self-attention.

    Args:
        whole: neither padding nor documents in a row, so that no mask is needed.
        device: "cuda", "rocm", "cpu", … as `device_kind` tells it.
    """
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    able = device == "cuda" and half and head_size % 8 == 0 and head_size <= 128 and seq % 2 == 0
    # cuDNN takes documents as a mask in the inputs' dtype only.
    if able and (whole or 2 * batch * seq * seq <= MOST_MASK_BYTES):
        return "cudnn"
    return "plain" if seq <= PLAIN_UP_TO else "chunked"


def device_kind() -> str:
    """What the arrays of this process live on: "cpu", "cuda" (NVIDIA), "rocm" (AMD), …"""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


def self_attend(
    path: Path,
    q_LBSKGd: jax.Array,
    k_LBSKd: jax.Array,
    v_LBSKd: jax.Array,
    sight: Sight,
    window: int | None,
    mask_BSS: jax.Array | None,
) -> jax.Array:
    """Causal attention of a sequence to itself, -> [L,B,S,K,G,d]. mask: for `plain` and `cudnn`."""
    if path == "chunked":
        return chunked_attend(
            q_LBSKGd,
            k_LBSKd,
            v_LBSKd,
            window=window,
            key_valid_BS=sight.key_valid_BS,
            segment_BS=sight.segment_BS,
        )
    if path == "cudnn":
        return checkpoint_name(_cudnn(q_LBSKGd, k_LBSKd, v_LBSKd, window, mask_BSS), OUTPUT)
    assert mask_BSS is not None
    return attend(q_LBSKGd, k_LBSKd, v_LBSKd, mask_BSS)


def _cudnn(
    q_LBSKGd: jax.Array,
    k_LBSKd: jax.Array,
    v_LBSKd: jax.Array,
    window: int | None,
    mask_BSS: jax.Array | None,
) -> jax.Array:
    """cuDNN's flash attention. A query that may see nothing is finite, and never read."""
    lanes, batch, seq = q_LBSKGd.shape[:3]

    def rows(x: jax.Array) -> jax.Array:
        """[L,B,S,…,d] -> [B,S,heads of all lanes,d], so that lanes share one mask."""
        return jnp.moveaxis(x, 0, 2).reshape(batch, seq, -1, x.shape[-1])

    out = jax.nn.dot_product_attention(
        rows(q_LBSKGd),
        rows(k_LBSKd),
        rows(v_LBSKd),
        mask=None if mask_BSS is None else mask_BSS[:, None],
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    shape = (batch, seq, lanes, *q_LBSKGd.shape[3:])
    return jnp.moveaxis(out.reshape(shape), 2, 0)
