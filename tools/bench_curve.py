"""The rate of cold prefills against the rows that are through, as one SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from rocline.tools.bench_lines import Curve
from rocline.tools.picture import svg, tick_step

_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 40, 44, 46
_WIDTH, _HEIGHT = 760, 320
_LEGEND = 19  # a line
_COLOURS = ("#2b6ca3", "#d1711f", "#3b8f4b", "#8659a5", "#b8405e", "#6b6b6b", "#1d9a9a", "#96801c")


def draw(curves: Sequence[Curve]) -> str:
    """Solid: rows over the time since submit. Dashed: the same since the point before. An open end: cut off there."""
    most_rows = 1.02 * max(curve.points[-1][0] for curve in curves)
    most_rate = 1.1 * max(rate for curve in curves for _, rate in [*_since_start(curve), *_since_last(curve)])
    body = [*_axes(most_rows, most_rate)]
    for number, curve in enumerate(curves):
        colour, name = _COLOURS[number % len(_COLOURS)], _name(curve)

        def places(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
            return [(_LEFT + _WIDTH * rows / most_rows, _y(rate, most_rate)) for rows, rate in points]

        solid, dashed = places(_since_start(curve)), places(_since_last(curve))
        body += [_line(dashed, colour, "last"), _line(solid, colour, "all")]
        for (x, y), (rows, seconds) in zip(solid, curve.points, strict=True):
            tip = escape(f"{name}: {rows:,} rows after {seconds:,.2f} s, {rows / seconds:,.0f} rows/s")
            is_end = not curve.whole and (rows, seconds) == curve.points[-1]
            look = f'r="4.5" fill="#fff" stroke="{colour}"' if is_end else f'r="3" fill="{colour}"'
            body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" {look}><title>{tip}</title></circle>')
    legend = [(_name(curve), "all", _COLOURS[n % len(_COLOURS)]) for n, curve in enumerate(curves)]
    legend.append(("of the rows since the point before; an open end is a run cut off there", "last", "#333"))
    for number, (name, kind, colour) in enumerate(legend):
        y = _TOP + _HEIGHT + _BOTTOM + _LEGEND * number
        body.append(f'<path class="{kind}" stroke="{colour}" d="M{_LEFT} {y}h24"/>')
        body.append(f'<text x="{_LEFT + 32}" y="{y + 4}">{escape(name)}</text>')
    title = "Cold prefill: rows a second against rows done"
    return svg(_LEFT + _WIDTH + _RIGHT, y + 20, _LEFT, title, "\n".join(body), _STYLE)


def _name(curve: Curve) -> str:
    labels = curve.labels
    return (
        f"{curve.prompt_tokens:,} tokens, {labels['prefill']}, chunks of {labels['chunk_rows']:,}, "
        f"{labels['weights']}, commit {(labels['commit'] or 'unknown')[:9]}"
    )


def _since_start(curve: Curve) -> list[tuple[float, float]]:
    return [(rows, rows / seconds) for rows, seconds in curve.points]


def _since_last(curve: Curve) -> list[tuple[float, float]]:
    """Rates at the middle of what they are of."""
    points = [(0, 0.0), *curve.points]
    return [
        ((rows + before) / 2, (rows - before) / (seconds - before_s))
        for (before, before_s), (rows, seconds) in pairwise(points)
    ]


def _y(rate: float, most_rate: float) -> float:
    return _TOP + _HEIGHT * (1 - rate / most_rate)


def _line(places: Sequence[tuple[float, float]], colour: str, kind: str) -> str:
    return f'<polyline class="{kind}" stroke="{colour}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'


def _axes(most_rows: float, most_rate: float) -> list[str]:
    out = [f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}"/>']
    step = tick_step(most_rate, 6)
    for n in range(int(most_rate / step) + 1):
        y = _y(n * step, most_rate)
        out.append(f'<path class="grid" d="M{_LEFT} {y:.1f}h{_WIDTH}"/>')
        out.append(f'<text class="end" x="{_LEFT - 8}" y="{y + 4:.1f}">{n * step:,.10g}</text>')
    step = tick_step(most_rows, 8)
    for n in range(int(most_rows / step) + 1):
        x = _LEFT + _WIDTH * n * step / most_rows
        out.append(f'<path class="grid" d="M{x:.1f} {_TOP + _HEIGHT}v5"/>')
        out.append(f'<text class="mid" x="{x:.1f}" y="{_TOP + _HEIGHT + 19}">{n * step:,.10g}</text>')
    return out


_STYLE = """\
.frame { fill: none; stroke: #bbb } .grid { stroke: #dde0e3; fill: none }
.all { fill: none; stroke-width: 2 } .last { fill: none; stroke-width: 1; stroke-dasharray: 4 3 }"""
