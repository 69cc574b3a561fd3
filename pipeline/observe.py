"""What the layers of an idle engine make of one prompt: for measuring, not for serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import TextConfig
from rocline.engine.engram_ahead import GatheredLate
from rocline.engine.handoff import HandOff, RowKind, Rows, RowSpan, reach_for
from rocline.engine.layers.head import embed_rows, lookback_rows
from rocline.engine.pages import Pages
from rocline.pipeline.assembly import Assembly

SEQUENCE = -1  # no request has this number

Seen = Callable[[int, str, Tensor], None]  # layer, field, a copy on the host


def observe(
    config: TextConfig,
    assembly: Assembly,
    path: Sequence[tuple[int, int]],
    pages: Pages,
    prompt_ids: Sequence[int],
    seen: Seen,
) -> None:
    """Run a prompt through every visit as one chunk, in mode `full`, by the calling thread.

    path  (stage, which of its visits) in order

    No request may run meanwhile. Raises ArenaFull for more rows than the stages' chunks have, and OutOfPages.
    """
    table: list[int] = []
    pages.grow([(table, len(prompt_ids))])
    spans = (RowSpan(SEQUENCE, 0, len(prompt_ids), RowKind.PREFILL, reach_for(config, "full", len(prompt_ids)), 0),)
    ids = {SEQUENCE: prompt_ids}
    weights = assembly.weights[path[0][0]]

    def fetched(layer: int, field: str, value: Tensor) -> None:
        seen(layer, field, scratch.fetch(value).clone())

    def begun() -> HandOff:
        tables = {n: of for each in assembly.weights for n, of in each.engram_tables.items()}
        lookback_i32 = lookback_rows(config, spans, ids)
        late = GatheredLate(tables, lookback_i32) if tables and assembly.homes[0].gathers_on_host else None
        return embed_rows(config, weights.embed_bf16, spans, ids, late, lookback_i32)

    for stage in assembly.stages:
        stage.open(SEQUENCE, table)
    rows: Rows | None = None
    try:
        for number, visit in path:
            sent, made = rows, assembly.stages[number].run(rows or begun, visit, record=fetched)
            assembly.fence()
            if sent:
                sent.release()
            rows = made
    finally:
        if rows:
            rows.release()
        for stage in assembly.stages:
            stage.close(SEQUENCE)
        assembly.fence()
        pages.give_back(table)
