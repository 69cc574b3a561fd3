"""One stream's releases in order, how far its work has come, and what it has not finished with."""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush

from rocline.arena.classes import FreeSpans

Stream = Hashable
Completion = Callable[[], bool]  # True once all work queued before it was made has finished
RecordCompletion = Callable[[Stream], Completion | None]  # None: nothing is outstanding
Mark = tuple[int, Completion]  # its place in the stream's order
Crossing = tuple[int, int, int, "tuple[tuple[Timeline, int], ...]"]  # place, offset, size_bytes, other waits

MAIN, SHELF = 0, 1  # the two parts of the slab (slab.py)


class Unfinished:
    """Ranges that a stream has released and not finished with, each with the place that must pass.

    Disjoint. Neighbours with one place are one range; with different places they stay apart, so that each
    is free for others when its own work has ended.
    """

    __slots__ = ("_order", "_ranges", "_starts", "total_bytes")

    def __init__(self) -> None:
        self._starts: list[int] = []  # ascending
        self._ranges: dict[int, tuple[int, int]] = {}  # start -> (end, place)
        # (place, start), earliest first; entries whose range was joined, cut or lent are dropped when met.
        self._order: list[tuple[int, int]] = []
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._starts)

    def put(self, begin: int, end: int, place: int) -> None:
        """Add a range that is finished once `place` has passed."""
        self.total_bytes += end - begin
        at = bisect_left(self._starts, begin)
        if at < len(self._starts) and self._starts[at] == end and self._ranges[end][1] == place:
            end = self._ranges.pop(end)[0]
            del self._starts[at]
        if at and self._ranges[left := self._starts[at - 1]] == (begin, place):
            self._ranges[left] = (end, place)
            return
        self._add(begin, end, place)

    def cut(self, begin: int, end: int) -> int:
        """Forget what lies in [begin, end), because the stream has it again; how many ranges that touches."""
        starts = self._starts
        first = max(0, bisect_right(starts, begin) - 1)
        touched = [start for start in starts[first : bisect_left(starts, end)] if self._ranges[start][0] > begin]
        for start in touched:
            range_end, place = self._ranges.pop(start)
            del starts[bisect_left(starts, start)]
            self.total_bytes -= min(end, range_end) - max(begin, start)
            if start < begin:
                self._add(start, begin, place)
            if end < range_end:
                self._add(end, range_end, place)
        return len(touched)

    def pop_passed(self, passed: int) -> None:
        """Forget what has finished: the ranges whose place has passed."""
        while self._order and self._order[0][0] <= passed:
            place, start = heappop(self._order)
            end, now_place = self._ranges.get(start, (start, 0))
            if now_place == place:
                del self._ranges[start]
                del self._starts[bisect_left(self._starts, start)]
                self.total_bytes -= end - start

    def within(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The (begin, end) inside [begin, end) that are unfinished, ascending; neighbours are one."""
        run_begin = run_end = begin
        first = max(0, bisect_right(self._starts, begin) - 1)
        for start in self._starts[first : bisect_left(self._starts, end)]:
            range_end = min(self._ranges[start][0], end)
            if range_end <= begin:
                continue
            if start > run_end:
                if run_begin < run_end:
                    yield run_begin, run_end
                run_begin = start
            run_end = range_end
        if run_begin < run_end:
            yield run_begin, run_end

    def _add(self, begin: int, end: int, place: int) -> None:
        insort(self._starts, begin)
        self._ranges[begin] = (end, place)
        heappush(self._order, (place, begin))
        if len(self._order) > 64 + 4 * len(self._ranges):  # mostly left-overs of early reuse
            self._order = [(place, start) for start, (_, place) in self._ranges.items()]
            heapify(self._order)


class Timeline:
    """A stream as the arena sees it.

    Each completion gets the next place in the stream's order, and a place has passed when its completion
    and all earlier ones have: a stream works in order. So whether a span is finished is one comparison,
    and completions live here, in one queue, not in spans.
    """

    __slots__ = ("crossings", "marks", "newest", "passed", "runs", "stream", "unfinished")

    def __init__(self, stream: Stream, slab_bytes: int) -> None:
        self.stream = stream
        self.newest = 0
        self.passed = 0
        self.marks: deque[Mark] = deque()
        self.unfinished = Unfinished()
        # What only this stream may have at once: its unfinished ranges, coalesced with each other and with
        # the finished ones beside them. Its next work comes after what it has queued, so to it all of a run
        # is as good as free.
        self.runs = (FreeSpans(slab_bytes), FreeSpans(slab_bytes))  # MAIN, SHELF
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
        self.unfinished.pop_passed(passed)

    def has_runs(self) -> bool:
        return bool(self.runs[MAIN].starts or self.runs[SHELF].starts)

    def pieces(self, part: int) -> Iterator[tuple[int, int, bool]]:
        """What the runs of a part of the slab consist of, by run: (begin, end, unfinished)."""
        for begin, size_bytes in list(self.runs[part].starts.items()):
            end = begin + size_bytes
            for unfinished_begin, unfinished_end in self.unfinished.within(begin, end):
                if begin < unfinished_begin:
                    yield begin, unfinished_begin, False
                yield unfinished_begin, unfinished_end, True
                begin = unfinished_end
            if begin < end:
                yield begin, end, False


def passed_place(marks: list[Mark]) -> int:
    """The last place of a stream's oldest marks that has passed, 0 for none. Never under a lock."""
    passed = 0
    for place, completion in marks:
        if not completion():
            break
        passed = place
    return passed


class LatestWork:
    """A driver's record_completion, called only when somebody asks: one completion for all releases until then.

    Recording costs a driver more than a take and a release, and a stream that reuses its own spans never
    asks. What is recorded late covers later work too: it passes later, never early.
    """

    def __init__(self, record_completion: RecordCompletion) -> None:
        self.record = record_completion
        self.open: dict[Stream, _Unasked] = {}  # what the next release of a stream gets

    def __call__(self, stream: Stream) -> Completion:
        return self.open.get(stream) or self.open.setdefault(stream, _Unasked(self, stream))


class _Unasked:
    __slots__ = ("_completion", "_stream", "_works")

    def __init__(self, works: LatestWork, stream: Stream) -> None:
        self._works, self._stream = works, stream
        self._completion: Completion | None = None

    def __call__(self) -> bool:
        if self._completion is None:
            # Closed before it is recorded: a release that got this one has queued its work by now. Two threads may
            # both record; either will do.
            if self._works.open.get(self._stream) is self:
                self._works.open.pop(self._stream, None)
            self._completion = self._works.record(self._stream) or _finished
        return self._completion()


def _finished() -> bool:
    return True
