import json
from pathlib import Path

import pytest

from laneformer_jax.cli import main
from laneformer_jax.presets import preset

GOLDEN = Path(__file__).parents[1] / "golden" / "l8_d2_replicate"


def info(capsys, *args):
    assert main(["info", *args]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_json_of_the_released_model(capsys):
    figures = json.loads(info(capsys, "laneformer-2b", "--json"))
    assert figures == {
        "model": "laneformer-2b",
        "dtype": "bfloat16",
        "context": 4096,
        "lanes": 8,
        "delay_layers": 2,
        "parameters": 2_320_069_632,
        "parameter_groups": {
            "embedding": 98_304_000,
            "attention": 424_673_280,
            "mlp": 1_698_693_120,
            "head": 98_304_000,
            "norms": 95_232,
        },
        "weight_bytes": 4_640_139_264,
        "decode_weight_bytes_per_token": 4_443_531_264,
        "kv_bytes_per_layer_and_position": 6_144,
        "kv_cache_bytes": 251_658_240,
        "kv_ring_bytes": 283_115_520,  # ten layers with 2048 + 512 slots, five with 4096
        "sliding_layers": 10,
        "decode_flops_per_token": 4_946_657_280,
        "training_flops_per_token": 14_273_925_120,
        "lane_sums_per_token": 27,
        "waited_lane_sums_per_token": 1,
    }


def test_table_for_people(capsys):
    lines = [" ".join(line.split()) for line in info(capsys, "laneformer-2b").splitlines()]
    assert "parameters 2,320,069,632" in lines
    assert "weights 4.640 GB bfloat16" in lines
    assert "weights read per token 4.444 GB batch 1, without the embedding" in lines
    assert "KV per layer and position 6,144 B" in lines
    assert "lane sums per token 27 1 waited for, 26 delayed" in lines


@pytest.mark.parametrize("path", [GOLDEN, GOLDEN / "config.json"])
def test_folder_and_config_file(capsys, path):
    figures = json.loads(info(capsys, str(path), "--json", "--dtype", "float32"))
    config = json.loads((GOLDEN / "config.json").read_text())
    assert figures["context"] == config["max_position_embeddings"]
    assert figures["weight_bytes"] == 4 * figures["parameters"]


def test_run_folder_gives_its_newest_checkpoint(capsys, tmp_path):
    for step, layers in ((9, 6), (10, 4)):
        folder = tmp_path / "checkpoints" / str(step)
        folder.mkdir(parents=True)
        config = preset("tiny", num_hidden_layers=layers)
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
    figures = json.loads(info(capsys, str(tmp_path), "--json"))
    assert figures["parameters"] == config.num_parameters()


def test_fields_can_be_changed(capsys):
    figures = json.loads(info(capsys, "tiny", "num_hidden_layers=12", "--json", "head_dim=32"))
    changed = preset("tiny", num_hidden_layers=12, head_dim=32)
    assert figures["parameters"] == changed.num_parameters()
    assert figures["model"] == "tiny num_hidden_layers=12 head_dim=32"


def test_parameters_are_those_of_the_golden_weights(capsys):
    from safetensors import safe_open

    with safe_open(GOLDEN / "model.safetensors", "numpy") as file:
        count = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118
    assert json.loads(info(capsys, str(GOLDEN), "--json"))["parameters"] == count


def test_presets_are_listed(capsys):
    assert json.loads(info(capsys, "--json"))["presets"]["laneformer-2b"] == 2_320_069_632
    assert "laneformer-2b 2,320,069,632" in " ".join(info(capsys).split())


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["laneformr-2b"], "error: laneformr-2b: neither a preset nor a file or folder (did you"),
        (["tiny", "--context", "1025"], "context: 1025 must be from 1 to max_position_embeddings"),
        (["tiny", "--context", "0"], "context: 0 must be from 1"),
        (["tiny", "layers=3"], "'layers=3': layers: unknown field"),
        (["tiny", "num_lanes=3"], "divisible by num_lanes 3"),
        (["tiny", "--dtype", "bf16"], "invalid choice: 'bf16'"),
        ([str(Path(__file__).parent)], "config.json: cannot be read"),
    ],
)
def test_refusals(capsys, args, part):
    assert main(["info", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert part in captured.err
    assert captured.err.count("\n") == 1
