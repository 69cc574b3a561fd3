"""grouped_projection.py on the GPU: linear.hip with the heads' groups as its groups of columns."""

from __future__ import annotations

from torch import Tensor

from rocline.hip_kernels.act_quant import act_round8_hip
from rocline.hip_kernels.linear_hip import Product, multiply_together
from rocline.hip_kernels.weight_tiles import WeightTiles


def grouped_projection_hip(
    heads_bf16: Tensor,
    tiles: WeightTiles,
    out_bf16: Tensor,
    workspace_f32: Tensor | None = None,
    *,
    round_out: bool = False,
) -> None:
    """Fill out_bf16 [R, G * N] on the current stream from head outputs [R, H, D], which are not quantised.

    tiles is prepare_fp8_weight(weight, G); workspace_f32 as for fp8_linear_hip. FP32 sums, in another order than the
    reference's. With round_out the outputs go through ActQuant8, as act_round8_hip would take them, for a quantised
    linear to read: in the same launch where N is a multiple of 32.
    """
    in_one = round_out and tiles.n_out % 32 == 0
    products = [Product(tiles, out_bf16)]
    multiply_together("grouped_projection", heads_bf16.flatten(1), products, workspace_f32, round_out=in_one)
    if round_out and not in_one:
        act_round8_hip(out_bf16, out_bf16)
