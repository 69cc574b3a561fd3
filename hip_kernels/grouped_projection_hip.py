"""grouped_projection.py on the GPU: linear.hip with the heads' groups as its groups of columns."""

from __future__ import annotations

from torch import Tensor

from rocline.hip_kernels.linear_hip import multiply_tiles
from rocline.hip_kernels.weight_tiles import WeightTiles


def grouped_projection_hip(
    heads_bf16: Tensor, tiles: WeightTiles, out_bf16: Tensor, workspace_f32: Tensor | None = None
) -> None:
    """Fill out_bf16 [R, G * N] on the current stream from head outputs [R, H, D], which are not quantised.

    tiles is prepare_fp8_weight(weight, G); workspace_f32 as for fp8_linear_hip. FP32 sums, in another order than the
    reference's.
    """
    multiply_tiles("grouped_projection", heads_bf16.flatten(1), tiles, out_bf16, workspace_f32)
