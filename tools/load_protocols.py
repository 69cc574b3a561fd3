"""The four measurements of docs/bench.md: what is sent when, what is checked, and what is computed of it."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from rocline.engine.digest import ids_sha256
from rocline.tools.files import FileError, read_bytes
from rocline.tools.load_answer import Answer, LoadError
from rocline.tools.load_client import Ask, HttpError, InputError, LoadClient
from rocline.tools.load_figures import common_window, percentiles, spread

RETRY_S = 600.0  # of 429s, until a request counts as failed
LONGEST_RETRY_S = 60.0  # whatever the server says


class Talk(Protocol):
    """Where a measurement tells what it is doing. Never a speed: whether the answer is right is not known yet."""

    def say(self, line: str) -> None: ...
    def status(self, line: str) -> None: ...


class AnotherHash(Exception):
    """An answer is not the one that was expected."""


def usable_ids(folder: str | Path) -> list[int]:
    """Ids of FOLDER/tokenizer.json that are no added token, special or not, ascending. Raises InputError."""
    path = Path(folder) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_buffer(read_bytes(path))
    except FileError as error:
        raise InputError(f"{error}; name the folder of the server's model with --model") from error
    except Exception as error:  # the library raises no narrower type
        raise InputError(
            f"{path}: not a tokenizer file: {error}; name the folder of the server's model with --model"
        ) from error
    added = tokenizer.get_added_tokens_decoder()
    return sorted(id for id in tokenizer.get_vocab(with_added_tokens=False).values() if id not in added)


def draw_prompts(ids: Sequence[int], seed: int, n_prompts: int, n_tokens: int) -> list[tuple[int, ...]]:
    """Drawn uniformly, one after the other, with Python's random.Random(seed)."""
    source = random.Random(seed)
    return [tuple(source.choices(ids, k=n_tokens)) for _ in range(n_prompts)]


def prompts_sha256(prompts: Sequence[str | Sequence[int]]) -> str:
    """One number for all prompts: of one drawn prompt, its ids' hash."""
    return joined_sha256([p if isinstance(p, str) else ids_sha256(p) for p in prompts])


