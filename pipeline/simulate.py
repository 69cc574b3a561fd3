"""The pipeline under a deterministic clock: the engine's own schedule and lanes, over stages of modelled durations.

A stage here is a device with one door (lanes.py). Chunks run layer by layer, and waiting decode steps go in between.
A hand-off travels, then waits at the next door, and until its receiver begins, the visit that made it makes no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from heapq import heappop, heappush
from itertools import pairwise
from typing import Protocol

import numpy as np

from rocline.engine.handoff import Reach, RowKind
from rocline.engine.model import PrefillMode
from rocline.engine.pages import Pages
from rocline.pipeline.costs import CostModel, Rates, rows_in
from rocline.pipeline.lanes import Lanes
from rocline.pipeline.placement import CHOICE_RATES, Placement
from rocline.pipeline.schedule import Entry, Job, Limits, Schedule
from rocline.pipeline.timeline import INTERVAL, Intervals, Kind, StageTime, idle_split

DECODE_HISTORY = 4096  # positions before each decoded row, as in the published decode runs
HISTORY_STEP = 512  # a step's time is computed once for histories as near as this
BETTER = 1.01  # a modelled gain below 1 % moves no default

_KINDS = {RowKind.PREFILL: Kind.PREFILL, RowKind.DECODE: Kind.DECODE, RowKind.VERIFY: Kind.VERIFY}


class Timing(Protocol):
    """How long everything takes. A place is one visit on the path."""

    @property
    def devices(self) -> Sequence[int]:
        """The device of each place."""

    def reach(self, mode: PrefillMode, end: int) -> Reach:
        """As Schedule takes it."""

    def rows(self, place: int, job: Job) -> int:
        """Rows that come to a place after the first, where all come. None end the job."""

    def layers_s(self, place: int, job: Job) -> Sequence[float]:
        """Seconds of each layer at a place, one at least. Steps may run between two."""

    def hop_s(self, place: int, job: Job) -> float:
        """Seconds from a place to the next one's door; of a step from the last, until its tokens can go on."""


@dataclass(frozen=True)
class Arrival:
    """A request, which ends after output_tokens. max_tokens: how many it asked for, if that is more."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int = 0
    mode: PrefillMode = "halo"

    @property
    def most_tokens(self) -> int:
        return max(self.output_tokens, self.max_tokens)


@dataclass(frozen=True)
class Outcome:
    """What became of an arrival: token_s has the time of each token."""

    arrival: Arrival
    entry: Entry
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrival.at_s

    @property
    def between_s(self) -> list[float]:
        """Times from each token to the next."""
        return [after - before for before, after in pairwise(self.token_s)]


@dataclass(frozen=True)
class Run:
    """What a simulation gives, besides the outcomes by device: seconds of work, and intervals as timeline.py has them.

    total_s  from 0 to the last end of work
    """

    outcomes: tuple[Outcome, ...]
    total_s: float
    busy_s: tuple[float, ...]
    intervals: Intervals

    @property
    def bubble(self) -> float:
        """Idle share of the devices' time."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.total_s)

    @property
    def shares(self) -> list[float]:
        """Each device's part of all work."""
        return [busy_s / sum(self.busy_s) for busy_s in self.busy_s]

    def idle(self) -> list[StageTime]:
        """Why each device was idle."""
        return idle_split(self.intervals, len(self.busy_s))


def simulate(timing: Timing, arrivals: Sequence[Arrival], limits: Limits, pages: Pages | None = None) -> Run:
    """Serve all arrivals to their ends.

    pages  as many as all of them together need, if not given

    Raises what Schedule.add raises, and RuntimeError if the pipeline stands still with work left.
    """
    if pages is None:
        pages = Pages(len(arrivals))
        pages = Pages(sum(pages.pages_for(arrival.prompt_tokens + arrival.most_tokens) for arrival in arrivals))
    return _Simulation(timing, Schedule(limits, pages, timing.reach), arrivals).run()


@dataclass(eq=False, slots=True)
class _Task:
    """A job at a place or on its way there. It left the place before at sent_s and came at arrived_s."""

    job: Job
    place: int
    rows: int
    layers_s: Sequence[float]
    sent_s: float
    next_layer: int = 0
    arrived_s: float = 0.0
    begin_s: float = -1.0


class _Device:
    """A stage at work: one task at a time, perhaps a chunk that has made way for steps."""

    def __init__(self, n_visits: int) -> None:
        self.lanes: Lanes[_Task] = Lanes(n_visits)
        self.uncopied: set[int] = set()
        self.running: _Task | None = None
        self.interrupted: _Task | None = None
        self.busy_s = self.idle_from_s = 0.0


# What happens at one moment, in order: a device is free for who comes just then.
_LAYER_ENDS, _COMES, _ARRIVES, _IS_THROUGH = range(4)


