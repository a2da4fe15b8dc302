"""The engine with kernels gives the tokens and logits that it gives in plain JAX."""

from types import SimpleNamespace

import numpy as np
import pytest
from flax import nnx

from decode import loop
from decode.engine import Engine
from decode.request import Sampling
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


def answer(engine, new, sampling=None, copies=1, draft=0):
    """Tokens [sample, token] and logits [sample, token, V]."""
    prompts = [np.asarray(PROMPT, np.int32)]
    options = dict(copies=copies, draft=draft, logits=True)
    rows = [([], []) for _ in range(copies)]
    for out in engine.run(prompts, new, sampling or Sampling(), **options):
        for i, (tokens, logits) in enumerate(rows):
            tokens += out.tokens_Bt[i, : out.count_B[i]].tolist()
            logits += list(np.asarray(out.logits_BtV)[i, : out.count_B[i]])
    return [tokens for tokens, _ in rows], np.asarray([logits for _, logits in rows])


def check(model, kernels, new, plain=None, vocab_size=None, **options):
    """The same tokens, and logits but for the order of sums."""
    want = answer(Engine(plain or model, vocab_size=vocab_size), new, **options)
    got = answer(Engine(model, kernels=kernels, vocab_size=vocab_size), new, **options)
    assert got[0] == want[0]
    finite = np.isfinite(want[1])
    np.testing.assert_array_equal(np.isfinite(got[1]), finite)
    largest = np.abs(want[1][finite]).max()
    np.testing.assert_allclose(got[1][finite], want[1][finite], atol=1e-5 * largest)


def test_greedy():
    """With ids that may not be drawn, which are the likeliest ones."""
    model = build(lanes=2, vocab_size=60, num_hidden_layers=1)
    model.lm_head.weight[...] = model.lm_head.weight[...].at[50:].multiply(9.0)
    check(model, "interpret-fused", 14, vocab_size=50)


def test_only_lanes_over_gpus_are_compiled_for_sums_under_way():
    """XLA elsewhere need not know the options; tests/benchmarks/test_aot_h200.py tells what they do."""

    def layout(mesh, platform):
        return SimpleNamespace(mesh=mesh, first_device=SimpleNamespace(platform=platform))

    assert loop.burst_of(layout(None, "gpu")) is loop.burst
    assert loop.burst_of(layout("lanes", "cpu")) is loop.burst
    assert loop.burst_of(layout("lanes", "gpu")) is not loop.burst


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
@pytest.mark.parametrize("kernels", INTERPRETED)
def test_every_kernel_and_number_of_lanes(kernels, lanes):
    check(build(lanes), kernels, 20)


DRAWN = dict(temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=5)
EVERYTHING = dict(
    temperature=1.2,
    top_k=9,
    min_p=0.02,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={7: 2.0, 9: -3.0},
    seed=2,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "sampling"),
    [(kernels, DRAWN) for kernels in INTERPRETED]
    + [("interpret-fused", EVERYTHING), ("interpret-fused", dict(repetition_penalty=1.5))],
)
def test_sampling_on_the_device(kernels, sampling):
    """From the logits that the head's kernel keeps; with a penalty its own choice is not the likeliest."""
    check(build(), kernels, 20, sampling=Sampling(**sampling))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "devices"),
    [("interpret-fused", n) for n in (1, 2, 4, 8)] + [("interpret-layer", n) for n in (2, 8)],
)
def test_lanes_over_devices(kernels, devices):
    config = build().config
    plain = Laneformer(config, rngs=nnx.Rngs(3))
    model = Laneformer(config, rngs=nnx.Rngs(3), mesh=make_mesh(lane=devices))
    check(model, kernels, 14, plain)


@pytest.mark.slow
def test_sampling_over_devices():
    config = build().config
    plain = Laneformer(config, rngs=nnx.Rngs(3))
    model = Laneformer(config, rngs=nnx.Rngs(3), mesh=make_mesh(lane=8))
    check(model, "interpret-fused", 14, plain, sampling=Sampling(**DRAWN))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["interpret-fused", "interpret-token"])
def test_drafts(kernels):
    """Steps with a proposal go the plain way, those without one through the kernels, on one cache."""
    check(build(), kernels, 20, draft=3)


@pytest.mark.slow
def test_what_the_kernels_do_not_do_goes_the_plain_way():
    """Several samples, several tokens at once, and a head of lanes."""
    model = build(lm_head_type="lane")
    check(model, "interpret-fused", 10, draft=2)
    check(model, "interpret-token", 10, copies=2, sampling=Sampling(temperature=1.0))
