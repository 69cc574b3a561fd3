"""Engram's table rows, gathered on host threads before the stages that add them (design.md section 8)."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from math import prod
from queue import PriorityQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.engram import EngramTable
from rocline.hip_kernels.binding import is_shapes_only
from rocline.hip_kernels.driver import Event, HostBuffer
from rocline.hip_kernels.rows import gather_rows

# That a thread gathers at a time, 6,144 table rows at the release's width: 1 to 2 ms. Half as many spend a third of
# their time in Python.
PIECE_ROWS = 256
LEAST_CAPACITY = 16  # rows of the smallest buffer
SETTLE_S = 5.0


class EngramAheadError(RuntimeError):
    """Table rows that will not come: they could not be gathered, or were given back before."""


class TableRows(NamedTuple):
    """rows_i64 [R, C] table rows of each column; codes_e4m3 [R, C, d] and scales_e8m0 [R, C, d/32] as stored.

    Of these only codes and scales are ever brought to a device.
    """

    rows_i64: Tensor
    codes_e4m3: Tensor
    scales_e8m0: Tensor

    def part(self, place: slice) -> TableRows:
        return TableRows(*(tensor[place] for tensor in self))


Buffer = Mapping[int, TableRows]  # by layer, of some capacity of rows


@dataclass(eq=False)
class _Work:
    """One hand-off's gathering. What changes is changed under the lock of its EngramAhead.

    buffer  where `rows` are the first ones
    n_left  by layer, pieces not gathered yet
    copies  made of the buffer, perhaps still on their way
    """

    capacity: int
    buffer: Buffer
    rows: Buffer
    n_left: dict[int, int]
    done: dict[int, threading.Event]
    copies: list[Event] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)
    wait_s: float = 0.0
    released: bool = False


class EngramRows(Protocol):
    """Table rows of a hand-off's rows, of every Engram layer."""

    def take(self, layer: int) -> TableRows:
        """The layer's, where this thread's operators read them; only lent, until `release`."""

    def on_host(self, layer: int) -> TableRows:
        """The layer's, waited for, in host memory; only lent, until `release`."""

    def pick(self, index_i64: Tensor) -> EngramRows:
        """Only these rows [n], given on the host."""

    def release(self) -> None:
        """Nobody needs the rows any more."""


@dataclass(frozen=True, eq=False)
class GatheredLate:
    """Table rows that are gathered where they are taken, by the thread that takes them: the host waits for itself."""

    tables: Mapping[int, EngramTable]
    lookback_i32: Tensor

    def take(self, layer: int) -> TableRows:
        rows_i64, codes_e4m3, scales_e8m0 = self.on_host(layer)
        return TableRows(rows_i64, scratch.upload(codes_e4m3), scratch.upload(scales_e8m0))

    def on_host(self, layer: int) -> TableRows:
        table = self.tables[layer]
        rows = _room(table, len(self.lookback_i32), _plain)
        table.hash_rows(self.lookback_i32, rows.rows_i64)
        if not is_shapes_only():
            table.copy_rows(*rows)
        return rows

    def pick(self, index_i64: Tensor) -> GatheredLate:
        return replace(self, lookback_i32=self.lookback_i32[index_i64])

    def release(self) -> None:
        pass


