"""Whole layers in one launch equal their operations one by one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer_jax.kernels import attention, gate_up, project, qkv
from laneformer_jax.kernels import layer as whole
from laneformer_jax.kernels.layer import Earlier
from laneformer_jax.kernels.project import Past, Rule
from laneformer_jax.kernels.tuning import Programs

EPS, WINDOW, SLOTS = 1e-5, 10, 16
LANES, HIDDEN, HEADS, KV_HEADS, D, NEURONS = 2, 48, 4, 2, 12, 40


def array(seed, *shape, dtype, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


@pytest.fixture(params=[jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def inputs(request):
    """Streams, weights, eps, angles, keys, values and rules of a layer."""
    dtype = request.param
    make = lambda i, *s, scale=0.2: array(i, *s, dtype=dtype, scale=scale)  # noqa: E731
    weights = whole.Weights(
        qkv.Weights(
            1 + make(0, HIDDEN),
            make(1, LANES, HEADS * D, HIDDEN),
            make(2, LANES, KV_HEADS * D, HIDDEN),
            make(3, LANES, KV_HEADS * D, HIDDEN),
        ),
        make(4, LANES, HIDDEN, HEADS * D),
        gate_up.Weights(
            1 + make(5, HIDDEN), make(6, LANES, NEURONS, HIDDEN), make(7, LANES, NEURONS, HIDDEN)
        ),
        make(8, LANES, HIDDEN, NEURONS),
    )
    turn = array(9, D // 2, dtype=jnp.float32, scale=3)
    cache = [make(i, LANES, KV_HEADS, SLOTS, D, scale=1) for i in (10, 11)]
    past = make(12, LANES, HIDDEN, scale=1)
    rules = (
        Rule(1.0, Past(past)),
        Rule(8**0.5, Past(past, array(13, HIDDEN, dtype=jnp.float32))),
    )
    x_LD = make(14, LANES, HIDDEN, scale=1)
    return x_LD, weights, EPS, (jnp.cos(turn), jnp.sin(turn)), *cache, rules


def layers_of(inputs, count=1):
    """`count` layers whose weights differ; from the second on they hear the first in the same launch."""
    _, weights, _, _, keys, values, rules = inputs
    layers = [whole.Layer(weights, keys, values, WINDOW, rules)]
    for i in range(1, count):
        scaled = weights._replace(wo_LDI=-weights.wo_LDI * i, w2_LDI=weights.w2_LDI + 0.1 * i)
        earlier = tuple(Rule(r.scale, Past(Earlier(i - 1, m))) for m, r in enumerate(rules))
        window = None if i % 2 else WINDOW
        layers.append(whole.Layer(scaled, values * i, keys + i, window, earlier))
    return layers


def one_by_one(inputs, layers, position):
    x_LD, angles = inputs[0], inputs[3]
    made = []
    for one in layers:
        w, rules = one.weights, []
        for rule in one.rules:
            past = rule.past
            if isinstance(past.own_LD, Earlier):
                past = Past(made[past.own_LD.layer][past.own_LD.module])
            rules.append(Rule(rule.scale, past))
        cache = one.keys_LKTd, one.values_LKTd
        q_LO, keys, values = qkv.reference(x_LD, w.qkv, EPS, angles, *cache, position)
        heard_LO = attention.reference(q_LO, keys, values, position, one.window)
        x_LD, attention_LD = project.reference(x_LD, heard_LO, w.wo_LDI, rules[0])
        gated_LF = gate_up.reference(x_LD, w.gate_up, EPS)
        x_LD, mlp_LD = project.reference(x_LD, gated_LF, w.w2_LDI, rules[1])
        made.append(whole.Made(attention_LD, mlp_LD, keys, values))
    return x_LD, tuple(made)


def check(got, inputs, count, position):
    """Float32 but for the order of sums. In bfloat16 what one layer rounds the next ones hear, so that after
    several both are compared with float32: at most twice as far as the operations one by one, since which
    of two roundings comes out ahead varies as much over so few numbers."""
    want = one_by_one(inputs, layers_of(inputs, count), position)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if hasattr(x, "dtype") else x, inputs[:6])
    rules = tuple(
        Rule(r.scale, Past(r.past.own_LD.astype(jnp.float32), r.past.total_D)) for r in inputs[6]
    )
    wide = (*wide, rules)
    exact = one_by_one(wide, layers_of(wide, count), position)
    for g, w, e in zip(*map(jax.tree.leaves, (got[:2], want, exact)), strict=True):
        g, w, e = (np.asarray(x, np.float32) for x in (g, w, e))
        if inputs[0].dtype == jnp.float32:
            np.testing.assert_allclose(g, w, atol=2e-6 * np.abs(w).max())
        else:
            mine, theirs = (np.sqrt(np.square(x - e).mean()) for x in (g, w))
            assert mine <= 2 * theirs + 2**-12 * np.abs(w).max()
    assert not got.scratch.counters.any()


def empty_scratch(inputs, tuning):
    dtype = inputs[0].dtype
    return whole.empty_scratch(LANES, HEADS, KV_HEADS, D, NEURONS, dtype, tuning)


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_phase_by_phase_with_many_programs(interpreter, quick, inputs, count):
    """Programs one after another share out each phase; 3 divides no number of tiles."""
    tuning = replace(quick, layer=Programs(3))
    layers = layers_of(inputs, count)
    x_LD, angles = inputs[0], inputs[3]

    @jax.jit
    def run(position, scratch):
        raws = [(x_LD, x_LD, one.keys_LKTd, one.values_LKTd) for one in layers]
        out = whole.Output(x_LD, tuple(whole.Made(*raw) for raw in raws), scratch)
        for phase in range(count * whole.PHASES):
            given = (EPS, angles, position, out.scratch, tuning, "layers")
            out = whole.run_layers(interpreter, x_LD, layers, *given, phase=phase, sofar=out)
        return out

    for position in (0, 9, 3 * SLOTS + 1):
        at = jnp.int32(position)
        check(run(at, empty_scratch(inputs, tuning)), inputs, count, at)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_one_program_through_all_meetings(interpreter, quick, inputs, count):
    """Twice, since the counters of the second launch are what the first left."""
    layers, position = layers_of(inputs, count), jnp.int32(20)
    x_LD, angles = inputs[0], inputs[3]

    @jax.jit
    def run(scratch):
        given = (EPS, angles, position, scratch, quick, "layers")
        return whole.run_layers(interpreter, x_LD, layers, *given)

    out = run(empty_scratch(inputs, quick))
    again = run(out.scratch)
    for result in (out, again):
        check(result, inputs, count, position)


def test_programs_that_cannot_meet_say_so(interpreter, quick, inputs):
    tuning = replace(quick, layer=Programs(2))
    scratch = empty_scratch(inputs, tuning)
    with pytest.raises(NotImplementedError, match="cannot meet"):
        whole.run_layers(
            interpreter,
            inputs[0],
            layers_of(inputs),
            EPS,
            inputs[3],
            jnp.int32(0),
            scratch,
            tuning,
            "layer",
        )
