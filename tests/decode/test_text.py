"""Text as it comes: joined it is the full decode; stop strings are found wherever tokens cut them."""

import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.text import TextStream, checked_stops
from laneformer_jax.errors import UserError
from laneformer_jax.tokenizer import train_tokenizer

ALPHABET = "ab\u2581 \n😀ß汉e\u0301"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [folder.joinpath(name).read_text() for name in ("ast.py", "abc.py", "json/decoder.py")]
    return train_tokenizer(texts, 500, tmp_path_factory.mktemp("tokenizer"))


def streamed(tokenizer, ids, stop=()):
    """Parts given out after each token and at the end."""
    stream = TextStream(tokenizer, stop)
    parts = [stream.push(i) for i in ids]
    return [*parts, stream.flush()], stream


def cut(text, stops):
    """Character by character: what stands before the first stop string to be complete."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


@pytest.mark.smoke
def test_emoji_cjk_and_bytes_come_whole(tokenizer):
    text = "\n\t😀ß 汉字 👩‍👩‍👧 def f(x):\r\n    return '\u2581'\0"
    ids = tokenizer.encode(text)
    parts, _ = streamed(tokenizer, ids)
    assert "".join(parts) == text == tokenizer.decode(ids)
    assert not any("\ufffd" in part or "<0x" in part for part in parts)
    assert streamed(tokenizer, tokenizer.encode(" def"))[0][0].startswith(" ")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_parts_joined_are_the_full_decode_of_any_ids(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, 499) | st.integers(6, 261), max_size=60))
    parts, stream = streamed(tokenizer, ids, ["\0never\0"])
    assert "".join(parts) == tokenizer.decode(ids)
    assert stream.given == stream.decoded == len(tokenizer.decode(ids))


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(ALPHABET, max_size=30),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4),
    bytewise=st.booleans(),
)
def test_stop_strings_across_token_borders(tokenizer, text, stops, bytewise):
    ids = [6 + b for b in text.encode()] if bytewise else tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    parts, stream = streamed(tokenizer, ids, stops)
    expected, stopped = cut(text, stops)
    assert "".join(parts) == expected
    assert stream.stopped == stopped
    # Never leaked: what was given out at any time begins the answer.
    for i in range(len(parts)):
        assert expected.startswith("".join(parts[:i]))


def test_a_stop_string_may_begin_inside_a_token(tokenizer):
    inside = next(
        i for i in range(300, 500) if len(tokenizer.decode([i])) >= 3 and tokenizer.decode([i])[0]
    )
    text = tokenizer.decode([inside])
    stop = text[1:] + "😀"  # begins inside this token, ends with a character of four tokens
    ids = [inside, *tokenizer.encode("😀"), *tokenizer.encode("more")]
    parts, stream = streamed(tokenizer, ids, [stop])
    assert "".join(parts) == text[0]
    assert stream.stopped
    assert parts[1:] == [""] * len(parts[1:])


def test_what_only_began_a_stop_string_is_given_at_the_end(tokenizer):
    ids = tokenizer.encode("see END")
    parts, stream = streamed(tokenizer, ids, ["ENDING"])
    assert "".join(parts) == "see END"
    assert parts[-1] == "END"
    assert not stream.stopped


def test_bytes_cut_off_end_as_replacement(tokenizer):
    ids = tokenizer.encode("a😀")[:-1]
    parts, _ = streamed(tokenizer, ids, ["\ufffd\ufffd\ufffd\ufffd"])
    assert "".join(parts) == tokenizer.decode(ids) == "a\ufffd\ufffd\ufffd"
    assert streamed(tokenizer, ids, ["\ufffd"])[1].stopped  # found in what comes last


def test_ids_beyond_the_tokenizer_have_no_text(tokenizer):
    parts, _ = streamed(tokenizer, [*tokenizer.encode("a"), 500, 511, *tokenizer.encode("b")])
    assert "".join(parts) == "ab"


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ([""], "stop: a stop string is empty"),
        (["a"] * 17, "stop: 17 strings; at most 16"),
        (["a" * 1025], "stop: a string of 1025 characters; at most 1024"),
    ],
)
def test_bad_stop_strings_are_named(stop, message):
    with pytest.raises(UserError, match=message):
        checked_stops(stop)
    assert checked_stops(["\n"]) == ("\n",)