@dataclass(frozen=True, eq=False)
class Gathered:
    """Table rows of a hand-off's rows, of every Engram layer, there or on their way.

    index_i64 [R] says which of the gathered rows the hand-off still has; None: all.
    """

    _ahead: EngramAhead
    _work: _Work
    _index_i64: Tensor | None = None

    def take(self, layer: int) -> TableRows:
        """The layer's table rows, waited for, where this thread's operators read them. They are only lent, until
        `release`.

        Raises EngramAheadError when they could not be gathered, or have been released.
        """
        rows_i64, codes_e4m3, scales_e8m0 = self._ahead._take(self._work, layer)
        brought = self._ahead._bring(self._work, codes_e4m3, scales_e8m0)
        if self._index_i64 is None:
            return TableRows(rows_i64, *brought)
        index_i64 = scratch.upload(self._index_i64)
        picked = [scratch.like(tensor, len(index_i64)) for tensor in brought]
        for tensor, out in zip(brought, picked, strict=True):
            gather_rows(tensor, index_i64, out)
        return TableRows(rows_i64[self._index_i64], *picked)

    def on_host(self, layer: int) -> TableRows:
        """The layer's table rows, waited for, in host memory; lent as by `take`, which raises the same."""
        rows = self._ahead._take(self._work, layer)
        return rows if self._index_i64 is None else TableRows(*(tensor[self._index_i64] for tensor in rows))

    def pick(self, index_i64: Tensor) -> Gathered:
        """Only these rows [n], given on the host."""
        index_i64 = index_i64 if self._index_i64 is None else self._index_i64[index_i64]
        return replace(self, _index_i64=index_i64)

    @property
    def wait_s(self) -> float:
        """Seconds that `take` has waited."""
        return self._work.wait_s

    def release(self) -> None:
        """Nobody needs the rows any more. At any moment, by any thread, and again."""
        self._ahead._release(self._work)


