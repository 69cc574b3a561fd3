"""The key/value side of a source's layer on one stage: what it makes of rows, and where that is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import LayerRole, TextConfig
from rocline.engine.handoff import OF_EACH_ROW, FreshRows, HandOff, RowSpan
from rocline.engine.layers import compressor
from rocline.engine.layers.compressor import CompressorWeights
from rocline.engine.pages import PagePlanes
from rocline.engine.record import Recorder
from rocline.engine.rope_rows import RopeTables
from rocline.engine.row_tables import RowTables
from rocline.engine.sequence import REWIND_ROWS, RingRoom, SequenceState
from rocline.hip_kernels.compressor_hip import Pairs
from rocline.hip_kernels.rows import copy_rows


@dataclass(frozen=True)
class KvSides:
    """Of a stage: its planes, its sequences, the rings of their open pairs by source."""

    config: TextConfig
    planes: PagePlanes
    rope: RopeTables
    sequences: Mapping[int, SequenceState]
    pairs: Mapping[int, RingRoom]

    def store(self, fresh: FreshRows) -> None:
        """Store rows that a source has made."""
        table_i32 = self.sequences[fresh.sequence].table_i32
        self.planes.write(fresh.source, table_i32, fresh.first, fresh.rows_u8, fresh.keys_u8)

    def one_by_one(
        self, role: LayerRole, weights: CompressorWeights, rows: HandOff, u_bf16: Tensor, record: Recorder
    ) -> list[FreshRows]:
        """Make and store what each span closes."""
        config, fresh = self.config, []
        if role.ratio == 2:
            tokens_f32 = compressor.projection(config, weights, 2, u_bf16)
        else:
            latents_bf16 = compressor.single_latent(config, weights, u_bf16)
        for span, place in rows.slices():
            if role.ratio == 2:
                ring = self.sequences[span.sequence].pairs[role.layer]
                latent = compressor.pooled_latent(config, weights, ring, span, tokens_f32[place])
            else:
                latent = latents_bf16[place]
            if span.keeps_rows and len(latent):
                made = compressor.fresh_rows(config, weights, role, self.rope, span, latent, record)
                self.store(made)
                fresh.append(made)
        return fresh

    def together(
        self,
        role: LayerRole,
        weights: CompressorWeights,
        rows: HandOff,
        tables: RowTables,
        projected: Tensor,
        record: Recorder,
        forwards: bool,
    ) -> list[FreshRows]:
        """Make and store what all spans close, the same bytes, from what compressor.projection made of the rows.

        Returned for later visits, where there are any; of rows that have a group each, those of all in one.
        """
        source = role.layer
        groups, pools = tables.groups[role.ratio], self.planes.pools(source)
        taken: Pairs | Tensor = projected
        if role.ratio == 2:
            room_f32 = self.pairs[source].together
            assert room_f32 is not None
            for span in rows.spans:
                if span.start % 2 and span.keeps_rows and span.n_rows:
                    self.sequences[span.sequence].pairs[source].check(span.start - 1, span.start)
            held_f32 = room_f32.flatten(0, 1)
            taken = Pairs(projected[:, 0], projected[:, 1], held_f32, groups.pair_i32, groups.slot_i32)
        made = compressor.store_rows(self.config, weights, taken, groups, tables.page_tables_i32, pools)
        fresh, start = [], 0
        for span, place in rows.slices():
            if role.ratio == 2:
                self._hold(source, span, projected[place])
            n = closed_by(span, role.ratio)
            own, start = slice(start, start + n), start + n
            if not n or not span.keeps_rows:
                continue
            record(source, "lat", made.latent_bf16[own])
            record(source, "index_k", made.keys_u8[own])
            record(source, "comp_kv", made.rows_u8[own])
            if forwards and not tables.one_a_row:
                parts = made.rows_u8, made.keys_u8
                if n < len(made.rows_u8):  # a hand-off's tensors have spans of their own
                    parts = _copied(made.rows_u8[own]), _copied(made.keys_u8[own])
                fresh.append(FreshRows(source, span.sequence, span.start // role.ratio, *parts))
        if forwards and tables.one_a_row:
            fresh.append(FreshRows(source, OF_EACH_ROW, 0, made.rows_u8, made.keys_u8))
        return fresh

    def _hold(self, source: int, span: RowSpan, tokens_f32: Tensor) -> None:
        """Move the ring of open pairs past the span. The kernel that pools has written few tokens there already; more
        would lie where a pair is read from."""
        ring = self.sequences[span.sequence].pairs[source]
        if span.n_rows > REWIND_ROWS:
            ring.append(span.start, tokens_f32)
        elif span.n_rows:
            ring.note(span.start, span.n_rows)


def closed_by(span: RowSpan, ratio: int) -> int:
    """Groups in the tables that a span closes; those that are kept already count at ratio 1."""
    if ratio == 1:
        return span.n_rows
    return max(0, span.end // 2 - span.start // 2) if span.keeps_rows else 0


def _copied(rows_u8: Tensor) -> Tensor:
    out_u8 = scratch.like(rows_u8, len(rows_u8))
    copy_rows(rows_u8, out_u8)
    return out_u8
