"""Single-pass mHC: mixing coefficients of the residual streams, collapse and merge (backbone.md section 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rocline.hip_kernels.act_quant import act_round8
from rocline.hip_kernels.binding import bind_dims, in_vectors, linear_tiles, operator, run_slabs
from rocline.hip_kernels.rmsnorm import rmsnorm_ref

MERGE_ROWS = 64  # a row's terms are [n, n, D]


def mhc_project_ref(streams_bf16: Tensor, fn_f32: Tensor, norm_eps: float) -> Tensor:
    """z [R, n(n+2)] FP32: the projection first, then one RMS scalar over all n*D values of a row."""
    flat_f32 = streams_bf16.flatten(1).float()
    inverse = torch.rsqrt(flat_f32.square().mean(-1, keepdim=True) + norm_eps)
    return linear_tiles(flat_f32, fn_f32) * inverse


def mhc_coefficients_ref(
    z_f32: Tensor, scale_f32: Tensor, base_f32: Tensor, eps: float, n_iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """pre [R, n], post [R, n], comb [R, n, n] FP32; comb's first index is the source stream.

    Softmax, then column steps and row steps in turn, ending on a column: there is no final row step.
    """
    n = round((z_f32.shape[1] + 1) ** 0.5) - 1
    scales = scale_f32[:2].repeat_interleave(n)
    pre, post = in_vectors(torch.sigmoid, z_f32[:, : 2 * n] * scales + base_f32[: 2 * n]).split(n, dim=1)
    comb = z_f32[:, 2 * n :] * scale_f32[2] + base_f32[2 * n :]
    comb = comb.T.contiguous().view(n, n, -1)  # query rows side by side: a step over the 4 of a row takes vectors
    comb = torch.exp(comb - comb.amax(1, keepdim=True))  # torch.softmax adds in another order
    comb = comb / comb.sum(1, keepdim=True) + eps
    sums = {dim: torch.empty_like(comb.narrow(dim, 0, 1)) for dim in (0, 1)}
    small = comb.new_tensor(eps)  # a number would be made a tensor at every step

    def step(dim: int) -> None:
        torch.sum(comb, dim, keepdim=True, out=sums[dim])
        comb.div_(sums[dim].add_(small))

    step(0)
    for _ in range(n_iters - 1):
        step(1)
        step(0)
    return pre + eps, 2 * post, comb.permute(2, 0, 1)


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

    def slab(streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z_f32 = mhc_project_ref(streams, fn_f32, norm_eps)
        return mhc_coefficients_ref(z_f32, scale_f32, base_f32, eps, n_iters)

    run_slabs(slab, (streams_bf16,), pre_f32, post_f32, comb_f32)


def mhc_collapse_ref(streams_bf16: Tensor, pre_f32: Tensor) -> Tensor:
    """[R, D] BF16: the streams weighted by pre, FP32 sum over j ascending, one rounding."""
    total, *others = (streams_bf16.float() * pre_f32[:, :, None]).unbind(1)
    for other in others:
        total += other
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
    run_slabs(
        lambda streams, pre: rmsnorm_ref(mhc_collapse_ref(streams, pre), weight_bf16, eps),
        (streams_bf16, pre_f32),
        out_bf16,
    )


def mhc_merge_ref(out_bf16: Tensor, streams_bf16: Tensor, post_f32: Tensor, comb_f32: Tensor) -> Tensor:
    """[R, n, D] BF16: stream k is sum_j comb[j, k] * X[j] over j ascending, then post[k] * out; one rounding."""
    total, *others = (comb_f32[:, :, :, None] * streams_bf16[:, :, None].float()).unbind(1)
    for other in (*others, post_f32[:, :, None] * out_bf16[:, None].float()):
        total += other
    return total.bfloat16()


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
    per_row = (sublayer_bf16, streams_bf16, post_f32, comb_f32)
    run_slabs(mhc_merge_ref, per_row, merged_bf16, slab_rows=MERGE_ROWS)


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
    rounded_bf16: Tensor | None = None,
) -> None:
    """A sublayer's input out_bf16 [R, D] and its coefficients, from the streams that enter it.

    mhc_collapse_norm by pre_f32 [R, n] and norm_bf16 [D], and mhc_mix by the others. rounded_bf16 [R, D], where given,
    is filled with the input through ActQuant8.
    """
    mhc_collapse_norm(streams_bf16, pre_f32, norm_bf16, norm_eps, out_bf16)
    if rounded_bf16 is not None:
        act_round8(out_bf16, rounded_bf16)
    mhc_mix(streams_bf16, fn_f32, scale_f32, base_f32, norm_eps, eps, n_iters, new_pre_f32, post_f32, comb_f32)


@operator
def mhc_merge_enter(
    sublayer_bf16: Tensor, merge_post_f32: Tensor, merge_comb_f32: Tensor, streams_bf16: Tensor, *others: Any
) -> None:
    """mhc_merge of a sublayer's output [R, D] into streams_bf16 [R, n, D], in place, and mhc_enter with the others."""
    mhc_merge(sublayer_bf16, streams_bf16, merge_post_f32, merge_comb_f32, streams_bf16)
    mhc_enter(streams_bf16, *others)
