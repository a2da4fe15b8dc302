"""What bad input gets: an error in OpenAI's format that names the parameter, and the next answer is right."""

import contextlib
import json
import socket
import time

import pytest
from live_server import serving

from decode.server import connections, security


@pytest.fixture(autouse=True)
def the_next_answer_is_right(server, expected):
    yield
    answer = server.post(max_tokens=4)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == expected("def f(", 4)


def refused(response, status, message, param=None, code=None):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"], error
    assert "\n" not in error["message"]
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code


LONG = "x = 1\n" * 200

BODIES = [
    (dict(prompt=""), "prompt: is empty", "prompt"),
    (dict(prompt=[]), "prompt: is empty", "prompt"),
    (dict(prompt=[""]), "prompt: is empty", "prompt"),
    (dict(prompt=[[]]), "prompt: is empty", "prompt"),
    (dict(prompt=[[5], []]), "prompt: is empty", "prompt"),
    (dict(prompt=[[5], "a"]), "prompt: must be a string, an array", "prompt"),
    (dict(prompt=[True]), "prompt: must be a string, an array", "prompt"),
    (dict(prompt=[10**30]), "must be from 0 to 399", "prompt"),
    (dict(prompt=...), "prompt: required, but not given", "prompt"),
    (dict(prompt=7), "prompt: must be a string, an array", "prompt"),
    (dict(prompt=[1, "a"]), "prompt: must be a string, an array", "prompt"),
    (dict(prompt=[1.5]), "prompt: must be a string, an array", "prompt"),
    (dict(prompt=[400]), "prompt: 400 must be from 0 to 399", "prompt"),
    (dict(prompt=[-1]), "prompt: -1 must be at least 0", "prompt"),
    (dict(prompt=["a"] * 65), "prompt: 65 prompts; at most 64", "prompt"),
    (dict(prompt=["a"] * 9, n=8), "n: 72 answers; at most 64", "n"),
    # As JSON may escape them; no answer can hold them.
    (dict(prompt="\ud800"), "lone surrogate U+D800", "prompt"),
    (dict(prompt=["a", "\ud800"]), "lone surrogate U+D800", "prompt"),
    (dict(stop=["a\udfff"]), r"stop: 'a\udfff' holds a lone surrogate", "stop"),
    (dict(speculate="\ud800"), r'speculate: "\ud800" must be', "speculate"),
    (dict(max_tokens="\ud800"), r'max_tokens: "\ud800" must be', "max_tokens"),
    (dict(logit_bias={"\ud800": 1}), r"logit_bias: '\ud800' is not a token id", "logit_bias"),
    ({"\ud800": 1}, r"\ud800: unknown parameter", r"\ud800"),
    ({"a\nb\u2028\x00": 1}, r"a\nb\u2028\x00: unknown parameter", r"a\nb\u2028\x00"),
    ({"": 1}, ": unknown parameter", ""),
    (dict(prompt=LONG), "exceeds the context of 64", "max_tokens"),
    (dict(prompt=[5] * 64, max_tokens=1), "exceeds the context of 64", "max_tokens"),
    (dict(prompt=[5] * 61), "prompt of 61 tokens plus max_tokens 4 exceeds", "max_tokens"),
    (dict(max_tokens=0), "max_tokens: 0 must be at least 1", "max_tokens"),
    (dict(max_tokens=-5), "max_tokens: -5 must be at least 1", "max_tokens"),
    (dict(max_tokens=1000), "max_tokens 1000 exceeds the context of 64", "max_tokens"),
    (dict(max_tokens=10**30), "max_tokens", "max_tokens"),
    (dict(max_tokens=2.5), "max_tokens: 2.5 must be a valid integer", "max_tokens"),
    (dict(max_tokens="4"), 'max_tokens: "4" must be a valid integer', "max_tokens"),
    (dict(max_tokens=True), "max_tokens: true must be a valid integer", "max_tokens"),
    (dict(model="gpt"), "model: 'gpt' is not served here", "model"),
    (dict(temperature=-1), "temperature: -1.0 must be 0", "temperature"),
    (dict(temperature="hot"), 'temperature: "hot" must be a valid number', "temperature"),
    (dict(temperature=1e-30), "temperature", "temperature"),
    (dict(top_p=0), "top_p: 0.0 must be above 0 to 1", "top_p"),
    (dict(top_p=1.1), "top_p", "top_p"),
    (dict(top_k=-1), "top_k: -1 must be at least 0", "top_k"),
    (dict(min_p=2), "min_p", "min_p"),
    (dict(presence_penalty=3), "presence_penalty", "presence_penalty"),
    (dict(frequency_penalty=-2.1), "frequency_penalty", "frequency_penalty"),
    (dict(repetition_penalty=0), "repetition_penalty", "repetition_penalty"),
    (dict(n=0), "n: 0 must be from 1", "n"),
    (dict(n=65), "n: 65 answers; at most 64", "n"),
    (dict(n=10**30), "answers; at most 64", "n"),
    (dict(n=-1), "n: -1 must be from 1", "n"),
    (dict(n=1.0), "n: 1.0 must be a valid integer", "n"),
    (dict(stop=[""]), "stop: a stop string is empty", "stop"),
    (dict(stop=["a"] * 17), "stop: 17 strings", "stop"),
    (dict(stop=[1]), "stop[0]: 1 must be a valid string", "stop"),
    (dict(stop={"a": 1}), "stop", "stop"),
    (dict(stop=[None]), "stop[0]: null must be a valid string", "stop"),
    (dict(stop=[["a"]]), 'stop[0]: ["a"] must be a valid string', "stop"),
    (dict(stop="a" * 2000), "stop: a string of 2000 characters; at most 1024", "stop"),
    (dict(stop_token_ids=[10**30]), "stop_token_ids: 1", "stop_token_ids"),
    (dict(stop_token_ids=[-1]), "stop_token_ids: -1 must be at least 0", "stop_token_ids"),
    (dict(seed=1.5), "seed", "seed"),
    (dict(seed=2**70), "seed", "seed"),
    (dict(logprobs=21), "logprobs: 21 must be less than or equal to 20", "logprobs"),
    (dict(logprobs=True), "logprobs", "logprobs"),
    (dict(logit_bias={"x": 1}), "logit_bias: 'x' is not a token id", "logit_bias"),
    (dict(logit_bias={"5": 101}), "logit_bias[5]: 101.0 must be from -100 to 100", "logit_bias"),
    (dict(logit_bias={"999": 1}), "logit_bias: 999 must be from 0 to 399", "logit_bias"),
    (dict(logit_bias={"-5": 1}), "logit_bias: '-5' is not a token id", "logit_bias"),
    (dict(logit_bias={"5": True}), "logit_bias.5: true must be a valid number", "logit_bias"),
    (dict(logit_bias={"5": [[1]]}), "logit_bias.5: [[1]] must be a valid number", "logit_bias"),
    (dict(logit_bias={"9" * 5000: 1}), "is not a token id", "logit_bias"),
    (dict(logit_bias=[1]), "logit_bias: [1] must be an object", "logit_bias"),
    (dict(stream="yes"), 'stream: "yes" must be a valid boolean', "stream"),
    (dict(stream_options={"include_usage": True}), "needs stream: true", "stream_options"),
    (
        dict(stream=True, stream_options={"x": 1}),
        "stream_options.x: unknown field",
        "stream_options",
    ),
    (
        dict(temprature=1),
        "temprature: unknown parameter (did you mean 'temperature'?)",
        "temprature",
    ),
    (dict(echo=True), "echo: not supported by this server", "echo"),
    (dict(suffix="}"), "suffix: not supported by this server", "suffix"),
    (dict(best_of=3), "best_of: not supported by this server", "best_of"),
    (dict(speculate="magic"), "speculate: \"magic\" must be 'ngram'", "speculate"),
    (dict(messages=[]), "messages: unknown parameter", "messages"),
]


