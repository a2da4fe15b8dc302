"""Many clients at once, some of whom go away: no token is lost, doubled or another's."""

import asyncio
import gc
import json
import random
import resource

import httpx
import pytest
from live_server import Slow, serving

from decode.server.app import Limits

PROMPTS = [f"def f{i}(x):\n    return {i}" for i in range(20)]


async def client(http, index, leaves_after):
    """Status and text of one streamed answer, and its usage; `leaves_after` chunks: goes away."""
    body = {
        "prompt": PROMPTS[index % len(PROMPTS)],
        "max_tokens": 8 + index % 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, usage, chunks = "", None, 0
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if leaves_after is not None and chunks >= leaves_after:
                return text, None
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            usage = chunk["usage"]
            if chunk["choices"]:
                text += chunk["choices"][0]["text"]
                chunks += 1
    return text, usage


async def crowd(server, count, seed):
    """All clients at once; every third goes away, some of them before they are begun."""
    chooser = random.Random(seed)
    leaving = [chooser.choice((0, 0, 1, 2)) if i % 3 == 2 else None for i in range(count)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as http:
        return leaving, await asyncio.gather(
            *(client(http, i, leaves) for i, leaves in enumerate(leaving))
        )


def check(server, expected, count, rounds):
    whole = {
        (prompt, tokens): expected(prompt, tokens) for prompt in PROMPTS for tokens in range(8, 13)
    }
    stayed = left = drawn = 0
    resident = []
    for seed in range(rounds):
        leaving, answers = asyncio.run(crowd(server, count, seed))
        server.wait(server.idle)
        for index, (leaves, (text, usage)) in enumerate(zip(leaving, answers, strict=True)):
            right = whole[PROMPTS[index % len(PROMPTS)], 8 + index % 5]
            if leaves is None:
                assert text == right
                stayed += 1
                drawn += usage["completion_tokens"]
            else:
                assert right.startswith(text)
                left += 1
        gc.collect()
        resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    complete = server.metric("requests_total", outcome="length")
    complete += server.metric("requests_total", outcome="stop")
    gone = server.metric("requests_total", outcome="cancelled")
    # Who leaves at the end may have had the whole answer already.
    assert complete >= stayed
    assert complete + gone == stayed + left == server.metric("requests_total") == rounds * count
    counted = server.metric("generated_tokens_total") - server.metric(
        "generated_tokens_total", outcome="cancelled"
    )
    assert counted >= drawn
    if complete == stayed:
        assert counted == drawn
    begun = server.metric("queue_seconds_count")
    assert server.metric("time_to_first_token_seconds_count") <= begun
    assert complete <= begun <= complete + gone
    return resident


def test_twenty_clients(loaded, engine, expected):
    with serving(loaded, Slow(engine, 0.005), limits=Limits(queue=30)) as server:
        check(server, expected, 20, 1)


@pytest.mark.slow
def test_two_hundred_clients(loaded, engine, expected):
    with serving(loaded, Slow(engine, 0.002), limits=Limits(queue=256)) as server:
        resident = check(server, expected, 200, 5)
    # In KiB: the first round fills buffers and pools, later ones must not add to them.
    assert resident[-1] - resident[1] < 16 * 1024
