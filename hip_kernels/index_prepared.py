"""The form in which scoring reads index queries and keys: INT8 codes and group scales, in the order of its fragments.

A stored row (68 bytes, `formats.RowFormat`) stays the truth; this is expanded once, when the row is written. Sixteen
vectors are a tile of 2,112 bytes: codes times 2 as INT8 [group][vector][32], then E8M0 scales [vector][group]. Queries
are [ceil(R/16), H] tiles, a key pool's page is rows_per_page / 16 tiles.

Groups whose scales lie within 2^3 are put under the least of them, their codes shifted to it: then the dot is one
integer sum. Groups of zeros go with any scale. A vector with a scale beyond 2^+-24 keeps what it has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims, operator
from rocline.hip_kernels.formats import E8M0_NAN, e2m1_decode, e8m0_decode, unpack_e2m1
from rocline.hip_kernels.kernel import Kernel, launch
from rocline.hip_kernels.pages import row_slots

CHANNELS, GROUPS, STORED_BYTES = 128, 4, 68
VECTORS = 16  # of a tile
TILE_BYTES = VECTORS * (CHANNELS + GROUPS)
ALIGN_REACH, PLAIN_REACH = 3, 24
WAVES = 8

_PREPARE = Kernel("index_vectors.hip", "index_prepare", "PPPPPiiii", threads=32 * WAVES)
RELEASE_KERNELS = (_PREPARE,)


def prepare_ref(rows_u8: Tensor) -> tuple[Tensor, Tensor]:
    """codes_i8 [..., 4, 32] and scales_e8m0 [..., 4] of stored rows [..., 68]: the same vectors."""
    codes_i32 = (e2m1_decode(unpack_e2m1(rows_u8[..., : CHANNELS // 2])) * 2).int().unflatten(-1, (GROUPS, -1))
    scales_i32 = rows_u8[..., CHANNELS // 2 :].int()
    zero = (codes_i32 == 0).all(-1) & (scales_i32 != E8M0_NAN)
    least = scales_i32.where(~zero, 256).amin(-1, keepdim=True)
    most = scales_i32.where(~zero, -1).amax(-1, keepdim=True)
    least, most = least.where(most >= 0, 127), most.where(most >= 0, 127)
    plain = (least >= 127 - PLAIN_REACH) & (most <= 127 + PLAIN_REACH)
    align = plain & (most - least <= ALIGN_REACH)
    shift = (scales_i32 - least).where(align & ~zero, 0)
    return (codes_i32 << shift.unsqueeze(-1)).to(torch.int8), least.where(align | zero, scales_i32).to(torch.uint8)


def from_tiles(tiles_u8: Tensor) -> tuple[Tensor, Tensor]:
    """Decoded E2M1 values [N, H, 4, 32] and scales [N, H, 4], FP32, of tiles [N/16, H, TILE_BYTES]."""
    codes = tiles_u8[..., : VECTORS * CHANNELS].view(torch.int8).unflatten(-1, (GROUPS, VECTORS, -1))
    scales = tiles_u8[..., VECTORS * CHANNELS :].unflatten(-1, (VECTORS, GROUPS))
    values_f32 = codes.permute(0, 3, 1, 2, 4).flatten(0, 1).float() / 2
    return values_f32, e8m0_decode(scales.transpose(1, 2).flatten(0, 1).contiguous())


class Slots(NamedTuple):
    """Where rows go in pages of rows_per_page slots, a multiple of 16, that lie one after the other.

    positions_i32    [N] a row's place in its sequence, no two of one sequence alike; negative: nowhere
    sequences_i32    [N] row of page_tables_i32
    page_tables_i32  [Q, W] page ids, W * rows_per_page above every position
    """

    positions_i32: Tensor
    sequences_i32: Tensor
    page_tables_i32: Tensor
    rows_per_page: int


@operator
def index_prepare(rows_u8: Tensor, tiles_u8: Tensor, slots: Slots | None = None) -> None:
    """Write stored rows [N, H, 68] into tiles_u8 [T, H, TILE_BYTES] at `slots`, or row n at n; other slots stay as they
    are. Raises BindError."""
    n_rows, _ = _bind_prepare(rows_u8, tiles_u8, slots)
    if slots is None:
        _put(rows_u8, tiles_u8, torch.arange(n_rows, device=rows_u8.device))
        return
    for sequence, table_i32 in enumerate(slots.page_tables_i32):
        mine = (slots.sequences_i32 == sequence) & (slots.positions_i32 >= 0)
        _put(rows_u8[mine], tiles_u8, row_slots(slots.positions_i32[mine], table_i32, slots.rows_per_page))


def _put(rows_u8: Tensor, tiles_u8: Tensor, slots_i64: Tensor) -> None:
    codes, scales = prepare_ref(rows_u8)
    tile, vector = slots_i64 // VECTORS, slots_i64 % VECTORS
    planes = tiles_u8[..., : VECTORS * CHANNELS].unflatten(-1, (GROUPS, VECTORS, -1))
    planes[tile, :, :, vector] = codes.view(torch.uint8)
    tiles_u8[..., VECTORS * CHANNELS :].unflatten(-1, (VECTORS, GROUPS))[tile, :, vector] = scales


def index_prepare_hip(rows_u8: Tensor, tiles_u8: Tensor, slots: Slots | None = None) -> None:
    """index_prepare on the current stream, the same bytes."""
    n_rows, n_heads = _bind_prepare(rows_u8, tiles_u8, slots)
    if n_rows:
        where = (*slots[:3], n_rows, n_heads, slots.rows_per_page) if slots else (None, None, None, n_rows, n_heads, 0)
        table_width = slots.page_tables_i32.shape[1] if slots else 0
        launch(_PREPARE, grid=(-(-n_rows * n_heads // WAVES), 1), args=(tiles_u8, rows_u8, *where, table_width))


def _bind_prepare(rows_u8: Tensor, tiles_u8: Tensor, slots: Slots | None) -> tuple[int, int]:
    wanted = {"rows_u8 N H 68": rows_u8, "tiles_u8 T H 2112": tiles_u8}
    if slots:
        wanted |= {"positions_i32 N": slots.positions_i32, "sequences_i32 N": slots.sequences_i32}
        wanted |= {"page_tables_i32 Q W": slots.page_tables_i32}
    n_rows, n_heads, n_tiles = bind_dims("index_prepare", "N H T", wanted)
    if slots is None and n_rows > n_tiles * VECTORS:
        raise BindError(f"index_prepare: {n_rows} rows in {n_tiles} tiles of {VECTORS}; pass tiles for all rows")
    if slots and slots.rows_per_page % VECTORS:
        raise BindError(f"index_prepare: pages of {slots.rows_per_page} rows; keep them a multiple of {VECTORS}")
    return n_rows, n_heads
