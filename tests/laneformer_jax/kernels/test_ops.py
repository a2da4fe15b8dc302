"""Every kernel equals its reference in jnp, in the interpreter, and the model's own code where it has
the same piece.

Float32 differs by the order of sums. In bfloat16 both round at the same places, so that most values are
equal bit for bit and none is further off than the last bit of the largest.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer_jax.kernels import attention, gate_up, head, project, qkv
from laneformer_jax.kernels.cases import CASES, MOST_ERROR, Sizes, relative_error, to_float32
from laneformer_jax.kernels.project import Past, Rule
from laneformer_jax.kernels.tuning import shipped
from laneformer_jax.presets import preset

EPS = 1e-5
BF16 = jnp.bfloat16
DTYPES = [jnp.float32, BF16]
few = partial(settings, deadline=None)


def array(seed, *shape, dtype=jnp.float32, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


def norm_weight(seed, shape, dtype):
    return 1 + array(seed, *shape, dtype=dtype, scale=0.2)


def close(got, want):
    """Equal but for the order of float32 sums and what a last bit of bfloat16 follows from it."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        assert g.shape == w.shape
        g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
        largest = np.abs(w).max()
        if jax.tree.leaves(got)[0].dtype == BF16:
            np.testing.assert_allclose(g, w, rtol=2**-7, atol=2**-8 * largest)
            assert np.mean(g != w) <= 0.1
        else:
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5 * largest)


# hidden, query heads, kv heads, head size, neurons of a lane: the 2B shape over 16, 350M over 8, and odd
# ones.
SHAPES = [(192, 4, 2, 24, 96), (128, 2, 1, 64, 64), (80, 3, 3, 10, 20), (36, 6, 2, 6, 10)]
SLOTS = 16
ANY_SHAPE = dict(
    lanes=st.integers(1, 8), shape=st.sampled_from(SHAPES), dtype=st.sampled_from(DTYPES)
)


