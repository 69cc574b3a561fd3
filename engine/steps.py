"""Decode and verify steps of a stage, captured once and replayed: a visit is one launch of the host's (design.md
section 8)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from rocline.arena.spans import ArenaFull
from rocline.engine import scratch
from rocline.engine.config import TextConfig
from rocline.engine.engram import EngramTable
from rocline.engine.engram_ahead import TableRows
from rocline.engine.handoff import (
    FirstStep,
    HandOff,
    Layout,
    Packed,
    Place,
    RowKind,
    Rows,
    RowSpan,
    StepRows,
    n_rows_of,
    reach_for,
)
from rocline.engine.rope_rows import RopeTables
from rocline.engine.routes import Route, StageLayers
from rocline.engine.row_tables import RowTables
from rocline.engine.scratch import StageMemory
from rocline.engine.sequence import REWIND_ROWS, SequenceState
from rocline.engine.step_tables import ALIGNMENT, StepPlaces, StepRope, StepSizes, StepTables
from rocline.hip_kernels.binding import shapes_only
from rocline.hip_kernels.driver import copy_async
from rocline.hip_kernels.embedding import embedding
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.graph import Graph, capture
from rocline.hip_kernels.kernel import Kernel, prepare, seen
from rocline.hip_kernels.rows import copy_rows, gather_rows

STEP_ROWS = (1, 2, 4, 8, 16, 32, 64)  # a step has the next larger of these
FIRST_BYTES = 1 << 20  # of the memory that steps are tried in on paper
GROWS = 1.25

Layers = Callable[[int, HandOff, RowTables], HandOff]  # of a visit, by its number
Store = Callable[[int, Mapping[int, tuple[Tensor, Tensor]], RowTables], None]  # in a visit, of rows with these tables
MemoryOf = Callable[[int], StageMemory]  # of so many bytes


class Capturing(NamedTuple):
    """What only capturing needs.

    layers         runs a visit's layers, which look their sequences up in the stage's
    stand_in       makes the state of a sequence of one row, which owns nothing
    engram_tables  by layer, of the layers that run here
    store          writes fresh rows that have come, by source, into the planes
    """

    layers: Layers
    stand_in: Callable[[], SequenceState]
    engram_tables: Mapping[int, EngramTable]
    store: Store


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

    def on_host(self, layer: int) -> TableRows:
        raise RuntimeError("a step has its table rows on the device")

    def pick(self, index_i64: Tensor) -> StepEngram:
        raise RuntimeError("a step keeps all of its rows")

    def release(self) -> None:
        pass


@dataclass(frozen=True)
class Step:
    """A captured visit of a number of rows. All tensors lie in the memory that the steps of a stage share.

    inputs, engram  to be filled before it is launched
    made            what it fills
    """

    tables: StepTables
    places: StepPlaces
    inputs: Packed
    engram: StepEngram
    made: Packed
    graph: Graph


class Steps:
    """Of one stage: by visit and number of rows.

    sequences  of the stage, by number

    n_bytes of memory are theirs.
    """

    _memory: StageMemory | None

    def __init__(
        self,
        config: TextConfig,
        visits: Sequence[StageLayers],
        routes: Sequence[Route],
        rope: RopeTables,
        sequences: dict[int, SequenceState],
    ) -> None:
        self._config, self._visits, self._routes = config, visits, routes
        self._rope, self._sequences = StepRope(rope), sequences
        self._steps: dict[tuple[int, int], Step] = {}
        self.n_bytes, self._memory = 0, None  # which they need for as long as they are there
        self._row_counts: list[int] = []

    def capture(self, memory: StageMemory, memory_of: MemoryOf, by: Capturing, room: StepRoom) -> None:
        """Capture all visits. Nothing else may be queued on the stage's stream meanwhile.

        memory     of the stage: whose place it is
        memory_of  makes the memory that all of the steps run in, one at a time

        Raises HipError, CompileError.
        """
        most = min(room.most_rows, STEP_ROWS[-1])
        counts = [n for n, before in zip(STEP_ROWS, (0, *STEP_ROWS), strict=False) if before < most]
        keys = [(visit, n_rows) for visit in range(len(self._visits)) for n_rows in counts]

        def all_in(memory: StageMemory) -> dict[tuple[int, int], Step]:
            return {key: self._captured(memory, *key, by, room) for key in keys}

        n_bytes, kernels = _on_paper(memory, all_in)
        prepare(kernels)
        self.n_bytes, self._memory = n_bytes, memory_of(n_bytes)
        self._steps = all_in(self._memory)
        self._row_counts = counts

    def _captured(self, memory: StageMemory, visit: int, n_rows: int, by: Capturing, room: StepRoom) -> Step:
        config = self._config
        n_back, n_streams = config.engram_max_ngram_size, config.hc_mult
        sizes = StepSizes(n_rows, room.table_width, config.sliding_window, n_back, n_streams)
        reach = reach_for(config, "full", 2)
        # Each is the second row of a sequence: it closes a pair, as only some of the rows do that come later.
        spans = tuple(RowSpan(-1 - row, 1, 1, RowKind.DECODE, reach, 1) for row in range(n_rows))
        with torch.inference_mode(), scratch.use(memory), memory.scope():
            tables = StepTables(sizes, self._rope)
            here = [layer for layer in self._visits[visit].layers if layer in by.engram_tables]
            engram = StepEngram({layer: _table_rows(by.engram_tables[layer], n_rows) for layer in here})
            (entered, left), route = _ends(self._visits[visit]), self._routes[visit]
            inputs = self._packed(n_rows, entered, tables, route.enters)
            places = tables.on_device(inputs.data_u8, spans, room.context)
            self._sequences.update((span.sequence, by.stand_in()) for span in spans)
            try:
                with capture() as graph, memory.set_apart(inputs.data_u8):
                    by.store(visit, inputs.fresh(), places.tables)
                    rows = by.layers(visit, HandOff(spans, **inputs.tensors(), engram=engram), places.tables)
                    made = self._packed(n_rows, left, tables, route.forwards)
                    n_table_bytes = made.layout.n_table_bytes
                    copy_rows(inputs.data_u8[:n_table_bytes], made.data_u8[:n_table_bytes])
                    for place in made.layout.behind_tables():
                        copy_rows(getattr(rows, place.field), made.at(place))
                    _send_on(inputs, {of.source: (of.rows_u8, of.keys_u8) for of in rows.fresh}, made)
            finally:
                for span in spans:
                    del self._sequences[span.sequence]
            return Step(tables, places, inputs, engram, made, graph)

    def _packed(self, n_rows: int, layer: int, tables: StepTables, sources: Collection[int]) -> Packed:
        """Room for what enters a layer: a list once an index source has run, blocks once their producer has; and for
        fresh rows of these sources."""
        config, before, end = self._config, self._config.layers[:layer], len(tables.host_u8)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "streams_bf16": ((n_rows, config.hc_mult, config.hidden_size), torch.bfloat16)
        }
        pre = (n_rows, config.hc_mult), torch.float32
        if layer:
            shapes["pre_f32"] = pre
        if any(role.has_indexer for role in before):
            shapes["selected_i32"] = (n_rows, config.index_topk), torch.int32
        if any(role.writes_candidates for role in before):
            shapes["blocks_i32"] = (n_rows, config.candidate_topk_blocks), torch.int32
        places = [
            Place("positions_i32", tables.start("position"), (n_rows,), torch.int32),
            Place("lookback_i32", tables.start("lookback"), (n_rows, config.engram_max_ngram_size), torch.int32),
        ]
        places += [] if layer else [Place("pre_f32", tables.start("pre"), *pre)]
        formats = RowFormat("compressed", config.head_dim), RowFormat("index_key", config.index_head_dim)
        names = [(source, of) for source in sorted(sources) for of in formats]
        shapes |= {f"{of.kind} {source}": ((n_rows, of.row_bytes), torch.uint8) for source, of in names}
        for field, (shape, dtype) in shapes.items():
            end += -end % ALIGNMENT
            places.append(Place(field, end, shape, dtype))
            end += prod(shape) * dtype.itemsize
        n_fields = len(places) - len(names)
        of_sources = places[n_fields:]
        fresh = tuple(zip(sorted(sources), of_sources[::2], of_sources[1::2], strict=True))
        return Packed(scratch.u8(end), Layout.of(n_rows, end, len(tables.host_u8), tuple(places[:n_fields]), fresh))

    def has(self, spans: Sequence[RowSpan]) -> bool:
        """Whether rows of these spans run as steps, in every visit."""
        most = self._row_counts[-1] if self._row_counts else 0
        if not 0 < n_rows_of(spans) <= most or not all(map(_is_step, spans)):
            return False
        return len({span.sequence for span in spans}) == len(spans)  # no span reads what another one writes

    def find(self, visit: int, rows: Rows | FirstStep) -> Step | None:
        """The step that these rows may run as."""
        if isinstance(rows, StepRows):
            layout = rows.packed.layout
            step = self._steps.get((visit, layout.n_rows))
            return step if step and step.inputs.layout is layout else None
        if not self.has(rows.spans) or (isinstance(rows, HandOff) and self._routes[visit].enters):
            return None
        n_rows = rows.n_rows
        return self._steps[visit, next(n for n in self._row_counts if n >= n_rows)]

    def run(self, step: Step, rows: Rows | FirstStep) -> StepRows:
        """A visit's rows, in this thread's memory, from what enters it there; StepRows may lie in step.inputs already.

        The sequences' rings are past these rows already (SequenceState.add_rows).
        """
        spans, inputs = rows.spans, step.inputs
        states = [self._sequences[span.sequence] for span in spans]
        rings = tuple(state.ring_number for state in states)
        if isinstance(rows, FirstStep):
            self._put_tables(step, spans, states, rows.lookback_i32.numpy())
            embedding(step.places.ids_i32, rows.table_bf16, inputs.tensors()["streams_bf16"])
        elif isinstance(rows, HandOff):
            self._put_tables(step, spans, states)
            for field, into in inputs.tensors().items():
                _fill(into, getattr(rows, field), step.places.from_i64)
        else:
            if rows.packed.data_u8 is not inputs.data_u8:
                _copy_bytes(rows.packed.data_u8, inputs.data_u8)
            if rows.rings != rings:
                self._put_tables(step, spans, states)
        engram = rows.engram
        for layer, into_rows in step.engram.layers.items():
            assert engram is not None
            for given, into in zip(engram.on_host(layer)[1:], into_rows[1:], strict=True):
                scratch.put(_padded(given, len(into)), into)
        if engram is not None and max(self._config.engram_layer_ids) in step.engram.layers:
            engram.release()
            engram = None
        step.graph.launch()
        layout = step.made.layout
        made_u8 = scratch.u8(layout.n_bytes)
        _copy_bytes(step.made.data_u8, made_u8)
        return StepRows(spans, Packed(made_u8, layout), rings, engram=engram)

    def _put_tables(
        self,
        step: Step,
        spans: Sequence[RowSpan],
        states: Sequence[SequenceState],
        lookback_i32: NDArray | None = None,
    ) -> None:
        tables = step.tables
        tables.fill(spans, states, lookback_i32)
        n_bytes = len(tables.host_u8) if lookback_i32 is not None else tables.start("id")
        scratch.put(tables.host_u8[:n_bytes], step.inputs.data_u8[:n_bytes])


def _ends(visit: StageLayers) -> tuple[int, int]:
    """The layer that a visit's rows enter, and the next one when they leave. A key/value side alone is no layer."""
    if visit.layers:
        return min(visit.layers), max(visit.layers) + 1
    return min(visit.kv_sides), min(visit.kv_sides)


