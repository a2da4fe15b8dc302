"""Lanes spread over devices: the same numbers as on one, and not one sum across lanes too many.

How many sums a forward pass must hold is the specification's formula (section 2), written out again in
`forward_sums`. How many the training step may hold in all follows from it:

- The sum across lanes of a module's outputs is used by every lane, so its gradient is the sum of what the
  lanes say about it: one [B,S,D] sum in the backward pass for each in the forward pass.
- So is the mean over lanes before the head `replicate`: each lane device makes the logits of its part of
  the vocabulary, and its gradient is the sum over those parts.
- The embedding table rests in parts, one on each lane device. It is gathered, and its gradient summed and
  scattered, as a table: one all-gather and one reduce-scatter, no [B,S,D] sum.

So the backward pass holds exactly as many sums as the forward pass. A head `lane` also sums its logits,
[B,S,V], not counted here.
"""

import math
import re

import jax
import numpy as np
import pytest
from flax import nnx
from parity import greatest_error, library_model
from shapes import random_tensors

from decode import generate
from laneformer_jax.model import parameter_paths
from laneformer_jax.sharding import make_mesh
from train.step import Plan, gradients

# No other array of the model has as many elements as [B,S,D].
ROWS, TOKENS, DIM, VOCAB = 8, 11, 24, 40
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "head_dim": 4,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_lanes": 8,
    "broadcast_delay": 1,
    "sliding_window": 4,
    "sliding_window_n_layers": 2,
}


def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(VOCAB, size=(ROWS, TOKENS)).astype(np.int32)
    segments = np.sort(rng.integers(1, 4, size=tokens.shape), axis=1).astype(np.int32)
    starts = np.array([[np.flatnonzero(row == s)[0] for s in row] for row in segments])
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "loss_mask": rng.uniform(size=tokens.shape).astype(np.float32),
        "segment_ids": segments,
        "positions": (np.arange(TOKENS) - starts).astype(np.int32),
    }


def logits_fn(model):
    """model(...) as a function of its parameters, to be compiled."""
    graphdef, params = nnx.split(model)
    mesh = model.mesh

    def logits(params, tokens, positions, segments):
        model = nnx.merge(graphdef, params)
        model.mesh = mesh
        return model(tokens, positions=positions, segment_ids=segments)

    return jax.jit(logits), params


def train_fn(model, **plan):
    plan = Plan(model.config, model.mesh, **plan)
    params = {path: v[...] for path, v in parameter_paths(nnx.state(model)).items()}
    return jax.jit(lambda params, batch: gradients(params, batch, plan)), params


def results(model):
    """Loss, gradients, and greedy tokens with the logits behind them."""
    b = batch()
    run, params = train_fn(model)
    (loss, *_), grads = run(params, b)
    out = generate(model, b["tokens"][:2, :6], max_new_tokens=6, return_logits=True)
    return float(loss), {path: np.asarray(g) for path, g in grads.items()}, out


HEADS = {
    "replicate": {},
    "noearly": {"use_early_comm": False, "replicated_rmsn_scale": False},
    "lane": {"lm_head_type": "lane", "final_own_scale": "sqrt_lanes"},
    "vocab_parallel": {"lm_head_type": "vocab_parallel", "early_broadcast": False},
    "pre_norm_lane_agg": {"pre_norm_lane_agg": True, "use_attention_comm": False},
}
QUICK = [("replicate", shape) for shape in ((1, 2), (1, 8), (2, 4))]
QUICK += [("vocab_parallel", (2, 4))]
SLOW = [("replicate", shape) for shape in ((1, 4), (4, 2), (2, 1), (8, 1), (2, 2))]
SLOW += [(h, s) for h in HEADS for s in ((1, 8), (2, 4)) if (h, s) not in QUICK]


