"""Pages of positions, and the compressed rows and index keys in them (design.md section 8, backbone.md section 13).

A page id stands for the same positions on every device, so one page table serves a sequence everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rocline.engine.config import TextConfig
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.pages import row_slots

PAGE_POSITIONS = 2048  # no candidate block and no token pair straddles a page


class OutOfPages(RuntimeError):
    """No free page is left; the sequence that asked can be paused or refused, nothing is corrupted."""


class Pages:
    """Lends page ids to page tables, the same ids on all devices. Used by one thread at a time."""

    def __init__(self, n_pages: int, page_positions: int = PAGE_POSITIONS) -> None:
        self.n_pages = n_pages
        self.page_positions = page_positions
        self._free = list(range(n_pages - 1, -1, -1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def pages_for(self, n_positions: int) -> int:
        """Pages that n_positions take."""
        return -(-n_positions // self.page_positions)

    def grow(self, tables: Sequence[tuple[list[int], int]]) -> None:
        """Append pages until each table covers its number of positions. All or none: raises OutOfPages."""
        wanted = [max(0, self.pages_for(n_positions) - len(table)) for table, n_positions in tables]
        if sum(wanted) > len(self._free):
            raise OutOfPages(
                f"{sum(n for _, n in tables)} positions need {sum(wanted)} more pages of {self.page_positions}; "
                f"{len(self._free)} of {self.n_pages} are free; raise --kv-tokens or send less"
            )
        for (table, _), n_pages in zip(tables, wanted, strict=True):
            table.extend(self._free.pop() for _ in range(n_pages))

    def give_back(self, page_table: list[int], n_positions: int = 0) -> None:
        """Free the pages that lie wholly past n_positions."""
        keep = self.pages_for(n_positions)
        self._free.extend(page_table[keep:])
        del page_table[keep:]


class PagePlanes:
    """One device's memory behind the page ids: compressed rows and index keys of the sources that it reads or makes.

    rows_u8, keys_u8  per source: [n_pages, page_positions / ratio, row bytes]. Host memory is committed when a
                      page is first written.
    """

    def __init__(
        self, config: TextConfig, sources: Collection[int], n_pages: int, page_positions: int = PAGE_POSITIONS
    ) -> None:
        if page_positions % 2 or page_positions % config.candidate_block_size:
            raise ValueError(
                f"page_positions = {page_positions}: must be even and a multiple of "
                f"candidate_block_size = {config.candidate_block_size}"
            )
        self.row_format = RowFormat("compressed", config.head_dim)
        self.key_format = RowFormat("index_key", config.index_head_dim)
        rows_per_page = {source: page_positions // config.compress_ratios[source] for source in sources}

        def planes(row_bytes: int) -> Mapping[int, Tensor]:
            return {
                # numpy's zeros are the kernel's, untouched; torch.zeros writes them.
                source: torch.from_numpy(np.zeros((n_pages, n_rows, row_bytes), dtype=np.uint8))
                for source, n_rows in rows_per_page.items()
            }

        self.rows_u8 = planes(self.row_format.row_bytes)
        self.keys_u8 = planes(self.key_format.row_bytes)

    def write(self, source: int, table_i32: Tensor, first: int, rows_u8: Tensor, keys_u8: Tensor) -> None:
        """Store rows first .. first + J - 1 of a source: rows_u8 and keys_u8 [J, bytes], table_i32 the page table."""
        n_new = len(rows_u8)
        if n_new == 0:
            return
        index = torch.arange(first, first + n_new, dtype=torch.int32)
        slots = row_slots(index, table_i32, self.rows_u8[source].shape[1])
        self.rows_u8[source].flatten(0, 1)[slots] = rows_u8
        self.keys_u8[source].flatten(0, 1)[slots] = keys_u8
