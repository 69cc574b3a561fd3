"""One stage: the work of one card, in one or two visits of each row; a hand-off in, the next one out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.choices import Choices
from rocline.engine.config import LayerRole, ModelConfig
from rocline.engine.handoff import FirstStep, HandOff, Rows, RowSpan, StepRows, gathered
from rocline.engine.kv_side import KvSides, closed_by
from rocline.engine.layers import attention, compressor, experts, indexer, streams
from rocline.engine.layers.attention import AttentionWeights
from rocline.engine.pages import PagePlanes, Where
from rocline.engine.record import Recorder, ignore
from rocline.engine.rope_rows import RopeTables
from rocline.engine.routes import Route, StageLayers
from rocline.engine.row_tables import RingPlaces, RowTables, TableMaker
from rocline.engine.scratch import StageMemory
from rocline.engine.sequence import (
    RingData,
    RingNumbers,
    RingRoom,
    Rings,
    SequenceState,
    host_zeros,
    ring_slots,
    stand_in,
)
from rocline.engine.steps import Capturing, MemoryOf, StepRoom, Steps
from rocline.engine.weights import LayerWeights, SideWeights
from rocline.hip_kernels.attention_hip import Selected, Windows
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.kernel import layer_kind
from rocline.hip_kernels.layer_ops import attend


@dataclass(frozen=True)
class _Running:
    """Rows between two layers of a visit.

    tables   of these rows
    unmixed  the last sublayer's output, if it is not in the streams yet: the next one takes it along
    """

    rows: HandOff
    tables: RowTables
    unmixed: streams.Unmixed | None = None

    def tensors(self) -> list[Tensor]:
        return [*self.rows.tensors(), *self.tables.tensors(), *(self.unmixed.tensors() if self.unmixed else ())]

    def mixed(self) -> _Running:
        """The same with whole streams."""
        if self.unmixed:
            streams.merge(self.unmixed, self.rows.streams_bf16)
        return replace(self, unmixed=None)


class Stage:
    """The visits of one card, with the memory, pages and per-sequence state that they share.

    One thread runs a stage; any thread may open, close and truncate sequences that are not in its run.

    planes           of the stage's device, shared with the other stages on it: they hold what the routes store
    memory           slab for temporaries and hand-offs
    weights          by layer; of one that only has its key/value side here that is enough
    routes           of each visit, from routes.routes
    shared_key_slot  reproduce the reference's decode defect (backbone.md section 7): index sources score
                     whatever keys were written last. Only for comparing with its recorded data.
    ring_data        makes the zeroed tensors of the rings, as in RingRoom, where sequences_at_once is explained too
    """

    def __init__(
        self,
        config: ModelConfig,
        visits: Sequence[StageLayers],
        weights: Mapping[int, SideWeights],
        planes: PagePlanes,
        memory: StageMemory,
        routes: Sequence[Route],
        shared_key_slot: bool = False,
        ring_data: RingData = host_zeros,
        sequences_at_once: int | None = None,
    ) -> None:
        self.config = config.text_config
        for visit in visits:
            for layer in {*visit.layers} ^ visit.kv_sides:
                role = self.config.layers[layer]
                if role.owns_rows and role.engram is not None:
                    raise ValueError(f"layer {layer} adds Engram: its key/value side must be in the visit of the layer")
        self.visits = tuple(visits)
        self.routes = tuple(routes)
        self.weights = weights
        self.planes = planes
        self.memory = memory
        self.sequences: dict[int, SequenceState] = {}
        self._shared_key_slot = shared_key_slot
        self._last_keys: int | None = None
        self._windows, self._pairs = self._ring_rooms(ring_data, sequences_at_once)
        self._ring_numbers = RingNumbers(sequences_at_once)
        rope, together = RopeTables.of(self.config), sequences_at_once is not None
        ratios = {self.config.layers[side].ratio for visit in self.visits for side in visit.kv_sides}
        self._tables_of = TableMaker(rope, self.config.sliding_window, together, ratios).tables
        self._sides = KvSides(self.config, planes, rope, self.sequences, self._pairs)
        self._choices = Choices(self.config, planes, self.sequences)
        self._own_pairs = [visit.kv_sides & self._pairs.keys() for visit in self.visits]
        self.steps = Steps(self.config, self.visits, self.routes, rope, self.sequences)

    def _ring_rooms(
        self, ring_data: RingData, sequences_at_once: int | None
    ) -> tuple[dict[int, RingRoom], dict[int, RingRoom]]:
        """Room for the window rings of each layer and the pair rings of each ratio-2 source."""
        config = self.config
        layers = [layer for visit in self.visits for layer in visit.layers]
        sides = [side for visit in self.visits for side in visit.kv_sides if config.layers[side].ratio == 2]
        window = ring_slots(config.sliding_window), RowFormat("window", config.head_dim).row_bytes
        pair = ring_slots(1), 2, config.head_dim
        return (
            {layer: RingRoom(ring_data, window, torch.uint8, sequences_at_once) for layer in layers},
            {side: RingRoom(ring_data, pair, torch.float32, sequences_at_once) for side in sides},
        )

    def open(self, sequence: int, page_table: list[int]) -> None:
        """Begin a sequence with nothing in it. The owner of its page table keeps that long enough for all rows.

        Raises RuntimeError where sequences_at_once are open.
        """
        number = self._ring_numbers.take()
        self.sequences[sequence] = SequenceState(
            ring_number=number,
            windows={layer: room.ring(number) for layer, room in self._windows.items()},
            pairs={side: room.ring(number) for side, room in self._pairs.items()},
            page_table=page_table,
        )

    def close(self, sequence: int) -> None:
        """Forget a sequence. Its pages are their owner's to give back."""
        self._ring_numbers.give_back(self.sequences.pop(sequence).ring_number)

    def capture_steps(self, memory_of: MemoryOf, most_rows: int, context: int) -> None:
        """Capture steps of up to most_rows rows, for sequences of up to `context` positions, on a device.

        memory_of  as in Steps.capture

        No sequence may be open: what is tried writes into rings and pages. Raises HipError, CompileError.
        """
        tables = {n: w.engram.table for n, w in self.weights.items() if isinstance(w, LayerWeights) and w.engram}
        room = StepRoom(most_rows, -(-context // self.planes.page_positions), context)
        made_up = partial(stand_in, self._windows, self._pairs, self.config.sliding_window)
        self.steps.capture(self.memory, memory_of, Capturing(self._layers, made_up, tables, self._store_step), room)

    def _store_step(self, visit: int, fresh: Mapping[int, tuple[Tensor, Tensor]], tables: RowTables) -> None:
        for source in sorted(self.routes[visit].stores & fresh.keys()):
            groups = tables.groups[self.config.layers[source].ratio]
            where = Where(groups.positions_i32, groups.sequences_i32, tables.page_tables_i32)
            self.planes.write_at(source, where, *fresh[source])

    def snapshot(self, sequence: int) -> Rings:
        """The rings as they are, in host memory. Waits for the device."""
        with scratch.use(self.memory):
            return self.sequences[sequence].clone_rings()

    def restore(self, sequence: int, rings: Rings) -> None:
        """The rings as they were. Waits for the device."""
        with scratch.use(self.memory):
            self.sequences[sequence].restore_rings(rings)

    def truncate(self, sequence: int, length: int) -> None:
        """Drop rows from `length` on. Exact within the last REWIND_ROWS rows; farther back rings come up empty."""
        self.sequences[sequence].truncate(length)

    def can_rewind(self, sequence: int, length: int) -> bool:
        """Whether the state after `length` rows can be had by dropping rows alone."""
        state, window = self.sequences[sequence], self.config.sliding_window
        windows = all(ring.first <= max(0, length - window + 1) for ring in state.windows.values())
        return windows and all(ring.first <= length - length % 2 for ring in state.pairs.values())

    def run(
        self,
        rows: Rows | Callable[[], Rows | FirstStep],
        visit: int = 0,
        *,
        between: Callable[[], None] = lambda: None,
        record: Recorder = ignore,
    ) -> Rows:
        """Run a visit over rows whose page tables are long enough.

        rows     a hand-off, which is copied before anything else; or what puts one of the caller's own into this
                 stage's memory (scratch, or where `room_for` says), called where the copy would be made
        between  called between two layers. It may run other sequences' rows through this stage, in any visit; what
                 it raises ends this run

        The result lies in this stage's memory until its lease is released. Of the fresh rows it has those that a
        later visit still needs. Raises ArenaFull when the chunk does not fit; RuntimeError before a layer runs where a
        sequence does not hold what rows of a step read.
        """
        work, route = self.visits[visit], self.routes[visit]
        # Entering what a worker's thread has entered already takes longer than asking.
        inference = nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode()
        with inference, scratch.use(self.memory), self.memory.scope():
            given = rows() if callable(rows) else rows.copied()
            for fresh in given.fresh:
                if fresh.source in route.stores:
                    self._sides.store(fresh)
                    self._last_keys = fresh.source
            given = self._forwarded(given, route) if isinstance(given, HandOff) else given
            made: Rows
            if record is ignore and (step := self.steps.find(visit, given)):
                self._check_pages(given.spans)
                for span in given.spans:
                    state, window = self.sequences[span.sequence], self.config.sliding_window
                    state.add_rows(span.start, span.n_rows, work.layers, self._own_pairs[visit], window)
                made = self.steps.run(step, given)
            else:
                assert not isinstance(given, FirstStep), "only where steps are captured"
                whole = given if isinstance(given, HandOff) else given.unpacked().copied()
                made = self._layers(visit, whole, self._tables(whole), between, record)
            return made.leased(self.memory.lease(made.tensors()))

    def _check_pages(self, spans: Sequence[RowSpan]) -> None:
        """Raises RuntimeError where a step's rows lie past their pages: its graph would store them in page 0."""
        for span in spans:
            n_positions = len(self.sequences[span.sequence].page_table) * self.planes.page_positions
            if span.end > n_positions:
                raise RuntimeError(
                    f"rows {span.start} to {span.end} of sequence {span.sequence} in pages of {n_positions} positions; "
                    "grow its page table first"
                )

    def room_for(self, visit: int, rows: Rows) -> Tensor | None:
        """Where a captured step reads the piece that these rows lie in; None where they may lie anywhere.

        Only until the visit is run, which must be next.
        """
        step = self.steps.find(visit, rows) if isinstance(rows, StepRows) else None
        return step.inputs.data_u8 if step else None

    def _layers(
        self,
        visit: int,
        rows: HandOff,
        tables: RowTables,
        between: Callable[[], None] = lambda: None,
        record: Recorder = ignore,
    ) -> HandOff:
        """A visit's layers, with their temporaries in this thread's memory."""
        work, running = self.visits[visit], _Running(rows, tables)
        for at, layer in enumerate(work.steps):
            if at:
                between()
            running = self._step(work, layer, running, record)
        return self._forwarded(running.mixed().rows, self.routes[visit])

    def _tables(self, rows: HandOff) -> RowTables:
        return self._tables_of(rows.spans, [self.sequences[span.sequence] for span in rows.spans])

    def _forwarded(self, rows: HandOff, route: Route) -> HandOff:
        """The rows without the fresh ones that no later visit needs."""
        spent = [fresh for fresh in rows.fresh if fresh.source not in route.forwards]
        if not spent:
            return rows
        scratch.memory().free(tensor for fresh in spent for tensor in (fresh.rows_u8, fresh.keys_u8))
        return replace(rows, fresh=tuple(fresh for fresh in rows.fresh if fresh.source in route.forwards))

    def _step(self, work: StageLayers, layer: int, rows: _Running, record: Recorder) -> _Running:
        """One layer; of its temporaries only what runs on stays, and of the old ones what that still refers to."""
        memory = scratch.memory()
        with memory.scope(), layer_kind(self.config.layers[layer].kind):
            new = self._run_layer(work, layer, rows, record)
            before = {tensor.data_ptr() for tensor in rows.tensors()}
            memory.keep(tensor for tensor in new.tensors() if tensor.data_ptr() not in before)
        after = {tensor.data_ptr() for tensor in new.tensors()}
        memory.free(tensor for tensor in rows.tensors() if tensor.data_ptr() not in after)
        return new

    def _run_layer(self, work: StageLayers, layer: int, running: _Running, record: Recorder) -> _Running:
        role, weights, config = self.config.layers[layer], self.weights[layer], self.config
        if role.engram is not None and layer in work.layers and isinstance(weights, LayerWeights):
            running = self._engram(role, weights, running, record)
        entered = raw_bf16 = None
        if layer in work.kv_sides:
            running, entered, raw_bf16 = self._kv_side(role, weights, work, running, record)
        if layer not in work.layers:
            return running
        assert isinstance(weights, LayerWeights), f"of layer {layer} only the key/value side is here"
        record(layer, "x_in", running.rows.streams_bf16)
        record(layer, "pre_in", running.rows.pre_f32)
        if entered is None:
            entered = self._enter(weights, running)
        running, heads_bf16, mixed = self._attention(role, weights, running, entered, raw_bf16, record)
        rows = running.rows
        if not rows.n_rows:
            return running
        after = weights.ffn_norm_bf16, weights.hc_ffn, rows.streams_bf16
        attn_bf16, into = attention.project_out(config, weights.attention, heads_bf16, mixed, *after)
        record(layer, "attn_out", attn_bf16)
        _record_mix(record, layer, "hc_attn", mixed)
        u_bf16, mixed = into.u_bf16, into.coefficients
        out_bf16 = experts.mixture(config, weights.experts, layer, u_bf16, record, into.rounded_bf16)
        running = _Running(replace(rows, pre_f32=mixed.pre_f32), running.tables, streams.Unmixed(out_bf16, mixed))
        if record is not ignore:
            running = running.mixed()
        record(layer, "u_ffn", u_bf16)
        record(layer, "moe_out", out_bf16)
        _record_mix(record, layer, "hc_ffn", mixed)
        record(layer, "x_out", running.rows.streams_bf16)
        return running

    def _enter(self, weights: LayerWeights, running: _Running) -> streams.Entered:
        """The attention sublayer's input and coefficients; the streams are whole then."""
        into = weights.attn_norm_bf16, weights.hc_attn, running.rows.streams_bf16
        if running.unmixed is None:
            return streams.enter(self.config, *into, running.rows.pre_f32)
        return streams.merge_enter(self.config, running.unmixed, *into)

    def _engram(self, role: LayerRole, weights: LayerWeights, running: _Running, record: Recorder) -> _Running:
        """The rows after the layer's Engram addition, with whole streams; rows gathered ahead are let go after the
        last such layer."""
        assert weights.engram is not None
        rows = running.rows
        if rows.n_rows:
            args = running.unmixed, rows.streams_bf16, rows.lookback_i32, rows.engram
            streams.add_engram(self.config, weights.engram, role.layer, *args, record)
        if rows.engram and role.layer == max(self.config.engram_layer_ids):
            rows.engram.release()
            rows = replace(rows, engram=None)
        return _Running(rows, running.tables)

    def _kv_side(
        self, role: LayerRole, weights: SideWeights, work: StageLayers, running: _Running, record: Recorder
    ) -> tuple[_Running, streams.Entered | None, Tensor | None]:
        """Compressed rows and index keys of all rows present; then only those go on that the layer itself needs.

        Both read the same input where the layer runs here too and needs all rows; that is then returned, and the
        index heads' weights before their factor [R, h] where they came along.
        """
        assert weights.compressor is not None
        config, side, rows = self.config, weights.compressor, running.rows
        floors = [span.reach.floor(role.layer) for span in rows.spans]
        entered = raw_bf16 = None
        if role.layer in work.layers and isinstance(weights, LayerWeights) and rows.tail_index(floors) is None:
            entered = self._enter(weights, running)
            running, u_bf16 = replace(running, unmixed=None), entered.u_bf16
        else:
            running = running.mixed()
            u_bf16 = streams.collapse_norm(config, weights.attn_norm_bf16, rows.streams_bf16, rows.pre_f32)
        if role.ratio not in running.tables.groups:
            fresh = self._sides.one_by_one(role, side, rows, u_bf16, record)
        else:
            if entered and isinstance(weights, LayerWeights) and weights.indexer and self._choices.is_prepared(role):
                both = side, role.ratio, weights.indexer, u_bf16
                projected, raw_bf16 = indexer.projection_and_head_weights(config, *both)
            else:
                projected = compressor.projection(config, side, role.ratio, u_bf16)
            forwards = role.layer in self.routes[self.visits.index(work)].forwards
            fresh = self._sides.together(role, side, rows, running.tables, projected, record, forwards)
        if any(span.keeps_rows and closed_by(span, role.ratio) for span in rows.spans):
            self._last_keys = role.layer
        running = self._from_floors(replace(running, rows=replace(rows, fresh=(*rows.fresh, *fresh))), floors)
        return running, entered, raw_bf16

    def _from_floors(self, running: _Running, floors: list[int]) -> _Running:
        """Only the rows at or after each span's floor; the streams are whole."""
        rows = running.rows.from_floors(floors)
        return running if rows is running.rows else _Running(rows, self._tables(rows))

    def _attention(
        self,
        role: LayerRole,
        weights: LayerWeights,
        running: _Running,
        entered: streams.Entered,
        raw_bf16: Tensor | None,
        record: Recorder,
    ) -> tuple[_Running, Tensor, streams.Coefficients]:
        """The rows that the next layer needs, and for them head outputs [R, H, hd] and the sublayer's coefficients.

        Window rows are made of all rows present.
        """
        config, layer, w = self.config, role.layer, weights.attention
        u_bf16, mixed = entered.u_bf16, entered.coefficients
        all_rows, rings = running.rows, running.tables.rings
        floors = [span.reach.enters(layer + 1) for span in all_rows.spans]
        kept = all_rows.tail_index(floors)
        turn = running.tables.turn(role.ratio)
        record(layer, "u_attn", u_bf16)
        if kept is None:
            into = None if rings is None else (self._ring_rows(layer, all_rows), rings.slots_i32)
            low, fresh_u8 = attention.latents(config, w, entered, turn, into)
        else:
            fresh_u8 = attention.window_rows(config, w, u_bf16, turn)
            kept, rings = scratch.upload(kept), None
            running, u_bf16 = self._from_floors(running, floors), gathered(u_bf16, kept)
            mixed = streams.Coefficients(*(gathered(values, kept) for values in mixed))
            turn = running.tables.turn(role.ratio)
            low, raw_bf16 = attention.LowRank(attention.low_rank_query(config, w, u_bf16)), None
        if record is not ignore:
            made_u8 = fresh_u8 if rings is None else gathered(fresh_u8, rings.slots_i32.long())
            record(layer, "window_kv", made_u8)
        if role.has_indexer and self._choices.is_prepared(role):
            assert weights.indexer is not None
            q_bf16, index_bf16 = indexer.both_queries(config, w, weights.indexer, low, turn)
            if raw_bf16 is None:
                raw_bf16 = indexer.raw_head_weights(config, weights.indexer, u_bf16)
            looking = running.tables, index_bf16, raw_bf16
            running = replace(running, rows=self._choices.together(role, running.rows, *looking, record))
        else:
            q_bf16 = attention.rotated_query(config, w, low, turn)
            if role.has_indexer:
                assert weights.indexer is not None
                of_rows = running.rows, u_bf16, low.qr_bf16, running.tables.turn(role.ratio)
                last_keys = self._last_keys if self._shared_key_slot else None
                chosen = self._choices.one_by_one(role, weights.indexer, *of_rows, record, last_keys)
                running = replace(running, rows=chosen)
        record(layer, "qr", low.qr_bf16)
        record(layer, "q", q_bf16)
        heads_bf16 = self._attend(role, w, running, all_rows, fresh_u8, rings, q_bf16)
        record(layer, "o", heads_bf16)
        return running, heads_bf16, mixed

    def _ring_rows(self, layer: int, rows: HandOff) -> Tensor:
        """[all slots, bytes] the window rings of a layer, into which the rows' own are about to be written."""
        window, room_u8 = self.config.sliding_window, self._windows[layer].together
        assert room_u8 is not None
        for span in [span for span in rows.spans if span.n_rows]:
            ring = self.sequences[span.sequence].windows[layer]
            ring.check(max(0, span.start - window + 1), span.start)
            ring.note(span.start, span.n_rows)
        return room_u8.flatten(0, 1)

    def _attend(
        self,
        role: LayerRole,
        weights: AttentionWeights,
        running: _Running,
        all_rows: HandOff,
        fresh_u8: Tensor,
        rings: RingPlaces | None,
        q_bf16: Tensor,
    ) -> Tensor:
        """Head outputs of the queries of `running`, whose place they may have taken.

        fresh_u8 are the window rows of all_rows, or where they lie in the rings already.
        """
        rows, tables = running.rows, running.tables
        compressed = None
        if role.kv_source is not None and rows.selected_i32 is not None:
            of_source_u8 = self.planes.rows_u8[role.kv_source]
            compressed = Selected(of_source_u8, tables.page_tables_i32, tables.sequence_i32, rows.selected_i32)
        turn, sink_f32, window = tables.turn(role.ratio), weights.sink_f32, self.config.sliding_window
        if rings is not None:
            room_u8 = self._windows[role.layer].together
            assert room_u8 is not None
            windows = Windows(room_u8, rings.ring_i32, rings.first_i32, rings.count_i32, window)
            heads_bf16 = attention.heads_room(q_bf16, compressed)
            attend(q_bf16, windows, compressed, sink_f32, *turn, heads_bf16)
            return heads_bf16
        for at, ((span, place), (_, tail)) in enumerate(zip(all_rows.slices(), rows.slices(), strict=True)):
            ring = self.sequences[span.sequence].windows[role.layer]
            seen = attention.span_windows(window, ring, span, fresh_u8[place], len(q_bf16[tail]))
            if seen is not None:
                own = compressed and replace(
                    compressed,
                    page_tables_i32=tables.page_tables_i32[at : at + 1],
                    sequence_i32=seen.ring_i32,
                    index_i32=compressed.index_i32[tail],
                )
                cos_f32, sin_f32 = turn.cos_f32[tail], turn.sin_f32[tail]
                attend(q_bf16[tail], seen, own, sink_f32, cos_f32, sin_f32, q_bf16[tail])
        return q_bf16


def _record_mix(record: Recorder, layer: int, name: str, mixed: streams.Coefficients) -> None:
    for field, value in zip(("pre", "post", "comb"), mixed, strict=True):
        record(layer, f"{name}.{field}", value)
