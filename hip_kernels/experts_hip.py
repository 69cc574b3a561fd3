"""experts.py on the GPU: the binding of experts.hip and expert_sort.hip.

Few rows take two launches: each workgroup finds the rows of its expert by itself, and the last one at some columns adds
the experts' outputs up. More rows are sorted by expert on the device first; each matrix kernel then takes tiles of rows
that have one expert. Nothing is read back: grids are as large as the most tiles there can be, and empty ones return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims
from rocline.hip_kernels.kernel import Argument, Kernel, launch
from rocline.hip_kernels.linear import Fp4Weight
from rocline.hip_kernels.linear_hip import (
    FEW_LDS_BYTES,
    fp8_linear_hip,
    segments_of,
    tiled_lds_bytes,
    workspace_floats,
)
from rocline.hip_kernels.weight_tiles import WeightTiles, check_scales

THREADS, SORT_THREADS = 256, 1024
FEW_ROWS, TILE_ROWS = 16, 64
SEGMENTS = 4  # of K, for every number of rows; those of the shared expert's w2 are linear_hip's
MOST_TERMS = 128  # of rows' sums, the shared expert's included, that a workgroup can add up
# Pairs an expert has on average up to which 16-row tiles, bound by memory, are the faster ones.
FEW_PAIRS_AN_EXPERT = 16
UP_COLS, DOWN_COLS = 64, 128  # of a workgroup
RUNS = 2  # of a workgroup's columns where rows are few, one after the other
# Of mixture_*: the runs' sums; or the terms of a row's sum, and a word.
MIXTURE_LDS_BYTES = max(RUNS * FEW_LDS_BYTES, MOST_TERMS * DOWN_COLS // RUNS * 2 + 16)
MOST_EXPERTS = 384
PREPARED_BYTES = 31 << 20  # of codes and scales, at a time: a part of Uploader
Each = Callable[[Iterable[Sequence[Any]]], Iterable[Sequence[Tensor]]]


def sort_lds_bytes(n_experts: int) -> int:
    """Of expert_sort: counts for 32 waves, two prefix sums, and 32 words."""
    return (34 * (n_experts + 1) + 32) * 4


def _pair(name: str, arguments: str) -> dict[int, Kernel]:
    """By the rows of a tile."""
    lds = {FEW_ROWS: ("few", RUNS * FEW_LDS_BYTES), TILE_ROWS: ("64", tiled_lds_bytes(TILE_ROWS))}
    return {
        rows: Kernel("experts.hip", f"{name}_{suffix}", arguments, threads=THREADS, lds_bytes=n_bytes)
        for rows, (suffix, n_bytes) in lds.items()
    }


_SORT = Kernel(
    "expert_sort.hip", "expert_sort", "PPPiiii", threads=SORT_THREADS, lds_bytes=sort_lds_bytes(MOST_EXPERTS)
)
_MIXTURE_UP = Kernel("experts.hip", "mixture_up", "P" * 14 + "iiiiiifi", threads=THREADS, lds_bytes=MIXTURE_LDS_BYTES)
_MIXTURE_DOWN = Kernel("experts.hip", "mixture_down", "P" * 11 + "i" * 8, threads=THREADS, lds_bytes=MIXTURE_LDS_BYTES)
_ROUTED_UP = _pair("routed_up", "PPPPPPPPPiiiiif")
_SHARED_UP = {
    rows: Kernel(
        "experts.hip", f"shared_up_{rows}", "PPPPPPPPPiiiiif", threads=THREADS, lds_bytes=tiled_lds_bytes(rows)
    )
    for rows in (64, 128)
}
_DOWN = _pair("routed_down", "PPPPPPiii")
_SUM = Kernel("experts.hip", "expert_sum", "PPPPii", threads=THREADS)
_PREPARE = Kernel("experts.hip", "prepare_e2m1", "PPPPiii", threads=THREADS)
RELEASE_KERNELS = (
    _SORT,
    _MIXTURE_UP,
    _MIXTURE_DOWN,
    *_ROUTED_UP.values(),
    *_SHARED_UP.values(),
    *_DOWN.values(),
    _SUM,
    _PREPARE,
)


def prepare_fp4_weight(weight: Fp4Weight) -> WeightTiles:
    """Tiles of all experts' codes_e2m1x2 [E, N, K/2] with scales_e8m0 [E, N, K/32], which are on the device; as
    prepare_fp4_weights."""
    return prepare_fp4_weights([weight], lambda parts: parts)[0]


def prepare_fp4_weights(weights: Sequence[Fp4Weight], each: Each) -> list[WeightTiles]:
    """Tiles of several weights as of prepare_fp4_weight. At load: waits for the device.

    each  brings the tensors of one part after another to the device, as Uploader.each. They are of a few experts, so
          that the device never holds a layer twice; codes may be stored

    Raises BindError for a shape or scale that has no tiles.
    """
    wanted: list[tuple[int, slice]] = []
    for number, (codes_e2m1x2, scales_e8m0) in enumerate(weights):
        n_experts, n_out, n_bytes = bind_dims("prepare_fp4_weight", "E N P", {"codes_e2m1x2 E N P": codes_e2m1x2})
        bind_dims("prepare_fp4_weight", "", {f"scales_e8m0 {n_experts} {n_out} {n_bytes // 16}": scales_e8m0})
        n_at_once = max(1, PREPARED_BYTES // (n_out * (n_bytes + n_bytes // 16)))
        starts = range(0, n_experts, n_at_once)
        wanted += [(number, slice(start, min(start + n_at_once, n_experts))) for start in starts]
    parts = ([tensor[part] for tensor in weights[number]] for number, part in wanted)
    made, mosts = list[WeightTiles](), list[Tensor]()
    for (number, part), (codes_e2m1x2, scales_e8m0) in zip(wanted, each(parts), strict=True):
        n_experts, n_out, n_bytes = weights[number].codes_e2m1x2.shape
        if number == len(made):
            made.append(WeightTiles.empty("e2m1", n_experts, n_out, 2 * n_bytes, codes_e2m1x2.device))
        tiles, n = made[number], part.stop - part.start
        args = (tiles.codes_u8[part], tiles.scales_u8[part], codes_e2m1x2, scales_e8m0, n_out, n, tiles.n_blocks)
        launch(_PREPARE, grid=(-(-n * tiles.n_lanes // n_experts // THREADS), 1), args=args)
        mosts.append(scales_e8m0.max())
    check_scales("prepare_fp4_weight", "e2m1", torch.stack(mosts))  # waits for the device, so once
    return made


@dataclass(frozen=True)
class ExpertWeights:
    """w1 (gate), w3 (up), w2 (down) prepared: of all experts, or of the shared one."""

    w1: WeightTiles
    w3: WeightTiles
    w2: WeightTiles


def most_tiles(n_pairs: int, n_experts: int, tile_rows: int) -> int:
    """How many tiles of rows there can be, whatever the router chose."""
    return min(n_pairs, n_experts) + n_pairs // tile_rows


def takes_two_launches(n_rows: int, k: int) -> bool:
    """Whether rows are few; no bit depends on it."""
    return n_rows <= FEW_ROWS and n_rows * (k + 1) <= MOST_TERMS


def tile_rows_for(n_pairs: int, n_experts: int) -> int:
    """Rows of a tile: a choice of speed, no bit depends on it."""
    return FEW_ROWS if n_pairs <= FEW_PAIRS_AN_EXPERT * n_experts else TILE_ROWS


def expert_sort_hip(ids_i32: Tensor, n_experts: int, tile_rows: int, pairs_i32: Tensor, tiles_i32: Tensor) -> None:
    """Sort the pairs of ids_i32 [R, k] by expert on the current stream, equal ones in order of rows.

    pairs_i32  [R * k] pair p is choice p % k of row p // k
    tiles_i32  [most_tiles(), 4] expert, first in pairs_i32, rows, 0; tiles that are not needed have no rows
    """
    n_pairs, n_tiles = ids_i32.numel(), len(tiles_i32)
    wanted = {"ids_i32 R K": ids_i32, f"pairs_i32 {n_pairs}": pairs_i32, "tiles_i32 T 4": tiles_i32}
    bind_dims("expert_sort", "", wanted)
    lds_bytes = sort_lds_bytes(n_experts)
    if lds_bytes > _SORT.lds_bytes or n_tiles < most_tiles(n_pairs, n_experts, tile_rows):
        raise BindError(
            f"expert_sort: {n_experts} experts need {lds_bytes} bytes of LDS, at most {_SORT.lds_bytes}; "
            f"{n_pairs} pairs in {n_tiles} tiles of {tile_rows} rows, want most_tiles()"
        )
    args = (pairs_i32, tiles_i32, ids_i32, n_pairs, n_experts, tile_rows, n_tiles)
    launch(_SORT, grid=(1, 1), args=args, lds_bytes=lds_bytes)


class ExpertRoom:
    """Temporaries of one call of experts_hip.

    hidden_bf16 [n, I], routed_bf16 [n, D]           by pair, n = R * k
    shared_hidden_bf16 [R, I], shared_bf16 [R, D]
    arrived_i32                                      few rows: a counter for each of mixture_down's column blocks
    pairs_i32 [n], tiles_i32 [T, 4], sums_f32        more rows: of the sort, and for fp8_linear_hip
    """

    def __init__(self, room_u8: Tensor, n_rows: int, k: int, routed: ExpertWeights, shared: ExpertWeights) -> None:
        shapes = self._shapes(n_rows, k, routed, shared)
        n_bytes = sum(map(_padded_bytes, shapes))
        if len(room_u8) < n_bytes:
            raise BindError(f"experts: a workspace of {len(room_u8)} bytes, {n_rows} rows need {n_bytes}")
        tensors, start = [], 0
        for shape, dtype in shapes:
            end = start + torch.Size(shape).numel() * dtype.itemsize
            tensors.append(room_u8[start:end].view(dtype).view(shape))
            start += _padded_bytes((shape, dtype))
        self.hidden_bf16, self.routed_bf16, self.shared_hidden_bf16, self.shared_bf16, *others = tensors
        self.arrived_i32, self.pairs_i32, self.tiles_i32, self.sums_f32 = others

    @staticmethod
    def _shapes(
        n_rows: int, k: int, routed: ExpertWeights, shared: ExpertWeights
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        n, inner, width, n_experts = n_rows * k, routed.w1.n_out, routed.w2.n_out, routed.w1.groups
        is_few = takes_two_launches(n_rows, k)
        n_tiles = 0 if is_few else most_tiles(n, n_experts, tile_rows_for(n, n_experts))
        return [
            ((n, inner), torch.bfloat16),
            ((n, width), torch.bfloat16),
            ((n_rows, shared.w1.n_out), torch.bfloat16),
            ((n_rows, width), torch.bfloat16),
            ((-(-width // DOWN_COLS) if is_few else 0,), torch.int32),
            ((0 if is_few else n,), torch.int32),
            ((n_tiles, 4), torch.int32),
            ((0 if is_few else workspace_floats(n_rows, shared.w2),), torch.float32),
        ]

    @classmethod
    def bytes_for(cls, n_rows: int, k: int, routed: ExpertWeights, shared: ExpertWeights) -> int:
        """Enough for a call with so many rows."""
        return sum(map(_padded_bytes, cls._shapes(n_rows, k, routed, shared)))


def _padded_bytes(tensor: tuple[tuple[int, ...], torch.dtype]) -> int:
    """Of a shape and dtype, up to where the next tensor begins."""
    shape, dtype = tensor
    return -(-torch.Size(shape).numel() * dtype.itemsize // 16) * 16


def experts_hip(
    rounded_bf16: Tensor,
    ids_i32: Tensor,
    weights_f32: Tensor,
    routed: ExpertWeights,
    shared: ExpertWeights,
    limit: float,
    room_u8: Tensor,
    out_bf16: Tensor,
) -> None:
    """experts on the current stream: rows [R, D] through act_round8_hip; FP32 sums of products in another order.

    ids_i32, weights_f32  [R, k], a row's ids distinct
    room_u8               1-D, 16-byte aligned, at least ExpertRoom.bytes_for(R, k, routed, shared)
    """
    n_rows, width, k = bind_dims(
        "experts",
        "R D K",
        {
            "rounded_bf16 R D": rounded_bf16,
            "ids_i32 R K": ids_i32,
            "weights_f32 R K": weights_f32,
            "out_bf16 R D": out_bf16,
        },
    )
    if width != routed.w1.n_in or width != routed.w2.n_out or width != shared.w2.n_out:
        raise BindError(f"experts: rows of {width} channels, weights for {routed.w1.n_in} to {routed.w2.n_out}")
    if n_rows == 0:
        return
    room = ExpertRoom(room_u8, n_rows, k, routed, shared)
    if takes_two_launches(n_rows, k):
        _mixture_up(rounded_bf16, ids_i32, weights_f32, routed, shared, limit, room)
        _mixture_down(ids_i32, routed.w2, shared.w2, room, out_bf16)
        return
    _routed(rounded_bf16, ids_i32, weights_f32, routed, limit, room)
    shared_up_hip(rounded_bf16, shared, limit, room.shared_hidden_bf16)
    fp8_linear_hip(room.shared_hidden_bf16, shared.w2, room.shared_bf16, room.sums_f32)
    grid = (-(-width // (8 * THREADS)), n_rows)
    launch(_SUM, grid=grid, args=(out_bf16, room.routed_bf16, room.shared_bf16, ids_i32, width, k))


def shared_up_hip(rounded_bf16: Tensor, shared: ExpertWeights, limit: float, hidden_bf16: Tensor) -> None:
    """Fill hidden_bf16 [R, I] from rounded_bf16 [R, D]: gate and up, clamp and SiLU, ActQuant8. For any rows."""
    n_rows, n_inner = hidden_bf16.shape
    none = (None, None, None)
    dims = (n_rows, n_inner, *_depth(shared.w1), 1, limit)
    rows = min(_SHARED_UP) if n_rows <= min(_SHARED_UP) else max(_SHARED_UP)
    grid, kernel = (-(-n_inner // UP_COLS), -(-n_rows // rows)), _SHARED_UP[rows]
    args = (hidden_bf16, rounded_bf16, *_codes(shared), *none, *dims)
    launch(kernel, grid=grid, args=args, lds_bytes=kernel.lds_bytes)


def _depth(tiles: WeightTiles) -> tuple[int, int]:
    """K in blocks of 32 channels, and a segment's length, the same for every number of rows."""
    return tiles.n_blocks, -(-tiles.n_blocks // SEGMENTS)


def _codes(weights: ExpertWeights) -> tuple[Tensor, ...]:
    """Gate and up as kernels take them."""
    return weights.w1.codes_u8, weights.w1.scales_u8, weights.w3.codes_u8, weights.w3.scales_u8


def _mixture_up(
    x_bf16: Tensor,
    ids_i32: Tensor,
    weights_f32: Tensor,
    routed: ExpertWeights,
    shared: ExpertWeights,
    limit: float,
    room: ExpertRoom,
) -> None:
    (n_rows, k), widths = ids_i32.shape, (routed.w1.n_out, shared.w1.n_out)
    outs = (room.hidden_bf16, room.shared_hidden_bf16, room.arrived_i32)
    dims = (n_rows, *widths, *_depth(routed.w1), k, limit, len(room.arrived_i32))
    args: tuple[Argument, ...] = (*outs, x_bf16, *_codes(routed), *_codes(shared), ids_i32, weights_f32, *dims)
    grid = (-(-max(widths) // UP_COLS), 1 + n_rows * k)
    launch(_MIXTURE_UP, grid=grid, args=args, lds_bytes=MIXTURE_LDS_BYTES)


def _mixture_down(ids_i32: Tensor, w2: WeightTiles, shared_w2: WeightTiles, room: ExpertRoom, out_bf16: Tensor) -> None:
    n_rows, k = ids_i32.shape
    shared_segments, shared_segment = segments_of(shared_w2)
    if shared_segments not in (SEGMENTS, 2 * SEGMENTS):
        raise BindError(f"experts: the shared w2 has {shared_segments} segments, want {SEGMENTS} or {2 * SEGMENTS}")
    outs = (out_bf16, room.routed_bf16, room.shared_bf16, room.arrived_i32, room.hidden_bf16, room.shared_hidden_bf16)
    weights = (w2.codes_u8, w2.scales_u8, shared_w2.codes_u8, shared_w2.scales_u8)
    dims = (n_rows, w2.n_out, *_depth(w2), shared_w2.n_blocks, shared_segment, shared_segments, k)
    grid = (len(room.arrived_i32), shared_segments // SEGMENTS + n_rows * k)
    launch(_MIXTURE_DOWN, grid=grid, args=(*outs, *weights, ids_i32, *dims), lds_bytes=MIXTURE_LDS_BYTES)


def _routed(
    x_bf16: Tensor, ids_i32: Tensor, weights_f32: Tensor, routed: ExpertWeights, limit: float, room: ExpertRoom
) -> None:
    """Fill room.routed_bf16, by way of the sort."""
    (n_rows, k), w1 = ids_i32.shape, routed.w1
    rows = tile_rows_for(n_rows * k, w1.groups)
    expert_sort_hip(ids_i32, w1.groups, rows, room.pairs_i32, room.tiles_i32)
    where = (room.tiles_i32, room.pairs_i32)
    dims = (n_rows, w1.n_out, *_depth(w1), k, limit)
    kernel, grid = _ROUTED_UP[rows], (-(-w1.n_out // UP_COLS), len(room.tiles_i32))
    args: tuple[Argument, ...] = (room.hidden_bf16, x_bf16, *_codes(routed), *where, weights_f32, *dims)
    launch(kernel, grid=grid, args=args, lds_bytes=kernel.lds_bytes)
    routed_down_hip(rows, room.hidden_bf16, routed.w2, *where, room.routed_bf16)


def routed_down_hip(
    tile_rows: int, hidden_bf16: Tensor, w2: WeightTiles, tiles_i32: Tensor, pairs_i32: Tensor, out_bf16: Tensor
) -> None:
    """Fill out_bf16 [n, D] from rounded hidden_bf16 [n, I], both by pair, and the pair's expert in w2."""
    kernel = _DOWN[tile_rows]
    grid = (-(-w2.n_out // DOWN_COLS), len(tiles_i32))
    args = (out_bf16, hidden_bf16, w2.codes_u8, w2.scales_u8, tiles_i32, pairs_i32)
    launch(kernel, grid=grid, args=(*args, w2.n_out, *_depth(w2)), lds_bytes=kernel.lds_bytes)
