"""Rate and headroom of a sweep's cells against the chunk size, a line an arena size, as one SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count

from rocline.tools.tune_cells import GIB, Cell, Outcome

_LEFT, _RIGHT, _TOP = 84, 150, 34
_WIDTH, _HEIGHT = 640, 220
_EDGE = 40  # from the frame to the first and the last chunk size
_DODGE = 7  # between points of neighbouring arena sizes, whose rates hardly differ
_STRIP = 16  # a line of crosses
_AXIS = 48  # under the crosses, for chunk sizes
_COLOURS = ("#2b6ca3", "#d1711f", "#3b8f4b", "#8659a5", "#b8405e", "#6b6b6b", "#1d9a9a", "#96801c")

Value = Callable[[Outcome], float | None]


def colour_of(arenas: Sequence[float], arena_gib: float) -> str:
    return _COLOURS[arenas.index(arena_gib) % len(_COLOURS)]


@dataclass(frozen=True)
class _Scale:
    """Chunk sizes and values of one panel to places in the picture."""

    chunks: Sequence[int]
    arenas: Sequence[float]
    most: float
    top: float

    def x(self, cell: Cell) -> float:
        first, last = math.log2(self.chunks[0]), math.log2(self.chunks[-1])
        share = (math.log2(cell.chunk_rows) - first) / (last - first) if last > first else 0.5
        shift = self.arenas.index(cell.arena_gib) - (len(self.arenas) - 1) / 2
        return _LEFT + _EDGE + share * (_WIDTH - 2 * _EDGE) + shift * _DODGE

    def y(self, value: float) -> float:
        return self.top + _HEIGHT * (1 - value / self.most)

    @property
    def bottom(self) -> float:
        return self.top + _HEIGHT


def draw(outcomes: Sequence[Outcome], recommended: Outcome | None, floor_bytes: int) -> str:
    """Two panels of the same cells. Crosses under a panel: cells that are not done, with the reason as a tooltip."""
    arenas = sorted({outcome.arena_gib for outcome in outcomes})
    chunks = sorted({outcome.chunk_rows for outcome in outcomes})
    lost = [outcome for outcome in outcomes if not outcome.is_done]
    n_strips = max((sum(o.chunk_rows == chunk for o in lost) for chunk in chunks), default=0)
    pitch = _TOP + _HEIGHT + n_strips * _STRIP + _AXIS
    body = []
    panels: tuple[tuple[str, Value, float | None], ...] = (
        ("Cold prefill, token/s", lambda outcome: outcome.prefill_tokens_per_s, None),
        ("Minimum headroom of the fullest card, GiB", _headroom_gib, floor_bytes / GIB),
    )
    for number, (title, value, floor) in enumerate(panels):
        values = [at for outcome in outcomes if (at := value(outcome)) is not None]
        scale = _Scale(chunks, arenas, 1.15 * max([*values, floor or 0.0, 1e-3]), _TOP + number * pitch)
        body += _frame(scale, title, n_strips)
        body += _lines(scale, outcomes, value, recommended)
        body += _crosses(scale, lost)
        if floor is not None:
            y = scale.y(floor)
            body.append(f'<path class="floor" d="M{_LEFT} {y:.1f}h{_WIDTH}"/>')
            body.append(f'<text x="{_LEFT + _WIDTH + 6}" y="{y + 4:.1f}">floor {floor:g}</text>')
    body += _legend(arenas, bool(lost))
    return _SVG.format(width=_LEFT + _WIDTH + _RIGHT, height=round(2 * pitch), body="\n".join(body))


def _headroom_gib(outcome: Outcome) -> float | None:
    return outcome.least_headroom[1] / GIB if outcome.least_headroom else None


def _frame(scale: _Scale, title: str, n_strips: int) -> list[str]:
    out = [
        f'<text class="title" x="{_LEFT}" y="{scale.top - 10:.0f}">{title}</text>',
        f'<rect class="frame" x="{_LEFT}" y="{scale.top:.0f}" width="{_WIDTH}" height="{_HEIGHT}"/>',
    ]
    step = _step(scale.most, 6)
    for n in range(int(scale.most / step) + 1):
        y = scale.y(n * step)
        out.append(f'<path class="grid" d="M{_LEFT} {y:.1f}h{_WIDTH}"/>')
        out.append(f'<text class="end" x="{_LEFT - 8}" y="{y + 4:.1f}">{n * step:,g}</text>')
    y = scale.bottom + n_strips * _STRIP + 22
    middle = scale.arenas[0], scale.arenas[-1]
    for chunk in scale.chunks:
        x = sum(scale.x(Cell(chunk, arena)) for arena in middle) / 2
        out.append(f'<text class="mid" x="{x:.1f}" y="{y:.0f}">{chunk:,}</text>')
    out.append(f'<text x="{_LEFT + _WIDTH + 6}" y="{y:.0f}">chunk rows</text>')
    if n_strips:
        out.append(f'<text class="end" x="{_LEFT - 8}" y="{scale.bottom + 19:.0f}">not done</text>')
    return out


def _lines(scale: _Scale, outcomes: Sequence[Outcome], value: Value, recommended: Outcome | None) -> list[str]:
    out = []
    for arena in scale.arenas:
        line = sorted((o for o in outcomes if o.arena_gib == arena), key=lambda o: o.chunk_rows)
        points = [(o, scale.x(o.cell), scale.y(at)) for o in line if (at := value(o)) is not None]
        colour = colour_of(scale.arenas, arena)
        places = " ".join(f"{x:.1f},{y:.1f}" for _, x, y in points)
        out.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{places}"/>')
        for outcome, x, y in points:
            tip = f"<title>{escape(f'{outcome.cell}: {value(outcome):,.2f}')}</title>"
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">{tip}</circle>')
            if recommended and outcome.cell == recommended.cell:
                out.append(f'<circle class="chosen" cx="{x:.1f}" cy="{y:.1f}" r="8"/>')
    return out


def _crosses(scale: _Scale, lost: Sequence[Outcome]) -> list[str]:
    """Of one chunk size one above the other."""
    out = []
    for chunk in scale.chunks:
        of_chunk = sorted((o for o in lost if o.chunk_rows == chunk), key=lambda o: o.arena_gib)
        for place, outcome in enumerate(of_chunk):
            x, y = scale.x(outcome.cell), scale.bottom + (place + 0.9) * _STRIP
            tip = f"<title>{escape(f'{outcome.cell}: {outcome.status}: {outcome.note}')}</title>"
            colour = colour_of(scale.arenas, outcome.arena_gib)
            out.append(f'<path class="cross" stroke="{colour}" d="{_cross(x, y)}">{tip}</path>')
    return out


def _cross(x: float, y: float) -> str:
    return f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"


def _legend(arenas: Sequence[float], has_lost: bool) -> list[str]:
    x, y, out = _LEFT + _WIDTH + 14, _TOP + 8, []
    for arena in arenas:
        out.append(f'<path stroke="{colour_of(arenas, arena)}" stroke-width="3" d="M{x} {y}h18"/>')
        out.append(f'<text x="{x + 24}" y="{y + 4}">arena {arena:g} GiB</text>')
        y += 20
    out.append(f'<circle class="chosen" cx="{x + 9}" cy="{y}" r="7"/><text x="{x + 24}" y="{y + 4}">recommended</text>')
    if has_lost:
        y += 20
        out.append(f'<path class="cross" stroke="#333" d="{_cross(x + 9, y)}"/>')
        out.append(f'<text x="{x + 24}" y="{y + 4}">not done</text>')
    return out


def _step(most: float, n_ticks: int) -> float:
    """1, 2 or 5 times a power of ten, so that at most n_ticks of them fit."""
    steps = (digit * 10.0**power for power in count(-6) for digit in (1, 2, 5))
    return next(step for step in steps if step * n_ticks >= most)


_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<style>
text {{ font: 12px sans-serif; fill: #333; paint-order: stroke; stroke: #fff; stroke-width: 3px }}
.title {{ font-size: 14px; font-weight: bold }}
.end {{ text-anchor: end }} .mid {{ text-anchor: middle }}
.frame {{ fill: none; stroke: #bbb }} .grid {{ stroke: #dde0e3; fill: none }}
.floor {{ stroke: #c0392b; stroke-dasharray: 6 4; fill: none }}
.cross {{ stroke-width: 2.5; fill: none }} .chosen {{ fill: none; stroke: #111; stroke-width: 1.5 }}
</style>
<rect width="{width}" height="{height}" fill="#fff"/>
{body}
</svg>"""
