"""Modelled times of a placement: stages that take what the cost model says, under a deterministic clock.

Nothing here is measured on a card. The published run (design.md, top) is the only measurement the model is held to;
`published_runs` says how near it comes, and a forecast is worth showing only where that is near enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush

from rocline.engine.model import PrefillMode
from rocline.engine.release import release_config
from rocline.pipeline.costs import CostModel, Rates, rows_in
from rocline.pipeline.placement import Placement, equal_cut

IN_FLIGHT_CHUNKS = 16
# A card's busy rate in the published engine is near the first; 48 is 40 % of a W7900D's matrix peak.
FORECAST_FLOPS = (7e12, 17e12, 30e12, 48e12)
DECODE_HISTORY = 4096  # positions before each decoded row, as in the published decode runs
_DECODE_ROUNDS = 8, 24  # the second less the first: the pipeline is full at the start and at the end

# (prompt tokens, token/s) of the published cold prefills. Its table by chunk size is not at hand: these are the two
# rows there are. Its chunk is taken to be 2,048, the largest it is known to have run.
PUBLISHED = ((261_933, 1553.91), (1_000_411, 732.59))
PUBLISHED_CHUNK_ROWS = 2048
PUBLISHED_CARDS = 8
PUBLISHED_FLOPS = 7.1e12  # of a card, 5.8 % of its matrix peak: the first row's products over cards and seconds
TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class Step:
    """Work of one job on one device, and how long its result then travels to the next step's."""

    device: int
    seconds: float
    hop_s: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """total_s from the first start to the last end; busy_s by device."""

    total_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Idle share of the devices' time."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.total_s)

    @property
    def shares(self) -> list[float]:
        """Each device's part of all work."""
        return [busy_s / sum(self.busy_s) for busy_s in self.busy_s]


def simulate(jobs: Sequence[Sequence[Step]], n_devices: int, in_flight: int) -> Timeline:
    """Run each job's steps in order, one step at a time on a device, first come first served.

    Jobs start in order, at most in_flight at a time; there is no barrier between them.
    """
    queues: list[deque[int]] = [deque() for _ in range(n_devices)]
    running: list[int | None] = [None] * n_devices
    busy_s, now_s = [0.0] * n_devices, 0.0
    done_steps = [0] * len(jobs)
    # (time, kind, job): a step's end (0) before an arrival (1), so that a device is free for who comes just then.
    events = [(0.0, 1, job) for job in range(min(in_flight, len(jobs)))]
    n_started = len(events)
    while events:
        now_s, kind, job = heappop(events)
        step = jobs[job][done_steps[job]]
        if kind == 1:
            queues[step.device].append(job)
        else:
            running[step.device] = None
            done_steps[job] += 1
            if done_steps[job] < len(jobs[job]):
                heappush(events, (now_s + step.hop_s, 1, job))
            elif n_started < len(jobs):
                heappush(events, (now_s, 1, n_started))
                n_started += 1
        if running[step.device] is None and queues[step.device]:
            job = running[step.device] = queues[step.device].popleft()
            seconds = jobs[job][done_steps[job]].seconds
            busy_s[step.device] += seconds
            heappush(events, (now_s + seconds, 0, job))
    return Timeline(now_s, tuple(busy_s))


def prefill(
    model: CostModel,
    placement: Placement,
    prompt_tokens: int,
    chunk_rows: int,
    rates: Rates,
    mode: PrefillMode = "halo",
) -> Timeline:
    """A cold prompt up to its first token, the halo's tail included."""
    reach, path = model.reach(mode, prompt_tokens), placement.path
    devices = [placement.stages[stage].device for stage, _ in path]
    jobs = []
    for start in range(0, prompt_tokens, chunk_rows):
        stop = min(start + chunk_rows, prompt_tokens)
        rows_of, history, steps = rows_in(reach, start, stop), (start + stop) // 2, list[Step]()
        for at, (_, visit) in enumerate(path):
            seconds = model.work_s(visit.layers, visit.kv_sides, rows_of, history, rates)
            if not seconds:
                break  # no row of this chunk goes on
            if at == len(path) - 1:
                seconds += model.head.seconds(1, rates)
            sent_rows = rows_of(visit.layers[-1])
            moves = at + 1 < len(path) and devices[at + 1] != devices[at]
            hop_s = sent_rows * model.hop_row_bytes / rates.hop_bytes_per_s if moves else 0.0
            steps.append(Step(devices[at], seconds + rates.step_s, hop_s))
        jobs.append(steps)
    return simulate(jobs, placement.n_devices, IN_FLIGHT_CHUNKS)


