"""Next-token cross-entropy, also where each lane device holds only its part of the vocabulary.

Shapes: B batch, S sequence, V vocabulary (of this device when it is split).
"""

import jax
import jax.numpy as jnp


def token_losses(
    logits_BSV: jax.Array, targets_BS: jax.Array, vocab_axis: str | None = None
) -> jax.Array:
    """−log softmax(logits)[target], float32 [B,S].

    vocab_axis: the mesh axis over which the vocabulary is split in equal, ordered parts; None: not split.
    The result is equal on all devices of that axis.
    """
    logits_BSV = logits_BSV.astype(jnp.float32)
    if vocab_axis is None:
        log_z_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
        return log_z_BS - jnp.take_along_axis(logits_BSV, targets_BS[..., None], axis=-1)[..., 0]
    size = logits_BSV.shape[-1]
    local_BS = targets_BS - jax.lax.axis_index(vocab_axis) * size
    mine_BS = (local_BS >= 0) & (local_BS < size)
    index_BS1 = jnp.clip(local_BS, 0, size - 1)[..., None]
    picked_BS = jnp.take_along_axis(logits_BSV, index_BS1, axis=-1)[..., 0]
    target_BS = jax.lax.psum(jnp.where(mine_BS, picked_BS, 0.0), vocab_axis)
    top_BS = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits_BSV, axis=-1)), vocab_axis)
    sum_BS = jax.lax.psum(jnp.sum(jnp.exp(logits_BSV - top_BS[..., None]), axis=-1), vocab_axis)
    return jnp.log(sum_BS) + top_BS - target_BS


def weighted_sum(losses_BS: jax.Array, weights_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum of weighted losses and sum of weights, float32 scalars; divide over all data that counts as one."""
    weights_BS = weights_BS.astype(jnp.float32)
    # A padded query may see nothing; whatever it computes stays out of the sum.
    losses_BS = jnp.where(weights_BS > 0, losses_BS, 0.0)
    return jnp.sum(losses_BS * weights_BS), jnp.sum(weights_BS)
