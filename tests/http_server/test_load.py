"""Many requests at once: every one ends, and nothing is left behind."""

import asyncio
import os
import random

import aiohttp
import pytest
from running_server import wait_until

from rocline.pipeline.options import Options

N_STREAMS, N_REQUESTS = 64, 500


def n_fds():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def wide(serve):
    server = serve(options=Options(running=64, queue=512, chunk_rows=256))
    server.engine.step_s = 0.001
    return server


async def stream(session, path, body):
    """The text of a whole stream."""
    text = b""
    async with session.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200
        async for part in response.content.iter_any():
            text += part
    return text


def test_64_streams_at_once(wide):
    async def run():
        async with aiohttp.ClientSession(wide.url, connector=aiohttp.TCPConnector(limit=0)) as session:
            body = {"max_tokens": 100}
            return await asyncio.gather(
                *(stream(session, "/v1/completions", body | {"prompt": [n + 1]}) for n in range(N_STREAMS))
            )

    for n, data in enumerate(asyncio.run(run())):
        assert data.endswith(b"data: [DONE]\n\n")
        want = wide.pool.tokenizer.decode(range(300 + n + 1, 400 + n + 1))
        import json

        chunks = [json.loads(frame[6:]) for frame in data.decode().split("\n\n")[:-2]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == want
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    wait_until(wide.quiet)


def test_500_requests_with_random_cancels_leave_nothing(wide, rng, server_log):
    """Tasks, sockets, requests and jobs are as before, and each request that reached the engine has one log line."""
    chance = random.Random(int(rng.integers(2**32)))
    paths = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": "a b c"},
        "/generate": {"text": "a"},
    }
    assert wide.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    wait_until(lambda: wide.quiet() and wide.n_tasks() < 10)
    server_log.text()
    n_before, fds_before, submitted_before = wide.n_tasks(), n_fds(), wide.engine._n_requests
    outcomes = []

    async def one(session, gate):
        path, body = chance.choice(list(paths.items()))
        body = dict(body, stream=chance.random() < 0.7)
        if path == "/generate":
            body["sampling_params"] = {"max_new_tokens": chance.randint(1, 120)}
        else:
            body["max_tokens"] = chance.randint(1, 120)
            body["n"] = chance.choice((1, 1, 2))
        async with gate:
            try:
                async with asyncio.timeout(chance.choice((0.001, 0.01, 0.05, 0.1, 20))):
                    async with session.post(path, json=body) as response:
                        await response.read()
                        outcomes.append(response.status)
            except TimeoutError:
                outcomes.append("left")

    async def run():
        gate = asyncio.Semaphore(80)
        async with aiohttp.ClientSession(wide.url, connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(one(session, gate) for _ in range(N_REQUESTS)))

    asyncio.run(run())
    assert len(outcomes) == N_REQUESTS
    assert set(outcomes) <= {200, "left"}
    assert outcomes.count("left") > 50
    assert outcomes.count(200) > 50
    wait_until(wide.quiet)
    wait_until(lambda: wide.n_tasks() <= n_before)
    wait_until(lambda: n_fds() <= fds_before)
    stats = wide.engine.stats()
    assert sum(stats.ended.values()) == wide.engine._n_requests
    n_lines = server_log.text().count('"event": "request"')
    assert n_lines == wide.engine._n_requests - submitted_before
