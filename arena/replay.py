"""A trace against an arena of any size, in the trace's own time; and the smallest slab that serves it."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed
from heapq import heappop, heappush
from itertools import count

from rocline.arena.arena import Arena
from rocline.arena.classes import GRANULE_BYTES, align_up
from rocline.arena.completions import Completion, Stream
from rocline.arena.spans import ArenaFull, Span
from rocline.arena.stats import Stats
from rocline.arena.trace import TraceEvent

PLAN_STEPS = 512  # the plan's resolution: this part of the peak
PLAN_RUNS = 4


@dataclass(slots=True)
class Placement:
    """Where and when a span lay, in trace time. None: still so at the end."""

    offset: int
    size_bytes: int
    operator: str
    taken_ns: int
    released_ns: int | None = None
    finished_ns: int | None = None


@dataclass(slots=True)
class ReplayReport:
    """What a trace did to a slab."""

    slab_bytes: int
    n_takes: int
    failures: int  # takes that found no room, not even by waiting for pending work
    first_failure: str  # the arena's words, "" when none failed
    waits: int  # takes that had to wait; the rest of the trace is later by as much
    waited_ns: int
    high_water_bytes: int  # most bytes lent at once
    peak_used_pending_bytes: int  # most bytes lent or unfinished at once, by the trace alone
    largest_free_bytes: int  # at the end, all work finished
    least_largest_free_bytes: int  # the largest free span when it was smallest
    stats: Stats
    placements: list[Placement] = field(default_factory=list)
    largest_free: list[tuple[int, int]] = field(default_factory=list)  # (time_ns, bytes) after each event


@dataclass(frozen=True, slots=True)
class Plan:
    """The slab a trace needs."""

    slab_bytes: int  # smallest found that serves every take without waiting
    peak_used_pending_bytes: int  # the lower bound for an arena that cannot reuse pending spans early
    peak_used_bytes: int  # the lower bound for any
    held_bytes: int  # never released in the trace: held for life

    @property
    def ratio(self) -> float:
        return self.slab_bytes / self.peak_used_pending_bytes

    @property
    def ratio_used(self) -> float:
        return self.slab_bytes / self.peak_used_bytes


class _Clock:
    """Trace time. Completions are moments; waiting moves it to the next one."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.waited_ns = 0
        self.completed_after_ns: int | None = 0  # of the release in hand
        self._due_ns: list[int] = []

    def record(self, stream: Stream) -> Completion | None:
        after_ns = self.completed_after_ns
        if after_ns is None:
            return lambda: False
        if after_ns == 0:
            return None
        due_ns = self.now_ns + after_ns
        heappush(self._due_ns, due_ns)
        return lambda: self.now_ns >= due_ns

    def pause(self) -> None:
        while self._due_ns:
            due_ns = heappop(self._due_ns)
            if due_ns > self.now_ns:
                self.waited_ns += due_ns - self.now_ns
                self.now_ns = due_ns
                return
        raise ArenaFull("no room, and the trace never saw the pending work finish")


class _Run:
    """Events through an arena, one by one. held: spans that are never released."""

    def __init__(self, slab_bytes: int, held: Container[int]) -> None:
        self.clock = _Clock()
        self.arena = Arena(
            slab_bytes, self.clock.record, name="replay", advice="raise --slab-bytes", pause=self.clock.pause
        )
        self.failures, self.first_failure = 0, ""
        self.placements: list[Placement] = []
        self._held = held
        self._lent: dict[int, tuple[Span, Placement]] = {}

    def do(self, event: TraceEvent) -> bool:
        """False for a take that finds no room."""
        self.clock.now_ns = max(self.clock.now_ns, event.time_ns + self.clock.waited_ns)
        if event.action == "take":
            return self._take(event)
        if event.span in self._lent:
            self._release(event)
        return True

    def _take(self, event: TraceEvent) -> bool:
        lasting = event.span in self._held
        try:
            span = self.arena.take(event.n_bytes, event.stream, lasting=lasting, label=event.operator)
        except ArenaFull as error:
            self.failures += 1
            self.first_failure = self.first_failure or str(error)
            return False
        place = Placement(span.offset, span.size_bytes, event.operator, self.clock.now_ns)
        self._lent[event.span] = span, place
        self.placements.append(place)
        return True

    def _release(self, event: TraceEvent) -> None:
        span, place = self._lent.pop(event.span)
        self.clock.completed_after_ns = event.completed_after_ns
        self.arena.release(span, event.stream)
        place.released_ns = self.clock.now_ns
        if event.completed_after_ns is not None:
            place.finished_ns = self.clock.now_ns + event.completed_after_ns

    def finish(self) -> None:
        """All work is done that will ever be."""
        self.clock.now_ns = max((place.finished_ns or 0 for place in self.placements), default=0)
        self.arena.poll()
        self.arena.trim()


