"""Scoring history and choosing from it in one go: top-k lists and candidate blocks without scores in memory.

Spec: backbone.md sections 7 and 8. The k best positions of a row lie in its k best candidate blocks, a block being as
good as its best position: of k better blocks each holds a better position. So history is scored once, only block
maxima are written, and the positions of the k best blocks are scored again. Several sequences share a call; a row's
choice depends on nothing but itself and its history.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocline.hip_kernels.binding import BindError, operator
from rocline.hip_kernels.index_prepared import VECTORS
from rocline.hip_kernels.index_score import (
    BLOCK,
    History,
    Queries,
    bind_scoring,
    block_maxima_hip,
    maxima_stride,
    prepared_scores_ref,
)
from rocline.hip_kernels.index_slots import SELECT_BLOCKS, block_maxima_few_hip, slot_keys_hip
from rocline.hip_kernels.selection import candidate_blocks_ref, restrict_ref, select_keys_hip, top_k_list_ref

FEW_ROWS = 8  # of one sequence: up to here a matrix tile of 16 rows is mostly padding


@operator
def index_select(queries: Queries, history: History, selected_i32: Tensor, blocks_i32: Tensor | None = None) -> None:
    """Fill selected_i32 [R, K]: each row's K best positions ascending, -1 at the end; ties to lower positions.

    blocks_i32 [R, C], where given, is filled with the row's C best candidate blocks (selection.candidate_blocks_ref).
    """
    scores_f32 = prepared_scores_ref(queries, history)
    selected_i32.copy_(top_k_list_ref(scores_f32, queries.visible_i32, selected_i32.shape[1]))
    if blocks_i32 is not None:
        blocks_i32.copy_(candidate_blocks_ref(scores_f32, queries.visible_i32, BLOCK, blocks_i32.shape[1]))


@operator
def index_select_among(queries: Queries, history: History, blocks_i32: Tensor, selected_i32: Tensor) -> None:
    """index_select restricted to the candidate blocks blocks_i32 [R, C], ascending, -1 at the end."""
    scores_f32 = restrict_ref(prepared_scores_ref(queries, history), blocks_i32, BLOCK)
    selected_i32.copy_(top_k_list_ref(scores_f32, queries.visible_i32, selected_i32.shape[1]))


class Workspace:
    """Room for one call's block maxima, lists of blocks and slot keys, in as many rows at a time as fit.

    room_u8  1-D, 16-byte aligned; bytes_for() says how much is enough for all rows at once
    """

    def __init__(self, room_u8: Tensor) -> None:
        self.room_u8 = room_u8

    @staticmethod
    def row_bytes(n_positions: int, n_listed: int) -> int:
        """A row's share: maxima of all blocks, the blocks listed from them, and their positions' keys."""
        return maxima_stride(n_positions) * 2 + n_listed * (4 + BLOCK * 2)

    @staticmethod
    def bytes_for(n_rows: int, n_positions: int, n_listed: int, most_bytes: int = 128 << 20) -> int:
        """For n_rows rows, or for as many tiles of 16 as fit in most_bytes."""
        row_bytes = Workspace.row_bytes(n_positions, n_listed)
        at_once = max(VECTORS, most_bytes // row_bytes // VECTORS * VECTORS)
        return min(-(-n_rows // VECTORS) * VECTORS, at_once) * row_bytes

    def slabs(self, n_rows: int, n_positions: int, n_listed: int) -> list[range]:
        """Rows to do together, in tiles of 16. Raises BindError where not even 16 fit."""
        row_bytes = Workspace.row_bytes(n_positions, n_listed)
        at_once = len(self.room_u8) // row_bytes // VECTORS * VECTORS
        if at_once == 0:
            raise BindError(
                f"index_select: a workspace of {len(self.room_u8)} bytes, {VECTORS} rows of {n_positions} positions "
                f"and {n_listed} blocks need {VECTORS * row_bytes}; take Workspace.bytes_for()"
            )
        return [range(start, min(start + at_once, n_rows)) for start in range(0, n_rows, at_once)]

    def cut(self, n_rows: int, n_positions: int, n_listed: int) -> tuple[Tensor, Tensor, Tensor]:
        """maxima_i16 [n, stride], listed_i32 [n, n_listed] and keys_i16 [n, 8 n_listed], one after the other."""
        shapes = ((maxima_stride(n_positions), torch.int16), (n_listed * BLOCK, torch.int16), (n_listed, torch.int32))
        cut, start = [], 0
        for width, dtype in shapes:
            n_bytes = n_rows * width * dtype.itemsize
            cut.append(self.room_u8[start : start + n_bytes].view(dtype).view(n_rows, width))
            start += n_bytes
        return cut[0], cut[2], cut[1]


def index_select_hip(
    queries: Queries,
    history: History,
    workspace: Workspace,
    selected_i32: Tensor,
    blocks_i32: Tensor | None = None,
    counters_i32: Tensor | None = None,
) -> None:
    """index_select on the current stream, the same lists. Raises BindError.

    counters_i32, zeros before and after: as many rows as it has need a launch less, where lists are short.
    """
    more = {"selected_i32 R K": selected_i32} | ({} if blocks_i32 is None else {"blocks_i32 R C": blocks_i32})
    n_rows, _ = bind_scoring("index_select", queries, history, more)
    k, n_positions = selected_i32.shape[1], history.n_positions
    for rows in workspace.slabs(n_rows, n_positions, k):
        part = slice(rows.start, rows.stop)
        maxima_i16, listed_i32, keys_i16 = workspace.cut(len(rows), n_positions, k)
        few = len(rows) <= FEW_ROWS * len(queries.row_tiles.among(rows))
        if n_positions:  # HIP rejects an empty grid
            (block_maxima_few_hip if few else block_maxima_hip)(queries, history, rows, maxima_i16)
        visible_i32 = queries.visible_i32[part]
        if blocks_i32 is None:
            select_keys_hip(maxima_i16, listed_i32, visible_i32)
        else:
            select_keys_hip(maxima_i16, blocks_i32[part], visible_i32, listed_i32=listed_i32)
        _select_among(queries, history, rows, listed_i32, keys_i16, selected_i32[part], counters_i32)


def index_select_among_hip(
    queries: Queries,
    history: History,
    workspace: Workspace,
    blocks_i32: Tensor,
    selected_i32: Tensor,
    counters_i32: Tensor | None = None,
) -> None:
    """index_select_among on the current stream, the same lists; counters_i32 as there. Raises BindError."""
    n_rows, _ = bind_scoring(
        "index_select_among", queries, history, {"selected_i32 R K": selected_i32, "blocks_i32 R C": blocks_i32}
    )
    n_listed = blocks_i32.shape[1]
    for rows in workspace.slabs(n_rows, 0, n_listed):
        part = slice(rows.start, rows.stop)
        _, _, keys_i16 = workspace.cut(len(rows), 0, n_listed)
        _select_among(queries, history, rows, blocks_i32[part], keys_i16, selected_i32[part], counters_i32)


def _select_among(
    queries: Queries,
    history: History,
    rows: range,
    blocks_i32: Tensor,
    keys_i16: Tensor,
    selected_i32: Tensor,
    counters_i32: Tensor | None,
) -> None:
    if counters_i32 is not None and len(rows) <= len(counters_i32) and blocks_i32.shape[1] <= SELECT_BLOCKS:
        slot_keys_hip(queries, history, rows, blocks_i32, keys_i16, selected_i32, counters_i32)
    else:
        slot_keys_hip(queries, history, rows, blocks_i32, keys_i16)
        select_keys_hip(keys_i16, selected_i32, among_i32=blocks_i32)
