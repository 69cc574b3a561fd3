"""The plan as one picture: a bar a card with what fills its memory, and the layers that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rocline.pipeline.plan import GIB, counted
from rocline.tools.picture import svg, tick_step

# In the order of the bar, from the left.
PARTS = {
    "weights": ("weights", "#52616b"),
    "kv": ("kv pages and rings", "#2f9e6e"),
    "prepared": ("prepared keys", "#93cfae"),
    "graphs": ("captured steps", "#8d6cb8"),
    "arena": ("arena", "#e07b28"),
    "runtime": ("runtime, assumed", "#cdb35a"),
    "headroom": ("headroom", "#e6eaed"),
}
VISITS = (("layers of the first visit", "#2b6ca3"), ("of the second", "#7db8de"))  # as in a timeline

_LEFT, _WIDTH, _RIGHT, _TOP = 96, 960, 130, 96
_BAR, _CELL, _PITCH = 26, 17, 68
_LAYER_PX, _SIDE_PX, _GAP_PX = 21, 36, 8


def draw(report: Mapping[str, Any]) -> str:
    """An SVG of plan_report's figures. Headroom is what is left at the right; it must reach over the floor's line."""
    devices = report["devices"]
    px = _WIDTH / max(device["capacity_bytes"] for device in devices)
    body = [_legend(), _axis(px, _TOP + _PITCH * len(devices))]
    for number, device in enumerate(devices):
        top = _TOP + _PITCH * number
        body += _bar(number, device, report["headroom_floor_bytes"], px, top)
        body += _layers([stage for stage in report["stages"] if stage["device"] == number], top + _BAR + 5)
    title = (
        f"Memory of {counted(len(devices), 'card')}: {report['placement']}, context {report['context']:,}, "
        f"{report['kv_tokens']:,} tokens admitted, chunks of {report['chunk_rows']:,}, drafts {report['drafts']}"
    )
    height = _TOP + _PITCH * len(devices) + 26
    return svg(_LEFT + _WIDTH + _RIGHT, height, _LEFT, title, "\n".join(body), _STYLE)


def _bar(number: int, device: Mapping[str, Any], floor_bytes: int, px: float, top: int) -> list[str]:
    capacity = device["capacity_bytes"]
    out = [
        f'<text class="end card" x="{_LEFT - 8}" y="{top + 12}">device {number}</text>',
        f'<text class="end" x="{_LEFT - 8}" y="{top + 25}">{capacity / GIB:g} GiB</text>',
    ]
    x = float(_LEFT)
    for part, (name, colour) in PARTS.items():
        n_bytes = device[f"{part}_bytes"]
        out.append(
            f'<rect class="{part}" x="{x:.2f}" y="{top}" width="{n_bytes * px:.2f}" height="{_BAR}" fill="{colour}">'
            f"<title>{name}: {n_bytes / GIB:.2f} GiB, {n_bytes:,} bytes</title></rect>"
        )
        if n_bytes * px > 60 and part != "headroom":  # which stands at the right
            at = x + n_bytes * px / 2
            out.append(f'<text class="mid in" x="{at:.1f}" y="{top + 17}">{n_bytes / GIB:.2f}</text>')
        x += n_bytes * px
    floor_x = _LEFT + (capacity - floor_bytes) * px
    out.append(f'<path class="floor" d="M{floor_x:.2f} {top - 3}v{_BAR + 6}"/>')
    out.append(f'<text x="{_LEFT + _WIDTH + 8}" y="{top + 17}">{device["headroom_bytes"] / GIB:.2f} GiB free</text>')
    return out


def _layers(stages: Sequence[Mapping[str, Any]], top: int) -> list[str]:
    """Every layer of a card in the order that its stages run them, a gap between visits."""
    out, x = [], _LEFT
    for stage in stages:
        for at, visit in enumerate(stage["visits"]):
            colour = VISITS[at][1]
            for layer in visit["layers"]:
                out += _cell(
                    x, top, _LAYER_PX, str(layer), f'fill="{colour}"', f"stage {stage['stage']}, layer {layer}"
                )
                x += _LAYER_PX
            for side in sorted(set(visit["kv_sides"]) - set(visit["layers"])):
                what = f"stage {stage['stage']}, key/value side of layer {side}"
                out += _cell(x, top, _SIDE_PX, f"kv {side}", f'class="side" stroke="{colour}"', what)
                x += _SIDE_PX
            x += _GAP_PX
    return out


def _cell(x: int, top: int, width: int, label: str, look: str, what: str) -> list[str]:
    ink = "dark" if "side" in look else "in"
    return [
        f'<rect x="{x}" y="{top}" width="{width - 1}" height="{_CELL}" {look}><title>{what}</title></rect>',
        f'<text class="mid small {ink}" x="{x + (width - 1) / 2:.1f}" y="{top + 12}">{label}</text>',
    ]


def _axis(px: float, bottom: int) -> str:
    most_gib = _WIDTH / px / GIB
    step = tick_step(most_gib, 10)
    out = []
    for n in range(int(most_gib / step) + 1):
        x = _LEFT + n * step * GIB * px
        out.append(f'<path class="grid" d="M{x:.1f} {_TOP - 6}V{bottom}"/>')
        out.append(f'<text class="mid" x="{x:.1f}" y="{bottom + 14}">{n * step:g}{" GiB" * (n == 0)}</text>')
    return "".join(out)


def _legend() -> str:
    rows = [list(PARTS.values()), list(VISITS)]
    out = []
    for row, entries in enumerate(rows):
        x, y = _LEFT, 40 + 20 * row
        for name, colour in entries:
            out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
            out.append(f'<text x="{x + 18}" y="{y + 10}">{name}</text>')
            x += 40 + 7 * len(name)
    out.append(f'<path class="floor" d="M{x + 6} {y - 1}v14"/><text x="{x + 18}" y="{y + 10}">floor of headroom</text>')
    return "".join(out)


_STYLE = """\
.card { font-weight: bold } .small { font-size: 10px } .in { fill: #fff } .dark { fill: #333 }
.grid { stroke: #dde0e3; fill: none } .side { fill: #fff } .floor { stroke: #c0392b; stroke-width: 2; fill: none }"""
