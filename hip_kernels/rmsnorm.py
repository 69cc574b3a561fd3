"""RMSNorm with the weight applied in FP32 after the normalisation (backbone.md section 2.2)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, operator, run_slabs
from rocline.hip_kernels.kernel import Kernel, launch


@cache
def _kernel(width: int) -> Kernel:
    return Kernel("rmsnorm.hip", "rmsnorm", "PPPf", threads=128, defines={"WIDTH": width}, lds_bytes=16)


RELEASE_KERNELS = (_kernel(1280),)  # low-rank queries of a chunk's last rows


def rmsnorm_ref(x_bf16: Tensor, weight_bf16: Tensor, eps: float) -> Tensor:
    """[..., D] BF16: bf16(w * x * rsqrt(mean(x^2) + eps)), FP32 inside, one rounding."""
    x_f32 = x_bf16.float()
    inverse = torch.rsqrt((x_f32 * x_f32).mean(-1, keepdim=True) + eps)
    return (weight_bf16.float() * (x_f32 * inverse)).bfloat16()


@operator
def rmsnorm(x_bf16: Tensor, weight_bf16: Tensor, eps: float, out_bf16: Tensor) -> None:
    """Fill out_bf16 [R, D] from x_bf16 [R, D] and weight_bf16 [D]; they may be one tensor."""
    bind_dims("rmsnorm", "R D", {"x_bf16 R D": x_bf16, "weight_bf16 D": weight_bf16, "out_bf16 R D": out_bf16})
    run_slabs(lambda x: rmsnorm_ref(x, weight_bf16, eps), (x_bf16,), out_bf16)


def rmsnorm_hip(x_bf16: Tensor, weight_bf16: Tensor, eps: float, out_bf16: Tensor) -> None:
    """rmsnorm on the current stream, for D a multiple of 8: the same bits wherever the sum is exact, in whatever order.

    The kernel's own order depends on D alone.
    """
    n_rows, width = bind_dims(
        "rmsnorm", "R D", {"x_bf16 R D": x_bf16, "weight_bf16 D": weight_bf16, "out_bf16 R D": out_bf16}
    )
    if n_rows:
        launch(_kernel(width), grid=(n_rows, 1), args=(out_bf16, x_bf16, weight_bf16, eps), lds_bytes=16)