def check_qkv(b, tuning, lanes, shape, dtype, positions):
    hidden, heads, kv_heads, d, _ = shape
    weights = qkv.Weights(
        norm_weight(1, (lanes, hidden) if lanes == 3 else (hidden,), dtype),
        *(
            array(i, lanes, n * d, hidden, dtype=dtype, scale=hidden**-0.5)
            for i, n in enumerate((heads, kv_heads, kv_heads))
        ),
    )
    turn = array(5, d // 2, scale=3)
    cache = [array(i, lanes, kv_heads, SLOTS, d, dtype=dtype) for i in (6, 7)]
    x_LD = array(8, lanes, hidden, dtype=dtype, scale=3)
    run = jax.jit(lambda *a: qkv.qkv(b, *a, tuning.qkv), static_argnums=2)
    expect = jax.jit(qkv.reference, static_argnums=2)
    for position in positions:
        args = (x_LD, weights, EPS, (jnp.cos(turn), jnp.sin(turn)), *cache, jnp.int32(position))
        got, want = run(*args), expect(*args)
        close(got, want)
        others = np.arange(SLOTS) != position % SLOTS
        for after, before in zip(got[1:], cache, strict=True):
            np.testing.assert_array_equal(after[:, :, others], before[:, :, others])


@pytest.mark.parametrize(
    ("lanes", "shape", "dtype"), [(8, SHAPES[0], BF16), (3, SHAPES[2], jnp.float32)]
)
def test_qkv(interpreter, small, lanes, shape, dtype):
    check_qkv(interpreter, small, lanes, shape, dtype, (0, 5, SLOTS - 1, SLOTS, 3 * SLOTS + 2))


@pytest.mark.slow
@few(max_examples=20)
@given(**ANY_SHAPE, position=st.integers(0, 100))
def test_qkv_of_any_shape(interpreter, small, lanes, shape, dtype, position):
    check_qkv(interpreter, small, lanes, shape, dtype, (position, position + SLOTS))


# kv heads, queries per kv head, head size, slots, window
RINGS = [(2, 2, 96, 160, 128), (1, 1, 64, 128, None), (2, 3, 40, 160, 50), (1, 2, 128, 96, 96)]


@pytest.fixture(scope="module")
def attends(interpreter, small):
    """Compiled once for a ring and dtype; hypothesis varies the rest."""
    made = {}

    def get(ring, dtype):
        if (ring, dtype) not in made:
            window = ring[-1]
            made[ring, dtype] = (
                jax.jit(
                    lambda *a: attention.attend(interpreter, *a[:4], window, a[4], small.attention)
                ),
                jax.jit(lambda *a: attention.reference(*a, window)),
            )
        return made[ring, dtype]

    return get


def check_attention(attends, ring, dtype, tokens, seed, lanes=2):
    """Against the model's attention in float32. In bfloat16 a weight is off by half a last bit at most,
    2⁻⁹ of itself, and so is the output."""
    kv_heads, groups, d, slots, _ = ring
    q_LO = array(seed, lanes, kv_heads * groups * d, dtype=dtype, scale=2)
    keys, values = (array(seed + i, lanes, kv_heads, slots, d, dtype=dtype) for i in (1, 2))
    run, expect = attends(ring, dtype)
    position = jnp.int32(tokens - 1)
    counter = attention.empty_counter(lanes, kv_heads)
    got, counter = run(q_LO, keys, values, position, counter)
    assert not counter.any()
    wide = [x.astype(jnp.float32) for x in (q_LO, keys, values)]
    exact = np.asarray(expect(*wide, position))
    tolerance = 1e-6 if dtype == jnp.float32 else 2 * 2**-9
    error = np.asarray(got, np.float32) - exact
    assert np.abs(error).max() <= tolerance * np.abs(values).max()
    return error, np.asarray(expect(q_LO, keys, values, position), np.float32) - exact


# 1, around a block of keys, around each window, around each ring.
EDGES = [1, 127, 128, 129, 49, 50, 51, 95, 96, 97, 159, 160, 161]
LENGTHS = st.one_of(st.sampled_from(EDGES), st.integers(1, 500))


@few(max_examples=10)
@given(ring=st.sampled_from(RINGS[:1]), tokens=LENGTHS, seed=st.integers(0, 2**16))
def test_attention(attends, ring, tokens, seed):
    check_attention(attends, ring, BF16, tokens, seed)


@pytest.mark.slow
@few(max_examples=60)
@given(
    ring=st.sampled_from(RINGS),
    dtype=st.sampled_from(DTYPES),
    tokens=LENGTHS,
    seed=st.integers(0, 2**16),
    lanes=st.integers(1, 8),
)
def test_attention_of_any_shape(attends, ring, dtype, tokens, seed, lanes):
    check_attention(attends, ring, dtype, tokens, seed, lanes)


def test_attention_is_closer_to_exact_than_the_model_is(attends):
    """Its softmax weights are rounded like the model's, its scores are not."""
    mine, models = check_attention(attends, RINGS[0], BF16, 300, 1)
    assert np.square(mine).mean() <= np.square(models).mean()


PASTS = ("none", "these lanes", "all lanes")


def check_project(b, tuning, lanes, hidden, inputs, past, dtype):
    x_LD, own_LD = (array(i, lanes, hidden, dtype=dtype) for i in (1, 2))
    a_LI = array(3, lanes, inputs, dtype=dtype)
    w_LDI = array(4, lanes, hidden, inputs, dtype=dtype, scale=inputs**-0.5)
    total = array(5, hidden) if past == "all lanes" else None
    delayed = None if past == "none" else Past(own_LD, total)
    for scale in (1.0, 8**0.5):
        rule = Rule(scale, delayed)

        def run(x_LD, a_LI, w_LDI, rule=rule):
            return project.project(b, x_LD, a_LI, w_LDI, rule, "out", tuning.out)

        args = (x_LD, a_LI, w_LDI)
        close(jax.jit(run)(*args), jax.jit(partial(project.reference, rule=rule))(*args))


@pytest.mark.parametrize(
    ("past", "lanes", "hidden", "inputs", "dtype"),
    [("these lanes", 8, 192, 24, BF16), ("all lanes", 1, 100, 384, jnp.float32)],
)
def test_project(interpreter, small, lanes, hidden, inputs, past, dtype):
    check_project(interpreter, small, lanes, hidden, inputs, past, dtype)


@pytest.mark.slow
@few(max_examples=20)
@given(**ANY_SHAPE, past=st.sampled_from(PASTS), mlp=st.booleans())
def test_project_of_any_shape(interpreter, small, lanes, shape, dtype, past, mlp):
    hidden, heads, _, d, neurons = shape
    inputs = neurons if mlp else heads * d
    check_project(interpreter, small, lanes, hidden, inputs, past, dtype)


def test_project_sends_its_output_in_float32_for_a_sum(interpreter, small):
    args = [array(i, *s, dtype=BF16) for i, s in enumerate([(1, 64), (1, 32), (1, 64, 32)])]
    past = Past(args[0], array(3, 64))
    for rule in (Rule(), Rule(1.0, past)):
        made = project.project(interpreter, *args, rule, "out", small.out, send=True)
        assert (made.y_LD.dtype, made.sent_LD.dtype) == (BF16, jnp.float32)
        np.testing.assert_array_equal(np.asarray(made.y_LD, np.float32), made.sent_LD)
        close(made[:2], project.reference(*args, rule))


def check_gate_up(b, tuning, lanes, hidden, neurons, dtype):
    x_LD = array(1, lanes, hidden, dtype=dtype)
    weights = gate_up.Weights(
        norm_weight(2, (hidden,), dtype),
        *(array(i, lanes, neurons, hidden, dtype=dtype, scale=hidden**-0.5) for i in (3, 4)),
    )
    got = jax.jit(lambda x, w: gate_up.gate_up(b, x, w, EPS, tuning.gate_up))(x_LD, weights)
    close(got, jax.jit(lambda x, w: gate_up.reference(x, w, EPS))(x_LD, weights))


@pytest.mark.parametrize(
    ("lanes", "hidden", "neurons", "dtype"), [(8, 96, 48, BF16), (1, 80, 20, jnp.float32)]
)
def test_gate_up(interpreter, small, lanes, hidden, neurons, dtype):
    check_gate_up(interpreter, small, lanes, hidden, neurons, dtype)


@pytest.mark.slow
@few(max_examples=20)
@given(**ANY_SHAPE)
def test_gate_up_of_any_shape(interpreter, small, lanes, shape, dtype):
    check_gate_up(interpreter, small, lanes, shape[0], shape[4], dtype)


def check_head(b, tuning, lanes, hidden, per_lane, dtype):
    vocab = 70
    x_LD = array(1, lanes, hidden, dtype=dtype, scale=2)
    norm = norm_weight(2, (lanes, hidden) if per_lane else (hidden,), dtype)
    want = jax.jit(lambda x: head.norm_total_reference(x, norm, EPS))(x_LD)
    total_D = jax.jit(lambda x: head.norm_total(b, x, norm, EPS, tuning.norm))(x_LD)
    close(total_D, want)

    w_VD = array(3, vocab, hidden, dtype=dtype, scale=hidden**-0.5)
    w_VD = w_VD.at[45].set(w_VD[60])  # two rows that are always equal
    first = jnp.int32(1000)  # the id of row 0; of the ids the last two are beyond the vocabulary
    run = jax.jit(lambda t, w: head.logits(b, t, lanes, w, tuning.head, first, 1000 + vocab - 2))
    expect = jax.jit(lambda t, w: head.logits_reference(t, lanes, w))
    for direction in (1, -1, w_VD[45]):  # the last one makes the equal rows the likeliest
        total = want * direction if isinstance(direction, int) else direction.astype(jnp.float32)
        logits_V, best_N, id_N = run(total, w_VD)
        close(logits_V[:-2], expect(total, w_VD)[:-2])
        assert (logits_V[-2:] == -jnp.inf).all()
        assert id_N[jnp.argmax(best_N)] == 1000 + jnp.argmax(logits_V)
        assert best_N.max() == logits_V.astype(jnp.float32).max()


@pytest.mark.parametrize(("per_lane", "dtype"), [(False, BF16), (True, jnp.float32)])
def test_head(interpreter, small, per_lane, dtype):
    check_head(interpreter, small, 4, 96, per_lane, dtype)


@pytest.mark.slow
@few(max_examples=20)
@given(**ANY_SHAPE, per_lane=st.booleans())
def test_head_of_any_shape(interpreter, small, lanes, shape, dtype, per_lane):
    check_head(interpreter, small, lanes, shape[0], per_lane, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "lanes"), [("laneformer-2b", 1), ("350m", 8)])
@pytest.mark.parametrize("name", CASES)
def test_at_full_width(interpreter, name, model, lanes):
    """The model's own sizes with the blocks of the shipped table, in bfloat16 against float32."""
    case = CASES[name][0](Sizes(preset(model), lanes, 129), 0)
    exact = jax.jit(case.reference)(to_float32(case.arguments))
    table = shipped("sm_90")
    got = jax.jit(lambda arguments: case.kernel(interpreter, table, arguments))(case.arguments)
    assert relative_error(got, exact) < MOST_ERROR
