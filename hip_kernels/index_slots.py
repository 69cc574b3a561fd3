"""Each row against positions of its own: its candidate blocks, or all of a history that few rows look into."""

from __future__ import annotations

from torch import Tensor

from rocline.hip_kernels.index_prepared import VECTORS
from rocline.hip_kernels.index_score import BLOCK, LDS_ROW_BYTES, MOST_HEADS, History, Queries
from rocline.hip_kernels.kernel import Kernel, launch

SLOTS = 128  # a workgroup's
# Of block_maxima_few_hip at most, however long the history: two for each of the five that one of a W7900D's 48
# workgroup processors holds at a time.
WORKGROUPS = 480
WAVE = 32  # rows that share workgroups
SELECT_BLOCKS = 512  # up to so many of a row a workgroup's LDS holds the keys while it chooses


def _select_lds_bytes(n_listed: int) -> int:
    """Struct Select::Lds in whole 16 bytes, and a row's keys."""
    return -(-(4096 + 4 + 2) * 4 // 16) * 16 + n_listed * BLOCK * 2


def slots_lds_bytes(n_heads: int) -> int:
    """LDS of both kernels, by the real head count."""
    vectors = -(-n_heads // 32) * 32
    scales = vectors * (16 + 4 + 4) + -(-vectors // VECTORS // 4) * 16 + SLOTS * 4 + 16
    return scales + (SLOTS + -(-n_heads // VECTORS) * VECTORS) * LDS_ROW_BYTES


def _kernels(n_heads: int) -> tuple[Kernel, Kernel]:
    lds = slots_lds_bytes(n_heads)
    most = max(lds, _select_lds_bytes(SELECT_BLOCKS))
    return (
        Kernel("index_slots.hip", "index_slots", "PPPPPPPPPPiiiii", threads=128, lds_bytes=most),
        Kernel("index_slots.hip", "index_block_max_few", "PPPPPPPiiiiii", threads=128, lds_bytes=lds),
    )


_SLOTS, _MAXIMA_FEW = _kernels(MOST_HEADS)
RELEASE_KERNELS = _kernels(32)


def slot_keys_hip(
    queries: Queries,
    history: History,
    rows: range,
    blocks_i32: Tensor,
    keys_i16: Tensor,
    chosen_i32: Tensor | None = None,
    counters_i32: Tensor | None = None,
) -> None:
    """Fill keys_i16 [rows, 8 C] with the sortable keys of the positions of each row's own blocks_i32 [rows, C].

    A key is 0 for block -1 and for a position not seen, else larger for a larger score. rows.start is a multiple of 16.
    chosen_i32 [rows, K], where given, is filled with the best of these positions as select_keys_hip does it, for C up
    to SELECT_BLOCKS; counters_i32 has a 0 for each of the rows, before and after.
    """
    n_heads, n_listed, tables = queries.weights_bf16.shape[1], blocks_i32.shape[1], history.page_tables_i32
    tiles_u8, weights, *own = _own(queries, rows)
    choosing = (chosen_i32, counters_i32, n_heads, n_listed, history.rows_per_page, tables.shape[1])
    k = 0 if chosen_i32 is None else chosen_i32.shape[1]
    launch(
        _SLOTS,
        grid=(-(-n_listed * BLOCK // SLOTS), len(rows)),
        args=(keys_i16, tiles_u8, weights, history.keys_u8, tables, *own, blocks_i32, *choosing, k),
        lds_bytes=max(slots_lds_bytes(n_heads), _select_lds_bytes(n_listed) if k else 0),
    )


def block_maxima_few_hip(queries: Queries, history: History, rows: range, maxima_i16: Tensor) -> None:
    """index_score.block_maxima_hip, the same bits: no row of a matrix tile is padding, but each reads all keys.

    What rows see is read on the device, and maxima of blocks beyond are not written: a launch for a long history does
    no more for a row that sees little.
    """
    n_heads, tables = queries.weights_bf16.shape[1], history.page_tables_i32
    n_groups = min(WORKGROUPS, -(-history.n_positions // SLOTS) * min(len(rows), WAVE))
    tiles_u8, weights, *own = _own(queries, rows)
    sizes = (len(rows), n_groups, n_heads, maxima_i16.shape[1], history.rows_per_page, tables.shape[1])
    launch(
        _MAXIMA_FEW,
        grid=(n_groups, -(-len(rows) // WAVE)),
        args=(maxima_i16, tiles_u8, weights, history.keys_u8, tables, *own, *sizes),
        lds_bytes=slots_lds_bytes(n_heads),
    )


def _own(queries: Queries, rows: range) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    part = slice(rows.start, rows.stop)
    sequences = queries.row_tiles.sequences_i32[part]
    return queries.tiles_u8[rows.start // VECTORS :], queries.weights_bf16[part], sequences, queries.visible_i32[part]
