"""Expert choice: sqrt(softplus) scores, a bias that selects and never weighs (backbone.md section 10)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, linear_tiles, operator, run_slabs
from rocline.hip_kernels.explog import exp_f32, log_f32

WEIGHT_FLOOR = 1e-20


def sqrt_softplus_f32(x_f32: Tensor) -> Tensor:
    """The root of log(1 + e^x), in steps that every device rounds alike (explog.py); any shape.

    Above 20 the logarithm is x, below -20 e^x, whose root is e^(x/2): that is normal where e^x is not any more.
    Between, log(u) + (e - (u - 1)) / u is log(1 + e) where u, which is 1 + e rounded, is not.
    """
    e, root = exp_f32(torch.stack((-x_f32.abs(), x_f32.clamp(max=0.0) * 0.5))).unbind()
    u = e + 1.0
    log1p = log_f32(u) + (e - (u - 1.0)) / u
    softplus = torch.where(x_f32 > 20.0, x_f32, x_f32.clamp(min=0.0) + log1p)
    # By way of FP64, which gives the rounded root; the FP32 library's is off by a bit now and then.
    return torch.where(x_f32 < -20.0, root, softplus.double().sqrt().float())


def router_ref(logits_f32: Tensor, bias_f32: Tensor, n_chosen: int, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """scores [R, E] FP32, ids [R, k] int32 in order of biased score (ties: lower id), weights [R, k] FP32."""
    scores = sqrt_softplus_f32(logits_f32)
    order = torch.sort(scores + bias_f32, dim=1, descending=True, stable=True).indices[:, :n_chosen]
    chosen = scores.gather(1, order)
    total = torch.zeros_like(chosen[:, :1])
    for column in chosen.split(1, dim=1):  # in this order; a library's own differs from device to device
        total = total + column
    weights = chosen / (total + WEIGHT_FLOOR) * factor
    return scores, order.int(), weights


@operator
def router(
    u_bf16: Tensor,
    weight_bf16: Tensor,
    bias_f32: Tensor,
    factor: float,
    scores_f32: Tensor,
    ids_i32: Tensor,
    weights_f32: Tensor,
) -> None:
    """Fill scores_f32 [R, E], ids_i32 and weights_f32 [R, k] for u_bf16 [R, D], weight_bf16 [E, D], bias_f32 [E]."""
    bind_dims(
        "router",
        "R",
        {
            "u_bf16 R D": u_bf16,
            "weight_bf16 E D": weight_bf16,
            "bias_f32 E": bias_f32,
            "scores_f32 R E": scores_f32,
            "ids_i32 R K": ids_i32,
            "weights_f32 R K": weights_f32,
        },
    )
    wide = cache(weight_bf16.float)
    run_slabs(
        lambda u: router_ref(linear_tiles(u, wide()), bias_f32, ids_i32.shape[1], factor),
        (u_bf16,),
        scores_f32,
        ids_i32,
        weights_f32,
    )
