"""One token through all kernels equals the model's cached forward pass, token after token."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from decode.step import xla_step
from laneformer_jax import Laneformer
from laneformer_jax.cache import RingCache
from laneformer_jax.errors import UserError
from laneformer_jax.exchange import Lanes
from laneformer_jax.kernels import step
from laneformer_jax.kernels.backend import Backend
from laneformer_jax.kernels.step import Kernels
from laneformer_jax.model import parameter_specs
from laneformer_jax.presets import preset
from laneformer_jax.sharding import LANE, make_mesh

# The tiny preset with fewer and shorter rows: with δ = 1 an early layer and one that hears the others; a
# window of 6 in the first.
SHAPE = dict(
    vocab_size=72,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    broadcast_delay=1,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=64,
    sliding_window=6,
    swa_layers=(0,),
    initializer_range=0.3,
)
TOKENS = np.random.default_rng(0).integers(0, 72, 20).astype(np.int32)


def build(dtype=jnp.float32, **overrides):
    return Laneformer(preset("tiny", **SHAPE | overrides), rngs=nnx.Rngs(3), dtype=dtype)


def by_model(model):
    """Logits [token, V] of the decode loop's plain path, one token at a time against its cache."""
    graphdef, params = nnx.split(model)
    config, lanes = model.config, model.local_lanes()

    @jax.jit
    def run(params, token, cache):
        model = nnx.merge(graphdef, params)
        x_LBSD, cache = xla_step(model, lanes, token[None, None], cache)
        return model.logits(x_LBSD, lanes)[0, 0], cache

    dtype = model.tok_embeddings.weight.dtype
    cache = RingCache.empty(config, 1, len(TOKENS), 1, dtype, config.num_lanes)
    logits = []
    for token in TOKENS:
        one, cache = run(params, token, cache)
        logits.append(one)
    return np.asarray(jnp.stack(logits), np.float32)


def by_kernels(model, b, tuning, mesh=None, launches="fused"):
    """The same from the kernels, and the token that they call likeliest; layers with a window keep a
    ring of 8 slots, so that it comes round twice."""
    config = model.config
    graphdef, params = nnx.split(model)
    dtype = model.tok_embeddings.weight.dtype
    slots = tuple(8 if config.window(i) else 32 for i in range(config.num_hidden_layers))
    lanes = Lanes(config.num_lanes, LANE if mesh else None)
    kernels = Kernels(b, tuning, launches)
    state = step.empty_state(kernels, config, slots, dtype, config.num_lanes)

    def run(params, w_VD, token, position, state):
        model = nnx.merge(graphdef, params)
        return step.decode_step(kernels, model, lanes, w_VD, token, position, state)

    if mesh is not None:
        # Scratch is every device's own: as wide as its lanes.
        states = jax.tree.map(lambda _: P(LANE), state)
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(parameter_specs(params, config), P(LANE), P(), P(), states),
            out_specs=(step.Output(P(LANE), P()), states),
            check_vma=False,  # the interpreter does not know what varies
        )
    run = jax.jit(run, donate_argnums=4)
    w_VD = model.lm_head.weight[...]
    logits, tokens = [], []
    for position, token in enumerate(TOKENS):
        out, state = run(params, w_VD, token, np.int32(position), state)
        logits.append(out.logits_V)
        tokens.append(int(out.token))
    counters = state.scratch if launches == "fused" else state.scratch.counters
    assert not counters.any()
    return np.asarray(jnp.stack(logits), np.float32), tokens


EARLY = dict(
    num_hidden_layers=4,
    use_early_comm=True,
    final_own_scale="sqrt_lanes",
    replicated_rmsn_scale=False,
)


@pytest.mark.parametrize("overrides", [dict(), pytest.param(EARLY, marks=pytest.mark.slow)])
def test_float32(interpreter, quick, overrides):
    model = build(**overrides)
    logits, tokens = by_kernels(model, interpreter, quick)
    want = by_model(model)
    np.testing.assert_allclose(logits, want, atol=1e-5 * np.abs(want).max())
    assert tokens == want.argmax(-1).tolist()


@pytest.mark.slow
def test_bfloat16_within_round_off(interpreter, quick):
    """As far from the float32 result as the model's own bfloat16 path, and no further."""
    model = build(jnp.bfloat16)
    logits, tokens = by_kernels(model, interpreter, quick)
    want = by_model(model)
    wide = build()
    nnx.update(wide, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(model)))
    exact = by_model(wide)
    assert np.abs(logits - exact).mean() <= 1.1 * np.abs(want - exact).mean()
    assert tokens == logits.argmax(-1).tolist()  # of equals the first


