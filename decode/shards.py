"""One device's part of the vocabulary, and the few small exchanges that a draw from all parts needs.

Shapes: B batch, v this device's part of the vocabulary, n lane devices.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Shards:
    """`vocab` rows in equal parts over the mesh axis `axis`; all of them here when it is None.

    Reductions over `axis` give what is equal on all its devices.
    """

    vocab: int
    axis: str | None = None

    @property
    def count(self) -> int:
        return 1 if self.axis is None else jax.lax.axis_size(self.axis)

    @property
    def size(self) -> int:
        """v; the last part may reach beyond the vocabulary."""
        return -(-self.vocab // self.count)

    def ids(self) -> jax.Array:
        """Token ids of this device's part, int32 [v]."""
        return self._index() * self.size + jnp.arange(self.size, dtype=jnp.int32)

    def sum(self, x: jax.Array) -> jax.Array:
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        return x if self.axis is None else jax.lax.pmax(x, self.axis)

    def min(self, x: jax.Array) -> jax.Array:
        return x if self.axis is None else jax.lax.pmin(x, self.axis)

    def gather(self, x: jax.Array) -> jax.Array:
        """[...] of each device -> [..., n], equal on all of them."""
        if self.axis is None:
            return x[..., None]
        one_hot_n = jnp.arange(self.count) == self._index()
        # A sum with zeros, because only a sum is known to be equal everywhere afterwards.
        return jax.lax.psum(jnp.where(one_hot_n, x[..., None], 0), self.axis)

    def before(self, x: jax.Array) -> jax.Array:
        """Sum of [...] over the devices whose parts stand before this one's."""
        if self.axis is None:
            return jnp.zeros_like(x)
        return jnp.sum(jnp.where(jnp.arange(self.count) < self._index(), self.gather(x), 0), -1)

    def at(self, x_Bv: jax.Array, token_B: jax.Array) -> jax.Array:
        """x of a token, wherever it is kept: [B]."""
        return self.sum(jnp.sum(jnp.where(self.ids() == token_B[:, None], x_Bv, 0), axis=-1))

    def _index(self) -> jax.Array | int:
        return 0 if self.axis is None else jax.lax.axis_index(self.axis)
