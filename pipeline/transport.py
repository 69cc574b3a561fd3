"""Hand-offs from one stage's memory to another's: how they are copied, and how long the sender's lives (design.md
section 1).

The sender's memory lives until the receiver's copy has completed. On the host that is when receive() returns. On
GPUs it is when the copy's event has passed, whichever thread asks; releasing a hand-off before then is remembered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, product
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.handoff import Packed, Rows, StepRows
from rocline.engine.scratch import Lease, StageMemory
from rocline.hip_kernels.driver import (
    Device,
    Event,
    HostBuffer,
    Slab,
    copy_async,
    copy_peer_async,
    here,
    wait_for,
)
from rocline.hip_kernels.runtime import HipError

log = logging.getLogger(__name__)

# The odd ones end within a word of every size; the last is as long as a hand-off of a few hundred rows.
CHECK_BYTES = (1, 256, (1 << 20) + 3, (16 << 20) + 1)
GUARD_BYTES = 256  # after a checked copy's end: they must stay as they are
_ROOM_BYTES = max(CHECK_BYTES) + GUARD_BYTES + 255 & -256
SWEEP_AT = 8  # hand-offs released and not given back: asking HIP at every visit of a step takes a part of its time
BOUNCE_BYTES = 4 << 20  # of each half of a bounce's buffer: what PCIe moves in the time of a few launches


class Transport(Protocol):
    """Moves hand-offs unopened. Safe for any number of threads.

    The sending worker calls send() when it has queued its stage's work, the receiving worker receive() within the
    scope that its stage runs in. Whoever holds the sent hand-off then releases it, as any other.
    """

    def send(self, rows: Rows, source_device: int) -> Rows:
        """Rows that a stage on this device has made, ready to be received."""

    def receive(
        self, sent: Rows, source_device: int, target_device: int, memory: StageMemory, room_u8: Tensor | None = None
    ) -> Rows:
        """A copy of `sent` in the innermost scope of `memory`, which is on the target device. Raises ArenaFull.

        room_u8  of StepRows: where their piece shall lie instead, memory that only the current stream's work touches
        """

    def has_left(self, sent: Rows) -> bool:
        """Whether the copies made of a released hand-off have completed: its memory is its sender's again."""

    def sweep(self) -> None:
        """Give back what has been released and copied, as every other call does too."""

    def settle(self) -> None:
        """Wait until every copy has completed and what was released is given back."""

    def close(self) -> None:
        """Settle, and free what the transport holds. No call may follow."""


