"""The form in which scoring reads index queries and keys: INT8 codes and group scales, in the order of its fragments.

A stored row (68 bytes, `formats.RowFormat`) stays the truth; this is expanded once, when the row is written. Sixteen
vectors are a tile of 2,112 bytes: codes times 2 as INT8 [group][vector][32], then E8M0 scales [vector][group]. Queries
are [ceil(R/16), H] tiles, a key pool's page is rows_per_page / 16 tiles.

Groups whose scales lie within 2^3 are put under the least of them, their codes shifted to it: then the dot is one
integer sum. Groups of zeros go with any scale. A vector with a scale beyond 2^+-24 keeps what it has.
"""

from __future__ import annotations

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

_PREPARE = Kernel("index_vectors.hip", "index_prepare", "PPPiiii", threads=32 * WAVES)
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


def to_tiles(codes_i8: Tensor, scales_u8: Tensor) -> Tensor:
    """[N, H, 4, 32] codes and [N, H, 4] scales, N a multiple of 16, as tiles [N/16, H, TILE_BYTES]."""
    n_heads = codes_i8.shape[1]
    codes = codes_i8.view(torch.uint8).unflatten(0, (-1, VECTORS)).permute(0, 2, 3, 1, 4)
    scales = scales_u8.unflatten(0, (-1, VECTORS)).transpose(1, 2)
    return torch.cat((codes.reshape(-1, n_heads, VECTORS * CHANNELS), scales.reshape(-1, n_heads, VECTORS * GROUPS)), 2)


def from_tiles(tiles_u8: Tensor) -> tuple[Tensor, Tensor]:
    """Decoded E2M1 values [N, H, 4, 32] and scales [N, H, 4], FP32, of tiles [N/16, H, TILE_BYTES]."""
    codes = tiles_u8[..., : VECTORS * CHANNELS].view(torch.int8).unflatten(-1, (GROUPS, VECTORS, -1))
    scales = tiles_u8[..., VECTORS * CHANNELS :].unflatten(-1, (VECTORS, GROUPS))
    values_f32 = codes.permute(0, 3, 1, 2, 4).flatten(0, 1).float() / 2
    return values_f32, e8m0_decode(scales.transpose(1, 2).flatten(0, 1).contiguous())


@operator
def index_prepare(
    rows_u8: Tensor, tiles_u8: Tensor, page_table_i32: Tensor | None = None, first: int = 0, rows_per_page: int = 0
) -> None:
    """Write stored rows [N, H, 68] into tiles_u8 [T, H, TILE_BYTES] at their slots; other slots stay as they are.

    Row n's slot is n, or first + n through page_table_i32 [n_pages] over pages of rows_per_page slots (a multiple of
    16) one after the other in tiles_u8. Raises BindError.
    """
    n_rows, _ = _bind_prepare(rows_u8, tiles_u8, page_table_i32, first, rows_per_page)
    slots = torch.arange(first, first + n_rows, device=rows_u8.device)
    if page_table_i32 is not None:
        slots = row_slots(slots, page_table_i32, rows_per_page)
    codes, scales = prepare_ref(rows_u8)
    tile, vector = slots // VECTORS, slots % VECTORS
    planes = tiles_u8[..., : VECTORS * CHANNELS].unflatten(-1, (GROUPS, VECTORS, -1))
    planes[tile, :, :, vector] = codes.view(torch.uint8)
    tiles_u8[..., VECTORS * CHANNELS :].unflatten(-1, (VECTORS, GROUPS))[tile, :, vector] = scales


def index_prepare_hip(
    rows_u8: Tensor, tiles_u8: Tensor, page_table_i32: Tensor | None = None, first: int = 0, rows_per_page: int = 0
) -> None:
    """index_prepare on the current stream, the same bytes."""
    n_rows, n_heads = _bind_prepare(rows_u8, tiles_u8, page_table_i32, first, rows_per_page)
    if n_rows:
        args = (tiles_u8, rows_u8, page_table_i32, n_rows, n_heads, first, rows_per_page)
        launch(_PREPARE, grid=(-(-n_rows * n_heads // WAVES), 1), args=args)


def _bind_prepare(
    rows_u8: Tensor, tiles_u8: Tensor, page_table_i32: Tensor | None, first: int, rows_per_page: int
) -> tuple[int, int]:
    wanted = {"rows_u8 N H 68": rows_u8, "tiles_u8 T H 2112": tiles_u8}
    n_rows, n_heads, n_tiles = bind_dims("index_prepare", "N H T", wanted)
    if page_table_i32 is None and (first or n_rows > n_tiles * VECTORS):
        raise BindError(
            f"index_prepare: rows {first} to {first + n_rows} in {n_tiles} tiles of {VECTORS}; "
            "without a page table start at 0 and pass tiles for all rows"
        )
    if page_table_i32 is not None and (rows_per_page % VECTORS or first + n_rows > len(page_table_i32) * rows_per_page):
        raise BindError(
            f"index_prepare: rows {first} to {first + n_rows} in {len(page_table_i32)} pages of {rows_per_page}; "
            f"grow the page table, and keep pages a multiple of {VECTORS}"
        )
    return n_rows, n_heads
