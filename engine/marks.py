"""Moments of a stage's work: on a GPU those when its stream gets there, known some time later (design.md section 7)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rocline.hip_kernels.driver import Event, Stream

Moment = Callable[[], int | None]  # time.monotonic_ns, or None as long as it has not come
_BASE_NS = 60_000_000_000  # older ones are replaced: elapsed times are FP32 milliseconds


class Clock(Protocol):
    def mark(self) -> Moment:
        """When all has been done that this thread has queued so far. Any thread may ask."""


class HostClock:
    """What was called has been done."""

    def mark(self) -> Moment:
        now_ns = time.monotonic_ns()
        return lambda: now_ns


class StreamClock:
    """Of the stream that is this thread's current one at each mark, a stream of the device that `stream` is of."""

    def __init__(self, stream: Stream) -> None:
        with stream:
            event = Event(timed=True).record()
        stream.synchronize()
        self._base = event, time.monotonic_ns()  # one object: moments are asked by other threads than mark() is

    def mark(self) -> Moment:
        event, (base, base_ns) = Event(timed=True).record(), self._base

        def moment() -> int | None:
            if not event.done():
                return None
            at_ns = base_ns + round(event.ms_since(base) * 1e6)
            if at_ns - self._base[1] > _BASE_NS:
                self._base = event, at_ns  # of later marks: an event is never older than its base
            return at_ns

        return moment
