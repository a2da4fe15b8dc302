"""Next-token cross-entropy, also where each lane device holds only its part of the vocabulary.

Shapes: B batch, S sequence, V vocabulary (of this device when it is split), C tokens of a chunk; x is what
a head reads, [..., S, D].
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

# Float32 logits of at most so many bytes exist at a time.
LOGIT_BYTES = 2**28

Head = Callable[[Any, jax.Array], jax.Array]  # weights, [..., C, D] -> logits [B, C, V]


def token_losses(
    logits_BSV: jax.Array, targets_BS: jax.Array, vocab_axis: str | None = None
) -> jax.Array:
    """−log softmax(logits)[target], float32 [B,S].

    vocab_axis: the mesh axis over which the vocabulary is split in equal, ordered parts; None: not split.
    The result is equal on all devices of that axis.
    """
    return _log_z_and_target(logits_BSV, targets_BS, vocab_axis)[0]


def _log_z_and_target(
    logits_BSV: jax.Array, targets_BS: jax.Array, vocab_axis: str | None
) -> tuple[jax.Array, jax.Array]:
    """Loss and log Σ exp(logits), float32 [B,S]."""
    logits_BSV = logits_BSV.astype(jnp.float32)
    if vocab_axis is None:
        log_z_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
        return log_z_BS - _picked(logits_BSV, targets_BS), log_z_BS
    local_BS = targets_BS - jax.lax.axis_index(vocab_axis) * logits_BSV.shape[-1]
    target_BS = jax.lax.psum(_picked(logits_BSV, local_BS), vocab_axis)
    top_BS = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits_BSV, axis=-1)), vocab_axis)
    sum_BS = jax.lax.psum(jnp.sum(jnp.exp(logits_BSV - top_BS[..., None]), axis=-1), vocab_axis)
    log_z_BS = jnp.log(sum_BS) + top_BS
    return log_z_BS - target_BS, log_z_BS


def _picked(logits_BSV: jax.Array, ids_BS: jax.Array) -> jax.Array:
    """The logit of each id, 0 where the id is none of these rows' [B,S].

    By a sum: the gradient of a gather is scattered into zeros as large as all logits.
    """
    here_BSV = jnp.arange(logits_BSV.shape[-1]) == ids_BS[..., None]
    return jnp.sum(jnp.where(here_BSV, logits_BSV, 0.0), axis=-1)


def head_loss(
    head: Head,
    weights: Any,
    x: jax.Array,
    targets_BS: jax.Array,
    loss_mask_BS: jax.Array,
    *,
    vocab: int,
    vocab_axis: str | None = None,
    z_loss: float = 0.0,
    logit_bytes: int = LOGIT_BYTES,
) -> tuple[jax.Array, jax.Array]:
    """What training minimises, and the weighted sum of token losses; float32 scalars.

    The former adds z_loss · (log Σ exp(logits))² per token (Chowdhery et al., 2022, section 5), which
    keeps logits small. No more than `logit_bytes` of float32 logits exist at a time: beyond that the
    sequence is cut into chunks, and the gradient is made together with the loss, so that no logits are
    computed twice.

    Args:
        head: makes logits of `weights` and a part of `x`.
        x: [..., S, D]; with `vocab_axis` one that differs between the devices of that axis.
        vocab: V, rows of logits on this device.
    """
    batch, seq = targets_BS.shape
    cut = _Cut(head, vocab_axis, z_loss)
    number = min(seq, -(-4 * batch * seq * vocab // logit_bytes))
    if number == 1:
        return cut.loss(weights, x, targets_BS, loss_mask_BS)
    chunk = -(-seq // number)
    number = -(-seq // chunk)
    parts = tuple(
        _chunks(value, axis, number, chunk)
        for value, axis in ((x, x.ndim - 2), (targets_BS, 1), (loss_mask_BS, 1))
    )
    return _chunked(cut, weights, *parts)


class _Cut:
    """The loss of one chunk."""

    def __init__(self, head: Head, vocab_axis: str | None, z_loss: float):
        self.head, self.vocab_axis, self.z_loss = head, vocab_axis, z_loss

    def loss(
        self, weights: Any, x: jax.Array, targets_BC: jax.Array, loss_mask_BC: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        logits_BCV = self.head(weights, x)
        losses_BC, log_z_BC = _log_z_and_target(logits_BCV, targets_BC, self.vocab_axis)
        loss, _ = weighted_sum(losses_BC, loss_mask_BC)
        if not self.z_loss:
            return loss, loss
        z, _ = weighted_sum(jnp.square(log_z_BC), loss_mask_BC)
        return loss + self.z_loss * z, loss


def _chunks(x: jax.Array, axis: int, number: int, chunk: int) -> jax.Array:
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, number * chunk - x.shape[axis])
    x = jnp.pad(x, pad)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], number, chunk, *x.shape[axis + 1 :]), axis, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(cut: _Cut, weights: Any, x: Any, targets: Any, mask: Any) -> Any:
    def add(sums: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, cut.loss(weights, *part)), None

    first, rest = _first_and_rest((x, targets, mask))
    return jax.lax.scan(add, cut.loss(weights, *first), rest)[0]


def _chunked_forward(cut: _Cut, weights: Any, x: Any, targets: Any, mask: Any) -> Any:
    def one(part: Any) -> tuple[Any, Any, jax.Array]:
        x_chunk, *labels = part

        def of(weights: Any, x_chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
            return cut.loss(weights, x_chunk, *labels)

        objective, pull, loss = jax.vjp(of, weights, x_chunk, has_aux=True)
        d_weights, d_x = pull(jnp.ones_like(objective))
        # Many chunks' gradients are summed: in float32.
        return (objective, loss), jax.tree.map(_float32, d_weights), d_x

    def add(total: Any, part: Any) -> tuple[Any, jax.Array]:
        sums, d_weights, d_x = one(part)
        return jax.tree.map(jnp.add, total, (sums, d_weights)), d_x

    first, rest = _first_and_rest((x, targets, mask))
    sums, d_weights, d_first = one(first)
    (sums, d_weights), d_rest = jax.lax.scan(add, (sums, d_weights), rest)
    d_x = jnp.concatenate([d_first[None], d_rest])
    d_weights = jax.tree.map(lambda d, w: d.astype(w.dtype), d_weights, weights)
    return sums, (d_weights, d_x, mask)


def _chunked_backward(cut: _Cut, saved: Any, ct: Any) -> Any:
    d_weights, d_x, mask = saved
    scale, _ = ct  # the second result is only looked at
    return (
        jax.tree.map(lambda d: d * scale.astype(d.dtype), d_weights),
        d_x * scale.astype(d_x.dtype),
        None,
        jnp.zeros_like(mask),
    )


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _first_and_rest(parts: Any) -> tuple[Any, Any]:
    # The first chunk outside the loop: sums then start from values, not from zeros of unknown type.
    return jax.tree.map(lambda p: p[0], parts), jax.tree.map(lambda p: p[1:], parts)


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def weighted_sum(losses_BS: jax.Array, weights_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum of weighted losses and sum of weights, float32 scalars; divide over all data that counts as one."""
    weights_BS = weights_BS.astype(jnp.float32)
    # A padded query may see nothing; whatever it computes stays out of the sum.
    losses_BS = jnp.where(weights_BS > 0, losses_BS, 0.0)
    return jnp.sum(losses_BS * weights_BS), jnp.sum(weights_BS)
