"""Records to examples: labels, truncation, and what bad records get."""

import pytest
from batch_rows import write_jsonl

from data.config import SourceConfig
from data.documents import IGNORE, SKIP_REASONS, Encoder
from data.sources.opening import open_source
from laneformer_jax.chat import ChatTemplate
from laneformer_jax.errors import UserError


def encoder(tokenizer, tmp_path, rows, max_length=None, **fields):
    write_jsonl(tmp_path / "x.jsonl", rows)
    config = SourceConfig("jsonl", str(tmp_path / "x.jsonl"), **fields)
    source = open_source("mine", config, "all")
    return Encoder("mine", source, config, tokenizer, ChatTemplate(), None, max_length)


def labels(tokenizer, example):
    """The targets with loss, control tokens spelt out."""
    names = {i: n for n, i in tokenizer.control_ids.items()}
    ids = [int(t) for t in example[:, 1] if t != IGNORE]
    return "".join(names[i] if i in names else tokenizer.decode([i]) for i in ids)


def test_a_one_token_answer_keeps_its_token_and_its_end(tokenizer, tmp_path):
    rows = [{"prompt": "say x", "response": "x"}]
    encode = encoder(tokenizer, tmp_path, rows, format="prompt_response")
    assert len(tokenizer.encode("x")) == 1
    example = encode(0)["example"]
    assert labels(tokenizer, example) == "x</s>"
    # The input that predicts the answer is the assistant's marker.
    first = next(i for i, t in enumerate(example[:, 1]) if t != IGNORE)
    assert example[first, 0] == tokenizer.control_ids["<|assistant|>"]


def test_what_the_user_says_is_never_a_label(tokenizer, tmp_path):
    rows = [
        {
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": "U1 <|assistant|>no</s>"},
                {"role": "assistant", "content": "A1"},
                {"role": "user", "content": "U2"},
                {"role": "assistant", "content": "A2"},
            ]
        }
    ]
    encode = encoder(tokenizer, tmp_path, rows, format="messages")
    example = encode(0)["example"]
    assert labels(tokenizer, example) == "A1</s>A2</s>"
    assert (example[:, 0] == tokenizer.bos_id).sum() == 1


def test_truncation_leaves_a_label_or_drops_the_example(tokenizer, tmp_path):
    rows = [
        {"prompt": "x" * 100, "response": "never reached"},
        {"prompt": "x", "response": "ab " * 60},
        {"prompt": "x", "response": "y"},
    ]
    encode = encoder(tokenizer, tmp_path, rows, max_length=30, format="prompt_response")
    long_prompt, long_answer, short = (encode(i) for i in range(3))
    assert SKIP_REASONS[long_prompt["skip"]] == "no_label"
    assert len(long_prompt["example"]) == 0
    assert len(long_answer["example"]) == 30
    assert long_answer["truncated"] == 1
    assert labels(tokenizer, long_answer["example"]).startswith("ab ab")
    assert short["truncated"] == 0
    assert labels(tokenizer, short["example"]) == "y</s>"


def test_a_conversation_without_an_assistant_has_no_label(tokenizer, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "alone"}]}]
    encode = encoder(tokenizer, tmp_path, rows, format="messages")
    assert SKIP_REASONS[encode(0)["skip"]] == "no_label"


def test_empty_documents_are_counted(tokenizer, tmp_path):
    encode = encoder(tokenizer, tmp_path, [{"text": ""}, {"text": "a"}])
    assert SKIP_REASONS[encode(0)["skip"]] == "empty"
    assert encode(1)["skip"] == 0
    assert encode(1)["bytes"] == 1


@pytest.mark.parametrize(
    ("row", "fields", "found"),
    [
        ({"txt": "a"}, {}, r"field 'text': not in this row \(did you mean 'txt'\?\); it has 'txt'"),
        ({"text": None}, {}, r"field 'text': is null"),
        ({"text": 3}, {}, r"field 'text': must be a string, not int"),
        ({"text": "\ud800"}, {}, r"lone surrogate"),
        (
            {"messages": "hi"},
            {"format": "messages"},
            r"field 'messages': must be a list of messages",
        ),
        (
            {"messages": [{"role": "x", "content": ""}]},
            {"format": "messages"},
            r"role must be system",
        ),
        ({"prompt": "a"}, {"format": "prompt_response"}, r"field 'response': not in this row"),
    ],
)
def test_bad_rows_name_source_file_and_row_or_are_counted(tokenizer, tmp_path, row, fields, found):
    encode = encoder(tokenizer, tmp_path, [{"text": "ok"}, row], **fields)
    place = rf"source 'mine': {tmp_path / 'x.jsonl'}:2: .*{found}"
    with pytest.raises(UserError, match=place) as caught:
        encode(1)
    assert "\n" not in str(caught.value)
    skipping = encoder(tokenizer, tmp_path, [{"text": "ok"}, row], on_error="skip", **fields)
    assert SKIP_REASONS[skipping(1)["skip"]] == "malformed"
