"""A layer's attention sublayer: queries, window rows, the attended list, output projections (backbone.md section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import TextConfig
from rocline.engine.handoff import RowSpan
from rocline.engine.layers.streams import Coefficients, Entered, MhcWeights, Unmixed, entering, merge_enter
from rocline.engine.rope_rows import RopeRows
from rocline.engine.sequence import Ring
from rocline.hip_kernels import layer_ops
from rocline.hip_kernels.attention_hip import Selected, Windows, shares_windows
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.layer_ops import project_heads, project_heads_enter, rotated_linear
from rocline.hip_kernels.linear import Fp8Weight, fp8_linear
from rocline.hip_kernels.mhc_hip import FEW_ROWS
from rocline.hip_kernels.rmsnorm import rmsnorm
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


class LowRank(NamedTuple):
    """qr_bf16 [R, q_lora]; rounded_bf16 the same through ActQuant8, where it is at hand."""

    qr_bf16: Tensor
    rounded_bf16: Tensor | None = None


def latents(
    config: TextConfig,
    weights: AttentionWeights,
    entered: Entered,
    turn: RopeRows,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[LowRank, Tensor]:
    """low_rank_query and window_rows of the same input.

    into  rings_u8 [slots, bytes] and slots_i32 [R], where window rows go; they are returned where they lie
    """
    n_rows = len(entered.u_bf16)
    qr_bf16, projected = scratch.bf16(n_rows, config.q_lora_rank), scratch.bf16(n_rows, config.head_dim)
    rounded_bf16 = scratch.bf16(*qr_bf16.shape) if scratch.is_on_device() else None
    rows_u8, slots_i32 = into or (_window_room(config, n_rows), None)
    layer_ops.latents(
        entered.u_bf16,
        weights.wq_a,
        qr_bf16,
        weights.wkv,
        projected,
        weights.q_norm_bf16,
        weights.kv_norm_bf16,
        config.rms_norm_eps,
        turn.cos_f32,
        turn.sin_f32,
        rows_u8,
        slots_i32,
        entered.rounded_bf16,
        rounded_bf16,
    )
    return LowRank(qr_bf16, rounded_bf16), rows_u8


def low_rank_query(config: TextConfig, weights: AttentionWeights, u_bf16: Tensor) -> Tensor:
    """qr [R, q_lora] BF16, which the indexer reads too."""
    qr_bf16 = scratch.bf16(len(u_bf16), config.q_lora_rank)
    fp8_linear(u_bf16, weights.wq_a, qr_bf16)
    rmsnorm(qr_bf16, weights.q_norm_bf16, config.rms_norm_eps, qr_bf16)
    return qr_bf16


def window_rows(config: TextConfig, weights: AttentionWeights, u_bf16: Tensor, turn: RopeRows) -> Tensor:
    """Packed window rows [R, bytes]: projection, norm, rotation, then ActQuant8 over the whole width."""
    projected, rows_u8 = scratch.bf16(len(u_bf16), config.head_dim), _window_room(config, len(u_bf16))
    fp8_linear(u_bf16, weights.wkv, projected)
    window_row(projected, weights.kv_norm_bf16, config.rms_norm_eps, turn.cos_f32, turn.sin_f32, rows_u8)
    return rows_u8


def _window_room(config: TextConfig, n_rows: int) -> Tensor:
    return scratch.u8(n_rows, RowFormat("window", config.head_dim).row_bytes)


def rotated_query(config: TextConfig, weights: AttentionWeights, low: LowRank, turn: RopeRows) -> Tensor:
    """q [R, H, hd] BF16; there is no norm per head."""
    q_bf16 = scratch.bf16(len(low.qr_bf16), config.num_attention_heads, config.head_dim)
    rotated_linear(low.qr_bf16, weights.wq_b, turn.cos_f32, turn.sin_f32, q_bf16, low.rounded_bf16)
    return q_bf16


def span_windows(window: int, ring: Ring, span: RowSpan, fresh_u8: Tensor, n_rows: int) -> Windows | None:
    """What the last n_rows of a span's rows see of its window rows, of which fresh_u8 [n, bytes] are new; the layer's
    ring moves past the span. None where there is nothing to see for."""
    if not span.n_rows:
        return None
    if not n_rows:
        ring.append(span.start, fresh_u8)
        return None
    base = min(max(0, span.end - n_rows - window + 1), span.start)
    window_u8 = scratch.like(fresh_u8, span.end - base)
    ring.read(base, span.start, out=window_u8[: span.start - base])
    copy_rows(fresh_u8, window_u8[span.start - base :])
    ring.append(span.start, fresh_u8)
    positions = torch.arange(span.end - n_rows, span.end, dtype=torch.int32)
    first = (positions - window + 1).clamp_min(0)
    of_rows = torch.zeros(n_rows, dtype=torch.int32), first - base, positions - first + 1
    ring_i32, first_i32, count_i32 = scratch.upload_together(*of_rows)
    return Windows(window_u8[None], ring_i32, first_i32, count_i32, window)


def heads_room(q_bf16: Tensor, selected: Selected | None) -> Tensor:
    """For head outputs [R, H, hd]: the place of the queries, or one beside it where that saves a launch."""
    apart = scratch.is_on_device() and shares_windows(q_bf16, selected)
    return scratch.like(q_bf16, len(q_bf16)) if apart else q_bf16


def project_out(
    config: TextConfig,
    weights: AttentionWeights,
    heads_bf16: Tensor,
    mixed: Coefficients,
    norm_bf16: Tensor,
    next_weights: MhcWeights,
    streams_bf16: Tensor,
) -> tuple[Tensor, Entered]:
    """The sublayer's output [R, D] BF16 from head outputs [R, H, hd]; and what enters the next one, once that output is
    merged into the streams [R, n, D] by `mixed`, in place."""
    grouped_bf16 = scratch.bf16(len(heads_bf16), config.o_groups * config.o_lora_rank)
    out_bf16 = scratch.bf16(len(heads_bf16), config.hidden_size)
    of_heads = heads_bf16, weights.wo_a, config.o_groups, weights.wo_b, grouped_bf16, out_bf16
    if len(heads_bf16) > FEW_ROWS:  # of which no kernel does both, and memory lent in this order is packed tighter
        project_heads(*of_heads)
        return out_bf16, merge_enter(config, Unmixed(out_bf16, mixed), norm_bf16, next_weights, streams_bf16)
    into, numbers = entering(config, streams_bf16)
    merging = mixed.post_f32, mixed.comb_f32, streams_bf16, mixed.pre_f32
    next_one = norm_bf16, *next_weights, *numbers, into.u_bf16, *into.coefficients, into.rounded_bf16
    project_heads_enter(*of_heads, *merging, *next_one)
    return out_bf16, into