def _send_on(inputs: Packed, own: Mapping[int, tuple[Tensor, Tensor]], made: Packed) -> None:
    """Fresh rows that a visit has made or been given, for later ones. What lies side by side goes in one copy."""
    given, at = {source: (rows, keys) for source, rows, keys in inputs.layout.fresh}, made.at
    runs: list[list[int]] = []  # from, to, bytes
    for source, *places in made.layout.fresh:
        if source in own:
            for rows_u8, place in zip(own[source], places, strict=True):
                copy_rows(rows_u8, at(place))
            continue
        for from_place, to_place in zip(given[source], places, strict=True):
            start, into, n_bytes = from_place.start, to_place.start, prod(to_place.shape)
            if runs and start - runs[-1][0] == into - runs[-1][1]:
                n_bytes += start - runs[-1][0]
                start, into, _ = runs.pop()
            runs.append([start, into, n_bytes])
    for start, into, n_bytes in runs:
        copy_rows(inputs.data_u8[start : start + n_bytes], made.data_u8[into : into + n_bytes])


def _table_rows(table: EngramTable, n_rows: int) -> TableRows:
    columns = n_rows, len(table.primes_i64)
    codes, scales = (scratch.u8(*columns, of.shape[1]) for of in (table.codes_e4m3, table.scales_e8m0))
    return TableRows(scratch.i64(*columns), codes, scales)


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
    return span.kind is not RowKind.PREFILL and 0 < span.n_rows <= REWIND_ROWS and span.keeps_rows


def _copy_bytes(given_u8: Tensor, into_u8: Tensor) -> None:
    """As copy_rows, without the way of an operator to it, which takes longer than the rest of a visit."""
    copy_async(into_u8.data_ptr(), given_u8.data_ptr(), given_u8.nbytes)


def _padded(given: Tensor, n_rows: int) -> Tensor:
    """Host rows, the last one again and again up to n_rows."""
    n_more = n_rows - len(given)
    return torch.cat([given, given[-1:].expand(n_more, *given.shape[1:])]) if n_more else given


def _fill(into: Tensor, given: Tensor, from_i64: Tensor) -> None:
    """Rows that are not there are copies of the last one."""
    if len(given) == len(into):
        copy_rows(given, into)
    else:
        gather_rows(given, from_i64, into)
