"""The engine: golden tokens on any number of devices, logits of the full forward, and what it promises."""

import jax
import numpy as np
import pytest
from flax import nnx
from goldens import BFLOAT16, COMMITTED, FLOAT32, golden_of

from decode import Engine, Request, Sampling, engine, generate, loop
from laneformer_jax import Laneformer, cache_blocks, costs
from laneformer_jax.cache import RingCache
from laneformer_jax.errors import UserError
from laneformer_jax.presets import preset
from laneformer_jax.sharding import make_mesh

SHAPE = dict(
    vocab_size=61,  # no multiple of the devices
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=128,
    sliding_window=6,
    swa_layers=(0, 1),
    initializer_range=0.5,
)
PROMPT = tuple(np.random.default_rng(0).integers(3, 61, 13).tolist())
HOT = Sampling(temperature=0.9, top_k=30, top_p=0.95, min_p=0.001, seed=4, logprobs=3)


def build(**overrides):
    return Laneformer(preset("tiny", **{**SHAPE, **overrides}), rngs=nnx.Rngs(3))


@pytest.fixture(scope="module")
def model():
    return build()


def golden(name, request):
    case = golden_of(request, name)
    return Laneformer.from_pretrained(case.folder), case.want


def collected(engine, request):
    """Tokens of every sample, and the bursts."""
    bursts = list(engine.stream(request))
    tokens = [
        np.concatenate(parts).tolist() for parts in zip(*(b.tokens for b in bursts), strict=True)
    ]
    return tokens, bursts


SLOW = [pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        pytest.param(name, n, marks=[] if (name, n) in ((COMMITTED, 1), (COMMITTED, 4)) else SLOW)
        for name in FLOAT32
        for n in (1, 2, 4, 8)
    ],
)
def test_golden_tokens(name, devices, request):
    model, expected = golden(name, request)
    if model.config.num_lanes % devices:
        pytest.skip(f"{model.config.num_lanes} lanes do not fit {devices} devices")
    if devices > 1:
        model.mesh = make_mesh(lane=devices)
    for kind in ("gen", "genpad"):
        out = generate(
            model,
            expected[f"{kind}.prompt_ids"],
            expected[f"{kind}.tokens"].shape[1],
            attention_mask=expected.get(f"{kind}.attention_mask"),
            return_logits=True,
        )
        assert out.tokens.tolist() == expected[f"{kind}.tokens"].tolist()
        np.testing.assert_allclose(out.logits, expected[f"{kind}.step_logits"], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        pytest.param(name, chunk, marks=[] if (name, chunk) == (COMMITTED, 7) else SLOW)
        for name in FLOAT32
        for chunk in (1, 7, 64)
    ],
)
def test_logits_of_the_full_forward_at_every_length(name, chunk, request):
    """Prompts of W−1 … 2W+3 tokens, each behind its own prefill, and two tokens on."""
    model, expected = golden(name, request)
    window = model.config.sliding_window or 8
    ids = np.resize(expected["input_ids"][:1], (1, 2 * window + 5))
    for length in range(window - 1, 2 * window + 4):
        out = generate(model, ids[:, :length], 3, prefill_chunk=chunk, return_logits=True)
        whole = np.concatenate([ids[:, :length], out.tokens], axis=1)
        logits = np.asarray(model(np.pad(whole, ((0, 0), (0, 32 - whole.shape[1])))))
        np.testing.assert_allclose(out.logits, logits[:, length - 1 : length + 2], atol=1e-4)


@pytest.mark.slow
def test_bfloat16_golden(request):
    """Its weights in float32 give the full forward's logits; in bfloat16 they are as near to them as it is.

    Two computations in bfloat16 are compared with float32's, not with each other: how XLA orders the
    sums of either differs between versions and processors.
    """
    case = golden_of(request, BFLOAT16)
    ids = case.want["input_ids"][:1]
    exact = Laneformer.from_pretrained(case.folder, dtype="float32")
    rounded = Laneformer.from_pretrained(case.folder, dtype="bfloat16")
    for model in (exact, rounded):
        out = generate(model, ids, 8, prefill_chunk=7, return_logits=True)
        whole = np.concatenate([ids, out.tokens], axis=1)
        behind = slice(ids.shape[1] - 1, -1)
        want = np.asarray(exact(whole))[:, behind]
        full = np.asarray(model(whole).astype("float32"))[:, behind]
        errors = [np.asarray(x, np.float32) - want for x in (out.logits, full)]
        atol = 1e-4 if model is exact else 2**-6 * np.abs(want).max()
        np.testing.assert_allclose(errors[0], 0, atol=atol)
    engine_error, full_error = (np.sqrt(np.mean(error**2)) for error in errors)
    assert 0 < engine_error < 1.25 * full_error