class InProcess:
    """Stages that are threads of one process, with memory on the host."""

    def send(self, rows: Rows, source_device: int) -> Rows:
        return rows

    def receive(
        self, sent: Rows, source_device: int, target_device: int, memory: StageMemory, room_u8: Tensor | None = None
    ) -> Rows:
        with scratch.use(memory):
            return sent.copied()

    def has_left(self, sent: Rows) -> bool:
        return True

    def sweep(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Verdict:
    """How rows go from one device to another.

    route    "direct": from memory to memory; "host": through pinned host memory
    problem  what was wrong with direct copies; empty if nothing
    """

    route: Literal["direct", "host"]
    problem: str = ""


class _SentLease(Lease):
    """A lease whose memory may still be read by copies on other devices' streams.

    ready   when the stage's work that makes the rows has finished
    copies  when each copy of them has
    """

    def __init__(self, lease: Lease, ready: Event, give_back: Callable[[_SentLease], None]) -> None:
        self.ready = ready
        self.copies: list[Event] = []
        self._lease = lease
        self._give_back = give_back

    def release(self) -> None:
        self._give_back(self)

    def give_back(self) -> None:
        """Really: the copies have passed."""
        self._lease.release()


class PeerCopies:
    """GPUs of one host: a copy for each tensor, on a stream of the receiving device.

    devices  that stages run on. Every ordered pair is checked first (check_pairs): raises HipError where even host
             memory does not help

    Both workers call with a stream of their device as the current one, on which the stage's work is queued.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.verdicts = check_pairs(devices)
        self._streams = {device.index: device.stream() for device in devices}
        self._links: dict[tuple[int, int], _Link] = {}
        for source, target in product(devices, repeat=2):
            pair = source.index, target.index
            kind = _Direct if self.verdicts[pair].route == "direct" else _Bounce
            self._links[pair] = kind(source, target)
        self._released: list[_SentLease] = []
        self._lock = threading.Lock()

    def send(self, rows: Rows, source_device: int) -> Rows:
        """Marks on the current stream when `rows` are there."""
        if rows.lease is None:
            raise ValueError("send: these rows have no lease; only what a stage's run has returned can be sent")
        _check_current(source_device, "send from")
        return rows.leased(_SentLease(rows.lease, Event().record(), self._give_back))

    def receive(
        self, sent: Rows, source_device: int, target_device: int, memory: StageMemory, room_u8: Tensor | None = None
    ) -> Rows:
        """Queues the copies; the current stream waits for them, the host does not."""
        lease = sent.lease
        if not isinstance(lease, _SentLease):
            raise ValueError("receive: these rows were not sent; the stage that made them calls send first")
        _check_current(target_device, "receive on")
        link = self._links[source_device, target_device]
        if isinstance(sent, StepRows) and room_u8 is not None:
            return self._into(room_u8, sent, lease, link)
        self.sweep()
        parts: list[_Part] = []

        def lend(tensor: Tensor) -> Tensor:
            if not tensor.is_contiguous():
                raise ValueError(f"receive: {list(tensor.shape)} with strides {tensor.stride()}; send whole tensors")
            out = scratch.like(tensor, len(tensor))
            parts.append((out.data_ptr(), tensor.data_ptr(), tensor.nbytes))
            return out

        with scratch.use(memory):
            received = sent.moved(lend)
        # What was lent may be an earlier step's on this very stream, which is perhaps not done with it yet.
        lent, copied = Event().record(), Event()
        lease.copies.append(copied)
        try:
            with self._streams[target_device]:
                wait_for(lent)
                try:
                    link.copy(parts, lease.ready)
                finally:
                    copied.record()  # where a copy was refused, of those before it
        finally:
            wait_for(copied)
        return received

    def _into(self, room_u8: Tensor, sent: StepRows, lease: _SentLease, link: _Link) -> StepRows:
        """As receive, on the current stream itself: a step is too short for another one to help it."""
        copied = Event()
        lease.copies.append(copied)
        try:
            link.copy([(room_u8.data_ptr(), sent.packed.data_u8.data_ptr(), room_u8.nbytes)], lease.ready)
        finally:
            copied.record()  # where the copy was refused, of what was before it
        return StepRows(sent.spans, Packed(room_u8, sent.packed.layout), sent.rings, engram=sent.engram)

    def has_left(self, sent: Rows) -> bool:
        if isinstance(sent.lease, _SentLease) and not all(event.done() for event in sent.lease.copies):
            return False
        self.sweep()
        return True

    def settle(self) -> None:
        with self._lock:
            waiting = [event for lease in self._released for event in lease.copies]
        for event in waiting:
            event.synchronize()
        self.sweep()

    def close(self) -> None:
        """Settle, and free the host memory of the pairs that needed some. No call may follow."""
        self.settle()
        for link in self._links.values():
            link.free()

    def _give_back(self, lease: _SentLease) -> None:
        with self._lock:
            self._released.append(lease)
        if not lease.copies or len(self._released) >= SWEEP_AT:
            self.sweep()

    def sweep(self) -> None:
        passed: list[_SentLease] = []
        waiting: list[_SentLease] = []
        with self._lock:
            for lease in self._released:
                (passed if all(event.done() for event in lease.copies) else waiting).append(lease)
            self._released = waiting
        for lease in passed:
            lease.give_back()


def _check_current(device: int, doing: str) -> None:
    if here.device != device:
        raise ValueError(f"{doing} device {device}: the current stream is of device {here.device}; enter the stage's")


def _room(tensor: Tensor) -> Tensor:
    return scratch.like(tensor, len(tensor))


_Part = tuple[int, int, int]  # to address, from address, n_bytes


class _Link(Protocol):
    """The way from one device to another."""

    def copy(self, parts: Iterable[_Part], ready: Event) -> None:
        """Queue copies that wait for `ready`; the current stream, of the target, is past them when they are done."""

    def free(self) -> None:
        """Give back what it holds."""


class _Direct:
    """From memory to memory, on the current stream."""

    def __init__(self, source: Device, target: Device) -> None:
        self._source, self._target = source, target
        if source is not target:  # each may be the one that drives the copy
            source.enable_peer(target)
            target.enable_peer(source)

    def copy(self, parts: Iterable[_Part], ready: Event) -> None:
        wait_for(ready)
        for to_address, from_address, n_bytes in parts:
            if not n_bytes:
                continue
            if self._source is self._target:
                copy_async(to_address, from_address, n_bytes)
            else:
                copy_peer_async(to_address, self._target, from_address, self._source, n_bytes)

    def free(self) -> None:
        pass


class _Bounce:
    """Through pinned host memory: a stream of the source fills one half of a buffer while the target empties the
    other."""

    def __init__(self, source: Device, target: Device) -> None:
        self._stream = source.stream()
        self._buffer = HostBuffer(2 * BOUNCE_BYTES)
        with target.current():  # its streams record them
            self._halves = cycle([(self._buffer.address + half * BOUNCE_BYTES, Event()) for half in range(2)])
        self._lock = threading.Lock()  # several stages of the target may receive at once

    def copy(self, parts: Iterable[_Part], ready: Event) -> None:
        with self._lock:
            self._stream.wait(ready)
            for to_address, from_address, n_bytes in parts:
                for start in range(0, n_bytes, BOUNCE_BYTES):
                    self._piece(to_address + start, from_address + start, min(BOUNCE_BYTES, n_bytes - start))

    def _piece(self, to_address: int, from_address: int, n_bytes: int) -> None:
        half_address, emptied = next(self._halves)
        with self._stream:
            wait_for(emptied)
            copy_async(half_address, from_address, n_bytes)
            filled = Event().record()
        wait_for(filled)
        copy_async(to_address, half_address, n_bytes)
        emptied.record()

    def free(self) -> None:
        self._buffer.free()


def check_pairs(devices: Sequence[Device]) -> dict[tuple[int, int], Verdict]:
    """How rows go between every ordered pair of devices, a device and itself too, found out with data.

    A pattern of that pair alone is put on the source, copied, and compared whole on the target, where its complement
    was: neither a stale buffer nor a copy left undone can pass. A pair that fails or raises goes through host memory,
    checked the same way, and is logged. Raises HipError where that fails too.
    """
    verdicts = {}
    with _Bench.on(devices) as bench:
        for source, target in product(devices, repeat=2):
            verdicts[source.index, target.index] = _check_pair(source, target, bench)
    return verdicts


@dataclass(frozen=True)
class _Bench:
    """Memory that pairs are checked with: a slab on each device, with room to send from and then room to receive in,
    and a pinned buffer to fill and read them."""

    slabs: dict[int, Slab]
    host: HostBuffer

    @classmethod
    @contextmanager
    def on(cls, devices: Sequence[Device]) -> Iterator[_Bench]:
        with ExitStack() as stack:
            slabs = {}
            for device in devices:
                slabs[device.index] = device.allocate(2 * _ROOM_BYTES)
                stack.callback(slabs[device.index].free)
            host = HostBuffer(_ROOM_BYTES)
            stack.callback(host.free)
            yield cls(slabs, host)


def _check_pair(source: Device, target: Device, bench: _Bench) -> Verdict:
    problem = _problem(_Direct, source, target, bench)
    if not problem:
        return Verdict("direct")
    pair = f"copies from device {source.index} ({source.name}) to device {target.index} ({target.name})"
    if source is target:
        raise HipError(f"{pair}: {problem}; its memory or its link to the host cannot be trusted, leave it out")
    if bounced := _problem(_Bounce, source, target, bench):
        raise HipError(f"{pair}: {problem}; through host memory: {bounced}; leave one of them out")
    log.warning("%s: %s; between them rows go through pinned host memory, which is slower", pair, problem)
    return Verdict("host", problem)


def _problem(kind: type[_Direct | _Bounce], source: Device, target: Device, bench: _Bench) -> str:
    """What is wrong with one way between two devices; empty if nothing is."""
    try:
        link = kind(source, target)
        try:
            found = (_difference(link, source, target, bench, n_bytes) for n_bytes in CHECK_BYTES)
            return next(filter(None, found), "")
        finally:
            link.free()
    except HipError as error:
        return str(error)


def _difference(link: _Link, source: Device, target: Device, bench: _Bench, n_bytes: int) -> str:
    """What differs after a checked copy of n_bytes."""
    seed = [source.index, target.index, n_bytes, isinstance(link, _Bounce)]
    want = np.frombuffer(np.random.default_rng(seed).bytes(n_bytes + GUARD_BYTES), np.uint8).copy()
    host, size = bench.host.tensor().numpy()[: len(want)], len(want)
    from_address = bench.slabs[source.index].address
    to_address = bench.slabs[target.index].address + _ROOM_BYTES
    with source.stream() as stream:
        host[:] = want
        copy_async(from_address, bench.host.address, size)
        stream.synchronize()
        ready = Event().record()
    with target.stream() as stream:
        np.invert(want, out=host)
        copy_async(to_address, bench.host.address, size)
        stream.synchronize()
        link.copy([(to_address, from_address, n_bytes)], ready)
        stream.synchronize()
        host[:] = 0
        copy_async(bench.host.address, to_address, size)
        stream.synchronize()
    np.invert(want[n_bytes:], out=want[n_bytes:])
    wrong = np.flatnonzero(host != want)
    if not len(wrong):
        return ""
    at = int(wrong[0])
    where = f"of {n_bytes} bytes and {GUARD_BYTES} after them {len(wrong)} differ"
    return f"{where}, the first at {at}: {host[at]:#04x}, want {want[at]:#04x}"
