"""The arena: one slab, taken once, that lends spans to streams and knows when their work has finished.

Offsets only; the slab's owner turns a span into memory.

One lock, held for bookkeeping only. Completions are recorded, asked and dropped outside it: they belong to
the driver, which may have locks of its own. A release never waits for the lock: when it is taken (also by
this very thread, when a finaliser runs in the middle of a take) the span goes to an inbox that the next
call empties.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from threading import get_ident
from typing import TYPE_CHECKING

from rocline.arena.classes import GRANULE_BYTES, MAX_SLAB_BYTES
from rocline.arena.completions import Completion, Mark, RecordCompletion, Stream, Timeline, passed_place
from rocline.arena.lock import ArenaLock
from rocline.arena.room import Room, RoomPlan
from rocline.arena.scope import Scope
from rocline.arena.slab import Slab, Waits
from rocline.arena.spans import MIB, ArenaFull, ArenaMisuse, Span, TakenIn
from rocline.arena.stats import Stats

if TYPE_CHECKING:
    from rocline.arena.trace import Recorder

POLL_EVERY = 8  # places of one stream between two looks at its oldest completions
POLL_MARKS = 2 * POLL_EVERY  # looked at then: more than came in, so the queue shrinks
CHUNK_TAKES = 64  # between two moments with nothing lent: more than a caller that lends one span at a time
SPARE_PART = 4  # rooms are for slabs that slab / SPARE_PART more would fit in; on all shipped traces that was enough
PAUSE_S = 50e-6
WAIT_S = 30.0  # as long as a stage step may take before it counts as hung
StreamMarks = list[tuple[Stream, Completion]]


def _pause() -> None:
    time.sleep(PAUSE_S)


class Arena:
    """Lends spans of one slab. Safe for any number of threads.

    slab_bytes         size of the slab, rounded down to the granule
    record_completion  called at release with the stream, outside every lock of the arena: returns a callable
                       that is True once all work queued on that stream so far has finished, or None when
                       none is outstanding. None here: a released span is free at once (work on the host).
                       The callable may be asked by any thread, at any time, twice at once.
    name               how errors call this arena
    advice             how errors end: what the user can change
    wait_s             how long a take may wait for pending work before it is refused
    pause              called between two looks while waiting
    """

    def __init__(
        self,
        slab_bytes: int,
        record_completion: RecordCompletion | None = None,
        *,
        name: str = "arena",
        advice: str = "lower --chunk-rows or raise --arena-gib",
        wait_s: float = WAIT_S,
        pause: Callable[[], None] = _pause,
    ) -> None:
        if not GRANULE_BYTES <= slab_bytes <= MAX_SLAB_BYTES:
            raise ArenaMisuse(f"{name}: a slab of {slab_bytes} bytes; give {GRANULE_BYTES} to {MAX_SLAB_BYTES}")
        self.slab_bytes = slab_bytes & -GRANULE_BYTES
        self.name = name
        self.device_allocs = 0  # for the slab's owner to count in
        self.recorder: Recorder | None = None
        self._record = record_completion
        self._advice = advice
        self._wait_s = wait_s
        self._pause = pause
        self._lock = ArenaLock(name)
        self._slab = Slab(self.slab_bytes)
        self._reuse = self._slab.reuse
        self._live: dict[Span, bool] = {}  # lent, oldest first; pop and insert are atomic without the lock
        self._inbox: deque[tuple[Span, StreamMarks]] = deque()
        self._rooms: list[Room] = []  # open
        self._used_bytes = self._high_water_bytes = 0
        self._takes_when_idle = 0
        self._takes = self._releases = self._reuses = self._waits = self._refusals = 0

    # Lending

    def take(
        self,
        want_bytes: int,
        stream: Stream = 0,
        *,
        lasting: bool = False,
        label: str = "",
        frames_up: int = 1,
        taken_in: TakenIn | None = None,
        patient: bool = True,
    ) -> Span:
        """Lend a span of at least want_bytes whose first use is work queued on stream from now on.

        lasting    it outlives the work around it (hand-offs, captured graphs): goes to the shelf
        label      the operator, for traces and reports
        frames_up  which caller a leak report names: 1 is this call's, 2 its caller's, ...
        taken_in   its code and instruction, when the caller has them at hand
        patient    wait for pending work before refusing; not, when the caller can make room itself

        Raises ArenaMisuse for sizes that are no positive integer and ArenaFull when nothing fits, not even
        after waiting for pending work. What the driver raises while it is asked passes through. (design §8)
        """
        if want_bytes.__class__ is not int or not 0 < want_bytes <= self.slab_bytes:
            self._refuse_size(want_bytes)
        size_bytes = (want_bytes + 255) & -256
        if taken_in is None:
            frame = sys._getframe(frames_up)
            taken_in = (frame.f_code, frame.f_lasti)
        if self._slab.n_crossings:
            self._ask_crossed()
        lock = self._lock
        lock.rlock.acquire()
        if lock.inside:
            lock.refuse()
        lock.inside = True
        try:
            if self._inbox:
                self._empty_inbox()
            offset = -1 if lasting else self._reuse.take(size_bytes, stream)
            if offset >= 0:
                self._reuses += 1
            else:
                offset = self._slab.place(size_bytes, stream, lasting)
            if offset >= 0:
                self._used_bytes += size_bytes
                self._takes = number = self._takes + 1
        finally:
            lock.inside = False
            lock.rlock.release()
        if offset < 0:
            offset, number = self._make_room(size_bytes, stream, lasting, patient)
        span = Span(offset, size_bytes, stream, number, label, lasting, get_ident(), taken_in)
        self._live[span] = True
        if self.recorder is not None:
            self.recorder.note_take(span, want_bytes)
        return span

    def release(self, span: Span, *streams: Stream) -> None:
        """Give a span back once the work queued so far on its streams has finished.

        streams  every stream that touched it; none given: the one it was taken on. A span that another
                 stream touched waits for all of them, and nobody has it before: the arena cannot know
                 which stream waited for which.

        Never blocks, and may be called from a finaliser. Raises ArenaMisuse for a span that is not lent.
        """
        marks = self._marks_of((span.stream, *streams)) if self._record is not None else []
        if not self._live.pop(span, False):
            raise ArenaMisuse(
                f"{self.name}: {span!r} is not lent by this arena now; release a span once, before its "
                "scope ends, to the arena that lent it"
            )
        self._give_back(((span, marks),))

    def release_together(self, spans: Iterable[Span], stream: Stream) -> None:
        """Give back what is still lent of `spans`, all taken on `stream`, behind one completion."""
        marks = self._marks_of((stream,)) if self._record is not None else []
        self._give_back([(span, marks) for span in spans if self._live.pop(span, False)])

    def scope(self, stream: Stream = 0) -> Scope:
        """`with arena.scope(stream) as s:` gives what `s.take` lent back together at the end."""
        return Scope(self, stream)

    def poll(self) -> None:
        """Ask the outstanding completions and free what has finished. Takes do so when they need to."""
        with self._lock:
            self._empty_inbox()
            queues = [(line, list(line.marks)) for line in self._slab.timelines.values() if line.marks]
        self._ask(queues)

    def trim(self) -> None:
        """Give back what the reuse layer keeps, so that all that is free coalesces."""
        with self._lock:
            self._empty_inbox()
            self._slab.drain_reuse()

    # Rooms: a scope's temporaries in one piece

    def open_room(self, plan: RoomPlan, stream: Stream) -> Room | None:
        """Lend a plan's whole piece to its one user, who then hands it out alone.

        None when there is no such piece to spare, while a recorder wants every take by itself, and in a slab that
        has been all but full: only single takes keep to the layout that it was planned for.
        """
        spare_bytes = self.slab_bytes // SPARE_PART
        if self.recorder is not None or self._high_water_bytes > self.slab_bytes - spare_bytes:
            return None
        with self._lock:
            self._empty_inbox()
            offset = self._slab.place_room(plan, spare_bytes, stream)
            if offset < 0:
                return None
            room = Room(plan, offset, stream)
            self._rooms.append(room)
        return room

    def close_room(self, room: Room) -> int:
        """Take a room back whole, behind one completion, except what was handed over; how many takes it served."""
        marks = self._marks_of((room.stream,))
        due: dict[Timeline, list[Mark]] = {}
        with self._lock:
            self._empty_inbox()
            self._note_high_water()
            waits = self._waits_for(marks, due)
            n_lent = room.n_lent()
            self._takes += n_lent
            self._releases += n_lent
            self._rooms.remove(room)
            for offset, size_bytes in room.ranges():
                self._slab.settle(offset, size_bytes, waits)
            if not self._used_bytes:
                self._end_chunk()
        if due:
            self._ask(list(due.items()))
        return n_lent

    def shrink_room(self, room: Room) -> None:
        """Give back what a room has not handed out yet: it hands out nothing more."""
        # Not at once free: its stream may have had work there before the room was opened.
        marks = self._marks_of((room.stream,))
        due: dict[Timeline, list[Mark]] = {}
        with self._lock:
            self._empty_inbox()
            tail, room.end = room.tail(), room.at
            waits = self._waits_for(marks, due)
            for offset, size_bytes in tail:
                self._slab.settle(offset, size_bytes, waits)
        if due:
            self._ask(list(due.items()))

    def hand_over(self, room: Room, index: int) -> Span:
        """Make what a room lent to a request of its plan a span of its own, lasting; its holder releases it."""
        with self._lock:
            self._empty_inbox()
            room.hand_over(index)
            span = room.span(index, self._note_lent(room.plan.sizes_bytes[index]), get_ident())
            span.lasting = True
            self._live[span] = True
        return span

    # Reading

    def stats(self) -> Stats:
        """Counters and sizes now. Pending means not seen to finish: `poll` first to ask."""
        with self._lock:
            self._empty_inbox()
            self._note_high_water()
            slab, lines = self._slab, self._slab.timelines.values()
            n_lent = sum(room.n_lent() for room in self._rooms)
            used_bytes = self._used_bytes + self._lent_in_rooms()
            unlent = [size_bytes for room in self._rooms for _, size_bytes in room.unlent()]
            waiting = [kept for kept in self._reuse if slab.is_pending(kept)]
            waiting_bytes = sum(size_bytes for size_bytes, *_ in waiting)
            pending = slab.pending_spans()
            pending_bytes = waiting_bytes + sum(size_bytes for _, size_bytes, _ in pending)
            runs = any(line.has_runs() for line in lines)
            n_free = len(slab.free_spans()) if runs else sum(map(len, slab.free))
            return Stats(
                slab_bytes=self.slab_bytes,
                used_bytes=used_bytes,
                pending_bytes=pending_bytes,
                free_bytes=self.slab_bytes - used_bytes - pending_bytes,
                kept_bytes=self._reuse.kept_bytes - waiting_bytes + sum(unlent),
                high_water_bytes=self._high_water_bytes,
                largest_free_bytes=slab.largest_free_bytes(),
                n_used=self._takes - self._releases + n_lent,
                n_pending=len(waiting) + len(pending),
                n_free=n_free + self._reuse.n_kept - len(waiting) + len(unlent),
                takes=self._takes + n_lent,
                releases=self._releases,
                reuses=self._reuses,
                splits=slab.n_splits,
                merges=slab.n_merges(),
                recuts=slab.n_recuts,
                fuses=slab.n_fuses,
                waits=self._waits,
                refusals=self._refusals,
                device_allocs=self.device_allocs,
            )

    def largest_free_bytes(self) -> int:
        """The largest free span; in constant time while nothing is pending."""
        with self._lock:
            self._empty_inbox()
            return self._slab.largest_free_bytes()

    @property
    def n_takes(self) -> int:
        """Takes so far: the number of the newest span."""
        return self._takes

    def live_spans(self) -> list[Span]:
        """What is lent now, oldest first: at shutdown, what leaked (`span.taken_at` says where)."""
        with self._lock:
            self._empty_inbox()
            return [*self._live, *(span for room in self._rooms for span in room.spans())]

    def taken_spans(self) -> list[Span]:
        """As live_spans, without what rooms lend."""
        return list(self._live)

    def layout(self) -> list[tuple[int, int, str, Stream | None]]:
        """Every span of the slab by offset: (offset, size_bytes, state, stream).

        States: used, pending, kept (finished, in the reuse layer), free. A pending span of several streams
        has stream None. They tile the slab while no other thread is inside a call.
        """
        with self._lock:
            self._empty_inbox()
            rows: list[tuple[int, int, str, Stream | None]] = [
                (span.offset, span.size_bytes, "used", span.stream) for span in self._live.copy()
            ]
            for room in self._rooms:
                rows += [(span.offset, span.size_bytes, "used", span.stream) for span in room.spans()]
                rows += [(offset, size_bytes, "kept", room.stream) for offset, size_bytes in room.unlent()]
            for kept in self._reuse:
                size_bytes, stream, offset, _ = kept
                rows.append((offset, size_bytes, "pending" if self._slab.is_pending(kept) else "kept", stream))
            rows += [(offset, size, "pending", stream) for offset, size, stream in self._slab.pending_spans()]
            rows += [(offset, size, "free", None) for offset, size in self._slab.free_spans()]
        return sorted(rows, key=lambda row: row[0])

    # Taking back

    def _give_back(self, lent: Sequence[tuple[Span, StreamMarks]]) -> None:
        """Release spans that are lent no more, each with its recorded completions."""
        if self.recorder is not None:
            lent = [(span, self.recorder.note_release(span, marks)) for span, marks in lent]
        lock = self._lock
        if not lock.rlock.acquire(False):
            self._inbox.extend(lent)
            return
        if lock.inside:
            self._inbox.extend(lent)
            lock.rlock.release()
            return
        lock.inside = True
        due: dict[Timeline, list[Mark]] = {}
        try:
            if self._inbox:
                self._empty_inbox()
            if self._rooms or self._used_bytes > self._high_water_bytes:
                self._note_high_water()
            for span, marks in lent:
                self._take_back(span, marks, due)
        finally:
            lock.inside = False
            lock.rlock.release()
        if due:
            self._ask(list(due.items()))

    def _take_back(self, span: Span, marks: StreamMarks, due: dict[Timeline, list[Mark]]) -> None:
        """Settle a released span (lock held); its streams' oldest marks go to `due` when they are to be looked at."""
        self._releases += 1
        self._used_bytes -= span.size_bytes
        waits = self._waits_for(marks, due) if marks else ()
        self._slab.take_back(span.offset, span.size_bytes, span.stream, waits)
        if not self._used_bytes:
            self._end_chunk()

    def _waits_for(self, marks: StreamMarks, due: dict[Timeline, list[Mark]]) -> Waits:
        waits = []
        for stream, completion in marks:
            line = self._slab.timeline(stream)
            waits.append((line, line.place_of(completion)))
            if line.newest % POLL_EVERY == 0 and len(line.marks) > POLL_EVERY:
                due[line] = list(islice(line.marks, POLL_MARKS))
        return tuple(waits)

    def _end_chunk(self) -> None:
        """Nothing is lent: after a chunk, what it left for reuse would only cut up the room that the plan gives the
        next."""
        if self._rooms:
            return
        if self._takes - self._takes_when_idle >= CHUNK_TAKES:
            self._slab.drain_reuse()
        self._takes_when_idle = self._takes

    def _empty_inbox(self) -> None:
        while self._inbox:
            self._note_high_water()
            self._take_back(*self._inbox.popleft(), {})

    # Completions (lock not held)

    def _marks_of(self, streams: tuple[Stream, ...]) -> StreamMarks:
        if self._record is None:
            return []
        if len(streams) == 1:
            completion = self._record(streams[0])
            return [] if completion is None else [(streams[0], completion)]
        touched = dict.fromkeys(streams)
        return [(stream, completion) for stream in touched if (completion := self._record(stream)) is not None]

    def _ask(self, queues: list[tuple[Timeline, list[Mark]]]) -> None:
        """Ask completions, oldest first, and free what has finished.

        `queues` refers to all of them until the end, so the last reference to one goes without the lock.
        """
        passed = [(line, passed_place(marks)) for line, marks in queues]
        with self._lock:
            self._empty_inbox()
            for line, place in passed:
                if place > line.passed:
                    self._slab.advance(line, place)

    def _ask_crossed(self) -> None:
        """Ask what spans that several streams touched wait for.

        They are nobody's until then, so the sooner it is known the less they are in the way. Few cross at a time.
        """
        with self._lock:
            self._empty_inbox()
            queues = [(line, list(line.marks)) for line in self._slab.timelines.values() if line.crossings]
        self._ask(queues)

    def _make_room(self, size_bytes: int, stream: Stream, lasting: bool, patient: bool) -> tuple[int, int]:
        """(offset, number) for a request that did not fit at first: ask, scrape, wait, refuse."""
        give_up_s = time.monotonic() + (self._wait_s if patient else 0)
        waited = False
        while True:
            self.poll()
            with self._lock:
                self._empty_inbox()
                offset = self._slab.place_anywhere(size_bytes, stream, lasting)
                if offset >= 0:
                    return offset, self._note_lent(size_bytes)
                outstanding = any(line.marks for line in self._slab.timelines.values())
                if not outstanding or time.monotonic() >= give_up_s:
                    self._refusals += patient
                    break
                self._waits += not waited
                waited = True
            self._pause()
        raise ArenaFull(self._no_room(size_bytes))

    def _note_lent(self, size_bytes: int) -> int:
        self._used_bytes += size_bytes
        self._takes += 1
        return self._takes

    def _note_high_water(self) -> None:
        """To be called before anything comes back: until then what is lent only grows."""
        used_bytes = self._used_bytes + self._lent_in_rooms()
        if used_bytes > self._high_water_bytes:
            self._high_water_bytes = used_bytes

    def _lent_in_rooms(self) -> int:
        return sum([room.lent_bytes() for room in self._rooms]) if self._rooms else 0

    # The lock, and refusals

    def _refuse_size(self, want_bytes: int) -> None:
        if want_bytes.__class__ is not int or want_bytes <= 0:
            raise ArenaMisuse(f"{self.name}: asked for {want_bytes!r} bytes; ask for a positive integer")
        with self._lock:
            self._empty_inbox()
            self._refusals += 1
        raise ArenaFull(self._no_room(want_bytes))

    def _no_room(self, want_bytes: int) -> str:
        now = self.stats()
        return (
            f"{self.name}: no room for {want_bytes / MIB:.1f} MiB; {now.free_bytes / MIB:.1f} free in "
            f"{now.n_free} spans, largest {now.largest_free_bytes / MIB:.1f}; {now.pending_bytes / MIB:.1f} "
            f"pending in {now.n_pending}; {now.used_bytes / MIB:.1f} of {now.slab_bytes / MIB:.1f} used by "
            f"{now.n_used}; {self._advice}"
        )
