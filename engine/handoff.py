"""What crosses a stage boundary: the row table and everything later layers need of those rows (design.md section 1)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import TextConfig
from rocline.engine.engram_ahead import EngramRows
from rocline.engine.scratch import Lease
from rocline.hip_kernels.finite import rows_finite
from rocline.hip_kernels.rows import copy_rows, gather_rows

PrefillMode = Literal["halo", "full"]
FEW_ROWS = 64  # of a step: one look at all of them is quicker than one at each
EXPONENT = 0x7F80  # of a BF16; all ones is no number
# Up to here a copy takes less than a torch operator's way to it and, with other stages at work, back to Python's lock.
FEW_BYTES = 1 << 16
_memmove = ctypes.PyDLL(None).memmove  # keeps that lock
_memmove.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


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


def reach_for(config: TextConfig, mode: PrefillMode, end: int) -> Reach:
    """Reach of a prompt's rows up to `end`; of decoded and verified rows with mode "full"."""
    first = config.kv_source_layer_ids[-1] if mode == "halo" else config.num_hidden_layers + 1
    return Reach(end, config.sliding_window, config.num_hidden_layers, first)


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


OF_EACH_ROW = -1  # in place of a sequence: of each row of a step one, the places are in its tables


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


class Place(NamedTuple):
    """Where a tensor of a hand-off lies: the field, its first byte, shape and dtype."""

    field: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Layout:
    """How n_rows rows lie in n_bytes of memory. The first n_table_bytes are the tables that a captured step reads of
    them; some of the tensors lie there. Two that are equal are one object: made by Layout.of.

    fresh  by source, of the group that each row closes, if it does: the compressed row, and its index key
    """

    n_rows: int
    n_bytes: int
    n_table_bytes: int
    places: tuple[Place, ...]
    fresh: tuple[tuple[int, Place, Place], ...] = ()

    @staticmethod
    @cache
    def of(
        n_rows: int,
        n_bytes: int,
        n_table_bytes: int,
        places: tuple[Place, ...],
        fresh: tuple[tuple[int, Place, Place], ...] = (),
    ) -> Layout:
        return Layout(n_rows, n_bytes, n_table_bytes, places, fresh)

    def behind_tables(self) -> tuple[Place, ...]:
        """Places of what is not in the tables."""
        return tuple(place for place in self.places if place.start >= self.n_table_bytes)


