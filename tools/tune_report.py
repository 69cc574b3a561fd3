"""A sweep for people and for programs: the table, CSV and JSON, and a page of HTML that needs nothing else."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, TextIO

from rich.table import Table

from rocline.tools.tune_cells import GIB, Cell, Choice, Outcome, hashes
from rocline.tools.tune_forecast import Forecast
from rocline.tools.tune_picture import draw
from rocline.tools.tune_results import FORMAT

SHOWN_DIGITS = 8  # of a hash
_SPEEDS = ("ttft_s", "prefill_tokens_per_s")


@dataclass(frozen=True)
class Report:
    """
    outcomes     that there are so far
    choice       None where the sweep did not end, or its cells gave different outputs
    error        why there is no recommendation; empty if there is one
    work         what all cells have in common, as the results file has it
    environment  as rocline bench's reports have it
    command      words of the command line
    """

    outcomes: Sequence[Outcome]
    choice: Choice | None
    error: str
    floor_bytes: int
    work: Mapping[str, Any]
    environment: Mapping[str, Any]
    command: Sequence[str]

    @property
    def has_speeds(self) -> bool:
        """How fast a wrong answer came is nobody's business, and which one is wrong is not known."""
        return len(hashes(self.outcomes)) < 2

    @property
    def recommended(self) -> Outcome | None:
        return self.choice.outcome if self.choice else None

    def in_order(self) -> list[Outcome]:
        return sorted(self.outcomes, key=lambda outcome: outcome.cell)

    def note(self, outcome: Outcome) -> str:
        if not outcome.is_done:
            return f"{outcome.status}: {outcome.note}"
        if self.recommended and self.recommended.cell == outcome.cell:
            return "recommended"
        return self.choice.faults.get(outcome.cell, "") if self.choice else ""

    def rows(self) -> list[dict[str, Any]]:
        """Of all cells, as data; None is not known."""
        rows = []
        for outcome in self.in_order():
            card, n_bytes = outcome.least_headroom or (None, None)
            row = asdict(outcome) | dict.fromkeys(() if self.has_speeds else _SPEEDS)
            del row["min_headroom_bytes"]
            least = {"min_headroom_bytes": n_bytes, "min_headroom_card": card}
            rows.append(row | least | {"note": self.note(outcome)})
        return rows

    def write_csv(self, out: TextIO) -> None:
        _write_csv(out, self.rows())

    def write_json(self, out: TextIO) -> None:
        cells = [
            row | {"min_headroom_bytes_by_card": outcome.min_headroom_bytes}
            for row, outcome in zip(self.rows(), self.in_order(), strict=True)
        ]
        whole = {
            "rocline_tune": FORMAT,
            "work": self.work,
            "environment": self.environment,
            "command": self.command,
            "min_headroom_floor_bytes": self.floor_bytes,
            "cells": cells,
            "recommended": self.recommended.cell._asdict() if self.recommended else None,
            "output_sha256": next(iter(hashes(self.outcomes)), None) if self.has_speeds else None,
            "error": self.error or None,
        }
        print(json.dumps(whole, indent=2), file=out)

    def table(self) -> Table:
        """For a terminal."""
        table = _table(*(name for name, _ in _COLUMNS))
        for outcome in self.in_order():
            table.add_row(*self._cells(outcome))
        return table

    def _cells(self, outcome: Outcome) -> list[str]:
        return [show(self, outcome) for _, show in _COLUMNS]

    def page(self) -> str:
        """HTML with the pictures in it."""
        rows = "\n".join(self._html_row(outcome) for outcome in self.in_order())
        heads = "".join(f"<th>{name}</th>" for name, _ in _COLUMNS)
        picture = draw(self.in_order(), self.recommended, self.floor_bytes) if self.has_speeds and self.outcomes else ""
        facts = {name: self.work[name] for name in ("model", "prompt_tokens", "output_tokens", "seed")}
        settings = ", ".join(f"{name} = {value}" for name, value in self.work["settings"].items())
        facts |= {"headroom floor": f"{self.floor_bytes / GIB:g} GiB", "settings": settings or "the defaults"}
        facts |= self.environment
        listed = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
        return _PAGE.format(
            verdict=escape(self.verdict()),
            kind="good" if self.recommended else "bad",
            picture=picture,
            heads=heads,
            rows=rows,
            caption=CAPTION,
            command=escape(shlex.join(self.command)),
            facts=listed,
        )

    def verdict(self) -> str:
        """In a sentence."""
        if not self.recommended:
            return f"No recommendation: {self.error}"
        outcome = self.recommended
        card, n_bytes = outcome.least_headroom or ("", 0)
        return (
            f"Recommended: {outcome.cell}: TTFT {outcome.ttft_s:,.2f} s, {outcome.prefill_tokens_per_s:,.2f} token/s, "
            f"at least {n_bytes / GIB:.2f} GiB free (card {card})"
        )

    def _html_row(self, outcome: Outcome) -> str:
        kind = "chosen" if outcome == self.recommended else "" if outcome.is_done else "lost"
        cells = "".join(f"<td>{escape(text)}</td>" for text in self._cells(outcome))
        return f'<tr class="{kind}">{cells}</tr>'


