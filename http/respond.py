"""Sends a job's answer: as server-sent events, or whole; keeps the connection alive, and notices when it is not.

Spec: io.md section 5.1, design.md section 9. Cases B02, B08.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from aiohttp import web

from rocline.http.errors import ApiError
from rocline.http.job import Choice, Delta, Job
from rocline.http.serving import Serving
from rocline.pipeline.request import EngineError, Update

COMMENT_S = 5.0  # after the headers, then again and again
NEWLINE_S = 10.0  # of an answer that is not streamed, after admission
PROGRESS_S = 0.5  # at least, between events about progress
DONE = b"data: [DONE]\n\n"


class Form(ABC):
    """How one route writes an answer. Each method returns bytes to send, none where there is nothing to say."""

    progress = False  # the client asked for events about its prompt's rows

    @abstractmethod
    def delta(self, choice: Choice, delta: Delta) -> bytes:
        """Events of new ids and text."""

    @abstractmethod
    def end(self, choice: Choice) -> bytes:
        """Events of a choice's end, whose finish_reason is set."""

    @abstractmethod
    def tail(self) -> bytes:
        """Events after the last choice's end."""

    @abstractmethod
    def whole(self) -> bytes:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def progressed(self, choice: Choice, eta_s: float | None) -> bytes:
        """An event about a prompt's rows."""

    def error(self, error: ApiError) -> bytes:
        """The event that ends an answer which cannot go on."""
        return b"data: " + error.event_body() + b"\n\n"


class SlowReader(Exception):
    """The client has stopped reading, and its buffers are full."""


class Channel:
    """The answer's bytes on their way to the client. Memory is bounded: write waits, and not for ever."""

    def __init__(self, request: web.Request, write_timeout_s: float, headers: dict[str, str]) -> None:
        self._request, self._write_timeout_s = request, write_timeout_s
        self.response = web.StreamResponse(headers=headers)
        self.written = False  # since somebody last set it False

    async def open(self) -> None:
        await self.response.prepare(self._request)

    async def write(self, data: bytes, last: bool = False) -> None:
        """Raises SlowReader, with the connection cut, or ConnectionError."""
        self.written = True
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await (self.response.write_eof(data) if last else self.response.write(data))
        except TimeoutError:
            if transport := self._request.transport:
                transport.abort()
            raise SlowReader from None


async def respond(request: web.Request, serving: Serving, job: Job, form: Form, stream: bool) -> web.StreamResponse:
    """Answer, and release the job whichever way that ends."""
    ended_by = None
    try:
        return await (_stream if stream else _whole)(request, serving, job, form)
    except (asyncio.CancelledError, ConnectionError):  # aiohttp cancels the handler when the client leaves
        ended_by = "disconnect"
        raise
    except SlowReader:
        ended_by = "slow_reader"
        raise ConnectionResetError("the client does not read") from None
    finally:
        serving.release(job, ended_by)


def _headers(job: Job) -> dict[str, str]:
    """The seeds are how a client that gave none can repeat its answer (design.md section 4)."""
    seeds = ",".join(str(choice.stream.seed) for choice in job.choices)
    return {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Rocline-Seed": seeds}


async def _run(serving: Serving, job: Job, form: Form, channel: Channel | None, keep_alive: asyncio.Task[None]) -> None:
    """All choices to their ends, while keep_alive runs beside. Raises the first error of either."""
    tasks = [asyncio.ensure_future(_choice(serving, job, choice, form, channel)) for choice in job.choices]
    try:
        pending = {keep_alive, *tasks}
        while not all(task.done() for task in tasks):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in (keep_alive, *tasks):
            task.cancel()
        await asyncio.gather(keep_alive, *tasks, return_exceptions=True)


async def _choice(serving: Serving, job: Job, choice: Choice, form: Form, channel: Channel | None) -> None:
    told_s = 0.0
    loop = asyncio.get_running_loop()
    async for update, delta in choice.updates():
        _note(serving, job, choice, update, delta)
        data = form.delta(choice, delta)
        if form.progress and not choice.ids and loop.time() >= told_s + PROGRESS_S:
            told_s = loop.time()
            data += form.progressed(choice, job.eta_s(choice))
        if channel and data:
            await channel.write(data)
        await asyncio.sleep(0)  # the engine may be faster than this loop: others have a turn, and updates merge
    if choice.finish_reason == "abort":
        raise job.why_aborted()
    data = form.end(choice)
    if channel and data:
        await channel.write(data)


def _note(serving: Serving, job: Job, choice: Choice, update: Update, delta: Delta) -> None:
    since_s = job.saw(choice, update, visible=bool(delta.pieces))
    if since_s is not None:
        serving.metrics.step.observe(since_s)


async def _stream(request: web.Request, serving: Serving, job: Job, form: Form) -> web.StreamResponse:
    settings = serving.settings
    headers = _headers(job) | {"Content-Type": "text/event-stream; charset=utf-8"}
    channel = Channel(request, settings.write_timeout_s, headers)
    await channel.open()

    async def comments() -> None:
        async for _ in job.ticks(COMMENT_S, False, settings):
            if not channel.written or not any(choice.ids for choice in job.choices):
                await channel.write(_comment(job))
            channel.written = False

    keep_alive = asyncio.ensure_future(comments())
    try:
        await _run(serving, job, form, channel, keep_alive)
        await channel.write(form.tail() + DONE, last=True)
    except (ApiError, EngineError) as error:
        job.cancel()  # the engine is free before a client that may be slow has read this
        await channel.write(form.error(_told(error)) + DONE, last=True)
    return channel.response


def _comment(job: Job) -> bytes:
    choice = min(job.choices, key=lambda c: c.stream.progress.rows_done)
    progress, eta_s = choice.stream.progress, job.eta_s(choice)
    eta = "" if eta_s is None else f", ETA {eta_s:.0f} s"
    return f": {progress.phase.value} {progress.rows_done}/{progress.rows_total} rows{eta}\n\n".encode()


async def _whole(request: web.Request, serving: Serving, job: Job, form: Form) -> web.StreamResponse:
    """Status and length where the answer is quick; else a body begun with newlines, which JSON allows before itself."""
    settings = serving.settings
    headers = _headers(job) | {"Content-Type": "application/json; charset=utf-8"}
    channel = Channel(request, settings.write_timeout_s, headers)

    async def newlines() -> None:
        async for _ in job.ticks(NEWLINE_S, True, settings):
            if not channel.response.prepared:
                await channel.open()
            await channel.write(b"\n")

    keep_alive = asyncio.ensure_future(newlines())
    try:
        await _run(serving, job, form, None, keep_alive)
        body = form.whole()
    except (ApiError, EngineError) as error:
        told = _told(error)
        if not channel.response.prepared:
            raise told from error
        body = told.event_body()
    if not channel.response.prepared:
        return web.Response(body=body, headers=headers)
    await channel.write(body, last=True)
    return channel.response


def _told(error: ApiError | EngineError) -> ApiError:
    return error if isinstance(error, ApiError) else ApiError(500, str(error), code="request_failed")
