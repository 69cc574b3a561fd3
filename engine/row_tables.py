"""What the layers of a visit read of the same rows: uploaded once, not by each of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.handoff import RowSpan, positions_of
from rocline.engine.rope_rows import RopeRows, RopeTables
from rocline.engine.sequence import REWIND_ROWS, SequenceState, ring_slots
from rocline.hip_kernels.index_score import RowTiles

RATIOS = (1, 2)


class RingPlaces(NamedTuple):
    """Of rows whose own window rows lie in the rings, where attention reads them; of every layer's rings alike.

    ring_i32 [R]; first_i32 [R] slot of the first row that a row sees, count_i32 [R] how many it sees; slots_i32 [R]
    where its own is among the slots of all rings
    """

    ring_i32: Tensor
    first_i32: Tensor
    count_i32: Tensor
    slots_i32: Tensor


class GroupPlaces(NamedTuple):
    """Of the J groups that close, in every key/value source of a ratio: where their rows go.

    cos_f32, sin_f32  [J, rope_dim/2] at a group's first token
    positions_i32     [J] row of its sequence, negative for one that is kept already; sequences_i32 [J] which span's
    pair_i32          at ratio 2: [J, 2] its tokens, as compressor_hip.Pairs has them, held in the rings' slots
    slot_i32          at ratio 2: [R] slot of all rings where a token is held from now on, negative: nowhere
    """

    cos_f32: Tensor
    sin_f32: Tensor
    positions_i32: Tensor
    sequences_i32: Tensor
    pair_i32: Tensor | None = None
    slot_i32: Tensor | None = None


@dataclass(frozen=True)
class RowTables:
    """Of the rows of `spans`, in this thread's memory.

    plain, compressed  rotations in window-only layers, and in the others
    page_tables_i32    [spans, W], zeros at the end; sequence_i32 [R] which of them is a row's
    visible_i32        by ratio: [R] compressed rows that a row may see; most_visible the largest
    row_tiles          the spans' rows as index_score shares them out
    rings              None where window rows are not in the rings yet when attention reads them
    groups             by ratio; where rings of sequences lie together
    one_a_row          whether each row has a group of its own in them, one that closes none a negative position
    """

    spans: tuple[RowSpan, ...]
    plain: RopeRows
    compressed: RopeRows
    page_tables_i32: Tensor
    sequence_i32: Tensor
    visible_i32: Mapping[int, Tensor]
    most_visible: Mapping[int, int]
    row_tiles: RowTiles
    rings: RingPlaces | None
    groups: Mapping[int, GroupPlaces]
    one_a_row: bool = False

    def turn(self, ratio: int) -> RopeRows:
        return self.compressed if ratio else self.plain

    def tensors(self) -> list[Tensor]:
        """The one that all lie in."""
        return [self.plain.cos_f32]


@dataclass(frozen=True)
class TableMaker:
    """
    window           rows that a row sees
    rings_together   whether the rings of a layer lie in one tensor
    source_ratios    of the key/value sources that will read the tables
    """

    rope: RopeTables
    window: int
    rings_together: bool
    source_ratios: Collection[int]

    def tables(self, spans: tuple[RowSpan, ...], states: Sequence[SequenceState]) -> RowTables:
        """Tables of spans, whose sequences are in these states."""
        positions_i32 = positions_of(spans)
        row_tiles = RowTiles.of([span.n_rows for span in spans])
        visible = [visible_rows(positions_i32, ratio) for ratio in RATIOS]
        ranges = [range(span.start, span.end) for span in spans]
        compressed = self.rope.of_ranges(ranges, 1)
        few = self.rings_together and max(span.n_rows for span in spans) <= REWIND_ROWS
        rings = self._rings(spans, states, positions_i32) if few else ()
        groups = {r: self._groups(spans, states, r, compressed) for r in self.source_ratios if self.rings_together}
        here = iter(
            scratch.upload_together(
                *self.rope.of_ranges(ranges, 0),
                *compressed,
                torch.nn.utils.rnn.pad_sequence([state.table_i32 for state in states], batch_first=True),
                row_tiles.tiles_i32,
                row_tiles.sequences_i32,
                *visible,
                *rings,
                *(tensor for of_ratio in groups.values() for tensor in of_ratio),
            )
        )

        def take(n: int) -> list[Tensor]:
            return [next(here) for _ in range(n)]

        plain, turned = RopeRows(*take(2)), RopeRows(*take(2))
        page_tables_i32, tiles_i32, sequence_i32 = take(3)
        return RowTables(
            spans,
            plain,
            turned,
            page_tables_i32,
            sequence_i32,
            dict(zip(RATIOS, take(len(RATIOS)), strict=True)),
            {ratio: int(seen.max()) if len(seen) else 0 for ratio, seen in zip(RATIOS, visible, strict=True)},
            RowTiles(tiles_i32, sequence_i32, row_tiles.first),
            RingPlaces(*take(len(rings))) if rings else None,
            {ratio: GroupPlaces(*take(len(of_ratio))) for ratio, of_ratio in groups.items()},
        )

    def _rings(
        self, spans: Sequence[RowSpan], states: Sequence[SequenceState], positions_i32: Tensor
    ) -> tuple[Tensor, ...]:
        slots = ring_slots(self.window)
        ring_i32 = torch.cat([torch.full((span.n_rows,), s.ring_number) for span, s in zip(spans, states, strict=True)])
        first_i32 = (positions_i32 - self.window + 1).clamp_min(0)
        own_i32 = ring_i32 * slots + positions_i32 % slots
        return ring_i32.int(), first_i32 % slots, positions_i32 - first_i32 + 1, own_i32.int()

    def _groups(
        self, spans: Sequence[RowSpan], states: Sequence[SequenceState], ratio: int, turn: RopeRows
    ) -> tuple[Tensor, ...]:
        """The tensors of GroupPlaces."""
        positions, sequences, pairs, held = [], [], [], []
        if ratio == 1:
            for at, span in enumerate(spans):
                positions.append(_range(span.start, span.end) if span.keeps_rows else _range(-span.n_rows, 0))
                sequences.append(torch.full((span.n_rows,), at))
            return *turn, torch.cat(positions).int(), torch.cat(sequences).int()
        slots, n_before = ring_slots(1), 0
        for at, (span, state) in enumerate(zip(spans, states, strict=True)):
            first = state.ring_number * slots
            closed = _range(span.start // 2, span.end // 2 if span.keeps_rows else 0)
            tokens = torch.stack((2 * closed, 2 * closed + 1), 1)
            pairs.append((tokens - span.start + n_before).where(tokens >= span.start, -1 - first - tokens % slots))
            own = _range(span.start, span.end)
            held.append(first + own % slots if span.n_rows <= REWIND_ROWS else torch.full_like(own, -1))
            positions.append(closed)
            sequences.append(torch.full((len(closed),), at))
            n_before += span.n_rows
        starts = [range(span.start // 2 * 2, span.end // 2 * 2 if span.keeps_rows else 0, 2) for span in spans]
        integers = (torch.cat(of).int() for of in (positions, sequences, pairs, held))
        return *self.rope.of_ranges(starts, ratio), *integers


def visible_rows(positions_i32: Tensor, ratio: int) -> Tensor:
    """[R] int32: the compressed rows that each row may see."""
    return torch.div(positions_i32 + 1, ratio, rounding_mode="floor").int()


def _range(start: int, stop: int) -> Tensor:
    return torch.arange(start, max(start, stop))
