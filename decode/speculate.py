"""Prompt-lookup speculation: what followed the same words before may follow again.

Of all earlier places whose last tokens are the newest ones, the longest match and of these the latest
proposes its continuation. Every proposed token is drawn as it would have been without the proposal, with
the number of its own position, and the first that comes out otherwise replaces it and ends the step. With a
draft that is certain of its token this is rejection sampling: it is accepted with the model's
probability, and what replaces it has the model's distribution without it (Leviathan et al. 2023).

Shapes: B batch, T slots, K draft tokens.
"""

import jax
import jax.numpy as jnp

DRAFT = 4
LONGEST, SHORTEST = 3, 2  # tokens of a match
NONE = -1  # no proposal


def propose(history_BT: jax.Array, newest_B: jax.Array, count: int = DRAFT) -> jax.Array:
    """Draft tokens int32 [B,K], `NONE` where there is none.

    history: tokens by position, known up to position `newest`.
    """

    def one(history_T: jax.Array, newest: jax.Array) -> jax.Array:
        slots = history_T.shape[0]
        index_T = jnp.arange(slots)
        matched_T = jnp.zeros(slots, jnp.int32)
        equal_T = jnp.ones(slots, bool)
        for back in range(LONGEST):
            shifted_T = jnp.roll(history_T, back)
            wanted = history_T[jnp.maximum(newest - back, 0)]
            equal_T &= (shifted_T == wanted) & (index_T >= back) & (newest >= back)
            matched_T += equal_T
        found_T = (matched_T >= SHORTEST) & (index_T < newest)
        at = jnp.argmax(jnp.where(found_T, matched_T * slots + index_T, -1))
        draft_index_K = at + 1 + jnp.arange(count)
        known_K = found_T[at] & (draft_index_K <= newest)
        return jnp.where(known_K, history_T[jnp.minimum(draft_index_K, slots - 1)], NONE)

    return jax.vmap(one)(history_BT, newest_B)
