"""What an export cuts and what it says: vocabulary padding, model card, licences, Hub downloads."""

import fnmatch
import json
from pathlib import Path
from types import SimpleNamespace

import goldens
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from laneformer_jax import LaneformerConfig, cli, rope
from laneformer_jax.checkpoint import assets, convert, native, sources
from laneformer_jax.errors import UserError
from laneformer_jax.presets import preset
from laneformer_jax.tokenizer import CHAT_CONTROL_SYMBOLS, train_tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / goldens.COMMITTED
TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(400))
ENTRIES = 290
SMALL = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_lanes=4,
    max_position_embeddings=32,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([TEXT], ENTRIES, folder)
    return folder


def checkpoint(folder: Path, config: LaneformerConfig, tokenizer: Path, rows: int = 0) -> dict:
    """A checkpoint as training leaves one, its vocabulary `rows` longer than the config says."""
    rng = np.random.default_rng(0)
    params = {}
    for path, shape in sources.flat_shapes(config).items():
        if path in sources.VOCABULARY:
            shape = (shape[0] + rows, *shape[1:])
        params[path] = rng.normal(size=shape).astype(np.float32)
    with native.new_checkpoint(folder, config, "float32", tokenizer, {"step": 7}) as writer:
        for group, values in native.grouped(params).items():
            writer.add(group, values)
    return params


