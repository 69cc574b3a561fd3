"""router.py on the GPU: logits by linear.hip, then the choice by router.hip."""

from __future__ import annotations

from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims
from rocline.hip_kernels.kernel import Kernel, launch
from rocline.hip_kernels.linear_hip import f32_linear_hip
from rocline.hip_kernels.weight_tiles import WeightTiles

ROWS, MOST_EXPERTS, MOST_CHOSEN = 8, 384, 32

_CHOOSE = Kernel("router.hip", "router_choose", "PPPPPiiif", threads=32 * ROWS, lds_bytes=ROWS * 2 * 4 * MOST_EXPERTS)
RELEASE_KERNELS = (_CHOOSE,)


def router_choose_hip(
    logits_f32: Tensor, bias_f32: Tensor, factor: float, scores_f32: Tensor, ids_i32: Tensor, weights_f32: Tensor
) -> None:
    """Fill what router_ref returns, the same bits, on the current stream; scores_f32 may be logits_f32."""
    n_rows, n_experts, k = bind_dims(
        "router",
        "R E K",
        {
            "logits_f32 R E": logits_f32,
            "bias_f32 E": bias_f32,
            "scores_f32 R E": scores_f32,
            "ids_i32 R K": ids_i32,
            "weights_f32 R K": weights_f32,
        },
    )
    if n_experts > MOST_EXPERTS or k > min(n_experts, MOST_CHOSEN):
        raise BindError(
            f"router: {k} of {n_experts} experts; at most {MOST_CHOSEN} of {MOST_EXPERTS}, and no more than there are"
        )
    if n_rows:
        args = (scores_f32, ids_i32, weights_f32, logits_f32, bias_f32, n_rows, n_experts, k, factor)
        launch(_CHOOSE, grid=(-(-n_rows // ROWS), 1), args=args, lds_bytes=ROWS * 2 * 4 * n_experts)


def router_hip(
    u_bf16: Tensor,
    tiles: WeightTiles,
    bias_f32: Tensor,
    factor: float,
    scores_f32: Tensor,
    ids_i32: Tensor,
    weights_f32: Tensor,
    workspace_f32: Tensor | None = None,
) -> None:
    """router on the current stream: u_bf16 [R, D] not quantised, tiles = prepare_bf16_weight(gate [E, D]).

    The logits' FP32 sums are in another order than the reference's; the choice, given them, is the same.
    """
    f32_linear_hip(u_bf16, tiles, scores_f32, workspace_f32)
    router_choose_hip(scores_f32, bias_f32, factor, scores_f32, ids_i32, weights_f32)
