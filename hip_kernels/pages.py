"""Where a cached row lies: pages of positions, walked through a page table (design.md section 8)."""

from __future__ import annotations

from torch import Tensor


def row_slots(rows_i32: Tensor, page_table_i32: Tensor, rows_per_page: int) -> Tensor:
    """Flat slot of each row in a pool [pages * rows_per_page, ...], same shape as rows_i32, int64.

    rows_i32        any shape, each below len(page_table_i32) * rows_per_page
    page_table_i32  [n_pages] page ids of one sequence
    """
    rows_i64 = rows_i32.long()  # 64-bit before the multiply: pages * rows passes 2^31 bytes early
    return page_table_i32.long()[rows_i64 // rows_per_page] * rows_per_page + rows_i64 % rows_per_page