class _Simulation:
    def __init__(self, timing: Timing, schedule: Schedule, arrivals: Sequence[Arrival]) -> None:
        self.timing, self.schedule = timing, schedule
        n_visits = [0] * (max(timing.devices) + 1)
        self.visit_at: list[int] = []  # which of its device's visits a place is
        for device in timing.devices:
            self.visit_at.append(n_visits[device])
            n_visits[device] += 1
        self.devices = [_Device(n) for n in n_visits]
        self.now_s, self.n_events = 0.0, 0
        self.events: list[tuple[float, int, int, Callable[[], None]]] = []
        self.intervals: list[tuple[float, ...]] = []
        self.outcomes: list[Outcome] = []
        for number, arrival in enumerate(arrivals):
            entry = Entry(number, range(arrival.prompt_tokens), arrival.most_tokens, arrival.mode)
            self.outcomes.append(Outcome(arrival, entry))
            self._at(arrival.at_s, _ARRIVES, partial(self._add, entry))

    def run(self) -> Run:
        while self.events:
            self.now_s, _, _, happens = heappop(self.events)
            happens()
        if not self.schedule.is_idle:
            waiting = [len(device.lanes) for device in self.devices]
            raise RuntimeError(f"the pipeline stands still at {self.now_s} s; tasks at the doors: {waiting}")
        intervals = np.array(self.intervals, INTERVAL)
        return Run(
            tuple(self.outcomes),
            max(device.idle_from_s for device in self.devices),
            tuple(device.busy_s for device in self.devices),
            intervals[np.argsort(intervals["start_ns"], kind="stable")],
        )

    def _at(self, time_s: float, what: int, happens: Callable[[], None]) -> None:
        self.n_events += 1
        heappush(self.events, (time_s, what, self.n_events, happens))

    # The engine's part

    def _add(self, entry: Entry) -> None:
        self.schedule.add(entry, self.now_s)
        self._issue()

    def _issue(self) -> None:
        while job := self.schedule.next_job(self.now_s):
            self._comes(_Task(job, 0, job.n_rows, self.timing.layers_s(0, job), self.now_s))
        self.schedule.retired()
        self.schedule.opened()

    def _through(self, job: Job) -> None:
        for entry, span in zip(job.entries, job.spans, strict=True):
            if span.end == len(entry.ids):
                outcome = self.outcomes[entry.number]
                outcome.token_s.append(self.now_s)
                self.schedule.commit(entry, 0)
                if len(outcome.token_s) == outcome.arrival.output_tokens:
                    self.schedule.end(entry)
        self.schedule.done(job)
        self._issue()

    # The stages' part

    def _comes(self, task: _Task) -> None:
        task.arrived_s = self.now_s
        device = self.devices[self.timing.devices[task.place]]
        device.lanes.put(self.visit_at[task.place], task, task.job.is_step)
        if not device.running:
            self._take(device)

    def _take(self, device: _Device) -> None:
        """Give a free device its next task."""
        if task := device.interrupted:
            if found := device.lanes.next_step():
                self._begin(device, found[1])
                return
            device.interrupted = None
            if task.next_layer < len(task.layers_s):
                self._run(device, task)
                return
            self._leave(device, task)
        if found := device.lanes.next(device.uncopied):
            self._begin(device, found[1])

    def _begin(self, device: _Device, task: _Task) -> None:
        task.begin_s = self.now_s
        wait_from_s = max(device.idle_from_s, task.sent_s)
        if not device.interrupted and wait_from_s < task.arrived_s:
            self._record(Kind.WAIT, wait_from_s, task.arrived_s, task)
        self._run(device, task)
        if task.place and not task.job.is_step:
            before = self.devices[self.timing.devices[task.place - 1]]
            before.uncopied.discard(self.visit_at[task.place - 1])
            if not before.running:
                self._take(before)

    def _run(self, device: _Device, task: _Task) -> None:
        """The next layer of a chunk, or all of a step: nothing goes in between."""
        stop = len(task.layers_s) if task.job.is_step else task.next_layer + 1
        seconds = sum(task.layers_s[task.next_layer : stop])
        device.running, task.next_layer = task, stop
        device.busy_s += seconds
        self._at(self.now_s + seconds, _LAYER_ENDS, partial(self._layer_ends, device, task))

    def _layer_ends(self, device: _Device, task: _Task) -> None:
        device.running, device.idle_from_s = None, self.now_s
        if task.job.is_step:
            self._leave(device, task)
        else:
            device.interrupted = task
        self._take(device)

    def _leave(self, device: _Device, task: _Task) -> None:
        job, place = task.job, task.place + 1
        self._record(_KINDS[job.kind], task.begin_s, self.now_s, task)
        hop_s = self.timing.hop_s(task.place, job)
        n_rows = self.timing.rows(place, job) if place < len(self.timing.devices) else 0
        if not n_rows:
            self._at(self.now_s + (hop_s if job.is_step else 0.0), _IS_THROUGH, partial(self._through, job))
            return
        if not job.is_step:
            device.uncopied.add(self.visit_at[task.place])
        after = _Task(job, place, n_rows, self.timing.layers_s(place, job), self.now_s)
        self._at(self.now_s + hop_s, _COMES, partial(self._comes, after))

    def _record(self, kind: Kind, begin_s: float, end_s: float, task: _Task) -> None:
        device, visit = self.timing.devices[task.place], self.visit_at[task.place]
        ends_ns = round(begin_s * 1e9), round(end_s * 1e9)
        self.intervals.append((*ends_ns, task.job.number, task.rows, device, visit, kind))


