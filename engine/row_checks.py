"""Rows whose residual streams are not finite, found without waiting for a device (design.md section 7)."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from torch import Tensor

from rocline.engine import scratch
from rocline.engine.handoff import HandOff, RowSpan, bad_rows, first_bad
from rocline.hip_kernels.driver import Event, HostBuffer, copy_async
from rocline.hip_kernels.finite import rows_finite

BadRow = tuple[int, int]  # sequence, position
SLOTS = 8  # checks on their way; one more waits for the oldest


class RowChecks(Protocol):
    """Checks of one stage's rows. begin() is called by the stage's thread within a scope of its memory, found() by
    any thread."""

    def begin(self, rows: HandOff) -> None:
        """Check the rows, in order of the thread's work."""

    def found(self) -> list[BadRow]:
        """Of each span checked since the last call its first row that is not finite. A check whose work the device
        has not done yet comes later; one whose rows are followed by others, by the time those are done."""


class HostChecks:
    """What was called has been done."""

    def __init__(self) -> None:
        self._found: list[BadRow] = []

    def begin(self, rows: HandOff) -> None:
        self._found += bad_rows(rows)

    def found(self) -> list[BadRow]:
        if not self._found:
            return []
        found, self._found = self._found, []
        return found


class DeviceChecks:
    """A byte a row comes back through pinned memory, with room for SLOTS checks of most_rows each."""

    def __init__(self, most_rows: int) -> None:
        self._buffer = HostBuffer(SLOTS * most_rows)
        self._most_rows = most_rows
        self._free = deque(range(SLOTS))
        self._pending: deque[tuple[tuple[RowSpan, ...], Tensor, int, Event]] = deque()
        self._early: list[BadRow] = []  # found while making room
        self._lock = threading.Lock()

    def begin(self, rows: HandOff) -> None:
        if not rows.n_rows:
            return
        finite_u8 = scratch.u8(rows.n_rows)
        rows_finite(rows.streams_bf16.flatten(1), finite_u8)
        with self._lock:
            if not self._free:
                self._pending[0][3].synchronize()
                self._collect()
            slot = self._free.popleft()
        start = slot * self._most_rows
        copy_async(self._buffer.address + start, finite_u8.data_ptr(), rows.n_rows)
        there_u8 = self._buffer.tensor()[start : start + rows.n_rows]
        event = Event().record()
        with self._lock:
            self._pending.append((rows.spans, there_u8, slot, event))

    def found(self) -> list[BadRow]:
        if not (self._pending or self._early):
            return []
        with self._lock:
            self._collect()
            found, self._early = self._early, []
        return found

    def close(self) -> None:
        """Wait for what is on its way, and free the memory. No call may follow."""
        with self._lock:
            for _, _, _, event in self._pending:
                event.synchronize()
            self._buffer.free()

    def _collect(self) -> None:
        while self._pending and self._pending[0][3].done():
            spans, finite_u8, slot, _ = self._pending.popleft()
            if not finite_u8.all():
                self._early += first_bad(spans, finite_u8)
            self._free.append(slot)