@pytest.mark.parametrize("new", [1, 20])
def test_a_window_layer_forgets_at_exactly_its_distance(new):
    window = 6
    model = build(num_hidden_layers=1, swa_layers=(0,), sliding_window=window, broadcast_delay=1)
    prompt = np.asarray([PROMPT])
    far, near = prompt.copy(), prompt.copy()
    far[0, -1 - window] += 1
    near[0, -window] += 1

    def logits(ids):
        return generate(model, ids, new, prefill_chunk=5, return_logits=True).logits

    base = logits(prompt)
    np.testing.assert_array_equal(logits(far), base)
    assert np.abs(logits(near)[:, 0] - base[:, 0]).max() > 1e-3


@pytest.mark.smoke
def test_same_seed_same_answer_for_any_burst(model):
    request = Request(PROMPT, 40, HOT)
    tokens, bursts = collected(Engine(model), request)
    assert len(tokens[0]) == 40
    assert [b.finished for b in bursts] == [[None], [None], ["length"]]  # 1, 32, 7 tokens
    again, pieces = collected(Engine(model, burst=5), request)
    assert again == tokens
    for field in ("logprobs", "top_ids", "top_logprobs"):
        one, other = (np.concatenate([getattr(b, field)[0] for b in bs]) for bs in (bursts, pieces))
        np.testing.assert_array_equal(one, other)
    assert collected(Engine(model), Request(PROMPT, 40, Sampling(0.9, seed=5)))[0] != tokens


@pytest.mark.parametrize(
    "head",
    ["replicate", pytest.param("lane", marks=SLOW), pytest.param("tied", marks=SLOW)],
)
def test_lane_devices_draw_the_same_tokens(head):
    """With the head by vocabulary, of which the last device has fewer rows."""
    kind = dict(tie_word_embeddings=True) if head == "tied" else dict(lm_head_type=head)
    model = build(**kind)
    sampling = Sampling(
        temperature=0.9,
        top_k=30,
        top_p=0.95,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias={7: 2.0, 60: 1.0},
        logprobs=4,
    )
    request = Request(PROMPT, 12, sampling, n=2)
    alone, bursts = collected(Engine(model), request)
    model.mesh = make_mesh(lane=8)
    spread, others = collected(Engine(model), request)
    assert spread == alone
    for a, b in zip(bursts, others, strict=True):
        np.testing.assert_allclose(a.logprobs[1], b.logprobs[1], atol=1e-4)
        np.testing.assert_array_equal(a.top_ids[1], b.top_ids[1])
    assert max(int(b.top_ids[0].max()) for b in others) < 61


def test_log_probabilities_are_the_models_own(model):
    sampling = Sampling(temperature=0.5, logit_bias={5: 3.0}, logprobs=4)
    tokens, bursts = collected(Engine(model), Request(PROMPT, 6, sampling))
    ids = np.asarray([[*PROMPT, *tokens[0]]])
    logits = np.asarray(model(ids), np.float64)[0, len(PROMPT) - 1 : -1]
    exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    got = np.concatenate([b.logprobs[0] for b in bursts])
    np.testing.assert_allclose(got, exact[np.arange(6), tokens[0]], atol=1e-4)
    top = np.concatenate([b.top_ids[0] for b in bursts])
    np.testing.assert_array_equal(top, np.argsort(-exact, axis=-1)[:, :4])
    values = np.concatenate([b.top_logprobs[0] for b in bursts])
    np.testing.assert_allclose(values, np.take_along_axis(exact, top, axis=-1), atol=1e-4)


