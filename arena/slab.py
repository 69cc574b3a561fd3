"""Which byte of the slab is whose: placing requests, taking spans back, in one thread at a time.

The slab has two parts. MAIN, from 0 up, serves what a chunk needs; the SHELF, from the top down, serves small
spans and those that outlive the work around them, so that neither can come to lie across the large region.
The shelf's floor sinks by a request that none of its holes takes, and rises over whatever is free at it.

A released span is *pending* until the completion recorded at its release has passed. Until then only the
stream that used it may have it again, since that stream's next work comes after. To that stream pending is as
good as free: what it released coalesces, with the free spans beside it, to *runs* of its own. So a device that
runs behind leaves a stream the same room as one that keeps up. Other streams get the finished part of a run
when they would find no room else.
"""

from heapq import heappop, heappush

from rocline.arena.classes import FreeSpans, joined
from rocline.arena.completions import MAIN, SHELF, Stream, Timeline
from rocline.arena.reuse import KeptSpan, ReuseLayer
from rocline.arena.room import RoomPlan

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
        self.n_crossings = 0  # spans that wait for several streams

    def timeline(self, stream: Stream) -> Timeline:
        """The stream's timeline, made when it is first seen."""
        line = self.timelines.get(stream)
        if line is None:
            line = self.timelines[stream] = Timeline(stream, self.slab_bytes)
        return line

    # Reading

    def free_spans(self) -> list[tuple[int, int]]:
        """What has finished, by offset: (offset, size_bytes), neighbours joined also where a run keeps them."""
        ranges = [(offset, offset + size) for free in self.free for offset, size in free.starts.items()]
        for line in self.timelines.values():
            for part in (MAIN, SHELF):
                ranges += [(begin, end) for begin, end, unfinished in line.pieces(part) if not unfinished]
        return joined(ranges)

    def pending_spans(self) -> list[tuple[int, int, Stream | None]]:
        """What has not: (offset, size_bytes, stream); None for several. Without what the reuse layer keeps."""
        out: list[tuple[int, int, Stream | None]] = []
        for line in self.timelines.values():
            ranges = [
                (begin, end) for part in (MAIN, SHELF) for begin, end, unfinished in line.pieces(part) if unfinished
            ]
            out += [(offset, size_bytes, line.stream) for offset, size_bytes in joined(ranges)]
            out += [(offset, size_bytes, None) for _, offset, size_bytes, _ in line.crossings]
        return out

    def largest_free_bytes(self) -> int:
        """The largest free span: in constant time unless a stream has runs."""
        if any(line.has_runs() for line in self.timelines.values()):
            return max((size_bytes for _, size_bytes in self.free_spans()), default=0)
        return max(self.free[MAIN].largest_bytes(), self.free[SHELF].largest_bytes())

    def n_merges(self) -> int:
        """How often a span was joined with a neighbour."""
        runs = (spans for line in self.timelines.values() for spans in line.runs)
        return sum(spans.n_merges for spans in (*self.free, *runs))

    # Placing a request

    def place(self, size_bytes: int, stream: Stream, lasting: bool) -> int:
        """Offset for a request the reuse layer has no span for, -1 when nothing fits as things are."""
        part = SHELF if lasting or size_bytes <= self.small_bytes else MAIN
        line = self.timeline(stream)
        offset = self._carve(size_bytes, line, part)
        if offset < 0:
            offset = self._recut(size_bytes, line, part)
        if offset < 0 and self._widen(line):
            offset = self._carve(size_bytes, line, part)
        return offset

    def place_anywhere(self, size_bytes: int, stream: Stream, lasting: bool) -> int:
        """As place, sparing nothing: the reuse layer goes, the other part may serve."""
        self.drain_reuse()
        line = self.timeline(stream)
        self._widen(line)
        self._lift_floor()
        for part in (SHELF, MAIN) if lasting or size_bytes <= self.small_bytes else (MAIN, SHELF):
            offset = self._carve(size_bytes, line, part)
            if offset >= 0:
                return offset
        return -1

    def place_room(self, plan: RoomPlan, spare_bytes: int, stream: Stream) -> int:
        """Offset for a room, -1 unless its scope's other takes find room beside it, and spare_bytes are left over."""
        line = self.timeline(stream)
        free, runs = self.free[MAIN], line.runs[MAIN]
        left_bytes = free.total_bytes + runs.total_bytes - plan.total_bytes
        if left_bytes < plan.besides_bytes + spare_bytes:
            return -1
        spans, offset = self._fit(plan.total_bytes, line, MAIN)
        if offset < 0:
            return -1
        spans.cut(offset, plan.total_bytes)
        if max(free.largest_bytes(), runs.largest_bytes()) < plan.largest_besides_bytes:
            spans.put(offset, plan.total_bytes)
            return -1
        if spans is runs:
            self._note_reused(line, offset, plan.total_bytes)
        return offset

    def _fit(self, size_bytes: int, line: Timeline, part: int) -> tuple[FreeSpans, int]:
        """Best fit among the stream's own runs and the free spans; -1 when there is none."""
        free, runs = self.free[part], line.runs[part]
        offset = free.best_fit(size_bytes)
        if runs.starts:
            own = runs.best_fit(size_bytes)
            # Of equals its own: others may have the free one.
            if own >= 0 and (offset < 0 or runs.starts[own] <= free.starts[offset]):
                return runs, own
        return free, offset

    def _carve(self, size_bytes: int, line: Timeline, part: int) -> int:
        """The part of the best fit that a request gets; the rest stays what it was. -1 when nothing fits."""
        spans, offset = self._fit(size_bytes, line, part)
        if offset < 0:
            return self._lower_floor(size_bytes, line) if part == SHELF else -1
        if spans is not self.free[part]:
            return self._cut_run(line, part, offset, size_bytes)
        self.n_splits += spans.starts[offset] > size_bytes
        spans.cut(offset, size_bytes)
        return offset

    def _cut_run(self, line: Timeline, part: int, offset: int, size_bytes: int, *, from_top: bool = False) -> int:
        runs = line.runs[part]
        self.n_splits += runs.starts[offset] > size_bytes
        taken = runs.cut(offset, size_bytes, from_top=from_top)
        self._note_reused(line, taken, size_bytes)
        return taken

    def _note_reused(self, line: Timeline, offset: int, size_bytes: int) -> None:
        """A stream has a part of its runs again."""
        before_bytes = line.unfinished.total_bytes
        n_ranges = line.unfinished.cut(offset, offset + size_bytes)
        finished_too = before_bytes - line.unfinished.total_bytes < size_bytes
        self.n_fuses += n_ranges + finished_too > 1
        if not line.unfinished:
            self._give_up_finished(line)

    def _lower_floor(self, size_bytes: int, line: Timeline) -> int:
        """Give the shelf size_bytes more, if MAIN is free under its floor, or the stream's own; their offset."""
        free, runs = self.free[MAIN], line.runs[MAIN]
        below = free.ends.get(self.shelf_floor)
        if below is not None and free.starts[below] >= size_bytes:
            self.n_splits += free.starts[below] > size_bytes
            self.shelf_floor = free.cut(below, size_bytes, from_top=True)
            return self.shelf_floor
        below = runs.ends.get(self.shelf_floor)
        if below is None or runs.starts[below] < size_bytes:
            return -1
        self.shelf_floor = self._cut_run(line, MAIN, below, size_bytes, from_top=True)
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
        # On the shelf it may have lain at the floor, which then rose over it: _carve lowers it again.
        return self._carve(size_bytes, line, part)

    def _widen(self, line: Timeline) -> bool:
        """Make the most of what this stream may have: other streams' runs give up what has finished in them,
        and its own take in the free spans beside them. Whether that can have changed anything."""
        changed = False
        for other in self.timelines.values():
            if other is not line and other.has_runs():
                self._give_up_finished(other)
                changed = True
        for part in (MAIN, SHELF):
            for begin in sorted(line.runs[part].starts):
                if begin in line.runs[part].starts:  # not joined to the one before
                    size_bytes = line.runs[part].remove(begin)
                    self._extend_runs(line, part, begin, size_bytes)
                    changed = True
        return changed

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
        part = SHELF if offset >= self.shelf_floor else MAIN
        line = None
        if waits:
            line = waits[0][0]
            waits = tuple([wait for wait in waits if wait[1] > wait[0].passed])
        if not waits:
            self._free(offset, size_bytes, part, line)
        elif len(waits) == 1:
            line, place = waits[0]
            line.unfinished.put(offset, offset + size_bytes, place)
            self._extend_runs(line, part, offset, size_bytes)
        else:
            line, place = waits[0]
            self.n_crossings += 1
            heappush(line.crossings, (place, offset, size_bytes, waits[1:]))

    def advance(self, line: Timeline, passed: int) -> None:
        """A place of a stream has passed: what waited for it moves on."""
        line.advance(passed)
        if not line.unfinished:
            self._give_up_finished(line)
        while line.crossings and line.crossings[0][0] <= line.passed:
            _, offset, size_bytes, waits = heappop(line.crossings)
            self.n_crossings -= 1
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

    def _extend_runs(self, line: Timeline, part: int, offset: int, size_bytes: int) -> None:
        """Add to a stream's runs, joined with its runs and the free spans on both sides."""
        free, end = self.free[part], offset + size_bytes
        if (left := free.ends.get(offset)) is not None:
            free.remove(left)
            offset = left
        if end in free.starts:
            end += free.remove(end)
        joined = line.runs[part].put(offset, end - offset)
        if joined == self.shelf_floor:  # on the shelf, and now its lowest
            size_bytes = line.runs[SHELF].remove(joined)
            self.shelf_floor += size_bytes
            self._extend_runs(line, MAIN, joined, size_bytes)
            self._lift_floor()  # a run of the stream's own may have hidden what is free beyond it

    def _free(self, offset: int, size_bytes: int, part: int, line: Timeline | None = None) -> None:
        """Free a span for all; for one stream when it lies at one of that stream's runs."""
        if line is not None and (offset in line.runs[part].ends or offset + size_bytes in line.runs[part].starts):
            self._extend_runs(line, part, offset, size_bytes)
            return
        joined = self.free[part].put(offset, size_bytes)
        if joined == self.shelf_floor:  # on the shelf, and now its lowest
            size_bytes = self.free[SHELF].remove(joined)
            self.shelf_floor += size_bytes
            self.free[MAIN].put(joined, size_bytes)

    def _lift_floor(self) -> None:
        """MAIN gets what is free at the bottom of the shelf: the floor may have sunk onto it since it came free."""
        if self.shelf_floor in self.free[SHELF].starts:
            offset, size_bytes = self.shelf_floor, self.free[SHELF].remove(self.shelf_floor)
            self.shelf_floor += size_bytes
            self.free[MAIN].put(offset, size_bytes)

    def _give_up_finished(self, line: Timeline) -> None:
        """Free for all what has finished in a stream's runs; the rest stays the stream's."""
        pieces = [(part, *piece) for part in (MAIN, SHELF) for piece in line.pieces(part)]
        for part in (MAIN, SHELF):
            for begin in list(line.runs[part].starts):
                line.runs[part].remove(begin)
        for part, begin, end, unfinished in pieces:
            if unfinished:
                line.runs[part].put(begin, end - begin)
            else:
                self._free(begin, end - begin, part)
        # Others must be able to lower the floor: it sinks past what is not finished at it, if there is as much free
        # below. The stream's own next claim lifts it again.
        free, run = self.free[MAIN], line.runs[MAIN].ends.get(self.shelf_floor)
        if run is not None and run in free.ends and free.starts[free.ends[run]] >= line.runs[MAIN].starts[run]:
            self.shelf_floor = run
            line.runs[SHELF].put(run, line.runs[MAIN].remove(run))
