"""Window and selected attention on the GPU; a call's rows may be of several sequences (backbone.md section 5.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd

import torch
from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.kernel import Kernel, launch

TILE, BLOCK, HALF, QUARTERS = 16, 64, 32, 4
COLUMNS = 128  # of a workgroup of attention_window
MOST_SLOTS = 640  # of a list: the release's 128 and 512
# Up to so many rows, many workgroups share a row; more are quicker with a workgroup each.
FEW_ROWS = 16
# Up to so many that have only their window, of heads of these widths, do so in one launch.
FEW_WINDOWS, WINDOW_WIDTHS = 4, (128, 256, 512)
ENOUGH_WORKGROUPS = 96  # of attention_scores: what gfx1100 holds at once


def _tiles(n_heads: int) -> int:
    return -(-n_heads // TILE)


def _half_bytes(n_tiles: int, width: int) -> int:
    """Rows of half a block, and quarters of its scores of so many tiles of heads."""
    return HALF * (width + 8) * 2 + n_tiles * 2 * (QUARTERS - 1) * TILE * TILE * 4


def _lds_bytes(n_heads: int, width: int, n_slots: int) -> int:
    """As struct Lds: half a block; 12 floats a head; places of all slots. Weights lie where the quarters do."""
    tiles = _tiles(n_heads)
    return _half_bytes(tiles, width) + (2 * QUARTERS + 4) * tiles * TILE * 4 + n_slots * 4


def _columns(width: int) -> int:
    """Channels of a workgroup of attention_values."""
    return 64 if width % 128 else 128


def _value_lds_bytes(width: int) -> int:
    """As struct ValueLds: weights; two floats a head and tile, two a head and block, one; outputs."""
    tiles, blocks = MOST_SLOTS // TILE, MOST_SLOTS // BLOCK
    floats = (2 * (tiles + 4) + 2 * blocks + 1) * TILE
    return TILE * (MOST_SLOTS + 8) * 2 + floats * 4 + TILE * (_columns(width) + 8) * 2


def _own_heads(n_heads: int) -> int:
    """Of a workgroup of attention_window."""
    return min(TILE, n_heads)


def _window_kernel(n_heads: int, width: int) -> Kernel:
    own_heads = _own_heads(n_heads)
    return Kernel(
        "attention.hip",
        "attention_window",
        "P" * 9 + "iiif",
        threads=32 * min(16, width // TILE),
        defines={"HEADS": own_heads, "ROW_HEADS": n_heads, "WIDTH": width},
        lds_bytes=_lds_bytes(own_heads, width, MOST_SLOTS),
    )


def _parts(n_rows: int, n_halves: int) -> int:
    """Halves of a workgroup of attention_scores: one, until there are enough workgroups."""
    return min(n_halves, -(-n_rows * n_halves // ENOUGH_WORKGROUPS))


@dataclass(frozen=True)
class _Kernels:
    """Of one shape: a workgroup a row, the one launch of few windows alone, and the two of few rows."""

    whole: Kernel
    window: Kernel
    scores: Kernel
    values: Kernel


@cache
def _kernels(n_heads: int, width: int) -> _Kernels:
    defines = {"HEADS": n_heads, "WIDTH": width}
    return _Kernels(
        Kernel(
            "attention.hip",
            "attention",
            "P" * 13 + "iiiiiif",
            threads=32 * QUARTERS * _tiles(n_heads),
            defines=defines,
            lds_bytes=_lds_bytes(n_heads, width, MOST_SLOTS),
        ),
        _window_kernel(n_heads, width),
        Kernel(
            "attention_few.hip",
            "attention_scores",
            "P" * 12 + "iiiiii",
            threads=32 * QUARTERS * _tiles(n_heads),
            defines=defines,
            lds_bytes=_half_bytes(_tiles(n_heads), width) + MOST_SLOTS * 4,
        ),
        Kernel(
            "attention_few.hip",
            "attention_values",
            "P" * 7 + "iif",
            threads=_columns(width) * 2,
            defines=defines,
            lds_bytes=_value_lds_bytes(width),
        ),
    )


_RELEASE = _kernels(64, 512)
RELEASE_KERNELS = (_RELEASE.whole, _RELEASE.window, _RELEASE.scores, _RELEASE.values)


@dataclass(frozen=True)
class Windows:
    """Packed window rows in rings, and which of them each row sees: slots first, first + 1, ... of its ring.

    rows_u8    [rings, S, D + D/32]: all rings of a layer, in which position p lies in slot p % S. A chunk's own
               contiguous rows are one ring that nothing wraps round in
    ring_i32   [R] the ring of the row's sequence
    first_i32  [R] slot of the first entry, in ascending position; entry i is slot (first + i) % S
    count_i32  [R] entries, 1..size
    size       slots of the list that are the window's, present or not

    Rows of one sequence may be verified together in its ring, each seeing up to its own position: with S at least
    size + rows - 1, none of their own rows has taken the place of one that an earlier of them sees.
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


