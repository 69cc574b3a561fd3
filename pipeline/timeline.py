"""What each stage did when: recorded as it runs, kept in files, and where the idle time went.

Intervals are rows of one numpy array (INTERVAL). Of one stage they may nest: a decode step runs between two layers
of a chunk.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count, pairwise
from pathlib import Path
from struct import Struct

import numpy as np
from numpy.typing import NDArray

CAPACITY = 1 << 17  # of each stage: 4 MiB, more than an hour of decode steps of 30 ms


class Kind(IntEnum):
    PREFILL = 0
    DECODE = 1
    VERIFY = 2
    COPY = 3
    WAIT = 4  # for a copy


WORK = (Kind.PREFILL, Kind.DECODE, Kind.VERIFY)

# Times are time.monotonic_ns. `job` numbers chunks and decode steps, `visit` a stage's own visits from 0.
_TYPES = {"start_ns": "i8", "end_ns": "i8", "job": "i8", "rows": "i4", "stage": "i2", "visit": "i1", "kind": "i1"}
INTERVAL = np.dtype(list(_TYPES.items()))
COLUMNS = tuple(_TYPES)  # of a file
Intervals = NDArray[np.void]

_RECORD = Struct("=qqqihbb")  # an INTERVAL


class TimelineError(ValueError):
    """A file that holds no timeline; the message says where and why."""


class Timeline:
    """The latest intervals of each stage. A stage has one writing thread; anyone may read at any time.

    capacity  intervals kept of each stage; older ones make room
    """

    def __init__(self, n_stages: int, capacity: int = CAPACITY) -> None:
        self._rings = [_Ring(capacity) for _ in range(n_stages)]

    def record(self, start_ns: int, end_ns: int, stage: int, visit: int, kind: Kind, job: int, rows: int) -> None:
        """Add an interval that has ended. Takes no lock and no memory."""
        ring = self._rings[stage]
        place = ring.n_recorded % ring.capacity * _RECORD.size
        _RECORD.pack_into(ring.data, place, start_ns, end_ns, job, rows, stage, visit, kind)
        ring.n_recorded += 1

    def intervals(self) -> Intervals:
        """A copy of what is kept, by start. Begins where every stage's record is whole."""
        parts = [ring.newest() for ring in self._rings]
        # Recorded at their ends: what is lost of a full ring ended before its oldest did.
        lost = [part["end_ns"][0] for ring, part in zip(self._rings, parts, strict=True) if ring.is_full and len(part)]
        found = np.concatenate(parts)
        found = found[found["start_ns"] >= max(lost, default=np.iinfo(np.int64).min)]
        return found[np.argsort(found["start_ns"], kind="stable")]


class _Ring:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.data = bytearray(capacity * _RECORD.size)
        self.n_recorded = 0

    @property
    def is_full(self) -> bool:
        return self.n_recorded >= self.capacity

    def newest(self) -> Intervals:
        """By end, without those that may have been overwritten while they were read."""
        stop = self.n_recorded
        rows = np.frombuffer(bytes(self.data), INTERVAL)
        first = max(0, self.n_recorded + 1 - self.capacity)  # one more is perhaps half written
        return rows[np.arange(min(first, stop), stop) % self.capacity]


# Files


def save(intervals: Intervals, path: Path) -> None:
    """Write a timeline: one JSON object where the name ends in .json, else CSV."""
    rows = ([*row.tolist()[:-1], Kind(row["kind"]).name.lower()] for row in intervals)
    with path.open("w", encoding="utf-8", newline="") as out:
        if path.suffix == ".json":
            json.dump({"columns": COLUMNS, "intervals": list(rows)}, out)
        else:
            csv.writer(out, lineterminator="\n").writerows([COLUMNS, *rows])


def load(path: Path) -> Intervals:
    """Read a timeline that save() wrote, by start. Raises TimelineError, OSError."""
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            header, lines = list(content["columns"]), list(content["intervals"])
        else:
            with path.open(encoding="utf-8", newline="") as file:
                header, *lines = list(csv.reader(file)) or [[]]
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise TimelineError(f"{path}: no timeline: {error!r}") from error
    if tuple(header) != COLUMNS:
        raise TimelineError(f"{path}: no timeline: its columns are {header}; want {', '.join(COLUMNS)}")
    if not lines:
        raise TimelineError(f"{path}: a timeline without intervals; record one while the engine works")
    found = np.array([_parsed(path, number, line) for number, line in enumerate(lines, 1)], INTERVAL)
    return found[np.argsort(found["start_ns"], kind="stable")]