def test_samples_share_the_prompt_and_differ(model):
    sampling = Sampling(temperature=1.0, seed=9)
    three, _ = collected(Engine(model), Request(PROMPT, 10, sampling, n=3))
    one, _ = collected(Engine(model), Request(PROMPT, 10, sampling))
    assert three[0] == one[0]
    assert len({tuple(t) for t in three}) == 3


def test_any_stop_token_ends_a_sample_and_is_not_part_of_it(model):
    sampling = Sampling(temperature=1.2, seed=1)
    whole, _ = collected(Engine(model), Request(PROMPT, 24, sampling, n=4))
    stops = (whole[0][4], whole[1][9])
    cut, bursts = collected(Engine(model), Request(PROMPT, 24, sampling, stops, n=4))
    for before, after, finish in zip(whole, cut, bursts[-1].finished, strict=True):
        at = next((i for i, token in enumerate(before) if token in stops), None)
        assert after == before[:at]
        assert finish == ("length" if at is None else "stop")


def test_speculation_changes_no_greedy_token(model):
    """On a prompt that repeats and on one that does not, alone and as several samples."""
    for prompt in (PROMPT, PROMPT[:5] * 4):
        plain, _ = collected(Engine(model), Request(prompt, 40))
        tokens, bursts = collected(Engine(model), Request(prompt, 40, speculate="ngram", n=2))
        assert tokens == [plain[0]] * 2
        proposed, accepted = (sum(getattr(b, f) for b in bursts) for f in ("proposed", "accepted"))
        assert 0 <= accepted <= proposed
    assert accepted > 0


def test_speculation_draws_the_same_text_from_the_same_seed(model):
    sampling = Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=2)
    prompt = PROMPT[:5] * 4
    plain, _ = collected(Engine(model), Request(prompt, 30, sampling))
    request = Request(prompt, 30, sampling, speculate="ngram")
    assert collected(Engine(model, burst=5), request)[0] == plain


def test_a_closed_stream_leaves_the_engine_right(model):
    eng = Engine(model, burst=4)
    whole, _ = collected(eng, Request(PROMPT, 20))
    stream = eng.stream(Request(PROMPT[::-1], 60))
    next(stream)
    stream.close()
    assert collected(eng, Request(PROMPT, 20))[0] == whole


def test_the_context_is_checked_before_anything_runs(model):
    eng = Engine(model, context=20)
    with pytest.raises(UserError, match=r"prompt of 13 tokens plus max_new_tokens 8 exceeds .* 20"):
        eng.stream(Request(PROMPT, 8))
    assert eng.check(Request(PROMPT, 8, overflow="cut")) == 7
    assert len(collected(eng, Request(PROMPT, 8, overflow="cut"))[0][0]) == 7
    with pytest.raises(UserError, match="context of 20"):
        eng.stream(Request([1] * 20, 1, overflow="cut"))


def test_the_last_positions_of_the_context(model):
    """By prefill and one by one, far behind the window: no slot is overwritten, no position taken twice."""
    ids = np.resize(np.asarray([PROMPT]), (1, 124))
    out = generate(model, ids, 4, return_logits=True)
    logits = model(np.concatenate([ids, out.tokens], axis=1))
    np.testing.assert_allclose(out.logits, np.asarray(logits)[:, 123:-1], atol=1e-4)
    out = generate(model, ids[:, :4], 124, return_logits=True)
    logits = model(np.concatenate([ids[:, :4], out.tokens], axis=1))
    np.testing.assert_allclose(out.logits, np.asarray(logits)[:, 3:-1], atol=1e-4)
    with pytest.raises(UserError, match="max_new_tokens 20 exceeds"):
        generate(model, ids, 20)


def test_a_prompt_of_4090_tokens_that_asks_for_20_of_4096():
    """Refused, or cut to the 6 that fit; those have the positions and keys of the full forward."""
    model = build(max_position_embeddings=4096, num_hidden_layers=2, swa_layers=(0,))
    ids = np.random.default_rng(1).integers(3, 61, (1, 4090))
    with pytest.raises(UserError, match="prompt of 4090 tokens plus max_new_tokens 20 exceeds"):
        generate(model, ids, 20)
    out = generate(model, ids, 20, overflow="cut", return_logits=True)
    assert out.tokens.shape == (1, 6)
    logits = model(np.concatenate([ids, out.tokens], axis=1))
    np.testing.assert_allclose(out.logits, np.asarray(logits)[:, 4089:-1], atol=1e-4)