class CostTiming:
    """The cost model's times of a placement.

    history  positions before each decoded row, and prompts take no time; None: their own, to HISTORY_STEP
    """

    def __init__(self, model: CostModel, placement: Placement, rates: Rates, history: int | None = None) -> None:
        self.model, self.rates, self.history = model, rates, history
        self.reach = model.reach
        self.visits = [visit for _, visit in placement.path]
        self.devices = [placement.stages[stage].device for stage, _ in placement.path]
        self.step_s = cache(self._step_s)

    def rows(self, place: int, job: Job) -> int:
        if job.is_step:
            return job.n_rows
        if self.history is not None:
            return 0 if place else job.n_rows
        (span,), visit = job.spans, self.visits[place]
        # Those of the first layer's attention; its local window takes 127 more.
        return rows_in(span.reach, span.start, span.end)(-1 if visit.kv_sides else visit.layers[0])

    def layers_s(self, place: int, job: Job) -> Sequence[float]:
        if job.is_step:
            n_rows, history = len(job.spans), self.history
            if history is None:
                history = round(sum(span.start for span in job.spans) / n_rows / HISTORY_STEP) * HISTORY_STEP
            return (self.step_s(place, n_rows, history),)
        if self.history is not None:
            return (0.0,)
        (span,), visit = job.spans, self.visits[place]
        rows_of, history = rows_in(span.reach, span.start, span.end), (span.start + span.end) // 2
        work_s = self.model.work_s
        layers_s = [work_s((layer,), (), rows_of, history, self.rates) for layer in visit.layers if rows_of(layer)]
        layers_s = layers_s or [0.0]
        layers_s[0] += self.rates.step_s + work_s((), visit.kv_sides, rows_of, history, self.rates)
        if place == len(self.visits) - 1 and (n_logits := min(span.n_rows, span.end - span.logits_from)) > 0:
            layers_s[-1] += self.model.head.seconds(n_logits, self.rates)
        return layers_s

    def _step_s(self, place: int, n_rows: int, history: int) -> float:
        """Seconds of one row of each of n_rows requests at a place."""
        visit, is_last = self.visits[place], place == len(self.visits) - 1
        work_s = self.model.work_s(visit.layers, visit.kv_sides, lambda layer: n_rows, history, self.rates, n_rows)
        return self.rates.step_s + work_s + (self.model.head.seconds(n_rows, self.rates) if is_last else 0.0)

    def hop_s(self, place: int, job: Job) -> float:
        """Of a step's last place: the way back to the first, as if the rows took it."""
        after = (place + 1) % len(self.visits)
        return self.row_hop_s(place) * self.rows(after, job) if after or job.is_step else 0.0

    def row_hop_s(self, place: int) -> float:
        """Seconds a row from a place to the next, or back to the first."""
        after = (place + 1) % len(self.visits)
        moves = self.devices[place] != self.devices[after]
        return self.model.hop_row_bytes / self.rates.hop_bytes_per_s if moves else 0.0


@lru_cache(maxsize=1024)
def best_groups(model: CostModel, placement: Placement, n_requests: int, rates: Rates = CHOICE_RATES) -> int:
    """Decode steps to keep in flight: one a request up to one a device, unless the model has a faster number.

    Rows of one step read the weights once; steps in flight keep devices busy at the same time. One device: 1.
    """
    if placement.n_devices == 1:
        return 1
    timing = CostTiming(model, placement, rates, DECODE_HISTORY)
    usual = min(n_requests, placement.n_devices)
    tried = range(1, min(n_requests, 2 * placement.n_devices) + 1)
    rate_of = {n_groups: decode_bound(timing, n_requests, n_groups) for n_groups in tried}
    best = max(tried, key=lambda n_groups: rate_of[n_groups])
    return best if rate_of[best] > BETTER * rate_of[usual] else usual


def decode_bound(timing: CostTiming, n_requests: int, n_groups: int) -> float:
    """Tokens a second of n_requests in n_groups that never wait for each other but where a device is always busy."""
    least, n_larger = divmod(n_requests, n_groups)
    history = DECODE_HISTORY if timing.history is None else timing.history
    alone_s, busy_s = 0.0, [0.0] * (max(timing.devices) + 1)
    for n_rows, count in ((least, n_groups - n_larger), (least + 1, n_larger)):
        if not count:
            continue
        group_s = 0.0
        for place, device in enumerate(timing.devices):
            seconds = timing.step_s(place, n_rows, history)
            busy_s[device] += count * seconds
            group_s += seconds + n_rows * timing.row_hop_s(place)
        alone_s = max(alone_s, group_s)
    return n_requests / max(alone_s, *busy_s)
