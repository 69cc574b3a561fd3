"""The language-model head: full FP32 logits and a flag for rows that are not finite (backbone.md section 3)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, operator, run_slabs
from rocline.hip_kernels.linear import linear_ref


@operator
def head(h_bf16: Tensor, weight_bf16: Tensor, logits_f32: Tensor, finite_u8: Tensor) -> None:
    """Fill logits_f32 [R, V] from the normed h_bf16 [R, D], and finite_u8 [R]: 1 where every logit is finite."""
    bind_dims(
        "head",
        "R",
        {
            "h_bf16 R D": h_bf16,
            "weight_bf16 V D": weight_bf16,
            "logits_f32 R V": logits_f32,
            "finite_u8 R": finite_u8,
        },
    )
    wide = cache(weight_bf16.float)

    def slab(h: Tensor) -> tuple[Tensor, Tensor]:
        logits = linear_ref(h, wide())
        return logits, torch.isfinite(logits).all(1).to(torch.uint8)

    run_slabs(slab, (h_bf16,), logits_f32, finite_u8)
