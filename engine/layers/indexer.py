"""An index source's choice: the compressed rows that it and the following layers attend (backbone.md section 7, 8)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import LayerRole, TextConfig
from rocline.engine.handoff import RowSpan, positions_of
from rocline.engine.layers.attention import AttentionWeights, LowRank
from rocline.engine.layers.compressor import CompressorWeights, projection_room
from rocline.engine.record import Recorder
from rocline.engine.rope_rows import RopeRows
from rocline.engine.row_tables import RowTables, visible_rows
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.index_prepared import TILE_BYTES, VECTORS
from rocline.hip_kernels.index_score import History, Queries, index_score
from rocline.hip_kernels.index_select import index_select, index_select_among
from rocline.hip_kernels.index_vectors import index_query, index_weights
from rocline.hip_kernels.linear import Fp8Weight, fp8_linear
from rocline.hip_kernels.selection import candidate_blocks, top_k_list
from rocline.hip_kernels.source_ops import prepared_queries, rotated_linear_pair, source_and_weights

SCORE_ROWS = 256  # rows scored at once: [rows, history] is a chunk's largest temporary


@dataclass(frozen=True)
class IndexerWeights:
    """wq_b [h * d, q_lora], weights_proj_bf16 [h, D]."""

    wq_b: Fp8Weight
    weights_proj_bf16: Tensor


def query_rows(config: TextConfig, weights: IndexerWeights, qr_bf16: Tensor, turn: RopeRows) -> Tensor:
    """Quantised index queries [R, h, bytes] from qr_bf16 [R, q_lora]."""
    heads, width = config.index_n_heads, config.index_head_dim
    projected = scratch.bf16(len(qr_bf16), heads * width)
    fp8_linear(qr_bf16, weights.wq_b, projected)
    rows_u8 = query_room(config, len(qr_bf16))
    index_query(projected.unflatten(1, (heads, width)), turn.cos_f32, turn.sin_f32, rows_u8)
    return rows_u8


def query_room(config: TextConfig, n_rows: int) -> Tensor:
    return scratch.u8(n_rows, config.index_n_heads, RowFormat("index_key", config.index_head_dim).row_bytes)


def both_queries(
    config: TextConfig, attention: AttentionWeights, weights: IndexerWeights, low: LowRank, turn: RopeRows
) -> tuple[Tensor, Tensor]:
    """attention.rotated_query, and projected index queries [R, h * d] BF16, of the same rows."""
    n_rows = len(low.qr_bf16)
    q_bf16 = scratch.bf16(n_rows, config.num_attention_heads, config.head_dim)
    index_bf16 = scratch.bf16(n_rows, config.index_n_heads * config.index_head_dim)
    first = low.qr_bf16, attention.wq_b, turn.cos_f32, turn.sin_f32, q_bf16
    rotated_linear_pair(*first, weights.wq_b, index_bf16, low.rounded_bf16)
    return q_bf16, index_bf16


def raw_head_weights(config: TextConfig, weights: IndexerWeights, u_bf16: Tensor) -> Tensor:
    """head_weights before their factor."""
    out_bf16 = scratch.bf16(len(u_bf16), config.index_n_heads)
    index_weights(u_bf16, weights.weights_proj_bf16, config.index_head_dim, out_bf16, False)
    return out_bf16


def projection_and_head_weights(
    config: TextConfig, side: CompressorWeights, ratio: int, weights: IndexerWeights, u_bf16: Tensor
) -> tuple[Tensor, Tensor]:
    """compressor.projection and raw_head_weights of the same rows."""
    out, weights_bf16 = projection_room(config, ratio, len(u_bf16)), scratch.bf16(len(u_bf16), config.index_n_heads)
    heads = weights.weights_proj_bf16, config.index_head_dim, weights_bf16
    source_and_weights(u_bf16, side.wkv_bf16, out.flatten(1), *heads)
    return out, weights_bf16


def head_weights(config: TextConfig, weights: IndexerWeights, u_bf16: Tensor) -> Tensor:
    """[R, h] BF16 weights of the index heads, scaled."""
    out_bf16 = scratch.bf16(len(u_bf16), config.index_n_heads)
    index_weights(u_bf16, weights.weights_proj_bf16, config.index_head_dim, out_bf16)
    return out_bf16


def select(
    config: TextConfig,
    role: LayerRole,
    keys_u8: Tensor,
    table_i32: Tensor,
    span: RowSpan,
    q_rows_u8: Tensor,
    weights_bf16: Tensor,
    selected_i32: Tensor,
    blocks_i32: Tensor | None,
    record: Recorder,
) -> None:
    """Fill selected_i32 [n_rows, K] for a span's rows; a producer fills blocks_i32 [n_rows, C], a consumer reads it.

    keys_u8 are the source's index keys in pages, table_i32 the sequence's page table, on the host.
    """
    visible_i32 = visible_rows(positions_of([span]), role.ratio)
    table_i32 = scratch.upload(table_i32)
    most_scores = min(SCORE_ROWS, span.n_rows) * int(visible_i32[-1]) if span.n_rows else 0
    room_f32 = scratch.f32(most_scores)  # every part's scores lie here in turn
    for start in range(0, span.n_rows, SCORE_ROWS):
        part = slice(start, min(start + SCORE_ROWS, span.n_rows))
        width = int(visible_i32[part][-1])
        visible = scratch.upload(visible_i32[part])
        scores_f32 = room_f32[: len(visible) * width].view(len(visible), width)
        index_score(q_rows_u8[part], weights_bf16[part], keys_u8, table_i32, visible, scores_f32)
        blocks = None
        if blocks_i32 is not None and role.writes_candidates:
            candidate_blocks(scores_f32, visible, config.candidate_block_size, blocks_i32[part])
        elif blocks_i32 is not None and role.reads_candidates:
            blocks = blocks_i32[part]
        top_k_list(scores_f32, visible, blocks, config.candidate_block_size, selected_i32[part])
        record(role.layer, "index_score", scores_f32)


def select_prepared(
    config: TextConfig,
    role: LayerRole,
    keys_u8: Tensor,
    tables: RowTables,
    index_bf16: Tensor,
    weights_bf16: Tensor,
    q_rows_u8: Tensor | None,
    selected_i32: Tensor,
    blocks_i32: Tensor | None,
) -> None:
    """select for the rows of all spans at once, the same lists, from prepared keys: no scores lie in memory.

    keys_u8       [n_pages, rows of a page / 16, 2112]
    index_bf16    [R, h * d] projected; weights_bf16 [R, h] get their factor
    q_rows_u8     [R, h, bytes] is filled with the quantised queries, where given
    """
    n_rows, n_heads = weights_bf16.shape
    if not n_rows:
        return
    tiles_u8, turn = scratch.u8(-(-n_rows // VECTORS), n_heads, TILE_BYTES), tables.turn(role.ratio)
    by_head_bf16 = index_bf16.unflatten(1, (n_heads, config.index_head_dim))
    prepared_queries(by_head_bf16, turn.cos_f32, turn.sin_f32, weights_bf16, tiles_u8, q_rows_u8)
    queries = Queries(tiles_u8, weights_bf16, tables.visible_i32[role.ratio], tables.row_tiles)
    history = History(keys_u8, tables.page_tables_i32, tables.most_visible[role.ratio])
    if blocks_i32 is not None and role.reads_candidates:
        index_select_among(queries, history, blocks_i32, selected_i32)
    else:
        index_select(queries, history, selected_i32, blocks_i32 if role.writes_candidates else None)
