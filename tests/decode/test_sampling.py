"""Every sampler's frequencies over 20,000 draws of the engine, with and without speculation.

What is expected is worked out in float64 with sorts, which the engine does without.
"""

import numpy as np
import pytest
from flax import nnx
from scipy import stats

from decode import Engine, Sampling
from decode.sampling import Filters, Knobs, kept, uniform
from decode.shards import Shards
from decode.speculate import DRAFT, NONE, propose
from laneformer_jax import Laneformer
from laneformer_jax.presets import preset

VOCAB, DRAWS = 48, 20_000
SAMPLERS = {
    "temperature": Sampling(temperature=0.7),
    "hot": Sampling(temperature=2.0),
    "top_k": Sampling(temperature=1.0, top_k=5),
    "top_p": Sampling(temperature=1.3, top_p=0.8),
    "min_p": Sampling(temperature=1.3, min_p=0.1),
    "all filters": Sampling(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
    "bias": Sampling(temperature=1.0, logit_bias={3: 4.0, 7: -100.0, 11: 3.0}),
    "penalties": Sampling(
        temperature=1.2, repetition_penalty=1.6, presence_penalty=0.7, frequency_penalty=0.4
    ),
}
QUICK = ("all filters", "penalties")  # the others' paths are in these two


@pytest.fixture(scope="module")
def model():
    config = preset(
        "tiny",
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=8,
        max_position_embeddings=64,
        num_lanes=2,
        broadcast_delay=1,
        sliding_window=8,
        swa_layers=(0,),
        initializer_range=0.3,
    )
    return Laneformer(config, rngs=nnx.Rngs(1))


@pytest.fixture(scope="module")
def prompt(model):
    """… a b t … a b: the draft is t, and of all t the one that the model finds likeliest there."""
    tried = np.tile([9, 4, 5, 0, 21, 22, 4, 5], (VOCAB, 1))
    tried[:, 3] = np.arange(VOCAB)
    chances = probabilities(Sampling(temperature=1.0), logits_after(model, tried), [])
    return tried[np.argmax(chances[np.arange(VOCAB), np.arange(VOCAB)])].tolist()


def logits_after(model, ids):
    return np.asarray(model(np.atleast_2d(ids)), np.float64)[:, -1]


def probabilities(sampling, logits, prompt, answer=()):
    """Exact distribution [..., V] behind `logits`."""
    z = logits.copy()
    for token, bias in sampling.logit_bias.items():
        z[..., token] += bias
    for token in {*prompt, *answer}:
        worse, better = z[..., token] * sampling.repetition_penalty, z[..., token]
        better = better / sampling.repetition_penalty
        z[..., token] = np.where(z[..., token] > 0, better, worse)
    for token in answer:
        z[..., token] -= sampling.frequency_penalty
    for token in set(answer):
        z[..., token] -= sampling.presence_penalty
    p = np.exp((z - z.max(-1, keepdims=True)) / sampling.temperature)
    p /= p.sum(-1, keepdims=True)
    order = np.argsort(-p, axis=-1)
    ranked = np.take_along_axis(p, order, axis=-1)
    if sampling.top_k:
        ranked[..., sampling.top_k :] = 0
    before = np.cumsum(ranked, axis=-1) - ranked
    ranked[before >= sampling.top_p * ranked.sum(-1, keepdims=True)] = 0
    ranked[ranked < sampling.min_p * ranked[..., :1]] = 0
    np.put_along_axis(p, order, ranked, axis=-1)
    return p / p.sum(-1, keepdims=True)


def check_frequencies(tokens, p):
    counts = np.bincount(tokens, minlength=VOCAB)
    expected = p * len(tokens)
    assert counts[expected == 0].sum() == 0
    rare = (expected > 0) & (expected < 5)
    seen = [*counts[expected >= 5], counts[rare].sum()]
    wanted = [*expected[expected >= 5], expected[rare].sum()]
    if wanted[-1] < 1:  # too few for the approximation
        seen, wanted = seen[:-1], wanted[:-1]
    wanted = np.asarray(wanted) * sum(seen) / sum(wanted)
    assert stats.chisquare(seen, wanted).pvalue > 1e-3


def draws(model, prompt, sampling, new, draft):
    outs = list(
        Engine(model).run([np.asarray(prompt, np.int32)], new, sampling, copies=DRAWS, draft=draft)
    )
    rows = [np.concatenate([o.tokens_Bt[i, : o.count_B[i]] for o in outs]) for i in range(DRAWS)]
    return np.stack(rows), outs


@pytest.mark.parametrize("draft", [0, DRAFT], ids=["plain", "speculation"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in SAMPLERS],
)
def test_frequencies(model, prompt, name, draft):
    sampling = SAMPLERS[name]
    tokens, outs = draws(model, prompt, sampling, 2, draft)
    first = probabilities(sampling, logits_after(model, prompt)[0], prompt)
    check_frequencies(tokens[:, 0], first)
    # Behind the draft's token, which speculation takes from one pass with the first.
    proposed = prompt[3]
    behind = tokens[tokens[:, 0] == proposed, 1]
    assert len(behind) > 500
    logits = logits_after(model, [*prompt, proposed])[0]
    check_frequencies(behind, probabilities(sampling, logits, prompt, [proposed]))
    if draft:
        accepted = sum(int(o.accepted) for o in outs)
        assert accepted >= len(behind)
        assert sum(int(o.proposed) for o in outs) >= DRAWS


def test_no_two_draws_share_their_number():
    numbers = np.asarray(uniform(np.uint32(3), np.arange(100), np.arange(100) * 0 + 7))
    assert len(set(numbers.tolist())) == 100
    assert (
        numbers.tolist()
        != np.asarray(uniform(np.uint32(4), np.arange(100), np.full(100, 7))).tolist()
    )


@pytest.mark.parametrize("seed", range(3))
def test_filters_keep_what_a_sort_keeps(seed):
    """Over a vocabulary with ties, at the edges of every filter."""
    rng = np.random.default_rng(seed)
    z = np.round(rng.normal(size=(4, 200)) * 2, 1).astype(np.float32)
    z -= z.max(-1, keepdims=True)
    for top_k, top_p, min_p in [(1, 1.0, 0.0), (200, 0.5, 0.0), (17, 0.9, 0.0), (0, 1.0, 1.0)]:
        sampling = Sampling(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
        got = np.asarray(kept(z, Knobs.of(sampling, 200), Filters.of(sampling), Shards(200))) > 0
        for row, mask in zip(z.astype(np.float64), got, strict=True):
            ranked = np.sort(row)[::-1]
            least = ranked[top_k - 1] if top_k else -np.inf
            p = np.where(row >= least, np.exp(row), 0)
            values = np.unique(row[p > 0])[::-1]  # whole ties, likeliest first
            mass = np.cumsum([p[row == v].sum() for v in values])
            last = values[np.argmax(mass >= top_p * p.sum() - 1e-5)] if top_p < 1 else values[-1]
            want = (row >= last) & (p > 0) & (np.exp(row) >= min_p - 1e-6)
            np.testing.assert_array_equal(mask, want)


def test_drafts_continue_the_longest_then_latest_match():
    history = np.zeros((5, 16), np.int32)
    history[0, :8] = [1, 2, 3, 4, 9, 1, 2, 3]  # three tokens match
    history[1, :9] = [7, 2, 3, 4, 8, 2, 3, 2, 3]  # two, twice: the later one
    history[2, :6] = [1, 2, 3, 4, 5, 6]  # none
    history[3, :3] = [5, 5, 5]  # the match overlaps what is newest
    history[4, :1] = [0]  # unwritten slots behind it hold zeros too
    newest = np.asarray([7, 8, 5, 2, 0])
    drafts = np.asarray(propose(history, newest, 4)).tolist()
    assert drafts[0] == [4, 9, 1, 2]
    assert drafts[1] == [2, 3, NONE, NONE]
    assert drafts[2] == [NONE] * 4
    assert drafts[3] == [5, NONE, NONE, NONE]
    assert drafts[4] == [NONE] * 4
