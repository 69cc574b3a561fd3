"""head.py on the GPU: linear.hip with FP32 logits and a flag a row."""

from __future__ import annotations

from torch import Tensor

from rocline.hip_kernels.binding import bind_dims
from rocline.hip_kernels.linear_hip import multiply_tiles
from rocline.hip_kernels.weight_tiles import WeightTiles


def head_hip(
    h_bf16: Tensor, tiles: WeightTiles, logits_f32: Tensor, finite_u8: Tensor, workspace_f32: Tensor | None = None
) -> None:
    """head on the current stream: logits_f32 [R, V] from h_bf16 [R, D], finite_u8 [R] 1 where every logit is finite.

    tiles is prepare_bf16_weight(head.weight). Products of BF16 are exact in FP32, in which they are added.
    """
    bind_dims("head", "", {"logits_f32 R V": logits_f32, "finite_u8 R": finite_u8})
    finite_u8.fill_(1)
    multiply_tiles("head", h_bf16, tiles, logits_f32, workspace_f32, finite_u8)
