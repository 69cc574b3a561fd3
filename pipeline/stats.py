"""One moment of an engine, for metrics, logs and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rocline.arena.stats import Stats as ArenaStats


class State(Enum):
    """starting -> ready -> draining -> closed; failed: a stage failed or hangs, only a restart helps."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True)
class StageStats:
    """busy: at work now; busy_s since the start, of decode steps by every eighth; waiting: jobs at the stage's door."""

    stage: int
    device: int
    layers: tuple[int, ...]
    busy: bool
    busy_s: float
    steps: int
    waiting: int
    arena: ArenaStats


@dataclass(frozen=True)
class MemoryStats:
    """Memory of one device, as pipeline/headroom.py sees it, whoever uses it.

    device          of the placement; None: the host, which all stages on it share
    pci_id          of the card, as sysfs spells it; empty for the host
    free_bytes      now; None where it cannot be read, for which `error` has the reason
    min_free_bytes  the least since the start; min_free_at_s is the time.time() of it
    """

    device: int | None
    pci_id: str
    free_bytes: int | None
    total_bytes: int
    min_free_bytes: int | None
    min_free_at_s: float | None
    error: str


@dataclass(frozen=True)
class Stats:
    """Requests by phase, counters since the start, pages, and each stage.

    ended        requests by how they ended: "stop", "length", "abort", "failed"
    prompt_rows  through their layers, re-runs of resumed requests included
    """

    state: State
    reason: str
    uptime_s: float
    queued: int
    prefilling: int
    decoding: int
    paused: int
    running_limit: int
    queue_limit: int
    ended: dict[str, int]
    prompt_rows: int
    output_tokens: int
    engram_wait_s: float
    n_pages: int
    free_pages: int
    page_positions: int
    stages: tuple[StageStats, ...]
    memory: tuple[MemoryStats, ...]

    @property
    def min_headroom_bytes(self) -> int | None:
        """The least that any of them had free since the start; None if nothing could ever be read."""
        lows = [memory.min_free_bytes for memory in self.memory if memory.min_free_bytes is not None]
        return min(lows, default=None)
