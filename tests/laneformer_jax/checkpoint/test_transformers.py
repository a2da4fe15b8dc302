"""Dense models against transformers itself, where it is installed (the `peer` extra)."""

import json

import dense_llama
import numpy as np
import pytest

from laneformer_jax.checkpoint import convert, dense, families
from laneformer_jax.checkpoint.tensorfile import TensorFolder

torch = pytest.importorskip("torch", reason="needs the `peer` extra: pip install -e .[peer]")
transformers = pytest.importorskip("transformers", reason="needs the `peer` extra")

LENGTH = 2000
FAMILIES = {
    name: dict(config, hidden_size=64, max_position_embeddings=2048, vocab_size=64)
    for name, config in {
        "llama": dict(dense_llama.FAMILIES["llama"], head_dim=96),  # GQA: 8 query heads, 4 kv heads
        "llama-tied": dense_llama.FAMILIES["llama-tied"],
        "mistral": dict(dense_llama.FAMILIES["mistral"], sliding_window=100),
        "qwen3": dense_llama.FAMILIES["qwen3"],
        "qwen3-sliding": dict(dense_llama.FAMILIES["qwen3-sliding"], sliding_window=100),
        "llama3-rope": dict(
            dense_llama.FAMILIES["llama"],
            rope_scaling=dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=256,
            ),
        ),
    }.items()
}


def torch_logits(folder, ids: np.ndarray) -> tuple[str, np.ndarray]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(ids)[None]).logits
    return type(model).__name__, logits[0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gives_the_same_logits(family, tmp_path, lane_logits):
    config = FAMILIES[family]
    tensors = dense_llama.random_tensors(config, seed=3)
    folder = dense_llama.write(tmp_path / "dense", config, tensors)
    ids = np.random.default_rng(0).integers(config["vocab_size"], size=LENGTH)
    name, want = torch_logits(folder, ids)
    assert want.std() > 0.5
    for lanes in (1, 2, 4, 8):
        got = lane_logits(dense.DenseFolder(folder, lanes, 2), ids)
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=0, err_msg=f"{lanes} lanes")
    convert.import_dense(folder, tmp_path / "lanes", lanes=8, delay=2)
    convert.export(tmp_path / "lanes", tmp_path / "out", layout="llama")
    exported = TensorFolder(tmp_path / "out")
    assert exported.specs.keys() == tensors.keys()
    for tensor, value in tensors.items():
        np.testing.assert_array_equal(exported.read(tensor), value, err_msg=tensor)
    back_name, back = torch_logits(tmp_path / "out", ids)
    assert back_name == name
    np.testing.assert_array_equal(back, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_transformers_wrote(family, tmp_path, lane_logits):
    """In its own spelling: `rope_parameters` from version 5 on."""
    config = {**FAMILIES[family], "rope_theta": 5e5}
    dense_llama.write(tmp_path / "ours", config, dense_llama.random_tensors(config, seed=3))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "theirs")
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    new = int(transformers.__version__.partition(".")[0]) >= 5
    assert ("rope_parameters" in written, "dtype" in written) == (new, True)
    ids = np.random.default_rng(0).integers(config["vocab_size"], size=300)
    with torch.no_grad():
        want = model.eval()(torch.from_numpy(ids)[None]).logits[0].numpy()
    source = dense.DenseFolder(tmp_path / "theirs", 4, 2)
    assert source.config.rope_theta == 5e5
    np.testing.assert_allclose(lane_logits(source, ids), want, atol=1e-4, rtol=0)


def test_an_exported_config_reads_as_the_class_it_names(tmp_path):
    for family, config in FAMILIES.items():
        split = families.lane_config(config, 4, 2)
        folder = tmp_path / family
        folder.mkdir()
        (folder / "config.json").write_text(
            families.dense_config_text(split, config["num_key_value_heads"], "float32")
        )
        ours = transformers.AutoConfig.from_pretrained(folder)
        kind = {"llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3"}[config["model_type"]]
        assert type(ours).__name__ == f"{kind}Config"
        theirs = type(ours)(**{k: v for k, v in config.items() if k != "model_type"})
        # Null means hidden_size / heads; the export spells it out.
        assert ours.head_dim == (
            theirs.head_dim or theirs.hidden_size // theirs.num_attention_heads
        )
        for key in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
            assert getattr(ours, key) == getattr(theirs, key), (family, key)
        assert getattr(ours, "layer_types", None) == getattr(theirs, "layer_types", None)
        assert json.loads((folder / "config.json").read_text())["architectures"] == [
            f"{kind}ForCausalLM"
        ]
