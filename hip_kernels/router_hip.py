"""router.py on the GPU: logits and the choice in one launch where rows are few, else by linear.hip and router.hip."""

from __future__ import annotations

from torch import Tensor

from rocline.hip_kernels.act_quant import act_round8_hip
from rocline.hip_kernels.binding import BindError, bind_dims
from rocline.hip_kernels.kernel import Kernel, launch
from rocline.hip_kernels.linear_hip import FEW_ROWS, WAVES, f32_linear_hip, segments_of
from rocline.hip_kernels.weight_tiles import TILE, WeightTiles

ROWS, MOST_EXPERTS, MOST_CHOSEN = 8, 384, 32  # rows of a workgroup that chooses
CHOICE_BYTES = ROWS * 2 * 4  # of LDS, an expert
FEW_LDS_BYTES = WAVES * TILE * 40 * 2  # a tile's columns a wave, and then less for their sums

_CHOOSE = Kernel("router.hip", "router_choose", "PPPPPiiif", threads=32 * ROWS, lds_bytes=CHOICE_BYTES * MOST_EXPERTS)
_FEW = Kernel(
    "router.hip", "router_few", "P" * 8 + "i" * 7 + "f", threads=32 * WAVES, lds_bytes=CHOICE_BYTES * MOST_EXPERTS + 4
)
RELEASE_KERNELS = (_CHOOSE, _FEW)


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
    _check_choice(n_experts, k)
    if n_rows:
        args = (scores_f32, ids_i32, weights_f32, logits_f32, bias_f32, n_rows, n_experts, k, factor)
        launch(_CHOOSE, grid=(-(-n_rows // ROWS), 1), args=args, lds_bytes=CHOICE_BYTES * n_experts)


def _check_choice(n_experts: int, k: int) -> None:
    if n_experts > MOST_EXPERTS or k > min(n_experts, MOST_CHOSEN):
        raise BindError(
            f"router: {k} of {n_experts} experts; at most {MOST_CHOSEN} of {MOST_EXPERTS}, and no more than there are"
        )


def router_hip(
    u_bf16: Tensor,
    tiles: WeightTiles,
    bias_f32: Tensor,
    factor: float,
    scores_f32: Tensor,
    ids_i32: Tensor,
    weights_f32: Tensor,
    counter_i32: Tensor,
    workspace_f32: Tensor | None = None,
    rounded_bf16: Tensor | None = None,
) -> None:
    """router on the current stream: u_bf16 [R, D] not quantised, tiles = prepare_bf16_weight(gate [E, D]).

    The logits' FP32 sums are in another order than the reference's; the choice, given them, is the same.

    counter_i32    [1] holds 0, and does so again afterwards
    workspace_f32  as f32_linear_hip takes it
    rounded_bf16   [R, D] is filled with u_bf16 through ActQuant8, for the experts
    """
    n_rows, n_experts, k = bind_dims(
        "router",
        "R E K",
        {
            f"u_bf16 R {tiles.n_in}": u_bf16,
            "scores_f32 R E": scores_f32,
            f"bias_f32 {tiles.n_out}": bias_f32,
            "ids_i32 R K": ids_i32,
            "weights_f32 R K": weights_f32,
            "counter_i32 1": counter_i32,
            **({} if rounded_bf16 is None else {f"rounded_bf16 R {tiles.n_in}": rounded_bf16}),
        },
    )
    if n_rows > FEW_ROWS:
        if rounded_bf16 is not None:
            act_round8_hip(u_bf16, rounded_bf16)
        f32_linear_hip(u_bf16, tiles, scores_f32, workspace_f32)
        router_choose_hip(scores_f32, bias_f32, factor, scores_f32, ids_i32, weights_f32)
    elif n_rows:
        _check_choice(n_experts, k)
        n_segments, segment = segments_of(tiles)
        n_workgroups = -(-n_experts // (TILE * (WAVES // n_segments)))
        outs = (scores_f32, ids_i32, weights_f32, rounded_bf16, counter_i32)
        dims = (n_rows, n_experts, tiles.n_blocks, segment, n_segments, n_workgroups, k, factor)
        lds_bytes = max(FEW_LDS_BYTES, CHOICE_BYTES * n_experts) + 4
        launch(_FEW, grid=(n_workgroups, 1), args=(*outs, u_bf16, tiles.codes_u8, bias_f32, *dims), lds_bytes=lds_bytes)
