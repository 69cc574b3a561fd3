"""Single-pass mHC: mixing coefficients of the residual streams, collapse and merge (backbone.md section 4)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, operator, run_slabs, run_tiles
from rocline.hip_kernels.rmsnorm import rmsnorm_ref


def mhc_project_ref(streams_bf16: Tensor, fn_f32: Tensor, norm_eps: float) -> Tensor:
    """z [R, n(n+2)] FP32: the projection first, then one RMS scalar over all n*D values of a row."""
    flat_f32 = streams_bf16.flatten(1).float()
    inverse = torch.rsqrt(flat_f32.square().mean(-1, keepdim=True) + norm_eps)
    return F.linear(flat_f32, fn_f32) * inverse


def mhc_coefficients_ref(
    z_f32: Tensor, scale_f32: Tensor, base_f32: Tensor, eps: float, n_iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """pre [R, n], post [R, n], comb [R, n, n] FP32; comb's first index is the source stream.

    Softmax, then column steps and row steps in turn, ending on a column: there is no final row step.
    """
    n = round((z_f32.shape[1] + 1) ** 0.5) - 1
    pre = torch.sigmoid(z_f32[:, :n] * scale_f32[0] + base_f32[:n]) + eps
    post = 2 * torch.sigmoid(z_f32[:, n : 2 * n] * scale_f32[1] + base_f32[n : 2 * n])
    comb = (z_f32[:, 2 * n :] * scale_f32[2] + base_f32[2 * n :]).view(-1, n, n)
    comb = torch.exp(comb - comb.amax(-1, keepdim=True))  # torch.softmax adds in another order
    comb = comb / comb.sum(-1, keepdim=True) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(n_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre, post, comb


def mhc_mix(
    streams_bf16: Tensor,
    fn_f32: Tensor,
    scale_f32: Tensor,
    base_f32: Tensor,
    norm_eps: float,
    eps: float,
    n_iters: int,
    pre_f32: Tensor,
    post_f32: Tensor,
    comb_f32: Tensor,
) -> None:
    """Coefficients of the streams as they enter a sublayer.

    streams_bf16  [R, n, D]
    fn_f32        [n(n+2), n*D]; scale_f32 [3]; base_f32 [n(n+2)]
    pre_f32, post_f32 [R, n], comb_f32 [R, n, n] are filled
    """
    bind_dims(
        "mhc_mix",
        "R",
        {
            "streams_bf16 R N D": streams_bf16,
            "fn_f32 Z K": fn_f32,
            "scale_f32 3": scale_f32,
            "base_f32 Z": base_f32,
            "pre_f32 R N": pre_f32,
            "post_f32 R N": post_f32,
            "comb_f32 R N N": comb_f32,
        },
    )

    def tile(streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z_f32 = mhc_project_ref(streams, fn_f32, norm_eps)
        return mhc_coefficients_ref(z_f32, scale_f32, base_f32, eps, n_iters)

    run_tiles(tile, (streams_bf16,), (pre_f32, post_f32, comb_f32))


def mhc_collapse_ref(streams_bf16: Tensor, pre_f32: Tensor) -> Tensor:
    """[R, D] BF16: the streams weighted by pre, FP32 sum over j ascending, one rounding."""
    total = streams_bf16[:, 0].float() * pre_f32[:, 0, None]
    for j in range(1, streams_bf16.shape[1]):
        total = total + streams_bf16[:, j].float() * pre_f32[:, j, None]
    return total.bfloat16()


@operator
def mhc_collapse_norm(streams_bf16: Tensor, pre_f32: Tensor, weight_bf16: Tensor, eps: float, out_bf16: Tensor) -> None:
    """Fill out_bf16 [R, D], a sublayer's input: collapse of streams_bf16 [R, n, D] by pre_f32 [R, n], then RMSNorm."""
    bind_dims(
        "mhc_collapse_norm",
        "R N D",
        {
            "streams_bf16 R N D": streams_bf16,
            "pre_f32 R N": pre_f32,
            "weight_bf16 D": weight_bf16,
            "out_bf16 R D": out_bf16,
        },
    )
    run_tiles(
        lambda streams, pre: rmsnorm_ref(mhc_collapse_ref(streams, pre), weight_bf16, eps),
        (streams_bf16, pre_f32),
        (out_bf16,),
    )


def mhc_merge_ref(out_bf16: Tensor, streams_bf16: Tensor, post_f32: Tensor, comb_f32: Tensor) -> Tensor:
    """[R, n, D] BF16: stream k is sum_j comb[j, k] * X[j] over j ascending, then post[k] * out; one rounding."""
    total = comb_f32[:, 0, :, None] * streams_bf16[:, 0, None].float()
    for j in range(1, streams_bf16.shape[1]):
        total = total + comb_f32[:, j, :, None] * streams_bf16[:, j, None].float()
    return (total + post_f32[:, :, None] * out_bf16[:, None].float()).bfloat16()


@operator
def mhc_merge(
    sublayer_bf16: Tensor, streams_bf16: Tensor, post_f32: Tensor, comb_f32: Tensor, merged_bf16: Tensor
) -> None:
    """Fill merged_bf16 [R, n, D] from a sublayer's output [R, D] and the streams that entered it [R, n, D].

    Both may be one tensor: a channel of the result needs that channel alone.
    """
    bind_dims(
        "mhc_merge",
        "R N D",
        {
            "streams_bf16 R N D": streams_bf16,
            "sublayer_bf16 R D": sublayer_bf16,
            "post_f32 R N": post_f32,
            "comb_f32 R N N": comb_f32,
            "merged_bf16 R N D": merged_bf16,
        },
    )
    run_slabs(mhc_merge_ref, (sublayer_bf16, streams_bf16, post_f32, comb_f32), merged_bf16)


@operator
def mhc_enter(
    streams_bf16: Tensor,
    pre_f32: Tensor,
    norm_bf16: Tensor,
    fn_f32: Tensor,
    scale_f32: Tensor,
    base_f32: Tensor,
    norm_eps: float,
    eps: float,
    n_iters: int,
    out_bf16: Tensor,
    new_pre_f32: Tensor,
    post_f32: Tensor,
    comb_f32: Tensor,
) -> None:
    """A sublayer's input out_bf16 [R, D] and its coefficients, from the streams that enter it.

    mhc_collapse_norm by pre_f32 [R, n] and norm_bf16 [D], and mhc_mix by the others.
    """
    mhc_collapse_norm(streams_bf16, pre_f32, norm_bf16, norm_eps, out_bf16)
    mhc_mix(streams_bf16, fn_f32, scale_f32, base_f32, norm_eps, eps, n_iters, new_pre_f32, post_f32, comb_f32)


@operator
def mhc_merge_enter(
    sublayer_bf16: Tensor, merge_post_f32: Tensor, merge_comb_f32: Tensor, streams_bf16: Tensor, *others: Any
) -> None:
    """mhc_merge of a sublayer's output [R, D] into streams_bf16 [R, n, D], in place, and mhc_enter with the others."""
    mhc_merge(sublayer_bf16, streams_bf16, merge_post_f32, merge_comb_f32, streams_bf16)
    mhc_enter(streams_bf16, *others)
