"""One sequence's state on one stage: window rings and open pairs, beside its page table (backbone.md section 13)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.hip_kernels.rows import gather_rows, put_rows

# Rows that can be taken back without running anything again: a verify step has at most this many.
# Rings hold that many slots more than they are read, so a rejected row never overwrites a needed one.
REWIND_ROWS = 8

RingData = Callable[[tuple[int, ...], torch.dtype], Tensor]  # makes zeroed data of a shape


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


class Ring:
    """The last rows of a stream of equally shaped rows, by position: slot = position mod n_slots.

    Valid positions are [first, end). They lie in `data` [n_slots, ...]; ring_slots(n) of them let n be read at a time.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.first = self.end = 0
        self._n_slots = len(data)  # a tensor takes longer to say it than all else that a step does here

    def read(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Rows [start, stop) in `out`, or in this thread's memory. Raises RuntimeError when they are not held: reading
        on would be silent noise."""
        self.check(start, stop)
        out = scratch.like(self.data, stop - start) if out is None else out
        if start != stop:
            gather_rows(self.data, scratch.upload(torch.arange(start, stop) % len(self.data)), out)
        return out

    def check(self, start: int, stop: int) -> None:
        """Raises RuntimeError when it does not hold [start, stop)."""
        if start != stop and not self.first <= start < stop <= self.end:
            raise RuntimeError(f"ring holds positions {self.first}..{self.end}, asked for {start}..{stop}")

    def append(self, position: int, rows: Tensor) -> None:
        """Add rows from `position` on; a gap before it empties the ring first."""
        self.note(position, len(rows))
        kept = rows[-len(self.data) :]
        if not kept.is_contiguous():
            kept = scratch.like(kept, len(kept)).copy_(kept)
        slots_i32 = torch.arange(self.end - len(kept), self.end, dtype=torch.int32) % len(self.data)
        ring_i32 = torch.zeros(len(kept) + 1, dtype=torch.int32)
        slots_i32, ring_i32 = scratch.upload_together(slots_i32, ring_i32)
        put_rows(_bytes(kept), slots_i32, ring_i32[1:], ring_i32[:1, None], _bytes(self.data)[None])

    def note(self, position: int, n_rows: int) -> None:
        """Rows that somebody writes into their slots."""
        if position != self.end:
            self.first = position
        self.end = position + n_rows
        self.first = max(self.first, self.end - self._n_slots)

    def truncate(self, length: int) -> None:
        self.end = min(self.end, length)
        self.first = min(self.first, self.end)

    def clone(self) -> Ring:
        """The same rows in host memory of their own. Waits for the device."""
        twin = Ring(torch.empty_like(self.data, device="cpu").copy_(self.data))
        twin.first, twin.end = self.first, self.end
        return twin

    def restore(self, saved: Ring) -> None:
        """Hold what a clone holds. Waits for the device."""
        self.data.copy_(saved.data)
        self.first, self.end = saved.first, saved.end


def ring_slots(reads: int) -> int:
    """Slots of a ring that `reads` rows may be asked of at a time."""
    return reads + REWIND_ROWS


def _bytes(rows: Tensor) -> Tensor:
    """rows [n, ...] as uint8 [n, B]."""
    return rows.flatten().view(torch.uint8).view(len(rows), -1)


class RingRoom:
    """Where the rings of a kind lie, one a sequence.

    n_at_once  sequences that there is room for at once; None: as many as come, each in memory of its own
    together   [n_at_once, slots, ...] all of them, where there is room for so many
    """

    def __init__(
        self,
        data_of: RingData,
        ring_shape: tuple[int, ...],
        dtype: torch.dtype,
        n_at_once: int | None,
    ) -> None:
        self._new = partial(data_of, ring_shape, dtype)
        self.together = None if n_at_once is None else data_of((n_at_once, *ring_shape), dtype)

    def ring(self, number: int) -> Ring:
        """An empty one, in the memory of this number."""
        return Ring(self._new() if self.together is None else self.together[number])


class RingNumbers:
    """Which rings of every room are a sequence's."""

    def __init__(self, n_at_once: int | None) -> None:
        self._free = None if n_at_once is None else list(range(n_at_once))

    def take(self) -> int:
        """A number that no open sequence has. Raises RuntimeError when all are taken."""
        if self._free is None:
            return 0
        if not self._free:
            raise RuntimeError("no room for the rings of one more sequence; close one, or load with more at once")
        return self._free.pop()

    def give_back(self, number: int) -> None:
        if self._free is not None:
            self._free.append(number)


Rings = tuple[dict[int, Ring], dict[int, Ring]]  # of windows and of pairs, by layer


@dataclass
class SequenceState:
    """Rings by layer: window rows (packed, 528 B at the release's width) and pair rows of ratio-2 sources.

    A pair row is the FP32 value and gate of one token, [2, D]; the one before an odd length is the open pair.
    page_table is shared with every other stage and changed by the owner of the pages alone. ring_number says which
    rings of their rooms they are.
    """

    ring_number: int
    windows: dict[int, Ring]
    pairs: dict[int, Ring]
    page_table: list[int]

    @property
    def table_i32(self) -> Tensor:
        """[n_pages] the page table as operators read it."""
        return torch.tensor(self.page_table[:], dtype=torch.int32)  # a copy: its owner may be appending to it

    def add_rows(self, start: int, n_rows: int, windows: Iterable[int], pairs: Iterable[int], window: int) -> None:
        """Move rings past at most REWIND_ROWS rows from `start` on, which a captured step writes into them.

        Raises RuntimeError where they do not hold what the step reads there: the rows that its first one sees, `window`
        with itself, and the token that closes a pair with that. All else is of the step's own rows.
        """
        for layer in windows:
            self.windows[layer].check(max(0, start - window + 1), start)
            self.windows[layer].note(start, n_rows)
        for side in pairs:
            if start % 2:
                self.pairs[side].check(start - 1, start)
            self.pairs[side].note(start, n_rows)

    def truncate(self, length: int) -> None:
        for ring in (*self.windows.values(), *self.pairs.values()):
            ring.truncate(length)

    def clone_rings(self) -> Rings:
        """Deep copies; compressed rows need none, they are addressed by position and only appended."""
        return (
            {layer: ring.clone() for layer, ring in self.windows.items()},
            {layer: ring.clone() for layer, ring in self.pairs.items()},
        )

    def restore_rings(self, saved: Rings) -> None:
        for rings, of_kind in zip((self.windows, self.pairs), saved, strict=True):
            for layer, ring in rings.items():
                ring.restore(of_kind[layer])


def stand_in(windows: Mapping[int, RingRoom], pairs: Mapping[int, RingRoom], window: int) -> SequenceState:
    """State of a sequence that has a row, and nothing of its own to keep it in."""
    state = SequenceState(
        ring_number=0,
        windows={layer: room.ring(0) for layer, room in windows.items()},
        pairs={side: room.ring(0) for side, room in pairs.items()},
        page_table=[0],
    )
    state.add_rows(0, 1, state.windows, state.pairs, window)
    return state
