"""Which byte of the slab is whose: placing requests, taking spans back, in one thread at a time.

The slab has two parts. MAIN, from 0 up, serves what a chunk needs; the SHELF, from the top down, serves small
spans and those that outlive the work around them, so that neither can come to lie across the large region.
The shelf's floor sinks by a request that none of its holes takes, and rises over whatever is free at it.

A released span is *pending* until the completion recorded at its release has passed. Until then it stays as
it is and only the stream that used it may have it again, since that stream's next work comes after.
"""

from heapq import heappop, heappush

from rocline.arena.classes import FreeSpans, SpansBySize
from rocline.arena.completions import MAIN, SHELF, Stream, Timeline
from rocline.arena.reuse import KeptSpan, ReuseLayer

SMALL_PART = 1024  # a span of at most slab / SMALL_PART goes to the shelf
# The reuse layer keeps at most slab / KEPT_PART. Kept spans are in the way of larger requests: at 1/8 the
# planned slab of a stage's chunk grew by 15 %, at 1/64 not at all.
KEPT_PART = 64
Waits = tuple[tuple[Timeline, int], ...]  # streams with the place that each must pass


class Slab:
    """Spans of [0, slab_bytes): used (nobody's business here), kept, pending, free. Not thread safe."""

    def __init__(self, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.small_bytes = slab_bytes // SMALL_PART
        self.free = (FreeSpans(slab_bytes), FreeSpans(slab_bytes))  # MAIN, SHELF
        self.free[MAIN].put(0, slab_bytes)
        self.shelf_floor = slab_bytes  # offsets below are MAIN's, the others SHELF's
        self.timelines: dict[Stream, Timeline] = {}
        self.reuse = ReuseLayer(slab_bytes // KEPT_PART)
        self.n_splits = self.n_recuts = self.n_fuses = 0

    def timeline(self, stream: Stream) -> Timeline:
        """The stream's timeline, made when it is first seen."""
        line = self.timelines.get(stream)
        if line is None:
            line = self.timelines[stream] = Timeline(stream, self.slab_bytes)
        return line

    def largest_free_bytes(self) -> int:
        return max(self.free[MAIN].largest_bytes(), self.free[SHELF].largest_bytes())

    # Placing a request

    def place(self, size_bytes: int, stream: Stream, lasting: bool) -> int:
        """Offset for a request the reuse layer has no span for, -1 when nothing fits as things are."""
        part = SHELF if lasting or size_bytes <= self.small_bytes else MAIN
        line = self.timeline(stream)
        offset = self._carve(size_bytes, line, part)
        if offset < 0 and part == SHELF:
            offset = self._lower_floor(size_bytes)
        if offset < 0:
            offset = self._recut(size_bytes, line, part)
        return offset

    def place_anywhere(self, size_bytes: int, stream: Stream, lasting: bool) -> int:
        """As place, sparing nothing: the reuse layer goes, runs are fused, the other part may serve."""
        self.drain_reuse()
        line = self.timeline(stream)
        for part in (SHELF, MAIN) if lasting or size_bytes <= self.small_bytes else (MAIN, SHELF):
            offset = self._carve(size_bytes, line, part)
            if offset < 0 and part == SHELF:
                offset = self._lower_floor(size_bytes)
            if offset < 0:
                offset = self._fuse(size_bytes, line, part)
            if offset >= 0:
                return offset
        return -1

    def _carve(self, size_bytes: int, line: Timeline, part: int) -> int:
        """Best fit among the stream's own pending spans and the free ones; the rest stays what it was."""
        spans: SpansBySize = self.free[part]
        own = line.pending[part]
        offset = spans.best_fit(size_bytes)
        if own.starts:
            own_offset = own.best_fit(size_bytes)
            # Of equals the pending one: others may have the free one.
            if own_offset >= 0 and (offset < 0 or own.starts[own_offset] <= spans.starts[offset]):
                spans, offset = own, own_offset
        if offset >= 0:
            self.n_splits += spans.starts[offset] > size_bytes
            spans.cut(offset, size_bytes)
        return offset

    def _lower_floor(self, size_bytes: int) -> int:
        """Give the shelf size_bytes more, if MAIN is free under its floor; their offset."""
        main = self.free[MAIN]
        below = main.ends.get(self.shelf_floor)
        if below is None or main.starts[below] < size_bytes:
            return -1
        self.n_splits += main.starts[below] > size_bytes
        self.shelf_floor = main.cut(below, size_bytes, from_top=True)
        return self.shelf_floor

    def _recut(self, size_bytes: int, line: Timeline, part: int) -> int:
        """Give a larger kept span of this part back and cut it to size, under one hold of the lock.

        Lending 512 MiB whole to a 3 MiB request would hide 509 MiB from the next large one.
        """

        def usable(stream: Stream, offset: int, place: int) -> bool:
            mine = stream == line.stream or not place or place <= self.timelines[stream].passed
            return mine and (offset >= self.shelf_floor) == (part == SHELF)

        kept = self.reuse.fit(size_bytes, usable)
        if kept is None:
            return -1
        self.n_recuts += 1
        self._put_kept(kept)
        offset = self._carve(size_bytes, line, part)
        # On the shelf it may have lain at the floor, which then rose over it.
        return offset if offset >= 0 else self._lower_floor(size_bytes)

    def _fuse(self, size_bytes: int, line: Timeline, part: int) -> int:
        """Lend a run of neighbours, each free or pending on this stream alone.

        They do not coalesce (others may have only the free ones), but this stream may have them all.
        Walks the stream's pending spans once; the number of free spans does not matter.
        """
        free, own = self.free[part], line.pending[part]
        for start in own.starts:
            begin = free.ends.get(start, start)
            if begin in own.ends:
                continue  # inside a run that starts further left
            end = begin
            while end - begin < size_bytes:
                step_bytes = free.starts.get(end) or own.starts.get(end)
                if step_bytes is None:
                    break
                end += step_bytes
            else:
                self._cut_run(begin, begin + size_bytes, free, own)
                return begin
        return -1

    def _cut_run(self, begin: int, end: int, free: SpansBySize, own: SpansBySize) -> None:
        self.n_fuses += 1
        while begin < end:
            spans = free if begin in free.starts else own
            span_bytes = spans.starts[begin]
            self.n_splits += span_bytes > end - begin
            spans.cut(begin, min(span_bytes, end - begin))
            begin += span_bytes

    # Taking spans back

    def take_back(self, offset: int, size_bytes: int, stream: Stream, waits: Waits) -> None:
        """A span lent to `stream` comes back; the places in `waits` must pass before it is free."""
        crossed = waits and (len(waits) > 1 or waits[0][0].stream != stream)
        # A span in the other part must not come to be reused for what this part serves.
        misplaced = (offset >= self.shelf_floor) != (size_bytes <= self.small_bytes)
        place = waits[0][1] if waits else 0
        if crossed or misplaced or not self.reuse.keep(size_bytes, stream, offset, place):
            self.settle(offset, size_bytes, waits)
            for kept in self.reuse.pop_stale():
                self._put_kept(kept)

    def settle(self, offset: int, size_bytes: int, waits: Waits) -> None:
        """Put a span where it belongs: free, pending on one stream, or waiting for several."""
        if waits:
            waits = tuple([wait for wait in waits if wait[1] > wait[0].passed])
        part = SHELF if offset >= self.shelf_floor else MAIN
        if not waits:
            self._free(offset, size_bytes, part)
        elif len(waits) == 1:
            line, place = waits[0]
            line.pending[part].put(offset, size_bytes, place)
        else:
            line, place = waits[0]
            heappush(line.crossings, (place, offset, size_bytes, waits[1:]))

    def advance(self, line: Timeline, passed: int) -> None:
        """A place of a stream has passed: what waited for it moves on."""
        line.advance(passed)
        for part in (MAIN, SHELF):
            for offset, size_bytes in line.pending[part].pop_passed(line.passed):
                self._free(offset, size_bytes, part)
        while line.crossings and line.crossings[0][0] <= line.passed:
            _, offset, size_bytes, waits = heappop(line.crossings)
            self.settle(offset, size_bytes, waits)

    def drain_reuse(self) -> None:
        """Give back all that the reuse layer keeps."""
        for kept in self.reuse.drain():
            self._put_kept(kept)

    def is_pending(self, kept: KeptSpan) -> bool:
        """Whether a kept span's work has not been seen to finish."""
        _, stream, _, place = kept
        return place > 0 and place > self.timelines[stream].passed

    def _put_kept(self, kept: KeptSpan) -> None:
        size_bytes, stream, offset, place = kept
        self.settle(offset, size_bytes, ((self.timelines[stream], place),) if place else ())

    def _free(self, offset: int, size_bytes: int, part: int) -> None:
        joined = self.free[part].put(offset, size_bytes)
        if joined == self.shelf_floor:  # on the shelf, and now its lowest
            freed_bytes = self.free[SHELF].remove(joined)
            self.shelf_floor += freed_bytes
            self.free[MAIN].put(joined, freed_bytes)
