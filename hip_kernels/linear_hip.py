"""linear.py's operators on the GPU: the binding of linear.hip.

Sums are in the order of wmma_gemm.hip.h. Where segments are cut depends on a weight's shape alone (segments_of), so
rows come out the same alone or among 4,096, from whichever of the kernels. Rows of a quantised linear come rounded,
from act_quant.act_round8_hip, so that linears of the same rows share that step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims
from rocline.hip_kernels.kernel import Kernel, launch
from rocline.hip_kernels.linear import Fp8Weight
from rocline.hip_kernels.weight_tiles import STEP, TILE, WeightTiles, check_scales

THREADS, WAVES, COLS = 256, 8, 128
FEW_ROWS, MID_ROWS = 16, 64
# Fewer workgroups than this leave much of a card idle: segments then go to workgroups of their own.
ENOUGH_WORKGROUPS = 192
FEW_TILES = 2  # of columns, a wave
FEW_LDS_BYTES = WAVES * FEW_TILES * TILE * TILE * 4  # the waves' sums, before them a tile a wave

# How many segments K is cut into, by (N, K) of a group; a power of two up to WAVES. More of them keep more of one row's
# weight in flight; fewer cost less when rows are many. Where the columns alone fill a card one is enough.
_SEGMENTS: dict[tuple[int, int], int] = {
    (32768, 1280): 2,  # wq_b
    (25600, 6144): 2,  # engram.wkv
    (129280, 5120): 1,  # head
}
DEFAULT_SEGMENTS = 8


def tiled_lds_bytes(rows: int) -> int:
    """Of a workgroup with so many rows: two buffers of them, and a tile of columns a wave."""
    return (2 * rows + COLS) * (STEP + 8) * 2


def _kernels(kind: str) -> dict[int, Kernel]:
    """By the rows of a workgroup."""
    return {
        FEW_ROWS: Kernel("linear.hip", f"{kind}_few", "PPPPPPiiiiii", threads=THREADS, lds_bytes=FEW_LDS_BYTES),
        **{
            rows: Kernel(
                "linear.hip", f"{kind}_{rows}", "PPPPPPiiiiii", threads=THREADS, lds_bytes=tiled_lds_bytes(rows)
            )
            for rows in (64, 128)
        },
    }


_LINEAR = {"e4m3": _kernels("e4m3"), "bf16": _kernels("bf16")}
_SUM = Kernel("linear.hip", "linear_sum", "PPPPiii", threads=THREADS)
_PREPARE_E4M3 = Kernel("linear.hip", "prepare_e4m3", "PPPPiii", threads=THREADS)
_PREPARE_BF16 = Kernel("linear.hip", "prepare_bf16", "PPiii", threads=THREADS)
RELEASE_KERNELS = (*_LINEAR["e4m3"].values(), *_LINEAR["bf16"].values(), _SUM, _PREPARE_E4M3, _PREPARE_BF16)


def segments_of(tiles: WeightTiles) -> tuple[int, int]:
    """Waves that share a tile of columns where rows are few, and a segment's length in blocks of 32 channels."""
    waves = _SEGMENTS.get((tiles.n_out, tiles.n_in), DEFAULT_SEGMENTS)
    return waves, -(-tiles.n_blocks // waves)


def prepare_fp8_weight(weight: Fp8Weight, groups: int = 1) -> WeightTiles:
    """Tiles of codes_e4m3 [groups * N, K], whose scale tiles count rows of the whole tensor. At load: waits for the
    device. Raises BindError for a shape or scale that has no tiles."""
    n_rows, n_in = weight.codes_e4m3.shape
    check_scales("prepare_fp8_weight", "e4m3", weight.scales_e8m0)
    bind_dims(
        "prepare_fp8_weight",
        "",
        {
            "codes_e4m3 N K": weight.codes_e4m3,
            f"scales_e8m0 {-(-n_rows // 32)} {n_in // 32}": weight.scales_e8m0,
        },
    )
    tiles = WeightTiles.empty("e4m3", groups, n_rows // groups, n_in, weight.codes_e4m3.device)
    if n_rows != groups * tiles.n_out:
        raise BindError(f"prepare_fp8_weight: {n_rows} rows in {groups} groups; want the same number in each")
    args = (tiles.codes_u8, tiles.scales_u8, *weight, tiles.n_out, groups, tiles.n_blocks)
    launch(_PREPARE_E4M3, grid=(-(-tiles.n_lanes // THREADS), 1), args=args)
    return tiles


def prepare_bf16_weight(weight_bf16: Tensor) -> WeightTiles:
    """Tiles of weight_bf16 [N, K], at load. Raises BindError for a shape that has no tiles."""
    n_out, n_in = bind_dims("prepare_bf16_weight", "N K", {"weight_bf16 N K": weight_bf16})
    tiles = WeightTiles.empty("bf16", 1, n_out, n_in, weight_bf16.device)
    args = (tiles.codes_u8, weight_bf16, n_out, 1, tiles.n_blocks)
    launch(_PREPARE_BF16, grid=(-(-tiles.n_lanes // THREADS), 1), args=args)
    return tiles


def _plan(n_rows: int, tiles: WeightTiles) -> tuple[int, tuple[int, int], int]:
    """Rows of a workgroup, the grid without parts, and the parts: workgroups that share a sum."""
    if n_rows <= FEW_ROWS:
        own_tiles = WAVES // segments_of(tiles)[0] * FEW_TILES
        return FEW_ROWS, (tiles.groups * -(-tiles.codes_u8.shape[1] // own_tiles), 1), 1
    rows = 64 if n_rows <= MID_ROWS else 128
    grid = (-(-n_rows // rows), tiles.groups * -(-tiles.n_out // COLS))
    parts = -(-tiles.n_blocks // segments_of(tiles)[1])
    return rows, grid, parts if grid[0] * grid[1] < ENOUGH_WORKGROUPS else 1


def workspace_floats(n_rows: int, tiles: WeightTiles) -> int:
    """FP32 elements of workspace that a call with so many rows needs; often 0."""
    parts = _plan(n_rows, tiles)[2]
    return parts * n_rows * tiles.groups * tiles.n_out if parts > 1 else 0


def multiply_tiles(
    op: str,
    x_bf16: Tensor,
    tiles: WeightTiles,
    out: Tensor,
    workspace_f32: Tensor | None,
    finite_u8: Tensor | None = None,
) -> None:
    """out [R, groups * N], BF16 or FP32: each group's K channels of x_bf16 [R, groups * K] times its weight rows.

    finite_u8 [R], where given, gets a 0 where a row has an output that is no number.
    """
    name = "out_f32" if out.dtype == torch.float32 else "out_bf16"
    wide_in, wide_out = tiles.groups * tiles.n_in, tiles.groups * tiles.n_out
    (n_rows,) = bind_dims(op, "R", {f"x_bf16 R {wide_in}": x_bf16, f"{name} R {wide_out}": out})
    if n_rows == 0:
        return
    rows, grid, parts = _plan(n_rows, tiles)
    waves, segment = segments_of(tiles)
    outs = (None, out) if out.dtype == torch.float32 else (out, None)
    dims = (n_rows, tiles.n_out, tiles.groups, tiles.n_blocks, segment)
    weight = (x_bf16, tiles.codes_u8, tiles.scales_u8)
    kernel = _LINEAR[tiles.kind][rows]
    if parts == 1:
        last = waves if rows == FEW_ROWS else 1
        launch(kernel, grid=grid, args=(*outs, finite_u8, *weight, *dims, last), lds_bytes=kernel.lds_bytes)
        return
    n_floats = workspace_floats(n_rows, tiles)
    if workspace_f32 is None or workspace_f32.numel() < n_floats:
        has = 0 if workspace_f32 is None else workspace_f32.numel()
        raise BindError(f"{op}: a workspace of {has} floats, {n_rows} rows need {n_floats}; take workspace_floats()")
    args = (None, workspace_f32, None, *weight, *dims, parts)
    launch(kernel, grid=(grid[0], grid[1] * parts), args=args, lds_bytes=kernel.lds_bytes)
    n_sums = -(-n_rows * wide_out // THREADS)
    launch(_SUM, grid=(n_sums, 1), args=(*outs, finite_u8, workspace_f32, n_rows, wide_out, parts))


def fp8_linear_hip(
    rounded_bf16: Tensor, tiles: WeightTiles, out_bf16: Tensor, workspace_f32: Tensor | None = None
) -> None:
    """fp8_linear on the current stream: rows [R, K] through act_round8_hip, out_bf16 [R, N]; sums in another order.

    workspace_f32, 1-D, has at least workspace_floats(R, tiles) elements. Raises BindError.
    """
    multiply_tiles("fp8_linear", rounded_bf16, tiles, out_bf16, workspace_f32)


def bf16_linear_hip(x_bf16: Tensor, tiles: WeightTiles, out_bf16: Tensor, workspace_f32: Tensor | None = None) -> None:
    """bf16_linear on the current stream: x_bf16 [R, K], out_bf16 [R, N]; FP32 sums, in another order."""
    multiply_tiles("bf16_linear", x_bf16, tiles, out_bf16, workspace_f32)


def f32_linear_hip(x_bf16: Tensor, tiles: WeightTiles, out_f32: Tensor, workspace_f32: Tensor | None = None) -> None:
    """f32_linear on the current stream: x_bf16 [R, K], out_f32 [R, N]; FP32 sums, in another order."""
    multiply_tiles("f32_linear", x_bf16, tiles, out_f32, workspace_f32)