@pytest.mark.parametrize("head", ["replicate", "lane"])
def test_padding_of_the_vocabulary_is_trimmed(tmp_path, tokenizer, head):
    config = LaneformerConfig(vocab_size=320, lm_head_type=head, **SMALL)
    params = checkpoint(tmp_path / "native", config, tokenizer)
    convert.export(tmp_path / "native", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == ENTRIES
    found = load_file(tmp_path / "out/model.safetensors")
    name = "lm_head.weight" if head == "replicate" else "lm_head.linear.weight"
    for tensor, path in (("model.tok_embeddings.weight", "tok_embeddings.weight"), (name, name)):
        np.testing.assert_array_equal(found[tensor], params[path][:ENTRIES])
    convert.export(tmp_path / "native", tmp_path / "all", vocab_size=320)
    assert json.loads((tmp_path / "all/config.json").read_text())["vocab_size"] == 320


def test_rows_beyond_the_config_are_padding_too(tmp_path, tokenizer):
    config = LaneformerConfig(vocab_size=ENTRIES, **SMALL)
    params = checkpoint(tmp_path / "native", config, tokenizer, rows=30)
    convert.export(tmp_path / "native", tmp_path / "out", check=True)
    found = load_file(tmp_path / "out/model.safetensors")
    np.testing.assert_array_equal(found["lm_head.weight"], params["lm_head.weight"][:ENTRIES])


def test_a_vocab_parallel_head_is_never_cut(tmp_path, tokenizer):
    config = LaneformerConfig(vocab_size=320, lm_head_type="vocab_parallel", **SMALL)
    checkpoint(tmp_path / "native", config, tokenizer)
    convert.export(tmp_path / "native", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 320
    with pytest.raises(UserError, match="vocab_parallel head cannot be cut"):
        convert.export(tmp_path / "native", tmp_path / "cut", vocab_size=300)
    with pytest.raises(UserError, match="340 exceeds the checkpoint's 320"):
        convert.export(tmp_path / "native", tmp_path / "more", vocab_size=340)
    assert not (tmp_path / "cut").exists()


def test_a_trained_checkpoint_brings_card_template_and_generation_config(tmp_path, tokenizer):
    config = LaneformerConfig(vocab_size=ENTRIES, bos_token_id=1, eos_token_id=2, **SMALL)
    checkpoint(tmp_path / "native", config, tokenizer)
    report = convert.export(tmp_path / "native", tmp_path / "out")
    out = tmp_path / "out"
    assert (out / "tokenizer.model").read_bytes() == (tokenizer / "tokenizer.model").read_bytes()
    assert all(
        symbol in (out / "chat_template.jinja").read_text() for symbol in ("assistant", "user")
    )
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2}
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert f"| Parameters | {config.num_parameters():,} (float32) |" in card
    assert "| step | 7 |" in card
    assert "remote code" in card
    assert report.notes == (assets.LANE_NOTE,)
    values = json.loads((out / "config.json").read_text())
    assert values["architectures"] == ["LaneformerTPForCausalLM"]
    assert values["torch_dtype"] == "float32"


def test_a_llama2_tokenizer_is_pointed_out():
    pieces = {15043: "▁Hello", 3186: "▁world"}
    llama2 = SimpleNamespace(vocab_size=32000, piece=lambda i: pieces.get(i, ""), control_ids={})
    other = SimpleNamespace(vocab_size=32000, piece=lambda i: "x", control_ids={})
    config = preset("laneformer-2b")
    assert assets.is_llama2(llama2)
    assert not assets.is_llama2(other)
    card = assets.model_card("m", config, {}, "bfloat16", llama2, llama=False)
    assert "Llama 2 Community License" in card
    assert "Llama 2" not in assets.model_card("m", config, {}, "bfloat16", other, llama=False)
    converted = {"source": {"name": "org/model", "layout": "llama"}}
    card = assets.model_card("m", config, converted, "bfloat16", None, llama=True)
    assert "license: apache-2.0" not in card
    assert "converted from org/model; its licence applies" in card


def test_the_card_names_the_exchange():
    delayed, ladder = (
        assets.model_card("m", config, {}, "float32", None, llama=False)
        for config in (preset("tiny"), preset("tiny", ladder_residual=True))
    )
    assert "| Broadcast delay | 2 layers (before that: independent lanes) |" in delayed
    assert "| Exchange | Ladder Residual: one module late |" in ladder
    assert "delay" not in ladder


def test_the_released_shape_has_the_published_count():
    shapes = sources.flat_shapes(preset("laneformer-2b"))
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 2_320_069_632


def test_bfloat16_rope_at_position_4000_is_float32_rounded_once():
    config = LaneformerConfig(
        hidden_size=96, num_attention_heads=1, num_key_value_heads=1, num_lanes=1
    )
    x = np.random.default_rng(0).normal(size=96).astype(ml_dtypes.bfloat16)
    angle = 4000 * 10000.0 ** (-np.arange(0, 96, 2) / 96)
    pairs = x.astype(np.float64).reshape(-1, 2)
    even = pairs[:, 0] * np.cos(angle) - pairs[:, 1] * np.sin(angle)
    odd = pairs[:, 0] * np.sin(angle) + pairs[:, 1] * np.cos(angle)
    want = np.stack((even, odd), axis=-1).reshape(-1)
    cos, sin = rope.angles(jnp.full((1, 1), 4000), config)
    got = rope.rotate(jnp.asarray(x)[None, None, None, None], cos, sin)[0, 0, 0, 0]
    assert got.dtype == jnp.bfloat16
    # Half a unit in the last place of bfloat16, and what float32 angles leave of 4000 radians.
    bound = np.abs(want) * 2**-8 + 2e-3
    assert (np.abs(np.asarray(got, np.float64) - want) <= bound).all()


def test_a_hub_repository_is_asked_for_weights_and_text_only(tmp_path, monkeypatch, capsys):
    asked = {}

    def download(name, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(GOLDEN)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert cli.main(["import", "org/model", str(tmp_path / "out")]) == 0
    assert asked["name"] == "org/model"
    wanted = [n for n in ("modeling.py", "pytorch_model.bin", "model.pt") if _matches(n, asked)]
    assert wanted == []
    for name in ("model-00001-of-00002.safetensors", "config.json", "chat_template.jinja"):
        assert _matches(name, asked)
    source = native.read_metadata(tmp_path / "out")["source"]
    assert source == {"name": "org/model", "layout": "lanes"}
    capsys.readouterr()
    assert cli.main(["import", "no/such/place", str(tmp_path / "more")]) == 2
    assert "no/such/place: no such folder" in capsys.readouterr().err


def _matches(name: str, asked: dict) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in asked["patterns"])


def test_our_template_needs_our_markers(tokenizer):
    without = SimpleNamespace(vocab_size=10, control_ids={"<s>": 1})
    config = LaneformerConfig(vocab_size=ENTRIES, **SMALL)
    files = assets.export_files({}, config, without, "card")
    assert assets.CHAT_TEMPLATE not in files
    known = SimpleNamespace(vocab_size=10, control_ids=dict.fromkeys(CHAT_CONTROL_SYMBOLS, 3))
    assert assets.CHAT_TEMPLATE in assets.export_files({}, config, known, "card")
    kept = assets.export_files({assets.CARD: b"theirs"}, config, without, "card")
    assert kept[assets.CARD] == b"theirs"
