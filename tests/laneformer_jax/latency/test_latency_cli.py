import json
import subprocess
import sys
from pathlib import Path

import pytest

from laneformer_jax import costs
from laneformer_jax.cli import main
from laneformer_jax.latency.agent import EXAMPLE, loop, read_trace
from laneformer_jax.presets import preset


def latency(capsys, *args):
    assert main(["latency", *args]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def figures(capsys, *args):
    return json.loads(latency(capsys, *args, "--json"))


@pytest.mark.smoke
def test_json(capsys):
    found = figures(capsys, "--model", "laneformer-2b", "--hardware", "h200x8")
    assert (found["lanes"], found["delay_layers"], found["context"]) == (8, 2, 2048)
    assert found["tokens_per_second"] == pytest.approx(1 / found["seconds_per_token"])
    assert found["kv_bytes"] == costs.kv_cache_bytes(preset("laneformer-2b"), 2048) // 8
    exposed = sum(term["exposed"] for term in found["terms"].values())
    assert exposed == pytest.approx(found["seconds_per_token"])
    assert found["terms"]["collective"]["count"] == 28
    assert found["utilisation"] == pytest.approx(
        found["tokens_per_second"] / found["ceiling_tokens_per_second"]
    )
    # 30.7 TB/s stream out of 38.4.
    assert found["utilisation_of_vendor_peak"] == pytest.approx(found["utilisation"] * 30.7 / 38.4)


def test_table(capsys):
    out = " ".join(latency(capsys, "--hardware", "mi300xx8", "--trace", str(EXAMPLE)).split())
    assert "laneformer-2b on mi300xx8, 8 lanes, δ = 2 layers, 2,048 positions" in out
    assert "(projection)" in out
    assert "binding term weights" in out
    assert "generating 50,000 tokens" in out


def test_delay_zero_is_tensor_parallelism(capsys):
    zero = figures(capsys, "--delay", "0")
    assert zero["scheme"] == "tensor"
    assert zero == figures(capsys, "--scheme", "tensor")
    one = figures(capsys, "--delay", "1")
    assert one["delay_layers"] == 1
    assert one["tokens_per_second"] > zero["tokens_per_second"]


def test_options(capsys):
    slow = figures(capsys, "--delay", "0", "--assume", "collective=8us")
    assert slow["terms"]["collective"]["exposed"] == pytest.approx(31 * 8e-6, rel=0.02)
    same = figures(capsys, "--delay", "0", "--assume", "collective=8e-6")
    assert same["tokens_per_second"] == slow["tokens_per_second"]
    fitted = figures(capsys, "--calibrate", "published", "--context", "1024")
    assert fitted["tokens_per_second"] == pytest.approx(2100)
    assert figures(capsys, "--engine", "kernels")["binding_term"] == "launch"
    assert figures(capsys, "--lanes", "4", "--hardware", "h200x4")["lanes"] == 4
    assert figures(capsys, "num_hidden_layers=3", "swa_layers=[0]")["terms"]["kv"]["count"] == 3
    assert figures(capsys, "--model", "moe-5b-active", "--delay", "1")["delay_layers"] == 1
    cheap = figures(capsys, "--price", "1")
    assert cheap["dollars_per_million_tokens"] == pytest.approx(
        8 / 3600 / cheap["tokens_per_second"] * 1e6
    )


def test_a_config_file(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(preset("tiny").to_dict()))
    assert (
        figures(capsys, "--model", str(path))["terms"]
        == figures(capsys, "--model", "tiny")["terms"]
    )


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--hardware", "h20x8"], "did you mean 'h200x8'?"),
        (["--hardware", "h200x3"], "8 lanes do not spread evenly over 3 devices"),
        (["--model", "laneformer-2"], "did you mean 'laneformer-2b'?"),
        (["--model", "31b"], "did you mean '30b'?"),
        (["--model", "moe-5b-active", "--context", "5"], "known by its active bytes only"),
        (
            ["--delay", "99"],
            "from 0 (every sum is waited for) to the model's 15 layers; the nearest is 15",
        ),
        (["--delay", "-1"], "the nearest is 0"),
        (["--delay", "two"], "invalid int value: 'two'"),
        (["--delay", "0", "--scheme", "delayed"], "delay: 0 does not go with --scheme delayed"),
        (["--scheme", "ladders"], "did you mean 'ladder'?"),
        (["--lanes", "3"], "divisible by num_lanes 3"),
        (["--context", "0"], "context: 0 must be from 1"),
        (["--assume", "barier=1us"], "did you mean 'barrier'?"),
        (["--assume", "barrier=fast"], "barrier: nan must be at least 0"),
        (["--assume", "barrier"], "must be at least 0"),
        (["--calibrate", "absent.json"], "absent.json"),
        (["--trace", "absent.jsonl"], "absent.jsonl: cannot be read"),
        (["--price", "0"], "price: 0.0 must be above 0"),
        (["layers=3"], "unknown field"),
        (["--modell", "tiny"], "did you mean '--model'?"),
    ],
)
def test_refusals(capsys, args, part):
    assert main(["latency", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert part in captured.err
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")


def test_too_large_for_the_memory(capsys):
    big = ["num_hidden_layers=2000", "swa_layers=[]"]
    assert main(["latency", "--hardware", "h100", *big]) == 2
    assert "exceed the 80 GB of H100" in capsys.readouterr().err


def test_needs_no_jax():
    code = (
        "import sys; from laneformer_jax.cli import main; main(['latency', '--json']); "
        "main(['latency', '--published', '--json']); "
        "assert not {'jax', 'flax', 'matplotlib', 'scipy'} & set(sys.modules)"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, capture_output=True)


def test_agent_loop():
    steps = read_trace(EXAMPLE)
    assert sum(step.tokens for step in steps) == 50_000
    slow, fast = loop(steps, 100), loop(steps, 3000)
    assert slow.generation == pytest.approx(500)
    assert fast.generation == pytest.approx(50_000 / 3000)
    assert slow.tools == fast.tools == pytest.approx(98.4)
    assert slow.share == pytest.approx(500 / 598.4)
    assert loop([], 100).share == 0


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "holds no steps"),
        ('{"tokens": 1}', "line 1: tool_seconds: None must be a number of at least 0"),
        ('\n{"tokens": -1, "tool_seconds": 0}', "line 2: tokens: -1"),
        ("[]", "line 1: must hold a JSON object"),
        ("{", "line 1: not valid JSON"),
        ('{"tokens": true, "tool_seconds": 0}', "tokens: True"),
    ],
)
def test_bad_traces(capsys, tmp_path, text, part):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert main(["latency", "--trace", str(path)]) == 2
    assert part in capsys.readouterr().err
