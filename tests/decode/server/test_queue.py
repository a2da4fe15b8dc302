"""One request at a time, the rest in order; whoever goes away is let go of; metrics add up."""

import http.client
import json
import threading

import openai
import pytest
from live_server import Slow, serving

from decode.server.app import Limits


@pytest.fixture(scope="module")
def slow(loaded, engine):
    return Slow(engine, 0.02)


@pytest.fixture(scope="module")
def server(loaded, slow):
    with serving(loaded, slow, limits=Limits(queue=4)) as running:
        yield running


@pytest.fixture(autouse=True)
def all_over(server, slow):
    yield
    server.wait(server.idle)
    assert slow.open == 0


def request(server, tokens, **body):
    """A request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    body = {"prompt": "def f(", "max_tokens": tokens, "temperature": 0, **body}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    return connection


def begin(server, tokens=56):
    """The response of a streaming request, and its first line."""
    response = request(server, tokens, stream=True).getresponse()
    assert response.status == 200
    return response, response.readline().decode()


def begin_running(server, tokens=56):
    """The response of a streaming request that the engine has begun to answer."""
    response, _ = begin(server, tokens)
    server.wait(lambda: server.metric("active_requests") == 1)
    return response


def texts(response):
    """Texts of the events that follow, and the last event."""
    lines = [
        line[6:].strip() for line in response.read().decode().split("\n") if line[:6] == "data: "
    ]
    return [json.loads(line)["choices"][0]["text"] for line in lines[:-1]], lines[-1]


def test_requests_are_answered_in_order(server, expected):
    ended = []

    def follow(name, response):
        assert "".join(texts(response)[0]) == expected("def f(", 12)
        ended.append(name)

    threads = []
    for name in range(5):
        response, comment = begin(server, 12)
        assert comment.strip() == f": {name} before"
        threads.append(threading.Thread(target=follow, args=(name, response)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert ended == sorted(ended)


def test_a_full_queue_says_when_to_try_again(server, expected):
    waiting = [begin_running(server)] + [begin(server)[0] for _ in range(4)]
    with pytest.raises(openai.RateLimitError) as refused:
        server.client().completions.create(model="tiny", prompt="a")
    assert refused.value.code == "queue_full"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    assert server.http.get("/health").json()["queue"] == 4
    for response in waiting:
        response.close()
    server.wait(server.idle)
    # The official client tries again by itself.
    assert server.post(max_tokens=8).json()["choices"][0]["text"] == expected("def f(", 8)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_mid_answer_frees_the_engine(server, slow, expected, stream):
    before = server.metric("requests_total", outcome="cancelled")
    drawn = server.metric("generated_tokens_total")
    connection = request(server, 56, stream=stream)
    if stream:
        response = connection.getresponse()
        assert [response.readline() for _ in range(3)][-1].startswith(b"data: ")
        response.close()
    else:
        server.wait(lambda: server.metric("active_requests") == 1)
    connection.close()
    server.wait(server.idle)
    assert server.metric("requests_total", outcome="cancelled") == before + 1
    assert server.metric("generated_tokens_total") - drawn < 56
    assert slow.open == 0
    assert server.post(max_tokens=8).json()["choices"][0]["text"] == expected("def f(", 8)


def test_a_client_that_leaves_while_it_waits_is_never_begun(server, expected):
    first = begin_running(server, 40)
    drawn = server.metric("generated_tokens_total", outcome="cancelled")
    before = server.metric("requests_total", outcome="cancelled")
    queued, comment = begin(server)
    last, _ = begin(server, 8)
    assert comment.strip() == ": 1 before"
    queued.close()
    server.wait(lambda: server.metric("requests_total", outcome="cancelled") == before + 1)
    assert server.metric("queue_length") == 1
    assert "".join(texts(first)[0]) == expected("def f(", 40)
    assert "".join(texts(last)[0]) == expected("def f(", 8)
    assert server.metric("generated_tokens_total", outcome="cancelled") == drawn


def test_metrics_add_up(loaded, engine):
    with serving(loaded, Slow(engine, 0.001)) as server:
        assert server.post(max_tokens=16).status_code == 200
        assert (
            server.post(max_tokens=16, n=2, temperature=0, stop=["never said"]).status_code == 200
        )
        assert server.post(max_tokens=0).status_code == 400
        assert server.post("chat/completions", messages=[]).status_code == 400
        text = server.http.get("/metrics").text
        for line in (
            'laneformer_requests_total{endpoint="completions",outcome="length"} 2.0',
            'laneformer_requests_total{endpoint="completions",outcome="invalid"} 1.0',
            'laneformer_requests_total{endpoint="chat",outcome="invalid"} 1.0',
            'laneformer_generated_tokens_total{outcome="length"} 48.0',
            "laneformer_queue_length 0.0",
            "laneformer_active_requests 0.0",
            "laneformer_time_to_first_token_seconds_count 2.0",
            "laneformer_decode_tokens_per_second_count 2.0",
            "laneformer_queue_seconds_count 2.0",
        ):
            assert line in text.split("\n"), text
        prompt = len(loaded.prompt_ids("def f("))
        assert server.metric("prompt_tokens_total", outcome="length") == 2 * prompt
        assert server.metric("decode_tokens_per_second_sum") > 0


def test_the_engine_failing_is_one_request_failing(loaded, engine, expected):
    failing = Slow(engine, 0)
    whole = failing.stream

    def stream(request):
        if request.max_new_tokens == 13:
            raise RuntimeError("the device is on fire")
        return whole(request)

    failing.stream = stream
    with serving(loaded, failing) as server:
        answer = server.post(max_tokens=13)
        assert answer.status_code == 500
        assert "its log says why" in answer.json()["error"]["message"]
        assert "fire" not in answer.text
        with pytest.raises(openai.APIError, match="the server failed"):
            list(
                server.client().completions.create(
                    model="tiny", prompt="def f(", max_tokens=13, stream=True
                )
            )
        assert server.post(max_tokens=4).json()["choices"][0]["text"] == expected("def f(", 4)
        assert server.metric("requests_total", outcome="error") == 2


def test_ending_tells_those_who_wait_and_lets_the_answer_finish(loaded, engine, expected):
    with serving(loaded, Slow(engine, 0.02)) as server:
        active = begin_running(server, 40)
        waiting, _ = begin(server, 8)
        server.service.worker.close()
        assert not server.service.worker.alive
        parts, last = texts_or_error(waiting)
        assert (parts, last["error"]["code"]) == ([], "shutting_down")
        assert server.post().status_code == 503
        assert server.http.get("/health").status_code == 503
        assert "".join(texts(active)[0]) == expected("def f(", 40)
        assert server.metric("requests_total", outcome="shutdown") == 1


def test_ending_at_once_says_so_in_the_stream(loaded, engine, expected):
    with serving(loaded, Slow(engine, 0.05)) as server:
        active = begin_running(server, 56)
        server.service.worker.close()
        server.service.worker.cancel_active()
        parts, last = texts_or_error(active)
        assert last["error"]["message"] == "the server is shutting down"
        assert expected("def f(", 56).startswith("".join(parts))


def texts_or_error(response):
    lines = [
        line[6:].strip() for line in response.read().decode().split("\n") if line[:6] == "data: "
    ]
    assert lines[-1] == "[DONE]"
    *parts, last = map(json.loads, lines[:-1])
    return [part["choices"][0]["text"] for part in parts], last