@pytest.fixture(scope="module")
def alone():
    """Results on one device, by head."""
    made = {}

    def of(head):
        if head not in made:
            config = CONFIG | HEADS[head]
            made[head] = results(library_model(config, random_tensors(config)))
        return made[head]

    return of


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        *(pytest.param(*case, id=f"{case[0]}-{case[1][0]}x{case[1][1]}") for case in QUICK),
        *(
            pytest.param(*case, id=f"{case[0]}-{case[1][0]}x{case[1][1]}", marks=pytest.mark.slow)
            for case in SLOW
        ),
    ],
)
def test_a_mesh_gives_one_devices_numbers(head, shape, alone):
    config = CONFIG | HEADS[head]
    mesh = make_mesh(*shape)
    loss, grads, out = results(library_model(config, random_tensors(config), mesh=mesh))
    want_loss, want_grads, want_out = alone(head)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    assert greatest_error(grads, want_grads) <= 1e-5
    np.testing.assert_array_equal(out.tokens, want_out.tokens)
    scale = np.abs(want_out.logits).max()
    np.testing.assert_allclose(out.logits, want_out.logits, atol=1e-5 * scale, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_a_mesh_gives_one_devices_logits(head):
    config = CONFIG | HEADS[head]
    b = batch()
    inputs = (b["tokens"], None, b["positions"], b["segment_ids"])
    alone = np.asarray(library_model(config, random_tensors(config))(*inputs))
    spread = library_model(config, random_tensors(config), mesh=make_mesh(2, 4))(*inputs)
    np.testing.assert_allclose(spread, alone, atol=1e-5 * np.abs(alone).max(), rtol=0)


# Counting ------------------------------------------------------------------------------------


def forward_sums(config):
    """[B,S,D] sums across lanes in a forward pass, of modules and at the end (specification, section 2)."""
    n, delta = config["num_hidden_layers"], config["broadcast_delay"]
    early = config.get("use_early_comm", True)
    modules = 0
    for switch in ("use_attention_comm", "use_mlp_comm"):
        delayed = max(0, n - delta) if config.get(switch, config.get("use_comm", True)) else 0
        modules += max(min(delta, n), delayed) if early else delayed
    return modules, int(config.get("lm_head_type", "replicate") == "replicate")


def lane_sums(compiled, elements, lanes):
    """All-reduce operands of so many elements over groups of so many devices, in compiled HLO text.

    XLA merges several sums into one instruction that returns a tuple, so operands are counted, not
    instructions.
    """
    count = 0
    for line in compiled.as_text().splitlines():
        match = re.search(r"= (.*?) all-reduce(?:-start)?\((.*)", line)
        if match is None:
            continue
        shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
        group = replica_group_size(match[2])
        sizes = [math.prod(int(n) for n in s.split(",") if n) for s in shapes]
        if group == lanes:
            count += sizes.count(elements)
    return count


def replica_group_size(text):
    explicit = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
    if explicit:
        return len(explicit[1].split(","))
    # As XLA of JAX 0.12 writes it.
    by_axes = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", text)
    if by_axes:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", by_axes[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", by_axes[2]))
    groups_by_size = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", text)
    return int(groups_by_size[2])


def other_collectives(compiled):
    names = "all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    return re.findall(rf" (?:{names})(?:-start)?\(", compiled.as_text())


COUNTED = {
    "delta1": {},
    "delta2": {"broadcast_delay": 2},
    "delta3-of-4": {"broadcast_delay": 3},
    "delta-beyond": {"broadcast_delay": 5},
    "noearly-delta1": {"use_early_comm": False},
    "noearly-delta3-of-4": {"use_early_comm": False, "broadcast_delay": 3},
    "noearly-beyond": {"use_early_comm": False, "broadcast_delay": 4},
    "no-broadcast": {"early_broadcast": False},
    "no-comm": {"use_comm": False},
    "attention-only": {"use_mlp_comm": False, "broadcast_delay": 2},
    "nothing": {"use_comm": False, "use_early_comm": False},
    "lane": {"lm_head_type": "lane"},
    "vocab_parallel": {"lm_head_type": "vocab_parallel", "use_early_comm": False},
    "pre_norm_lane_agg": {"pre_norm_lane_agg": True, "replicated_rmsn_scale": False},
}
QUICKLY_COUNTED = ("delta1", "delta2", "noearly-delta1")
count_cases = pytest.mark.parametrize(
    "fields",
    [
        pytest.param(f, id=name, marks=() if name in QUICKLY_COUNTED else pytest.mark.slow)
        for name, f in COUNTED.items()
    ],
)


@count_cases
def test_forward_and_backward_hold_exactly_the_sums_they_need(fields):
    config = CONFIG | {"num_hidden_layers": 4} | fields
    model = library_model(config, random_tensors(config), mesh=make_mesh(1, 8))
    modules, end = forward_sums(config)
    assert model.config.lane_sums() == modules + end
    elements, b = ROWS * TOKENS * DIM, batch()

    run, params = logits_fn(model)
    inputs = (b["tokens"], b["positions"], b["segment_ids"])
    forward = run.lower(params, *inputs).compile()
    assert lane_sums(forward, elements, 8) == modules + end
    assert other_collectives(forward) == []

    run, params = train_fn(model)
    step = run.lower(params, b).compile()
    assert lane_sums(step, elements, 8) == 2 * (modules + end)
    assert sorted(other_collectives(step)) == [" all-gather(", " reduce-scatter("]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"remat": "layer"}, {"accumulate": 2}], ids=str)
