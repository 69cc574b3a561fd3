"""An index source's choice: the compressed rows that it and the following layers attend (backbone.md section 7, 8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import LayerRole, TextConfig
from rocline.engine.handoff import RowSpan
from rocline.engine.record import Recorder
from rocline.engine.rope_rows import RopeRows
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.index_score import index_score
from rocline.hip_kernels.index_vectors import index_query, index_weights
from rocline.hip_kernels.linear import Fp8Weight, fp8_linear
from rocline.hip_kernels.selection import candidate_blocks, top_k_list

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
    rows_u8 = scratch.u8(len(qr_bf16), heads, RowFormat("index_key", width).row_bytes)
    index_query(projected.unflatten(1, (heads, width)), turn.cos_f32, turn.sin_f32, rows_u8)
    return rows_u8


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

    keys_u8 are the source's index keys in pages, table_i32 the sequence's page table.
    """
    positions_i32 = torch.arange(span.start, span.end, dtype=torch.int32)
    visible_i32 = torch.div(positions_i32 + 1, role.ratio, rounding_mode="floor").int()
    most_scores = min(SCORE_ROWS, span.n_rows) * int(visible_i32[-1]) if span.n_rows else 0
    room_f32 = scratch.f32(most_scores)  # every part's scores lie here in turn
    for start in range(0, span.n_rows, SCORE_ROWS):
        part = slice(start, min(start + SCORE_ROWS, span.n_rows))
        visible = visible_i32[part]
        width = int(visible[-1])
        scores_f32 = room_f32[: len(visible) * width].view(len(visible), width)
        index_score(q_rows_u8[part], weights_bf16[part], keys_u8, table_i32, visible, scores_f32)
        blocks = None
        if blocks_i32 is not None and role.writes_candidates:
            candidate_blocks(scores_f32, visible, config.candidate_block_size, blocks_i32[part])
        elif blocks_i32 is not None and role.reads_candidates:
            blocks = blocks_i32[part]
        top_k_list(scores_f32, visible, blocks, config.candidate_block_size, selected_i32[part])
        record(role.layer, "index_score", scores_f32)
