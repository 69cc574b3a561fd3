"""python -m rocline.tools.bench_schedule: the schedule's own cost here, and what it makes of the release's cost model.

The first line is measured on this machine; all others are modelled, under a deterministic clock, and measured nowhere.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

from rocline.engine.handoff import RowKind, RowSpan, reach_for
from rocline.engine.pages import Pages
from rocline.engine.release import release_config
from rocline.pipeline.costs import CostModel, Rates
from rocline.pipeline.forecast import FORECAST_FLOPS, IN_FLIGHT_CHUNKS, decode_rate, prefill
from rocline.pipeline.lanes import Lanes
from rocline.pipeline.placement import CHOICE_RATES, Placement, equal_cut
from rocline.pipeline.plan import GIB, KV_TOKENS, Request, make_plan
from rocline.pipeline.schedule import Entry, Job, Limits, Schedule
from rocline.pipeline.simulate import Arrival, CostTiming, Outcome, best_groups, simulate
from rocline.pipeline.timeline import all_stages

N_STAGES = 8
DEVICE_BYTES = 48 * GIB
PROMPTS = (261_933, 1_000_411)
CHUNK_ROWS, LARGE_CHUNK_ROWS, MIXED_CHUNK_ROWS = 1024, 2048, 256  # the defaults, and what the comparisons take
MIXED_RATES = Rates(30e12)
N_DECODING, DECODING_PROMPT, SHORT_PROMPT = 4, 1000, 1000
N_SHORT = 12  # requests that come during the long prefill, one at a time
DECODE_REQUESTS = (1, 8, 64)

Tell = Callable[..., None]


def main(argv: Sequence[str] | None = None) -> int:
    """Print every figure: a table, or JSON lines, to stdout."""
    parser = argparse.ArgumentParser(prog="bench_schedule", description=__doc__)
    parser.add_argument(
        "--prompt-tokens", type=int, nargs="+", default=PROMPTS, metavar="N", help="cold prompts (default %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=400, help="of each request when timed (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    args = parser.parse_args(argv)

    def tell(what: str, **facts: object) -> None:
        facts = {name: round(fact, 3) if isinstance(fact, float) else fact for name, fact in facts.items()}
        rest = "  ".join(f"{name} {fact}" for name, fact in facts.items())
        print(json.dumps({"what": what, **facts}) if args.json else f"{what:44}  {rest}", flush=True)

    model = CostModel(release_config())
    for n_requests in (8, 64):
        tell(f"measured: overhead of {n_requests} requests", us_per_stage_step=overhead_us(n_requests, args.tokens))
    cuts = {tokens: folded_cut(model, tokens) for tokens in args.prompt_tokens}
    compare_prefill(model, cuts, tell)
    longest = max(cuts)
    beside_prefill(model, cuts[longest], longest, tell)
    compare_groups(model, cuts[longest], tell)
    return 0


def folded_cut(model: CostModel, context: int) -> Placement:
    """The release's, on eight cards of 48 GiB."""
    request = Request(N_STAGES, DEVICE_BYTES, N_STAGES, "folded", context, KV_TOKENS, CHUNK_ROWS)
    return make_plan(model.config, request).placement


def overhead_us(n_requests: int, n_tokens: int) -> float:
    """Schedule and lanes alone, per step of a stage: requests decode in a group a stage, no stage does anything."""
    limits = Limits(CHUNK_ROWS, MIXED_CHUNK_ROWS, IN_FLIGHT_CHUNKS, n_requests, 0, lambda n_decoding: N_STAGES)
    pages = Pages(n_requests * Pages(1).pages_for(DECODING_PROMPT + n_tokens))
    schedule = Schedule(limits, pages, partial(reach_for, release_config().text_config))
    doors: list[Lanes[tuple[Job, int]]] = [Lanes(2) for _ in range(N_STAGES)]
    n_steps, last = 0, 2 * N_STAGES - 1

    def issue() -> None:
        while job := schedule.next_job(time.monotonic()):
            doors[0].put(0, (job, 0), job.is_step)
        schedule.retired()
        schedule.opened()

    began_s = time.perf_counter()
    for number in range(n_requests):
        schedule.add(Entry(number, range(DECODING_PROMPT), n_tokens), time.monotonic())
    issue()
    while not schedule.is_idle:
        for door in doors:
            if not (found := door.next()):
                continue
            n_steps += 1
            _, (job, place) = found
            if place < last:
                visit, stage = divmod(place + 1, N_STAGES)
                doors[stage].put(visit, (job, place + 1), job.is_step)
                continue
            for entry, span in zip(job.entries, job.spans, strict=True):
                if span.end == len(entry.ids):
                    schedule.commit(entry, 0)
                    if entry.n_output == n_tokens:
                        schedule.end(entry)
            schedule.done(job)
            issue()
    return (time.perf_counter() - began_s) * 1e6 / n_steps


