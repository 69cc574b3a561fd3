"""The grouped output projection wo_a: heads in groups, each with its own block of rows (backbone.md section 5.6)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, linear_tiles, operator, run_slabs
from rocline.hip_kernels.formats import dequantise_tiles
from rocline.hip_kernels.kept import kept
from rocline.hip_kernels.linear import Fp8Weight


def grouped_projection_ref(x_bf16: Tensor, weight_f32: Tensor) -> Tensor:
    """x [R, G, K] times weight [G, N, K]: [R, G * N] FP32; the input is not quantised, FP32 accumulation."""
    groups = [linear_tiles(x_bf16[:, g], weight_f32[g]) for g in range(weight_f32.shape[0])]
    return torch.cat(groups, dim=-1)


@operator
def grouped_projection(heads_bf16: Tensor, weight: Fp8Weight, n_groups: int, out_bf16: Tensor) -> None:
    """Fill out_bf16 [R, G * N] from head outputs [R, H, D], H * D = G * K.

    weight is [G * N, K]; its scale tiles count rows of the whole tensor, not of a group.
    """
    bind_dims(
        "grouped_projection",
        "R",
        {
            "heads_bf16 R H D": heads_bf16,
            "codes_e4m3 N K": weight.codes_e4m3,
            "scales_e8m0 T B": weight.scales_e8m0,
            "out_bf16 R N": out_bf16,
        },
    )

    def decode() -> tuple[Tensor]:
        return (dequantise_tiles(*weight).float().unflatten(0, (n_groups, -1)),)

    decoded = cache(lambda: kept.of(weight.codes_e4m3, n_groups, decode)[0])
    run_slabs(
        lambda heads: grouped_projection_ref(heads.flatten(1).unflatten(1, (n_groups, -1)), decoded()),
        (heads_bf16,),
        out_bf16,
    )