def replay(
    events: Iterable[TraceEvent], slab_bytes: int, *, picture: bool = False, to_the_end: bool = True
) -> ReplayReport:
    """Run the events, in time order, through an arena of slab_bytes.

    A take with no room counts as a failure and its release is left out. With `picture` the report also
    holds what report.py draws. Unless `to_the_end`, the first failure or wait ends it, and the report is of
    what came before, without its least_largest_free_bytes.
    """
    events = sorted(events, key=lambda event: event.time_ns)
    run = _Run(slab_bytes, held_for_life(events))
    least_largest = run.arena.slab_bytes
    largest_free: list[tuple[int, int]] = []
    for event in events:
        had_room = run.do(event)
        if not to_the_end and (run.failures or run.clock.waited_ns):
            break
        if not to_the_end or not had_room:
            continue
        largest = run.arena.largest_free_bytes()
        least_largest = min(least_largest, largest)
        if picture:
            largest_free.append((run.clock.now_ns, largest))
    stats = run.arena.stats()
    run.finish()
    return ReplayReport(
        slab_bytes=run.arena.slab_bytes,
        n_takes=sum(event.action == "take" for event in events),
        failures=run.failures,
        first_failure=run.first_failure,
        waits=stats.waits,
        waited_ns=run.clock.waited_ns,
        high_water_bytes=stats.high_water_bytes,
        peak_used_pending_bytes=peaks(events)[1],
        largest_free_bytes=run.arena.largest_free_bytes(),
        least_largest_free_bytes=least_largest,
        stats=stats,
        placements=run.placements if picture else [],
        largest_free=largest_free,
    )


def held_for_life(events: Iterable[TraceEvent]) -> dict[int, int]:
    """Spans that the trace takes and never releases: span -> bytes, rounded to the granule."""
    held: dict[int, int] = {}
    for event in events:
        if event.action == "take":
            held[event.span] = align_up(event.n_bytes)
        else:
            held.pop(event.span, None)
    return held


def peaks(events: Iterable[TraceEvent]) -> tuple[int, int]:
    """(most bytes used, most bytes used or pending) at once, rounded to granules, placed perfectly."""
    used_steps: list[tuple[int, int, int]] = []  # time, order among equals, bytes
    both_steps: list[tuple[int, int, int]] = []
    order = count()
    for event in events:
        size_bytes = align_up(event.n_bytes)
        if event.action == "take":
            used_steps.append((event.time_ns, next(order), size_bytes))
            both_steps.append(used_steps[-1])
        else:
            used_steps.append((event.time_ns, next(order), -size_bytes))
            if event.completed_after_ns is not None:
                both_steps.append((event.time_ns + event.completed_after_ns, next(order), -size_bytes))
    return _peak(used_steps), _peak(both_steps)


def _peak(steps: list[tuple[int, int, int]]) -> int:
    peak = now = 0
    for _, _, step_bytes in sorted(steps):
        now += step_bytes
        peak = max(peak, now)
    return peak


def repeated(events: Sequence[TraceEvent], n_runs: int) -> list[TraceEvent]:
    """The trace n_runs times on end, each run in the slab that the one before leaves; held spans are taken once."""
    held = held_for_life(events)
    period_ns = max(event.time_ns for event in events) + 1
    n_spans = max(event.span for event in events) + 1
    out = list(events)
    for run in range(1, n_runs):
        for event in events:
            if event.span not in held:
                out.append(changed(event, time_ns=event.time_ns + run * period_ns, span=event.span + run * n_spans))
    return out


def plan(events: Sequence[TraceEvent]) -> Plan:
    """The smallest slab, in steps of 1/PLAN_STEPS of the peak, that serves the trace without a wait, again and again.

    PLAN_RUNS runs on end: a slab that serves one run from empty may be cut up for the next.
    Every size it answers has been replayed. It gallops up from the peak and then tries every step after
    the last size that failed, since a larger slab need not serve what a smaller one does.

    Raises ValueError for a trace without takes.
    """
    used_bytes, both_bytes = peaks(events)
    if not used_bytes:
        raise ValueError("plan: the trace takes nothing; record one that does")
    step_bytes = max(GRANULE_BYTES, align_up(used_bytes // PLAN_STEPS))

    runs = repeated(events, PLAN_RUNS)

    def serves(n_steps: int) -> bool:
        report = replay(runs, used_bytes + n_steps * step_bytes, to_the_end=False)
        return not report.failures and not report.waits

    failed, served = -1, 0
    while not serves(served):
        failed, served = served, max(1, 2 * served)
    n_steps = next(n for n in range(failed + 1, served + 1) if n == served or serves(n))
    return Plan(
        slab_bytes=used_bytes + n_steps * step_bytes,
        peak_used_pending_bytes=both_bytes,
        peak_used_bytes=used_bytes,
        held_bytes=sum(held_for_life(events).values()),
    )
