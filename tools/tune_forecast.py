"""What the memory plan, recorded traces and the cost model say of a cell before it is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rocline.arena.replay import replay
from rocline.arena.trace import TraceEvent, read_csv
from rocline.engine.config import ModelConfig
from rocline.pipeline.forecast import prefill, prefill_rate, reproduces_published
from rocline.pipeline.options import Options
from rocline.pipeline.placement import CHOICE_RATES, PlacementError
from rocline.pipeline.plan import GIB, HEADROOM_FLOOR_BYTES, Plan, Request, make_plan
from rocline.tools.tune_cells import Cell

_FLOOR_GIB = HEADROOM_FLOOR_BYTES / GIB


@dataclass(frozen=True)
class Forecast:
    """Of one cell. None: not known, as on the CPU.

    planned_arena_bytes    of the stage that wants the largest
    headroom_bytes         of the fullest device, with the cell's arenas in place of the planned ones
    modelled_tokens_per_s  cold prefill by the cost model; nobody has measured it
    refused                why a server would not start
    is_too_small           the arena is smaller than planned, or a trace did not fit
    note                   what speaks against the cell, though it may work
    """

    planned_arena_bytes: int | None = None
    headroom_bytes: int | None = None
    modelled_tokens_per_s: float | None = None
    refused: str = ""
    is_too_small: bool = False
    note: str = ""


class Forecaster:
    """
    device_bytes   memory of each card, all of it free
    traces         folder of files as `rocline trace record` writes them; None: none
    plans          plan the memory of cards; without a plan no cell is refused
    with_rates     model the speed too
    """

    def __init__(
        self,
        config: ModelConfig,
        options: Options,
        prompt_tokens: int,
        device_bytes: int,
        traces: Path | None = None,
        plans: bool = True,
        with_rates: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._config, self._options, self._prompt_tokens = config, options, prompt_tokens
        self._device_bytes, self._traces = device_bytes, traces
        self._plans_memory = plans and options.device == "hip"
        self._with_rates, self._say = with_rates, say
        self._plans: dict[int, Plan | str] = {}
        self._rates: dict[int, float | None] = {}
        self._events: dict[int, list[list[TraceEvent]]] = {}

    def of(self, cell: Cell) -> Forecast:
        """Raises OSError and TraceError for traces that cannot be read."""
        forecast = self._of_plan(cell) if self._plans_memory else Forecast()
        if self._traces is None or forecast.refused:
            return forecast
        does_fit, note = self._replayed(cell, self._traces)
        note = "; ".join(filter(None, [forecast.note, note]))
        return replace(forecast, is_too_small=forecast.is_too_small or not does_fit, note=note)

    def _of_plan(self, cell: Cell) -> Forecast:
        plan = self._plan(cell.chunk_rows)
        if isinstance(plan, str):
            return Forecast(refused=plan)
        headroom_bytes, device = min((n_bytes, device) for device, n_bytes in enumerate(_headroom(plan, cell)))
        planned_bytes = max(plan.arena_bytes)
        forecast = Forecast(planned_bytes, headroom_bytes, self._rate(plan))
        # As pipeline/assembly.py: a smaller arena than planned is the owner's own risk, a larger one has to fit.
        if headroom_bytes < HEADROOM_FLOOR_BYTES:
            why = f"device {device} would keep {headroom_bytes / GIB:.2f} GiB, a server wants {_FLOOR_GIB:g}"
            return replace(forecast, refused=f"{why}; lower the arena, the context or kv_tokens")
        if cell.arena_gib * GIB < planned_bytes:
            note = f"the plan wants an arena of {planned_bytes / GIB:.2f} GiB"
            return replace(forecast, is_too_small=True, note=note)
        return forecast

    def _plan(self, chunk_rows: int) -> Plan | str:
        """The plan, or why there is none. Made once a chunk size: at the release's size it takes half a minute."""
        if chunk_rows not in self._plans:
            self._say(f"planning for chunks of {chunk_rows:,} rows")
            options, limit = self._options, self._config.text_config.max_position_embeddings
            context = min(options.context or limit, limit)
            request = Request(
                n_devices=options.devices or options.stages,
                device_bytes=self._device_bytes,
                n_stages=options.stages,
                kind=options.placement,
                context=context,
                kv_tokens=options.kv_tokens or 2 * context,
                chunk_rows=chunk_rows,
                drafts="off",
            )
            try:
                self._plans[chunk_rows] = make_plan(self._config, request)
            except PlacementError as error:
                self._plans[chunk_rows] = str(error)
        return self._plans[chunk_rows]

    def _rate(self, plan: Plan) -> float | None:
        chunk_rows = plan.request.chunk_rows
        if not self._with_rates or not reproduces_published():
            return None
        if chunk_rows not in self._rates:
            run = prefill(plan.model, plan.placement, self._prompt_tokens, chunk_rows, CHOICE_RATES)
            self._rates[chunk_rows] = prefill_rate(run, self._prompt_tokens)
        return self._rates[chunk_rows]

    def _replayed(self, cell: Cell, folder: Path) -> tuple[bool, str]:
        """(whether no recorded trace speaks against the arena, what is to be said of them)."""
        if cell.chunk_rows not in self._events:
            files = sorted(folder.glob(f"{self._options.device}-*-chunk{cell.chunk_rows}-stage*.csv"))
            self._events[cell.chunk_rows] = [read_csv(path) for path in files]
        traces = self._events[cell.chunk_rows]
        if not traces:
            return True, f"no trace of chunks of {cell.chunk_rows:,} rows in {folder}"
        reports = [replay(events, int(cell.arena_gib * GIB)) for events in traces]
        failed = [str(stage) for stage, report in enumerate(reports) if report.failures]
        return not failed, f"recorded traces of stages {', '.join(failed)} do not fit the arena" if failed else ""


def _headroom(plan: Plan, cell: Cell) -> Iterable[int]:
    """By device, with the cell's arenas."""
    for device, memory in enumerate(plan.memory):
        n_stages = sum(stage.device == device for stage in plan.placement.stages)
        yield memory.headroom + memory.arena - n_stages * int(cell.arena_gib * GIB)


def by_promise(cells: Sequence[Cell], forecasts: dict[Cell, Forecast]) -> list[Cell]:
    """Likely-bad ones last: those that are refused, before them too small ones, before these by least headroom."""

    def rank(cell: Cell) -> tuple[bool, bool, float, float, int]:
        forecast = forecasts[cell]
        headroom = forecast.headroom_bytes or 0
        return bool(forecast.refused), forecast.is_too_small, -headroom, cell.arena_gib, cell.chunk_rows

    return sorted(cells, key=rank)
