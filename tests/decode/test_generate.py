"""Generation: what may differ between calls (padding, chunks, bursts) does not change the tokens."""

import numpy as np
import pytest
from flax import nnx

import decode
from laneformer_jax import Laneformer
from laneformer_jax.errors import UserError
from laneformer_jax.presets import preset
from laneformer_jax.sharding import make_mesh

SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=64,
    sliding_window=6,
    swa_layers=(0, 1, 2),
    initializer_range=0.5,
)


def build(**overrides):
    return Laneformer(preset("tiny", **{**SHAPE, **overrides}), rngs=nnx.Rngs(3))


@pytest.fixture(scope="module")
def model():
    return build()


NEW = 16
PROMPT = np.random.default_rng(0).integers(3, 64, (1, 13)).astype(np.int32)


@pytest.fixture(scope="module")
def reference(model):
    """Greedy tokens and logits by a full forward pass per token, without any cache."""
    start = PROMPT.shape[1]
    ids, logits = np.zeros((1, start + NEW), np.int32), []
    ids[:, :start] = PROMPT
    for i in range(start, start + NEW):  # what stands behind a token does not reach it
        logits.append(np.asarray(model(ids))[:, i - 1])
        ids[:, i] = logits[-1].argmax(-1)
    return ids[:, start:], np.stack(logits, axis=1)


@pytest.mark.smoke
@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_cached_equals_full_forward(model, reference, chunk):
    out = decode.generate(model, PROMPT, NEW, prefill_chunk=chunk, return_logits=True)
    tokens, logits = reference
    assert out.tokens.tolist() == tokens.tolist()
    np.testing.assert_allclose(out.logits, logits, atol=1e-4)


@pytest.mark.parametrize("length", [13, 50])
def test_left_padded_batch_equals_single_prompts(model, length):
    """A prompt of one token beside a long one: no position counts padding, no row sees nothing."""
    long = np.resize(PROMPT, (1, length))
    short = long[:, -1:]
    ids = np.concatenate([long, np.zeros_like(long)])
    ids[1, -1] = short[0, 0]
    mask = np.ones_like(ids)
    mask[1, :-1] = 0
    new = min(NEW, 64 - length)
    both = decode.generate(model, ids, new, attention_mask=mask, return_logits=True)
    assert np.isfinite(both.logits).all()
    for row, prompt in enumerate((long, short)):
        alone = decode.generate(model, prompt, new).tokens[0].tolist()
        assert both.tokens[row].tolist() == alone


@pytest.mark.parametrize(
    "head",
    [
        "vocab_parallel",
        *(pytest.param(h, marks=pytest.mark.slow) for h in ("replicate", "lane")),
    ],
)
def test_lanes_over_devices_equal_one_device(head):
    model = build(lm_head_type=head)
    alone = decode.generate(model, PROMPT, 6, return_logits=True)
    model.mesh = make_mesh(lane=8)
    spread = decode.generate(model, PROMPT, 6, return_logits=True)
    assert spread.tokens.tolist() == alone.tokens.tolist()
    np.testing.assert_allclose(spread.logits, alone.logits, atol=1e-4)


def test_burst_length_changes_nothing(model):
    whole = decode.generate(model, PROMPT, NEW, 0.8, seed=5).tokens
    tokens = decode.generate(model, PROMPT, NEW, 0.8, seed=5, burst=3).tokens
    assert tokens.tolist() == whole.tolist()
    streamed = np.concatenate(list(decode.stream(model, PROMPT, NEW, 0.8, seed=5)), axis=1)
    assert streamed.tolist() == whole.tolist()


def test_sampling_follows_the_seed_and_the_temperature(model, reference):
    one = decode.generate(model, PROMPT, NEW, 1.0, seed=1).tokens.tolist()
    assert decode.generate(model, PROMPT, NEW, 1.0, seed=1).tokens.tolist() == one
    assert decode.generate(model, PROMPT, NEW, 1.0, seed=2).tokens.tolist() != one
    assert decode.generate(model, PROMPT, NEW, 1e-4).tokens.tolist() == reference[0].tolist()


def test_a_row_ends_with_its_end_token(model, reference):
    tokens = reference[0][0].tolist()
    end = tokens[4]
    first = tokens.index(end)
    out = decode.generate(model, PROMPT, NEW, eos_token_id=end).tokens[0].tolist()
    assert out == tokens[: first + 1]  # and the call ends with it, since no other row goes on


def test_the_context_is_never_overrun(model):
    prompt = np.resize(PROMPT, (1, 60))
    assert decode.generate(model, prompt, 4).tokens.shape == (1, 4)
    with pytest.raises(UserError, match="context of 64"):
        decode.generate(model, prompt, 5)
    assert decode.generate(model, prompt, 20, overflow="cut").tokens.shape == (1, 4)
    with pytest.raises(UserError, match="exceeds"):
        decode.generate(model, np.resize(PROMPT, (1, 64)), 1, overflow="cut")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(prompt_ids=np.zeros((1, 0), np.int32)), "prompt_ids"),
        (dict(prompt_ids=[[1, 64]]), "0…63"),
        (dict(prompt_ids=[[1.5]]), "integer"),
        (dict(max_new_tokens=0), "max_new_tokens: 0"),
        (dict(temperature=-1.0), "temperature: -1.0"),
        (dict(temperature=float("nan")), "temperature: nan"),
        (dict(attention_mask=np.ones((2, 2))), "attention_mask: shape"),
        (dict(prompt_ids=[[1, 2]], attention_mask=[[1, 0]]), "on the left"),
        (dict(prefill_chunk=0), "prefill_chunk: 0"),
        (dict(prefill_chunk=1.5), "prefill_chunk: 1.5 must be an integer"),
        (dict(prompt_ids=[[1, 2], [1]]), "prompt_ids: rows differ"),
        (dict(prompt_ids="abc"), "prompt_ids: str"),
        (dict(max_new_tokens=3.5), "max_new_tokens: 3.5 must be an integer"),
        (dict(max_new_tokens=True), "max_new_tokens: True must be an integer"),
        (dict(temperature=float("inf")), "temperature: inf"),
        (dict(temperature=1e-40), "temperature: 1e-40"),  # 0 in float32
        (dict(temperature="1"), "temperature: '1' must be a number"),
        (dict(seed=-1), "seed: -1 must be from 0 to"),
        (dict(seed=2**70), "seed: "),
        (dict(eos_token_id=-5), "eos_token_id: -5 must be from 0 to 63"),
        (dict(eos_token_id=[1, 2]), "eos_token_id: .* must be an integer"),
    ],
)
def test_bad_input_is_named(model, change, message):
    with pytest.raises(UserError, match=message):
        decode.generate(model, **{**dict(prompt_ids=PROMPT, max_new_tokens=2), **change})
