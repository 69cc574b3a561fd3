"""One process that serves: from an open port over a loaded engine to a drained end (design.md section 9)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from aiohttp import web

from rocline.http.app import make_app
from rocline.http.errors import ApiError
from rocline.http.serving import EngineApi, Serving, freeze_gc, log
from rocline.pipeline.stats import State, Stats

EXIT_FAILED, EXIT_ENGINE_FAILED = 1, 70  # the second: a supervisor that starts the server again helps
LOG_S = 10.0  # between lines while anything runs
TICK_S = 1.0
GOODBYE_S = 2.0  # for the last events to reach their clients
BACKLOG = 1024
_OPENING = "open"  # the thread


def notify(state: str) -> None:
    """Tell systemd, if it listens (sd_notify's protocol: a datagram to the socket named in the environment)."""
    if not (address := os.environ.get("NOTIFY_SOCKET")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier, suppress(OSError):
        notifier.connect("\0" + address[1:] if address.startswith("@") else address)
        notifier.send(state.encode())


def is_opening() -> bool:
    """Whether the engine of a server that has ended is still being opened."""
    return any(thread.name == _OPENING for thread in threading.enumerate())


def _in_thread(function: Callable[[], EngineApi]) -> asyncio.Future[EngineApi]:
    """A daemon's: the process may end while it runs, where one of to_thread would be waited for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[EngineApi] = loop.create_future()

    def set_outcome(outcome: EngineApi | Exception) -> None:
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def work() -> None:
        outcome: EngineApi | Exception
        try:
            outcome = function()
        except Exception as error:
            outcome = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(set_outcome, outcome)

    threading.Thread(target=work, name=_OPENING, daemon=True).start()
    return future


class Server:
    """run() returns the process's exit status."""

    def __init__(
        self,
        serving: Serving,
        open_engine: Callable[[], EngineApi],
        api_keys: Sequence[str],
    ) -> None:
        """open_engine runs in a thread; what it raises ends the server with EXIT_FAILED."""
        self._serving, self._open_engine = serving, open_engine
        settings = serving.settings
        quiet = logging.getLogger("rocline.http.connections")
        quiet.disabled = True  # aiohttp's lines quote broken requests, prompt and all; app.py logs what handlers raise
        self._runner = web.AppRunner(
            make_app(serving, api_keys),
            handler_cancellation=True,  # a client that leaves cancels its handler, and that its job
            access_log=None,
            logger=quiet,
            keepalive_timeout=settings.idle_timeout_s,
            shutdown_timeout=GOODBYE_S,
        )
        self._stop = asyncio.Event()
        self.port = 0

    @property
    def url(self) -> str:
        host = self._serving.settings.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def run(self) -> int:
        await self._runner.setup()
        listener = self._listen()
        await web.SockSite(self._runner, listener, backlog=BACKLOG).start()
        settings = self._serving.settings
        log("listening", host=settings.host, port=self.port)
        try:
            return await self._serve()
        finally:
            await self._serving.close()
            await self._runner.cleanup()

    def stop(self) -> None:
        """Drain, then end. A second time: end."""
        if self._stop.is_set():
            os._exit(EXIT_FAILED)
        self._stop.set()

    def _listen(self) -> socket.socket:
        settings = self._serving.settings
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
        # Accepted sockets inherit these: a client whose machine is gone sends no end, and would hold its request.
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        timeout_ms = int(settings.write_timeout_s * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        self.port = listener.getsockname()[1]
        return listener

    async def _serve(self) -> int:
        serving = self._serving
        loading = _in_thread(self._open_engine)
        stopped = asyncio.ensure_future(self._stop.wait())
        awaited: set[asyncio.Future[Any]] = {loading, stopped}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            log("end", drained=True)
            return 0
        try:
            engine = loading.result()
        except Exception as error:
            log("failed", error=f"{type(error).__name__}: {error}")
            return EXIT_FAILED
        await serving.pool.warm_up()
        freeze_gc()
        self._log_start(engine)
        serving.engine = engine
        notify("READY=1")
        ticker = asyncio.ensure_future(self._tick(engine))
        await asyncio.wait({ticker, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if ticker.done():
            ticker.result()
            await self._say_goodbye()
            await asyncio.to_thread(engine.headroom.close)  # no look at a card while the runtime is torn down
            return EXIT_ENGINE_FAILED  # its threads may hang: it is not closed
        await self._drain(engine)
        ticker.cancel()
        return 0

    def _log_start(self, engine: EngineApi) -> None:
        serving = self._serving
        settings = serving.settings
        stages = [
            {"stage": s.stage, "device": s.device, "layers": s.layers, "arena_bytes": s.arena.slab_bytes}
            for s in engine.stats().stages
        ]
        log(
            "start",
            model=serving.folder,
            served_name=settings.served_name,
            url=self.url,
            context=engine.context,
            options=asdict(engine.options),
            stages=stages,
            started_s=round(time.time() - serving.started_s, 3),
        )

    async def _tick(self, engine: EngineApi) -> None:
        """Until the engine fails."""
        logged_s = 0.0
        while True:
            stats = engine.stats()
            if stats.state is State.FAILED:
                log("failed", error=stats.reason)
                notify(f"STATUS=failed: {stats.reason}")
                return
            now_s = time.monotonic()
            n_active = stats.queued + stats.prefilling + stats.decoding + stats.paused
            notify(f"WATCHDOG=1\nSTATUS={stats.state.value}: {n_active - stats.queued} run, {stats.queued} wait")
            if n_active and now_s >= logged_s + LOG_S:
                logged_s = now_s
                self._log_running(stats)
            await asyncio.sleep(TICK_S)

    def _log_running(self, stats: Stats) -> None:
        log(
            "running",
            state=stats.state.value,
            queued=stats.queued,
            prefilling=stats.prefilling,
            decoding=stats.decoding,
            paused=stats.paused,
            prompt_rows=stats.prompt_rows,
            output_tokens=stats.output_tokens,
            free_pages=stats.free_pages,
            busy_s=[round(stage.busy_s, 3) for stage in stats.stages],
            headroom_bytes=[memory.free_bytes for memory in stats.memory],
            min_headroom_bytes=stats.min_headroom_bytes,
        )

    async def _drain(self, engine: EngineApi) -> None:
        serving = self._serving
        drain_s = serving.settings.drain_s
        notify(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int((drain_s + 10) * 1e6)}")
        log("draining", requests=len(serving.jobs), drain_s=drain_s)
        drained = await asyncio.to_thread(engine.drain, drain_s)
        await self._say_goodbye()
        await asyncio.to_thread(engine.close)
        log("end", drained=drained)

    async def _say_goodbye(self) -> None:
        """Requests that are left hear why they end; those that ended have their last bytes sent."""
        for job in set(self._serving.jobs.values()):
            job.abort(ApiError(503, "the server is shutting down", code="shutting_down"), "shutdown")
        deadline_s = time.monotonic() + GOODBYE_S
        while self._serving.jobs and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
