"""A replay as a picture: one HTML file with its SVG inside, nothing loaded from elsewhere."""

import zlib
from html import escape

from rocline.arena.replay import Placement, ReplayReport
from rocline.arena.spans import MIB

WIDTH, MAP_HEIGHT, LINE_HEIGHT, LEFT, GAP = 1200, 640, 160, 90, 40
TICKS = 8
_UNITS = (("ms", 1_000_000), ("us", 1_000), ("ns", 1))


def report_html(report: ReplayReport, title: str) -> str:
    """The page: slab addresses over time since the trace's start, and the largest free span under it.

    A span is coloured by its operator, solid while used, hatched while pending. Takes a report of
    `replay(..., picture=True)`.
    """
    if not report.placements:
        raise ValueError("report_html: the report has no placements; replay a trace that takes, picture=True")
    start_ns = report.placements[0].taken_ns
    end_ns = max(max(place.finished_ns or 0, place.released_ns or 0, place.taken_ns) for place in report.placements)
    end_ns = max(end_ns, report.largest_free[-1][0], start_ns + 1)
    operators = sorted({place.operator for place in report.placements})
    scale = _Scale(start_ns, end_ns, report.slab_bytes)
    height = MAP_HEIGHT + LINE_HEIGHT + 2 * GAP
    body = [
        f'<svg viewBox="0 0 {LEFT + WIDTH + GAP} {height}" xmlns="http://www.w3.org/2000/svg">',
        _patterns(operators),
        *_axes(scale),
        *(_pending(scale, place, end_ns) for place in report.placements if place.released_ns is not None),
        *(_used(scale, place, end_ns) for place in report.placements),
        _largest_free_line(scale, report.largest_free),
        "</svg>",
    ]
    return _PAGE.format(title=escape(title), summary=_summary(report), legend=_legend(operators), svg="\n".join(body))


class _Scale:
    """Trace time and slab offset to picture coordinates."""

    def __init__(self, start_ns: int, end_ns: int, slab_bytes: int) -> None:
        self.start_ns, self.end_ns, self.slab_bytes = start_ns, end_ns, slab_bytes
        span_ns = end_ns - start_ns  # traces of shapes count events, a nanosecond each
        self._unit, self._unit_ns = next(unit for unit in _UNITS if span_ns >= unit[1])

    def time(self, time_ns: int) -> str:
        """Since the start, in the unit that the whole span is read in."""
        n_units = (time_ns - self.start_ns) / self._unit_ns
        return f"{n_units:,.0f} ns" if self._unit == "ns" else f"{n_units:,.3f} {self._unit}"

    def x(self, time_ns: int) -> float:
        return LEFT + WIDTH * (time_ns - self.start_ns) / (self.end_ns - self.start_ns)

    def height(self, n_bytes: int) -> float:
        return MAP_HEIGHT * n_bytes / self.slab_bytes

    def y(self, offset: int) -> float:
        return GAP / 2 + MAP_HEIGHT - self.height(offset)

    def line_y(self, n_bytes: int) -> float:
        return MAP_HEIGHT + 1.5 * GAP + LINE_HEIGHT * (1 - n_bytes / self.slab_bytes)


def _colour(operator: str) -> str:
    # From the name, so that two reports show an operator in one colour.
    number = zlib.crc32(operator.encode())
    return f"hsl({number % 360} {50 + number // 360 % 3 * 15}% {45 + number // 1080 % 3 * 8}%)"


