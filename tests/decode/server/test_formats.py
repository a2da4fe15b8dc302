"""Both endpoints as OpenAI's own client sees them, whole and streamed."""

import json
import math

import openai
import pytest

from decode.request import Sampling
from decode.server.schema import CompletionRequest, parse

PROMPT = "def f("
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 😀"}]


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.mark.smoke
def test_a_completion_is_what_the_engine_says(client, expected, loaded):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert choice.text == expected(PROMPT, 12)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    prompt = len(loaded.prompt_ids(PROMPT))
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, 12)
    assert usage.total_tokens == prompt + 12


def test_a_chat_answer_is_what_the_engine_says(client, expected):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=12, temperature=0
    )
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected(MESSAGES, 12)
    # Text parts, and the system by its newer name, are the same request.
    parts = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        },
        MESSAGES[1],
    ]
    again = client.chat.completions.create(
        model="tiny", messages=parts, max_tokens=12, temperature=0
    )
    assert again.choices[0].message.content == choice.message.content


def test_a_streamed_completion_joined_is_the_whole(client, expected):
    stream = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    *parts, last = chunks
    assert "".join(chunk.choices[0].text for chunk in parts) == expected(PROMPT, 12)
    assert len(parts) >= 3  # bursts of 4
    assert [chunk.choices[0].finish_reason for chunk in parts][-2:] == [None, "length"]
    assert all(chunk.usage is None for chunk in parts)
    assert last.choices == []
    assert last.usage.completion_tokens == 12


def test_a_streamed_chat_answer_joined_is_the_whole(client, expected):
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, temperature=0, stream=True
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == expected(MESSAGES, 12)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.choices for chunk in chunks)  # no usage was asked for


def test_running_usage_is_in_every_chunk(server):
    body = {"stream": True, "max_tokens": 8, "stream_options": {"continuous_usage_stats": True}}
    lines = [line for line in server.post(**body).text.split("\n\n") if line.startswith("data: {")]
    counts = [json.loads(line[6:])["usage"]["completion_tokens"] for line in lines]
    assert counts == [1, 5, 8]  # a first burst of one, then of four


def test_several_prompts_and_samples_are_numbered(client, expected):
    prompts = [PROMPT, "import "]
    answer = client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=6, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [
        expected(prompt, 6) for prompt in prompts for _ in range(2)
    ]
    stream = client.completions.create(
        model="tiny", prompt=prompts, n=2, max_tokens=6, temperature=0, stream=True
    )
    texts = [""] * 4
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_token_ids_are_a_prompt(client, loaded, expected):
    ids = loaded.prompt_ids(PROMPT)
    answer = client.completions.create(model="tiny", prompt=[ids, ids], max_tokens=6, temperature=0)
    assert [choice.text for choice in answer.choices] == [expected(PROMPT, 6)] * 2


def test_the_seed_decides(client):
    def draw(**options):
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=16, temperature=1.5, **options
        )
        return answer.choices[0].text

    assert draw(seed=7) == draw(seed=7)
    assert draw(seed=-1) == draw(seed=2**32 - 1)
    assert len({draw(seed=i) for i in range(4)} | {draw(), draw()}) >= 5


def test_stop_strings_end_an_answer_and_are_not_in_it(client, expected):
    whole = expected(PROMPT, 24)
    middle = whole[len(whole) // 2 :][:3]
    before = whole[: whole.index(middle)]
    for stop in (middle, ["never said", middle]):
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stop=stop
        )
        assert answer.choices[0].text == before
        assert answer.choices[0].finish_reason == "stop"
        assert 0 < answer.usage.completion_tokens <= 24
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stop=middle, stream=True
    )
    parts = [chunk.choices[0].text for chunk in stream]
    assert "".join(parts) == before
    assert all(before.startswith("".join(parts[:i])) for i in range(len(parts)))


def test_every_sampling_parameter_reaches_the_engine():
    body = {
        "prompt": "a",
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {"7": -1, "9": 2.5},
        "seed": 11,
    }
    assert parse(CompletionRequest, body).sampling(4) == Sampling(
        0.5, 3, 0.9, 0.1, 1.1, 0.2, -0.3, {7: -1.0, 9: 2.5}, 11, 4
    )
    plain = parse(CompletionRequest, {"prompt": "a"}).sampling(None)
    assert plain == Sampling(temperature=1.0, seed=plain.seed)


def test_completion_logprobs(client, loaded):
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=2
    )
    text, told = answer.choices[0].text, answer.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 8
    for token, logprob, top in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert 0 < math.exp(logprob) <= 1
        assert 1 <= len(top) <= 3
        assert top[token] == logprob == max(top.values())  # the likeliest was taken
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert text[offset:].startswith(token)


def test_chat_logprobs(client):
    options = dict(model="tiny", messages=MESSAGES, max_tokens=8, temperature=0)
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == 8
    text = b"".join(bytes(token.bytes) for token in content).decode(errors="replace")
    assert text == answer.choices[0].message.content
    for token in content:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == token.logprob >= token.top_logprobs[1].logprob
    streamed = []
    for chunk in client.chat.completions.create(
        **options, logprobs=True, top_logprobs=2, stream=True
    ):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == content


def test_logprobs_show_nothing_of_a_stop_string(client, expected):
    whole = expected(PROMPT, 24)
    middle = whole[len(whole) // 2 :][:6]
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stop=middle, logprobs=2
    )
    text, told = answer.choices[0].text, answer.choices[0].logprobs
    assert all(offset < len(text) for offset in told.text_offset)


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'tony' is not served here"):
        client.models.retrieve("tony")


def test_health_tells_what_is_served(server):
    health = server.http.get("/health").json()
    assert (health["status"], health["model"], health["queue"]) == ("ok", "tiny", 0)
