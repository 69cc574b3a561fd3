"""experts.py on the GPU: the binding of experts.hip.

Pairs of a row and one of its experts are sorted by expert on the device; each matrix kernel then takes tiles of rows
that have one expert. Nothing is read back: grids are as large as the most tiles there can be, and empty ones return.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims
from rocline.hip_kernels.kernel import Kernel, launch
from rocline.hip_kernels.linear import Fp4Weight
from rocline.hip_kernels.linear_hip import FEW_LDS_BYTES, fp8_linear_hip, tiled_lds_bytes, workspace_floats
from rocline.hip_kernels.weight_tiles import WeightTiles, check_scales

THREADS, SORT_THREADS = 256, 1024
FEW_ROWS, TILE_ROWS = 16, 64
FEW_SEGMENTS = 2
# Pairs an expert has on average up to which 16-row tiles, bound by memory, are the faster ones.
FEW_PAIRS_AN_EXPERT = 16
UP_COLS, DOWN_COLS = 64, 128  # of a workgroup
MOST_EXPERTS = 384


def sort_lds_bytes(n_experts: int) -> int:
    """Of expert_sort: counts for 32 waves, two prefix sums, and 32 words."""
    return (34 * (n_experts + 1) + 32) * 4


def _pair(name: str, arguments: str) -> dict[int, Kernel]:
    """By the rows of a tile."""
    lds = {FEW_ROWS: ("few", FEW_LDS_BYTES), TILE_ROWS: ("64", tiled_lds_bytes(TILE_ROWS))}
    return {
        rows: Kernel("experts.hip", f"{name}_{suffix}", arguments, threads=THREADS, lds_bytes=n_bytes)
        for rows, (suffix, n_bytes) in lds.items()
    }


_SORT = Kernel("experts.hip", "expert_sort", "PPPiiii", threads=SORT_THREADS, lds_bytes=sort_lds_bytes(MOST_EXPERTS))
_UP = {name: _pair(f"{name}_up", "PPPPPPPPPiiiiif") for name in ("routed", "shared")}
_DOWN = _pair("routed_down", "PPPPPPiii")
_SUM = Kernel("experts.hip", "expert_sum", "PPPPii", threads=THREADS)
_PREPARE = Kernel("experts.hip", "prepare_e2m1", "PPPPiii", threads=THREADS)
RELEASE_KERNELS = (_SORT, *_UP["routed"].values(), *_UP["shared"].values(), *_DOWN.values(), _SUM, _PREPARE)


def prepare_fp4_weight(weight: Fp4Weight) -> WeightTiles:
    """Tiles of all experts' codes_e2m1x2 [E, N, K/2] with scales_e8m0 [E, N, K/32]. At load: waits for the device.

    Raises BindError for a shape or scale that has no tiles.
    """
    n_experts, n_out, n_bytes = bind_dims("prepare_fp4_weight", "E N P", {"codes_e2m1x2 E N P": weight.codes_e2m1x2})
    bind_dims("prepare_fp4_weight", "", {f"scales_e8m0 {n_experts} {n_out} {n_bytes // 16}": weight.scales_e8m0})
    check_scales("prepare_fp4_weight", "e2m1", weight.scales_e8m0)
    tiles = WeightTiles.empty("e2m1", n_experts, n_out, 2 * n_bytes, weight.codes_e2m1x2.device)
    args = (tiles.codes_u8, tiles.scales_u8, *weight, n_out, n_experts, tiles.n_blocks)
    launch(_PREPARE, grid=(-(-tiles.n_lanes // THREADS), 1), args=args)
    return tiles


@dataclass(frozen=True)
class ExpertWeights:
    """w1 (gate), w3 (up), w2 (down) prepared: of all experts, or of the shared one."""

    w1: WeightTiles
    w3: WeightTiles
    w2: WeightTiles


def most_tiles(n_pairs: int, n_experts: int, tile_rows: int) -> int:
    """How many tiles of rows there can be, whatever the router chose."""
    return min(n_pairs, n_experts) + n_pairs // tile_rows


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

    pairs_i32 [n], tiles_i32 [T, 4]: the sort; hidden_bf16 [n, I] and routed_bf16 [n, D] for the n = R * k pairs;
    shared_hidden_bf16 [R, I], shared_bf16 [R, D]; sums_f32 for fp8_linear_hip
    """

    def __init__(self, room_u8: Tensor, n_rows: int, k: int, routed: ExpertWeights, shared: ExpertWeights) -> None:
        self._room_u8, self._at = room_u8, 0
        n_bytes = self.bytes_for(n_rows, k, routed, shared)
        if len(room_u8) < n_bytes:
            raise BindError(f"experts: a workspace of {len(room_u8)} bytes, {n_rows} rows need {n_bytes}")
        n, inner, width = n_rows * k, routed.w1.n_out, routed.w2.n_out
        tiles = most_tiles(n, routed.w1.groups, tile_rows_for(n, routed.w1.groups))
        self.pairs_i32 = self._take((n,), torch.int32)
        self.tiles_i32 = self._take((tiles, 4), torch.int32)
        self.hidden_bf16 = self._take((n, inner), torch.bfloat16)
        self.routed_bf16 = self._take((n, width), torch.bfloat16)
        self.shared_hidden_bf16 = self._take((n_rows, shared.w1.n_out), torch.bfloat16)
        self.shared_bf16 = self._take((n_rows, width), torch.bfloat16)
        self.sums_f32 = self._take((workspace_floats(n_rows, shared.w2),), torch.float32)

    @staticmethod
    def bytes_for(n_rows: int, k: int, routed: ExpertWeights, shared: ExpertWeights) -> int:
        """Enough for a call with so many rows."""
        n, inner, width = n_rows * k, routed.w1.n_out, routed.w2.n_out
        tiles = most_tiles(n, routed.w1.groups, tile_rows_for(n, routed.w1.groups))
        halves = n * (inner + width) + n_rows * (shared.w1.n_out + width)
        return 4 * n + 16 * tiles + 2 * halves + 4 * workspace_floats(n_rows, shared.w2) + 7 * 16

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        start = -(-self._at // 16) * 16
        self._at = start + torch.Size(shape).numel() * dtype.itemsize
        return self._room_u8[start : self._at].view(dtype).view(shape)


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
    n_experts, n_pairs = routed.w1.groups, n_rows * k
    rows = tile_rows_for(n_pairs, n_experts)
    expert_sort_hip(ids_i32, n_experts, rows, room.pairs_i32, room.tiles_i32)
    where = (room.tiles_i32, room.pairs_i32)
    _up("routed", rows, len(room.tiles_i32), room.hidden_bf16, rounded_bf16, routed, (*where, weights_f32), k, limit)
    routed_down_hip(rows, room.hidden_bf16, routed.w2, *where, room.routed_bf16)
    rows = FEW_ROWS if n_rows <= FEW_ROWS else TILE_ROWS
    nowhere = (None, None, None)
    _up("shared", rows, -(-n_rows // rows), room.shared_hidden_bf16, rounded_bf16, shared, nowhere, 1, limit)
    fp8_linear_hip(room.shared_hidden_bf16, shared.w2, room.shared_bf16, room.sums_f32)
    grid = (-(-width // (8 * THREADS)), n_rows)
    launch(_SUM, grid=grid, args=(out_bf16, room.routed_bf16, room.shared_bf16, ids_i32, width, k))


def _segment(n_blocks: int) -> int:
    """A segment's length in blocks of 32 channels, the same for every number of rows."""
    return -(-n_blocks // FEW_SEGMENTS)


def _up(
    kind: str,
    tile_rows: int,
    n_tiles: int,
    hidden_bf16: Tensor,
    x_bf16: Tensor,
    weights: ExpertWeights,
    sorting: tuple[Tensor | None, Tensor | None, Tensor | None],
    k: int,
    limit: float,
) -> None:
    kernel, w1, w3 = _UP[kind][tile_rows], weights.w1, weights.w3
    codes = (w1.codes_u8, w1.scales_u8, w3.codes_u8, w3.scales_u8)
    dims = (len(x_bf16), w1.n_out, w1.n_blocks, _segment(w1.n_blocks), k, limit)
    grid = (-(-w1.n_out // UP_COLS), n_tiles)
    launch(kernel, grid=grid, args=(hidden_bf16, x_bf16, *codes, *sorting, *dims), lds_bytes=kernel.lds_bytes)


def routed_down_hip(
    tile_rows: int, hidden_bf16: Tensor, w2: WeightTiles, tiles_i32: Tensor, pairs_i32: Tensor, out_bf16: Tensor
) -> None:
    """Fill out_bf16 [n, D] by pair from hidden_bf16 [n, I], sorted and rounded, and the pair's expert in w2."""
    kernel = _DOWN[tile_rows]
    grid = (-(-w2.n_out // DOWN_COLS), len(tiles_i32))
    args = (out_bf16, hidden_bf16, w2.codes_u8, w2.scales_u8, tiles_i32, pairs_i32)
    dims = (w2.n_out, w2.n_blocks, _segment(w2.n_blocks))
    launch(kernel, grid=grid, args=(*args, *dims), lds_bytes=kernel.lds_bytes)
