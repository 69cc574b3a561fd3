"""The cells of a grid, one after the other: which are left, in what order, and what is told of them meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rocline.tools.load_protocols import Talk, now
from rocline.tools.tune_cells import GIB, Cell, Outcome, best_ttft_s, hashes
from rocline.tools.tune_forecast import Forecast, by_promise
from rocline.tools.tune_results import Results


class RunCell(Protocol):
    """limit_s: of the TTFT, after which the cell is hopeless; None: none. Raises KeyboardInterrupt."""

    def __call__(self, cell: Cell, limit_s: float | None) -> Outcome: ...


def sweep(
    cells: Sequence[Cell],
    results: Results,
    run_cell: RunCell,
    forecast_of: Callable[[Cell], Forecast],
    talk: Talk,
    *,
    hopeless_factor: float = 0.0,
    retries_failed: bool = False,
) -> None:
    """Fill the results with the cells that they lack, the likely-bad ones last.

    hopeless_factor  times the best TTFT so far are a cell's limit; 0: it has none
    retries_failed   run cells again that are there without figures

    Raises OSError if a result cannot be kept, TraceError as forecast_of, and KeyboardInterrupt. The results are good
    all the same.
    """
    known = results.outcomes
    left = [cell for cell in cells if cell not in known or (retries_failed and not known[cell].is_done)]
    if len(left) < len(cells):
        talk.say(f"{len(cells) - len(left)} of {len(cells)} cells are in {results.path}")
    forecasts = {cell: forecast_of(cell) for cell in left}
    for number, cell in enumerate(by_promise(left, forecasts), 1):
        forecast = forecasts[cell]
        talk.say(f"cell {number} of {len(left)}: {cell}{_told(forecast)}")
        if forecast.refused:
            outcome = Outcome(
                chunk_rows=cell.chunk_rows,
                arena_gib=cell.arena_gib,
                status="refused",
                note=forecast.refused,
                started=now(),
            )
        else:
            best_s = best_ttft_s(known.values())
            outcome = run_cell(cell, hopeless_factor * best_s if hopeless_factor and best_s else None)
        results.add(outcome)
        _tell(outcome, results, talk)


def _told(forecast: Forecast) -> str:
    words = [forecast.note] if forecast.note else []
    if forecast.headroom_bytes is not None and not forecast.refused:
        words.append(f"{forecast.headroom_bytes / GIB:.2f} GiB free by the plan")
    return f" ({'; '.join(words)})" if words else ""


def _tell(outcome: Outcome, results: Results, talk: Talk) -> None:
    if not outcome.is_done:
        talk.say(f"  {outcome.status}: {outcome.note}")
    elif len(hashes(results.outcomes.values())) > 1:
        talk.say(f"  ANOTHER OUTPUT than before: {outcome.output_sha256}")
    else:
        talk.say(f"  TTFT {outcome.ttft_s:,.2f} s, {outcome.prefill_tokens_per_s:,.2f} token/s")
