"""Free memory of the devices, looked at all the time: now, the least so far, and the least while a request ran
(design.md section 8)."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]

from rocline.hip_kernels.driver import Device, devices
from rocline.hip_kernels.runtime import check, hip
from rocline.pipeline.card_watch import HipWord
from rocline.pipeline.stats import MemoryStats
from rocline.pipeline.sysfs_cards import Card, card_at, cards

INTERVAL_S = 0.1
STALE_S = 5.0  # a card that hangs may not even say that it does
CLOSE_S = 1.0
LOWS_KEPT = 4096

log = logging.getLogger(__name__)


class Memory(NamedTuple):
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Source:
    """A memory to look at. device and pci_id as in MemoryStats; read may raise whatever it likes."""

    device: int | None
    pci_id: str
    read: Callable[[], Memory]


class Headroom:
    """Looks at every source each interval, from a thread of its own. What it says is safe to ask for from any.

    sources     those that fail are reported, and asked again
    now         seconds, never going back
    interval_s  between two looks; None: there is no thread, sample() is called from outside
    """

    def __init__(
        self,
        sources: Sequence[Source],
        interval_s: float | None = INTERVAL_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Has looked once when it returns."""
        self._now, self._lock = now, threading.Lock()
        self._tracks = [_Track(source, looked_s=now()) for source in sources]
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.sample()
        if interval_s is not None:
            self._thread = threading.Thread(target=self._watch, args=(interval_s,), name="headroom", daemon=True)
            self._thread.start()

    def sample(self) -> None:
        """Look now."""
        for track in self._tracks:
            try:
                memory, error = track.source.read(), ""
            except Exception as failure:  # of one card: the others are looked at all the same
                memory, error = None, f"{type(failure).__name__}: {failure}"
            with self._lock:
                track.take(memory, error, self._now())

    def readings(self) -> tuple[MemoryStats, ...]:
        """What is known now, in the order of the sources."""
        now_s, since_epoch_s = self._now(), time.time()
        with self._lock:
            return tuple(track.reading(now_s, since_epoch_s) for track in self._tracks)

    def minimum_since(self, began_s: float) -> int | None:
        """The least that any source had free since began_s of the clock `now`; None if nothing was ever read."""
        with self._lock:
            lows = [low for track in self._tracks if (low := track.lows.since(began_s)) is not None]
        return min(lows, default=None)

    def close(self) -> None:
        """End the thread, unless a source holds it. Harmless twice."""
        self._closing.set()
        if self._thread:
            self._thread.join(CLOSE_S)

    def _watch(self, interval_s: float) -> None:
        while not self._closing.wait(interval_s):
            self.sample()


class _Lows:
    """Samples of which the least since any moment can be told: those that no later one is below.

    They rise from the oldest to the newest. Of more than LOWS_KEPT the two oldest become one, whose answer is then
    too low for a moment between them, never too high.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[float, int]] = []  # (at_s, free_bytes)

    def add(self, at_s: float, free_bytes: int) -> None:
        kept = self._kept
        while kept and kept[-1][1] >= free_bytes:
            kept.pop()
        kept.append((at_s, free_bytes))
        if len(kept) > LOWS_KEPT:
            kept[:2] = [(kept[1][0], kept[0][1])]

    def since(self, began_s: float) -> int | None:
        """None without samples; the last one's after it."""
        if not self._kept:
            return None
        place = bisect_left(self._kept, began_s, key=itemgetter(0))
        return self._kept[min(place, len(self._kept) - 1)][1]


@dataclass
class _Track:
    """What is known of one source; memory is None where its last look failed."""

    source: Source
    looked_s: float
    memory: Memory | None = None
    error: str = ""
    total_bytes: int = 0
    least: tuple[int, float] | None = None  # (free_bytes, at_s)
    lows: _Lows = field(default_factory=_Lows)

    def take(self, memory: Memory | None, error: str, now_s: float) -> None:
        if bool(error) != bool(self.error):
            log.warning("headroom of %s: %s", _name(self.source), error or "can be read again")
        self.memory, self.error, self.looked_s = memory, error, now_s
        if memory:
            self.total_bytes = memory.total_bytes
            self.lows.add(now_s, memory.free_bytes)
            if self.least is None or memory.free_bytes < self.least[0]:
                self.least = memory.free_bytes, now_s

    def reading(self, now_s: float, since_epoch_s: float) -> MemoryStats:
        memory, error = self.memory, self.error
        if now_s - self.looked_s > STALE_S:
            memory, error = None, f"no answer for {now_s - self.looked_s:.0f} s"
        return MemoryStats(
            device=self.source.device,
            pci_id=self.source.pci_id,
            free_bytes=memory.free_bytes if memory else None,
            total_bytes=self.total_bytes,
            min_free_bytes=self.least[0] if self.least else None,
            min_free_at_s=self.least[1] - now_s + since_epoch_s if self.least else None,
            error=error,
        )


def _name(source: Source) -> str:
    return "the host" if source.device is None else f"device {source.device} ({source.pci_id})"


# What there is to look at


def sources(device_indices: Sequence[int] | None) -> list[Source]:
    """Of HIP's devices, in the order of the placement; None: of the host. Raises HipError."""
    if device_indices is None:
        return [Source(None, "", host_memory)]
    shown = cards()
    return [card_source(number, devices()[index], shown) for number, index in enumerate(device_indices)]


def host_memory() -> Memory:
    """What the host's processes can still take without swapping."""
    memory = psutil.virtual_memory()
    return Memory(memory.available, memory.total)


def card_source(number: int, device: Device, shown: Sequence[Card]) -> Source:
    """A card by HIP and, if it is among those `shown`, by sysfs: the less of both counts. Raises HipError."""
    pci_id = pci_id_of(device)
    card = card_at(shown, pci_id)
    if card is None:
        return Source(number, pci_id, lambda: _by_hip(device))
    hip = HipWord(device.memory)

    def read() -> Memory:
        try:
            used_bytes, total_bytes = card.memory()
        except OSError:
            return _by_hip(device)
        reading = hip.at(time.monotonic(), used_bytes)
        free_bytes = min(reading.free_bytes, total_bytes - used_bytes)
        return Memory(free_bytes, min(reading.total_bytes, total_bytes))

    return Source(number, card.pci_id, read)


def _by_hip(device: Device) -> Memory:
    reading = device.memory()
    return Memory(reading.free_bytes, reading.total_bytes)


def pci_id_of(device: Device) -> str:
    """Where HIP says the device is, "0000:03:00.0"; its last digit may be another in truth. Raises HipError."""
    properties = check(hip().hipGetDeviceProperties(device.index), f"hipGetDeviceProperties of {device}")
    return f"{properties.pciDomainID:04x}:{properties.pciBusID:02x}:{properties.pciDeviceID:02x}.0"