def compare_prefill(model: CostModel, cuts: dict[int, Placement], tell: Tell) -> None:
    """Folded against five layers a card, each prompt on each cut; and where the idle time goes."""
    contiguous = equal_cut(model.config, N_STAGES)
    for context, folded in cuts.items():
        for tokens in cuts:
            for flops_per_s in FORECAST_FLOPS:
                rates = Rates(flops_per_s)
                run = prefill(model, folded, tokens, LARGE_CHUNK_ROWS, rates)
                slow = prefill(model, contiguous, tokens, LARGE_CHUNK_ROWS, rates)
                shares = {name: f"{share:.1%}" for name, share in all_stages(run.idle()).shares().items()}
                tell(
                    f"modelled: {tokens} tokens, cut for {context}",
                    tflops=flops_per_s / 1e12,
                    tokens_per_s=tokens / run.total_s,
                    times_contiguous=slow.total_s / run.total_s,
                    **shares,
                )


def beside_prefill(model: CostModel, placement: Placement, prompt_tokens: int, tell: Tell) -> None:
    """Four requests decode, and short ones come, while a long prompt is run: how each of them fares."""
    timing = CostTiming(model, placement, MIXED_RATES)

    def limits(n_groups: int) -> Limits:
        return Limits(CHUNK_ROWS, MIXED_CHUNK_ROWS, IN_FLIGHT_CHUNKS, 2 * N_STAGES, 0, lambda n_decoding: n_groups)

    alone = simulate(timing, [Arrival(0.0, prompt_tokens, 1)], limits(1)).outcomes[0]
    usual = best_groups(model, placement, N_DECODING)
    for n_groups in sorted({1, 2, N_DECODING, usual}):
        # They decode faster once the long prefill is over: as many tokens as it takes to outlast it.
        decoding = [Arrival(0.0, DECODING_PROMPT, 30 + int(alone.ttft_s * 12))] * N_DECODING
        at_s = (2.0 + alone.ttft_s * place / N_SHORT for place in range(1, N_SHORT + 1))
        arrivals = [*decoding, Arrival(2.0, prompt_tokens, 1), *(Arrival(s, SHORT_PROMPT, 1) for s in at_s)]
        outcomes = simulate(timing, arrivals, limits(n_groups)).outcomes
        long, short = outcomes[N_DECODING], outcomes[N_DECODING + 1 :]
        between_s = sorted(_between_s(outcomes[:N_DECODING], long))
        tell(
            f"modelled: beside {prompt_tokens} tokens, G={n_groups}{' (chosen)' if n_groups == usual else ''}",
            rate_kept=alone.ttft_s / long.ttft_s,
            decoded_until_its_end=min(o.token_s[-1] for o in outcomes[:N_DECODING]) > long.token_s[0],
            ms_between_tokens_p50=median(between_s) * 1e3,
            p99=between_s[int(0.99 * len(between_s))] * 1e3,
            short_ttft_s_most=max(outcome.ttft_s for outcome in short),
            two_depths_s=2 * depth_s(model, timing),
        )


def _between_s(decoding: Sequence[Outcome], long: Outcome) -> list[float]:
    """Times between tokens while the long prompt is run."""
    pairs = [pair for outcome in decoding for pair in pairwise(outcome.token_s)]
    return [after - before for before, after in pairs if before > long.arrival.at_s and after < long.token_s[0]]


def depth_s(model: CostModel, timing: CostTiming) -> float:
    """Seconds of one mixed chunk of a new request through all visits, where it waits for nothing."""
    n_rows = MIXED_CHUNK_ROWS
    span = RowSpan(0, 0, n_rows, RowKind.PREFILL, model.reach("full", n_rows), n_rows - 1)
    job = Job(0, RowKind.PREFILL, (span,), ())
    return sum(sum(timing.layers_s(place, job)) + timing.hop_s(place, job) for place in range(len(timing.devices)))


def compare_groups(model: CostModel, placement: Placement, tell: Tell) -> None:
    """Tokens a second of all requests, by groups in flight."""
    for n_requests in DECODE_REQUESTS:
        rates = {
            f"G={n_groups}": round(decode_rate(model, placement, n_requests, n_groups, CHOICE_RATES), 1)
            for n_groups in range(1, min(n_requests, N_STAGES) + 1)
        }
        tell(
            f"modelled: decode of {n_requests}, token/s",
            tflops=CHOICE_RATES.flops_per_s / 1e12,
            chosen=best_groups(model, placement, n_requests),
            **rates,
        )


if __name__ == "__main__":
    sys.exit(main())
