import dataclasses
import json

import pytest

from laneformer_jax.errors import UserError
from laneformer_jax.hardware import find_node
from laneformer_jax.latency import engine_for, simulate
from laneformer_jax.latency.calibrate import PUBLISHED, apply, read
from laneformer_jax.latency.models import find_workload

NODE = find_node("h200x8")


def write(tmp_path, data):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(data))
    return path


def rate(engine, model="laneformer-2b", context=1024, node=NODE):
    return simulate(find_workload(model, context), node, engine).tokens_per_second


@pytest.mark.parametrize(("name", "measured"), [("h200x8", 2100), ("mi300xx8", 3000)])
def test_the_published_speeds_are_met(name, measured):
    node = find_node(name)
    engine = apply(read(PUBLISHED), engine_for(node.device), node)
    assert rate(engine, node=node) == pytest.approx(measured)
    assert engine.bandwidth == engine_for(node.device).bandwidth


@pytest.mark.parametrize("kind", ["persistent", "kernels"])
def test_costs_behind_simulated_measurements_are_found_again(tmp_path, kind):
    base = engine_for(NODE.device, kind)
    overhead = "launch" if kind == "kernels" else "barrier"
    true = dataclasses.replace(base, bandwidth=3.3e12, **{overhead: 2.7e-6})
    measurements = [
        {
            "model": model,
            "hardware": "h200x8",
            "context": 512,
            "tokens_per_second": rate(true, model, 512),
        }
        for model in ("laneformer-2b", "350m", "8b")
    ]
    path = write(tmp_path, {"parameters": {"sampling": 3e-6}, "measurements": measurements})
    found = apply(read(path), base, NODE)
    assert found.bandwidth == pytest.approx(3.3e12, rel=1e-3)
    assert getattr(found, overhead) == pytest.approx(2.7e-6, rel=1e-3)


def test_parameters_are_taken_as_they_are(tmp_path):
    path = write(tmp_path, {"parameters": {"collective": 5.1e-6, "bandwidth": 4.1e12}})
    found = apply(read(path), engine_for(NODE.device), NODE)
    assert found == dataclasses.replace(
        engine_for(NODE.device), collective=5.1e-6, bandwidth=4.1e12
    )


def test_faster_than_free_phases_raises_the_bandwidth(tmp_path):
    base = engine_for(NODE.device)
    fast = dataclasses.replace(base, barrier=0.0, bandwidth=4.5e12)
    measurement = {"model": "laneformer-2b", "hardware": "h200x8", "tokens_per_second": rate(fast)}
    found = apply(read(write(tmp_path, {"measurements": [measurement]})), base, NODE)
    assert found.barrier == 0
    assert found.bandwidth == pytest.approx(4.5e12, rel=1e-6)


def test_a_record_of_the_speed_benchmark(tmp_path):
    node = find_node("h200")
    engine = dataclasses.replace(engine_for(node.device, "kernels"), launch=2e-6)
    seconds = 1 / rate(engine, "350m", 300, node)
    rows = [
        {"name": "forward", "seconds": 1.0},
        {
            "name": "decoded token",
            "seconds": seconds,
            "model": "350m",
            "hardware": "h200",
            "context": 300,
        },
    ]
    path = write(tmp_path, {"environment": {}, "rows": rows})
    found = apply(read(path), engine_for(node.device, "kernels"), node)
    assert found.launch == pytest.approx(2e-6)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ({}, "holds neither parameters nor measurements"),
        ({"rows": [{"name": "forward", "seconds": 1}]}, "holds neither"),
        ([1], "must hold a JSON object"),
        ({"parameters": {"colective": 1e-6}}, "did you mean 'collective'?"),
        ({"parameters": {"barrier": -1}}, "barrier: -1.0 must be at least 0"),
        ({"parameters": {"bandwidth": 0}}, "bandwidth: 0.0 must be above 0"),
        ({"measurement": []}, "did you mean 'measurements'?"),
        (
            {"measurements": [{"model": "tiny", "hardware": "b200x8", "tokens_per_second": 9}]},
            "measured on b200x8, not on h200",
        ),
        (
            {"measurements": [{"model": "tiny", "hardware": "h200x8", "tokens_per_second": 0}]},
            "tokens_per_second: 0.0 must be above 0",
        ),
        (
            {"measurements": [{"model": "30b", "hardware": "h200x8", "tokens_per_second": 5000}]},
            "5000 tok/s of 30b on h200x8 is faster than its memory allows",
        ),
        (
            {"measurements": [{"model": "tinny", "hardware": "h200x8", "tokens_per_second": 9}]},
            "did you mean 'tiny'?",
        ),
    ],
)
def test_refusals(tmp_path, data, part):
    with pytest.raises(UserError) as error:
        apply(read(write(tmp_path, data)), engine_for(NODE.device), NODE)
    assert part in str(error.value)
    assert "\n" not in str(error.value)
