"""A cell of `rocline tune`'s grid, what became of it, and which cell an owner should serve with (docs/tune.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

GIB = 1 << 30
EDGE_SHARE = 0.95  # of its slab: an arena that was once fuller has no room for another prompt's shapes
SAME_RATE = 0.99  # of the fastest: nearer ones are told apart by nothing but noise

Status = Literal["done", "failed", "ended early", "refused"]


class Cell(NamedTuple):
    chunk_rows: int
    arena_gib: float

    def __str__(self) -> str:
        return f"chunk {self.chunk_rows:,}, arena {self.arena_gib:g} GiB"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a cell. All that follows `took_s` is of cells that are done.

    note                    why the cell is not done
    started, took_s         ISO time, and seconds with the server's start and end
    prefill_tokens_per_s    prompt tokens / TTFT
    min_headroom_bytes      by card: the least of ten looks a second since the server was loaded; None: never read
    device_allocs           of device memory by arenas while the request ran
    arena_high_water_bytes  of the device whose arenas were the fullest, and what share of their slabs that is
    output_sha256           of the output ids
    """

    chunk_rows: int
    arena_gib: float
    status: Status
    note: str = ""
    started: str = ""
    took_s: float = 0.0
    ttft_s: float | None = None
    prefill_tokens_per_s: float | None = None
    min_headroom_bytes: dict[str, int | None] = field(default_factory=dict)
    device_allocs: int | None = None
    arena_high_water_bytes: int | None = None
    arena_share: float | None = None
    output_sha256: str | None = None

    @property
    def cell(self) -> Cell:
        return Cell(self.chunk_rows, self.arena_gib)

    @property
    def is_done(self) -> bool:
        return self.status == "done"

    @property
    def least_headroom(self) -> tuple[str, int] | None:
        """(card, bytes) of the card with least; None without cards, and where one was never read."""
        known = [(card, n_bytes) for card, n_bytes in self.min_headroom_bytes.items() if n_bytes is not None]
        if not known or len(known) < len(self.min_headroom_bytes):
            return None
        return min(known, key=lambda each: each[1])


def best_ttft_s(outcomes: Iterable[Outcome]) -> float | None:
    return min((outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None), default=None)


def hashes(outcomes: Iterable[Outcome]) -> dict[str, list[Cell]]:
    """Cells by the SHA-256 of their output. More than one entry: something computes other bits than it must."""
    found: dict[str, list[Cell]] = {}
    for outcome in outcomes:
        if outcome.output_sha256:
            found.setdefault(outcome.output_sha256, []).append(outcome.cell)
    return found


@dataclass(frozen=True)
class Choice:
    """The cell to serve with, None if there is none; and by cell that is done, why it was not even considered."""

    outcome: Outcome | None
    faults: dict[Cell, str]


def choose(outcomes: Sequence[Outcome], floor_bytes: int) -> Choice:
    """The fastest of the cells without a fault; of those within 1 % of it, the one with most headroom."""
    done = [outcome for outcome in outcomes if outcome.is_done]
    faults = {outcome.cell: fault for outcome in done if (fault := _fault(outcome, done, floor_bytes))}
    sound = [outcome for outcome in done if outcome.cell not in faults]
    if not sound:
        return Choice(None, faults)
    most = max(map(_rate, sound))
    near = [outcome for outcome in sound if _rate(outcome) >= SAME_RATE * most]
    return Choice(max(near, key=lambda outcome: (_headroom(outcome), _rate(outcome))), faults)


def _rate(outcome: Outcome) -> float:
    return outcome.prefill_tokens_per_s or 0.0


def _headroom(outcome: Outcome) -> int:
    return outcome.least_headroom[1] if outcome.least_headroom else 0


def _fault(outcome: Outcome, done: Sequence[Outcome], floor_bytes: int) -> str:
    """Why nobody should serve with this cell, however fast it is; empty if there is no reason."""
    if outcome.device_allocs:
        return f"{outcome.device_allocs} device allocations while serving, must be 0"
    if outcome.least_headroom is None:
        unread = [card for card, n_bytes in outcome.min_headroom_bytes.items() if n_bytes is None]
        return f"headroom of {', '.join(unread) or 'the cards'} not known"
    if outcome.least_headroom[1] < floor_bytes:
        return "below the floor"
    smaller = [o for o in done if o.chunk_rows == outcome.chunk_rows and o.arena_gib < outcome.arena_gib]
    if outcome.arena_share is not None and outcome.arena_share > EDGE_SHARE and not smaller:
        return f"its arena was {outcome.arena_share:.0%} full, and no smaller one worked"
    return ""


def advice(outcomes: Sequence[Outcome], choice: Choice, floor_bytes: int) -> str:
    """What failed and what to do, where no cell can be recommended."""
    done = [outcome for outcome in outcomes if outcome.is_done]
    if not done:
        return "no cell is done, the notes say why; see rocline plan and rocline doctor"
    floor, least = f"{floor_bytes / GIB:.2f} GiB", [o.least_headroom[1] for o in done if o.least_headroom]
    if least and max(least) < floor_bytes:
        return f"no cell leaves {floor} free (most {max(least) / GIB:.2f}); add a smaller --chunk-rows or --arena-gib"
    reasons = "; ".join(dict.fromkeys(f"{cell}: {fault}" for cell, fault in choice.faults.items()))
    at_edge = any("full" in fault for fault in choice.faults.values())
    what = "add a larger --arena-gib" if at_edge else "mend that first"
    return f"no cell can be recommended ({reasons}); {what}"