def _speed(report: Report, value: float | None) -> str:
    return f"{value:,.2f}" if value is not None and report.has_speeds else ""


def _least(outcome: Outcome) -> tuple[str, str]:
    """(card, GiB)"""
    if not outcome.least_headroom:
        return "", ""
    card, n_bytes = outcome.least_headroom
    return card, f"{n_bytes / GIB:.2f}"


_COLUMNS = (
    ("chunk", lambda report, outcome: f"{outcome.chunk_rows:,}"),
    ("arena", lambda report, outcome: f"{outcome.arena_gib:g}"),
    ("TTFT s", lambda report, outcome: _speed(report, outcome.ttft_s)),
    ("token/s", lambda report, outcome: _speed(report, outcome.prefill_tokens_per_s)),
    ("free", lambda report, outcome: _least(outcome)[1]),
    ("card", lambda report, outcome: _least(outcome)[0]),
    ("full", lambda report, outcome: f"{outcome.arena_share:.0%}" if outcome.arena_share is not None else ""),
    ("allocs", lambda report, outcome: "" if outcome.device_allocs is None else str(outcome.device_allocs)),
    ("hash", lambda report, outcome: (outcome.output_sha256 or "")[:SHOWN_DIGITS]),
    ("note", lambda report, outcome: report.note(outcome)),
)
CAPTION = "arena in GiB of each stage; free: the least GiB of any card at any time; full: the arena's high-water mark"


# Without running anything


def forecast_table(cells: Sequence[Cell], forecasts: Mapping[Cell, Forecast]) -> Table:
    table = _table("chunk", "arena", "planned", "free", "modelled token/s", "note")
    for cell in cells:
        forecast = forecasts[cell]
        sizes = [_gib(forecast.planned_arena_bytes), _gib(forecast.headroom_bytes)]
        rate = "" if forecast.modelled_tokens_per_s is None else f"{forecast.modelled_tokens_per_s:,.0f}"
        table.add_row(f"{cell.chunk_rows:,}", f"{cell.arena_gib:g}", *sizes, rate, forecast_note(forecast))
    return table


FORECAST_CAPTION = (
    "GiB: arena of each stage; planned: what the largest needs; free: on the fullest card, with the arena"
)


def forecast_note(forecast: Forecast) -> str:
    return f"refused: {forecast.refused}" if forecast.refused else forecast.note


def write_forecasts(out: TextIO, cells: Sequence[Cell], forecasts: Mapping[Cell, Forecast], as_json: bool) -> None:
    rows = [cell._asdict() | asdict(forecasts[cell]) for cell in cells]
    if as_json:
        print(json.dumps({"rocline_tune_dry_run": FORMAT, "cells": rows}, indent=2), file=out)
    else:
        _write_csv(out, rows)


def _write_csv(out: TextIO, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        writer = csv.DictWriter(out, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _gib(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / GIB:.2f}"


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2))
    for title in titles:
        is_text = title == "note"
        table.add_column(title, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>rocline tune</title>
<style>
body {{ font: 15px/1.5 sans-serif; color: #222; max-width: 1000px; margin: 24px auto; padding: 0 16px }}
h1 {{ font-size: 22px }} h2 {{ font-size: 17px; margin-top: 28px }}
.verdict {{ padding: 10px 14px; border-left: 5px solid; background: #f6f7f8 }}
.good {{ border-color: #3b8f4b }} .bad {{ border-color: #c0392b }}
svg {{ max-width: 100%; height: auto }}
table {{ border-collapse: collapse; font-size: 13px }}
th, td {{ padding: 4px 10px; border-bottom: 1px solid #dde0e3; text-align: right; vertical-align: top }}
th:last-child, td:last-child {{ text-align: left }}
.small {{ color: #666; font-size: 13px }}
.chosen td {{ background: #e6f3e8; font-weight: bold }} .lost td {{ color: #888 }}
pre {{ background: #f6f7f8; padding: 10px 14px; white-space: pre-wrap; overflow-wrap: anywhere }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; font-size: 13px }}
dt {{ color: #666 }} dd {{ margin: 0; overflow-wrap: anywhere }}
</style></head><body>
<h1>Chunk size and arena of rocline</h1>
<p class="verdict {kind}">{verdict}</p>
{picture}
<h2>Cells</h2>
<table><thead><tr>{heads}</tr></thead><tbody>
{rows}
</tbody></table>
<p class="small">{caption}</p>
<h2>How this was measured</h2>
<pre>{command}</pre>
<dl>
{facts}
</dl>
</body></html>
"""
