"""Routed and shared experts: clamped SiLU between quantised GEMMs, added by ascending id (backbone.md section 10)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, in_vectors, operator, run_slabs
from rocline.hip_kernels.kept import kept
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
    hidden = in_vectors(F.silu, gate_bf16.float().clamp(max=limit)) * up_bf16.float().clamp(-limit, limit)
    return (hidden if weights_f32 is None else hidden * weights_f32[:, None]).bfloat16()


def expert_ref(x: Fp8Rows, weights_f32: Tensor | None, matrices: tuple[Tensor, ...], limit: float) -> Tensor:
    """One expert's output [R, D] BF16.

    matrices  codes and scales, as block_gemm_ref takes them, of w1 (gate) with w3 (up) after it, then of w2 (down)
    """
    gate_and_up, down = matrices[:2], matrices[2:]
    gate_bf16, up_bf16 = block_gemm_ref(x, *gate_and_up).bfloat16().chunk(2, dim=1)
    hidden_bf16 = swiglu_ref(gate_bf16, up_bf16, weights_f32, limit)
    return block_gemm_ref(quantise_rows(hidden_bf16), *down).bfloat16()


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
    for expert in sorted(set(ids_i32.flatten().tolist())):
        rows, slot = (ids_i32 == expert).nonzero(as_tuple=True)
        total_f32[rows] += expert_ref(x.pick(rows), weights_f32[rows, slot], _routed(routed, expert), limit).float()
    matrices = kept.of(shared[0].codes_e4m3, "expert", lambda: _joined(map(decode_fp8, shared)))
    return total_f32 + expert_ref(x, None, matrices, limit).float()


def _routed(matrices: tuple[Fp4Weight, Fp4Weight, Fp4Weight], expert: int) -> tuple[Tensor, ...]:
    """One expert's matrices as expert_ref takes them."""
    of_expert = (Fp4Weight(codes[expert], scales[expert]) for codes, scales in matrices)
    return kept.of(matrices[0].codes_e2m1x2, expert, lambda: _joined(map(decode_fp4, of_expert)))


def _joined(matrices: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """w1, w3 and w2 with the first two as one: codes and scales, twice."""
    w1, w3, w2 = matrices
    return *(torch.cat(both, dim=-1) for both in zip(w1, w3, strict=True)), *w2