def test_recomputation_and_accumulation_add_no_sums(plan):
    """Recomputed modules lie between sums; microbatches are one loop."""
    model = library_model(CONFIG, random_tensors(CONFIG), mesh=make_mesh(1, 8))
    modules, end = forward_sums(CONFIG)
    micro = plan.get("accumulate", 1)
    run, params = train_fn(model, **plan)
    step = run.lower(params, batch()).compile()
    elements = ROWS * TOKENS * DIM // micro
    assert lane_sums(step, elements, 8) == 2 * (modules + end)


@pytest.mark.slow
def test_rows_on_other_devices_add_no_sums():
    model = library_model(CONFIG, random_tensors(CONFIG), mesh=make_mesh(2, 4))
    modules, end = forward_sums(CONFIG)
    run, params = train_fn(model)
    step = run.lower(params, batch()).compile()
    assert lane_sums(step, ROWS * TOKENS * DIM // 2, 4) == 2 * (modules + end)


# Time to arrive --------------------------------------------------------------------------------


def waits(jaxpr, paths):
    """Layer and kind of weight -> numbers of the sums across lanes that its input depends on.

    jaxpr: of one device's forward pass; its inputs are constants, the parameters `paths`, and three more.
    Sums are numbered in the order of the program.
    """
    sums = {}  # variable -> sums it depends on
    constants = len(jaxpr.invars) - len(paths) - 3
    # Variable -> the parameters, and nothing else, that it is made of: a linear carries out its norm's
    # scale, and projections of one input may be joined.
    weight = {v: {path} for v, path in zip(jaxpr.invars[constants:], paths, strict=False)}
    found, count = {}, 0
    for eqn in jaxpr.eqns:
        inputs = [v for v in eqn.invars if not hasattr(v, "val")]
        depends = set().union(*(sums.get(v, ()) for v in inputs))
        weights = set().union(*(weight[v] for v in inputs if v in weight))
        others = [v for v in inputs if v not in weight]
        for path in weights if others else ():
            found.setdefault(path, set()).update(depends)
        if eqn.primitive.name.startswith("psum"):
            depends = depends | set(range(count, count + len(eqn.outvars)))
            count += len(eqn.outvars)
        for v in eqn.outvars:
            if weights and not others:
                weight[v] = weights
            else:
                sums[v] = depends
    return found, count


@pytest.mark.parametrize(
    "fields",
    [
        {"broadcast_delay": 1},
        {"broadcast_delay": 2},
        {"broadcast_delay": 2, "use_early_comm": False},
        {"broadcast_delay": 3, "early_broadcast": False, "use_mlp_comm": False},
    ],
    ids=str,
)
def test_a_delayed_sum_is_not_needed_before_its_layer(fields):
    """By data dependence: what a compiler may have in flight, and no more, is in flight."""
    config = CONFIG | {"num_hidden_layers": 6} | fields
    model = library_model(config, random_tensors(config), mesh=make_mesh(lane=8))
    run, params = logits_fn(model)
    b = batch()
    jaxpr = jax.make_jaxpr(run)(params, b["tokens"], b["positions"], b["segment_ids"]).jaxpr
    while not any(e.primitive.name == "shard_map" for e in jaxpr.eqns):
        (jaxpr,) = (e.params["jaxpr"].jaxpr for e in jaxpr.eqns if "jaxpr" in e.params)
    (eqn,) = (e for e in jaxpr.eqns if e.primitive.name == "shard_map")
    inner = eqn.params["jaxpr"]
    found, count = waits(inner, list(parameter_paths(params)))

    # The sums in the order of the program, and when each may be needed first: (layer, module).
    cfg, arrivals = model.config, []
    for layer in range(cfg.num_hidden_layers):
        for m, module in enumerate(("attention", "mlp")):
            if cfg.sums_now(layer):
                arrivals.append((layer, m))
            elif cfg.queues(layer, module):
                arrivals.append((layer + cfg.broadcast_delay, m))
    assert count == cfg.lane_sums() == len(arrivals) + 1
    for layer in range(cfg.num_hidden_layers):
        for m, linear in enumerate(("attention.wq", "feed_forward.w1")):
            arrived = {n for n, at in enumerate(arrivals) if at < (layer, m)}
            assert found[f"layers.{layer}.{linear}.weight"] == arrived, (layer, linear)
