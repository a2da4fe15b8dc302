"""The engine with kernels gives what it gives in plain JAX."""

import numpy as np
import pytest
from flax import nnx

from decode.engine import Engine
from decode.request import Request, Sampling
from laneformer_jax import Laneformer
from laneformer_jax.kernels.names import INTERPRETED
from laneformer_jax.presets import preset
from laneformer_jax.sharding import make_mesh

# A window of 6, so that its ring comes round several times.
SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    broadcast_delay=1,
    max_position_embeddings=64,
    sliding_window=6,
    swa_layers=(0,),
    initializer_range=0.5,
)
PROMPT = [int(t) for t in np.random.default_rng(0).integers(0, 60, 9)]


def build(lanes=8, **overrides):
    return Laneformer(preset("tiny", **SHAPE | dict(num_lanes=lanes) | overrides), rngs=nnx.Rngs(3))


def answer(engine, **request):
    """Tokens and logits of all samples."""
    bursts = list(engine.stream(Request(PROMPT, **request), logits=True))
    tokens, logits = zip(*[(b.tokens, b.logits) for b in bursts], strict=True)
    return (
        [np.concatenate(parts).tolist() for parts in zip(*tokens, strict=True)],
        [np.concatenate(parts) for parts in zip(*logits, strict=True)],
    )


def check(model, kernels, plain=None, vocab_size=None, **request):
    """The same tokens, and logits but for the order of sums."""
    want = answer(Engine(plain or model, vocab_size=vocab_size), **request)
    got = answer(Engine(model, kernels=kernels, vocab_size=vocab_size), **request)
    assert got[0] == want[0]
    for g, w in zip(got[1], want[1], strict=True):
        finite = np.isfinite(w)
        np.testing.assert_array_equal(np.isfinite(g), finite)
        np.testing.assert_allclose(g[finite], w[finite], atol=1e-5 * np.abs(w[finite]).max())


def test_greedy():
    """With ids that may not be drawn, which are the likeliest ones."""
    model = build(lanes=2, vocab_size=60)
    model.lm_head.weight[...] = model.lm_head.weight[...].at[50:].multiply(9.0)
    check(model, "interpret-fused", vocab_size=50, max_new_tokens=14)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
@pytest.mark.parametrize("kernels", INTERPRETED)
def test_every_kernel_and_number_of_lanes(kernels, lanes):
    check(build(lanes), kernels, max_new_tokens=20)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", INTERPRETED)
def test_sampling_on_the_device(kernels):
    """From the logits that the head's kernel keeps."""
    sampling = Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=5)
    check(build(), kernels, max_new_tokens=20, sampling=sampling)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "devices"), [("interpret-fused", 8), ("interpret-fused", 2), ("interpret-layer", 8)]
)
def test_lanes_over_devices(kernels, devices):
    config = build().config
    plain = Laneformer(config, rngs=nnx.Rngs(3))
    model = Laneformer(config, rngs=nnx.Rngs(3), mesh=make_mesh(lane=devices))
    check(model, kernels, plain, max_new_tokens=14)


@pytest.mark.slow
def test_what_the_kernels_do_not_do_goes_the_plain_way():
    """Several samples, several tokens at once, and a head of lanes."""
    model = build(lm_head_type="lane")
    check(model, "interpret-fused", max_new_tokens=10, speculate="ngram")
    check(model, "interpret-token", max_new_tokens=10, n=2, sampling=Sampling(temperature=1.0))
