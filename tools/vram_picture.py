"""Free memory of cards over time, as one SVG that needs nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from rocline.pipeline.card_watch import GIB, CardWatch, Least
from rocline.tools.picture import svg, tick_step

MOST_BUCKETS = 2000


class _Bucket(NamedTuple):
    """Looks beside each other. begins: whether the card could not be read right before."""

    at_s: float
    low_bytes: int
    high_bytes: int
    begins: bool


class Curve:
    """Free memory over time in at most MOST_BUCKETS pieces, of which the lowest and highest look are kept."""

    def __init__(self) -> None:
        self.buckets: list[_Bucket] = []
        self.is_lost = True  # at the last look
        self._width_s = 0.0

    def add(self, at_s: float, free_bytes: int | None) -> None:
        """None: the card could not be read."""
        if free_bytes is None:
            self.is_lost = True
            return
        new = _Bucket(at_s, free_bytes, free_bytes, self.is_lost)
        self.is_lost = False
        if not self.buckets or new.begins or at_s >= self.buckets[-1].at_s + self._width_s:
            self.buckets.append(new)
        else:
            self.buckets[-1] = _merged(self.buckets[-1], new)
        if len(self.buckets) > MOST_BUCKETS:
            self._halve()

    def _halve(self) -> None:
        span_s = self.buckets[-1].at_s - self.buckets[0].at_s
        self._width_s = max(2 * self._width_s, 2 * span_s / MOST_BUCKETS)
        merged: list[_Bucket] = []
        for bucket in self.buckets:
            # A gap is dropped only where there are more than could be seen.
            if merged and bucket.at_s < merged[-1].at_s + self._width_s:
                merged[-1] = _merged(merged[-1], bucket)
            else:
                merged.append(bucket)
        self.buckets = merged


def _merged(first: _Bucket, then: _Bucket) -> _Bucket:
    low, high = min(first.low_bytes, then.low_bytes), max(first.high_bytes, then.high_bytes)
    return _Bucket(first.at_s, low, high, first.begins)


_LEFT, _WIDTH, _HEIGHT, _PITCH, _TOP, _RIGHT = 76, 1000, 120, 176, 84, 86
_COARSE, _LEAST = "#2b6ca3", "#c0392b"


@dataclass(frozen=True)
class _Scale:
    """Seconds and bytes of one card's panel to places in the picture."""

    span_s: float
    most_bytes: float
    top: int

    def x(self, at_s: float) -> float:
        return _LEFT + _WIDTH * at_s / self.span_s

    def y(self, n_bytes: float) -> float:
        return self.top + _HEIGHT * (1 - n_bytes / self.most_bytes)


def draw(watches: Sequence[CardWatch], curves: Sequence[Curve], began_s: float, span_s: float) -> str:
    """A panel a card: free memory, its minimum, and the minimum that a look every 5 s would have found.

    began_s  time.time() of the first look
    """
    body = []
    for number, (watch, curve) in enumerate(zip(watches, curves, strict=True)):
        most = max([watch.floor_bytes, *(bucket.high_bytes for bucket in curve.buckets)])
        scale = _Scale(max(span_s, 1e-3), max(1.15 * most, 1), _TOP + _PITCH * number)
        body += _panel(watch, curve, scale, began_s)
    height = _TOP + _PITCH * len(watches)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began_s))
    title = f"Free memory of {len(watches)} card{'s' * (len(watches) != 1)}, {_elapsed(span_s)} from {began}"
    width = _LEFT + _WIDTH + _RIGHT
    return svg(width, height, _LEFT, title, "\n".join([_legend(), *body]), _STYLE)


def _panel(watch: CardWatch, curve: Curve, scale: _Scale, began_s: float) -> list[str]:
    out = [f'<text class="card" x="{_LEFT}" y="{scale.top - 8}">{watch.card.pci_id} ({watch.card.name}), '
           f"{watch.total_bytes / GIB:.2f} GiB</text>"]  # fmt: skip
    out += _axes(scale)
    pieces = _pieces(curve)
    out += _gaps(pieces, curve.is_lost, scale)
    out += [_band(piece, scale) for piece in pieces]
    if watch.floor_bytes:
        y = scale.y(watch.floor_bytes)
        out.append(f'<path class="floor" d="M{_LEFT} {y:.1f}h{_WIDTH}"/>')
        out.append(f'<text x="{_LEFT + _WIDTH + 6}" y="{y + 4:.1f}">floor {watch.floor_bytes / GIB:.2f}</text>')
    if watch.coarse_least and watch.coarse_least != watch.least:
        out += _mark(watch.coarse_least, scale, began_s, _COARSE, above=True)
    if watch.least:
        out += _mark(watch.least, scale, began_s, _LEAST, above=False)
    return out


