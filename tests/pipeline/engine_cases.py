"""What a request must answer whatever the engine, and that nothing stays behind."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from rocline.engine.generation import Generation
from rocline.engine.model import Model
from rocline.engine.sampling import SamplingParams
from rocline.pipeline.engine import Engine
from rocline.pipeline.request import Request
from rocline.pipeline.stream import Stream

PAGE = 64  # small pages, so that short prompts cross several
WAIT_S = 120.0


@dataclass(frozen=True)
class Ask:
    """A request with the answer that a model run in one piece, one row after another, gives."""

    request: Request
    ids_sha256: str
    logits_sha256: str


def collect(stream: Stream) -> list[int]:
    return [token for update in stream for token in update.ids]


def check(stream: Stream, ask: Ask, context: object = "") -> None:
    """Read a stream to its end and compare its two hashes."""
    ids = collect(stream)
    summary = stream.summary
    assert summary is not None
    assert len(ids) == summary.output_tokens
    assert (summary.output_ids_sha256, summary.logits_sha256) == (ask.ids_sha256, ask.logits_sha256), context


def prompt_ids(rng: np.random.Generator, n_rows: int, vocab_size: int = 512) -> list[int]:
    """Text-like ids: short phrases that come back, so that n-grams and selections repeat."""
    phrases = [rng.integers(9, vocab_size, 6).tolist() for _ in range(12)]
    ids: list[int] = []
    while len(ids) < n_rows:
        ids += phrases[rng.integers(12)] + rng.integers(9, 200, 2).tolist()
    return ids[:n_rows]


def make_ask(model: Model, prompt: list[int], **sampling: object) -> Ask:
    params = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    whole = Generation(model, prompt, params, mode="full", chunk_rows=len(prompt))
    list(whole)
    return Ask(
        Request(prompt_ids=prompt, params=params, logits_digest=True), whole.output_ids_sha256, whole.logits_sha256
    )


@contextmanager
def nothing_left(engine: Engine) -> Iterator[None]:
    """After the body every request has ended, and no page, span or sequence stays behind."""
    yield
    assert engine.drain(WAIT_S)
    stats, end_s = engine.stats(), time.monotonic() + WAIT_S
    assert (stats.queued, stats.prefilling, stats.decoding, stats.paused) == (0, 0, 0, 0)
    assert stats.free_pages == stats.n_pages
    while any(stage.arena.n_used for stage in stats.stages):  # a card may still be copying what nobody wants
        assert time.monotonic() < end_s, [stage.arena.n_used for stage in stats.stages]
        stats = engine.stats()
    assert not any(stage.waiting for stage in stats.stages)
    assert not any(worker.stage.sequences for worker in engine._workers)
    assert engine._ahead is not None
    while engine._ahead.n_lent:  # threads may be at work for a hand-off that nobody waits for any more
        assert time.monotonic() < end_s, engine._ahead.n_lent
        time.sleep(0.001)
