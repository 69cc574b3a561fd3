"""Products with weights, by kernels: operators of their torch references' arguments, and what others are made from.

Weights come as `prepare` makes them; workspaces are found here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocline.hip_kernels.act_quant import act_round8_hip
from rocline.hip_kernels.device_memory import here
from rocline.hip_kernels.grouped_projection_hip import grouped_projection_hip
from rocline.hip_kernels.head_hip import head_hip
from rocline.hip_kernels.linear_hip import (
    Product,
    Turn,
    fp8_linear_hip,
    multiply_together,
    rounds_rows,
    workspace_floats,
)
from rocline.hip_kernels.weight_tiles import WeightTiles


def sums(n_rows: int, *weights: WeightTiles) -> Tensor | None:
    """What products of so many rows need to add parts of their sums in."""
    n_floats = workspace_floats(n_rows, *weights)
    return here.lend((n_floats,), torch.float32) if n_floats else None


def rounded(x_bf16: Tensor) -> Tensor:
    """x_bf16 through ActQuant8, in memory of its own."""
    out_bf16 = here.lend(tuple(x_bf16.shape), torch.bfloat16)
    act_round8_hip(x_bf16, out_bf16)
    return out_bf16


def quantised(x_bf16: Tensor, *products: Product, turn: Turn | None = None, rounded_bf16: Tensor | None = None) -> None:
    """Products of the rows through ActQuant8."""
    rounds = rounded_bf16 is None and rounds_rows(len(x_bf16), x_bf16.shape[1])
    rows_bf16 = x_bf16 if rounds else rounded(x_bf16) if rounded_bf16 is None else rounded_bf16
    sums_f32 = sums(len(x_bf16), *(product.tiles for product in products))
    multiply_together("fp8_linear", rows_bf16, products, sums_f32, round_rows=rounds, turn=turn)


def plain(op: str, x_bf16: Tensor, *products: Product) -> None:
    """Products of the rows as they are."""
    multiply_together(op, x_bf16, products, sums(len(x_bf16), *(product.tiles for product in products)))


def fp8_linear(x_bf16: Tensor, weight: WeightTiles, out_bf16: Tensor) -> None:
    quantised(x_bf16, Product(weight, out_bf16))


def bf16_linear(x_bf16: Tensor, weight: WeightTiles, out_bf16: Tensor) -> None:
    plain("bf16_linear", x_bf16, Product(weight, out_bf16))


def f32_linear(x_bf16: Tensor, weight: WeightTiles, out_f32: Tensor) -> None:
    plain("f32_linear", x_bf16, Product(weight, out_f32))


def source_and_weights(
    u_bf16: Tensor, wkv: WeightTiles, out: Tensor, weights_proj: WeightTiles, head_dim: int, weights_bf16: Tensor
) -> None:
    plain("source_and_weights", u_bf16, Product(wkv, out), Product(weights_proj, weights_bf16))


def rotated_linear(
    x_bf16: Tensor,
    weight: WeightTiles,
    cos_f32: Tensor,
    sin_f32: Tensor,
    out_bf16: Tensor,
    rounded_bf16: Tensor | None = None,
) -> None:
    turn = Turn(cos_f32, sin_f32, out_bf16.shape[2])
    quantised(x_bf16, Product(weight, out_bf16.flatten(1)), turn=turn, rounded_bf16=rounded_bf16)


def rotated_linear_pair(
    x_bf16: Tensor,
    weight: WeightTiles,
    cos_f32: Tensor,
    sin_f32: Tensor,
    out_bf16: Tensor,
    second: WeightTiles,
    second_out_bf16: Tensor,
    rounded_bf16: Tensor | None = None,
) -> None:
    turn = Turn(cos_f32, sin_f32, out_bf16.shape[2])
    products = Product(weight, out_bf16.flatten(1)), Product(second, second_out_bf16)
    quantised(x_bf16, *products, turn=turn, rounded_bf16=rounded_bf16)


def grouped_projection(
    heads_bf16: Tensor, weight: WeightTiles, n_groups: int, out_bf16: Tensor, round_out: bool = False
) -> None:
    grouped_projection_hip(heads_bf16, weight, out_bf16, sums(len(heads_bf16), weight), round_out=round_out)


def project_heads(
    heads_bf16: Tensor,
    wo_a: WeightTiles,
    n_groups: int,
    wo_b: WeightTiles,
    grouped_bf16: Tensor,
    out_bf16: Tensor,
) -> None:
    grouped_projection(heads_bf16, wo_a, n_groups, grouped_bf16, round_out=True)
    fp8_linear_hip(grouped_bf16, wo_b, out_bf16, sums(len(heads_bf16), wo_b))


def head(h_bf16: Tensor, weight: WeightTiles, logits_f32: Tensor, finite_u8: Tensor) -> None:
    head_hip(h_bf16, weight, logits_f32, finite_u8, sums(len(h_bf16), weight))
