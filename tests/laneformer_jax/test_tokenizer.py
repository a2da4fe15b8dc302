"""Tokenizers: any text round-trips, text makes no control token, streams equal the full decode."""

import json
import pickle
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import sentencepiece as spm
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from laneformer_jax.errors import UserError
from laneformer_jax.tokenizer import CHAT_CONTROL_SYMBOLS, Tokenizer, train_tokenizer

KINDS = ("ours", "dummy_prefix", "json_bytes", "json_llama")
BYTES = [f"<0x{i:02X}>" for i in range(256)]
HARD_TEXTS = (
    "",
    "\t\tif x:\r\n",
    "\ufeffBOM",
    "nul\0nul",
    "👩‍👩‍👧 😀ß",
    "e\u0301 NFD \u00e9 NFC \ufb01",
    "\u2581",
    "a \u2581 \u2581\u2581b",
    " \u2047 \ufffd",
    "\u2028\u2029\x85\x0b\x0c",
    " " * 200 + "x" + " " * 3,
    "汉字かな",
    "<s></s><|user|><0x0A><unk>",
    "\ufdd0\uffff\U0010ffff",
)
texts = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="\u2581 \n\ta<s>/|0x\r\0\ufeff\u0301é😀⁇", max_size=30),
)


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.py"))[:25]]


@pytest.fixture(scope="module")
def loaded(corpus, tmp_path_factory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    out = {"ours": train_tokenizer(corpus, 700, root / "ours")}
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(corpus).split("\n")),
        model_prefix=str(root / "dummy"),
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        pad_id=-1,
        minloglevel=2,
    )
    out["dummy_prefix"] = Tokenizer.load(root / "dummy.model")

    byte_level = tokenizers.Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|user|>"],
    )
    byte_level.train_from_iterator(corpus, trainer)
    byte_level.save(str(root / "tokenizer.json"))
    out["json_bytes"] = Tokenizer.load(root / "tokenizer.json")

    (root / "llama").mkdir()
    llama = llama_json(corpus)
    llama.save(str(root / "llama" / "tokenizer.json"))
    out["json_llama"] = Tokenizer.load(root / "llama")
    return out


def llama_json(corpus: list[str]) -> tokenizers.Tokenizer:
    """A tokenizer.json laid out as Llama-2's: a space in front, byte pieces."""
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    learning = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    learning.normalizer = normalizers.Sequence(steps)
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, special_tokens=["<unk>", "<s>", "</s>", *BYTES]
    )
    learning.train_from_iterator([line for t in corpus for line in t.split("\n")][:3000], trainer)
    data = json.loads(learning.to_str())
    data["added_tokens"] = data["added_tokens"][:3]
    llama = tokenizers.Tokenizer.from_str(json.dumps(data))
    llama.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return llama


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
def test_hard_texts_round_trip(loaded, kind):
    tokenizer = loaded[kind]
    for text in HARD_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(text=texts)
@example(text="\u2581 a")
def test_any_text_round_trips(loaded, kind, text):
    tokenizer = loaded[kind]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["ours", "dummy_prefix"])
@settings(max_examples=400, deadline=None)
@given(
    text=st.one_of(
        st.text(min_size=16, max_size=80),
        st.text(alphabet="ab_(1é’\n\t \0", min_size=16, max_size=60),
        st.lists(st.sampled_from(["def f", "(x)", "  ", "\n    ", "é", "x1", " "])).map("".join),
    )
)
def test_word_by_word_is_what_sentencepiece_does(loaded, kind, text):
    tokenizer = loaded[kind]
    sp = tokenizer._backend._sp
    if "\u2581" not in text:
        assert tokenizer.encode(text) == sp.encode(text)


def test_code_is_encoded_as_sentencepiece_does(loaded, corpus):
    for kind in ("ours", "dummy_prefix"):
        sp = loaded[kind]._backend._sp
        for text in corpus[:12]:
            assert loaded[kind].encode(text) == sp.encode(text)


def test_pieces_that_reach_over_spaces_are_encoded_whole(tmp_path):
    """A model trained without splitting at whitespace has such pieces."""
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(["for i in range of things", "for i in x of range"] * 40),
        model_prefix=str(tmp_path / "over"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_by_whitespace=False,
        pad_id=-1,
        minloglevel=2,
    )
    tokenizer = Tokenizer.load(tmp_path / "over.model")
    assert tokenizer._backend._words is None
    text = "for i in range of things for i in x"
    assert tokenizer.encode(text) == tokenizer._backend._sp.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_text_never_makes_a_control_token(loaded, kind, text):
    tokenizer = loaded[kind]
    marked = text + "".join(tokenizer.control_ids) + text
    assert not set(tokenizer.encode(marked)) & set(tokenizer.control_ids.values())
    assert tokenizer.decode(tokenizer.encode(marked)) == marked


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_streams_equal_the_full_decode_of_any_ids(loaded, kind, data):
    tokenizer = loaded[kind]
    ids = data.draw(
        st.lists(
            st.one_of(
                st.integers(0, tokenizer.vocab_size - 1),
                st.integers(3, 262),  # byte pieces, also in invalid orders
                st.sampled_from(tokenizer.encode("a b\u2581😀ß  \n\tdef")),
            ),
            max_size=150,
        )
    )
    stream = tokenizer.stream()
    parts = [stream.push(i) for i in ids]
    assert "".join(parts) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_stream_gives_whole_characters_as_soon_as_they_are_complete(loaded, kind):
    tokenizer = loaded[kind]
    text = "\n\t😀ß 汉字 def f():\n"
    stream = tokenizer.stream()
    parts = [stream.push(i) for i in tokenizer.encode(text)] + [stream.flush()]
    assert "".join(parts) == text
    assert not any("\ufffd" in part or "<0x" in part for part in parts)
    # A fresh start after flush.
    assert "".join(map(stream.push, tokenizer.encode("def"))) + stream.flush() == "def"


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_joined_are_the_text(loaded, kind):
    tokenizer = loaded[kind]
    text = "def f():\n\t😀ß 汉\u2581\x00\x7f\xad<s>"
    joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode()
    # Two of these put a space in front of a text.
    assert joined.removeprefix(" ") == text
    assert tokenizer.token_bytes(tokenizer.bos_id) == b"<s>"
    with pytest.raises(UserError, match="outside"):
        tokenizer.token_bytes(tokenizer.vocab_size)


