"""Causal self-attention in memory proportional to the sequence: FlashAttention-2's recurrence (Dao, 2023).

Queries and keys are cut into chunks of C. A chunk of queries meets only the key chunks that its window
reaches; the backward pass makes the scores again from the saved log-sum-exp.

Shapes: L lanes of this device, B batch, S sequence, N chunks, C tokens of a chunk, K kv heads of a lane,
G queries per kv head, d head size; Q and T stand for C among queries and among keys.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from laneformer_jax.attention import visibility
from laneformer_jax.precision import rounded

OUTPUT, LOG_SUM = "attention_output", "attention_log_sum"  # names for remat policies
CHUNK = 128  # of 64, 128 and 256 the fastest on a CPU, by a third over whole rows at 512 tokens

Sides = tuple[jax.Array | None, jax.Array | None]  # key_valid_BS bool, segment_BS int32


@dataclass(frozen=True)
class _Cut:
    """How a sequence is cut."""

    chunk: int
    number: int
    window: int | None

    def first(self, i: jax.Array) -> jax.Array:
        """First key chunk that query chunk `i` sees."""
        if self.window is None:
            return jnp.zeros_like(i)
        return jnp.maximum(i * self.chunk - (self.window - 1), 0) // self.chunk

    def mask(self, sides: Sides, i: jax.Array, j: jax.Array) -> jax.Array:
        """[1,B or 1,1,1,Q,T], as `visibility` has it, of query chunk `i` and key chunk `j`."""
        valid_NBC, segment_NBC = sides
        index_C = jnp.arange(self.chunk, dtype=jnp.int32)
        mask_BQT = visibility(
            i * self.chunk + index_C,
            j * self.chunk + index_C,
            self.window,
            None if valid_NBC is None else valid_NBC[j],
            None if segment_NBC is None else segment_NBC[i],
            None if segment_NBC is None else segment_NBC[j],
        )
        return mask_BQT[None, :, None, None]


def chunked_attend(
    q_LBSKGd: jax.Array,
    k_LBSKd: jax.Array,
    v_LBSKd: jax.Array,
    *,
    window: int | None = None,
    key_valid_BS: jax.Array | None = None,
    segment_BS: jax.Array | None = None,
    chunk: int = CHUNK,
) -> jax.Array:
    """What `attend` gives with the mask of `visibility`, -> [L,B,S,K,G,d].

    Scores and softmax are float32, weights rounded to the inputs' dtype. A query that may see nothing
    gets zeros (`attend`: the mean of everything); neither is ever read.
    """
    seq = q_LBSKGd.shape[2]
    chunk = min(chunk, seq)
    number = -(-seq // chunk)
    cut = _Cut(chunk, number, window)
    q_NLBKGQd = jnp.moveaxis(_chunks(q_LBSKGd, 2, cut), 3, 5)
    k_NLBKTd = jnp.moveaxis(_chunks(k_LBSKd, 2, cut), 3, 4)
    v_NLBKTd = jnp.moveaxis(_chunks(v_LBSKd, 2, cut), 3, 4)
    # Keys beyond the end are later than every query, so causality hides them.
    sides = tuple(None if x is None else _chunks(x, 1, cut) for x in (key_valid_BS, segment_BS))
    out_NLBKGQd = _attend(cut, q_NLBKGQd, k_NLBKTd, v_NLBKTd, sides)
    out = jnp.moveaxis(out_NLBKGQd, 5, 3)  # [N,L,B,Q,K,G,d]
    out = jnp.moveaxis(out, 0, 2).reshape(*q_LBSKGd.shape[:2], -1, *q_LBSKGd.shape[3:])
    return out[:, :, :seq]


def _chunks(x: jax.Array, axis: int, cut: _Cut) -> jax.Array:
    """Cut `axis` into chunks, padded at the end: [..., S, ...] -> [N, ..., C, ...]."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, cut.number * cut.chunk - x.shape[axis])
    x = jnp.pad(x, pad) if pad[axis][1] else x
    shape = (*x.shape[:axis], cut.number, cut.chunk, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(cut: _Cut, q: jax.Array, k: jax.Array, v: jax.Array, sides: Any) -> jax.Array:
    return _forward(cut, q, k, v, sides)[0]


def _forward(
    cut: _Cut, q: jax.Array, k: jax.Array, v: jax.Array, sides: Any
) -> tuple[jax.Array, jax.Array]:
    """Output [N,L,B,K,G,Q,d] and log-sum-exp of the scores, float32 [N,L,B,K,G,Q]."""
    lowest = float(np.finfo(np.float32).min)

    def of_queries(_: Any, at: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        i, q_LBKGQd = at

        def add_keys(j: jax.Array, state: Any) -> Any:
            out, top, total = state
            mask = cut.mask(sides, i, j)
            scores = jnp.where(mask, _scores(q_LBKGQd, k[j]), lowest)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
            # Where nothing is visible yet, exp(0) must not count.
            weights = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
            shrink = jnp.exp(top - new_top)
            part = _product("lbkgqt,lbktd->lbkgqd", rounded(weights, v.dtype), v[j])
            out = out * shrink[..., None] + part
            return out, new_top, total * shrink + jnp.sum(weights, axis=-1)

        zeros = _zeros(q_LBKGQd)
        state = (zeros, zeros[..., 0] + lowest, zeros[..., 0])
        out, top, total = jax.lax.fori_loop(cut.first(i), i + 1, add_keys, state)
        seen = total > 0
        total = jnp.where(seen, total, 1.0)
        out = rounded(out / total[..., None], q.dtype)
        return None, (out, jnp.where(seen, top + jnp.log(total), 0.0))

    _, (out, log_sum) = jax.lax.scan(of_queries, None, (_counted(cut), q))
    return out, log_sum


def _forward_saving(
    cut: _Cut, q: jax.Array, k: jax.Array, v: jax.Array, sides: Any
) -> tuple[jax.Array, Any]:
    out, log_sum = _forward(cut, q, k, v, sides)
    out = checkpoint_name(out, OUTPUT)
    log_sum = checkpoint_name(log_sum, LOG_SUM)
    return out, (q, k, v, sides, out, log_sum)


def _backward(cut: _Cut, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    q, k, v, sides, out, log_sum = saved
    scale = q.shape[-1] ** -0.5

    def of_queries(d_kv: Any, at: Any) -> tuple[Any, Any]:
        i, q_i, d_out_i, out_i, log_sum_i = at
        inner_i = jnp.sum(d_out_i.astype(jnp.float32) * out_i.astype(jnp.float32), axis=-1)

        def add_keys(j: jax.Array, state: Any) -> Any:
            d_q, d_k, d_v = state
            mask, k_j, v_j = cut.mask(sides, i, j), k[j], v[j]
            weights = jnp.where(mask, jnp.exp(_scores(q_i, k_j) - log_sum_i[..., None]), 0.0)
            d_weights = _product("lbkgqd,lbktd->lbkgqt", d_out_i, v_j)
            d_scores = rounded(weights * (d_weights - inner_i[..., None]) * scale, q.dtype)
            weights = rounded(weights, q.dtype)
            d_q += _product("lbkgqt,lbktd->lbkgqd", d_scores, k_j)
            d_k = d_k.at[j].add(_product("lbkgqt,lbkgqd->lbktd", d_scores, q_i))
            d_v = d_v.at[j].add(_product("lbkgqt,lbkgqd->lbktd", weights, d_out_i))
            return d_q, d_k, d_v

        zeros = _zeros(q_i)
        d_q, *d_kv = jax.lax.fori_loop(cut.first(i), i + 1, add_keys, (zeros, *d_kv))
        return tuple(d_kv), rounded(d_q, q.dtype)

    zeros = (_zeros(k), _zeros(v))
    at = (_counted(cut), q, d_out, out, log_sum)
    (d_k, d_v), d_q = jax.lax.scan(of_queries, zeros, at)
    d_sides = tuple(None if x is None else np.zeros(x.shape, jax.dtypes.float0) for x in sides)
    return d_q, rounded(d_k, k.dtype), rounded(d_v, v.dtype), d_sides


_attend.defvjp(_forward_saving, _backward)


def _scores(q_LBKGQd: jax.Array, k_LBKTd: jax.Array) -> jax.Array:
    scores = _product("lbkgqd,lbktd->lbkgqt", q_LBKGQd, k_LBKTd)
    return scores * np.float32(q_LBKGQd.shape[-1] ** -0.5)


def _product(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(form, x, y, preferred_element_type=jnp.float32)


def _counted(cut: _Cut) -> jax.Array:
    return jnp.arange(cut.number, dtype=jnp.int32)


def _zeros(like: jax.Array) -> jax.Array:
    """Float32 zeros; in a shard_map an array that differs between devices where `like` does."""
    return jnp.zeros_like(like, dtype=jnp.float32)
