"""Expert choice: sqrt(softplus) scores, a bias that selects and never weighs (backbone.md section 10)."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, run_tiles

WEIGHT_FLOOR = 1e-20


def router_ref(logits_f32: Tensor, bias_f32: Tensor, n_chosen: int, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """scores [R, E] FP32, ids [R, k] int32 in order of biased score (ties: lower id), weights [R, k] FP32."""
    scores = F.softplus(logits_f32).sqrt()  # log1p(exp(x)), linear above 20
    order = torch.sort(scores + bias_f32, dim=1, descending=True, stable=True).indices[:, :n_chosen]
    chosen = scores.gather(1, order)
    weights = chosen / (chosen.sum(1, keepdim=True) + WEIGHT_FLOOR) * factor
    return scores, order.int(), weights


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
    run_tiles(
        lambda u: router_ref(F.linear(u.float(), wide()), bias_f32, ids_i32.shape[1], factor),
        (u_bf16,),
        (scores_f32, ids_i32, weights_f32),
    )
