"""A room: one piece of the slab for a scope's temporaries, handed out in an order known from its last run."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from rocline.arena.classes import joined
from rocline.arena.completions import Stream
from rocline.arena.spans import Span, TakenIn


class RoomPlan:
    """What a room hands out, one after another, each beside the one before.

    sizes_bytes    of each request, a multiple of the granule; 0 for one that is served elsewhere
    labels         its operator
    taken_in       its code and instruction, as in Span
    besides_bytes  of the others, each: a room must not take the place of those
    """

    __slots__ = ("besides_bytes", "counts", "edges", "labels", "largest_besides_bytes", "sizes_bytes", "taken_in")

    def __init__(
        self,
        sizes_bytes: Sequence[int],
        labels: Sequence[str],
        taken_in: Sequence[TakenIn],
        besides_bytes: Sequence[int] = (),
    ) -> None:
        self.sizes_bytes, self.labels, self.taken_in = sizes_bytes, labels, taken_in
        self.besides_bytes, self.largest_besides_bytes = sum(besides_bytes), max(besides_bytes, default=0)
        # Before the n-th request: bytes handed out, and requests served.
        self.edges = (0, *accumulate(sizes_bytes))
        self.counts = (0, *accumulate(size > 0 for size in sizes_bytes))

    @property
    def total_bytes(self) -> int:
        return self.edges[-1]


class Room:
    """A plan's piece of the slab and how far it has come. Handing out the next is `at += 1` by its one user: no
    lock, no search, and the arena's statistics read the rest from the plan."""

    __slots__ = ("at", "end", "gone", "gone_bytes", "items", "offset", "plan", "stream")

    def __init__(self, plan: RoomPlan, offset: int, stream: Stream) -> None:
        self.plan, self.offset, self.stream = plan, offset, stream
        self.items: Sequence[Any] = ()  # its user's: what it hands out by request, if more than offsets
        self.at = 0  # requests of the plan gone by
        self.end = len(plan.sizes_bytes)  # and those that it has places for
        self.gone: dict[int, bool] = {}  # of those gone by, not lent here: skipped (False), or a span of its own (True)
        self.gone_bytes = 0

    def skip(self, index: int) -> None:
        """The request did not come. Its place stays unused until the room closes."""
        self._note_gone(index, own=False)

    def hand_over(self, index: int) -> None:
        """What the request got is a span of its own from now on."""
        self._note_gone(index, own=True)

    def _note_gone(self, index: int, *, own: bool) -> None:
        self.gone[index] = own
        self.gone_bytes += self.plan.sizes_bytes[index]

    def lent_bytes(self) -> int:
        return self.plan.edges[self.at] - self.gone_bytes

    def n_lent(self) -> int:
        return self.plan.counts[self.at] - sum([self.plan.sizes_bytes[index] > 0 for index in self.gone])

    def spans(self) -> Iterator[Span]:
        """What it has lent, as spans to read."""
        for index in range(self.at):
            if self.plan.sizes_bytes[index] and index not in self.gone:
                yield self.span(index, 0, 0)

    def span(self, index: int, number: int, thread: int) -> Span:
        plan = self.plan
        offset, size_bytes = self.offset + plan.edges[index], plan.sizes_bytes[index]
        return Span(offset, size_bytes, self.stream, number, plan.labels[index], False, thread, plan.taken_in[index])

    def lent_at(self, offset: int) -> int | None:
        """The request that got what begins at this offset, None when none has it now."""
        index = bisect_right(self.plan.edges, offset - self.offset) - 1
        if not 0 <= index < self.at or self.plan.edges[index] != offset - self.offset or index in self.gone:
            return None
        return index

    def unlent(self) -> list[tuple[int, int]]:
        """(offset, size_bytes) of what it keeps for later, or for nothing."""
        skipped = [index for index, own in self.gone.items() if not own]
        return self._ranges_of([*skipped, *range(self.at, self.end)])

    def tail(self) -> list[tuple[int, int]]:
        """(offset, size_bytes) of what it keeps for later."""
        return self._ranges_of(range(self.at, self.end))

    def ranges(self) -> list[tuple[int, int]]:
        """(offset, size_bytes) of what comes back when it closes: all but the spans of their own."""
        if not self.gone:
            return [(self.offset, self.plan.edges[self.end])] if self.plan.edges[self.end] else []
        return self._ranges_of([index for index in range(self.end) if not self.gone.get(index, False)])

    def _ranges_of(self, indexes: Sequence[int]) -> list[tuple[int, int]]:
        edges = self.plan.edges
        return joined(
            [(self.offset + edges[i], self.offset + edges[i + 1]) for i in indexes if edges[i] < edges[i + 1]]
        )
