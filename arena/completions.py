"""One stream's releases in order, and how far its work has come."""

from collections import deque
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush

from rocline.arena.classes import SpansBySize

Stream = Hashable
Completion = Callable[[], bool]  # True once all work queued before it was made has finished
RecordCompletion = Callable[[Stream], Completion | None]  # None: nothing is outstanding
Mark = tuple[int, Completion]  # its place in the stream's order
Crossing = tuple[int, int, int, "tuple[tuple[Timeline, int], ...]"]  # place, offset, size_bytes, other waits

MAIN, SHELF = 0, 1  # the two parts of the slab (arena.py)


class PendingSpans(SpansBySize):
    """Released spans whose stream has not finished with them. They stay as they were released.

    Each carries the place in its stream's order that must have passed before it is free.
    """

    __slots__ = ("_order", "_place")

    def __init__(self, slab_bytes: int) -> None:
        super().__init__(slab_bytes)
        self._place: dict[int, int] = {}  # offset -> place
        # (place, offset), earliest first; entries whose span went early or was cut are dropped when met.
        self._order: list[tuple[int, int]] = []

    def put(self, offset: int, size_bytes: int, place: int) -> None:
        """Add a span that is free once `place` has passed."""
        self.add(offset, size_bytes)
        self._set_place(offset, place)

    def cut(self, offset: int, want_bytes: int, *, from_top: bool = False) -> int:
        """As in SpansBySize; the rest keeps its place."""
        size_bytes = self.starts[offset]
        place = self._place.pop(offset)
        taken = super().cut(offset, want_bytes, from_top=from_top)
        if size_bytes > want_bytes:
            self._set_place(offset if from_top else offset + want_bytes, place)
        return taken

    def pop_passed(self, passed: int) -> list[tuple[int, int]]:
        """Take out every span whose place has passed: (offset, size_bytes)."""
        out = []
        while self._order and self._order[0][0] <= passed:
            place, offset = heappop(self._order)
            if self._place.get(offset) == place:
                del self._place[offset]
                out.append((offset, self.remove(offset)))
        return out

    def _set_place(self, offset: int, place: int) -> None:
        self._place[offset] = place
        heappush(self._order, (place, offset))
        if len(self._order) > 64 + 4 * len(self._place):  # mostly left-overs of early reuse
            self._order = [(place, offset) for offset, place in self._place.items()]
            heapify(self._order)


class Timeline:
    """A stream as the arena sees it.

    Each completion gets the next place in the stream's order, and a place has passed when its completion
    and all earlier ones have: a stream works in order. So whether a span is finished is one comparison,
    and completions live here, in one queue, not in spans.
    """

    __slots__ = ("crossings", "marks", "newest", "passed", "pending", "stream")

    def __init__(self, stream: Stream, slab_bytes: int) -> None:
        self.stream = stream
        self.newest = 0
        self.passed = 0
        self.marks: deque[Mark] = deque()
        self.pending = (PendingSpans(slab_bytes), PendingSpans(slab_bytes))  # MAIN, SHELF
        # Spans that other streams must finish too: nobody reuses them early.
        self.crossings: list[Crossing] = []  # heap by place

    def place_of(self, completion: Completion) -> int:
        """The place of a completion made just now.

        A driver may return one completion for several releases (an event it records when first asked):
        they then share a place, and the queue does not grow.
        """
        if self.marks and self.marks[-1][1] is completion:
            return self.newest
        self.newest += 1
        self.marks.append((self.newest, completion))
        return self.newest

    def advance(self, passed: int) -> None:
        """Note that a later place has passed. The caller holds references to the completions dropped here,
        so that none is destroyed under the arena's lock."""
        self.passed = passed
        while self.marks and self.marks[0][0] <= passed:
            self.marks.popleft()

    def n_pending(self) -> int:
        return len(self.pending[MAIN]) + len(self.pending[SHELF]) + len(self.crossings)

    def pending_bytes(self) -> int:
        return (
            self.pending[MAIN].total_bytes
            + self.pending[SHELF].total_bytes
            + sum(size_bytes for _, _, size_bytes, _ in self.crossings)
        )


def passed_place(marks: list[Mark]) -> int:
    """The last place of a stream's oldest marks that has passed, 0 for none. Never under a lock."""
    passed = 0
    for place, completion in marks:
        if not completion():
            break
        passed = place
    return passed