def test_a_leading_space_survives_streaming(loaded):
    tokenizer = loaded["ours"]
    ids = tokenizer.encode(" def f")
    assert tokenizer.piece(ids[0]).startswith("▁")
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) == " def f"


def test_ours_concatenates_where_tokens_do(loaded):
    """No space in front: a completion can be encoded apart from its prompt."""
    tokenizer = loaded["ours"]
    ids = tokenizer.encode("def f(x):\n") + tokenizer.encode("    return x")
    assert tokenizer.decode(ids) == "def f(x):\n    return x"


def test_bos_and_eos_come_once_and_on_request(loaded):
    tokenizer = loaded["ours"]
    plain = tokenizer.encode("x = 1")
    assert tokenizer.encode("x = 1", bos=True, eos=True) == [1, *plain, 2]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.decode([1, *plain, 2]) == "x = 1"
    assert [tokenizer.control_ids[s] for s in CHAT_CONTROL_SYMBOLS] == [3, 4, 5]


def test_continued_text_gets_no_space_in_front(loaded):
    tokenizer = loaded["dummy_prefix"]
    ids = [*tokenizer.encode("a"), *tokenizer.encode_array("b", continues=True).tolist()]
    assert tokenizer.decode(ids) == "ab"


def test_newlines_with_indentation_are_learnt(loaded):
    tokenizer = loaded["ours"]
    assert len(tokenizer.encode("\n    ")) <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_lone_surrogates_are_refused(loaded, kind):
    with pytest.raises(UserError, match=r"character 2 is the lone surrogate U\+D800"):
        loaded[kind].encode("ab\ud800")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_vocabulary_are_refused(loaded, kind):
    tokenizer = loaded[kind]
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(UserError, match=f"token id {bad}: outside"):
            tokenizer.decode([bad])
        with pytest.raises(UserError, match=f"token id {bad}: outside"):
            tokenizer.stream().push(bad)


@pytest.mark.parametrize("kind", KINDS)
def test_pickle_and_save_keep_the_tokenizer(loaded, kind, tmp_path):
    tokenizer = loaded[kind]
    saved = Tokenizer.load(tokenizer.save(tmp_path))
    for copy in (pickle.loads(pickle.dumps(tokenizer)), saved):
        assert copy.sha256 == tokenizer.sha256
        assert copy.encode("def f():\n\treturn 1 \u2581") == tokenizer.encode(
            "def f():\n\treturn 1 \u2581"
        )


def test_the_same_ids_are_told_whatever_the_file(loaded, corpus, tmp_path):
    ours = loaded["ours"]
    (tmp_path / "a.model").write_bytes(ours._backend.data + b"\x9a\x06\x00")  # an unknown field
    copy = Tokenizer.load(tmp_path / "a.model")
    assert copy.sha256 != ours.sha256
    assert ours.same_ids(copy)
    assert not ours.same_ids(loaded["dummy_prefix"])
    other = train_tokenizer([t.swapcase() for t in corpus], 700, tmp_path / "other")
    assert other.vocab_size == ours.vocab_size
    assert not ours.same_ids(other)


def test_training_is_repeatable(corpus, tmp_path, loaded):
    again = train_tokenizer(iter(corpus), 700, tmp_path / "again.model")
    assert again.sha256 == loaded["ours"].sha256
    assert np.array_equal(again.encode_array(corpus[0]), loaded["ours"].encode_array(corpus[0]))


def test_training_errors_are_one_line_and_leave_nothing(tmp_path):
    for found, make in {
        r"vocab_size = 200: must be at least 263": lambda: train_tokenizer(
            ["a"], 200, tmp_path / "t"
        ),
        r"vocab_size = 5000: the text is too small for it; at most \d+": lambda: train_tokenizer(
            ["abc abd"], 5000, tmp_path / "t"
        ),
        r"vocab_size = 270: the characters of this text alone take \d+": lambda: train_tokenizer(
            ["abcdefghijklmnop"], 270, tmp_path / "t"
        ),
        r"hold no text": lambda: train_tokenizer([], 700, tmp_path / "t"),
    }.items():
        with pytest.raises(UserError, match=found):
            make()
    assert list(tmp_path.iterdir()) == []


def test_loading_errors_name_the_file(tmp_path, corpus):
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus[0].split("\n")),
        model_prefix=str(tmp_path / "nobytes"),
        vocab_size=300,
        minloglevel=2,
    )
    for path, found in {
        tmp_path / "missing.model": "no such tokenizer file",
        tmp_path / "tokenizer.model": "is not a sentencepiece model",
        tmp_path / "tokenizer.json": "is not a tokenizer.json",
        tmp_path / "empty": "holds neither tokenizer.model nor tokenizer.json",
        tmp_path / "nobytes.model": "without byte fallback",
    }.items():
        with pytest.raises(UserError, match=found) as caught:
            Tokenizer.load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
