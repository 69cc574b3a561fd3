"""One frame of `rocline top`: lines for a terminal of 80 columns or more, with or without colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rocline.pipeline.card_watch import GIB
from rocline.tools.vram import FLOOR_GIB

WIDE = 100  # columns, from which on there is room for PCI ids
LAYERS_WIDTH, ID_WIDTH = 24, 20
NONE = "-"


@dataclass(frozen=True)
class Bar:
    """Shares of a whole: what is used, the most that was, and a limit that neither should pass."""

    used: float
    most: float = 0.0
    limit: float | None = None

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(8, 40).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        full, was, empty, mark = "#+.|" if options.ascii_only else "█▒·│"
        n_used = min(width, max(round(self.used * width), int(self.used > 0)))
        n_was = max(0, min(width, round(self.most * width)) - n_used)
        cells = [(full, "cyan")] * n_used + [(was, "yellow")] * n_was + [(empty, "dim")] * (width - n_used - n_was)
        if self.limit is not None:
            cells[min(width - 1, int(self.limit * width))] = (mark, "red")
        yield Text.assemble(*cells, no_wrap=True, end="")


@dataclass(frozen=True)
class Frame:
    """top_look.figures, in the console's width and height."""

    figures: Mapping[str, Any]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        figures, lines = self.figures, _head(self.figures)
        for line in lines:
            line.truncate(options.max_width, overflow="crop")  # rich's ellipsis is none of ASCII's characters
        yield from lines
        if not (stages := figures["stages"]):
            yield Text("The engine is not there yet.", "yellow")
            return
        devices, prefills = figures["devices"], figures["prefills"] or []
        tables = [_stages(stages), _devices(devices, options.max_width >= WIDE)]
        room = (options.height or 1000) - len(lines) - len(stages) - len(devices) - len(tables)  # with their headers
        if prefills:
            n_shown = max(1, min(len(prefills), room - 1))
            room -= n_shown + 1
            tables.insert(0, _prefills(prefills, n_shown))
        for table in tables:
            if room >= len(tables):
                yield Text()
            yield table


def _head(figures: Mapping[str, Any]) -> list[Text]:
    state, requests, model = figures["state"], figures["requests"], figures["model"]
    style = "bold green" if state == "ready" else "bold red"
    up = f"  up {elapsed(figures['uptime_s'])}  {model}  {figures['version']}"
    lines = [Text.assemble((figures["url"], "bold"), "  ", (state, style), up)]
    if not requests:
        return lines
    n_running = requests["prefill"] + requests["decode"]
    counts = [f"queued {requests['queued']}/{figures['queue_limit']}"]
    counts += [f"{phase} {requests[phase]}" for phase in ("prefill", "decode", "paused")]
    lines.append(_line("requests", *counts, f"running {n_running}/{figures['running_limit']}"))
    now, mean = figures["tokens_per_s"], figures["tokens_per_s_since_start"]
    rates = (f"in {_rate(now['in'])}", f"out {_rate(now['out'])}")
    lines.append(_line("tokens/s", *rates, f"since start: in {_rate(mean['in'])}", f"out {_rate(mean['out'])}"))
    return [*lines, _line("kv pages", f"{figures['free_pages']:,} of {figures['pages']:,} free")]


def _line(name: str, *words: str) -> Text:
    return Text.assemble((name, "bold"), "  ", "   ".join(words))


def _prefills(prefills: Sequence[Mapping[str, Any]], n_shown: int) -> Table:
    name = "prefill" if n_shown == len(prefills) else f"prefill, {n_shown} of {len(prefills)}"
    table = _table(name, "|", "rows>", "ETA>")
    for each in prefills[:n_shown]:
        bar = Bar(each["rows_done"] / max(each["rows_total"], 1))
        eta = NONE if each["eta_s"] is None else elapsed(each["eta_s"])
        table.add_row(_cut(each["id"], ID_WIDTH), bar, f"{each['rows_done']:,}/{each['rows_total']:,}", eta)
    return table


def _stages(stages: Sequence[Mapping[str, Any]]) -> Table:
    is_told = any(stage["layers"] for stage in stages)
    table = _table("stage>", *(("device>", "layers") if is_told else ()), "|", "busy>", "waiting>")
    for stage in stages:
        about = (_or_none(stage["device"]), _cut(runs(stage["layers"]), LAYERS_WIDTH)) if is_told else ()
        share = stage["busy_share"]
        busy = NONE if share is None else f"{share:.0%}"
        table.add_row(str(stage["stage"]), *about, Bar(share or 0.0), busy, _or_none(stage["waiting"]))
    return table


def _devices(devices: Sequence[Mapping[str, Any]], is_wide: bool) -> Table:
    """GiB. Bars: of the arenas' slabs what is used, and the most that was; of the memory the same, and the floor."""
    card = ("card",) if is_wide else ()
    table = _table("device", *card, "arena|", "used>", "peak>", "slab>", "memory|", "free>", "least>", "of GiB>")
    if not is_wide:
        table.padding = (0, 1, 0, 0)
    for device in devices:
        arena = device["arena"]
        used, peak, slab = arena["used_bytes"], arena["high_water_bytes"], arena["slab_bytes"]
        free, least, total = (device[name] for name in ("free_bytes", "min_free_bytes", "total_bytes"))
        floor = int(FLOOR_GIB * GIB) if device["pci_id"] else None  # of cards, as plans keep it
        is_low = floor is not None and least is not None and least < floor
        table.add_row(
            device["device"],
            *([device["pci_id"] or NONE] if is_wide else ()),
            Bar(_share(used, slab), _share(peak, slab)),
            *map(_gib, (used, peak, slab)),
            Bar(_taken(free, total), _taken(least, total) if free else 0.0, floor and total and _taken(floor, total)),
            _gib(free),
            Text(_gib(least), "bold red" if is_low else ""),
            _gib(total),
        )
    return table


def _share(part: int | None, whole: int | None) -> float:
    return part / whole if part and whole else 0.0


def _taken(free: int | None, whole: int | None) -> float:
    return 0.0 if free is None or not whole else 1 - free / whole


def _table(*names: str) -> Table:
    """Without lines. A name with > heads figures, which end below each other; one with | bars, which make room."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(
            name.rstrip(">|"),
            justify="right" if name.endswith(">") else "left",
            no_wrap=not name.endswith("|"),
            overflow="crop",
        )
    return table


def runs(layers: Sequence[int]) -> str:
    """0-3 26-27 for 0, 1, 2, 3, 26, 27."""
    starts = [layer for before, layer in pairwise([-2, *layers]) if layer != before + 1]
    ends = [layer for layer, after in pairwise([*layers, -2]) if after != layer + 1]
    return " ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in zip(starts, ends, strict=True))


def elapsed(seconds: float) -> str:
    """12.3 s, 4:05, or 1:02:03."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "~"


def _or_none(value: object) -> str:
    return NONE if value is None else str(value)


def _rate(value: float | None) -> str:
    return NONE if value is None else f"{value:,.1f}"


def _gib(n_bytes: int | None) -> str:
    return NONE if n_bytes is None else f"{n_bytes / GIB:.2f}"
