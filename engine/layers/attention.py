"""A layer's attention sublayer: queries, window rows, the attended list, output projections (backbone.md section 5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import TextConfig
from rocline.engine.handoff import RowSpan
from rocline.engine.record import Recorder
from rocline.engine.rope_rows import RopeRows
from rocline.engine.sequence import Ring
from rocline.hip_kernels.attention import attention
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.grouped_projection import grouped_projection
from rocline.hip_kernels.linear import Fp8Weight, fp8_linear
from rocline.hip_kernels.rmsnorm import rmsnorm
from rocline.hip_kernels.rope import rope
from rocline.hip_kernels.rows import copy_rows
from rocline.hip_kernels.window_row import window_row


@dataclass(frozen=True)
class AttentionWeights:
    """wq_a [q_lora, D], wq_b [H * hd, q_lora], wkv [hd, D], wo_a [G * o_lora, K], wo_b [D, G * o_lora], sink [H]."""

    wq_a: Fp8Weight
    q_norm_bf16: Tensor
    wq_b: Fp8Weight
    wkv: Fp8Weight
    kv_norm_bf16: Tensor
    wo_a: Fp8Weight
    wo_b: Fp8Weight
    sink_f32: Tensor


def low_rank_query(config: TextConfig, weights: AttentionWeights, u_bf16: Tensor) -> Tensor:
    """qr [R, q_lora] BF16, which the indexer reads too."""
    qr_bf16 = scratch.bf16(len(u_bf16), config.q_lora_rank)
    fp8_linear(u_bf16, weights.wq_a, qr_bf16)
    rmsnorm(qr_bf16, weights.q_norm_bf16, config.rms_norm_eps, qr_bf16)
    return qr_bf16


def rotated_query(config: TextConfig, weights: AttentionWeights, qr_bf16: Tensor, turn: RopeRows) -> Tensor:
    """q [R, H, hd] BF16; there is no norm per head."""
    q_bf16 = scratch.bf16(len(qr_bf16), config.num_attention_heads, config.head_dim)
    fp8_linear(qr_bf16, weights.wq_b, q_bf16.flatten(1))
    rope(q_bf16, turn.cos_f32, turn.sin_f32, q_bf16)  # in place: a second [R, H, hd] is a chunk's largest tensor
    return q_bf16


def window_rows(config: TextConfig, weights: AttentionWeights, u_bf16: Tensor, turn: RopeRows) -> Tensor:
    """Packed window rows [R, bytes]: projection, norm, rotation, then ActQuant8 over the whole width."""
    projected = scratch.bf16(len(u_bf16), config.head_dim)
    fp8_linear(u_bf16, weights.wkv, projected)
    rows_u8 = scratch.u8(len(u_bf16), RowFormat("window", config.head_dim).row_bytes)
    window_row(projected, weights.kv_norm_bf16, config.rms_norm_eps, turn.cos_f32, turn.sin_f32, rows_u8)
    return rows_u8


def attend(
    config: TextConfig,
    sink_f32: Tensor,
    rows_u8: Tensor | None,
    table_i32: Tensor | None,
    ring: Ring,
    span: RowSpan,
    fresh_u8: Tensor,
    q_bf16: Tensor,
    selected_i32: Tensor | None,
) -> None:
    """Turn the queries of a span's last A rows into head outputs, and move the layer's ring past the span.

    fresh_u8 [n_rows, bytes] the span's window rows; q_bf16 [A, H, hd], in place. The source's rows_u8 in pages, the
    sequence's table_i32, which is on the host, and selected_i32 [A, K] are None at ratio 0.
    """
    if not span.n_rows:
        return
    if not len(q_bf16):
        ring.append(span.start, fresh_u8)
        return
    window = config.sliding_window
    oldest = max(0, span.end - len(q_bf16) - window + 1)
    base = min(oldest, span.start)
    window_u8 = scratch.like(fresh_u8, span.end - base)
    ring.read(base, span.start, out=window_u8[: span.start - base])
    copy_rows(fresh_u8, window_u8[span.start - base :])
    ring.append(span.start, fresh_u8)

    positions = torch.arange(span.end - len(q_bf16), span.end, dtype=torch.int32)
    first = (positions - window + 1).clamp_min(0)
    rows_of_window = first - base, positions - first + 1
    given = rows_of_window if table_i32 is None else (*rows_of_window, table_i32)
    first_i32, count_i32, *tables = scratch.upload_together(*given)
    attention(
        q_bf16,
        window_u8,
        first_i32,
        count_i32,
        window,
        rows_u8,
        tables[0] if tables else None,
        selected_i32,
        sink_f32,
        q_bf16,
    )


def project_out(
    config: TextConfig, weights: AttentionWeights, layer: int, heads_bf16: Tensor, turn: RopeRows, record: Recorder
) -> Tensor:
    """The sublayer's output [R, D] BF16 from head outputs [R, H, hd], de-rotated in place at the query's position."""
    rope(heads_bf16, turn.cos_f32, turn.sin_f32, heads_bf16, inverse=True)
    record(layer, "o", heads_bf16)
    grouped_bf16 = scratch.bf16(len(heads_bf16), config.o_groups * config.o_lora_rank)
    grouped_projection(heads_bf16, weights.wo_a, config.o_groups, grouped_bf16)
    out_bf16 = scratch.bf16(len(heads_bf16), config.hidden_size)
    fp8_linear(grouped_bf16, weights.wo_b, out_bf16)
    return out_bf16
