"""What the server costs beside the engine: measured from outside, against a server that runs already.

    python tests/http_server/fake_server.py demo/model --port 8000 --step-s 0.02 --running 64 --queue 1024
    python -m rocline.tools.bench_http http://127.0.0.1:8000 --pid PID

One JSON object goes to stdout. With a fake engine of known pace these are the server's own figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]

PATH = "/v1/completions"
N_STREAMS, N_TOKENS, N_IDLE, N_FIRST = 64, 200, 256, 20
MILLION = 1_000_000
IDS_BODY = b'{"stream":true,"max_tokens":1,"prompt":[' + b",".join([b"1234"] * MILLION) + b"]}"
TEXT_BODY = json.dumps({"stream": True, "max_tokens": 1, "prompt": " the" * MILLION}).encode()


class Bench:
    """Against one server; process is the server's, for its CPU time and memory, or None."""

    def __init__(self, session: aiohttp.ClientSession, process: Any | None) -> None:
        self._session, self._process = session, process

    async def run(self) -> dict[str, Any]:
        await self._stream(8)  # the first request of a process pays for its imports
        return {
            "first_byte": await self.first_byte(),
            "streams": await self.streams(),
            "idle_streams": await self.idle_streams(),
            "million_ids": await self.million(IDS_BODY),
            "million_tokens_of_text": await self.million(TEXT_BODY),
        }

    async def first_byte(self) -> dict[str, float]:
        """Seconds from sending a small request to its headers, and to its first event."""
        headers_s, event_s = [], []
        for _ in range(N_FIRST):
            start_s = time.monotonic()
            async with self._session.post(PATH, json=_body(1)) as response:
                headers_s.append(time.monotonic() - start_s)
                await response.content.readline()
                event_s.append(time.monotonic() - start_s)
                await response.read()
        return {"headers_s": statistics.median(headers_s), "first_event_s": statistics.median(event_s)}

    async def streams(self) -> dict[str, Any]:
        """N_STREAMS at once. events_per_token below 1: the server merged tokens, that is, it was behind."""
        cpu_s, start_s = self._cpu_s(), time.monotonic()
        n_events = sum(await asyncio.gather(*(self._stream(N_TOKENS) for _ in range(N_STREAMS))))
        took_s, n_tokens = time.monotonic() - start_s, N_STREAMS * N_TOKENS
        result: dict[str, Any] = {
            "streams": N_STREAMS,
            "tokens_per_s": n_tokens / took_s,
            "events_per_token": (n_events - 2 * N_STREAMS) / n_tokens,  # the last chunk and [DONE] bring none
        }
        if self._process:
            cpu_us = (self._cpu_s() - cpu_s) / n_tokens * 1e6
            result |= {"cpu_us_per_token": cpu_us, "tokens_per_s_of_one_core": 1e6 / cpu_us}
        return result

    async def idle_streams(self) -> dict[str, Any]:
        """Memory of the server for each further stream that waits."""
        if not self._process:
            return {}
        begun: set[int] = set()
        tasks = [asyncio.ensure_future(self._stream(100_000, partial(_add, begun, n))) for n in range(N_STREAMS)]
        while len(begun) < N_STREAMS:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        before_bytes = self._process.memory_info().rss
        tasks += [asyncio.ensure_future(self._stream(1)) for _ in range(N_IDLE)]
        await asyncio.sleep(2)
        bytes_each = (self._process.memory_info().rss - before_bytes) / N_IDLE
        await _cancelled(tasks)
        return {"streams": N_IDLE, "bytes_each": bytes_each}

    async def million(self, body: bytes) -> dict[str, float]:
        """A prompt of a million tokens: when it is accepted, and the longest gap it makes in another stream."""
        gaps_s: list[float] = []
        other = asyncio.ensure_future(self._stream(100_000, gaps_s.append))
        await asyncio.sleep(1)
        n_before, usual_s = len(gaps_s), max(gaps_s)
        start_s = time.monotonic()
        async with self._session.post(PATH, data=body) as response:
            accepted_s = time.monotonic() - start_s
            response.raise_for_status()
            await response.read()
        while len(gaps_s) == n_before:
            await asyncio.sleep(0.01)
        longest_s, median_s = max(gaps_s[n_before:]), statistics.median(gaps_s[n_before:])
        await _cancelled([other])
        return {
            "accepted_s": accepted_s,
            "median_gap_s": median_s,
            "longest_gap_before_s": usual_s,
            "longest_gap_s": longest_s,
            "delay_s": longest_s - median_s,
        }

    async def _stream(self, n_tokens: int, tell: Callable[[float], object] = lambda gap_s: None) -> int:
        """Read a whole stream; its events. `tell` hears the seconds between two."""
        n_events, told_s = 0, 0.0
        async with self._session.post(PATH, json=_body(n_tokens)) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data:"):
                    now_s = time.monotonic()
                    if n_events:
                        tell(now_s - told_s)
                    n_events, told_s = n_events + 1, now_s
        return n_events

    def _cpu_s(self) -> float:
        if not self._process:
            return 0.0
        times = self._process.cpu_times()
        return float(times.user + times.system)


def _add(numbers: set[int], number: int, gap_s: float) -> None:
    numbers.add(number)


def _body(n_tokens: int) -> dict[str, Any]:
    return {"prompt": [1000], "max_tokens": n_tokens, "ignore_eos": True, "stream": True}


async def _cancelled(tasks: Sequence[asyncio.Future[int]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.5)  # for the server to notice


async def _with_session(url: str, work: Callable[[aiohttp.ClientSession], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        return await work(session)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the server, without a path")
    parser.add_argument("--pid", type=int, help="of the server, on this machine: CPU time and memory are measured too")
    args = parser.parse_args(argv)
    try:
        process = psutil.Process(args.pid) if args.pid else None
        result = asyncio.run(_with_session(args.url, lambda session: Bench(session, process).run()))
    except (aiohttp.ClientError, psutil.Error) as error:
        print(f"bench_http: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
