"""Cross-entropy in chunks: the whole's numbers without the whole's logits; z-loss; nothing valid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import largest

from laneformer_jax.loss import head_loss, token_losses

B, S, D, V = 2, 21, 8, 40


def inputs():
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(V, D)), rng.normal(size=(B, S, D))
    targets = rng.integers(0, V, (B, S)).astype(np.int32)
    mask = rng.uniform(size=(B, S)) * (rng.uniform(size=(B, S)) < 0.7)
    return *(np.float32(a) for a in (weight, x)), targets, np.float32(mask)


def head(weight, x):
    return jnp.einsum("bsd,vd->bsv", x, weight)


def loss(weight, x, targets, mask, **kwargs):
    return head_loss(head, weight, x, targets, mask, vocab=V, **kwargs)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_chunks_give_the_whole_loss_and_gradient(z_loss):
    args = inputs()

    def both(weight, x, limit):
        def of(weight, x):
            return loss(weight, x, *args[2:], z_loss=z_loss, logit_bytes=limit)

        (objective, nats), pull = jax.vjp(of, weight, x)
        return objective, nats, *pull((jnp.full_like(objective, 0.5), jnp.zeros_like(nats)))

    whole, parts = (
        jax.jit(both, static_argnums=2)(*args[:2], limit) for limit in (2**30, 4 * B * V * 4)
    )
    for a, b in zip(parts, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    logits = args[1] @ args[0].T
    log_z = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    target = np.take_along_axis(logits, args[2][..., None], -1)[..., 0]
    nats = np.sum((log_z - target) * args[3])
    np.testing.assert_allclose(parts[1], nats, rtol=1e-5)
    np.testing.assert_allclose(parts[0], nats + z_loss * np.sum(log_z**2 * args[3]), rtol=1e-5)


def test_no_more_logits_than_asked_for():
    weight, x, targets, mask = inputs()

    def whole(weight, x):
        return loss(weight, x, targets, mask, logit_bytes=4 * B * V * 3)[0]

    jaxpr = jax.make_jaxpr(jax.grad(whole, (0, 1)))(weight, x).jaxpr
    assert largest(jaxpr) <= max(weight.size, x.size) < B * S * V


def test_a_token_without_weight_may_be_anything():
    weight, x, targets, mask = inputs()
    x = x.copy()
    x[mask == 0] = np.nan
    for limit in (2**30, 4 * B * V * 4):
        objective, nats = loss(weight, x, targets, mask, logit_bytes=limit)
        assert np.isfinite(objective)
        assert objective == nats
        assert loss(weight, x, targets, 0 * mask, logit_bytes=limit) == (0, 0)


def test_losses_are_those_of_the_logits():
    weight, x, targets, mask = inputs()
    losses = token_losses(head(weight, x), targets)
    np.testing.assert_allclose(loss(weight, x, targets, mask)[0], np.sum(losses * mask), rtol=1e-6)
