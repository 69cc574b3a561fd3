"""index_score: every query row against every history position, with the reference's roundings (backbone.md section 7).

The dot is four (d/32) exact group sums of integers, each scaled by its power of two, added in FP32 in
group order; that definition is shared by every device class (design.md section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims, run_slabs
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.index_prepared import VECTORS, from_tiles
from rocline.hip_kernels.kernel import Kernel, launch

BLOCK = 8  # positions of a candidate block
ROWS_POSITIONS = 256  # a workgroup's
STAGED_HEADS, MOST_HEADS = 4, 64
LDS_ROW_BYTES = 128 + 16


def index_score_ref(
    q_codes_f32: Tensor, q_scales_f32: Tensor, k_codes_f32: Tensor, k_scales_f32: Tensor, weights_bf16: Tensor
) -> Tensor:
    """scores [R, P] FP32 holding BF16 values, unmasked.

    q_codes_f32   [R, H, G, 32] E2M1 values, q_scales_f32 [R, H, G]
    k_codes_f32   [P, G, 32], k_scales_f32 [P, G]
    weights_bf16  [R, H]
    """
    n_rows, n_heads, n_groups, _ = q_codes_f32.shape
    total_f32 = q_codes_f32.new_zeros((n_rows, len(k_codes_f32)))
    dot_f32, partial_f32 = torch.empty_like(total_f32), torch.empty_like(total_f32)
    keys = [k_codes_f32[:, g].T.contiguous() for g in range(n_groups)]
    scales_f32 = k_scales_f32.T.contiguous()
    for head in range(n_heads):  # ascending: the head order is the contract
        dot_f32.zero_()
        for g in range(n_groups):
            # At most 32 * 36 in quarters: exact in FP32, whatever the library's order.
            torch.mm(q_codes_f32[:, head, g], keys[g], out=partial_f32)
            dot_f32 += partial_f32.mul_(q_scales_f32[:, head, g, None]).mul_(scales_f32[g])
        relu_bf16 = dot_f32.bfloat16().relu_()
        total_f32 += relu_bf16.mul_(weights_bf16[:, head, None]).float()
    return total_f32.bfloat16().float()


def index_score(
    q_rows_u8: Tensor,
    weights_bf16: Tensor,
    keys_u8: Tensor,
    page_table_i32: Tensor,
    visible_i32: Tensor,
    scores_f32: Tensor,
) -> None:
    """Fill scores_f32 [R, P] for rows of one sequence; positions at or past visible_i32 are -inf.

    q_rows_u8       [R, H, d/2 + d/32] quantised queries
    weights_bf16    [R, H]
    keys_u8         [pages, rows, d/2 + d/32] the pool of the layer's key/value source
    page_table_i32  [n_pages] of the sequence, n_pages * rows >= P
    visible_i32     [R] compressed rows the query may see, 0..P
    """
    _, n_positions = bind_dims(
        "index_score",
        "R P",
        {
            "scores_f32 R P": scores_f32,
            "q_rows_u8 R H B": q_rows_u8,
            "weights_bf16 R H": weights_bf16,
            "keys_u8 N S B": keys_u8,
            "page_table_i32 T": page_table_i32,
            "visible_i32 R": visible_i32,
        },
    )
    row_format = _format_of(keys_u8.shape[2])
    rows_per_page = keys_u8.shape[1]
    for start in range(0, n_positions, rows_per_page):
        stop = min(start + rows_per_page, n_positions)
        page = keys_u8[int(page_table_i32[start // rows_per_page]), : stop - start]
        position = torch.arange(start, stop, dtype=torch.int32, device=scores_f32.device)

        def slab(q_rows: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
            scores = index_score_ref(*row_format.split(q_rows), *row_format.split(page), weights)  # noqa: B023 used at once
            return scores.masked_fill(position >= visible[:, None], float("-inf"))  # noqa: B023

        run_slabs(slab, (q_rows_u8, weights_bf16, visible_i32), scores_f32[:, start:stop])


def _format_of(row_bytes: int) -> RowFormat:
    """A row of d channels takes d/2 + d/32 bytes."""
    return RowFormat("index_key", row_bytes * 32 // 17)


def rows_lds_bytes(n_heads: int) -> int:
    """LDS of index_score and index_block_max, by the real head count."""
    vectors = -(-n_heads * VECTORS // 32) * 32
    scales = vectors * (16 + 4 + 4) + -(-vectors // VECTORS // 4) * 16 + ROWS_POSITIONS * 4 + 32
    codes = STAGED_HEADS * min(2, -(-n_heads // STAGED_HEADS)) * VECTORS * LDS_ROW_BYTES
    return scales + max(codes, VECTORS * (ROWS_POSITIONS + 4) * 4)


def _kernels(n_heads: int) -> tuple[Kernel, Kernel]:
    lds = rows_lds_bytes(n_heads)
    return (
        Kernel("index_score.hip", "index_score", "PPPPPPPiiii", threads=256, lds_bytes=lds),
        Kernel("index_score.hip", "index_block_max", "PPPPPPPiiiiii", threads=256, lds_bytes=lds),
    )


_SCORE, _MAXIMA = _kernels(MOST_HEADS)
RELEASE_KERNELS = _kernels(32)


@dataclass(frozen=True)
class RowTiles:
    """Which rows share a matrix tile: rows of one sequence among each 16 of the call.

    tiles_i32      [T, 4] tile of 16 rows, first row, end row, sequence
    sequences_i32  [R] the row's sequence
    first          per tile of 16 rows its first entry in tiles_i32, and T at the end
    """

    tiles_i32: Tensor
    sequences_i32: Tensor
    first: tuple[int, ...]

    @staticmethod
    def of(rows_per_sequence: Sequence[int]) -> RowTiles:
        """For a call whose rows are those of sequence 0, then 1, and so on. On the CPU; see to()."""
        tiles, first, row = list[tuple[int, int, int, int]](), list[int](), 0
        for sequence, n_rows in enumerate(rows_per_sequence):
            end = row + n_rows
            while row < end:
                if not row % VECTORS:
                    first.append(len(tiles))
                stop = min(end, (row // VECTORS + 1) * VECTORS)
                tiles.append((row // VECTORS, row, stop, sequence))
                row = stop
        sequences = torch.arange(len(rows_per_sequence), dtype=torch.int32)
        return RowTiles(
            torch.tensor(tiles, dtype=torch.int32).reshape(-1, 4),
            sequences.repeat_interleave(torch.tensor(rows_per_sequence, dtype=torch.int64)),
            (*first, len(tiles)),
        )

    def among(self, rows: range) -> Tensor:
        """The entries of these rows, which are whole tiles of 16, or the last."""
        return self.tiles_i32[self.first[rows.start // VECTORS] : self.first[-(-rows.stop // VECTORS)]]


@dataclass(frozen=True)
class Queries:
    """Rows that look into history.

    tiles_u8      [ceil(R/16), H, 2112] prepared index queries
    weights_bf16  [R, H] head weights
    visible_i32   [R] positions a row may see, at most the history's
    row_tiles     the rows' sequences
    """

    tiles_u8: Tensor
    weights_bf16: Tensor
    visible_i32: Tensor
    row_tiles: RowTiles


@dataclass(frozen=True)
class History:
    """Prepared index keys of several sequences in one pool.

    keys_u8          [pages, rows_per_page / 16, 2112]
    page_tables_i32  [sequences, width] page ids
    n_positions      no row sees more; width pages hold as many
    """

    keys_u8: Tensor
    page_tables_i32: Tensor
    n_positions: int

    @property
    def rows_per_page(self) -> int:
        return self.keys_u8.shape[1] * VECTORS


def bind_scoring(op: str, queries: Queries, history: History, more: dict[str, Tensor]) -> tuple[int, int]:
    n_rows, n_heads = bind_dims(
        op,
        "R H",
        {
            "weights_bf16 R H": queries.weights_bf16,
            "tiles_u8 T H 2112": queries.tiles_u8,
            "visible_i32 R": queries.visible_i32,
            "sequences_i32 R": queries.row_tiles.sequences_i32,
            "keys_u8 N S 2112": history.keys_u8,
            "page_tables_i32 Q W": history.page_tables_i32,
            **more,
        },
    )
    room = history.page_tables_i32.shape[1] * history.rows_per_page
    if n_heads > MOST_HEADS or len(queries.tiles_u8) * VECTORS < n_rows or history.n_positions > room:
        raise BindError(
            f"{op}: {n_rows} rows of {n_heads} heads in {len(queries.tiles_u8)} tiles of {VECTORS}, "
            f"{history.n_positions} positions in pages for {room}; at most {MOST_HEADS} heads, tiles and pages for all"
        )
    return n_rows, n_heads


def prepared_scores_ref(queries: Queries, history: History) -> Tensor:
    """scores [R, n_positions] FP32, -inf where a row does not see: index_score_ref on the prepared form."""
    n_rows, n_positions = len(queries.visible_i32), history.n_positions
    scores_f32 = torch.full((n_rows, n_positions), float("-inf"), device=queries.tiles_u8.device)
    q_codes, q_scales = from_tiles(queries.tiles_u8)
    for sequence, table in enumerate(history.page_tables_i32):
        rows = (queries.row_tiles.sequences_i32 == sequence).nonzero()[:, 0]
        n_pages = -(-n_positions // history.rows_per_page)
        tiles = history.keys_u8[table[:n_pages].long()].flatten(0, 1)[: -(-n_positions // VECTORS), None]
        k_codes, k_scales = (x[:n_positions, 0] for x in from_tiles(tiles))
        seen = torch.arange(n_positions, device=scores_f32.device) < queries.visible_i32[rows, None]
        found = index_score_ref(q_codes[rows], q_scales[rows], k_codes, k_scales, queries.weights_bf16[rows])
        scores_f32[rows] = found.where(seen, float("-inf"))
    return scores_f32


def index_score_hip(queries: Queries, history: History, scores_f32: Tensor) -> None:
    """Fill scores_f32 [R, n_positions] on the current stream, bit-identical to prepared_scores_ref."""
    n_rows, n_heads = bind_scoring("index_score", queries, history, {"scores_f32 R P": scores_f32})
    n_positions = scores_f32.shape[1]
    if n_positions != history.n_positions:
        raise BindError(f"index_score: scores_f32 has {n_positions} positions, want {history.n_positions} of history")
    if not n_rows or not n_positions:
        return
    grid = (-(-n_positions // ROWS_POSITIONS), len(queries.row_tiles.tiles_i32))
    tables = history.page_tables_i32
    operands = (queries.tiles_u8, queries.weights_bf16, history.keys_u8, tables, queries.row_tiles.tiles_i32)
    sizes = (n_heads, n_positions, history.rows_per_page, tables.shape[1])
    args = (scores_f32, *operands, queries.visible_i32, *sizes)
    launch(_SCORE, grid=grid, args=args, lds_bytes=rows_lds_bytes(n_heads))


def maxima_stride(n_positions: int) -> int:
    """Elements of a row of block maxima: 16-byte aligned rows."""
    return -(-n_positions // (BLOCK * 8)) * 8


def block_maxima_hip(queries: Queries, history: History, rows: range, maxima_i16: Tensor) -> None:
    """Fill maxima_i16 [rows, maxima_stride()] with the sortable keys of the rows' candidate blocks.

    A key is 0 where nothing is seen, else larger for a larger score. rows.start is a multiple of 16.
    """
    n_heads, n_blocks = queries.weights_bf16.shape[1], -(-history.n_positions // BLOCK)
    tables, row_tiles = history.page_tables_i32, queries.row_tiles.among(rows)
    operands = (queries.tiles_u8, queries.weights_bf16, history.keys_u8, tables, row_tiles, queries.visible_i32)
    sizes = (n_heads, n_blocks, maxima_i16.shape[1], history.rows_per_page, tables.shape[1])
    launch(
        _MAXIMA,
        grid=(-(-history.n_positions // ROWS_POSITIONS), len(row_tiles)),
        args=(maxima_i16, *operands, rows.start, *sizes),
        lds_bytes=rows_lds_bytes(n_heads),
    )
