"""Row tables of a decode or verify step at fixed places, where a captured step finds them (design.md section 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rocline.engine.handoff import RowSpan, n_rows_of
from rocline.engine.rope_rows import RopeRows, RopeTables
from rocline.engine.row_tables import RATIOS, GroupPlaces, RingPlaces, RowTables
from rocline.engine.sequence import SequenceState, ring_slots
from rocline.hip_kernels.index_score import RowTiles

ALIGNMENT = 16  # bytes of a table's place
ROPE_BLOCK = 64  # positions whose rotations are made at once; a sequence comes to them one after the other
ROPE_BLOCKS = 256

_Table = tuple[tuple[int, ...], type[np.generic]]


class StepRope:
    """Rotations by position. One call of the operator serves ROPE_BLOCK steps: on its own it takes longer than all the
    other tables of a step."""

    def __init__(self, tables: RopeTables) -> None:
        self.width = len(tables.plain_f32)
        self._tables = tables
        self._block = lru_cache(ROPE_BLOCKS)(self._made)

    def fill(self, positions: Sequence[int], ratio: int, cos_f32: NDArray, sin_f32: NDArray) -> None:
        """Fill cos_f32 and sin_f32 [n, rope_dim/2]."""
        for row, position in enumerate(positions):
            block, at = divmod(position, ROPE_BLOCK)
            cos_f32[row], sin_f32[row] = self._block(block, ratio)[:, at]

    def _made(self, block: int, ratio: int) -> NDArray:
        """[2, ROPE_BLOCK, rope_dim/2] cosines and sines."""
        positions_i32 = torch.arange(block * ROPE_BLOCK, (block + 1) * ROPE_BLOCK, dtype=torch.int32)
        return torch.stack(self._tables.on_host(positions_i32, ratio)).numpy()


@dataclass(frozen=True)
class StepSizes:
    """
    n_rows       of a step, padding included
    table_width  pages that a sequence may have
    window       rows that a row sees
    n_back       ids of a row, its own first
    n_streams    residual streams
    """

    n_rows: int
    table_width: int
    window: int
    n_back: int
    n_streams: int


class StepTables:
    """Tables of up to n_rows rows in one piece of memory: each row as if it were alone, with a page table of its own.

    Rows that are not there are copies of the last one. They compute what that computes and write the same bytes to the
    same places, so nothing has to know of them, and no expert is read for them alone.
    A row that closes no pair has one all the same, of itself twice, which goes nowhere. One that closes it with the row
    before it in the step finds that among the step's tokens: the ring holds it only when all of them are done.
    """

    def __init__(self, sizes: StepSizes, rope: StepRope) -> None:
        self.sizes, self._rope = sizes, rope
        self._places: dict[str, slice] = {}
        tables, end = self._tables(), 0
        for name, (shape, dtype) in tables.items():
            start, end = end, end + int(np.prod(shape)) * np.dtype(dtype).itemsize
            self._places[name] = slice(start, end)
            end += -end % ALIGNMENT
        self.host_u8 = torch.zeros(end, dtype=torch.uint8)
        bytes_u8 = self.host_u8.numpy()
        self._host = {
            name: bytes_u8[self._places[name]].view(dtype).reshape(shape) for name, (shape, dtype) in tables.items()
        }
        self._row_tiles = RowTiles.of([1] * sizes.n_rows)
        self._host["tiles"][:] = self._row_tiles.tiles_i32.numpy()
        self._rows = np.arange(sizes.n_rows)
        self._host["sequence"][:] = self._host["pair"][:, 1] = self._rows
        self._host["pre"][:, 0] = 1.0  # the first sublayer collapses stream 0 alone

    def _tables(self) -> dict[str, _Table]:
        n, width = self.sizes.n_rows, self._rope.width
        names = ["sequence", "position", "ring", "first", "count", "slot", "pair_position", "held"]
        integers = [*names, *(f"visible{ratio}" for ratio in RATIOS)]
        turns = {
            f"{part}_{of}": ((n, width), np.float32) for of in ("plain", "turned", "pair") for part in ("cos", "sin")
        }
        return {
            "pages": ((n, self.sizes.table_width), np.int32),
            "from": ((n,), np.int64),
            "pre": ((n, self.sizes.n_streams), np.float32),
            "pair": ((n, 2), np.int32),
            "tiles": ((n, 4), np.int32),
            **dict.fromkeys(integers, ((n,), np.int32)),
            **dict.fromkeys(turns, ((n, width), np.float32)),
            "id": ((n,), np.int32),  # what follows is of the rows themselves, whichever stage fills the rest
            "lookback": ((n, self.sizes.n_back), np.int32),
        }

    def start(self, name: str) -> int:
        """Where a table begins."""
        return self._places[name].start

    def fill(
        self, spans: Sequence[RowSpan], states: Sequence[SequenceState], lookback_i32: NDArray | None = None
    ) -> None:
        """Write the rows of these spans, of at most REWIND_ROWS each, into host_u8.

        states        of the spans' sequences, each of another one
        lookback_i32  [n, N] as in HandOff; None: it and the ids are not known here, and left as they are
        """
        host, sizes, n = self._host, self.sizes, n_rows_of(spans)
        position = np.array([span.start for span in spans], dtype=np.int64)
        ring = np.array([state.ring_number for state in states], dtype=np.int64)
        pages_i32 = host["pages"]
        for at, state in enumerate(states):
            table = state.page_table[:]  # a copy: its owner may be appending to it
            pages_i32[at, : len(table)] = table
            pages_i32[at, len(table) :] = 0
        if n > len(spans):  # what is of spans so far becomes rows'
            span_of = np.repeat(np.arange(len(spans)), [span.n_rows for span in spans])
            position = np.concatenate([self._rows[: span.n_rows] + span.start for span in spans])
            ring, pages_i32[:n] = ring[span_of], pages_i32[span_of]
        pages_i32[n:] = pages_i32[n - 1]
        from_i64 = np.minimum(self._rows, n - 1)
        position, ring = position[from_i64], ring[from_i64]
        slots, first = ring_slots(sizes.window), np.maximum(position - sizes.window + 1, 0)
        host["from"][:], host["position"][:] = from_i64, position
        host["ring"][:], host["first"][:], host["count"][:] = ring, first % slots, position - first + 1
        host["slot"][:] = ring * slots + position % slots
        for ratio in RATIOS:
            host[f"visible{ratio}"][:] = (position + 1) // ratio
        if lookback_i32 is not None:
            host["lookback"][:] = lookback_i32[from_i64]
            host["id"][:] = host["lookback"][:, 0]
        self._fill_pairs(position, ring)
        if n > len(spans):
            self._pair_in_step(spans)
        positions = position.tolist()
        self._rope.fill(positions, 0, host["cos_plain"], host["sin_plain"])
        self._rope.fill(positions, 1, host["cos_turned"], host["sin_turned"])
        self._rope.fill((position // 2 * 2).tolist(), 2, host["cos_pair"], host["sin_pair"])

    def _fill_pairs(self, position: NDArray, ring: NDArray) -> None:
        host, slots, rows = self._host, ring_slots(1), self._rows
        closes = position % 2 == 1
        host["pair_position"][:] = np.where(closes, position // 2, -1)
        host["pair"][:, 0] = np.where(closes, -1 - ring * slots - (position - 1) % slots, rows)
        host["held"][:] = ring * slots + position % slots

    def _pair_in_step(self, spans: Sequence[RowSpan]) -> None:
        """Pairs of rows of one span, which are read from the step and not from the ring."""
        first_i32, row = self._host["pair"][:, 0], 0
        for span in spans:
            for second in range(row + 1 + span.start % 2, row + span.n_rows, 2):
                first_i32[second] = second - 1
            row += span.n_rows
        first_i32[row:] = first_i32[row - 1]  # copies have the last row's

    def on_device(self, tables_u8: Tensor, spans: tuple[RowSpan, ...], most_positions: int) -> StepPlaces:
        """What layers read, in tables_u8, which holds what host_u8 holds.

        spans           n_rows of them, of one row each
        most_positions  that a row ever sees
        """

        def at(name: str, dtype: torch.dtype) -> Tensor:
            return tables_u8[self._places[name]].view(dtype).view(self._host[name].shape)

        def i32(name: str) -> Tensor:
            return at(name, torch.int32)

        def turn(of: str) -> RopeRows:
            return RopeRows(at(f"cos_{of}", torch.float32), at(f"sin_{of}", torch.float32))

        sequence_i32, turned = i32("sequence"), turn("turned")
        groups: Mapping[int, GroupPlaces] = {
            1: GroupPlaces(*turned, i32("position"), sequence_i32),
            2: GroupPlaces(*turn("pair"), i32("pair_position"), sequence_i32, i32("pair"), i32("held")),
        }
        tables = RowTables(
            spans,
            turn("plain"),
            turned,
            i32("pages"),
            sequence_i32,
            {ratio: i32(f"visible{ratio}") for ratio in RATIOS},
            {ratio: most_positions // ratio for ratio in RATIOS},
            RowTiles(i32("tiles"), sequence_i32, self._row_tiles.first),
            RingPlaces(i32("ring"), i32("first"), i32("count"), i32("slot")),
            groups,
        )
        return StepPlaces(tables, at("from", torch.int64), i32("id"))


@dataclass(frozen=True)
class StepPlaces:
    """tables of a step's rows; from_i64 [n_rows] which of the rows that are there each is; ids_i32 [n_rows]."""

    tables: RowTables
    from_i64: Tensor
    ids_i32: Tensor