@dataclass(frozen=True)
class Turn:
    """cos_f32, sin_f32 [R, rope_dim/2] of the rows' own positions."""

    cos_f32: Tensor
    sin_f32: Tensor


def list_slots(windows: Windows, selected: Selected | None) -> int:
    """Slots of every row's list, in whole blocks."""
    n_selected = selected.index_i32.shape[1] if selected else 0
    return -(-(windows.size + n_selected) // BLOCK) * BLOCK


def shares_windows(q_bf16: Tensor, selected: Selected | None) -> bool:
    """Whether one launch serves few rows that have only their window, if outputs do not take the queries' place."""
    return selected is None and len(q_bf16) <= FEW_WINDOWS and q_bf16.shape[2] in WINDOW_WIDTHS


def _are_windows_shared(q_bf16: Tensor, selected: Selected | None, out_bf16: Tensor) -> bool:
    return shares_windows(q_bf16, selected) and out_bf16.data_ptr() != q_bf16.data_ptr()


def room_bytes(q_bf16: Tensor, windows: Windows, selected: Selected | None, out_bf16: Tensor) -> int:
    """What attention_hip needs between its two launches for few rows; 0 where one serves."""
    n_rows, n_heads, width = q_bf16.shape
    if n_rows > FEW_ROWS or _are_windows_shared(q_bf16, selected, out_bf16):
        return 0
    return sum(_room_parts(n_rows, n_heads, width, list_slots(windows, selected)))


def _room_parts(n_rows: int, n_heads: int, width: int, n_slots: int) -> tuple[int, int, int]:
    """Bytes of BF16 values, of an FP32 score a head, and of a bit a slot."""
    slots = n_rows * n_slots
    return slots * width * 2, slots * _tiles(n_heads) * TILE * 4, slots // 8


def attention_hip(
    q_bf16: Tensor,
    windows: Windows,
    selected: Selected | None,
    sink_f32: Tensor,
    out_bf16: Tensor,
    room_u8: Tensor | None,
    turn: Turn | None = None,
) -> None:
    """Fill out_bf16 [R, H, D], which may be q_bf16 itself, on the current stream; see attention.attention.

    sink_f32 [H]. room_u8 [n], n at least room_bytes of the same tensors; None where that is 0.
    With `turn` the last rope_dim channels of every head output are rotated back: the bits of rope_hip with
    inverse=True after this. Packed rows start where 16 bytes do, if a row is as many times 16.

    Rows may be of any sequences in any order: windows.rows_u8 is a layer's whole room of rings, so one call does a
    layer's decoding or verifying rows. Lists, blocks and roundings are the reference's; the order of a dot's
    additions is the matrix instructions' own, and exp is the target's. A row's bits do not depend on the others, nor
    on how many they are. Raises BindError.
    """
    n_rows, n_heads, width = q_bf16.shape
    _check(q_bf16, windows, selected, sink_f32, out_bf16, turn)
    n_slots = list_slots(windows, selected)
    wanted_bytes = room_bytes(q_bf16, windows, selected, out_bf16)
    if wanted_bytes and (room_u8 is None or room_u8.dtype != torch.uint8 or room_u8.nbytes < wanted_bytes):
        given = "none" if room_u8 is None else f"{room_u8.dtype} {list(room_u8.shape)}"
        raise BindError(f"attention: room_u8 is {given}, want {wanted_bytes} bytes for {n_rows} rows; see room_bytes")
    if room_u8 is not None and room_u8.data_ptr() % 16:
        raise BindError(f"attention: room_u8 starts at {room_u8.data_ptr():#x}, want a multiple of 16")
    if not n_rows:
        return
    compressed: tuple[Tensor | None, ...] = (None,) * 4
    sizes: tuple[int, ...] = (0, 1, 0)
    if selected:
        compressed = (selected.rows_u8, selected.page_tables_i32, selected.sequence_i32, selected.index_i32)
        sizes = (selected.index_i32.shape[1], selected.rows_u8.shape[1], selected.page_tables_i32.shape[1])
    lists = (windows.rows_u8, windows.ring_i32, windows.first_i32, windows.count_i32, *compressed)
    sizes = (windows.rows_u8.shape[1], windows.size, *sizes)
    at_end = (sink_f32, *((turn.cos_f32, turn.sin_f32) if turn else (None, None)))
    last = (turn.cos_f32.shape[1] if turn else 0, width**-0.5)
    if room_u8 is not None and wanted_bytes:
        parts = room_u8[:wanted_bytes].split(_room_parts(n_rows, n_heads, width, n_slots))
        _launch_few(q_bf16, lists, sizes, n_slots, parts, at_end, last, out_bf16)
    elif _are_windows_shared(q_bf16, selected, out_bf16):
        launch(
            _kernels(n_heads, width).window,
            grid=(n_rows, _tiles(n_heads) * (width // COLUMNS)),
            args=(out_bf16, q_bf16, *lists[:4], *at_end, *sizes[:2], *last),
            lds_bytes=_lds_bytes(_own_heads(n_heads), width, n_slots),
        )
    else:
        launch(
            _kernels(n_heads, width).whole,
            grid=(n_rows, 1),
            args=(out_bf16, q_bf16, *lists, *at_end, *sizes, *last),
            lds_bytes=_lds_bytes(n_heads, width, n_slots),
        )


def _launch_few(
    q_bf16: Tensor,
    lists: Sequence[Tensor | None],
    sizes: Sequence[int],
    n_slots: int,
    room: Sequence[Tensor],
    at_end: Sequence[Tensor | None],
    last: Sequence[float],
    out_bf16: Tensor,
) -> None:
    """Many workgroups a row; the arguments as the kernels take them, room as _room_parts says."""
    n_rows, n_heads, width = q_bf16.shape
    kernels, (values, scores, there) = _kernels(n_heads, width), room
    n_halves = n_slots // HALF
    n_parts = _parts(n_rows, n_halves)
    launch(
        kernels.scores,
        grid=(n_rows, -(-n_halves // n_parts)),
        args=(scores, values, there, q_bf16, *lists, *sizes, n_parts),
        lds_bytes=kernels.scores.lds_bytes,
    )
    launch(
        kernels.values,
        grid=(n_rows, _tiles(n_heads) * (width // _columns(width))),
        args=(out_bf16, scores, values, there, *at_end, n_slots, *last),
        lds_bytes=kernels.values.lds_bytes,
    )


def _check(
    q_bf16: Tensor,
    windows: Windows,
    selected: Selected | None,
    sink_f32: Tensor,
    out_bf16: Tensor,
    turn: Turn | None,
) -> None:
    _, n_heads, width = q_bf16.shape
    wanted = {
        "q_bf16 R H D": q_bf16,
        f"window_rows_u8 N S {RowFormat('window', width).row_bytes}": windows.rows_u8,
        "ring_i32 R": windows.ring_i32,
        "first_i32 R": windows.first_i32,
        "count_i32 R": windows.count_i32,
        "sink_f32 H": sink_f32,
        "out_bf16 R H D": out_bf16,
    }
    rows = {"window": windows.rows_u8}
    if selected:
        wanted |= {
            f"compressed_rows_u8 P T {RowFormat('compressed', width).row_bytes}": selected.rows_u8,
            "page_tables_i32 Q W": selected.page_tables_i32,
            "sequence_i32 R": selected.sequence_i32,
            "index_i32 R K": selected.index_i32,
        }
        rows["compressed"] = selected.rows_u8
    if turn:
        wanted |= {"cos_f32 R I": turn.cos_f32, "sin_f32 R I": turn.sin_f32}
    bind_dims("attention", "R", wanted)
    if n_heads > 64 or (n_heads % TILE and n_heads > TILE) or width % (TILE * QUARTERS * -(-n_heads // TILE)):
        raise BindError(
            f"attention: {n_heads} heads of {width}; want at most 16 heads or 32, 48 or 64, and 64 channels a head for "
            "each 16 heads"
        )
    if turn and (turn.cos_f32.shape[1] % 4 or 2 * turn.cos_f32.shape[1] > width):
        raise BindError(f"attention: {turn.cos_f32.shape[1]} pairs of {width} channels turn; want them in fours")
    if list_slots(windows, selected) > MOST_SLOTS:
        raise BindError(f"attention: lists of {list_slots(windows, selected)} slots, want at most {MOST_SLOTS}")
    for name, tensor in rows.items():
        aligned_bytes = gcd(16, tensor.shape[2])  # rows are read so many bytes at once
        if tensor.data_ptr() % aligned_bytes:
            at = f"{tensor.data_ptr():#x}"
            raise BindError(f"attention: {name}_rows_u8 starts at {at}, want a multiple of {aligned_bytes}")