@dataclass(frozen=True)
class Packed:
    """Tensors of rows in one piece of memory, data_u8 [layout.n_bytes]."""

    data_u8: Tensor
    layout: Layout

    def tensors(self, n_rows: int | None = None) -> dict[str, Any]:
        """By field of a HandOff, the first n_rows rows of each, or all."""
        return {place.field: self.at(place)[:n_rows] for place in self.layout.places}

    def fresh(self) -> dict[int, tuple[Tensor, Tensor]]:
        """By source, rows_u8 and keys_u8 [n_rows, bytes] of all rows, also of those that close nothing."""
        return {source: (self.at(rows), self.at(keys)) for source, rows, keys in self.layout.fresh}

    def at(self, place: Place) -> Tensor:
        typed, strides, step = self.data_u8.view(place.dtype), list[int](), 1
        for size in reversed(place.shape):
            strides.append(step)
            step *= size
        return typed.as_strided(place.shape, strides[::-1], typed.storage_offset() + place.start // typed.itemsize)


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
    fresh          compressed rows and index keys made on the way, as far as a later visit has yet to store them
    lease          what the tensors above lie in, once the stage that made them has ended; None inside a stage
    engram         table rows gathered for these rows; None where each Engram layer gathers its own, and after the
                   last one. Whoever ends the rows' way before that releases it
    """

    spans: tuple[RowSpan, ...]
    positions_i32: Tensor
    lookback_i32: Tensor
    streams_bf16: Tensor
    pre_f32: Tensor
    selected_i32: Tensor | None = None
    blocks_i32: Tensor | None = None
    fresh: tuple[FreshRows, ...] = ()
    lease: Lease | None = None
    engram: EngramRows | None = None

    @property
    def n_rows(self) -> int:
        return len(self.positions_i32)

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left for later visits: no row, and no fresh row to store."""
        return self.n_rows == 0 and not self.fresh

    def tensors(self) -> list[Tensor]:
        """Everything that must travel with the rows."""
        maybe = (self.selected_i32, self.blocks_i32)
        per_row = [self.positions_i32, self.lookback_i32, self.streams_bf16, self.pre_f32]
        per_row += [t for t in maybe if t is not None]
        return [*per_row, *(t for fresh in self.fresh for t in (fresh.rows_u8, fresh.keys_u8))]

    def copied(self) -> HandOff:
        """The same rows in the memory that this thread uses: what a transport to another stage amounts to."""
        return self.moved(copy)

    def moved(self, change: Callable[[Tensor], Tensor]) -> HandOff:
        """The same rows, not leased, with a copy by `change` of every tensor that travels, in no particular order."""
        return self._per_row(change, fresh=_moved(self.fresh, change), lease=None)

    def leased(self, lease: Lease) -> HandOff:
        """The same rows, with this lease."""
        return replace(self, lease=lease)

    def unpacked(self) -> HandOff:
        """As StepRows.unpacked."""
        return self

    def release(self) -> None:
        """Give back the memory of a hand-off whose receiver has its copy."""
        if self.lease:
            self.lease.release()

    def _per_row(self, change: Callable[[Tensor], Tensor], **others: Any) -> HandOff:
        """Every tensor that has the rows as its first axis, changed in the same way, and other fields as given."""
        return replace(
            self,
            positions_i32=change(self.positions_i32),
            lookback_i32=change(self.lookback_i32),
            streams_bf16=change(self.streams_bf16),
            pre_f32=change(self.pre_f32),
            selected_i32=None if self.selected_i32 is None else change(self.selected_i32),
            blocks_i32=None if self.blocks_i32 is None else change(self.blocks_i32),
            **others,
        )

    def slices(self) -> list[tuple[RowSpan, slice]]:
        """Each span with its place among the rows."""
        out, start = [], 0
        for span in self.spans:
            out.append((span, slice(start, start + span.n_rows)))
            start += span.n_rows
        return out

    def tail_index(self, floors: list[int]) -> Tensor | None:
        """Indices, on the host, of the rows at or after each span's floor; None when that is every row."""
        if all(floor <= span.start or not span.n_rows for span, floor in zip(self.spans, floors, strict=True)):
            return None
        parts = []
        for (span, place), floor in zip(self.slices(), floors, strict=True):
            kept = span.from_position(floor).n_rows
            parts.append(torch.arange(place.stop - kept, place.stop))
        return torch.cat(parts)

    def from_floors(self, floors: list[int]) -> HandOff:
        """Only the rows at or after each span's floor. Spans stay in the table, perhaps with no rows."""
        index = self.tail_index(floors)
        if index is None:
            return self
        spans = tuple(span.from_position(floor) for span, floor in zip(self.spans, floors, strict=True))
        engram = self.engram and self.engram.pick(index)
        here = scratch.upload(index)
        return replace(self._per_row(lambda tensor: gathered(tensor, here)), spans=spans, engram=engram)


@dataclass(frozen=True)
class StepRows:
    """Rows of a decode or verify step between two captured visits: a hand-off that lies as both of them have it.

    packed  of as many rows as the captured steps have, at least; the first are those of `spans`. Fresh rows are in it
    rings   by span, number of its sequence's rings in the tables; a stage that gave it others makes tables of its own

    The other fields are as in HandOff.
    """

    spans: tuple[RowSpan, ...]
    packed: Packed
    rings: tuple[int, ...]
    lease: Lease | None = None
    engram: EngramRows | None = None

    @property
    def n_rows(self) -> int:
        return n_rows_of(self.spans)

    @property
    def fresh(self) -> tuple[FreshRows, ...]:
        """None apart."""
        return ()

    @property
    def is_spent(self) -> bool:
        return False

    def tensors(self) -> list[Tensor]:
        """Everything that must travel with the rows."""
        return [self.packed.data_u8]

    def copied(self) -> StepRows:
        """As HandOff.copied."""
        return self.moved(copy)

    def moved(self, change: Callable[[Tensor], Tensor]) -> StepRows:
        """As HandOff.moved."""
        packed = Packed(change(self.packed.data_u8), self.packed.layout)
        return StepRows(self.spans, packed, self.rings, engram=self.engram)

    def leased(self, lease: Lease) -> StepRows:
        """As HandOff.leased."""
        return StepRows(self.spans, self.packed, self.rings, lease, self.engram)

    def unpacked(self) -> HandOff:
        """The same rows as a hand-off of views; the lease stays with this. Raises RuntimeError where a later visit has
        fresh rows of it to store, which only a captured one can."""
        if self.packed.layout.fresh:
            raise RuntimeError(f"a step's rows with fresh ones of sources {[of[0] for of in self.packed.layout.fresh]}")
        return HandOff(self.spans, **self.packed.tensors(self.n_rows), engram=self.engram)

    def release(self) -> None:
        """As HandOff.release."""
        if self.lease:
            self.lease.release()


@dataclass(frozen=True)
class FirstStep:
    """Rows of a step before a first visit that is captured, which embeds them where it reads them.

    lookback_i32  [R, N] as in HandOff, on the host
    table_bf16    [V, D] that they are embedded by
    """

    spans: tuple[RowSpan, ...]
    lookback_i32: Tensor
    table_bf16: Tensor
    engram: EngramRows | None = None
    fresh: tuple[FreshRows, ...] = ()

    @property
    def n_rows(self) -> int:
        return n_rows_of(self.spans)


Rows = HandOff | StepRows


def _moved(fresh: Iterable[FreshRows], change: Callable[[Tensor], Tensor]) -> tuple[FreshRows, ...]:
    return tuple(replace(of, rows_u8=change(of.rows_u8), keys_u8=change(of.keys_u8)) for of in fresh)


def copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor [R, ...] in this thread's memory. Traces call it by this name."""
    out = scratch.like(tensor, len(tensor))
    if not scratch.is_on_device() and tensor.is_contiguous() and 0 < tensor.nbytes <= FEW_BYTES:
        _memmove(out.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    else:
        copy_rows(tensor, out)
    return out


def n_rows_of(spans: Iterable[RowSpan]) -> int:
    return sum(span.n_rows for span in spans)


def positions_of(spans: Iterable[RowSpan]) -> Tensor:
    """[R] int32, on the host."""
    return torch.cat([torch.arange(span.start, span.end, dtype=torch.int32) for span in spans])


def gathered(rows: Tensor, index_i64: Tensor) -> Tensor:
    """rows [R, ...] at index_i64 [n], in this thread's memory."""
    out = scratch.like(rows, len(index_i64))
    gather_rows(rows, index_i64, out)
    return out


def bad_rows(rows: HandOff) -> list[tuple[int, int]]:
    """(sequence, position) of the first row of each span whose residual streams are not finite; on the host."""
    if rows.n_rows <= FEW_ROWS and rows.streams_bf16.is_contiguous():
        exponents = rows.streams_bf16.view(torch.int16).numpy() & EXPONENT
        if not exponents.size or exponents.max() < EXPONENT:
            return []
    finite_u8 = torch.empty(rows.n_rows, dtype=torch.uint8)
    rows_finite(rows.streams_bf16.flatten(1), finite_u8)
    return [] if finite_u8.all() else first_bad(rows.spans, finite_u8)


def first_bad(spans: Iterable[RowSpan], finite_u8: Tensor) -> list[tuple[int, int]]:
    """(sequence, position) of the first row of each span that is 0 in finite_u8 [R], on the host."""
    found, start = [], 0
    for span in spans:
        bad = (finite_u8[start : start + span.n_rows] == 0).nonzero()
        start += span.n_rows
        if len(bad):
            found.append((span.sequence, span.start + int(bad[0])))
    return found
