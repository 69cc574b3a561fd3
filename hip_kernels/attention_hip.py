"""Window and selected attention on the GPU; a call's rows may be of several sequences (backbone.md section 5.4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.kernel import Kernel, launch

TILE, BLOCK, QUARTERS = 16, 64, 4
MOST_SLOTS = 640  # of a list: the release's 128 and 512


def _lds_bytes(n_heads: int, width: int, n_slots: int) -> int:
    """As struct Lds: two tiles' rows; quarters of scores or weights; 12 floats a head; places of all slots."""
    tiles = -(-n_heads // TILE)
    exchange = max(tiles * 2 * (QUARTERS - 1) * TILE * TILE * 4, tiles * TILE * (BLOCK + 8) * 2)
    return (
        BLOCK // 2 * (width + 8) * 2
        + exchange
        + (2 * QUARTERS + 4) * tiles * TILE * 4
        + -(-n_slots // BLOCK) * BLOCK * 4
    )


@cache
def _kernel(n_heads: int, width: int) -> Kernel:
    return Kernel(
        "attention.hip",
        "attention",
        "P" * 11 + "iiiiif",
        threads=32 * QUARTERS * -(-n_heads // TILE),
        defines={"HEADS": n_heads, "WIDTH": width},
        lds_bytes=_lds_bytes(n_heads, width, MOST_SLOTS),
    )


RELEASE_KERNELS = (_kernel(64, 512),)


@dataclass(frozen=True)
class Windows:
    """Packed window rows in rings, and which of them each row sees: slots first, first + 1, ... of its ring.

    rows_u8    [rings, S, D + D/32]; a chunk's own contiguous rows are one ring that nothing wraps round in
    ring_i32   [R]
    first_i32  [R] slot of the first entry, in ascending position; entry i is slot (first + i) % S
    count_i32  [R] entries, 1..size
    size       slots of the list that are the window's, present or not
    """

    rows_u8: Tensor
    ring_i32: Tensor
    first_i32: Tensor
    count_i32: Tensor
    size: int


@dataclass(frozen=True)
class Selected:
    """Packed compressed rows in pages, and which of them each row sees.

    rows_u8          [pages, S, D/2 + D/16]
    page_tables_i32  [sequences, W] page ids
    sequence_i32     [R]
    index_i32        [R, K] rows of its sequence, ascending, -1 at the end
    """

    rows_u8: Tensor
    page_tables_i32: Tensor
    sequence_i32: Tensor
    index_i32: Tensor


def attention_hip(
    q_bf16: Tensor, windows: Windows, selected: Selected | None, sink_f32: Tensor, out_bf16: Tensor
) -> None:
    """Fill out_bf16 [R, H, D], which may be q_bf16 itself, on the current stream; see attention.attention.

    sink_f32 [H]. Lists, blocks and roundings are the reference's; the order of a dot's additions is the matrix
    instructions' own, and exp is the target's. A row's bits do not depend on the others. Raises BindError.
    """
    n_rows, n_heads, width = q_bf16.shape
    wanted = {
        "q_bf16 R H D": q_bf16,
        f"window_rows_u8 N S {RowFormat('window', width).row_bytes}": windows.rows_u8,
        "ring_i32 R": windows.ring_i32,
        "first_i32 R": windows.first_i32,
        "count_i32 R": windows.count_i32,
        "sink_f32 H": sink_f32,
        "out_bf16 R H D": out_bf16,
    }
    if selected:
        wanted |= {
            f"compressed_rows_u8 P T {RowFormat('compressed', width).row_bytes}": selected.rows_u8,
            "page_tables_i32 Q W": selected.page_tables_i32,
            "sequence_i32 R": selected.sequence_i32,
            "index_i32 R K": selected.index_i32,
        }
    bind_dims("attention", "R", wanted)
    if n_heads > 64 or (n_heads % TILE and n_heads > TILE) or width % (TILE * QUARTERS * -(-n_heads // TILE)):
        raise BindError(
            f"attention: {n_heads} heads of {width}; want at most 16 heads or 32, 48 or 64, and 64 channels a head for "
            "each 16 heads"
        )
    if n_rows:
        compressed: tuple[Tensor | None, ...] = (None,) * 4
        sizes = (0, 1, 0)
        if selected:
            compressed = (selected.rows_u8, selected.page_tables_i32, selected.sequence_i32, selected.index_i32)
            sizes = (selected.index_i32.shape[1], selected.rows_u8.shape[1], selected.page_tables_i32.shape[1])
        seen = (windows.rows_u8, windows.ring_i32, windows.first_i32, windows.count_i32, *compressed)
        args = (out_bf16, q_bf16, *seen, sink_f32, windows.rows_u8.shape[1], windows.size, *sizes, width**-0.5)
        lds_bytes = _lds_bytes(n_heads, width, windows.size + sizes[0])
        launch(_kernel(n_heads, width), grid=(n_rows, 1), args=args, lds_bytes=lds_bytes)
