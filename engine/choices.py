"""What an index source chooses of its history on one stage: a list for each row, and candidate blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import LayerRole, TextConfig
from rocline.engine.handoff import HandOff, RowKind
from rocline.engine.layers import indexer
from rocline.engine.layers.indexer import IndexerWeights
from rocline.engine.pages import PagePlanes
from rocline.engine.record import Recorder, ignore
from rocline.engine.rope_rows import RopeRows
from rocline.engine.row_tables import RowTables
from rocline.engine.sequence import SequenceState


@dataclass(frozen=True)
class Choices:
    """Of a stage: its planes, its sequences. What is returned is the hand-off with the layer's list, and with its
    candidate blocks if it produces them."""

    config: TextConfig
    planes: PagePlanes
    sequences: Mapping[int, SequenceState]

    def is_prepared(self, role: LayerRole) -> bool:
        """Whether the keys that the layer scores are kept as kernels read them."""
        return role.kv_source in self.planes.prepared_u8

    def together(
        self,
        role: LayerRole,
        rows: HandOff,
        tables: RowTables,
        index_bf16: Tensor,
        head_weights_bf16: Tensor,
        record: Recorder,
    ) -> HandOff:
        """Of all spans at once, among prepared keys; from index queries [R, h * d] and head weights [R, h], both as
        projected."""
        assert role.kv_source is not None
        selected_i32, blocks_i32 = self._room_for_choice(role, rows)
        q_rows_u8 = None if record is ignore else indexer.query_room(self.config, rows.n_rows)
        looking = index_bf16, head_weights_bf16, q_rows_u8
        keys_u8 = self.planes.prepared_u8[role.kv_source]
        indexer.select_prepared(self.config, role, keys_u8, tables, *looking, selected_i32, blocks_i32)
        if q_rows_u8 is not None:
            record(role.layer, "index_q", q_rows_u8)
        return _chosen(role, rows, head_weights_bf16, selected_i32, blocks_i32, record)

    def one_by_one(
        self,
        role: LayerRole,
        weights: IndexerWeights,
        rows: HandOff,
        u_bf16: Tensor,
        qr_bf16: Tensor,
        turn: RopeRows,
        record: Recorder,
        last_keys: int | None = None,
    ) -> HandOff:
        """Of one span after the other, from the attention sublayer's input and low-rank queries.

        last_keys  source whose keys decoded rows score instead of their own: the reference's defect
        """
        assert role.kv_source is not None
        config = self.config
        q_rows_u8 = indexer.query_rows(config, weights, qr_bf16, turn)
        weights_bf16 = indexer.head_weights(config, weights, u_bf16)
        selected_i32, blocks_i32 = self._room_for_choice(role, rows)
        for span, place in rows.slices():
            keys = role.kv_source
            if last_keys is not None and span.kind is RowKind.DECODE:
                keys = last_keys
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
        return _chosen(role, rows, weights_bf16, selected_i32, blocks_i32, record)

    def _room_for_choice(self, role: LayerRole, rows: HandOff) -> tuple[Tensor, Tensor | None]:
        """The list to be filled, and the candidate blocks: to be filled by their producer, else as they are."""
        config, blocks_i32 = self.config, rows.blocks_i32
        if role.writes_candidates:
            blocks_i32 = scratch.i32(rows.n_rows, config.candidate_topk_blocks)
        return scratch.i32(rows.n_rows, config.index_topk), blocks_i32


def _chosen(
    role: LayerRole,
    rows: HandOff,
    head_weights_bf16: Tensor,
    selected_i32: Tensor,
    blocks_i32: Tensor | None,
    record: Recorder,
) -> HandOff:
    record(role.layer, "index_w", head_weights_bf16)
    record(role.layer, "sel", selected_i32)
    if role.writes_candidates and blocks_i32 is not None:
        record(role.layer, "cand_blocks", blocks_i32)
    return replace(rows, selected_i32=selected_i32, blocks_i32=blocks_i32)
