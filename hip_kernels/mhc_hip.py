"""mHC on the GPU: two kernels round a sublayer, so that the streams are read and written once (backbone.md section 4).

mhc_pass_hip merges the last sublayer's output, collapses for the next one and projects, in one reading of the streams;
mhc_finish_hip norms what was collapsed and turns the projection into coefficients. That moves 2n + 4 values of D a
row: n + 1 in, n + 1 out, and the norm's two. The results are those of the operators of mhc.py one after the other.
mhc_enter_hip is both; where rows are few, in one launch, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims
from rocline.hip_kernels.kernel import Argument, Kernel, launch

STREAMS, SUMS = 4, 24
SEGMENT, ROWS = 128, 32  # a workgroup's channels of each stream, and rows
COL_TILES = 5
PASS_LDS_BYTES = ROWS * (STREAMS * SEGMENT + 8) * 2
FEW_LDS_BYTES = STREAMS * 16 * (16 * COL_TILES + 1) * 4  # of at most 16 rows
# One workgroup finishes these: of more rows a launch of its own is quicker (docs/decode_path.md). At most 16.
FEW_ROWS = 2
PASS_ARGUMENTS, FINISH_ARGUMENTS = "P" * 9 + "i", "P" * 9 + "ffi"


@cache
def _kernels(width: int) -> tuple[Kernel, Kernel, Kernel]:
    defines, both = {"WIDTH": width}, PASS_ARGUMENTS + FINISH_ARGUMENTS + "P"
    return (
        Kernel("mhc.hip", "mhc_pass", PASS_ARGUMENTS, threads=384, defines=defines, lds_bytes=PASS_LDS_BYTES),
        Kernel("mhc.hip", "mhc_finish", FINISH_ARGUMENTS, threads=160, defines=defines, lds_bytes=16),
        Kernel("mhc.hip", "mhc_few", both, threads=384, defines=defines, lds_bytes=FEW_LDS_BYTES),
    )


RELEASE_KERNELS = _kernels(5120)


@dataclass(frozen=True)
class Merge:
    """What is added to the streams: sublayer_bf16 [R, D] by post_f32 [R, 4] and comb_f32 [R, 4, 4]."""

    sublayer_bf16: Tensor
    post_f32: Tensor
    comb_f32: Tensor


@dataclass(frozen=True)
class Projection:
    """Of D = width channels: fn_bf16 of prepare_projection, scale_f32 [3], base_f32 [24]."""

    width: int
    fn_bf16: Tensor
    scale_f32: Tensor
    base_f32: Tensor


def prepare_projection(fn_f32: Tensor) -> Tensor:
    """fn_f32 [24, 4 D] as three BF16 components in the order of their use, [ceil(D/128), 4, 8, 5, 16, 16].

    The components add up to the FP32 weight, bit for bit above 2^-110 or so. Once, at load.
    """
    (n_inputs,) = bind_dims("prepare_projection", "K", {"fn_f32 24 K": fn_f32})
    first = fn_f32.bfloat16()
    second = (fn_f32 - first.float()).bfloat16()
    third = (fn_f32 - first.float() - second.float()).bfloat16()
    columns = F.pad(torch.cat((first, second, third)), (0, 0, 0, COL_TILES * 16 - 3 * SUMS))
    per_stream = columns.unflatten(1, (STREAMS, n_inputs // STREAMS))
    padded = F.pad(per_stream, (0, -per_stream.shape[2] % SEGMENT))  # [80, 4, segments * 128]
    steps = padded.unflatten(2, (-1, SEGMENT // 16, 16)).unflatten(0, (COL_TILES, 16))
    return steps.permute(3, 2, 4, 0, 1, 5).contiguous()


def partials_shape(n_rows: int, width: int) -> tuple[int, int, int]:
    """Of the FP32 workspace between the two kernels."""
    return n_rows, -(-width // SEGMENT), SUMS + 1


def mhc_pass_hip(
    streams_bf16: Tensor,
    merge: Merge | None,
    merged_bf16: Tensor | None,
    pre_f32: Tensor | None,
    collapsed_bf16: Tensor | None,
    projection: Projection | None,
    partials_f32: Tensor | None,
) -> None:
    """One reading of streams_bf16 [R, 4, D], D a multiple of 16, on the current stream.

    merged_bf16     [R, 4, D] filled as mhc_merge does, the same bits; may be streams_bf16
    collapsed_bf16  [R, D] filled with the merged streams collapsed by pre_f32 [R, 4], not normed, the same bits
    partials_f32    partials_shape() filled with the projection's sums of the merged streams

    Each is left out where it and what it is made from are None. Raises BindError.
    """
    args = pass_args(streams_bf16, merge, merged_bf16, pre_f32, collapsed_bf16, projection, partials_f32)
    n_rows, _, width = streams_bf16.shape
    if n_rows:
        launch(_kernels(width)[0], grid=(-(-width // SEGMENT), -(-n_rows // ROWS)), args=args, lds_bytes=PASS_LDS_BYTES)


def pass_args(
    streams_bf16: Tensor,
    merge: Merge | None,
    merged_bf16: Tensor | None,
    pre_f32: Tensor | None,
    collapsed_bf16: Tensor | None,
    projection: Projection | None,
    partials_f32: Tensor | None,
) -> tuple[Argument, ...]:
    """The kernels' PASS_ARGUMENTS, of mhc_pass_hip's."""
    _both_or_none("mhc_pass", (merge, merged_bf16), (pre_f32, collapsed_bf16), (projection, partials_f32))
    n_rows, width = _bind(
        "mhc_pass",
        "R D",
        {
            "streams_bf16 R 4 D": streams_bf16,
            "sublayer_bf16 R D": merge.sublayer_bf16 if merge else None,
            "post_f32 R 4": merge.post_f32 if merge else None,
            "comb_f32 R 4 4": merge.comb_f32 if merge else None,
            "merged_bf16 R 4 D": merged_bf16,
            "pre_f32 R 4": pre_f32,
            "collapsed_bf16 R D": collapsed_bf16,
            "partials_f32 R S 25": partials_f32,
            "fn_bf16 S 4 8 5 16 16": projection.fn_bf16 if projection else None,
        },
    )
    if width % 16 or (projection and projection.width != width):
        raise BindError(
            f"mhc_pass: streams of {width} channels, weights for {projection.width if projection else width}; "
            "want one number, and a multiple of 16"
        )
    merging = (merge.sublayer_bf16, merge.post_f32, merge.comb_f32) if merge else (None, None, None)
    outs = (partials_f32, merged_bf16, collapsed_bf16)
    return *outs, streams_bf16, *merging, pre_f32, projection.fn_bf16 if projection else None, n_rows


@dataclass(frozen=True)
class Coefficients:
    """pre_f32, post_f32 [R, 4], comb_f32 [R, 4, 4]: to be filled."""

    pre_f32: Tensor
    post_f32: Tensor
    comb_f32: Tensor


@dataclass(frozen=True)
class Mixing:
    """Coefficients of the streams as they enter, by way of partials_f32, a workspace of partials_shape()."""

    projection: Projection
    partials_f32: Tensor
    out: Coefficients
    eps: float
    n_iters: int


def mhc_finish_hip(
    collapsed_bf16: Tensor,
    norm_bf16: Tensor,
    norm_eps: float,
    mixing: Mixing | None = None,
    rounded_bf16: Tensor | None = None,
) -> None:
    """RMSNorm of collapsed_bf16 [R, D] in place; with mixing also the coefficients, from mhc_pass_hip's partials.

    rounded_bf16 [R, D], where given, is filled with the normed rows as act_round8_hip makes them. Sums have orders of
    their own; exp and sigmoid are explog.py's sequences. Raises BindError.
    """
    args = finish_args(collapsed_bf16, norm_bf16, norm_eps, mixing, rounded_bf16)
    n_rows, width = collapsed_bf16.shape
    if n_rows:
        launch(_kernels(width)[1], grid=(n_rows, 1), args=args, lds_bytes=16)


def finish_args(
    collapsed_bf16: Tensor, norm_bf16: Tensor, norm_eps: float, mixing: Mixing | None, rounded_bf16: Tensor | None
) -> tuple[Argument, ...]:
    """The kernels' FINISH_ARGUMENTS, of mhc_finish_hip's."""
    projection, out = (mixing.projection, mixing.out) if mixing else (None, None)
    partials_f32 = mixing.partials_f32 if mixing else None
    _bind(
        "mhc_finish",
        "",
        {
            "collapsed_bf16 R D": collapsed_bf16,
            "rounded_bf16 R D": rounded_bf16,
            "norm_bf16 D": norm_bf16,
            "partials_f32 R S 25": partials_f32,
            "fn_bf16 S 4 8 5 16 16": projection.fn_bf16 if projection else None,
            "scale_f32 3": projection.scale_f32 if projection else None,
            "base_f32 24": projection.base_f32 if projection else None,
            "pre_f32 R 4": out.pre_f32 if out else None,
            "post_f32 R 4": out.post_f32 if out else None,
            "comb_f32 R 4 4": out.comb_f32 if out else None,
        },
    )
    if rounded_bf16 is not None and collapsed_bf16.shape[1] % 32:
        raise BindError(f"mhc_finish: rows of {collapsed_bf16.shape[1]} channels to round, want a multiple of 32")
    outs = (out.pre_f32, out.post_f32, out.comb_f32) if out else (None, None, None)
    affine = (projection.scale_f32, projection.base_f32) if projection else (None, None)
    numbers = (mixing.eps, mixing.n_iters) if mixing else (0.0, 0)
    return collapsed_bf16, rounded_bf16, *outs, partials_f32, norm_bf16, *affine, norm_eps, *numbers


def mhc_enter_hip(
    streams_bf16: Tensor,
    merge: Merge | None,
    pre_f32: Tensor,
    norm_bf16: Tensor,
    norm_eps: float,
    mixing: Mixing | None,
    out_bf16: Tensor,
    counter_i32: Tensor,
    rounded_bf16: Tensor | None = None,
) -> None:
    """mhc_pass_hip, merging in place, and mhc_finish_hip: a sublayer's input out_bf16 [R, D] and its coefficients.

    counter_i32 [1] holds 0, and does so again afterwards.
    """
    projection, partials_f32 = (mixing.projection, mixing.partials_f32) if mixing else (None, None)
    passing = streams_bf16, merge, streams_bf16 if merge else None, pre_f32, out_bf16, projection, partials_f32
    n_rows, _, width = streams_bf16.shape
    if n_rows > FEW_ROWS:
        mhc_pass_hip(*passing)
        mhc_finish_hip(out_bf16, norm_bf16, norm_eps, mixing, rounded_bf16)
    elif n_rows:
        finishing = finish_args(out_bf16, norm_bf16, norm_eps, mixing, rounded_bf16)
        args = (*pass_args(*passing), *finishing, counter_i32)
        launch(_kernels(width)[2], grid=(-(-width // SEGMENT), 1), args=args, lds_bytes=FEW_LDS_BYTES)


def _both_or_none(op: str, *pairs: tuple[object, object]) -> None:
    if any((made is None) != (made_from is None) for made_from, made in pairs):
        raise BindError(f"{op}: an output without what it is made from, or the reverse; give both, or None for both")


def _bind(op: str, letters: str, wanted: dict[str, Tensor | None]) -> tuple[int, ...]:
    return bind_dims(op, letters, {spec: tensor for spec, tensor in wanted.items() if tensor is not None})