def _axes(scale: _Scale) -> list[str]:
    top, bottom = scale.top, scale.top + _HEIGHT
    out = [f'<rect class="frame" x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}"/>']
    step = tick_step(scale.most_bytes / GIB, 4)
    for n in range(int(scale.most_bytes / GIB / step) + 1):
        y = scale.y(n * step * GIB)
        out.append(f'<path class="grid" d="M{_LEFT} {y:.1f}h{_WIDTH}"/>')
        out.append(f'<text class="end" x="{_LEFT - 8}" y="{y + 4:.1f}">{n * step:g}{" GiB" * (n == 0)}</text>')
    step_s = tick_step(scale.span_s, 10)
    for n in range(int(scale.span_s / step_s) + 1):
        x = scale.x(n * step_s)
        out.append(f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>')
        out.append(f'<text class="mid" x="{x:.1f}" y="{bottom + 16}">{_elapsed(n * step_s)}</text>')
    return out


def _pieces(curve: Curve) -> list[list[_Bucket]]:
    pieces: list[list[_Bucket]] = []
    for bucket in curve.buckets:
        if bucket.begins or not pieces:
            pieces.append([])
        pieces[-1].append(bucket)
    return pieces


def _gaps(pieces: Sequence[Sequence[_Bucket]], is_lost: bool, scale: _Scale) -> list[str]:
    """Where the card could not be read."""
    gaps = [(first[-1].at_s, then[0].at_s) for first, then in pairwise(pieces)]
    if is_lost:
        gaps.append((pieces[-1][-1].at_s if pieces else 0.0, scale.span_s))
    out = []
    for from_s, to_s in gaps:
        x, width = scale.x(from_s), max(scale.x(to_s) - scale.x(from_s), 1.0)
        out.append(f'<rect class="gap" x="{x:.1f}" y="{scale.top}" width="{width:.1f}" height="{_HEIGHT}"/>')
        if width > 80:
            out.append(f'<text class="mid" x="{x + width / 2:.1f}" y="{scale.top + 18}">not read</text>')
    return out


def _band(piece: Sequence[_Bucket], scale: _Scale) -> str:
    """From the highest looks to the lowest, and a line along the lowest."""
    lows = " ".join(f"{scale.x(b.at_s):.1f},{scale.y(b.low_bytes):.1f}" for b in piece)
    highs = " ".join(f"{scale.x(b.at_s):.1f},{scale.y(b.high_bytes):.1f}" for b in reversed(piece))
    return f'<polygon class="band" points="{lows} {highs}"/><polyline class="low" points="{lows}"/>'


def _mark(least: Least, scale: _Scale, began_s: float, colour: str, above: bool) -> list[str]:
    x, y = scale.x(least.at_s), scale.y(least.free_bytes)
    text_y = y - 9 if above or y > scale.top + _HEIGHT - 20 else y + 18
    anchor = "start" if x < _LEFT + _WIDTH / 2 else "end"
    label = f"{least.free_bytes / GIB:.3f} GiB at {clock(began_s + least.at_s)}"
    return [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>',
        f'<text x="{x + (8 if anchor == "start" else -8):.1f}" y="{text_y:.1f}" fill="{colour}" '
        f'style="text-anchor:{anchor};fill:{colour}">{label}</text>',
    ]


def _legend() -> str:
    out, x = [], _LEFT
    for colour, text in ((_LEAST, "minimum"), (_COARSE, "minimum of a look every 5 s")):
        out.append(f'<circle cx="{x + 5}" cy="46" r="4" fill="{colour}"/><text x="{x + 16}" y="50">{text}</text>')
        x += 34 + 7 * len(text)
    return "".join(out)


def _elapsed(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds else "0"
    hours, rest = divmod(round(seconds), 3600)
    minutes = f"{rest // 60}:{rest % 60:02}" if not hours else f"{hours}:{rest // 60:02}:{rest % 60:02}"
    return f"{minutes} {'h' if hours else 'min'}"


def clock(at_s: float) -> str:
    """The time of day of a time.time(), to a tenth of a second."""
    return time.strftime("%H:%M:%S", time.localtime(at_s)) + f".{int(at_s * 10) % 10}"


_STYLE = """\
text { paint-order: stroke; stroke: #fff; stroke-width: 3px }
.card { font-weight: bold }
.frame { fill: none; stroke: #bbb } .grid { stroke: #dde0e3; fill: none }
.band { fill: #7db8de; fill-opacity: 0.5 } .low { fill: none; stroke: #2b6ca3 }
.gap { fill: #eef0f2 } .floor { stroke: #c0392b; stroke-dasharray: 6 4; fill: none }"""
