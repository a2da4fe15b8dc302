"""Chat templates: who said what, BOS once, and no message that speaks for another."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer_jax.chat import ChatTemplate
from laneformer_jax.errors import UserError
from laneformer_jax.tokenizer import Tokenizer, train_tokenizer

LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_UNMARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Add 1 and 2."},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "And 4?"},
    {"role": "assistant", "content": "7 "},
]
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": st.one_of(
                st.text(max_size=20),
                st.lists(
                    st.sampled_from(
                        [
                            "<s>",
                            "</s>",
                            "<|user|>",
                            "<|assistant|>",
                            "<|us",
                            "er|>",
                            "<",
                            "\n",
                            "\ufdd0",
                        ]
                    ),
                    max_size=6,
                ).map("".join),
            ),
        }
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    text = ["def add(a, b):\n    return a + b\n# user assistant system INST im_start im_end\n" * 3]
    symbols = ("<|system|>", "<|user|>", "<|assistant|>", "<|im_start|>", "<|im_end|>")
    return train_tokenizer(text, 300, tmp_path_factory.mktemp("chat"), symbols)


def spoken(tokenizer, chat) -> list[str]:
    """The runs that the mask marks, with control tokens spelt out."""
    names = {i: name for name, i in tokenizer.control_ids.items()}
    runs, last = [], False
    for i, marked in zip(chat.ids.tolist(), chat.mask.tolist(), strict=True):
        if marked and not last:
            runs.append([])
        if marked:
            runs[-1].append(i)
        last = marked
    return [
        "".join(names.get(i, "\0") if i in names else tokenizer.decode([i]) for i in run)
        for run in runs
    ]


def written(tokenizer, ids) -> str:
    names = {i: name for name, i in tokenizer.control_ids.items()}
    return "".join(names[i] if i in names else tokenizer.decode([i]) for i in ids)


@pytest.mark.smoke
def test_our_template_word_for_word(tokenizer):
    chat = ChatTemplate().encode(TALK, tokenizer)
    assert written(tokenizer, chat.ids.tolist()) == (
        "<s><|system|>Be brief.</s><|user|>Add 1 and 2.</s><|assistant|>3</s>"
        "<|user|>And 4?</s><|assistant|>7 </s>"
    )
    assert spoken(tokenizer, chat) == ["3</s>", "7 </s>"]


def test_a_prompt_is_the_beginning_of_the_training_tokens(tokenizer):
    template = ChatTemplate()
    whole = template.encode(TALK, tokenizer).ids.tolist()
    prompt = template.encode(TALK[:2], tokenizer, add_generation_prompt=True).ids.tolist()
    assert whole[: len(prompt)] == prompt
    assert tokenizer.piece(prompt[-1]) == "<|assistant|>"


@settings(max_examples=200, deadline=None)
@given(talk=messages)
def test_no_text_forges_a_control_token(tokenizer, talk):
    chat = ChatTemplate().encode(talk, tokenizer)
    ids = chat.ids.tolist()
    assert ids.count(tokenizer.bos_id) == 1
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.eos_id) == len(talk)
    for role in ("system", "user", "assistant"):
        marker = tokenizer.control_ids[f"<|{role}|>"]
        assert ids.count(marker) == sum(m["role"] == role for m in talk)
    # The texts come back as they were (noncharacters of our own marks become U+FFFD).
    parts, at = [], -1
    for i in ids[1:]:
        if i in (3, 4, 5):
            parts.append([])
            at += 1
        elif i != tokenizer.eos_id:
            parts[at].append(i)
    expected = [
        m["content"].translate({0xFDD0: 0xFFFD, 0xFDD1: 0xFFFD, 0xFDD2: 0xFFFD}) for m in talk
    ]
    assert [tokenizer.decode(p) for p in parts] == expected
    # And the mask covers exactly the assistant's texts and their ends.
    labels = sum(len(p) + 1 for p, m in zip(parts, talk, strict=True) if m["role"] == "assistant")
    assert int(chat.mask.sum()) == labels


def test_chatml_marks(tokenizer):
    chat = ChatTemplate(CHATML).encode(TALK, tokenizer)
    assert spoken(tokenizer, chat) == ["3<|im_end|>", "7 <|im_end|>"]
    assert chat.ids.tolist().count(tokenizer.bos_id) == 1


def test_a_template_without_marks_gives_the_same_as_with(tokenizer):
    marked = ChatTemplate(CHATML).encode(TALK, tokenizer)
    unmarked = ChatTemplate(CHATML_UNMARKED).encode(TALK, tokenizer)
    assert marked.ids.tolist() == unmarked.ids.tolist()
    assert spoken(tokenizer, unmarked) == ["3<|im_end|>", "7 <|im_end|>"]


def test_llama2_without_marks(tokenizer):
    chat = ChatTemplate(LLAMA2).encode(TALK[1:], tokenizer)
    assert written(tokenizer, chat.ids.tolist()) == (
        "<s>[INST] Add 1 and 2. [/INST] 3 </s><s>[INST] And 4? [/INST] 7 </s>"
    )
    assert spoken(tokenizer, chat) == [" 3 </s>", " 7 </s>"]


def test_messages_cannot_join_into_a_marker_between_them(tokenizer):
    joined = ChatTemplate(
        "{{ messages[0].content + messages[1].content }}{% generation %}x{% endgeneration %}"
    )
    talk = [{"role": "user", "content": "<|us"}, {"role": "user", "content": "er|>"}]
    ids = joined.encode(talk, tokenizer).ids.tolist()
    assert tokenizer.control_ids["<|user|>"] not in ids
    assert tokenizer.decode(ids) == "<|user|>x"


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    # Shows only the last message: what the assistant said before cannot be found in the whole.
    template = ChatTemplate("{{ messages[-1].content }}{{ eos_token }}", name="last.jinja")
    with pytest.raises(UserError, match=r"last\.jinja: has no \{% generation %\} marks"):
        template.encode(TALK, tokenizer)


@pytest.mark.parametrize("begins", ["", "<s>", "<s><s>"])
def test_bos_exactly_once(tokenizer, begins):
    template = ChatTemplate(
        f"{begins}{{{{ messages[0].content }}}}{{% generation %}}y{{% endgeneration %}}"
    )
    ids = template.encode([{"role": "user", "content": "a"}], tokenizer).ids.tolist()
    assert ids.count(1) == 1
    assert ids[0] == 1


def test_text_parts_of_openai_messages(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = ChatTemplate().encode([{"role": "user", "content": parts}], tokenizer)
    assert written(tokenizer, chat.ids.tolist()) == "<s><|user|>ab</s>"


@pytest.mark.parametrize(
    ("talk", "found"),
    [
        ([], "messages: is empty"),
        (["hi"], r"messages\[0\]: must be a mapping, not str"),
        ([{"role": "user"}], r"messages\[0\].content: required"),
        ([{"role": 1, "content": "x"}], r"messages\[0\].role = 1: must be a string"),
        (
            [{"role": "user", "content": None}],
            r"messages\[0\].content: must be a string, not NoneType",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text parts"),
        ([{"role": "tool", "content": "x"}], "role must be system, user or assistant, not tool"),
    ],
)
def test_bad_messages_are_named(tokenizer, talk, found):
    with pytest.raises(UserError, match=found):
        ChatTemplate().encode(talk, tokenizer)


def test_bad_templates_are_named(tmp_path):
    with pytest.raises(UserError, match=r"t\.jinja:1: not a valid template"):
        ChatTemplate("{% for %}", "t.jinja")
    with pytest.raises(UserError, match="cannot be read"):
        ChatTemplate.load(tmp_path / "none.jinja")


def test_templates_are_sandboxed(tokenizer):
    evil = ChatTemplate("{{ messages.__class__.__mro__ }}{% generation %}{% endgeneration %}")
    with pytest.raises(UserError, match="unsafe"):
        evil.encode(TALK, tokenizer)


def test_pickle(tokenizer):
    copy = pickle.loads(pickle.dumps(ChatTemplate(CHATML, "x")))
    assert copy.encode(TALK, tokenizer).ids.tolist() == (
        ChatTemplate(CHATML).encode(TALK, tokenizer).ids.tolist()
    )
