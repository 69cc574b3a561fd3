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
    """busy: at work now; busy_s since the start; waiting: jobs at the stage's door."""

    stage: int
    device: int
    layers: tuple[int, ...]
    busy: bool
    busy_s: float
    steps: int
    waiting: int
    arena: ArenaStats


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
