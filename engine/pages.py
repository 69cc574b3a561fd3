"""Pages of positions, and the compressed rows and index keys in them (design.md section 8, backbone.md section 13).

A page id stands for the same positions on every device, so one page table serves a sequence everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import TextConfig
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.index_prepared import TILE_BYTES, VECTORS, Slots, index_prepare
from rocline.hip_kernels.rows import put_rows

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


class Pools(NamedTuple):
    """Of one source in PagePlanes."""

    rows_u8: Tensor
    keys_u8: Tensor
    prepared_u8: Tensor | None


class Where(NamedTuple):
    """Of rows that go into pages.

    positions_i32    [N] a row's place in its sequence, no two of one sequence alike; negative: nowhere
    sequences_i32    [N] row of page_tables_i32 [Q, W]
    """

    positions_i32: Tensor
    sequences_i32: Tensor
    page_tables_i32: Tensor


class PagePlanes:
    """One device's memory behind the page ids: compressed rows and index keys of the sources that it reads or makes.

    rows_u8, keys_u8  per source: [n_pages, page_positions / ratio, row bytes]
    prepared_u8       index keys as kernels score them, per source of `prepared`: [n_pages, rows of a page / 16, 2112]
    zeros             makes zeroed bytes of a shape; host memory is committed when a page is first written
    """

    def __init__(
        self,
        config: TextConfig,
        sources: Collection[int],
        n_pages: int,
        page_positions: int = PAGE_POSITIONS,
        *,
        prepared: Collection[int] = (),
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
    ) -> None:
        if page_positions % 2 or page_positions % config.candidate_block_size:
            raise ValueError(
                f"page_positions = {page_positions}: must be even and a multiple of "
                f"candidate_block_size = {config.candidate_block_size}"
            )
        self.page_positions = page_positions
        self.row_format = RowFormat("compressed", config.head_dim)
        self.key_format = RowFormat("index_key", config.index_head_dim)
        rows_per_page = {source: page_positions // config.compress_ratios[source] for source in sources}

        def planes(row_bytes: int, sources: Iterable[int], rows_a_slot: int = 1) -> Mapping[int, Tensor]:
            shapes = {source: (n_pages, rows_per_page[source] // rows_a_slot, row_bytes) for source in sources}
            return {source: (zeros or _untouched)(shape, torch.uint8) for source, shape in shapes.items()}

        self.rows_u8 = planes(self.row_format.row_bytes, rows_per_page)
        self.keys_u8 = planes(self.key_format.row_bytes, rows_per_page)
        self.prepared_u8 = planes(TILE_BYTES, sorted({*sources} & {*prepared}), VECTORS)

    def pools(self, source: int) -> Pools:
        """Where a source's rows are."""
        return Pools(self.rows_u8[source], self.keys_u8[source], self.prepared_u8.get(source))

    def write(self, source: int, table_i32: Tensor, first: int, rows_u8: Tensor, keys_u8: Tensor) -> None:
        """Store rows first .. first + J - 1 of a source: rows_u8 and keys_u8 [J, bytes], table_i32 the page table.

        table_i32 is on the host, the rows in this thread's memory.
        """
        n_new = len(rows_u8)
        if n_new == 0:
            return
        n_slots = len(table_i32) * self.rows_u8[source].shape[1]
        if first + n_new > n_slots:
            raise ValueError(
                f"rows {first} to {first + n_new} of source {source} in {len(table_i32)} pages, {n_slots} slots; "
                "grow the page table"
            )
        index_i32 = torch.arange(first, first + n_new, dtype=torch.int32)
        sequence_i32 = torch.zeros(n_new, dtype=torch.int32)
        index_i32, sequence_i32, table_i32 = scratch.upload_together(index_i32, sequence_i32, table_i32)
        self.write_at(source, Where(index_i32, sequence_i32, table_i32[None]), rows_u8, keys_u8)

    def write_at(self, source: int, where: Where, rows_u8: Tensor, keys_u8: Tensor) -> None:
        """Store rows of several sequences, all in this thread's memory: rows_u8 and keys_u8 [N, bytes]."""
        for new_u8, plane_u8 in ((rows_u8, self.rows_u8[source]), (keys_u8, self.keys_u8[source])):
            put_rows(new_u8, *where, plane_u8)
        if (tiles_u8 := self.prepared_u8.get(source)) is not None:
            slots = Slots(*where, self.rows_u8[source].shape[1])
            index_prepare(keys_u8[:, None], tiles_u8.flatten(0, 1)[:, None], slots)


def scored_sources(config: TextConfig, layers: Iterable[int]) -> set[int]:
    """Sources whose keys these layers score."""
    roles = [config.layers[layer] for layer in layers]
    return {role.kv_source for role in roles if role.has_indexer and role.kv_source is not None}


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that the kernel gives, not written; torch.zeros writes them."""
    return torch.from_numpy(np.zeros(shape, dtype=np.uint8)).view(dtype)
