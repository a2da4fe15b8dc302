"""A whole layer in one launch equals its operations one by one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer_jax.kernels import attention, gate_up, project, qkv
from laneformer_jax.kernels import layer as whole
from laneformer_jax.kernels.project import Past, Rule
from laneformer_jax.kernels.tuning import Programs

EPS, WINDOW, SLOTS = 1e-5, 10, 16
LANES, HIDDEN, HEADS, KV_HEADS, D, NEURONS = 2, 48, 4, 2, 12, 40


def array(seed, *shape, dtype, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


@pytest.fixture(params=[jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def inputs(request):
    """Arguments of `whole.layer` from x to rules."""
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


def one_by_one(inputs, position):
    x_LD, w, eps, angles, keys, values, rules = inputs
    q_LO, keys, values = qkv.reference(x_LD, w.qkv, eps, angles, keys, values, position)
    heard_LO = attention.reference(q_LO, keys, values, position, WINDOW)
    x_LD, attention_LD = project.reference(x_LD, heard_LO, w.wo_LDI, rules[0])
    gated_LF = gate_up.reference(x_LD, w.gate_up, eps)
    x_LD, mlp_LD = project.reference(x_LD, gated_LF, w.w2_LDI, rules[1])
    return x_LD, attention_LD, mlp_LD, keys, values


def check(got, want):
    for g, w in zip(got[:5], want, strict=True):
        # Attention rounds elsewhere than its reference; the last bits of bfloat16 follow.
        tolerance = 2e-6 if w.dtype == jnp.float32 else 2**-6
        g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
        np.testing.assert_allclose(g, w, atol=tolerance * np.abs(w).max())
    assert not got.scratch.parts.any()


def empty_scratch(inputs, tuning):
    dtype = inputs[0].dtype
    return whole.empty_scratch((LANES, HIDDEN), HEADS, KV_HEADS, D, NEURONS, dtype, tuning)


def test_phase_by_phase_with_many_programs(interpreter, quick, inputs):
    """Programs one after another share out each phase; 3 divides no number of tiles."""
    tuning = replace(quick, layer=Programs(3, quick.layer.launch))
    rules = inputs[-1]

    @jax.jit
    def run(x_LD, keys, values, position, scratch):
        out = whole.Output(x_LD, x_LD, x_LD, keys, values, scratch)
        for phase in range(whole.PHASES):
            cache = (out.keys_LKTd, out.values_LKTd, position, WINDOW, rules, out.scratch)
            out = whole.layer(
                interpreter, x_LD, *inputs[1:4], *cache, tuning, phase=phase, sofar=out
            )
        return out

    x_LD, _, _, _, keys, values, _ = inputs
    for position in (0, 9, 3 * SLOTS + 1):
        at = jnp.int32(position)
        check(
            run(x_LD, keys, values, at, empty_scratch(inputs, tuning)),
            one_by_one(inputs, at),
        )


@pytest.mark.slow
def test_one_program_through_all_meetings(interpreter, quick, inputs):
    """Twice, since the counters of the second launch are what the first left."""
    *arguments, rules = inputs
    position = jnp.int32(20)

    @jax.jit
    def run(scratch):
        return whole.layer(interpreter, *arguments, position, WINDOW, rules, scratch, quick)

    out = run(empty_scratch(inputs, quick))
    assert out.scratch.meetings[0] == whole.PHASES - 1
    again = run(out.scratch)
    assert again.scratch.meetings[0] == 2 * (whole.PHASES - 1)
    for result in (out, again):
        check(result, one_by_one(inputs, position))


def test_programs_that_cannot_meet_say_so(interpreter, quick, inputs):
    *arguments, rules = inputs
    tuning = replace(quick, layer=Programs(2, quick.layer.launch))
    with pytest.raises(NotImplementedError, match="cannot meet"):
        whole.layer(
            interpreter,
            *arguments,
            jnp.int32(0),
            WINDOW,
            rules,
            empty_scratch(inputs, tuning),
            tuning,
        )