def _rect(scale: _Scale, place: Placement, from_ns: int, to_ns: int, fill: str, state: str) -> str:
    x, top = scale.x(from_ns), scale.y(place.offset + place.size_bytes)
    tip = (
        f"{place.operator or 'no operator'}: {place.size_bytes / MIB:.3f} MiB at {place.offset:#x}, {state} "
        f"{scale.time(from_ns)} to {scale.time(to_ns)}"
    )
    return (
        f'<rect x="{x:.2f}" y="{top:.2f}" width="{max(scale.x(to_ns) - x, 0.2):.2f}" '
        f'height="{max(scale.height(place.size_bytes), 0.2):.2f}" fill="{fill}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def _used(scale: _Scale, place: Placement, end_ns: int) -> str:
    to_ns = end_ns if place.released_ns is None else place.released_ns
    return _rect(scale, place, place.taken_ns, to_ns, _colour(place.operator), "used")


def _pending(scale: _Scale, place: Placement, end_ns: int) -> str:
    assert place.released_ns is not None
    to_ns = end_ns if place.finished_ns is None else place.finished_ns
    if to_ns == place.released_ns:
        return ""
    return _rect(scale, place, place.released_ns, to_ns, f"url(#{_pattern_id(place.operator)})", "pending")


def _pattern_id(operator: str) -> str:
    return f"hatch-{operator.encode().hex()}"


def _patterns(operators: list[str]) -> str:
    hatches = [
        f'<pattern id="{_pattern_id(operator)}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="6" height="6" fill="#fff"/>'
        f'<rect width="2" height="6" fill="{_colour(operator)}"/></pattern>'
        for operator in operators
    ]
    return f"<defs>{''.join(hatches)}</defs>"


def _axes(scale: _Scale) -> list[str]:
    top, line_top = scale.y(scale.slab_bytes), scale.line_y(scale.slab_bytes)
    frame = f'<rect class="frame" x="{LEFT}" width="{WIDTH}"'
    out = [
        f'{frame} y="{top:.1f}" height="{MAP_HEIGHT}"/>',
        f'{frame} y="{line_top:.1f}" height="{LINE_HEIGHT}"/>',
        f'<text x="{LEFT + 6}" y="{line_top + 14:.1f}">largest free span, MiB</text>',
    ]
    for tick in range(TICKS + 1):
        n_bytes = scale.slab_bytes * tick // TICKS
        time_ns = scale.start_ns + (scale.end_ns - scale.start_ns) * tick // TICKS
        mib, since = f"{n_bytes / MIB:,.1f}", scale.time(time_ns)
        out.append(f'<text class="left" x="{LEFT - 6}" y="{scale.y(n_bytes) + 4:.1f}">{mib}</text>')
        if tick % 4 == 0:
            out.append(f'<text class="left" x="{LEFT - 6}" y="{scale.line_y(n_bytes) + 4:.1f}">{mib}</text>')
        out.append(f'<text class="under" x="{scale.x(time_ns):.1f}" y="{scale.line_y(0) + 16:.1f}">{since}</text>')
    return out


def _largest_free_line(scale: _Scale, samples: list[tuple[int, int]]) -> str:
    points: list[str] = []
    last = None
    for time_ns, n_bytes in samples:
        if last is not None and n_bytes != last:  # a step, not a slope
            points.append(f"{scale.x(time_ns):.2f},{scale.line_y(last):.2f}")
        if n_bytes != last:
            points.append(f"{scale.x(time_ns):.2f},{scale.line_y(n_bytes):.2f}")
        last = n_bytes
    points.append(f"{scale.x(scale.end_ns):.2f},{scale.line_y(samples[-1][1]):.2f}")
    return f'<polyline class="largest-free" points="{" ".join(points)}"/>'


def _legend(operators: list[str]) -> str:
    return " ".join(
        f'<span><i style="background:{_colour(operator)}"></i>{escape(operator) or "no operator"}</span>'
        for operator in operators
    )


def _summary(report: ReplayReport) -> str:
    fields = {
        "slab": f"{report.slab_bytes / MIB:,.1f} MiB",
        "takes": f"{report.n_takes:,}",
        "failures": f"{report.failures:,}",
        "waits": f"{report.waits:,} ({report.waited_ns / 1e6:,.2f} ms)",
        "most used": f"{report.high_water_bytes / MIB:,.1f} MiB",
        "most used or pending": f"{report.peak_used_pending_bytes / MIB:,.1f} MiB",
        "largest free, least": f"{report.least_largest_free_bytes / MIB:,.1f} MiB",
        "largest free, end": f"{report.largest_free_bytes / MIB:,.1f} MiB",
        "first failure": escape(report.first_failure) or "none",
    }
    return "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in fields.items())


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px sans-serif; margin: 24px; color: #222 }}
svg {{ width: 100% }} svg text {{ font: 11px sans-serif; fill: #555 }}
.left {{ text-anchor: end }} .under {{ text-anchor: middle }}
.frame {{ fill: none; stroke: #bbb }} .largest-free {{ fill: none; stroke: #b00; stroke-width: 1.5 }}
dl {{ display: grid; grid-template-columns: repeat(4, max-content); gap: 2px 16px }}
dt {{ color: #777 }} dd {{ margin: 0 }}
i {{ display: inline-block; width: 12px; height: 12px; margin-right: 4px }}
</style></head><body>
<h1>{title}</h1>
<dl>{summary}</dl>
<p>{legend} <span>hatched: released, work not finished</span></p>
{svg}
</body></html>
"""