@pytest.mark.parametrize(("body", "message", "param"), BODIES)
def test_a_wrong_completion_request_names_the_parameter(server, body, message, param):
    refused(server.post(**body), 404 if "model" in body else 400, message, param)


USER = {"role": "user", "content": "a"}
CHATS = [
    (dict(messages=...), "messages: required, but not given", "messages"),
    (dict(messages=[]), "messages: is empty", "messages"),
    (dict(messages="hi"), 'messages: "hi" must be a valid list', "messages"),
    (dict(messages=["hi"]), 'messages[0]: "hi" must be', "messages"),
    (
        dict(messages=[{"role": "robot", "content": "a"}]),
        "messages[0].role: \"robot\" must be 'system'",
        "messages",
    ),
    (dict(messages=[{"role": "user"}]), "messages[0].content: required, but not given", "messages"),
    (dict(messages=[{"role": "user", "content": None}]), "messages[0].content", "messages"),
    (
        dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        "messages[0].content[0].type: \"image_url\" must be 'text'",
        "messages",
    ),
    (
        dict(messages=[{**USER, "tool_calls": []}]),
        "messages[0].tool_calls: unknown field",
        "messages",
    ),
    (
        dict(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": 1}]}]),
        "messages[0].content[1].type: 1 must be 'text'",
        "messages",
    ),
    (dict(messages=[{"role": "\ud800", "content": "a"}]), r'role: "\ud800" must be', "messages"),
    (dict(messages=[{**USER, "\ud800": 1}]), r'messages[0]: "\ud800" must be a', "messages"),
    (dict(messages=[{**USER, "content": "\ud800"}]), "lone surrogate U+D800", "messages"),
    (dict(messages=[USER] * 2049), "messages: has 2049 entries; at most 2048", "messages"),
    (dict(messages=[None]), "messages[0]: null must be an object", "messages"),
    (dict(prompt="a"), "prompt: unknown parameter", "prompt"),
    (dict(top_logprobs=2), "top_logprobs: needs logprobs: true", "top_logprobs"),
    (dict(logprobs=2), "logprobs", "logprobs"),
    (
        dict(max_completion_tokens=0),
        "max_completion_tokens: 0 must be at least 1",
        "max_completion_tokens",
    ),
    (dict(tools=[{"type": "function"}]), "tools: not supported by this server", "tools"),
    (
        dict(response_format={"type": "json_object"}),
        "response_format: not supported",
        "response_format",
    ),
    (
        dict(messages=[{**USER, "content": LONG}], max_tokens=...),
        "leave no room in the context of 64",
        "messages",
    ),
]


@pytest.mark.parametrize(("body", "message", "param"), CHATS)
def test_a_wrong_chat_request_names_the_parameter(server, body, message, param):
    response = server.post("chat/completions", **{"messages": [USER], **body})
    refused(response, 400, message, param)


def test_parameters_that_ask_for_nothing_are_taken(server, expected):
    response = server.post(
        echo=False, best_of=1, suffix=None, user="me", store=True, metadata={"a": "b"}, stop=None
    )
    assert response.json()["choices"][0]["text"] == expected("def f(", 4)
    chat = server.post(
        "chat/completions",
        messages=[
            {**USER, "name": "me"},
            {"role": "assistant", "content": "b", "refusal": None},
            USER,
        ],
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
    )
    assert chat.status_code == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is empty"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "a",}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "prompt: must be a string"),
        (b'{"stop": ' + b"[" * 900 + b"]" * 900 + b"}", "stop[0]: an array must be"),
        (b'{"x": ' + b'{"a":' * 900 + b"1" + b"}" * 901, "x: unknown parameter"),
        ('{"prompt": "a"}'.encode("utf-16"), "not valid JSON"),
        (b'{"prompt": "\xed\xa0\x80"}', "not valid JSON"),
        (b"[1]", "must be a JSON object, not an array"),
        (b"null", "must be a JSON object, not null"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_body_that_is_no_request(server, content, message):
    headers = {"Content-Type": "application/json"}
    response = server.http.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_a_large_body_is_refused_without_being_read(server):
    def endless():
        for _ in range(50):
            sent.append(1)
            yield b" " * (1 << 20)

    sent = []
    headers = {"Content-Type": "application/json", "Content-Length": str(50 << 20)}
    response = server.http.post("/v1/completions", content=endless(), headers=headers)
    refused(response, 413, "larger than 4194304 bytes", code="body_too_large")
    assert len(sent) < 50
    # And when its length was not announced.
    sent.clear()
    headers = {"Content-Type": "application/json"}
    response = server.http.post("/v1/completions", content=endless(), headers=headers)
    refused(response, 413, "larger than 4194304 bytes", code="body_too_large")
    assert len(sent) < 50


def test_a_prompt_up_to_the_last_position(server):
    answer = server.post(prompt=[5] * 63, max_tokens=1, ignore_eos=True)
    assert answer.json()["usage"]["completion_tokens"] == 1


def test_other_content_types_are_refused(server):
    response = server.http.post("/v1/completions", content=b'{"prompt": "a"}')
    refused(response, 415, "Content-Type must be application/json")


def test_unknown_paths_and_methods(server):
    refused(server.http.get("/v1/embeddings"), 404, "/v1/embeddings: nothing is here")
    refused(server.http.get("/v1/completions"), 405, "/v1/completions: GET is not allowed")


def test_what_a_client_sent_is_quoted_in_part(server):
    for body in ({"k" * 10**6: 1}, {"model": "m" * 10**6}, {"logit_bias": {"9" * 10**6: 1}}):
        error = server.post(**body).json()["error"]
        assert len(error["message"]) < 600
        assert len(error["param"]) < 600


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"


def answered(server, *parts):
    """Everything that comes until the server closes."""
    got = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        try:
            for part in parts:
                client.sendall(part)
        except OSError:  # it does not read on
            pass
        try:
            while data := client.recv(65536):
                got += data
        except ConnectionError:  # as what was not read is thrown away
            pass
    return got


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",  # TLS
        b"GET\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        GET + b"Host: elsewhere\r\n\r\n",
        GET + b"X: a\0b\r\n\r\n",
        GET + b"X: " + b"a" * 10**6 + b"\r\n\r\n",
        GET + b"".join(b"X%d: a\r\n" % i for i in range(20_000)) + b"\r\n",
        b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\n{}",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
        POST + b"Transfer-Encoding: gzip\r\n\r\n{}",
        CHUNKED + b"\r\nZZZ\r\n",
        CHUNKED + b"\r\n-1\r\n",
        CHUNKED + b"\r\n" + b"0" * 200_000,
    ],
)
def test_what_is_not_http_is_told_so_as_everything_else(server, data):
    head, _, body = answered(server, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"content-type: application/json" in head.lower()
    assert json.loads(body)["error"]["message"] == "the request is not valid HTTP"


def test_a_body_that_goes_wrong_behind_its_answer_ends_the_connection(server, caplog):
    wrong = CHUNKED.replace(b"application/json", b"text/plain") + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(wrong)
        assert client.recv(65536).startswith(b"HTTP/1.1 415")
        client.sendall(b"ZZZ\r\n")
        assert not client.recv(65536)
    assert not [record for record in caplog.records if record.exc_info]


def test_bodies_in_chunks(server, expected):
    body = b'{"prompt": "def f(", "max_tokens": 4, "temperature": 0}'
    parts = b"".join(b"1;x=y\r\n%c\r\n" % byte for byte in body)
    got = answered(
        server, CHUNKED + b"Connection: close\r\n\r\n", parts, b"0\r\nTrailer: x\r\n\r\n"
    )
    assert json.loads(got.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == expected("def f(", 4)
    many = [b"1000\r\n" + b" " * 4096 + b"\r\n"] * 1100
    assert answered(server, CHUNKED + b"\r\n", *many).startswith(b"HTTP/1.1 413")


def test_requests_sent_before_the_answers_come(server):
    """Each is answered, in order; what is not HTTP behind them too."""
    body = b'{"prompt": "def f(", "max_tokens": 2, "temperature": 0}'
    post = POST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    got = answered(server, (post + GET + b"\r\n") * 20 + b"\xff\r\n\r\n")
    codes = [line.split()[1] for line in got.split(b"\r\n") if b"HTTP/1.1 " in line]
    assert codes == [b"200"] * 40 + [b"400"]
    assert got.count(b"text_completion") == 20
    assert got.count(b'"status":"ok"') == 20


def test_a_body_that_does_not_come_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(security, "BODY_TIMEOUT", 0.4)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(POST + b"Content-Length: 1000\r\n\r\n{")
        for _ in range(8):
            time.sleep(0.1)
            client.sendall(b" ")
        assert client.recv(65536).startswith(b"HTTP/1.1 408")


def test_more_connections_than_it_takes(loaded, engine):
    with serving(loaded, engine, connections=20) as server:
        address = ("127.0.0.1", server.port)
        with contextlib.ExitStack() as stack:
            for _ in range(30):
                stack.enter_context(socket.create_connection(address, timeout=10))
            response = server.http.get("/health")
            refused(response, 503, "as many connections as it takes", code="too_many_connections")
            assert response.headers["retry-after"] == "5"
        server.wait(lambda: server.http.get("/health").status_code == 200)


def test_half_a_head_does_not_keep_a_connection(server, monkeypatch):
    """At first, and behind a request that was answered; one that is being answered may take its time."""
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 0.5)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for before in (b"", whole):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(before)
            if before:
                assert client.recv(1000).startswith(b"HTTP/1.1 200")
            client.sendall(b"GET /health HT")
            end = time.monotonic() + 10
            while client.recv(1000):  # the rest of the answer; nothing once it is closed
                assert time.monotonic() < end
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30\r\n"
            b"Content-Type: application/json\r\n\r\n"
        )
        time.sleep(1)
        client.sendall(b'{"prompt":"a", "max_tokens":1}')
        assert client.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_client_that_leaves_before_its_body_is_complete(server):
    before = server.metric("requests_total", outcome="cancelled")
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
            b"Content-Type: application/json\r\n\r\n{"
        )
    server.wait(lambda: server.metric("requests_total", outcome="cancelled") == before + 1)
