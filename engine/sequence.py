"""One sequence's state on one stage: window rings and open pairs, beside its page table (backbone.md section 13)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows that can be taken back without running anything again: a verify step has at most this many.
# Rings hold that many slots more than they are read, so a rejected row never overwrites a needed one.
REWIND_ROWS = 8


class Ring:
    """The last rows of a stream of equally shaped rows, by position: slot = position mod n_slots.

    Valid positions are [first, end); `reads` of them may be asked for at a time.
    """

    def __init__(self, reads: int, row_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.data = torch.zeros((reads + REWIND_ROWS, *row_shape), dtype=dtype)
        self.first = self.end = 0

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop), a copy. Raises RuntimeError when they are not held: reading on would be silent noise."""
        if start != stop and not self.first <= start < stop <= self.end:
            raise RuntimeError(f"ring holds positions {self.first}..{self.end}, asked for {start}..{stop}")
        return self.data[torch.arange(start, stop) % len(self.data)]

    def append(self, position: int, rows: Tensor) -> None:
        """Add rows from `position` on; a gap before it empties the ring first."""
        if position != self.end:
            self.first = position
        self.end = position + len(rows)
        kept = rows[-len(self.data) :]
        self.data[torch.arange(self.end - len(kept), self.end) % len(self.data)] = kept
        self.first = max(self.first, self.end - len(self.data))

    def truncate(self, length: int) -> None:
        self.end = min(self.end, length)
        self.first = min(self.first, self.end)

    def clone(self) -> Ring:
        twin = object.__new__(Ring)
        twin.data, twin.first, twin.end = self.data.clone(), self.first, self.end
        return twin


@dataclass
class SequenceState:
    """Rings by layer: window rows (packed, 528 B at the release's width) and pair rows of ratio-2 sources.

    A pair row is the FP32 value and gate of one token, [2, D]; the one before an odd length is the open pair.
    page_table is shared with every other stage and changed by the owner of the pages alone.
    """

    windows: dict[int, Ring]
    pairs: dict[int, Ring]
    page_table: list[int]

    @property
    def table_i32(self) -> Tensor:
        """[n_pages] the page table as operators read it."""
        return torch.tensor(self.page_table[:], dtype=torch.int32)  # a copy: its owner may be appending to it

    def truncate(self, length: int) -> None:
        for ring in (*self.windows.values(), *self.pairs.values()):
            ring.truncate(length)

    def clone_rings(self) -> tuple[dict[int, Ring], dict[int, Ring]]:
        """Deep copies; compressed rows need none, they are addressed by position and only appended."""
        return (
            {layer: ring.clone() for layer, ring in self.windows.items()},
            {layer: ring.clone() for layer, ring in self.pairs.items()},
        )
