"""Modelled times of a placement: stages that take what the cost model says, under a deterministic clock.

Nothing here is measured on a card. The published run (design.md, top) is the only measurement the model is held to;
`published_runs` says how near it comes, and a forecast is worth showing only where that is near enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from rocline.engine.model import PrefillMode
from rocline.engine.release import release_config
from rocline.pipeline.costs import CostModel, Rates
from rocline.pipeline.placement import Placement, equal_cut
from rocline.pipeline.schedule import MAX_STEP_ROWS, Limits
from rocline.pipeline.simulate import DECODE_HISTORY, Arrival, CostTiming, Run, simulate

IN_FLIGHT_CHUNKS = 16
# A card's busy rate in the published engine is near the first. The last is 37 % of a W7900D's matrix peak: what a whole
# prefill of 1,000,411 tokens was of an H200's BF16 rate (docs/results.md).
FORECAST_FLOPS = (7e12, 17e12, 30e12, 45e12)
_DECODE_TOKENS = 8, 40  # from everyone's 9th to somebody's 40th the pipeline is full

# (prompt tokens, token/s) of the published cold prefills. Its table by chunk size is not at hand: these are the two
# rows there are. Its chunk is taken to be 2,048, the largest it is known to have run.
PUBLISHED = ((261_933, 1553.91), (1_000_411, 732.59))
PUBLISHED_CHUNK_ROWS = 2048
PUBLISHED_CARDS = 8
PUBLISHED_FLOPS = 7.1e12  # of a card, 5.8 % of its matrix peak: the first row's products over cards and seconds
TOLERANCE = 0.15


def prefill(
    model: CostModel,
    placement: Placement,
    prompt_tokens: int,
    chunk_rows: int,
    rates: Rates,
    mode: PrefillMode = "halo",
) -> Run:
    """A cold prompt up to its first token, the halo's tail included."""
    return simulate(
        CostTiming(model, placement, rates), [Arrival(0.0, prompt_tokens, 1, mode=mode)], _limits(chunk_rows, 1)
    )


def prefill_rate(run: Run, prompt_tokens: int) -> float:
    return prompt_tokens / run.total_s


def decode_rate(
    model: CostModel, placement: Placement, n_requests: int, n_groups: int, rates: Rates, history: int = DECODE_HISTORY
) -> float:
    """Tokens a second of n_requests together, in n_groups that are in flight at the same time. Without drafts.

    Raises ValueError for more groups than requests.
    """
    if not 1 <= n_groups <= n_requests:
        raise ValueError(f"{n_groups} groups of {n_requests} requests: must be 1 to {n_requests}")
    arrivals = [Arrival(0.0, 1, _DECODE_TOKENS[1])] * n_requests
    run = simulate(CostTiming(model, placement, rates, history), arrivals, _limits(n_requests, n_groups))
    begin_s = max(outcome.token_s[_DECODE_TOKENS[0]] for outcome in run.outcomes)
    end_s = min(outcome.token_s[-1] for outcome in run.outcomes)
    return sum(begin_s < at_s <= end_s for outcome in run.outcomes for at_s in outcome.token_s) / (end_s - begin_s)


def _limits(chunk_rows: int, n_groups: int) -> Limits:
    return Limits(chunk_rows, chunk_rows, IN_FLIGHT_CHUNKS, MAX_STEP_ROWS, 0, lambda n_requests: n_groups)


def stage_shares(
    model: CostModel, placement: Placement, prompt_tokens: int, chunk_rows: int, rates: Rates
) -> tuple[list[float], list[float]]:
    """Each stage's part of the work of a `halo` prefill, and of one decoded row."""
    apart = replace(placement, stages=tuple(replace(s, device=at) for at, s in enumerate(placement.stages)))
    timing, decode_s = CostTiming(model, apart, rates), [0.0] * len(apart.stages)
    for place, stage in enumerate(timing.devices):
        decode_s[stage] += timing.step_s(place, 1, min(DECODE_HISTORY, prompt_tokens))
    shares = [seconds / sum(decode_s) for seconds in decode_s]
    return prefill(model, apart, prompt_tokens, chunk_rows, rates).shares, shares


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
        run = prefill(model, placement, prompt_tokens, PUBLISHED_CHUNK_ROWS, Rates(flops_per_s), "full")
        return prefill_rate(run, prompt_tokens)

    first_tokens = PUBLISHED[0][0]
    wanted = PUBLISHED_FLOPS * PUBLISHED_CARDS / useful.row_flops(first_tokens // 2)
    busy_flops = PUBLISHED_FLOPS
    for _ in range(4):  # nearly proportional: the third step changes nothing that is printed
        busy_flops *= wanted / rate(first_tokens, busy_flops)
    return busy_flops, tuple(PublishedRun(tokens, measured, rate(tokens, busy_flops)) for tokens, measured in PUBLISHED)


def reproduces_published() -> bool:
    """Whether every published row is within TOLERANCE: a forecast is shown only then."""
    return all(abs(run.error) <= TOLERANCE for run in published_runs()[1])
