"""From a prompt to pieces of text: what a burst holds, where a stop string falls, who has finished."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from decode.complete import Ask, complete
from decode.request import Burst, Request, Sampling
from laneformer_jax.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    text = Path(sysconfig.get_paths()["stdlib"], "ast.py").read_text(encoding="utf-8")
    return train_tokenizer([text], 400, tmp_path_factory.mktemp("tokenizer"))


class Script:
    """Bursts that were written down, for each sample a text; log-probabilities count the tokens."""

    def __init__(self, rows, size, finish="length"):
        self.rows, self.size, self.finish = rows, size, finish
        self.closed = False

    def stream(self, request):
        try:
            longest = max(map(len, self.rows))
            for at in range(0, longest, self.size):
                parts = [np.asarray(row[at : at + self.size], np.int32) for row in self.rows]
                over = [self.finish if at + self.size >= len(row) else None for row in self.rows]
                logprobs = [-(at + np.arange(len(part), dtype=np.float32)) for part in parts]
                top = [np.tile(part[:, None], 2) for part in parts]
                yield Burst(
                    parts, over, logprobs, top, [np.tile(lp[:, None], 2) for lp in logprobs], 3, 1
                )
        finally:
            self.closed = True


def run(tokenizer, rows, size, stop=(), finish="length"):
    engine = Script(rows, size, finish)
    asked = Ask(Request([1], 99, Sampling(logprobs=2), n=len(rows)), tuple(stop))
    steps = list(complete(engine, tokenizer, asked))
    assert engine.closed
    pieces = [[p for step in steps for p in step.pieces if p.sample == i] for i in range(len(rows))]
    return pieces, steps


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_texts_and_tokens_whatever_the_burst(tokenizer, size):
    text = "a 😀 汉字\n    def f():"
    ids = tokenizer.encode(text)
    ((*before, last),), steps = run(tokenizer, [ids], size)
    pieces = [*before, last]
    assert "".join(p.text for p in pieces) == text
    assert [p.finish for p in pieces] == [None] * len(before) + ["length"]
    assert sum(p.drawn for p in pieces) == len(ids)
    tokens = [t for p in pieces for t in p.tokens]
    assert [t.id for t in tokens] == ids
    assert [t.logprob for t in tokens] == [-i for i in range(len(ids))]
    assert all(t.top == ((t.id, t.logprob),) * 2 for t in tokens)
    for token in tokens:
        own = tokenizer.token_bytes(token.id)
        if len(own) > 1:
            assert text[token.start :].startswith(own.decode())
    assert (steps[0].proposed, steps[0].accepted) == (3, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize("stop", ["END", "汉字EN", "字", "\n"])
def test_a_stop_string_ends_text_tokens_and_engine(tokenizer, size, stop):
    text = "see\n😀 汉字END and more"
    ids = tokenizer.encode(text)
    before = text[: text.index(stop)]
    (pieces,), _ = run(tokenizer, [ids], size, [stop])
    assert "".join(p.text for p in pieces) == before
    assert pieces[-1].finish == "stop"
    # No token shows what was cut off, and only tokens up to the stop string count.
    shown = b"".join(tokenizer.token_bytes(t.id) for p in pieces for t in p.tokens)
    assert shown.decode().startswith(before)
    assert stop not in shown.decode()
    used = sum(p.drawn for p in pieces)
    assert stop in tokenizer.decode(ids[:used])
    assert stop not in tokenizer.decode(ids[: used - 1])


def test_samples_finish_one_by_one(tokenizer):
    rows = [tokenizer.encode(text) for text in ("short", "this one STOP here", "q" * 12)]
    pieces, _ = run(tokenizer, rows, 2, ["STOP"], finish="stop")
    assert ["".join(p.text for p in row) for row in pieces] == ["short", "this one ", "q" * 12]
    assert [row[-1].finish for row in pieces] == ["stop"] * 3
    assert [sum(p.finish is not None for p in row) for row in pieces] == [1, 1, 1]


def test_closing_the_answers_closes_the_engine(tokenizer):
    engine = Script([tokenizer.encode("a b c d e f g h")], 1)
    steps = complete(engine, tokenizer, Ask(Request([1], 99)))
    next(steps)
    assert not engine.closed
    steps.close()
    assert engine.closed


def test_an_answer_may_be_empty(tokenizer):
    (pieces,), _ = run(tokenizer, [[*tokenizer.encode("END")]], 50, ["END"])
    assert [(p.text, p.tokens, p.finish) for p in pieces] == [("", (), "stop")]
