"""A server over an engine on a free port of loopback, in a thread with its own event loop."""

import asyncio
import atexit
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx
from fake_engine import FakeEngine

from rocline.engine.config import ModelConfig
from rocline.http.pool import PromptPool
from rocline.http.prompt import Limits
from rocline.http.server import Server
from rocline.http.serving import Serving
from rocline.http.settings import Settings
from rocline.pipeline.options import Options
from rocline.pipeline.stats import State


class RunningServer:
    """exit_status is set when it has ended."""

    def __init__(self, folder: Path, engine: FakeEngine, settings: Settings, keys: tuple[str, ...] = ()) -> None:
        config = engine.config
        limits = Limits(engine.context, config.text_config.vocab_size, settings.thinking)
        self.engine, self.settings = engine, settings
        self.pool = shared_pool(folder, limits)
        self.serving = SharedServing(str(folder), settings, config, engine.context, self.pool)
        self.exit_status: int | None = None
        self.opening: Callable[[], FakeEngine] = lambda: engine
        self._keys = keys
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: self.serving.state is State.READY)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.server = Server(self.serving, lambda: self.opening(), self._keys)
        self.exit_status = await self.server.run()

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self, timeout_s: float = 10) -> int | None:
        self.engine.gate.set()
        self.loop.call_soon_threadsafe(self.server.stop)
        return self.join(timeout_s)

    def join(self, timeout_s: float = 10) -> int | None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()
        return self.exit_status

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.settimeout(10)
        return connection

    def post(self, path: str, body: object, **how: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, **how)

    def n_tasks(self) -> int:
        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return asyncio.run_coroutine_threadsafe(count(), self.loop).result(5)

    def quiet(self) -> bool:
        return not self.engine.n_active and not self.serving.jobs


@cache
def shared_pool(folder: Path, limits: Limits) -> PromptPool:
    """One for all servers of these limits: its worker takes half a second to start. It ends with this thread."""
    pool = PromptPool(folder, limits, workers=1)
    asyncio.run(pool.warm_up())
    atexit.register(pool.close)
    return pool


class SharedServing(Serving):
    """Leaves the pool open when it closes."""

    async def close(self) -> None:
        pool, self.pool = self.pool, NoPool()
        await super().close()
        self.pool = pool


class NoPool:
    def close(self) -> None: ...


def wait_until(condition: Callable[[], object], timeout_s: float = 10) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.002)


@contextmanager
def serving(folder: Path, config: ModelConfig) -> Iterator[Callable[..., RunningServer]]:
    servers: list[RunningServer] = []

    def make(
        keys: tuple[str, ...] = (), options: Options | None = None, start: bool = True, **settings: object
    ) -> RunningServer:
        engine = FakeEngine(config, options or Options())
        running = RunningServer(folder, engine, Settings(port=0, **settings), keys)
        servers.append(running)
        if start:
            running.start()
        return running

    yield make
    for running in servers:
        if running.exit_status is None:
            running.stop()
        running.engine.close()
