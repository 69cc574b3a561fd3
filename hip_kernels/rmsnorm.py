"""RMSNorm with the weight applied in FP32 after the normalisation (backbone.md section 2.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, run_tiles


def rmsnorm_ref(x_bf16: Tensor, weight_bf16: Tensor, eps: float) -> Tensor:
    """[..., D] BF16: bf16(w * x * rsqrt(mean(x^2) + eps)), FP32 inside, one rounding."""
    x_f32 = x_bf16.float()
    inverse = torch.rsqrt(x_f32.square().mean(-1, keepdim=True) + eps)
    return (weight_bf16.float() * (x_f32 * inverse)).bfloat16()


def rmsnorm(x_bf16: Tensor, weight_bf16: Tensor, eps: float, out_bf16: Tensor) -> None:
    """Fill out_bf16 [R, D] from x_bf16 [R, D] and weight_bf16 [D]; they may be one tensor."""
    bind_dims("rmsnorm", "R D", {"x_bf16 R D": x_bf16, "weight_bf16 D": weight_bf16, "out_bf16 R D": out_bf16})
    run_tiles(lambda x: rmsnorm_ref(x, weight_bf16, eps), (x_bf16,), (out_bf16,))