def test_a_request_that_does_not_fit_memory_is_refused(model, monkeypatch):
    eng = Engine(model)
    needed = eng.cache_bytes(4, 13, 20)
    monkeypatch.setattr(engine, "_free_bytes", lambda: needed - 1)
    with pytest.raises(UserError, match="n 4: the cache takes"):
        eng.stream(Request(PROMPT, 20, n=4))
    monkeypatch.setattr(engine, "_free_bytes", lambda: needed)
    eng.check(Request(PROMPT, 20, n=4))


def test_an_answer_over_the_border_of_a_cache_block():
    """A full layer of 320 slots in two blocks, sliding ones of 306, and positions from 250 to 261."""
    model = build(max_position_embeddings=400)
    ids = np.resize(np.asarray([PROMPT]), (1, 250))
    out = generate(model, ids, 12, prefill_chunk=300, return_logits=True)
    logits = model(np.concatenate([ids, out.tokens], axis=1))
    np.testing.assert_allclose(out.logits, np.asarray(logits)[:, 249:-1], atol=1e-4)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_the_cache_is_the_memory_that_costs_tell(model, in_blocks):
    config = model.config
    cache = RingCache.empty(config, 3, 96, 16, np.float32, config.num_lanes, in_blocks)
    held = sum(ring.nbytes for ring in jax.tree.leaves((cache.keys, cache.values)))
    assert held == 3 * costs.kv_ring_bytes(config, 96, 16, "float32")
    # Two layers hold W + 16 positions and one all 96: K heads × d floats, keys and values.
    assert held == 3 * 2 * 8 * 2 * 4 * (2 * (6 + 16) + 96)


def test_int8_is_near(model):
    """Each weight is at most half a step of its row off; what that does to the logits is small."""
    ids = np.asarray([PROMPT])
    exact = generate(model, ids, 1, return_logits=True).logits[0, 0]
    (out,) = Engine(model, weights="int8").run(
        [np.asarray(PROMPT, np.int32)], 1, Sampling(), logits=True
    )
    off = out.logits_BtV[0, 0] - exact
    assert 0 < np.abs(off).max() < 0.05 * np.ptp(exact)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(context=200), "context: 200 must be from 1 to 128"),
        (dict(vocab_size=62), "vocab_size: 62 must be from 1 to 61"),
        (dict(burst=0), "burst: 0"),
        (dict(prefill_chunk=True), "prefill_chunk: True"),
        (dict(weights="int4"), r"weights: 'int4' must be one of 'native', 'int8' \(did you mean"),
        (dict(kernels="xlb"), "kernels: 'xlb' must be one of .*'xla'"),
    ],
)
def test_engine_options_are_named(model, change, message):
    with pytest.raises(UserError, match=message):
        Engine(model, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(prompt_ids=[]), "prompt_ids: is empty"),
        (dict(prompt_ids="text"), "prompt_ids: str"),
        (dict(prompt_ids=[1, 2.5]), "prompt_ids: 2.5"),
        (dict(prompt_ids=[-1]), "prompt_ids: -1"),
        (dict(prompt_ids=[61]), "prompt_ids: 61 must be from 0 to 60"),
        (dict(max_new_tokens=0), "max_new_tokens: 0"),
        (dict(stop_token_ids=(99,)), "stop_token_ids: 99"),
        (dict(stop_token_ids=[1]), "stop_token_ids: .* tuple"),
        (dict(n=0), "n: 0 must be from 1"),
        (dict(overflow="cutt"), r"overflow: 'cutt' .*did you mean 'cut'"),
        (dict(speculate="n-gram"), "speculate: 'n-gram' must be one of 'ngram'"),
        (dict(sampling=None), "sampling: None"),
    ],
)
def test_requests_are_named(model, change, message):
    with pytest.raises(UserError, match=message):
        Engine(model).check(Request(**{**dict(prompt_ids=PROMPT, max_new_tokens=2), **change}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(temperature=-0.5), "temperature: -0.5"),
        (dict(top_k=-1), "top_k: -1"),
        (dict(top_p=0), "top_p: 0 must be above 0 to 1"),
        (dict(top_p=float("nan")), "top_p: nan"),
        (dict(min_p=1.5), "min_p: 1.5"),
        (dict(repetition_penalty=0), "repetition_penalty: 0"),
        (dict(presence_penalty=3), "presence_penalty: 3 must be from -2 to 2"),
        (dict(frequency_penalty="1"), "frequency_penalty: '1'"),
        (dict(logit_bias={"5": 1}), "logit_bias: '5'"),
        (dict(logit_bias={5: 101}), r"logit_bias\[5\]: 101"),
        (dict(logit_bias=[5]), "logit_bias: "),
        (dict(seed=-1), "seed: -1"),
        (dict(logprobs=21), "logprobs: 21 must be from 0 to 20"),
    ],
)
def test_samplings_are_named(change, message):
    with pytest.raises(UserError, match=message):
        Sampling(**change)


