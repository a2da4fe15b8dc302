"""The chat template a model was trained with stays with it, from the data to the exported folder."""

from pathlib import Path

from laneformer_jax import settings
from laneformer_jax.checkpoint import convert, native
from laneformer_jax.checkpoint.load import load_checkpoint
from train import train
from train.config import RunConfig
from train.setup import _chat_template, find_start

TEMPLATE = "{% for m in messages %}{{ m.role }}> {{ m.content }}\n{% endfor %}"
SMALL = dict(vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=2)


def config_of(corpus: Path, **changes) -> RunConfig:
    config = {
        "model": {"preset": "tiny", "overrides": {**SMALL, "max_position_embeddings": 64}},
        "tokenizer": str(corpus / "tokenizer.model"),
        "data": {"sources": {"a": {"kind": "text", "path": str(corpus / "texts")}}},
        "train": {"steps": 1, "batch_size": 4, "seq_len": 16},
    }
    return settings.from_dict(RunConfig, {**config, **changes})


def test_a_custom_template_reaches_checkpoint_export_and_the_next_phase(corpus, tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text(TEMPLATE)
    data = {"sources": {"a": {"kind": "text", "path": str(corpus / "texts")}}}
    train(config_of(corpus, data={**data, "chat_template": str(template)}), tmp_path / "run")
    template.unlink()  # the checkpoint needs it no more
    saved = native.find(tmp_path / "run")
    assert (saved / "chat_template.jinja").read_text() == TEMPLATE
    assert load_checkpoint(tmp_path / "run").chat_template.source == TEMPLATE
    convert.export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE
    for source in (tmp_path / "run", tmp_path / "out"):
        following = dict(model=None, tokenizer=None, init_from=str(source))
        config = config_of(corpus, **following)
        assert _chat_template(config, find_start(config, None)) == TEMPLATE
        # Here the data is rendered with Laneformer's own, for want of another.
        config = config_of(corpus, **following, phase="sft")
        assert _chat_template(config, find_start(config, None)) is None