def _parsed(path: Path, number: int, line: list[str | int]) -> tuple[int, ...]:
    try:
        *numbers, kind = line
        start_ns, end_ns, job, rows, stage, visit = (int(str(value)) for value in numbers)
        row = (start_ns, end_ns, job, rows, stage, visit, Kind[str(kind).upper()])
    except (ValueError, KeyError, TypeError) as error:
        raise TimelineError(f"{path}: interval {number}, {line}: {error!r}") from error
    limits = (2**63, 2**63, 2**63, 2**31, 2**15, 2**7)
    if start_ns > end_ns or not all(0 <= value < limit for value, limit in zip(row, limits, strict=False)):
        raise TimelineError(f"{path}: interval {number}, {line}: a value out of range, or an end before its start")
    return row


# Where the time went


@dataclass(frozen=True)
class StageTime:
    """A stage's time from the first start to the last end on any stage, in ns; the five parts add up to it.

    busy       in prefill, decode and verify steps
    transport  copying, or waiting for a copy, while nothing else ran
    fill       before the stage's first interval and after its last
    halo_tail  between the last chunk that came with all its rows and the last that came with those of the halo
    imbalance  other gaps: there was work, on a slower stage or on its way
    """

    stage: int
    busy: int
    transport: int
    fill: int
    halo_tail: int
    imbalance: int

    @property
    def total(self) -> int:
        return self.busy + self.transport + self.fill + self.halo_tail + self.imbalance

    def shares(self) -> dict[str, float]:
        """The parts of the whole, in the order that is shown."""
        parts = {
            "busy": self.busy,
            "fill": self.fill,
            "imbalance": self.imbalance,
            "halo tail": self.halo_tail,
            "transport": self.transport,
        }
        return {name: part / max(self.total, 1) for name, part in parts.items()}


def all_stages(split: Sequence[StageTime]) -> StageTime:
    """The times of all stages added up; its stage is -1."""
    parts = ("busy", "transport", "fill", "halo_tail", "imbalance")
    return StageTime(-1, *(sum(getattr(time, part) for time in split) for part in parts))


def idle_split(intervals: Intervals, n_stages: int = 0) -> list[StageTime]:
    """Where each stage's time went. n_stages counts more than those seen where some did nothing at all."""
    begin, end = int(intervals["start_ns"].min()), int(intervals["end_ns"].max())
    halo = _halo_places(intervals)
    out = []
    for stage in range(max(n_stages, int(intervals["stage"].max()) + 1)):
        mine = intervals[intervals["stage"] == stage]
        if not len(mine):
            out.append(StageTime(stage, 0, 0, end - begin, 0, 0))
            continue
        busy = _covered(mine[np.isin(mine["kind"], WORK)])
        covered = _covered(mine)
        first, last = int(covered[0, 0]), int(covered[-1, 1])
        gaps = np.stack([covered[:-1, 1], covered[1:, 0]], axis=1)
        tail_from, tail_to = _halo_tail(mine, halo, first)
        in_tail = _length(np.clip(gaps, tail_from, tail_to))
        fill = (first - begin) + (end - last)
        transport = _length(covered) - _length(busy)
        out.append(StageTime(stage, _length(busy), transport, fill, in_tail, _length(gaps) - in_tail))
    return out


def _covered(intervals: Intervals) -> NDArray[np.int64]:
    """[n, 2] what intervals cover: from, to; ascending, no two of them touching."""
    order = np.argsort(intervals["start_ns"], kind="stable")
    starts, ends = intervals["start_ns"][order], np.maximum.accumulate(intervals["end_ns"][order])
    opens = np.ones(len(starts), bool)
    opens[1:] = starts[1:] > ends[:-1]
    closes = np.roll(opens, -1)  # each run ends where the next one opens
    return np.stack([starts[opens], ends[closes]], axis=1)


def _length(spans: NDArray[np.int64]) -> int:
    return int((spans[:, 1] - spans[:, 0]).sum())


def _halo_places(intervals: Intervals) -> set[tuple[int, int]]:
    """(stage, visit) where chunks come with the rows of the halo alone (design.md section 5).

    Some come shorter than they began there, or most do not come at all.
    """
    prefill = intervals[intervals["kind"] == Kind.PREFILL]
    prefill = prefill[np.argsort(prefill["start_ns"], kind="stable")]
    if not len(prefill):
        return set()
    _, first, job_of = np.unique(prefill["job"], return_index=True, return_inverse=True)
    place_of = np.stack([prefill["stage"], prefill["visit"]], axis=1)
    places, began_at = np.unique(place_of[first], axis=0, return_counts=True)
    # Where a record begins in the middle, jobs under way seem to begin anywhere: they are not judged.
    judged = (place_of[first] == places[began_at.argmax()]).all(axis=1)
    shorter = prefill["rows"] < prefill["rows"][first][job_of]
    out = set()
    for stage, visit in np.unique(place_of, axis=0):
        here = (place_of == (stage, visit)).all(axis=1)
        came = np.zeros(len(first), bool)
        came[job_of[here]] = True
        came &= judged
        due = judged & (first <= first[came].max(initial=-1))  # what began no later than the last that came
        if (shorter & here).any() or 2 * came.sum() < due.sum():
            out.add((int(stage), int(visit)))
    return out


