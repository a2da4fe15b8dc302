"""The simulator against closed forms, counts made from the config, and physical bounds."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer_jax import costs
from laneformer_jax.errors import UserError
from laneformer_jax.hardware import DEVICES, Node, find_node
from laneformer_jax.latency import engine_for, from_config, mixture_of_experts, simulate
from laneformer_jax.latency.assumptions import EFFECTIVE_BANDWIDTH, ENGINES, Engine
from laneformer_jax.latency.schedule import SCHEMES, Schedule
from laneformer_jax.latency.timeline import longest_chain
from laneformer_jax.presets import preset

RELEASE = preset("laneformer-2b")
NODE = find_node("h200x8")


@st.composite
def engines(draw):
    micro = st.floats(0, 20).map(lambda us: us * 1e-6)
    return Engine(
        name="persistent",
        bandwidth=draw(st.sampled_from([1e12, 3.8e12, 8e12])),
        flops=1e15,
        link_bandwidth=draw(st.sampled_from([5e10, 4.5e11])),
        launch=draw(micro),
        kernels_per_layer=draw(st.sampled_from([0.0, 3.0, 10.0])),
        kernels_outside=draw(st.sampled_from([0.0, 3.0])),
        barrier=draw(micro),
        restart=draw(micro),
        collective=draw(micro),
        in_order=draw(st.booleans()),
        sampling=draw(micro),
        prefetch_bytes=draw(st.sampled_from([0.0, 1e5, 1e7, 1e9])),
    )


@st.composite
def configs(draw):
    return preset(
        "laneformer-2b",
        num_hidden_layers=draw(st.integers(1, 8)),
        swa_layers=(0,),
        num_lanes=draw(st.sampled_from([1, 2, 4, 8])),
        broadcast_delay=draw(st.integers(1, 9)),
        use_early_comm=draw(st.booleans()),
        early_broadcast=draw(st.booleans()),
        lm_head_type=draw(st.sampled_from(["replicate", "lane", "vocab_parallel"])),
        use_attention_comm=draw(st.booleans()),
    )


nodes = st.builds(Node, st.sampled_from([*DEVICES.values()]), st.sampled_from([1, 2, 4, 8]))
schemes = st.sampled_from(SCHEMES)
contexts = st.integers(1, 4096)


@given(configs(), nodes, engines(), schemes, contexts)
@settings(max_examples=150, deadline=None)
def test_never_beats_the_physical_bounds(config, node, engine, scheme, context):
    workload = from_config(config, context)
    found = simulate(workload, node, engine, scheme)
    devices = 1 if scheme == "pipeline" else node.count
    # Every byte that a device must read, counted from the config, through its bandwidth.
    read = costs.decode_weight_bytes(config) + costs.kv_cache_bytes(config, context)
    assert found.seconds >= read / devices / engine.bandwidth * (1 - 1e-9)
    assert found.weight_bytes + found.kv_bytes >= read / devices
    # The longest chain of one token on resources without limit, when nothing is read ahead.
    ahead = dataclasses.replace(engine, prefetch_bytes=0.0)
    one = Schedule(workload, ahead, node.count, scheme)
    one.add_token()
    alone = longest_chain(one.timeline.tasks)
    assert simulate(workload, node, ahead, scheme).seconds >= alone * (1 - 1e-9)
    exposed = sum(term.exposed for term in found.terms.values())
    assert exposed == pytest.approx(found.seconds)


@given(configs(), nodes, engines(), contexts)
@settings(max_examples=100, deadline=None)
def test_closed_form_where_nothing_overlaps(config, node, engine, context):
    engine = dataclasses.replace(engine, prefetch_bytes=0.0, flops=float("inf"))
    found = simulate(from_config(config, context), node, engine, "tensor")
    layers, d, n = config.num_hidden_layers, config.hidden_size, node.count
    shared = 2 * d * (2 * layers + 1) + 2 * d  # norms; the token's row of the embedding
    read = costs.decode_weight_bytes(config) - 2 * d * (2 * layers + 1)
    read += costs.kv_cache_bytes(config, context)
    seconds = (read / n + shared) / engine.bandwidth
    seconds += (5 * layers + 2) * engine.restart + (5 * layers + 1) * engine.barrier
    seconds += engine.launch * (engine.kernels_per_layer * layers + engine.kernels_outside)
    seconds += engine.sampling
    if n > 1:
        logits = 4 * config.vocab_size if config.lm_head_type == "lane" else 8
        wire = (2 * layers * 2 * d + logits) * (n - 1) / engine.link_bandwidth
        seconds += (2 * layers + 1) * engine.collective + wire
    assert found.seconds == pytest.approx(seconds, rel=1e-9)
    assert found.terms["collective"].hidden == pytest.approx(0.0, abs=1e-12)


@given(configs(), engines(), schemes)
@settings(max_examples=60, deadline=None)
def test_monotone(config, engine, scheme):
    workload = from_config(config, 1000)

    def seconds(**changes):
        return simulate(workload, NODE, dataclasses.replace(engine, **changes), scheme).seconds

    now = seconds() * (1 + 1e-9)
    for name in ("launch", "barrier", "restart", "collective", "sampling"):
        assert seconds(**{name: getattr(engine, name) + 1e-6}) >= now * (1 - 2e-9), name
    assert seconds(in_order=True) >= seconds(in_order=False) * (1 - 1e-9)
    for name in ("bandwidth", "link_bandwidth", "flops"):
        assert seconds(**{name: 2 * getattr(engine, name)}) <= now, name
    assert seconds(prefetch_bytes=2 * engine.prefetch_bytes + 1e6) <= now
    longer = simulate(from_config(config, 1001), NODE, engine, scheme)
    assert longer.seconds >= seconds() * (1 - 1e-9)


@given(engines(), st.sampled_from([2, 4, 8]))
@settings(max_examples=40, deadline=None)
def test_more_delay_is_never_slower_and_never_beats_no_exchange(engine, lanes):
    seconds = []
    for delay in range(1, 8):
        config = preset(
            "laneformer-2b",
            num_hidden_layers=7,
            swa_layers=(),
            num_lanes=lanes,
            broadcast_delay=delay,
        )
        found = simulate(from_config(config, 100), NODE, engine)
        seconds.append(found.seconds)
        alone = simulate(from_config(config, 100), NODE, engine, "independent")
        assert found.seconds >= alone.seconds * (1 - 1e-9)
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(seconds))


@given(configs())
@settings(max_examples=100, deadline=None)
def test_collectives_are_those_of_the_config(config):
    node = Node(DEVICES["h200"], config.num_lanes)
    # Sums so short that all late ones are hidden.
    engine = dataclasses.replace(engine_for(node.device), collective=1e-9)
    found = simulate(from_config(config, 100), node, engine)
    spread = node.count > 1
    # And one exchange of candidates or logits after the head.
    assert found.terms["collective"].count == (config.lane_sums() + 1) * spread
    assert found.exposed_collectives == (costs.waited_lane_sums(config) + 1) * spread
    dense = simulate(from_config(config, 100), node, engine, "tensor")
    assert dense.terms["collective"].count == (2 * config.num_hidden_layers + 1) * spread


def test_the_release():
    found = simulate(from_config(RELEASE, 2048), NODE)
    assert found.weight_bytes == pytest.approx(costs.decode_weight_bytes(RELEASE) / 8, rel=1e-3)
    assert found.kv_bytes == costs.kv_cache_bytes(RELEASE, 2048) / 8
    assert found.terms["barrier"].count == 15 * 5 + 1
    # 26 late sums and the last one send 6 KB to 7 peers, the logits' exchange 8 B.
    assert found.collective_bytes == pytest.approx(27 * 7 * 6144 + 7 * 8)
    assert found.binding == "weights"


def test_slack_is_what_a_sum_may_take_longer():
    engine = engine_for(NODE.device)
    found = simulate(from_config(RELEASE, 2048), NODE, engine)
    longer = dataclasses.replace(engine, collective=engine.collective + 0.99 * found.slack)
    late = dataclasses.replace(engine, collective=engine.collective + 1.01 * found.slack)
    for changed, hidden in ((longer, True), (late, False)):
        now = simulate(from_config(RELEASE, 2048), NODE, changed)
        alone = simulate(from_config(RELEASE, 2048), NODE, changed, "independent")
        assert (now.seconds == pytest.approx(alone.seconds, rel=1e-12)) is hidden
        assert (now.slack >= 0) is hidden


def test_two_layers_of_delay_hide_twice_as_much_as_one():
    engine = dataclasses.replace(engine_for(NODE.device), collective=0.0)
    slack = [
        simulate(from_config(preset("laneformer-2b", broadcast_delay=d), 2048), NODE, engine).slack
        for d in (1, 2, 3)
    ]
    # From the end of a module to the end of the same one δ layers on: δ layers of work, less the
    # 0.1 µs on the wire.
    layer = slack[1] - slack[0]
    assert slack[2] - slack[1] == pytest.approx(layer)
    assert slack[0] == pytest.approx(layer, abs=0.2e-6)


def test_ladder_hides_one_module_and_delay_two_per_layer():
    engine = dataclasses.replace(engine_for(NODE.device), collective=8e-6)
    found = {s: simulate(from_config(RELEASE, 2048), NODE, engine, s).seconds for s in SCHEMES}
    assert found["delayed"] == pytest.approx(found["independent"])
    assert found["delayed"] < found["ladder"] < found["tensor"] < found["pipeline"]


def test_a_ladder_model_is_run_as_one():
    config = preset("laneformer-2b", ladder_residual=True)
    found = simulate(from_config(config, 2048), NODE)
    assert found.scheme == "ladder"
    assert found.seconds == simulate(from_config(RELEASE, 2048), NODE, scheme="ladder").seconds


def test_lanes_over_several_devices_wait_within_a_lane():
    config = preset("laneformer-2b", num_lanes=2)
    found = simulate(from_config(config, 2048), NODE)
    # Each module's partial sum within its lane of four devices, the last sum, the candidates.
    assert found.exposed_collectives == 2 * 15 + 2


def test_several_lanes_on_a_device_cost_nothing_more():
    one = simulate(from_config(RELEASE, 2048), find_node("h200x4"))
    four = simulate(from_config(preset("laneformer-2b", num_lanes=4), 2048), find_node("h200x4"))
    assert one.seconds == pytest.approx(four.seconds)


def test_one_device_exchanges_nothing():
    found = simulate(from_config(RELEASE, 2048), find_node("h200"))
    assert found.terms["collective"].count == 0
    assert found.slack is None


def test_the_effective_bandwidths_are_below_the_vendors():
    for name, bandwidth in EFFECTIVE_BANDWIDTH.items():
        assert 0.75 < bandwidth / DEVICES[name].memory_bandwidth < 0.85
    for device in DEVICES.values():
        for name in ENGINES:
            assert engine_for(device, name).bandwidth < device.memory_bandwidth


def test_mixture_of_experts_reads_its_active_bytes():
    workload = mixture_of_experts(5.1e9, layers=36, hidden_size=2880)
    shared = 2 * 2880
    assert workload.weight_bytes == pytest.approx(5.1e9 + shared)
    ideal = engine_for(NODE.device, "ideal")
    assert simulate(workload, NODE, ideal).tokens_per_second < 30.7e12 / 5.1e9


def test_fewer_bits_read_fewer_bytes():
    full, half = from_config(RELEASE, 1), from_config(RELEASE, 1, weight_bits=8)
    assert half.weight_bytes == pytest.approx(full.weight_bytes / 2, rel=1e-3)
    assert half.kv_bytes == full.kv_bytes


def test_names_are_checked():
    workload = from_config(RELEASE, 1)
    with pytest.raises(UserError, match=r"did you mean 'delayed'\?"):
        simulate(workload, NODE, scheme="delay")
    with pytest.raises(UserError, match=r"did you mean 'persistent'\?"):
        engine_for(NODE.device, "persistant")
    with pytest.raises(UserError, match="8 lanes do not spread evenly over 3 devices"):
        simulate(workload, find_node("h200x3"))
