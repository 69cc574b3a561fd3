"""A request's answer as it comes: written by the engine's thread, read by one task or thread."""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from weakref import WeakKeyDictionary

from rocline.pipeline.request import EngineError, Logprobs, Phase, Progress, Request, Summary, Update


class _Waker:
    """Wakes the readers of one event loop: one call into the loop, however many streams have news."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._news: list[asyncio.Event] = []

    def wake(self, event: asyncio.Event) -> None:
        with self._lock:
            self._news.append(event)
            if len(self._news) > 1:
                return  # a call is on its way
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: nobody reads any more
            return

    def _deliver(self) -> None:
        with self._lock:
            news, self._news = self._news, []
        for event in news:
            event.set()


_wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Waker] = WeakKeyDictionary()


def _waker() -> _Waker:
    return _wakers.setdefault(loop := asyncio.get_running_loop(), _Waker(loop))


class Stream:
    """One request's updates. Iterate it once, with `async for` or, in a thread, with `for`.

    Iteration ends with the request and raises EngineError if it failed. Reading late loses nothing and holds
    nothing up: what has come meanwhile is merged into one update.

    number       of the request in its engine
    seed         what its sampling uses
    submitted_s  time.monotonic() at submit
    summary      None before the end
    error        what ended it, if it failed
    """

    def __init__(self, number: int, request: Request, seed: int, cancel: Callable[[int], None]) -> None:
        self.number = number
        self.request = request
        self.seed = seed
        self.submitted_s = time.monotonic()
        self.summary: Summary | None = None
        self.error: EngineError | None = None
        self._cancel = cancel
        self._lock = threading.Condition(threading.Lock())
        self._progress = Progress(Phase.QUEUED, 0, len(request.prompt_ids))
        self._news = False
        self._ids: array[int] = array("i")
        self._logprobs = self._no_logprobs(request.n_logprobs is not None)
        self._prompt_logprobs = self._no_logprobs(request.prompt_logprobs)
        self._notify: Callable[[], None] | None = None

    def _no_logprobs(self, wanted: bool) -> Logprobs | None:
        return Logprobs(self.request.n_logprobs or 0) if wanted else None

    # The reader's side

    @property
    def progress(self) -> Progress:
        """The latest, read or not."""
        return self._progress

    @property
    def ended(self) -> bool:
        return self.summary is not None or self.error is not None

    def cancel(self) -> None:
        """End the request as soon as its work in flight lets it: finish reason "abort". Harmless after the end."""
        self._cancel(self.number)

    def poll(self) -> Update | None:
        """What is new, or None."""
        with self._lock:
            return self._take()

    async def __aiter__(self) -> AsyncIterator[Update]:
        event, waker = asyncio.Event(), _waker()
        with self._lock:
            self._notify = lambda: waker.wake(event)
        while True:
            event.clear()
            with self._lock:
                update, ended = self._take(), self.ended
            if update:
                yield update
            elif ended:
                break
            else:
                await event.wait()
        if self.error:
            raise self.error

    def __iter__(self) -> Iterator[Update]:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._news or self.ended)
                update = self._take()
            if not update:
                break
            yield update
        if self.error:
            raise self.error

    def _take(self) -> Update | None:
        if not self._news:
            return None
        update = Update(self._progress, self._ids, self._logprobs, self._prompt_logprobs)
        self._news = False
        self._ids = array("i")
        self._logprobs = self._no_logprobs(self._logprobs is not None)
        self._prompt_logprobs = self._no_logprobs(self._prompt_logprobs is not None)
        return update

    # The engine's side

    def publish(
        self,
        progress: Progress,
        ids: array[int] | None = None,
        logprobs: Logprobs | None = None,
        prompt_logprobs: Logprobs | None = None,
    ) -> None:
        """Add tokens, or progress alone."""
        with self._lock:
            self._progress = progress
            if ids:
                self._ids.extend(ids)
            if logprobs and self._logprobs is not None:
                self._logprobs.extend(logprobs)
            if prompt_logprobs and self._prompt_logprobs is not None:
                self._prompt_logprobs.extend(prompt_logprobs)
            self._announce()

    def end(self, progress: Progress, outcome: Summary | EngineError) -> None:
        """The last call. Raises RuntimeError for a second one: a request ends once."""
        with self._lock:
            if self.ended:
                raise RuntimeError(f"request {self.number} has ended already")
            self._progress = progress
            if isinstance(outcome, Summary):
                self.summary = outcome
            else:
                self.error = outcome
            self._announce()

    def _announce(self) -> None:
        self._news = True
        self._lock.notify_all()
        if self._notify:
            self._notify()
