"""Heavy work on bodies away from the event loop: in processes, since parsing megabytes of JSON holds the GIL."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from rocline.engine.text import TextTokenizer
from rocline.http.errors import ApiError
from rocline.http.prompt import Limits, Markers, Prompts

INLINE_BYTES = 8 << 10  # about 3 ms of tokenising at worst; a process costs small requests more than that
PR_SET_PDEATHSIG = 1  # linux/prctl.h

_prompts: Prompts  # a worker's own


def _start_worker(folder: str, limits: Limits) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a server that was killed leaves no workers behind
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C and a unit's stop reach every process: the server drains
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    global _prompts
    _prompts = Prompts(folder, limits)


def _work(method: str, body: bytes) -> Any:
    return getattr(_prompts, method)(body)


class PromptPool:
    """Prompts, with bodies beyond INLINE_BYTES worked on in other processes."""

    def __init__(self, folder: str | Path, limits: Limits, workers: int) -> None:
        """Raises TokenizerError."""
        self._prompts = Prompts(folder, limits)
        self._folder, self._limits, self._workers = str(folder), limits, workers
        self._pool = self._make()

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._prompts.tokenizer

    @property
    def markers(self) -> Markers:
        return self._prompts.markers

    def _make(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._workers,
            multiprocessing.get_context("spawn"),  # a fork would copy the engine's threads in mid-step
            initializer=_start_worker,
            initargs=(self._folder, self._limits),
        )

    async def run(self, method: str, body: bytes) -> Any:
        """What Prompts.<method>(body) returns. Raises ApiError, also where a worker died over it."""
        if len(body) <= INLINE_BYTES:
            return getattr(self._prompts, method)(body)
        pool = self._pool
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, _work, method, body)
        except BrokenProcessPool:
            if pool is self._pool:  # the first to notice replaces it
                self._pool = self._make()
                pool.shutdown(wait=False)
            raise ApiError(503, "the process that read this request died; try again", retry_after_s=1) from None

    async def warm_up(self) -> None:
        """Start the workers now rather than with the first large request."""
        body = b'{"prompt": "' + b" " * INLINE_BYTES + b'"}'
        await asyncio.gather(*(self.run("tokenize", body) for _ in range(self._workers)))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
