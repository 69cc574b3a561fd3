"""What crosses a stage boundary: the row table and everything later layers need of those rows (design.md section 1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor


class RowKind(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True)
class Reach:
    """Which rows a layer must compute, by position, so that everything kept after `end` rows is exact.

    From `first_layer` on, layer L needs its window rows for the last window + (n_layers-1-L)(window-1)
    positions before `end` and its attention for those of layer L+1 (design.md section 5; backbone.md
    section 9). Below `first_layer` every row runs. `halo` starts at the last key/value source, a re-run
    of kept rows at 0, `full` after the last layer.
    """

    end: int
    window: int
    n_layers: int
    first_layer: int

    def enters(self, layer: int) -> int:
        """First position that must enter layer `layer`; up to `first_layer` all do, for its key/value side."""
        return 0 if layer <= self.first_layer else self.floor(layer)

    def floor(self, layer: int) -> int:
        """First position whose window row layer `layer` must have; `n_layers` stands for the head."""
        if layer < self.first_layer:
            return 0
        return max(0, self.end - self.window - (self.n_layers - 1 - layer) * (self.window - 1))


@dataclass(frozen=True)
class RowSpan:
    """Consecutive rows of one sequence.

    start        position of the first row
    logits_from  first position whose logits are wanted; rows before it stop below the head
    keeps_rows   False when kept rows are run again: their compressed rows and index keys stay as they are
    """

    sequence: int
    start: int
    n_rows: int
    kind: RowKind
    reach: Reach
    logits_from: int
    keeps_rows: bool = True

    @property
    def end(self) -> int:
        return self.start + self.n_rows

    def from_position(self, floor: int) -> RowSpan:
        """The part at or after `floor`; it may be empty."""
        start = min(max(self.start, floor), self.end)
        return replace(self, start=start, n_rows=self.end - start)


@dataclass(frozen=True)
class FreshRows:
    """Rows that a key/value source has just made, for every stage that mirrors them.

    rows_u8  [J, bytes] compressed rows first .. first + J - 1;  keys_u8  [J, bytes] their index keys
    """

    source: int
    sequence: int
    first: int
    rows_u8: Tensor
    keys_u8: Tensor


@dataclass(frozen=True)
class HandOff:
    """Rows between two layers. The letters: R rows, n streams, D hidden, K list length, C candidate blocks.

    spans          the rows, in order; sum of n_rows = R
    positions_i32  [R]
    lookback_i32   [R, N] token ids at positions p .. p-N+1, -1 before the start; the first is the row's own
    streams_bf16   [R, n, D] residual streams
    pre_f32        [R, n] collapse weights of the next sublayer
    selected_i32   [R, K] list of the latest index source, ascending, -1 at the end; None before the first
    blocks_i32     [R, C] candidate blocks kept by the producer, ascending, -1 at the end; None before it
    fresh          compressed rows and index keys made since the sequence's last hand-off
    """

    spans: tuple[RowSpan, ...]
    positions_i32: Tensor
    lookback_i32: Tensor
    streams_bf16: Tensor
    pre_f32: Tensor
    selected_i32: Tensor | None = None
    blocks_i32: Tensor | None = None
    fresh: tuple[FreshRows, ...] = ()

    @property
    def n_rows(self) -> int:
        return len(self.positions_i32)

    def slices(self) -> list[tuple[RowSpan, slice]]:
        """Each span with its place among the rows."""
        out, start = [], 0
        for span in self.spans:
            out.append((span, slice(start, start + span.n_rows)))
            start += span.n_rows
        return out

    def tail_index(self, floors: list[int]) -> Tensor | None:
        """Indices of the rows at or after each span's floor; None when that is every row."""
        parts, all_rows = [], True
        for (span, place), floor in zip(self.slices(), floors, strict=True):
            kept = span.from_position(floor).n_rows
            all_rows = all_rows and kept == span.n_rows
            parts.append(torch.arange(place.stop - kept, place.stop))
        return None if all_rows else torch.cat(parts)

    def from_floors(self, floors: list[int]) -> HandOff:
        """Only the rows at or after each span's floor. Spans stay in the table, perhaps with no rows."""
        index = self.tail_index(floors)
        if index is None:
            return self
        return replace(
            self,
            spans=tuple(span.from_position(floor) for span, floor in zip(self.spans, floors, strict=True)),
            positions_i32=self.positions_i32[index],
            lookback_i32=self.lookback_i32[index],
            streams_bf16=self.streams_bf16[index],
            pre_f32=self.pre_f32[index],
            selected_i32=None if self.selected_i32 is None else self.selected_i32[index],
            blocks_i32=None if self.blocks_i32 is None else self.blocks_i32[index],
        )