def joined_sha256(hashes: Sequence[str]) -> str:
    """A single one as it is; several as the SHA-256 of their lines."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


@dataclass
class Measurement(ABC):
    """One protocol over a server. run() fills `runs` as it goes: what is there when it fails stays good.

    n_runs    to be done; of serve, requests
    expect    output hash of each run, of all answers of serve; None: any
    runs      one JSON object each
    warnings  that a reader of the result should know
    """

    client: LoadClient
    talk: Talk
    prompts: Sequence[str | Sequence[int]]
    output_tokens: int
    n_runs: int
    expect: str | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @abstractmethod
    async def run(self) -> None:
        """Raises LoadError and AnotherHash."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """Of the runs so far, at least one."""

    @property
    def output_sha256(self) -> str | None:
        """The one hash of all runs; None where they differ or there is none yet."""
        hashes = {run["output_sha256"] for run in self.runs}
        return hashes.pop() if len(hashes) == 1 else None

    @property
    def hash_of(self) -> str | None:
        return next((run["hash_of"] for run in self.runs if "hash_of" in run), None)

    def _check_hash(self, got: str | None) -> None:
        if self.expect and got != self.expect:
            raise AnotherHash(f"the output's hash (of {self.hash_of}) is {got}, expected {self.expect}")

    def _warn(self, words: str) -> None:
        if words not in self.warnings:
            self.warnings.append(words)

    async def _flush(self) -> None:
        if not await self.client.flush():
            self._warn("the server has no /flush_cache; prompts it has seen may be cached")


class Repeated(Measurement):
    """The same work n_runs times."""

    async def run(self) -> None:
        for number in range(1, self.n_runs + 1):
            self.talk.say(f"run {number} of {self.n_runs}")
            self.runs.append({"run": number, "started": now()} | await self._one_run())
            self._check_hash(self.runs[-1]["output_sha256"])
            if self.output_sha256 is None:
                self._warn("the same request was not answered the same in every run")

    @abstractmethod
    async def _one_run(self) -> dict[str, Any]:
        """Its figures. Raises LoadError."""

    async def _ask(self, prompt: str | Sequence[int], label: str) -> Answer:
        """A request whose counts are exact where its prompt is ids."""

        def tell(comment: str) -> None:
            self.talk.status(f"{label}, {time.perf_counter() - start_s:.0f} s: {comment}")

        start_s = time.perf_counter()
        answer = await self.client.ask(Ask(prompt, self.output_tokens), tell)
        if not isinstance(prompt, str):
            check_counts(answer, len(prompt), self.output_tokens)
        return answer

    async def _ask_cold(self, label: str) -> Answer:
        await self._flush()
        answer = await self._ask(self.prompts[0], label)
        if answer.cached_tokens:
            raise LoadError(f"not cold: {answer.cached_tokens} of {answer.prompt_tokens} prompt tokens were cached")
        return answer


def check_counts(answer: Answer, prompt_tokens: int, output_tokens: int) -> None:
    """Raises LoadError if the server counts other tokens than were sent and asked for."""
    for name, got, want in (
        ("prompt_tokens", answer.prompt_tokens, prompt_tokens),
        ("completion_tokens", answer.completion_tokens, output_tokens),
    ):
        if got != want:
            raise LoadError(f"{name} is {got}, must be {want}")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _counts(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "output_sha256": answer.output_sha256,
        "hash_of": answer.hash_of,
        "total_s": answer.total_s,
    }


class Prefill(Repeated):
    """A cold, complete request; its input tokens over the time to the first text."""

    async def _one_run(self) -> dict[str, Any]:
        answer = await self._ask_cold("prefill")
        rate = answer.prompt_tokens / answer.ttft_s
        return {"ttft_s": answer.ttft_s, "prefill_tokens_per_s": rate} | _counts(answer)

    def result(self) -> dict[str, Any]:
        return _spreads(self.runs, "ttft_s", "prefill_tokens_per_s", "total_s")


class RandomIds(Repeated):
    """Batch 1: one prompt, a warm-up and the runs; decode from the first event on."""

    async def run(self) -> None:
        if not await self.client.freeze_gc():
            self._warn("the server has no /freeze_gc")
        self.talk.say("warm-up")
        await self._one_run()
        await super().run()

    async def _one_run(self) -> dict[str, Any]:
        answer = await self._ask_cold("request")
        if not answer.first_has_token:
            raise LoadError("the first event carries no token; the times from it on would mean nothing")
        figures = {
            "ttft_s": answer.first_token_s,
            "decode_tokens_per_s": answer.decode_tokens_per_s,
            "first_event_tokens": answer.marks[0].n_tokens,
            "accept_length": answer.accept_length,
        }
        return figures | _counts(answer)

    def result(self) -> dict[str, Any]:
        return _spreads(self.runs, "ttft_s", "decode_tokens_per_s", "total_s", "accept_length")


class Decode(Repeated):
    """Streams at once; the tokens of all of them in the time in which all decode."""

    async def _one_run(self) -> dict[str, Any]:
        await self._flush()
        asks = [self._ask(prompt, f"stream {n}") for n, prompt in enumerate(self.prompts, 1)]
        tasks = [asyncio.ensure_future(ask) for ask in asks]
        try:
            answers = await asyncio.gather(*tasks)
        finally:  # one has failed: what the others decode meanwhile is of no use
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not all(answer.counts_told for answer in answers):
            self._warn("the server does not count tokens event by event; each event is taken to bring the same number")
        window = common_window([answer.marks for answer in answers])
        if window.n_tokens < sum(answer.completion_tokens for answer in answers) / 2:
            self._warn("the streams shared the time of less than half of their tokens; ask for more tokens")
        return {
            "tokens_per_s": window.tokens_per_s,
            "window_s": window.stop_s - window.start_s,
            "window_tokens": window.n_tokens,
            "best_range_tokens_per_s": window.best_tokens_per_s,
            "output_sha256": joined_sha256([answer.output_sha256 for answer in answers]),
            "hash_of": answers[0].hash_of,
            "streams": [_counts(answer) for answer in answers],
        }

    def result(self) -> dict[str, Any]:
        return _spreads(self.runs, "tokens_per_s")


def _spreads(runs: Sequence[dict[str, Any]], *names: str) -> dict[str, Any]:
    """Of every figure that all runs have."""
    columns = {name: [run[name] for run in runs] for name in names}
    return {name: spread(values) for name, values in columns.items() if None not in values}


@dataclass
class Serve(Measurement):
    """n_runs requests, so many of them at once all the time; the first n_warm_ups prompts are not counted.

    refusals  429s, each of which was sent again after the server's Retry-After
    failures  requests by reason
    """

    concurrency: int = 64
    n_warm_ups: int = 64
    refusals: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    _gaps_s: array[float] = field(default_factory=lambda: array("d"))
    _first_sent_s: float = math.inf
    _last_done_s: float = 0.0
    _n_ended: int = 0

    async def run(self) -> None:
        await self._flush()
        numbered = list(enumerate(self.prompts, 1 - self.n_warm_ups))
        self.talk.say(f"{self.n_warm_ups} warm-ups")
        await self._all(iter(numbered[: self.n_warm_ups]), [])
        if self.failures:
            raise LoadError(f"a warm-up failed: {next(iter(self.failures))}")
        await self._flush()
        self._n_ended = self.refusals = 0
        self.talk.say(f"{self.n_runs} requests, {self.concurrency} at once")
        await self._all(iter(numbered[self.n_warm_ups :]), self.runs)
        self.runs.sort(key=lambda run: run["request"])
        if self.failures:
            reasons = "; ".join(f"{n}: {words}" for words, n in self.failures.most_common())
            raise LoadError(f"{self.failures.total()} of {self.n_runs} requests failed ({reasons})")
        self._check_hash(self.output_sha256)

    async def _all(self, requests: Iterator[tuple[int, Any]], ended: list[dict[str, Any]]) -> None:
        """Fill `ended`. What is told of each request is little: a million small objects would stop the collector."""

        async def worker() -> None:
            for number, prompt in requests:  # one iterator for all: each takes the next
                answer, run = await self._one_request(prompt)
                ended.append({"request": number} | run)
                if answer and number > 0:
                    self._gaps_s.extend(answer.gaps_s())
                    self._first_sent_s = min(self._first_sent_s, answer.sent_s)
                    self._last_done_s = max(self._last_done_s, answer.done_s)
                self._n_ended += 1
                self.talk.status(f"{self._n_ended} requests ended, {self.failures.total()} of them failed")

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(worker())

    async def _one_request(self, prompt: Sequence[int]) -> tuple[Answer | None, dict[str, Any]]:
        """The answer, None if there is none, and what the report says of it."""
        deadline_s = time.monotonic() + RETRY_S
        n_refusals = 0
        while True:
            try:
                answer = await self.client.ask(Ask(prompt, self.output_tokens))
                check_counts(answer, len(prompt), self.output_tokens)
                ttft_s = answer.ttft_s
                break
            except LoadError as error:
                if not (isinstance(error, HttpError) and error.status == 429) or time.monotonic() > deadline_s:
                    self.failures[str(error)] += 1
                    return None, {"failed": str(error), "refusals": n_refusals}
                n_refusals += 1
                self.refusals += 1
                await asyncio.sleep(min(error.retry_after_s, LONGEST_RETRY_S))
        rate = answer.decode_tokens_per_s
        return answer, {"ttft_s": ttft_s, "decode_tokens_per_s": rate, "refusals": n_refusals} | _counts(answer)

    @property
    def output_sha256(self) -> str | None:
        """Of all answers in the order of their requests; None unless every one is there."""
        hashes = [run["output_sha256"] for run in self.runs if "failed" not in run]
        return joined_sha256(hashes) if len(hashes) == self.n_runs else None

    def result(self) -> dict[str, Any]:
        answered = [run for run in self.runs if "failed" not in run]
        columns: dict[str, Sequence[float]] = {
            name: [run[name] for run in answered if run[name]] for name in ("ttft_s", "decode_tokens_per_s")
        }
        columns["inter_token_s"] = self._gaps_s
        result: dict[str, Any] = {
            "answered": len(answered),
            "refusals": self.refusals,
            "failures": dict(self.failures),
        } | {name: percentiles(values) for name, values in columns.items() if values}
        if answered:
            n_tokens = sum(run["completion_tokens"] for run in answered)
            result["output_tokens_per_s"] = n_tokens / (self._last_done_s - self._first_sent_s)
        return result
