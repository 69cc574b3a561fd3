"""Decode steps of a stage, captured once and replayed: a visit is one launch of the host's (design.md section 8)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rocline.arena.spans import ArenaFull
from rocline.engine import scratch
from rocline.engine.config import TextConfig
from rocline.engine.engram import EngramTable
from rocline.engine.engram_ahead import TableRows
from rocline.engine.handoff import FreshRows, HandOff, RowKind, RowSpan, reach_for
from rocline.engine.kv_side import closed_by
from rocline.engine.rope_rows import RopeTables
from rocline.engine.routes import StageLayers
from rocline.engine.row_tables import RowTables
from rocline.engine.scratch import StageMemory
from rocline.engine.sequence import SequenceState
from rocline.engine.step_tables import StepPlaces, StepRope, StepSizes, StepTables
from rocline.hip_kernels.binding import shapes_only
from rocline.hip_kernels.graph import Graph, capture
from rocline.hip_kernels.kernel import Kernel, prepare, seen
from rocline.hip_kernels.rows import copy_rows, gather_rows

STEP_ROWS = (1, 2, 4, 8, 16, 32, 64)  # a step has the next larger of these
FIRST_BYTES = 1 << 20  # of the memory that steps are tried in on paper
GROWS = 1.25

Layers = Callable[[int, HandOff, RowTables], HandOff]  # of a visit, by its number
MemoryOf = Callable[[int], StageMemory]  # of so many bytes


class StepRoom(NamedTuple):
    """most_rows of a step; table_width pages that a sequence may have, context its positions."""

    most_rows: int
    table_width: int
    context: int


@dataclass(frozen=True)
class StepEngram:
    """Table rows of a step, at fixed places: engram_ahead.EngramRows while it is captured."""

    layers: Mapping[int, TableRows]

    def take(self, layer: int) -> TableRows:
        return self.layers[layer]

    def pick(self, index_i64: Tensor) -> StepEngram:
        raise RuntimeError("a decode step keeps all of its rows")

    def release(self) -> None:
        pass


@dataclass(frozen=True)
class Step:
    """A captured visit of a number of rows. All tensors lie in the memory that the steps of a stage share.

    inputs, engram  to be filled before it is launched
    made            what it fills; the fresh rows are those of step rows that close a group, all of them here
    """

    tables: StepTables
    tables_u8: Tensor
    places: StepPlaces
    inputs: HandOff
    engram: StepEngram
    made: HandOff
    graph: Graph


class Steps:
    """Of one stage: by visit and number of rows.

    layers     runs a visit's layers
    sequences  of the stage, by number, where `layers` looks them up

    n_bytes of memory are theirs.
    """

    _memory: StageMemory | None

    def __init__(
        self,
        config: TextConfig,
        visits: Sequence[StageLayers],
        rope: RopeTables,
        layers: Layers,
        sequences: dict[int, SequenceState],
    ) -> None:
        self._config, self._visits, self._rope, self._layers = config, visits, StepRope(rope), layers
        self._sequences = sequences
        self._stand_in: Callable[[], SequenceState]
        self._engram_tables: Mapping[int, EngramTable] = {}
        self._steps: dict[tuple[int, int], Step] = {}
        self.n_bytes, self._memory = 0, None  # which they need for as long as they are there
        self._row_counts: list[int] = []

    def capture(
        self,
        memory: StageMemory,
        memory_of: MemoryOf,
        stand_in: Callable[[], SequenceState],
        engram_tables: Mapping[int, EngramTable],
        room: StepRoom,
    ) -> None:
        """Capture all visits. Nothing else may be queued on the stage's stream meanwhile.

        memory         of the stage: whose place it is
        memory_of      makes the memory that all of the steps run in, one at a time
        stand_in       makes the state of a sequence of one row, which owns nothing
        engram_tables  by layer, of the layers that run here

        Raises HipError, CompileError.
        """
        self._stand_in, self._engram_tables = stand_in, engram_tables
        most = min(room.most_rows, STEP_ROWS[-1])
        counts = [n for n, before in zip(STEP_ROWS, (0, *STEP_ROWS), strict=False) if before < most]
        keys = [(visit, n_rows) for visit in range(len(self._visits)) for n_rows in counts]

        def all_in(memory: StageMemory) -> dict[tuple[int, int], Step]:
            return {key: self._captured(memory, *key, room) for key in keys}

        n_bytes, kernels = _on_paper(memory, all_in)
        prepare(kernels)
        self.n_bytes, self._memory = n_bytes, memory_of(n_bytes)
        self._steps = all_in(self._memory)
        self._row_counts = counts

    def _captured(self, memory: StageMemory, visit: int, n_rows: int, room: StepRoom) -> Step:
        sizes = StepSizes(n_rows, room.table_width, self._config.sliding_window)
        reach = reach_for(self._config, "full", 2)
        # Each is the second row of a sequence: it closes a pair, as only some of the rows do that come later.
        spans = tuple(RowSpan(-1 - row, 1, 1, RowKind.DECODE, reach, 1) for row in range(n_rows))
        with torch.inference_mode(), scratch.use(memory), memory.scope():
            tables = StepTables(sizes, self._rope)
            tables_u8 = scratch.u8(len(tables.host_u8))
            places = tables.on_device(tables_u8, spans, room.context)
            engram = StepEngram({layer: self._table_rows(layer, n_rows) for layer in self._engram_layers(visit)})
            inputs = replace(self._inputs(visit, spans), engram=engram)
            self._sequences.update((span.sequence, self._stand_in()) for span in spans)
            try:
                with capture() as graph:
                    made = self._layers(visit, inputs, places.tables)
            finally:
                for span in spans:
                    del self._sequences[span.sequence]
            return Step(tables, tables_u8, places, inputs, engram, made, graph)

    def _engram_layers(self, visit: int) -> list[int]:
        return [layer for layer in self._visits[visit].layers if layer in self._engram_tables]

    def _table_rows(self, layer: int, n_rows: int) -> TableRows:
        table = self._engram_tables[layer]
        columns = n_rows, len(table.primes_i64)
        codes, scales = (scratch.u8(*columns, of.shape[1]) for of in (table.codes_e4m3, table.scales_e8m0))
        return TableRows(scratch.i64(*columns), codes, scales)

    def _inputs(self, visit: int, spans: tuple[RowSpan, ...]) -> HandOff:
        """Room for what enters a visit: a list once an index source has run, blocks once their producer has."""
        config, n_rows = self._config, len(spans)
        before = config.layers[: min(self._visits[visit].steps)]
        return HandOff(
            spans,
            scratch.i32(n_rows),
            scratch.i32(n_rows, config.engram_max_ngram_size),
            scratch.bf16(n_rows, config.hc_mult, config.hidden_size),
            scratch.f32(n_rows, config.hc_mult),
            scratch.i32(n_rows, config.index_topk) if any(role.has_indexer for role in before) else None,
            scratch.i32(n_rows, config.candidate_topk_blocks) if any(r.writes_candidates for r in before) else None,
        )

    def find(self, visit: int, rows: HandOff) -> Step | None:
        """The step that these rows may run as."""
        n_rows = rows.n_rows
        if not self._row_counts or not 0 < n_rows <= self._row_counts[-1] or not all(map(_is_step, rows.spans)):
            return None
        return self._steps[visit, next(n for n in self._row_counts if n >= n_rows)]

    def run(self, step: Step, rows: HandOff) -> HandOff:
        """A visit's rows, in this thread's memory, from what enters it there."""
        spans, n_rows = rows.spans, rows.n_rows
        step.tables.fill(spans, [self._sequences[span.sequence] for span in spans])
        scratch.put(step.tables.host_u8, step.tables_u8)
        from_i64 = step.places.from_i64
        for given, into in _pairs(rows, step.inputs, bool(step.engram.layers)):
            _fill(into, given, from_i64)
        engram = rows.engram
        for layer, into_rows in step.engram.layers.items():
            assert engram is not None
            for given, into in zip(engram.take(layer)[1:], into_rows[1:], strict=True):
                _fill(into, given, from_i64)
        if engram is not None and max(self._config.engram_layer_ids) in step.engram.layers:
            engram.release()
            engram = None
        step.graph.launch()
        inputs, made = step.inputs, step.made

        def own(tensor: Tensor | None, before: Tensor | None, given: Tensor | None) -> Tensor | None:
            return given if tensor is before or tensor is None else _first(tensor, n_rows)

        return replace(
            rows,
            streams_bf16=_first(made.streams_bf16, n_rows),
            pre_f32=_first(made.pre_f32, n_rows),
            selected_i32=own(made.selected_i32, inputs.selected_i32, rows.selected_i32),
            blocks_i32=own(made.blocks_i32, inputs.blocks_i32, rows.blocks_i32),
            fresh=(*rows.fresh, *self._fresh(made.fresh, spans)),
            engram=engram,
        )

    def _fresh(self, made: Sequence[FreshRows], spans: Sequence[RowSpan]) -> list[FreshRows]:
        """Of the fresh rows those that the spans close."""
        fresh = []
        for of in made:
            row, ratio = -1 - of.sequence, self._config.layers[of.source].ratio
            if row < len(spans) and closed_by(spans[row], ratio):
                rows_u8, keys_u8 = _first(of.rows_u8, 1), _first(of.keys_u8, 1)
                fresh.append(FreshRows(of.source, spans[row].sequence, spans[row].start // ratio, rows_u8, keys_u8))
        return fresh


def _on_paper(memory: StageMemory, all_in: Callable[[StageMemory], object]) -> tuple[int, Collection[Kernel]]:
    """Bytes that steps want, and the kernels that they launch: both from trying them without a device."""
    n_bytes = FIRST_BYTES
    with shapes_only():
        while True:
            try:
                with seen() as kernels:
                    all_in(StageMemory(n_bytes, name="steps on paper", place=memory.place))
                return n_bytes, kernels
            except ArenaFull:
                n_bytes = int(n_bytes * GROWS)


def _is_step(span: RowSpan) -> bool:
    return span.kind is RowKind.DECODE and span.n_rows == 1 and span.keeps_rows


def _pairs(rows: HandOff, inputs: HandOff, with_lookback: bool) -> list[tuple[Tensor, Tensor]]:
    """What enters a visit, and where it goes."""
    pairs = [(rows.streams_bf16, inputs.streams_bf16), (rows.pre_f32, inputs.pre_f32)]
    if with_lookback:
        pairs.append((rows.lookback_i32, inputs.lookback_i32))
    for given, into in ((rows.selected_i32, inputs.selected_i32), (rows.blocks_i32, inputs.blocks_i32)):
        if into is not None:
            assert given is not None
            pairs.append((given, into))
    return pairs


def _fill(into: Tensor, given: Tensor, from_i64: Tensor) -> None:
    """Rows that are not there are copies of the last one."""
    if len(given) == len(into):
        copy_rows(given, into)
    else:
        gather_rows(given, from_i64, into)


def _first(tensor: Tensor, n_rows: int) -> Tensor:
    """A copy of its first rows in this thread's memory."""
    out = scratch.like(tensor, n_rows)
    copy_rows(tensor[:n_rows], out)
    return out
