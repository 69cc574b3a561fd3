"""What all routes share: the engine, the jobs that run, and what is counted and logged of them."""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from aiohttp import web

from rocline.engine.config import ModelConfig
from rocline.engine.model import PromptError
from rocline.engine.sampling import SamplingError
from rocline.http.body import read_body
from rocline.http.errors import ApiError, invalid
from rocline.http.job import Choice, Job
from rocline.http.metrics import Metrics
from rocline.http.output import OutputText
from rocline.http.pool import PromptPool
from rocline.http.settings import Settings, body_limit
from rocline.pipeline.headroom import Headroom
from rocline.pipeline.options import Options
from rocline.pipeline.request import EngineError, NotReady, QueueFull, Request, TooLong
from rocline.pipeline.stats import State, Stats
from rocline.pipeline.stream import Stream

THREAD_IDS = 4096  # prompts longer than this are submitted in a thread: the engine looks at every id

PREPARE_S = 5.0  # for a million tokens


class EngineApi(Protocol):
    """What the server asks of pipeline/engine.py."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def context(self) -> int: ...
    @property
    def options(self) -> Options: ...
    @property
    def headroom(self) -> Headroom: ...
    def submit(self, request: Request) -> Stream: ...
    def stats(self) -> Stats: ...
    def drain(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...


class Work(NamedTuple):
    """One choice to be: what the engine is asked, and how its ids become text; stop_ids end it."""

    request: Request
    text: OutputText
    stop_ids: frozenset[int]


def log(event: str, **fields: Any) -> None:
    """One JSON line to stderr. Never prompt text, output text or keys."""
    line = {"time": round(time.time(), 3), "event": event} | fields
    print(json.dumps(line, ensure_ascii=False), file=sys.stderr, flush=True)


class Serving:
    """
    folder   of the checkpoint
    pool     bodies to ids
    engine   None while it loads
    jobs     by id, those not yet ended in the engine
    """

    def __init__(self, folder: str, settings: Settings, config: ModelConfig, context: int, pool: PromptPool) -> None:
        self.folder, self.settings, self.config, self.context, self.pool = folder, settings, config, context, pool
        self.started_s = time.time()
        self.engine: EngineApi | None = None
        self.jobs: dict[str, Job] = {}
        self.metrics = Metrics(self.stats)
        self._n_preparing = 0
        self._reapers: set[asyncio.Task[None]] = set()

    def stats(self) -> Stats | None:
        return self.engine.stats() if self.engine else None

    @property
    def state(self) -> State:
        stats = self.stats()
        return stats.state if stats else State.STARTING

    async def prepare(self, request: web.Request, method: str) -> Any:
        """The request's body through Prompts.<method>. Raises ApiError: 429 if as many are at it as run and wait."""
        stats = self.ready_engine().stats()
        if self._n_preparing >= stats.running_limit + stats.queue_limit:  # a queue in front of the queue (case B15)
            message = f"{self._n_preparing} requests are being read already; try again"
            raise ApiError(429, message, code="queue_full", retry_after_s=PREPARE_S)
        self._n_preparing += 1
        try:
            return await self.pool.run(method, await self.read(request))
        finally:
            self._n_preparing -= 1

    async def read(self, request: web.Request) -> bytes:
        """The request's body. Raises ApiError."""
        return await read_body(request, body_limit(self.context), self.settings.body_timeout_s)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for a model that is not served; a request that names none means this one."""
        settings = self.settings
        if name is not None and not settings.any_model and name not in (settings.served_name, *settings.aliases):
            message = f"no model of this name is served; say {settings.served_name}"
            raise ApiError(404, message, "model", "model_not_found")

    def ready_engine(self) -> EngineApi:
        """Raises ApiError (503) where a request would be refused whatever it asks."""
        if self.engine is None or self.state is not State.READY:
            raise ApiError(503, f"the engine is {self.state.value}; try again later", code="not_ready", retry_after_s=5)
        return self.engine

    async def submit(self, route: str, ids: Sequence[str], arrived_s: float, works: Sequence[Work]) -> Job:
        """All of them or none, known by any of `ids`. Raises ApiError: 400, 429 with Retry-After, 503."""
        task = asyncio.ensure_future(self._submit(route, ids, arrived_s, works))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:  # the client left while a thread was at it: what it made must go too
            task.add_done_callback(self._abandon)
            raise

    async def _submit(self, route: str, ids: Sequence[str], arrived_s: float, works: Sequence[Work]) -> Job:
        engine = self.ready_engine()
        streams: list[Stream] = []
        try:
            for work in works:
                if len(work.request.prompt_ids) > THREAD_IDS:
                    streams.append(await asyncio.to_thread(engine.submit, work.request))
                else:
                    streams.append(engine.submit(work.request))
            if len(self.jobs.keys() | ids) < len(self.jobs) + len(ids):
                raise invalid("rid: twice here, or of a request that runs already; choose another", "rid")
        except Exception as error:
            for stream in streams:
                stream.cancel()
            raise _refusal(error) from error
        pairs = enumerate(zip(streams, works, strict=True))
        choices = [Choice(index, stream, work.text, work.stop_ids) for index, (stream, work) in pairs]
        job = Job(route, ids, arrived_s, choices)
        self.jobs |= dict.fromkeys(ids, job)
        return job

    def _abandon(self, task: asyncio.Task[Job]) -> None:
        if not task.cancelled() and not task.exception():
            self.release(task.result(), "disconnect")

    def release(self, job: Job, ended_by: str | None) -> None:
        """The handler is done with its job: cancel what runs on, and log each choice when the engine has let go."""
        job.ended_by = job.ended_by or ended_by
        job.cancel()
        reaper = asyncio.ensure_future(self._reap(job))
        self._reapers.add(reaper)
        reaper.add_done_callback(self._reapers.discard)

    async def _reap(self, job: Job) -> None:
        try:
            for choice in job.choices:
                self._log_end(job, choice, await job.outcome(choice))
        finally:
            for id in job.ids:
                del self.jobs[id]

    def _log_end(self, job: Job, choice: Choice, error: EngineError | None) -> None:
        stats, engine = self.stats(), self.engine
        reason = job.reason(choice, error)
        self.metrics.ended(job, choice, reason)
        log(
            "request",
            id=job.ids[0],
            choice=choice.index,
            route=job.route,
            **choice.figures(job.arrived_s),
            chunk_rows=engine.options.chunk_rows if engine else None,
            device_allocs=sum(s.arena.device_allocs for s in stats.stages) if stats else None,
            min_headroom_bytes=engine.headroom.minimum_since(choice.began_s) if engine else None,
            reason=reason,
            **({"error": str(error)} if error else {}),
        )

    async def idle(self) -> None:
        """Wait until every released job is logged."""
        while self._reapers:
            await asyncio.wait(self._reapers)

    async def close(self) -> None:
        self.pool.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.idle(), 1)


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def freeze_gc() -> None:
    """What the start leaves behind is not looked at again by the collector."""
    gc.collect()
    gc.freeze()


def _refusal(error: Exception) -> Exception:
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", retry_after_s=error.retry_after_s)
    if isinstance(error, NotReady):
        return ApiError(503, str(error), code="not_ready", retry_after_s=5)
    if isinstance(error, TooLong):
        return ApiError(400, str(error), code="context_length_exceeded")
    return ApiError(400, str(error)) if isinstance(error, PromptError | SamplingError) else error
