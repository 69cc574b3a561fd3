"""Routed and shared experts: clamped SiLU between quantised GEMMs, added by ascending id (backbone.md section 10)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, operator, run_slabs, run_tiles
from rocline.hip_kernels.linear import (
    Fp4Weight,
    Fp8Rows,
    Fp8Weight,
    block_gemm_ref,
    decode_fp4,
    decode_fp8,
    quantise_rows,
)


def swiglu_ref(gate_bf16: Tensor, up_bf16: Tensor, weights_f32: Tensor | None, limit: float) -> Tensor:
    """[R, I] BF16: silu(min(gate, limit)) * clamp(up), times the routing weight [R] here, before w2 quantises."""
    hidden = F.silu(gate_bf16.float().clamp(max=limit)) * up_bf16.float().clamp(-limit, limit)
    return (hidden if weights_f32 is None else hidden * weights_f32[:, None]).bfloat16()


def expert_ref(
    x: Fp8Rows, weights_f32: Tensor | None, matrices: Sequence[tuple[Tensor, Tensor]], limit: float
) -> Tensor:
    """One expert's output [R, D] BF16; matrices are w1 (gate), w3 (up), w2 (down) as block_gemm_ref takes them."""
    w1, w3, w2 = matrices
    gate_bf16, up_bf16 = block_gemm_ref(x, *w1).bfloat16(), block_gemm_ref(x, *w3).bfloat16()
    hidden_bf16 = torch.empty_like(gate_bf16)
    if weights_f32 is None:  # tiles: silu's bits depend on the number of rows
        run_tiles(lambda gate, up: swiglu_ref(gate, up, None, limit), (gate_bf16, up_bf16), (hidden_bf16,))
    else:
        per_row = (gate_bf16, up_bf16, weights_f32)
        run_tiles(lambda gate, up, weight: swiglu_ref(gate, up, weight, limit), per_row, (hidden_bf16,))
    return block_gemm_ref(quantise_rows(hidden_bf16), *w2).bfloat16()


@operator
def experts(
    u_bf16: Tensor,
    ids_i32: Tensor,
    weights_f32: Tensor,
    routed: tuple[Fp4Weight, Fp4Weight, Fp4Weight],
    shared: tuple[Fp8Weight, Fp8Weight, Fp8Weight],
    limit: float,
    out_bf16: Tensor,
) -> None:
    """Fill out_bf16 [R, D]: BF16 expert outputs added in FP32 by ascending id, the shared one last, one rounding.

    u_bf16 [R, D]; ids_i32, weights_f32 [R, k]; routed (first axis: expert) and shared are w1 (gate), w3 (up),
    w2 (down).
    """
    bind_dims(
        "experts",
        "R",
        {"u_bf16 R D": u_bf16, "ids_i32 R K": ids_i32, "weights_f32 R K": weights_f32, "out_bf16 R D": out_bf16},
    )
    run_slabs(
        lambda u, ids, weights: mixture_ref(u, ids, weights, routed, shared, limit),
        (u_bf16, ids_i32, weights_f32),
        out_bf16,
    )


def mixture_ref(
    u_bf16: Tensor,
    ids_i32: Tensor,
    weights_f32: Tensor,
    routed: tuple[Fp4Weight, Fp4Weight, Fp4Weight],
    shared: tuple[Fp8Weight, Fp8Weight, Fp8Weight],
    limit: float,
) -> Tensor:
    """The sum that `experts` fills in, FP32 before its one rounding; rows are gathered by expert."""
    x = quantise_rows(u_bf16)
    total_f32 = torch.zeros_like(u_bf16, dtype=torch.float32)
    for expert in torch.unique(ids_i32).tolist():
        rows, slot = (ids_i32 == expert).nonzero(as_tuple=True)
        matrices = [decode_fp4(Fp4Weight(m.codes_e2m1x2[expert], m.scales_e8m0[expert])) for m in routed]
        total_f32[rows] += expert_ref(x.pick(rows), weights_f32[rows, slot], matrices, limit).float()
    return total_f32 + expert_ref(x, None, [decode_fp8(m) for m in shared], limit).float()
