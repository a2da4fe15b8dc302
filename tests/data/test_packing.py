"""Packing: nothing lost, nothing twice, no target of another document."""

from collections import Counter

import numpy as np
import pytest
from batch_rows import check, packed, pairs, segments
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.documents import IGNORE, chat_example, text_example
from data.packing import padding


def numbered(lengths):
    """Documents whose tokens are all different, so that every pair tells where it came from."""
    start, out = 1, []
    for n in lengths:
        ids = np.arange(start, start + n + 1, dtype=np.int32)
        out.append(np.stack([ids[:-1], ids[1:]], axis=1))
        start += n + 1
    return out


@pytest.mark.parametrize("method", ["concat", "best_fit"])
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=25),
    seq_len=st.sampled_from([1, 7, 8, 16]),
)
@example(lengths=[8, 8, 16, 1, 7], seq_len=8)  # documents that end where rows do
def test_every_transition_of_every_document_once(method, lengths, seq_len):
    examples = numbered(lengths)
    batches = packed(examples, seq_len, method)
    assert Counter(pairs(batches)) == Counter((int(a), int(b)) for e in examples for a, b in e)
    for s in segments(batches):
        # Inside a segment the tokens follow one another: it never mixes documents.
        assert np.array_equal(s["tokens"][1:], s["targets"][:-1])


def test_concat_has_no_padding_but_at_the_end():
    batches = packed(numbered([5, 30, 3, 9, 17]), 8, "concat", batch=1)
    fill = [int((b["segment_ids"] > 0).sum()) for b in batches]
    assert fill == [8] * 8


def test_a_document_cut_at_a_row_end_goes_on_as_its_own_segment():
    (first, second) = packed(numbered([5, 6]), 8, "concat", batch=1)
    assert first["segment_ids"].tolist() == [[1] * 5 + [2] * 3]
    assert first["positions"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert first["tokens"].tolist() == [[1, 2, 3, 4, 5, 7, 8, 9]]
    assert first["targets"].tolist() == [[2, 3, 4, 5, 6, 8, 9, 10]]
    assert second["segment_ids"].tolist() == [[1] * 3 + [0] * 5]
    assert second["tokens"].tolist() == [[10, 11, 12, 0, 0, 0, 0, 0]]
    assert second["loss_mask"].tolist() == [[1.0] * 3 + [0.0] * 5]


def test_best_fit_keeps_documents_whole_that_fit_a_row():
    lengths = [3, 5, 8, 2, 6, 7, 1, 4]
    kept = [len(s["tokens"]) for s in segments(packed(numbered(lengths), 8, "best_fit", bins=8))]
    assert sorted(kept) == sorted(lengths)


def test_masked_targets_take_no_loss_and_show_no_marker():
    ids = np.arange(1, 7, dtype=np.int32)
    example, cut = chat_example(ids, np.asarray([0, 0, 1, 1, 0, 1], bool))
    assert not cut
    assert example[:, 1].tolist() == [IGNORE, 3, 4, IGNORE, 6]
    (batch,) = packed([example], 8, "concat", batch=1)
    assert batch["loss_mask"].tolist() == [[0, 1, 1, 0, 1, 0, 0, 0]]
    assert batch["targets"].tolist() == [[0, 3, 4, 0, 6, 0, 0, 0]]


def test_padding_is_a_batch_like_any_other():
    empty = padding(2, 5)
    check(empty)
    assert empty["segment_ids"].sum() == 0


def test_text_example(tokenizer):
    example = text_example("alpha", tokenizer)
    ids = tokenizer.encode("alpha", bos=True, eos=True)
    assert example[:, 0].tolist() == ids[:-1]
    assert example[:, 1].tolist() == ids[1:]
    assert example[0, 0] == tokenizer.bos_id
    assert example[-1, 1] == tokenizer.eos_id