def _halo_tail(mine: Intervals, halo: set[tuple[int, int]], first: int) -> tuple[int, int]:
    """From the end of a stage's last whole chunk to the end of its last halo rows."""
    from_ns, to_ns = first, first
    for visit in np.unique(mine["visit"]):
        prefill = mine[(mine["visit"] == visit) & (mine["kind"] == Kind.PREFILL)]
        last = int(prefill["end_ns"].max(initial=first))
        if (int(mine["stage"][0]), int(visit)) in halo:
            to_ns = max(to_ns, last)
        else:
            from_ns = max(from_ns, last)
    return from_ns, to_ns


# The picture

_LEFT, _WIDTH, _ROW, _PITCH, _TOP = 76, 1000, 26, 34, 86
_SPLIT_X, _COLUMN = _LEFT + _WIDTH + 8, 74  # the table at the right
_LEVELS = 8  # of what intervals below a pixel cover of it
_LABEL_PX = 34  # least width for a job's number inside


@dataclass(frozen=True)
class _Tone:
    """How one sort of interval is called and drawn; later ones lie above earlier ones.

    from_y  where in its row it begins; steps lie in the lower half, so that the chunk around them is seen
    """

    name: str
    colour: str
    kind: Kind
    visits: range = range(128)
    from_y: int = 0


