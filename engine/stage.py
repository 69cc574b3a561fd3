"""One stage: any set of layers, run on a chunk of rows of several sequences; a hand-off in, the next one out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import LayerRole, ModelConfig
from rocline.engine.handoff import FreshRows, HandOff, RowKind, RowSpan, gathered
from rocline.engine.layers import attention, compressor, experts, indexer, streams
from rocline.engine.pages import PAGE_POSITIONS, PagePool
from rocline.engine.record import Recorder, ignore
from rocline.engine.rope_rows import RopeRows, RopeTables
from rocline.engine.scratch import StageMemory
from rocline.engine.sequence import Ring, SequenceState
from rocline.engine.weights import LayerWeights
from rocline.hip_kernels.formats import RowFormat

ARENA_BYTES = 1 << 30  # of address space; a host page is committed when it is first written


@dataclass(frozen=True)
class StageLayers:
    """What a stage runs: layers ascending, and the sources whose key/value side it makes.

    A source's side may stand on an earlier stage than the layer itself (design.md section 6).
    """

    layers: tuple[int, ...]
    kv_sides: frozenset[int]

    @property
    def steps(self) -> list[int]:
        return sorted({*self.layers, *self.kv_sides})


class Stage:
    """Layers with their weights, pages and per-sequence state.

    arena_bytes      slab for the stage's temporaries and hand-offs
    poison           fill them with NaN before use and after (tests)
    shared_key_slot  reproduce the reference's decode defect (backbone.md section 7): index sources score
                     whatever keys were written last. Only for comparing with its recorded data.
    """

    def __init__(
        self,
        config: ModelConfig,
        work: StageLayers,
        weights: dict[int, LayerWeights],
        n_pages: int,
        page_positions: int = PAGE_POSITIONS,
        arena_bytes: int = ARENA_BYTES,
        poison: bool = False,
        shared_key_slot: bool = False,
    ) -> None:
        self.config = config.text_config
        for layer in {*work.layers} ^ work.kv_sides:
            role = self.config.layers[layer]
            if role.owns_rows and role.engram is not None:
                raise ValueError(f"layer {layer} adds Engram: its key/value side must be on the stage of the layer")
        self.work = work
        self.weights = weights
        self.sequences: dict[int, SequenceState] = {}
        self._tables = RopeTables(self.config)
        roles = [self.config.layers[layer] for layer in work.layers]
        self.sources = {role.kv_source for role in roles if role.kv_source is not None} | work.kv_sides
        self.pool = PagePool(self.config, self.sources, n_pages, page_positions)
        first, last = min(work.steps), max(work.steps)
        self.memory = StageMemory(arena_bytes, name=f"arena of layers {first}..{last}", poison=poison)
        self._shared_key_slot = shared_key_slot
        self._last_keys: int | None = None

    def open(self, sequence: int) -> None:
        """Begin a sequence with nothing in it."""
        config = self.config
        row_bytes = RowFormat("window", config.head_dim).row_bytes
        self.sequences[sequence] = SequenceState(
            windows={layer: Ring(config.sliding_window, (row_bytes,), torch.uint8) for layer in self.work.layers},
            pairs={
                layer: Ring(1, (2, config.head_dim), torch.float32)
                for layer in self.work.kv_sides
                if config.layers[layer].ratio == 2
            },
        )

    def close(self, sequence: int) -> None:
        """Forget a sequence and free its pages."""
        self.pool.give_back(self.sequences.pop(sequence).page_table)

    def truncate(self, sequence: int, length: int) -> None:
        """Drop rows from `length` on. Exact within the last REWIND_ROWS rows; farther back rings come up empty."""
        state = self.sequences[sequence]
        state.truncate(length)
        self.pool.give_back(state.page_table, length)

    def can_rewind(self, sequence: int, length: int) -> bool:
        """Whether the state after `length` rows can be had by dropping rows alone."""
        state, window = self.sequences[sequence], self.config.sliding_window
        windows = all(ring.first <= max(0, length - window + 1) for ring in state.windows.values())
        return windows and all(ring.first <= length - length % 2 for ring in state.pairs.values())

    def reserve(self, spans: Sequence[RowSpan]) -> None:
        """Take the pages that these rows will fill. Raises OutOfPages, with nothing changed."""
        if self.sources:
            self.pool.grow([(self.sequences[span.sequence].page_table, span.end) for span in spans])

    def run(self, rows: HandOff, record: Recorder = ignore) -> HandOff:
        """Run the stage's layers over rows whose pages are reserved.

        The input is copied first and may be released; the result lies in this stage's memory until its
        lease is released. Raises ArenaFull when the chunk does not fit.
        """
        with scratch.use(self.memory), self.memory.scope():
            rows = rows.copied()
            for fresh in rows.fresh:
                if fresh.source in self.sources and fresh.source not in self.work.kv_sides:
                    self._store(fresh)
            for layer in self.work.steps:
                rows = self._step(layer, rows, record)
            return replace(rows, lease=self.memory.lease(rows.tensors()))

    def _step(self, layer: int, rows: HandOff, record: Recorder) -> HandOff:
        """One layer; of its temporaries only the new hand-off stays, and of the old one what that still refers to."""
        with self.memory.scope():
            new = self._run_layer(layer, rows, record)
            before = {tensor.data_ptr() for tensor in rows.tensors()}
            self.memory.keep(tensor for tensor in new.tensors() if tensor.data_ptr() not in before)
        after = {tensor.data_ptr() for tensor in new.tensors()}
        self.memory.free(tensor for tensor in rows.tensors() if tensor.data_ptr() not in after)
        return new

    def _store(self, fresh: FreshRows) -> None:
        table = self.sequences[fresh.sequence].page_table
        self.pool.write(fresh.source, table, fresh.first, fresh.rows_u8, fresh.keys_u8)
        if len(fresh.keys_u8):
            self._last_keys = fresh.source

    def _run_layer(self, layer: int, rows: HandOff, record: Recorder) -> HandOff:
        role, weights, config = self.config.layers[layer], self.weights[layer], self.config
        if role.engram is not None and layer in self.work.layers and rows.n_rows:
            assert weights.engram is not None
            streams.add_engram(config, weights.engram, layer, rows.streams_bf16, rows.lookback_i32, record)
        if layer in self.work.kv_sides:
            rows = self._kv_side(role, weights, rows, record)
        if layer not in self.work.layers:
            return rows
        record(layer, "x_in", rows.streams_bf16)
        record(layer, "pre_in", rows.pre_f32)
        rows, mixed = self._attention(role, weights, rows, record)
        if not rows.n_rows:
            return rows
        u_bf16 = streams.collapse_norm(config, weights.ffn_norm_bf16, rows.streams_bf16, mixed.pre_f32)
        mixed = streams.mix(config, weights.hc_ffn, rows.streams_bf16)
        out_bf16 = experts.mixture(config, weights.experts, layer, u_bf16, record)
        streams.merge(out_bf16, rows.streams_bf16, mixed)
        record(layer, "u_ffn", u_bf16)
        record(layer, "moe_out", out_bf16)
        _record_mix(record, layer, "hc_ffn", mixed)
        record(layer, "x_out", rows.streams_bf16)
        return replace(rows, pre_f32=mixed.pre_f32)

    def _kv_side(self, role: LayerRole, weights: LayerWeights, rows: HandOff, record: Recorder) -> HandOff:
        """Compressed rows and index keys of all rows present; then only those go on that the layer itself needs."""
        assert weights.compressor is not None
        config = self.config
        u_bf16 = streams.collapse_norm(config, weights.attn_norm_bf16, rows.streams_bf16, rows.pre_f32)
        if role.ratio == 2:
            planes_f32 = compressor.pair_rows(weights.compressor, u_bf16)
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
    ) -> tuple[HandOff, streams.Coefficients]:
        """The attention sublayer on the rows that the next layer needs, merged in place; window rows of all present."""
        config, layer, w = self.config, role.layer, weights.attention
        turn = self._tables.rows(rows.positions_i32, role.ratio)
        u_bf16 = streams.collapse_norm(config, weights.attn_norm_bf16, rows.streams_bf16, rows.pre_f32)
        fresh_u8 = attention.window_rows(config, w, u_bf16, turn)
        record(layer, "u_attn", u_bf16)
        record(layer, "window_kv", fresh_u8)
        floors = [span.reach.enters(layer + 1) for span in rows.spans]
        places, kept = rows.slices(), rows.tail_index(floors)
        if kept is not None:
            rows, u_bf16, turn = rows.from_floors(floors), gathered(u_bf16, kept), turn.pick(kept)
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
                role.kv_source,
                state,
                self.pool,
                state.windows[layer],
                span,
                fresh_u8[place],
                q_bf16[tail],
                rows.selected_i32[tail] if role.ratio and rows.selected_i32 is not None else None,
            )
        out_bf16 = attention.project_out(config, w, layer, q_bf16, turn, record)
        mixed = streams.mix(config, weights.hc_attn, rows.streams_bf16)
        record(layer, "attn_out", out_bf16)
        _record_mix(record, layer, "hc_attn", mixed)
        streams.merge(out_bf16, rows.streams_bf16, mixed)
        return rows, mixed

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
        for span, place in rows.slices():
            keys = role.kv_source
            if self._shared_key_slot and span.kind is RowKind.DECODE and self._last_keys is not None:
                keys = self._last_keys
            indexer.select(
                config,
                role,
                self.pool,
                self.sequences[span.sequence].page_table,
                keys,
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
