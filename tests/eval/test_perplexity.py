import gzip
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.perplexity import documents, perplexity, windows
from laneformer_jax.errors import UserError


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 200), st.integers(1, 40), st.data())
def test_windows_score_every_prediction_once(length, context, data):
    stride = data.draw(st.integers(1, context))
    scored = []
    for start, end, first in windows(length, context, stride):
        assert 0 <= start <= first < end <= length - 1
        assert end - start <= context
        if first:
            assert first - start >= min(first, context - stride)
        scored += range(first, end)
    assert scored == list(range(length - 1))


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint):
    from laneformer_jax.checkpoint.load import load_checkpoint

    return load_checkpoint(tiny_checkpoint)


TEXT = "def f(x):\n    return x + 1  # é\n" * 6


def direct(model, ids):
    """−log p of each token after the first, by one call without windows."""
    import jax

    logits = np.asarray(model(np.asarray([ids[:-1]], np.int32)), np.float64)[0]
    log_z = np.asarray(jax.nn.logsumexp(logits, axis=-1), np.float64)
    return log_z - logits[np.arange(len(ids) - 1), ids[1:]]


def test_whole_document_in_one_window(loaded):
    model, tokenizer, _ = loaded
    texts = [TEXT, "x", "import os\n"]
    got = perplexity(model, tokenizer, texts, context=256, batch_size=2)
    each = [direct(model, tokenizer.encode(t, bos=True, eos=True)) for t in texts]
    assert got.nll == pytest.approx(sum(x.sum() for x in each), rel=1e-5)
    assert got.tokens == sum(map(len, each))
    assert got.text_bytes == sum(len(t.encode()) for t in texts)
    assert got.bits_per_byte == pytest.approx(got.nll / math.log(2) / got.text_bytes)
    assert got.perplexity == pytest.approx(math.exp(got.nll / got.tokens))


def test_sliding_windows_are_exact(loaded):
    """Each token is scored with exactly the context its window holds."""
    model, tokenizer, _ = loaded
    ids = tokenizer.encode(TEXT, bos=True, eos=True)
    got = perplexity(model, tokenizer, [TEXT], context=16, stride=5)
    expected = 0.0
    for start, end, first in windows(len(ids), 16, 5):
        expected += direct(model, ids[start : end + 1])[first - start :].sum()
    assert len(ids) > 40
    assert got.nll == pytest.approx(expected, rel=1e-5)


def test_batch_size_changes_nothing(loaded):
    model, tokenizer, _ = loaded
    one = perplexity(model, tokenizer, [TEXT, "y = 1\n"], context=32, stride=7, batch_size=1)
    many = perplexity(model, tokenizer, [TEXT, "y = 1\n"], context=32, stride=7, batch_size=8)
    assert one.nll == pytest.approx(many.nll, rel=1e-6)


def test_documents(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"text": "two"}\n\n{"content": "three"}\n')
    assert list(documents(tmp_path)) == ["one", "two", "three"]
    with pytest.raises(UserError, match="no such file or folder"):
        list(documents(tmp_path / "none"))
    (tmp_path / "c.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(UserError, match=r"c\.jsonl:1: no field text or content"):
        list(documents(tmp_path / "c.jsonl"))


def test_impossible_windows(loaded):
    model, tokenizer, _ = loaded
    with pytest.raises(UserError, match=r"context = 4096: must be 1 … 2048"):
        perplexity(model, tokenizer, [TEXT], context=4096)
    with pytest.raises(UserError, match=r"stride = 9: must be 1 … 8"):
        perplexity(model, tokenizer, [TEXT], context=8, stride=9)
    with pytest.raises(UserError, match="no text"):
        perplexity(model, tokenizer, [])
