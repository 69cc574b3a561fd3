"""Row tables of a decode or verify step at fixed places, where a captured step finds them (design.md section 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rocline.engine.handoff import RowSpan
from rocline.engine.rope_rows import RopeRows, RopeTables
from rocline.engine.row_tables import RATIOS, GroupPlaces, RingPlaces, RowTables
from rocline.engine.sequence import SequenceState, ring_slots
from rocline.hip_kernels.index_score import RowTiles

ALIGNMENT = 16  # bytes of a table's place
ROPE_BLOCK = 64  # positions whose rotations are made at once; a sequence comes to them one after the other
ROPE_BLOCKS = 256
# Tables of a number a row, and of a rotation a row, that are written together.
NUMBERS = "position", "ring", "first", "count", "slot", "pair_position", "held", *(f"visible{r}" for r in RATIOS)
TURNS = "cos_plain", "sin_plain", "cos_turned", "sin_turned", "cos_pair", "sin_pair"

_Table = tuple[tuple[int, ...], type[np.generic]]


class StepRope:
    """Rotations by position. One call of the operator serves ROPE_BLOCK steps: on its own it takes longer than all the
    other tables of a step."""

    def __init__(self, tables: RopeTables) -> None:
        self.width = len(tables.plain_f32)
        self._tables = tables
        self._block = lru_cache(ROPE_BLOCKS)(self._made)

    def at(self, positions: Sequence[int]) -> NDArray:
        """[n, TURNS, rope_dim/2] FP32."""
        return np.array([self._block(position // ROPE_BLOCK)[position % ROPE_BLOCK] for position in positions])

    def _made(self, block: int) -> NDArray:
        """[ROPE_BLOCK, TURNS, rope_dim/2]."""
        positions_i32 = torch.arange(block * ROPE_BLOCK, (block + 1) * ROPE_BLOCK, dtype=torch.int32)
        plain, turned = (self._tables.on_host(positions_i32, ratio) for ratio in (0, 1))
        first_of_pair = torch.arange(ROPE_BLOCK) // 2 * 2
        pair = (of[first_of_pair] for of in turned)
        return torch.stack((*plain, *turned, *pair), 1).numpy()


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
        self._numbers, self._turns = self._together(bytes_u8, NUMBERS), self._together(bytes_u8, TURNS)
        self._row_tiles = RowTiles.of([1] * sizes.n_rows)
        self._host["tiles"][:] = self._row_tiles.tiles_i32.numpy()
        self._rows = np.arange(sizes.n_rows)
        self._host["sequence"][:] = self._host["pair"][:, 1] = self._rows
        self._n = 0  # rows that were written last, and their page tables
        self._page_tables: list[list[int]] = [[] for _ in self._rows]
        self._host["pre"][:, 0] = 1.0  # the first sublayer collapses stream 0 alone

    def _tables(self) -> dict[str, _Table]:
        n, width = self.sizes.n_rows, self._rope.width
        return {
            "pages": ((n, self.sizes.table_width), np.int32),
            "from": ((n,), np.int64),
            "pre": ((n, self.sizes.n_streams), np.float32),
            "pair": ((n, 2), np.int32),
            "tiles": ((n, 4), np.int32),
            "sequence": ((n,), np.int32),
            **dict.fromkeys(NUMBERS, ((n,), np.int32)),
            **dict.fromkeys(TURNS, ((n, width), np.float32)),
            "id": ((n,), np.int32),  # what follows is of the rows themselves, whichever stage fills the rest
            "lookback": ((n, self.sizes.n_back), np.int32),
        }

    def _together(self, bytes_u8: NDArray, names: Sequence[str]) -> NDArray:
        """Tables of one shape that follow each other, as one."""
        first = self._host[names[0]]
        starts = [self.start(name) for name in names]
        step = starts[1] - starts[0]
        assert starts == [starts[0] + at * step for at in range(len(names))]
        return np.ndarray((len(names), *first.shape), first.dtype, bytes_u8, starts[0], (step, *first.strides))

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
        host, n, numbers, positions = self._host, 0, list[tuple[int, ...]](), list[int]()
        for span, state in zip(spans, states, strict=True):
            page_table = state.page_table[:]  # a copy: its owner may be appending to it
            for position in range(span.start, span.end):
                self._put_pages(n, page_table)
                numbers.append(self._numbers_of(n, position, state.ring_number, position > span.start))
                positions.append(position)
                n += 1
        for row in range(n, len(self._rows)):
            self._put_pages(row, page_table)
        if n != self._n:
            self._n = n
            host["from"][:] = np.minimum(self._rows, n - 1)
        numbers_i32, turns_f32 = np.array(numbers, np.int32), self._rope.at(positions)
        self._numbers[:, :n], self._numbers[:, n:] = numbers_i32[:, 1:].T, numbers_i32[-1, 1:, None]
        self._turns[:, :n], self._turns[:, n:] = turns_f32.swapaxes(0, 1), turns_f32[-1, :, None]
        closes = position % 2
        host["pair"][:n, 0], host["pair"][n:, 0] = numbers_i32[:, 0], numbers_i32[-1, 0] if closes else self._rows[n:]
        if lookback_i32 is not None:
            host["lookback"][:n], host["lookback"][n:] = lookback_i32, lookback_i32[-1]
            host["id"][:] = host["lookback"][:, 0]

    def _numbers_of(self, row: int, position: int, ring: int, has_before: bool) -> tuple[int, ...]:
        """The first token of its pair, and NUMBERS. has_before: the row before it is of the position before."""
        window, slots, pair_slots = self.sizes.window, ring_slots(self.sizes.window), ring_slots(1)
        first, closes = max(position - window + 1, 0), position % 2
        pair_first = row  # of a row that closes none
        if closes:
            pair_first = row - 1 if has_before else -1 - ring * pair_slots - (position - 1) % pair_slots
        return (
            pair_first,
            *(position, ring, first % slots, position - first + 1, ring * slots + position % slots),
            position // 2 if closes else -1,
            ring * pair_slots + position % pair_slots,
            *((position + 1) // ratio for ratio in RATIOS),
        )

    def _put_pages(self, row: int, page_table: list[int]) -> None:
        if page_table != self._page_tables[row]:
            self._page_tables[row] = page_table
            pages_i32 = self._host["pages"][row]
            pages_i32[: len(page_table)], pages_i32[len(page_table) :] = page_table, 0

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
            one_a_row=True,
        )
        return StepPlaces(tables, at("from", torch.int64), i32("id"))


@dataclass(frozen=True)
class StepPlaces:
    """tables of a step's rows; from_i64 [n_rows] which of the rows that are there each is; ids_i32 [n_rows]."""

    tables: RowTables
    from_i64: Tensor
    ids_i32: Tensor
