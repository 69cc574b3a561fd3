"""Neighbouring operators of a layer that kernels do in one launch. The references are the operators one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rocline.hip_kernels.act_quant import act_round8
from rocline.hip_kernels.attention import attention
from rocline.hip_kernels.attention_hip import Selected, Windows
from rocline.hip_kernels.binding import operator
from rocline.hip_kernels.experts import experts
from rocline.hip_kernels.grouped_projection import grouped_projection
from rocline.hip_kernels.linear import Fp4Weight, Fp8Weight, fp8_linear
from rocline.hip_kernels.mhc import mhc_merge_enter
from rocline.hip_kernels.rmsnorm import rmsnorm
from rocline.hip_kernels.rope import rope
from rocline.hip_kernels.router import router
from rocline.hip_kernels.window_row import window_row


@operator
def latents(
    u_bf16: Tensor,
    wq_a: Fp8Weight,
    qr_bf16: Tensor,
    wkv: Fp8Weight,
    projected_bf16: Tensor,
    q_norm_bf16: Tensor,
    kv_norm_bf16: Tensor,
    eps: float,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
    slots_i32: Tensor | None = None,
    rounded_bf16: Tensor | None = None,
    rounded_qr_bf16: Tensor | None = None,
) -> None:
    """Fill qr_bf16 [R, q_lora] and the window rows rows_u8 of u_bf16 [R, D]: fp8_linear with two weights, then rmsnorm,
    and window_row, whose arguments the last ones are.

    projected_bf16   [R, hd] room for what lies between
    rounded_bf16     [R, D], here and elsewhere: the rows through ActQuant8, where somebody has that already
    rounded_qr_bf16  [R, q_lora], where given, is filled with the queries through ActQuant8
    """
    fp8_linear(u_bf16, wq_a, qr_bf16)
    fp8_linear(u_bf16, wkv, projected_bf16)
    rmsnorm(qr_bf16, q_norm_bf16, eps, qr_bf16)
    if rounded_qr_bf16 is not None:
        act_round8(qr_bf16, rounded_qr_bf16)
    window_row(projected_bf16, kv_norm_bf16, eps, cos_f32, sin_f32, rows_u8, slots_i32)


@operator
def rotated_linear(
    x_bf16: Tensor,
    weight: Fp8Weight,
    cos_f32: Tensor,
    sin_f32: Tensor,
    out_bf16: Tensor,
    rounded_bf16: Tensor | None = None,
) -> None:
    """Fill out_bf16 [R, H, D]: fp8_linear of x_bf16 [R, K], then rope."""
    fp8_linear(x_bf16, weight, out_bf16.flatten(1))
    rope(out_bf16, cos_f32, sin_f32, out_bf16)


@operator
def attend(
    q_bf16: Tensor,
    windows: Windows,
    selected: Selected | None,
    sink_f32: Tensor,
    cos_f32: Tensor,
    sin_f32: Tensor,
    out_bf16: Tensor,
) -> None:
    """attention of rows of several sequences, then rope backwards; see attention.attention.

    q_bf16, out_bf16  [R, H, D], perhaps one tensor; cos_f32, sin_f32 [R, rope_dim/2]
    windows           all rings of the layer, or one that is the rows' own windows
    """
    for some, window_u8, table_i32 in _by_owner(windows, selected):
        first_i32, count_i32 = windows.first_i32[some], windows.count_i32[some]
        if (first_i32 + count_i32 > len(window_u8)).any():  # one row, whose window wraps round
            window_u8, first_i32 = window_u8.roll(-int(first_i32), 0), torch.zeros_like(first_i32)
        out = out_bf16 if isinstance(some, slice) else torch.empty_like(q_bf16[some])
        attention(
            q_bf16[some],
            window_u8,
            first_i32,
            count_i32,
            windows.size,
            selected.rows_u8 if selected else None,
            table_i32,
            selected.index_i32[some] if selected else None,
            sink_f32,
            out,
        )
        if out is not out_bf16:
            out_bf16[some] = out
    rope(out_bf16, cos_f32, sin_f32, out_bf16, inverse=True)


def _by_owner(windows: Windows, selected: Selected | None) -> Iterator[tuple[slice | Tensor, Tensor, Tensor | None]]:
    """Rows that one call of attention can take, their ring and page table: all of them, or one at a time."""
    tables_i32 = selected.page_tables_i32 if selected else None
    wraps = (windows.first_i32 + windows.count_i32 > windows.rows_u8.shape[1]).any()
    if len(windows.rows_u8) == 1 and (tables_i32 is None or len(tables_i32) == 1) and not wraps:
        yield slice(None), windows.rows_u8[0], None if tables_i32 is None else tables_i32[0]
        return
    for row, ring in enumerate(windows.ring_i32.tolist()):
        table_i32 = None if selected is None else selected.page_tables_i32[int(selected.sequence_i32[row])]
        yield torch.tensor([row], device=windows.ring_i32.device), windows.rows_u8[ring], table_i32


@operator
def project_heads(
    heads_bf16: Tensor, wo_a: Fp8Weight, n_groups: int, wo_b: Fp8Weight, grouped_bf16: Tensor, out_bf16: Tensor
) -> None:
    """Fill out_bf16 [R, D]: grouped_projection of heads_bf16 [R, H, D], then fp8_linear.

    grouped_bf16 [R, n_groups * o_lora] is room for what lies between.
    """
    grouped_projection(heads_bf16, wo_a, n_groups, grouped_bf16)
    fp8_linear(grouped_bf16, wo_b, out_bf16)


@operator
def project_heads_enter(
    heads_bf16: Tensor,
    wo_a: Fp8Weight,
    n_groups: int,
    wo_b: Fp8Weight,
    grouped_bf16: Tensor,
    sublayer_bf16: Tensor,
    *others: Any,
) -> None:
    """project_heads of heads_bf16 [R, H, D] into sublayer_bf16 [R, D], and mhc_merge_enter of that with the others."""
    project_heads(heads_bf16, wo_a, n_groups, wo_b, grouped_bf16, sublayer_bf16)
    mhc_merge_enter(sublayer_bf16, *others)


@operator
def route_and_mix(
    u_bf16: Tensor,
    gate_bf16: Tensor,
    bias_f32: Tensor,
    factor: float,
    scores_f32: Tensor,
    ids_i32: Tensor,
    weights_f32: Tensor,
    routed: tuple[Fp4Weight, Fp4Weight, Fp4Weight],
    shared: tuple[Fp8Weight, Fp8Weight, Fp8Weight],
    limit: float,
    out_bf16: Tensor,
    rounded_bf16: Tensor | None = None,
) -> None:
    """router of u_bf16 [R, D], and experts as it has chosen."""
    router(u_bf16, gate_bf16, bias_f32, factor, scores_f32, ids_i32, weights_f32)
    experts(u_bf16, ids_i32, weights_f32, routed, shared, limit, out_bf16)