LATE = EARLY | dict(use_early_comm=False, broadcast_delay=2, num_hidden_layers=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launches", "overrides"),
    [("layer", dict()), ("layer", EARLY), ("token", dict()), ("token", LATE)],
)
def test_larger_launches(interpreter, quick, launches, overrides):
    model = build(**overrides)
    logits, tokens = by_kernels(model, interpreter, quick, launches=launches)
    want = by_model(model)
    np.testing.assert_allclose(logits, want, atol=1e-5 * np.abs(want).max())
    assert tokens == want.argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "launches"), [(8, "fused"), (2, "fused"), (8, "layer")])
def test_lanes_over_devices_equal_one_device(interpreter, quick, devices, launches):
    """With one lane a device, and with four: delayed sums by all-reduce, the head by vocabulary."""
    model = build()
    mesh = make_mesh(lane=devices)
    logits, tokens = by_kernels(model, interpreter, quick, mesh, launches)
    want = by_model(model)
    np.testing.assert_allclose(logits, want, atol=1e-5 * np.abs(want).max())
    assert tokens == want.argmax(-1).tolist()


def under_way(quick, devices, launches, **overrides):
    """Kernels that may run beside each sum over devices: those between the one that made what is summed
    and the first that needs the result. And of which sums the summed array has no other use, so that
    its memory may become the result's."""
    config = preset("tiny", **SHAPE | dict(num_hidden_layers=4, broadcast_delay=2) | overrides)
    kernels = Kernels(Backend(interpret=True), quick, launches)
    model = nnx.eval_shape(lambda: Laneformer(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    state = jax.eval_shape(
        lambda: step.empty_state(kernels, config, (16,) * 4, jnp.float32, config.num_lanes)
    )
    lanes, states = Lanes(config.num_lanes, LANE), jax.tree.map(lambda _: P(LANE), state)

    def layers(params, token, position, state):
        model = nnx.merge(graphdef, params)
        return step.layers_step(kernels, model, lanes, token, position, state)[0]

    specs = (parameter_specs(params, config), P(), P(), states)
    run = jax.shard_map(
        layers, mesh=make_mesh(lane=devices), in_specs=specs, out_specs=P(LANE), check_vma=False
    )
    number = jax.ShapeDtypeStruct((), jnp.int32)
    [whole] = jax.make_jaxpr(run)(params, number, number, state).jaxpr.eqns
    equations = whole.params["jaxpr"].eqns
    readers = Counter(v for e in equations for v in e.invars if not hasattr(v, "val"))
    depth = {}  # of an array, kernels launched up to the one it came from
    sums, launched, alone = {}, 0, []
    between = {}
    for e in equations:
        came = [v for v in e.invars if not hasattr(v, "val")]
        launched += e.primitive.name == "pallas_call"
        needed = set().union(*(sums.get(v, set()) for v in came))
        if e.primitive.name == "pallas_call":
            for number in needed - between.keys():
                between[number] = launched - 1 - number[1]
            needed = set()
        elif e.primitive.name == "psum":
            made = max(depth[v] for v in came)
            needed = {(len(alone), made)}
            alone.append(all(readers[v] == 1 for v in came))
        for v in e.outvars:
            sums[v] = needed
            kernel = e.primitive.name == "pallas_call"
            depth[v] = launched if kernel else max((depth.get(w, 0) for w in came), default=0)
    return [between[number] for number in sorted(between)], alone


@pytest.mark.parametrize(("launches", "beside"), [("fused", 9), ("layer", 1)])
def test_delayed_sums_may_run_beside_kernels(quick, launches, beside):
    """By what depends on what: δ layers of launches for every sum of the layers that are heard; none
    where a sum is waited for."""
    between, alone = under_way(quick, 8, launches)
    assert between == [beside] * 4
    assert all(alone)


@pytest.mark.slow
@pytest.mark.parametrize(("launches", "beside"), [("fused", 9), ("layer", 1)])
def test_sums_beside_kernels_with_other_rules(quick, launches, beside):
    assert under_way(quick, 2, launches)[0] == [beside] * 4  # with four lanes a device
    assert under_way(quick, 8, launches, use_early_comm=True)[0] == [0] * 4


@pytest.mark.parametrize(
    ("launches", "overrides", "why"),
    [
        ("fused", dict(ladder_residual=True), "ladder_residual"),
        ("layer", dict(qk_norm=True), "qk_norm"),
        ("token", dict(use_early_comm=True), "use_early_comm"),
    ],
)
def test_models_that_kernels_cannot_run(interpreter, quick, launches, overrides, why):
    with pytest.raises(UserError, match=f"{launches}.*{why}"):
        by_kernels(build(**overrides), interpreter, quick, launches=launches)
