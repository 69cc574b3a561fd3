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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from threading import RLock, get_ident
from typing import TYPE_CHECKING

from rocline.arena.classes import GRANULE_BYTES, MAX_SLAB_BYTES
from rocline.arena.completions import Completion, Mark, RecordCompletion, Stream, Timeline, passed_place
from rocline.arena.scope import Scope
from rocline.arena.slab import Slab
from rocline.arena.spans import MIB, ArenaFull, ArenaMisuse, Span
from rocline.arena.stats import Stats

if TYPE_CHECKING:
    from rocline.arena.trace import Recorder

POLL_EVERY = 8  # places of one stream between two looks at its oldest completions
POLL_MARKS = 2 * POLL_EVERY  # looked at then: more than came in, so the queue shrinks
CHUNK_TAKES = 64  # between two moments with nothing lent: more than a caller that lends one span at a time
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
        # Re-entrant only to be noticed: _inside is True while the state may be between two truths.
        self._lock = RLock()
        self._inside = False
        self._slab = Slab(self.slab_bytes)
        self._reuse = self._slab.reuse
        self._live: dict[Span, bool] = {}  # lent, oldest first; pop and insert are atomic without the lock
        self._inbox: deque[tuple[Span, StreamMarks]] = deque()
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
    ) -> Span:
        """Lend a span of at least want_bytes whose first use is work queued on stream from now on.

        lasting    it outlives the work around it (hand-offs, captured graphs): goes to the shelf
        label      the operator, for traces and reports
        frames_up  which caller a leak report names: 1 is this call's, 2 its caller's, ...

        Raises ArenaMisuse for sizes that are no positive integer and ArenaFull when nothing fits, not even
        after waiting for pending work. What the driver raises while it is asked passes through. (design §8)
        """
        if want_bytes.__class__ is not int or not 0 < want_bytes <= self.slab_bytes:
            self._refuse_size(want_bytes)
        size_bytes = (want_bytes + 255) & -256
        frame = sys._getframe(frames_up)
        taken_in = (frame.f_code, frame.f_lasti)
        self._lock.acquire()  # spelled out here and in _give_back: _locked() costs more than all the rest
        if self._inside:
            self._refuse_nested()
        self._inside = True
        try:
            if self._inbox:
                self._empty_inbox()
            offset = -1 if lasting else self._reuse.take(size_bytes, stream)
            if offset >= 0:
                self._reuses += 1
            else:
                offset = self._slab.place(size_bytes, stream, lasting)
            if offset >= 0:
                number = self._note_lent(size_bytes)
        finally:
            self._inside = False
            self._lock.release()
        if offset < 0:
            offset, number = self._make_room(size_bytes, stream, lasting)
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
        if self._record is None:
            self._give_back(span, [])
        else:
            self._give_back(span, self._marks_of((span.stream, *streams)))

    def release_together(self, spans: Iterable[Span], stream: Stream) -> None:
        """Give back what is still lent of `spans`, all taken on `stream`, behind one completion."""
        marks = self._marks_of((stream,)) if self._record else []
        for span in spans:
            if span in self._live:
                self._give_back(span, marks)

    def scope(self, stream: Stream = 0) -> Scope:
        """`with arena.scope(stream) as s:` gives what `s.take` lent back together at the end."""
        return Scope(self, stream)

    def poll(self) -> None:
        """Ask the outstanding completions and free what has finished. Takes do so when they need to."""
        with self._locked():
            queues = [(line, list(line.marks)) for line in self._slab.timelines.values() if line.marks]
        self._ask(queues)

    def trim(self) -> None:
        """Give back what the reuse layer keeps, so that all that is free coalesces."""
        with self._locked():
            self._slab.drain_reuse()

    # Reading

    def stats(self) -> Stats:
        """Counters and sizes now. Pending means not seen to finish: `poll` first to ask."""
        with self._locked():
            slab, lines = self._slab, self._slab.timelines.values()
            waiting = [kept for kept in self._reuse if slab.is_pending(kept)]
            waiting_bytes = sum(size_bytes for size_bytes, *_ in waiting)
            pending_bytes = waiting_bytes + sum(line.pending_bytes() for line in lines)
            return Stats(
                slab_bytes=self.slab_bytes,
                used_bytes=self._used_bytes,
                pending_bytes=pending_bytes,
                free_bytes=self.slab_bytes - self._used_bytes - pending_bytes,
                kept_bytes=self._reuse.kept_bytes - waiting_bytes,
                high_water_bytes=self._high_water_bytes,
                largest_free_bytes=slab.largest_free_bytes(),
                n_used=self._takes - self._releases,
                n_pending=len(waiting) + sum(line.n_pending() for line in lines),
                n_free=sum(map(len, slab.free)) + self._reuse.n_kept - len(waiting),
                takes=self._takes,
                releases=self._releases,
                reuses=self._reuses,
                splits=slab.n_splits,
                merges=sum(spans.n_merges for spans in slab.free),
                recuts=slab.n_recuts,
                fuses=slab.n_fuses,
                waits=self._waits,
                refusals=self._refusals,
                device_allocs=self.device_allocs,
            )

    def largest_free_bytes(self) -> int:
        """The largest free span, in constant time."""
        with self._locked():
            return self._slab.largest_free_bytes()

    @property
    def n_takes(self) -> int:
        """Takes so far: the number of the newest span."""
        return self._takes

    def live_spans(self) -> list[Span]:
        """What is lent now, oldest first: at shutdown, what leaked (`span.taken_at` says where)."""
        return list(self._live)

    def layout(self) -> list[tuple[int, int, str, Stream | None]]:
        """Every span of the slab by offset: (offset, size_bytes, state, stream).

        States: used, pending, kept (finished, in the reuse layer), free. A pending span of several streams
        has stream None. They tile the slab while no other thread is inside a call.
        """
        with self._locked():
            rows: list[tuple[int, int, str, Stream | None]] = [
                (span.offset, span.size_bytes, "used", span.stream) for span in list(self._live)
            ]
            for kept in self._reuse:
                size_bytes, stream, offset, _ = kept
                rows.append((offset, size_bytes, "pending" if self._slab.is_pending(kept) else "kept", stream))
            for line in self._slab.timelines.values():
                for part in line.pending:
                    rows += [(offset, size, "pending", line.stream) for offset, size in part.starts.items()]
                rows += [(offset, size, "pending", None) for _, offset, size, _ in line.crossings]
            for free in self._slab.free:
                rows += [(offset, size, "free", None) for offset, size in free.starts.items()]
        return sorted(rows, key=lambda row: row[0])

    # Taking back

    def _give_back(self, span: Span, marks: StreamMarks) -> None:
        """Release a span whose completions are recorded."""
        if not self._live.pop(span, False):
            raise ArenaMisuse(
                f"{self.name}: {span!r} is not lent by this arena now; release a span once, before its "
                "scope ends, to the arena that lent it"
            )
        if self.recorder is not None:
            marks = self.recorder.note_release(span, marks)
        if not self._lock.acquire(False):
            self._inbox.append((span, marks))
            return
        if self._inside:
            self._inbox.append((span, marks))
            self._lock.release()
            return
        self._inside = True
        try:
            if self._inbox:
                self._empty_inbox()
            due = self._take_back(span, marks)
        finally:
            self._inside = False
            self._lock.release()
        if due is not None:
            self._ask([due])

    def _take_back(self, span: Span, marks: StreamMarks) -> tuple[Timeline, list[Mark]] | None:
        """Settle a released span (lock held); a stream's oldest marks when they are due for a look."""
        self._releases += 1
        self._used_bytes -= span.size_bytes
        due = None
        waits = []
        for stream, completion in marks:
            line = self._slab.timeline(stream)
            waits.append((line, line.place_of(completion)))
            if line.newest % POLL_EVERY == 0 and len(line.marks) > POLL_EVERY:
                due = (line, list(islice(line.marks, POLL_MARKS)))
        self._slab.take_back(span.offset, span.size_bytes, span.stream, tuple(waits))
        if not self._used_bytes:
            if self._takes - self._takes_when_idle >= CHUNK_TAKES:
                # A chunk has ended: what it left for reuse would only cut up the room that the plan gives the next.
                self._slab.drain_reuse()
            self._takes_when_idle = self._takes
        return due

    def _empty_inbox(self) -> None:
        while self._inbox:
            self._take_back(*self._inbox.popleft())

    # Completions (lock not held)

    def _marks_of(self, streams: tuple[Stream, ...]) -> StreamMarks:
        assert self._record is not None
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
        with self._locked():
            for line, place in passed:
                if place > line.passed:
                    self._slab.advance(line, place)

    def _make_room(self, size_bytes: int, stream: Stream, lasting: bool) -> tuple[int, int]:
        """(offset, number) for a request that did not fit at first: ask, scrape, wait, refuse."""
        give_up_s = time.monotonic() + self._wait_s
        waited = False
        while True:
            self.poll()
            with self._locked():
                offset = self._slab.place_anywhere(size_bytes, stream, lasting)
                if offset >= 0:
                    return offset, self._note_lent(size_bytes)
                outstanding = any(line.marks for line in self._slab.timelines.values())
                if not outstanding or time.monotonic() >= give_up_s:
                    self._refusals += 1
                    break
                self._waits += not waited
                waited = True
            self._pause()
        raise ArenaFull(self._no_room(size_bytes))

    def _note_lent(self, size_bytes: int) -> int:
        self._used_bytes += size_bytes
        if self._used_bytes > self._high_water_bytes:
            self._high_water_bytes = self._used_bytes
        self._takes += 1
        return self._takes

    # The lock, and refusals

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._lock.acquire()
        if self._inside:
            self._refuse_nested()
        self._inside = True
        try:
            self._empty_inbox()
            yield
        finally:
            self._inside = False
            self._lock.release()

    def _refuse_nested(self) -> None:
        self._lock.release()
        raise RuntimeError(
            f"{self.name}: called from a finaliser or signal handler that interrupted the arena itself; "
            "only release may be called there"
        )

    def _refuse_size(self, want_bytes: int) -> None:
        if want_bytes.__class__ is not int or want_bytes <= 0:
            raise ArenaMisuse(f"{self.name}: asked for {want_bytes!r} bytes; ask for a positive integer")
        with self._locked():
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