def prefill_rate(timeline: Timeline, prompt_tokens: int) -> float:
    return prompt_tokens / timeline.total_s


def decode_rate(
    model: CostModel, placement: Placement, n_requests: int, n_groups: int, rates: Rates, history: int = DECODE_HISTORY
) -> float:
    """Tokens a second of n_requests together, in n_groups that are in flight at the same time. Without drafts.

    Raises ValueError for more groups than requests.
    """
    if not 1 <= n_groups <= n_requests:
        raise ValueError(f"{n_groups} groups of {n_requests} requests: must be 1 to {n_requests}")
    sizes = [n_requests // n_groups + (group < n_requests % n_groups) for group in range(n_groups)]
    steps = {size: decode_steps(model, placement, size, rates, history) for size in set(sizes)}
    fewer, more = (
        simulate([steps[size] * n_rounds for size in sizes], placement.n_devices, n_groups).total_s
        for n_rounds in _DECODE_ROUNDS
    )
    return n_requests * (_DECODE_ROUNDS[1] - _DECODE_ROUNDS[0]) / (more - fewer)


def decode_steps(model: CostModel, placement: Placement, n_rows: int, rates: Rates, history: int) -> list[Step]:
    """One token of each of n_rows requests: every visit, and the way back to the first."""
    path = placement.path
    devices = [placement.stages[stage].device for stage, _ in path]
    hop_s = n_rows * model.hop_row_bytes / rates.hop_bytes_per_s
    steps = []
    for at, (_, visit) in enumerate(path):
        seconds = rates.step_s + model.work_s(
            visit.layers, visit.kv_sides, lambda layer: n_rows, history, rates, n_rows
        )
        if at == len(path) - 1:
            seconds += model.head.seconds(n_rows, rates)
        moves = devices[(at + 1) % len(path)] != devices[at]
        steps.append(Step(devices[at], seconds, hop_s if moves else 0.0))
    return steps


def stage_shares(
    model: CostModel, placement: Placement, prompt_tokens: int, chunk_rows: int, rates: Rates
) -> tuple[list[float], list[float]]:
    """Each stage's part of the work of a `halo` prefill, and of one decoded row."""
    apart = replace(placement, stages=tuple(replace(s, device=at) for at, s in enumerate(placement.stages)))
    decoded = decode_steps(model, apart, 1, rates, min(DECODE_HISTORY, prompt_tokens))
    return prefill(model, apart, prompt_tokens, chunk_rows, rates).shares, simulate(
        [decoded], len(apart.stages), 1
    ).shares


@dataclass(frozen=True)
class PublishedRun:
    """One row of the published engine's figures beside the model's."""

    prompt_tokens: int
    measured_rate: float
    modelled_rate: float

    @property
    def error(self) -> float:
        return self.modelled_rate / self.measured_rate - 1


@cache
def published_runs() -> tuple[float, tuple[PublishedRun, ...]]:
    """(busy FLOP/s of a card, the published rows as modelled), of the release on that engine.

    The published 7.1 TFLOP/s is a mean over cards and run, idle time included, so the first row checks the count of
    a token's products, and fixes the rate that a card must have had while it was busy. The second row is then
    predicted. Taking 7.1 as the busy rate cannot reproduce both rows, whatever the history costs: five layers alone
    would take 0.61 ms a token, all of the first row's time. The engine is taken to score the whole history in every
    index source, as the released reference does: with the candidates alone, layer 20's stage would be 40 % faster
    at 1,000,411 tokens than was measured.
    """
    config = release_config()
    model, useful = CostModel(config, candidates_only=False), CostModel(config)
    placement = equal_cut(config, PUBLISHED_CARDS)

    def rate(prompt_tokens: int, flops_per_s: float) -> float:
        line = prefill(model, placement, prompt_tokens, PUBLISHED_CHUNK_ROWS, Rates(flops_per_s), "full")
        return prefill_rate(line, prompt_tokens)

    first_tokens = PUBLISHED[0][0]
    wanted = PUBLISHED_FLOPS * PUBLISHED_CARDS / useful.row_flops(first_tokens // 2)
    busy_flops = PUBLISHED_FLOPS
    for _ in range(4):  # nearly proportional: the third step changes nothing that is printed
        busy_flops *= wanted / rate(first_tokens, busy_flops)
    return busy_flops, tuple(PublishedRun(tokens, measured, rate(tokens, busy_flops)) for tokens, measured in PUBLISHED)


def reproduces_published() -> bool:
    """Whether every published row is within TOLERANCE: a forecast is shown only then."""
    return all(abs(run.error) <= TOLERANCE for run in published_runs()[1])