_TONES = (
    _Tone("wait for a copy", "#d7c9e8", Kind.WAIT),
    _Tone("copy", "#8d6cb8", Kind.COPY),
    _Tone("prefill, first visit", "#2b6ca3", Kind.PREFILL, range(1)),
    _Tone("prefill, second visit", "#7db8de", Kind.PREFILL, range(1, 128)),
    _Tone("decode", "#e07b28", Kind.DECODE, from_y=_ROW // 2),
    _Tone("verify", "#a8431a", Kind.VERIFY, from_y=_ROW // 2),
)


def draw(intervals: Intervals, n_stages: int = 0) -> str:
    """A picture as one SVG: a row a stage with its intervals over time, and its idle_split beside it.

    What is narrower than a pixel is merged: the fainter the column, the less of it is covered.
    """
    split = idle_split(intervals, n_stages)
    begin, end = int(intervals["start_ns"].min()), int(intervals["end_ns"].max())
    scale = _WIDTH / max(end - begin, 1)
    bottom = _TOP + _PITCH * len(split)
    width, height = _SPLIT_X + _COLUMN * 5 + 16, bottom + 34
    body = [_axis(end - begin, scale, bottom), _legend(intervals)]
    for row in split:
        top = _TOP + _PITCH * row.stage
        body.append(f'<text class="end" x="{_LEFT - 8}" y="{top + 17}">stage {row.stage}</text>')
        body.append(f'<rect class="idle" x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_ROW}"/>')
        mine = intervals[intervals["stage"] == row.stage]
        for tone in _TONES:
            sort = mine[(mine["kind"] == tone.kind) & np.isin(mine["visit"], tone.visits)]
            body += _bars(sort, tone, begin, scale, top)
        body.append(_split_row([f"{share:.1%}" for share in row.shares().values()], top + 17))
    total = all_stages(split).shares()
    body += [_split_row(total, _TOP - 12), _split_row([f"{share:.1%}" for share in total.values()], bottom + 17)]
    body.append(f'<text class="end" x="{_SPLIT_X + 8}" y="{bottom + 17}">all</text>')
    title = f"{len(split)} stages, {len(intervals):,} intervals in {_time(end - begin)}"
    text = "\n".join(filter(None, body))
    return _SVG.format(width=width, height=height, left=_LEFT, title=title, body=text)


def _bars(sort: Intervals, tone: _Tone, begin: int, scale: float, top: int) -> list[str]:
    """Intervals of one stage and tone."""
    from_px = (sort["start_ns"] - begin) * scale
    to_px = (sort["end_ns"] - begin) * scale
    wide = to_px - from_px >= 1
    top, height = top + tone.from_y, _ROW - tone.from_y
    out = [_columns(from_px[~wide], to_px[~wide], tone.colour, top, height)]
    for x, size, interval in zip(_LEFT + from_px[wide], (to_px - from_px)[wide], sort[wide].tolist(), strict=True):
        start_ns, end_ns, job, rows, *_ = interval
        lasted = f"{_time(end_ns - start_ns)} from {_time(start_ns - begin)} on"
        gap = 0.6 if size > _LABEL_PX / 4 else 0  # tells one chunk from the next
        out.append(
            f'<rect x="{x:.2f}" y="{top}" width="{size - gap:.2f}" height="{height}" fill="{tone.colour}">'
            f"<title>{tone.name}, job {job}, {rows:,} rows: {lasted}</title></rect>"
        )
        if size >= _LABEL_PX:
            y = top + height / 2 + 4
            out.append(f'<text class="in" x="{x + size / 2:.1f}" y="{y:.0f}">{job}</text>')
    return out


def _columns(from_px: NDArray[np.float64], to_px: NDArray[np.float64], colour: str, top: int, height: int) -> str:
    """Intervals below a pixel, added up by pixel: one path for each level of cover."""
    covered = np.zeros(_WIDTH + 2)
    column = from_px.astype(np.int64)
    inside = np.minimum(to_px, column + 1) - from_px
    np.add.at(covered, column, np.maximum(inside, 1e-9))  # what lasts no time at all shows too
    np.add.at(covered, column + 1, to_px - from_px - inside)
    levels = np.clip(np.rint(covered * _LEVELS), covered > 0, _LEVELS).astype(int)
    paths: dict[int, list[str]] = {}
    for start, stop in pairwise(np.flatnonzero(np.diff(levels, prepend=0, append=0))):
        if level := int(levels[start]):
            paths.setdefault(level, []).append(f"M{_LEFT + start} {top}h{stop - start}v{height}h{start - stop}z")
    return "".join(
        f'<path fill="{colour}" fill-opacity="{0.2 + 0.8 * level / _LEVELS:.2f}" d="{"".join(parts)}"/>'
        for level, parts in sorted(paths.items())
    )


def _axis(span_ns: int, scale: float, bottom: int) -> str:
    step_ns = _tick_ns(span_ns)
    out = []
    for at_ns in range(0, span_ns + 1, step_ns):
        x = _LEFT + at_ns * scale
        out.append(f'<path class="grid" d="M{x:.2f} {_TOP - 6}V{bottom}"/>')
        out.append(f'<text class="mid" x="{x:.1f}" y="{bottom + 16}">{_time(at_ns)}</text>')
    return "".join(out)


def _tick_ns(span_ns: int) -> int:
    """1, 2 or 5 times a power of ten, at most ten of them."""
    return next(step for power in count() for digit in (1, 2, 5) if (step := digit * 10**power) * 10 >= span_ns)


def _time(ns: int) -> str:
    for unit, unit_ns in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if ns >= unit_ns:
            return f"{ns / unit_ns:,.4g} {unit}"
    return f"{ns} ns" if ns else "0"


def _legend(intervals: Intervals) -> str:
    x, out = _LEFT, []
    for tone in _TONES:
        if ((intervals["kind"] == tone.kind) & np.isin(intervals["visit"], tone.visits)).any():
            out.append(f'<rect x="{x}" y="44" width="12" height="12" fill="{tone.colour}"/>')
            out.append(f'<text x="{x + 18}" y="54">{tone.name}</text>')
            x += 42 + 7 * len(tone.name)
    out.append(f'<rect class="idle" x="{x}" y="44" width="12" height="12"/><text x="{x + 18}" y="54">idle</text>')
    return "".join(out)


def _split_row(cells: Iterable[str], y: int) -> str:
    return "".join(
        f'<text class="end" x="{_SPLIT_X + _COLUMN * at}" y="{y}">{cell}</text>' for at, cell in enumerate(cells, 1)
    )


_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<style>
text {{ font: 12px sans-serif; fill: #333 }} .title {{ font-size: 15px; font-weight: bold }}
.end {{ text-anchor: end }} .mid {{ text-anchor: middle }}
.in {{ text-anchor: middle; font-size: 10px; fill: #fff; pointer-events: none }}
.idle {{ fill: #eef0f2 }} .grid {{ stroke: #c8ccd0; stroke-dasharray: 2 3 }}
</style>
<rect width="{width}" height="{height}" fill="#fff"/>
<text class="title" x="{left}" y="26">{title}</text>
{body}
</svg>
"""