class EngramAhead:
    """Threads that hash and gather; the smallest hand-off first, so that a decode step waits for no chunk.

    tables     by layer. Their rows are read without the interpreter's lock, from memory or from a mapped file
    is_pinned  rows go to GPUs: they are gathered into memory that copies can be made from directly
    """

    def __init__(self, tables: Mapping[int, EngramTable], n_threads: int = 4, is_pinned: bool = False) -> None:
        self._tables = dict(sorted(tables.items()))
        self._pinned = _Pinned() if is_pinned else None
        self._queue: PriorityQueue[tuple[float, int, Callable[[], None] | None]] = PriorityQueue()
        self._tickets = count()
        self._lock = threading.Lock()
        self._free = defaultdict[int, list[tuple[Buffer, list[Event]]]](list)  # by capacity; with copies made of them
        self._closed = False
        self.wait_s = 0.0  # that all takers together have waited
        self.n_lent = 0  # hand-offs whose rows have not been released, or are still being written
        self._threads = [threading.Thread(target=self._run, name=f"engram {n}", daemon=True) for n in range(n_threads)]
        for thread in self._threads:
            thread.start()

    def prepare(self, n_rows: int, n_at_once: int) -> None:
        """Have buffers for so many hand-offs of n_rows at once: pinning takes 0.7 ms a MiB."""
        with self._lock:
            capacity = _capacity(n_rows)
            self._free[capacity] += [(self._new_buffer(capacity), []) for _ in range(n_at_once)]

    def start(self, lookback_i32: Tensor) -> Gathered:
        """Begin to gather for rows with lookback_i32 [R, N] (as in HandOff). Raises EngramAheadError once closed."""
        lookback_i32 = lookback_i32.clone()  # the caller's may be gone before the threads come to it
        n_rows = len(lookback_i32)
        pieces = [slice(start, min(start + PIECE_ROWS, n_rows)) for start in range(0, n_rows, PIECE_ROWS)]
        with self._lock:
            if self._closed:
                raise EngramAheadError("engram: closed; open the engine again")
            capacity = _capacity(n_rows)
            buffer = self._buffer(capacity)
            work = _Work(
                capacity,
                buffer,
                rows={layer: whole.part(slice(n_rows)) for layer, whole in buffer.items()},
                n_left=dict.fromkeys(self._tables, len(pieces)),
                done={layer: threading.Event() for layer in self._tables},
            )
            self.n_lent += 1
            for layer in self._tables:  # the first layer's rows are needed first
                for place in pieces:
                    self._put(n_rows, self._piece(work, layer, lookback_i32, place))
                if not pieces:
                    work.done[layer].set()
        return Gathered(self, work)

    def close(self) -> None:
        """Stop the threads. What is not gathered yet fails where it is taken. Harmless twice.

        Pinned memory is given back once copies out of it have been made; not where a device takes longer than SETTLE_S.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._put(float("inf"), None)
        for thread in self._threads:
            thread.join()
        if self._pinned:
            self._give_back(self._pinned)

    def _give_back(self, pinned: _Pinned) -> None:
        copies = [copy for free in self._free.values() for _, of_buffer in free for copy in of_buffer]
        until_s = time.monotonic() + SETTLE_S
        while not (are_made := all(copy.done() for copy in copies)) and time.monotonic() < until_s:
            time.sleep(1e-3)
        if are_made and not self.n_lent:
            self._free.clear()
            pinned.free()

    def _put(self, n_rows: float, piece: Callable[[], None] | None) -> None:
        self._queue.put((n_rows, next(self._tickets), piece))

    def _buffer(self, capacity: int) -> Buffer:
        free = self._free[capacity]
        for at, (buffer, copies) in enumerate(free):
            if all(copy.done() for copy in copies):
                del free[at]
                return buffer
        return self._new_buffer(capacity)

    def _new_buffer(self, capacity: int) -> Buffer:
        room_u8 = self._pinned.room_u8 if self._pinned else _plain
        return {layer: _room(table, capacity, room_u8) for layer, table in self._tables.items()}

    def _bring(self, work: _Work, *tensors: Tensor) -> list[Tensor]:
        """Tensors of its buffer where this thread's operators read them."""
        if not (self._pinned and scratch.is_on_device()):
            return [scratch.upload(tensor) for tensor in tensors]
        brought = [scratch.upload_pinned(tensor) for tensor in tensors]
        work.copies.append(Event().record())
        return brought

    def _run(self) -> None:
        torch.set_num_threads(1)  # the threads here are the parallelism
        with torch.inference_mode():  # as buffers are that were made inside a stage's run: others may not write them
            while piece := self._queue.get()[2]:
                piece()

    def _piece(self, work: _Work, layer: int, lookback_i32: Tensor, place: slice) -> Callable[[], None]:
        def gather() -> None:
            try:
                if self._closed:
                    raise EngramAheadError("closed")
                if not work.released:
                    table, out = self._tables[layer], work.rows[layer].part(place)
                    table.hash_rows(lookback_i32[place], out.rows_i64)
                    table.copy_rows(out.rows_i64, out.codes_e4m3, out.scales_e8m0)
            except Exception as error:  # whatever it is, the stage that takes these rows must know
                work.errors[layer] = error
            with self._lock:
                work.n_left[layer] -= 1
                if not work.n_left[layer]:
                    work.done[layer].set()
                if work.released:
                    self._reuse(work)

        return gather

    def _take(self, work: _Work, layer: int) -> TableRows:
        began_s = time.perf_counter()
        work.done[layer].wait()
        waited_s = time.perf_counter() - began_s
        with self._lock:
            self.wait_s += waited_s
            work.wait_s += waited_s
            if work.released:
                raise EngramAheadError(f"engram rows of layer {layer}: released before they were taken")
        if error := work.errors.get(layer):
            raise EngramAheadError(f"engram rows of layer {layer}: {type(error).__name__}: {error}") from error
        return work.rows[layer]

    def _release(self, work: _Work) -> None:
        with self._lock:
            if not work.released:
                work.released = True
                self._reuse(work)

    def _reuse(self, work: _Work) -> None:
        """Take the buffer back once no thread writes into it."""
        if not any(work.n_left.values()):
            self._free[work.capacity].append((work.buffer, work.copies))
            self.n_lent -= 1


class _Pinned:
    """Host memory for copies to GPUs, given back all at once."""

    def __init__(self) -> None:
        self._buffers: list[HostBuffer] = []

    def room_u8(self, *shape: int) -> Tensor:
        buffer = HostBuffer(max(1, prod(shape)))
        self._buffers.append(buffer)
        return buffer.tensor()[: prod(shape)].view(shape)

    def free(self) -> None:
        while self._buffers:
            self._buffers.pop().free()


def _plain(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8)


def _capacity(n_rows: int) -> int:
    """Of a buffer for n_rows."""
    return max(LEAST_CAPACITY, 1 << (n_rows - 1).bit_length())


def _room(table: EngramTable, capacity: int, room_u8: Callable[..., Tensor]) -> TableRows:
    n_columns = len(table.primes_i64)
    return TableRows(
        torch.empty((capacity, n_columns), dtype=torch.int64),
        room_u8(capacity, n_columns, table.codes_e4m3.shape[1]),
        room_u8(capacity, n_columns, table.scales_e8m0.shape[1]),
    )
