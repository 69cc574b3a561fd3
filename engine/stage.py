"""One stage: the work of one card, in one or two visits of each row; a hand-off in, the next one out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import LayerRole, ModelConfig
from rocline.engine.handoff import FreshRows, HandOff, RowKind, gathered, positions_of
from rocline.engine.layers import attention, compressor, experts, indexer, streams
from rocline.engine.pages import PagePlanes
from rocline.engine.record import Recorder, ignore
from rocline.engine.rope_rows import RopeRows, RopeTables
from rocline.engine.routes import Route, StageLayers
from rocline.engine.scratch import StageMemory
from rocline.engine.sequence import Ring, RingData, RingRoom, Rings, SequenceState, host_zeros, ring_slots
from rocline.engine.weights import LayerWeights, SideWeights
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.kernel import layer_kind


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
        self._tables = RopeTables(self.config)
        self._shared_key_slot = shared_key_slot
        self._last_keys: int | None = None
        self._windows, self._pairs = self._ring_rooms(ring_data, sequences_at_once)

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
        self.sequences[sequence] = SequenceState(
            windows={layer: Ring(room.take()) for layer, room in self._windows.items()},
            pairs={side: Ring(room.take()) for side, room in self._pairs.items()},
            page_table=page_table,
        )

    def close(self, sequence: int) -> None:
        """Forget a sequence. Its pages are their owner's to give back."""
        state = self.sequences.pop(sequence)
        for rooms, rings in ((self._windows, state.windows), (self._pairs, state.pairs)):
            for layer, ring in rings.items():
                rooms[layer].give_back(ring.data)

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
        rows: HandOff | Callable[[], HandOff],
        visit: int = 0,
        *,
        between: Callable[[], None] = lambda: None,
        record: Recorder = ignore,
    ) -> HandOff:
        """Run a visit over rows whose page tables are long enough.

        rows     a hand-off, which is copied before anything else; or what puts one of the caller's own into this
                 stage's memory (scratch), called where the copy would be made
        between  called between two layers. It may run other sequences' rows through this stage, in any visit; what
                 it raises ends this run

        The result lies in this stage's memory until its lease is released. Of the fresh rows it has those that a
        later visit still needs. Raises ArenaFull when the chunk does not fit.
        """
        work, route = self.visits[visit], self.routes[visit]
        with torch.inference_mode(), scratch.use(self.memory), self.memory.scope():
            rows = rows() if callable(rows) else rows.copied()
            for fresh in rows.fresh:
                if fresh.source in route.stores:
                    self._store(fresh)
            rows = self._forwarded(rows, route)
            for at, layer in enumerate(work.steps):
                if at:
                    between()
                rows = self._step(work, layer, rows, record)
            rows = self._forwarded(rows, route)
            return replace(rows, lease=self.memory.lease(rows.tensors()))

    def _forwarded(self, rows: HandOff, route: Route) -> HandOff:
        """The rows without the fresh ones that no later visit needs."""
        spent = [fresh for fresh in rows.fresh if fresh.source not in route.forwards]
        if not spent:
            return rows
        self.memory.free(tensor for fresh in spent for tensor in (fresh.rows_u8, fresh.keys_u8))
        return replace(rows, fresh=tuple(fresh for fresh in rows.fresh if fresh.source in route.forwards))

    def _step(self, work: StageLayers, layer: int, rows: HandOff, record: Recorder) -> HandOff:
        """One layer; of its temporaries only the new hand-off stays, and of the old one what that still refers to."""
        with self.memory.scope(), layer_kind(self.config.layers[layer].kind):
            new = self._run_layer(work, layer, rows, record)
            before = {tensor.data_ptr() for tensor in rows.tensors()}
            self.memory.keep(tensor for tensor in new.tensors() if tensor.data_ptr() not in before)
        after = {tensor.data_ptr() for tensor in new.tensors()}
        self.memory.free(tensor for tensor in rows.tensors() if tensor.data_ptr() not in after)
        return new

    def _store(self, fresh: FreshRows) -> None:
        table_i32 = self.sequences[fresh.sequence].table_i32
        self.planes.write(fresh.source, table_i32, fresh.first, fresh.rows_u8, fresh.keys_u8)
        if len(fresh.keys_u8):
            self._last_keys = fresh.source

    def _run_layer(self, work: StageLayers, layer: int, rows: HandOff, record: Recorder) -> HandOff:
        role, weights, config = self.config.layers[layer], self.weights[layer], self.config
        if role.engram is not None and layer in work.layers and isinstance(weights, LayerWeights):
            rows = self._engram(role, weights, rows, record)
        if layer in work.kv_sides:
            rows = self._kv_side(role, weights, rows, record)
        if layer not in work.layers:
            return rows
        assert isinstance(weights, LayerWeights), f"of layer {layer} only the key/value side is here"
        record(layer, "x_in", rows.streams_bf16)
        record(layer, "pre_in", rows.pre_f32)
        rows, out_bf16, mixed = self._attention(role, weights, rows, record)
        if not rows.n_rows:
            return rows
        u_bf16, mixed = streams.merge_enter(
            config, out_bf16, mixed, weights.ffn_norm_bf16, weights.hc_ffn, rows.streams_bf16
        )
        out_bf16 = experts.mixture(config, weights.experts, layer, u_bf16, record)
        streams.merge(out_bf16, rows.streams_bf16, mixed)
        record(layer, "u_ffn", u_bf16)
        record(layer, "moe_out", out_bf16)
        _record_mix(record, layer, "hc_ffn", mixed)
        record(layer, "x_out", rows.streams_bf16)
        return replace(rows, pre_f32=mixed.pre_f32)

    def _engram(self, role: LayerRole, weights: LayerWeights, rows: HandOff, record: Recorder) -> HandOff:
        """The rows after the layer's Engram addition; rows gathered ahead are let go after the last such layer."""
        assert weights.engram is not None
        if rows.n_rows:
            args = rows.streams_bf16, rows.lookback_i32, rows.engram
            streams.add_engram(self.config, weights.engram, role.layer, *args, record)
        if rows.engram and role.layer == max(self.config.engram_layer_ids):
            rows.engram.release()
            rows = replace(rows, engram=None)
        return rows

    def _kv_side(self, role: LayerRole, weights: SideWeights, rows: HandOff, record: Recorder) -> HandOff:
        """Compressed rows and index keys of all rows present; then only those go on that the layer itself needs."""
        assert weights.compressor is not None
        config = self.config
        u_bf16 = streams.collapse_norm(config, weights.attn_norm_bf16, rows.streams_bf16, rows.pre_f32)
        if role.ratio == 2:
            planes_f32 = compressor.pair_rows(config, weights.compressor, u_bf16)
        else:
            latents_bf16 = compressor.single_latent(config, weights.compressor, u_bf16)
        fresh = []
        for span, place in rows.slices():
            if role.ratio == 2:
                ring = self.sequences[span.sequence].pairs[role.layer]
                latent = compressor.pooled_latent(config, weights.compressor, ring, span, planes_f32[:, place])
            else:
                latent = latents_bf16[place]
            if span.keeps_rows and len(latent):
                made = compressor.fresh_rows(config, weights.compressor, role, self._tables, span, latent, record)
                self._store(made)
                fresh.append(made)
        rows = replace(rows, fresh=(*rows.fresh, *fresh))
        return rows.from_floors([span.reach.floor(role.layer) for span in rows.spans])

    def _attention(
        self, role: LayerRole, weights: LayerWeights, rows: HandOff, record: Recorder
    ) -> tuple[HandOff, Tensor, streams.Coefficients]:
        """The rows that the next layer needs, the attention sublayer's output for them, and its coefficients.

        Window rows are made of all rows present.
        """
        config, layer, w = self.config, role.layer, weights.attention
        turn = self._tables.rows(positions_of(rows.spans), role.ratio)
        u_bf16, mixed = streams.enter(config, weights.attn_norm_bf16, weights.hc_attn, rows.streams_bf16, rows.pre_f32)
        fresh_u8 = attention.window_rows(config, w, u_bf16, turn)
        record(layer, "u_attn", u_bf16)
        record(layer, "window_kv", fresh_u8)
        floors = [span.reach.enters(layer + 1) for span in rows.spans]
        places, kept = rows.slices(), rows.tail_index(floors)
        if kept is not None:
            kept = scratch.upload(kept)
            rows, u_bf16, turn = rows.from_floors(floors), gathered(u_bf16, kept), turn.pick(kept)
            mixed = streams.Coefficients(*(gathered(values, kept) for values in mixed))
        qr_bf16 = attention.low_rank_query(config, w, u_bf16)
        q_bf16 = attention.rotated_query(config, w, qr_bf16, turn)
        if role.has_indexer:
            rows = self._select(role, weights, rows, u_bf16, qr_bf16, turn, record)
        record(layer, "qr", qr_bf16)
        record(layer, "q", q_bf16)
        for (span, place), (_, tail) in zip(places, rows.slices(), strict=True):
            state = self.sequences[span.sequence]
            attention.attend(
                config,
                w.sink_f32,
                None if role.kv_source is None else self.planes.rows_u8[role.kv_source],
                None if role.kv_source is None else state.table_i32,
                state.windows[layer],
                span,
                fresh_u8[place],
                q_bf16[tail],
                rows.selected_i32[tail] if role.ratio and rows.selected_i32 is not None else None,
            )
        out_bf16 = attention.project_out(config, w, layer, q_bf16, turn, record)
        record(layer, "attn_out", out_bf16)
        _record_mix(record, layer, "hc_attn", mixed)
        return rows, out_bf16, mixed

    def _select(
        self,
        role: LayerRole,
        weights: LayerWeights,
        rows: HandOff,
        u_bf16: Tensor,
        qr_bf16: Tensor,
        turn: RopeRows,
        record: Recorder,
    ) -> HandOff:
        """The hand-off with this index source's list, and its candidate blocks if it produces them."""
        assert weights.indexer is not None
        assert role.kv_source is not None
        config = self.config
        q_rows_u8 = indexer.query_rows(config, weights.indexer, qr_bf16, turn)
        weights_bf16 = indexer.head_weights(config, weights.indexer, u_bf16)
        selected_i32 = scratch.i32(rows.n_rows, config.index_topk)
        blocks_i32 = rows.blocks_i32
        if role.writes_candidates:
            blocks_i32 = scratch.i32(rows.n_rows, config.candidate_topk_blocks)
        if (prepared_u8 := self.planes.prepared_u8.get(role.kv_source)) is not None:
            tables = [self.sequences[span.sequence].table_i32 for span in rows.spans]
            given = rows.spans, q_rows_u8, weights_bf16, selected_i32, blocks_i32
            indexer.select_prepared(config, role, prepared_u8, tables, *given)
        for span, place in rows.slices() if prepared_u8 is None else ():
            keys = role.kv_source
            if self._shared_key_slot and span.kind is RowKind.DECODE and self._last_keys is not None:
                keys = self._last_keys
            indexer.select(
                config,
                role,
                self.planes.keys_u8[keys],
                self.sequences[span.sequence].table_i32,
                span,
                q_rows_u8[place],
                weights_bf16[place],
                selected_i32[place],
                None if blocks_i32 is None else blocks_i32[place],
                record,
            )
        record(role.layer, "index_q", q_rows_u8)
        record(role.layer, "index_w", weights_bf16)
        record(role.layer, "sel", selected_i32)
        if role.writes_candidates and blocks_i32 is not None:
            record(role.layer, "cand_blocks", blocks_i32)
        return replace(rows, selected_i32=selected_i32, blocks_i32=blocks_i32)


def _record_mix(record: Recorder, layer: int, name: str, mixed: streams.Coefficients) -> None:
    for field, value in zip(("pre", "post", "comb"), mixed, strict=True):
        record(layer, f"{name}.{field}", value)