def test_the_device_is_not_waited_for_per_token(model):
    """A burst is one program, and the next is launched before one is read."""
    eng, events = Engine(model, burst=8), []
    launch, read = loop.burst, loop.unpacked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "burst", lambda *args: events.append("launch") or launch(*args))
        patch.setattr(loop, "unpacked", lambda out: events.append("read") or read(out))
        collected(eng, Request(PROMPT, 17))  # 1 + 8 + 8
    assert events == ["launch", "launch", "read", "launch", "read", "read"]


def test_a_program_is_compiled_once_wherever_the_weights_came_from(model):
    """Weights that were told their device (as orbax's are) and others: no second program, no third
    for what the first burst hands to the second."""
    collected(Engine(model), Request(PROMPT, 40))
    programs = loop.burst._cache_size(), loop.prefill._cache_size()
    told = Laneformer(model.config, rngs=nnx.Rngs(3))
    nnx.update(told, jax.device_put(nnx.state(model), jax.devices()[0]))
    tokens, _ = collected(Engine(told), Request(PROMPT, 40))
    assert tokens == collected(Engine(model), Request(PROMPT, 40))[0]
    assert (loop.burst._cache_size(), loop.prefill._cache_size()) == programs


def test_layers_that_are_alike_are_traced_once():
    """Of six layers a sliding one and a full one."""
    attend, traced = cache_blocks.attend, []
    shape = dict(num_hidden_layers=6, swa_layers=(0, 1, 2, 3), hidden_size=96)
    deep = build(**shape)  # as no other test's
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_blocks, "attend", lambda *a: traced.append(1) or attend(*a))
        next(Engine(deep).run([np.asarray([3], np.int32)], 1, Sampling()))
    assert len(traced) == 2


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=SLOW)])
def test_ids_without_text_are_never_drawn(devices):
    """A vocabulary padded beyond the tokenizer's 50, whose padding the model finds likeliest of all."""
    model = build()
    rows = model.lm_head.weight[...]
    # Of the logits of a row and of its opposite one is above 0, and 30 times another's.
    model.lm_head.weight[...] = rows.at[50:55].set(30 * rows[:5]).at[55:60].set(-30 * rows[:5])
    greedy, _ = collected(Engine(model), Request(PROMPT, 16))
    assert min(greedy[0]) >= 50
    if devices > 1:
        model.mesh = make_mesh(lane=devices)
    engine = Engine(model, vocab_size=50)
    for sampling in (
        Sampling(logprobs=5),
        Sampling(
            5.0, top_k=55, top_p=0.99, min_p=0.001, repetition_penalty=0.5, logit_bias={60: 100.0}
        ),
    ):
        tokens, bursts = collected(engine, Request(PROMPT, 16, sampling, n=4))
        assert max(map(max, tokens)) < 50
        if sampling.logprobs:
            tops = np.concatenate([b.top_ids[0] for b in bursts])
            assert tops.max() < 50
            assert max(b.logprobs[0].max() for b in bursts) <= 1e-6  # of what may be drawn
