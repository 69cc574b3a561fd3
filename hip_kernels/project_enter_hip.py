"""wo_b, and the streams between attention and experts, in one launch (backbone.md section 4 and 5.6)."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims
from rocline.hip_kernels.kernel import Kernel, launch
from rocline.hip_kernels.linear_hip import FEW_TILES, WAVES, segments_of
from rocline.hip_kernels.mhc_hip import (
    FEW_LDS_BYTES,
    FEW_ROWS,
    FINISH_ARGUMENTS,
    PASS_ARGUMENTS,
    SEGMENT,
    Merge,
    Mixing,
    finish_args,
    pass_args,
)
from rocline.hip_kernels.weight_tiles import TILE, WeightTiles

OWN_COLS = FEW_TILES * TILE  # of a workgroup
LDS_BYTES = FEW_LDS_BYTES + 4


@cache
def _kernel(width: int) -> Kernel:
    arguments, defines = "PPPPii" + PASS_ARGUMENTS + FINISH_ARGUMENTS + "P", {"WIDTH": width}
    name = "project_enter_few"
    return Kernel("project_enter.hip", name, arguments, threads=32 * WAVES, defines=defines, lds_bytes=LDS_BYTES)


RELEASE_KERNELS = (_kernel(5120),)


def project_enters(n_rows: int, wo_b: WeightTiles, n_counters: int) -> bool:
    """Whether project_enter_hip is for so many rows and such a weight."""
    return 0 < n_rows <= FEW_ROWS and segments_of(wo_b)[0] == WAVES and -(-wo_b.n_out // SEGMENT) < n_counters


def project_enter_hip(
    rounded_bf16: Tensor,
    wo_b: WeightTiles,
    streams_bf16: Tensor,
    merge: Merge,
    pre_f32: Tensor,
    norm_bf16: Tensor,
    norm_eps: float,
    mixing: Mixing,
    out_bf16: Tensor,
    counters_i32: Tensor,
    into_bf16: Tensor | None = None,
) -> None:
    """fp8_linear_hip of rounded_bf16 [R, K], which act_round8_hip has been through, into merge.sublayer_bf16 [R, D],
    then mhc_enter_hip, merging in place, with the other arguments; for rows as project_enters says.

    into_bf16     [R, D], where given, is filled with the next sublayer's input out_bf16 [R, D] through ActQuant8
    counters_i32  zeros, more of them than ceil(D / 128), and so again afterwards

    The bits are those of the two. Raises BindError.
    """
    projection, partials_f32 = mixing.projection, mixing.partials_f32
    passing = pass_args(streams_bf16, merge, streams_bf16, pre_f32, out_bf16, projection, partials_f32)
    finishing = finish_args(out_bf16, norm_bf16, norm_eps, mixing, into_bf16)
    wanted = {
        f"rounded_bf16 R {wo_b.n_in}": rounded_bf16,
        f"streams_bf16 R 4 {wo_b.n_out}": streams_bf16,
        "counters_i32 C": counters_i32,
    }
    n_rows, n_counters = bind_dims("project_enter", "R C", wanted)
    if not project_enters(n_rows, wo_b, n_counters):
        raise BindError(
            f"project_enter: {n_rows} rows of {wo_b.n_out} channels, a weight in {segments_of(wo_b)[0]} segments, "
            f"{n_counters} counters; want at most {FEW_ROWS} rows, {WAVES} segments and a counter for each {SEGMENT} "
            "channels beside one"
        )
    weight = merge.sublayer_bf16, rounded_bf16, wo_b.codes_u8, wo_b.scales_u8, wo_b.n_blocks, segments_of(wo_b)[1]
    args = (*weight, *passing, *finishing, counters_i32)
    launch(_kernel(wo_b.n_out), grid=(-(-wo_b.n_out // OWN_COLS), 1), args=args, lds_bytes=LDS_BYTES)
