"""The pipeline under a deterministic clock: it never stands still, keeps its bounds and reaches its goals."""

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocline.engine.handoff import Reach, RowKind, RowSpan
from rocline.engine.pages import Pages
from rocline.engine.release import release_config
from rocline.pipeline.costs import CostModel, Rates
from rocline.pipeline.forecast import decode_rate
from rocline.pipeline.placement import CHOICE_RATES, Placer, equal_cut
from rocline.pipeline.schedule import Job, Limits
from rocline.pipeline.simulate import (
    DECODE_HISTORY,
    Arrival,
    CostTiming,
    best_groups,
    decode_bound,
    simulate,
)
from rocline.pipeline.timeline import Kind, all_stages

RELEASE = CostModel(release_config())


@cache
def placed(kind, context, chunk_rows=1024):
    layers = lambda visits: sum(len(visit.layers) for visit in visits)  # noqa: E731
    return Placer(RELEASE, kind, range(8), layers, [6] * 8, context, chunk_rows).choose()


def make_limits(**changes):
    given_ = {"chunk_rows": 4, "mixed_chunk_rows": 4, "inflight_chunks": 16, "running": 64, "queue": 64}
    return Limits(**({"n_groups": lambda n_requests: n_requests, **given_} | changes))


class FixedTiming:
    """Layers of given seconds at every place; the halo's places take the last rows of a prefill alone."""

    def __init__(self, devices, seconds_of, hop_of=lambda place, job: 0.0, halo_from=None):
        self.devices = devices
        self._seconds_of, self._hop_of = seconds_of, hop_of
        self._halo_from = len(devices) if halo_from is None else halo_from

    def reach(self, mode, end):
        return Reach(end, window=2, n_layers=1, first_layer=2)

    def rows(self, place, job):
        (*_, span) = job.spans
        goes_on = job.is_step or place < self._halo_from or span.end == span.reach.end
        return job.n_rows if goes_on else 0

    def layers_s(self, place, job):
        return self._seconds_of(place, job)

    def hop_s(self, place, job):
        return self._hop_of(place, job)


# No deadlock, and the bounds of any schedule


@st.composite
def pipelines(draw):
    """(timing, arrivals, limits, pages): any placement, any durations, pages for little more than one request."""
    devices = draw(st.lists(st.integers(0, 4), min_size=1, max_size=9), label="devices")
    devices = [sorted(set(devices)).index(device) for device in devices]
    short = st.sampled_from([0.0, 0.1, 1.0, 3.0])
    layers = draw(st.lists(st.lists(short, min_size=1, max_size=3), min_size=1, max_size=7), label="layers_s")
    hops = draw(st.lists(short, min_size=1, max_size=3), label="hop_s")
    timing = FixedTiming(
        devices,
        lambda place, job: layers[(7 * place + job.number) % len(layers)],
        lambda place, job: hops[(5 * place + job.number) % len(hops)],
        draw(st.integers(1, len(devices)), label="halo_from"),
    )
    arrival = st.builds(Arrival, st.floats(0, 30), st.integers(1, 30), st.integers(1, 20))
    limits = make_limits(
        inflight_chunks=draw(st.integers(1, 20)),
        mixed_inflight_chunks=draw(st.integers(1, 9)),
        running=draw(st.integers(1, 6)),
        mixed_chunk_rows=2,
        reserve_tokens=3,
    )
    return timing, draw(st.lists(arrival, min_size=1, max_size=8)), limits, Pages(draw(st.integers(7, 20)), 8)


@settings(max_examples=80, deadline=None)
@given(pipelines())
def test_no_placement_stands_still_with_one_uncopied_hand_off_a_visit(pipeline):
    """simulate() raises where nothing can go on; every request gets all its tokens, in order."""
    timing, arrivals, limits, pages = pipeline
    run = simulate(timing, arrivals, limits, pages)
    for outcome, arrival in zip(run.outcomes, arrivals, strict=True):
        assert len(outcome.token_s) == arrival.output_tokens
        assert arrival.at_s <= outcome.token_s[0]
        assert min(outcome.between_s, default=0) >= 0
    assert pages.n_free == pages.n_pages
    split = run.idle()
    for time, busy_s in zip(split, run.busy_s, strict=True):
        assert time.busy == pytest.approx(busy_s * 1e9, abs=len(run.intervals))
    work = run.intervals[run.intervals["kind"] != Kind.WAIT]
    for device in range(len(run.busy_s)):  # one at a time, steps inside chunks aside
        mine = work[(work["stage"] == device) & (work["kind"] == Kind.PREFILL)]
        assert all(after["start_ns"] >= before["end_ns"] for before, after in pairwise(mine))


def test_the_simulation_keeps_its_bounds(rng):
    """Of one prompt's chunks: every piece of work once, nothing faster than alone, nothing idle for no reason."""
    for _ in range(50):
        n_places, n_chunks, in_flight = (int(n) for n in rng.integers(1, 9, size=3))
        devices = [int(device) for device in rng.integers(4, size=n_places)]
        devices = [sorted(set(devices)).index(device) for device in devices]
        seconds, hops = rng.random((n_places, n_chunks, 2)), rng.random((n_places, n_chunks))
        hops[-1] = 0
        timing = FixedTiming(
            devices,
            lambda place, job, seconds=seconds: seconds[place, job.number - 1].tolist(),
            lambda place, job, hops=hops: float(hops[place, job.number - 1]),
        )
        limits = make_limits(chunk_rows=1, inflight_chunks=in_flight)
        run, again = (simulate(timing, [Arrival(0.0, n_chunks, 1)], limits) for _ in range(2))
        assert (run.total_s, run.busy_s) == (again.total_s, again.busy_s)
        assert (run.intervals == again.intervals).all()
        for device, busy_s in enumerate(run.busy_s):
            assert busy_s == pytest.approx(seconds[[place == device for place in devices]].sum())
        alone_s = seconds.sum(axis=(0, 2)) + hops.sum(axis=0)
        assert max(*run.busy_s, *alone_s) <= run.total_s + 1e-9
        assert run.total_s <= alone_s.sum() + 1e-9
        assert run.total_s == run.outcomes[0].token_s[0]
        if in_flight == 1:
            assert run.total_s == pytest.approx(alone_s.sum())


def test_steps_run_between_layers_and_before_a_finished_chunk_goes_on():
    timing = FixedTiming([0, 1], lambda place, job: [0.25] if job.is_step else [4.0, 4.0, 4.0])
    run = simulate(timing, [Arrival(0.0, 1, 40), Arrival(13.0, 40, 1)], make_limits(mixed_inflight_chunks=1))
    waits = [seconds for seconds in run.outcomes[0].between_s if seconds > 0.5]
    assert waits
    assert max(waits) <= 4 + 2 * 0.25 + 4  # a layer at either stage at most
    work = run.intervals[run.intervals["stage"] == 0]
    chunk = work[(work["kind"] == Kind.PREFILL) & (work["start_ns"] >= 13e9)][0]
    inside = (work["start_ns"] > chunk["start_ns"]) & (work["end_ns"] <= chunk["end_ns"])
    after_s = (work["start_ns"][inside] - chunk["start_ns"]) / 1e9
    assert set(after_s % 4) <= {0, 0.25, 0.5}  # after a layer, or that and what other steps took
    assert min(after_s) >= 4
    assert max(after_s) >= 12  # the last layer's


def test_a_visit_makes_no_chunk_while_its_last_one_is_not_copied():
    """The second stage takes three times as long: the first is never two chunks ahead of it."""
    timing = FixedTiming([0, 1], lambda place, job: [1.0 + 2 * place])
    run = simulate(timing, [Arrival(0.0, 40, 1)], make_limits(chunk_rows=4))
    start_s, end_s = ({}, {})
    for row in run.intervals:
        start_s[int(row["stage"]), int(row["job"])] = row["start_ns"] * 1e-9
        end_s[int(row["stage"]), int(row["job"])] = row["end_ns"] * 1e-9
    for job in range(2, 11):
        assert start_s[0, job] >= start_s[1, job - 1]
    assert run.total_s == pytest.approx(1 + 10 * 3)


# Idle time


def test_bubble_of_equal_stages():
    """128 chunks in one pass over 8 stages: only the fill and its end are idle."""
    timing = FixedTiming(range(8), lambda place, job: [0.25] * 4)
    run = simulate(timing, [Arrival(0.0, 128 * 4, 1)], make_limits())
    assert run.total_s == 128 + 7
    assert run.bubble <= 0.055
    total = all_stages(run.idle())
    assert total.fill == 8 * 7 * 1e9
    assert total.busy + total.fill == total.total


def test_idle_time_is_named():
    """A stage twice as slow, hops, and a second visit that the last chunk alone makes."""
    slow = FixedTiming([0, 1, 2], lambda place, job: [2.0 if place == 1 else 1.0])
    times = simulate(slow, [Arrival(0.0, 40, 1)], make_limits()).idle()
    assert (times[1].imbalance, times[2].imbalance) == (0, 9e9)
    hops = FixedTiming([0, 1], lambda place, job: [1.0], lambda place, job: 0.5)
    times = simulate(hops, [Arrival(0.0, 40, 1)], make_limits()).idle()
    assert (times[1].transport, times[1].fill) == (10 * 0.5e9, 1e9)
    halo = FixedTiming([0, 1, 0, 1], lambda place, job: [1.0], halo_from=2)
    times = simulate(halo, [Arrival(0.0, 40, 1)], make_limits()).idle()
    assert [time.halo_tail for time in times] == [1e9, 1e9]


# The cost model's times


def test_a_prompt_s_rows_stop_where_the_halo_does():
    timing = CostTiming(RELEASE, placed("folded", 1 << 20), Rates(30e12))
    reach = RELEASE.reach("halo", 100_000)
    first, last = (
        Job(0, RowKind.PREFILL, (RowSpan(0, start, 1000, RowKind.PREFILL, reach, 99_999),), ()) for start in (0, 99_000)
    )
    assert [timing.rows(place, first) for place in range(16)] == [1000] * 8 + [0] * 8
    rows = [timing.rows(place, last) for place in range(16)]
    assert rows[:9] == [1000] * 9
    assert rows == sorted(rows, reverse=True)
    assert 1 <= rows[-1] < 400
    full_s, head_s = (sum(timing.layers_s(15, job)) for job in (last, last))
    assert full_s == head_s > RELEASE.head.seconds(1, timing.rates)
    assert timing.hop_s(15, last) == 0
    assert timing.hop_s(0, last) == pytest.approx(1000 * RELEASE.hop_row_bytes / 16e9)


# A long prefill beside decoding and new requests

LONG_TOKENS = 1_000_411
RATES_30 = Rates(30e12)


@pytest.fixture(scope="module")
def beside_a_long_prefill():
    """(timing, the long request alone, all requests): four decode all the time, eight short ones come."""
    placement = placed("folded", LONG_TOKENS)
    timing = CostTiming(RELEASE, placement, RATES_30)
    limits = make_limits(
        chunk_rows=1024,
        mixed_chunk_rows=256,
        running=16,
        n_groups=lambda n_requests: best_groups(RELEASE, placement, n_requests),
    )
    alone = simulate(timing, [Arrival(0.0, LONG_TOKENS, 1)], limits)
    decoding = [Arrival(0.0, 1000, 1500)] * 4
    short = [Arrival(at_s, 1000, 1) for at_s in (3, 20, 45, 70, 95, 120, 145, 170)]
    together = simulate(timing, [*decoding, Arrival(2.0, LONG_TOKENS, 1), *short], limits)
    return timing, alone.outcomes[0], together.outcomes


def test_a_long_prefill_keeps_most_of_its_rate(beside_a_long_prefill):
    _, alone, outcomes = beside_a_long_prefill
    assert all(outcome.token_s[-1] > outcomes[4].token_s[0] for outcome in outcomes[:4])
    assert alone.ttft_s / outcomes[4].ttft_s >= 0.6


def test_decoding_goes_on_beside_a_long_prefill(beside_a_long_prefill):
    _, _, outcomes = beside_a_long_prefill
    begin_s, end_s = 3.0, outcomes[4].token_s[0]
    between_s = sorted(
        after - before
        for outcome in outcomes[:4]
        for before, after in pairwise(outcome.token_s)
        if before > begin_s and after < end_s
    )
    assert len(between_s) > 4000
    assert between_s[int(0.99 * len(between_s))] <= 0.3


def test_a_short_request_starts_within_two_pipeline_depths(beside_a_long_prefill):
    """A depth is the time of one mixed chunk through all visits, with no history and nothing to wait for."""
    timing, _, outcomes = beside_a_long_prefill
    chunk = RowSpan(0, 0, 256, RowKind.PREFILL, RELEASE.reach("full", 256), 255)
    job = Job(0, RowKind.PREFILL, (chunk,), ())
    depth_s = sum(sum(timing.layers_s(place, job)) + timing.hop_s(place, job) for place in range(16))
    short = outcomes[5:]
    assert all(outcome.token_s[0] < outcomes[4].token_s[0] for outcome in short)
    assert max(outcome.ttft_s for outcome in short) <= 2 * depth_s


# Decode groups


@pytest.mark.parametrize(("kind", "context"), [("folded", 1 << 20), ("contiguous", 65_536)])
def test_the_best_number_of_groups_is_nearly_the_best_simulated(kind, context):
    placement = placed(kind, context)
    for n_requests in (5, 8, 9, 20, 64):
        chosen = best_groups(RELEASE, placement, n_requests)
        tried = {1, chosen, min(n_requests, 8), *range(4, min(n_requests, 10), 3)}
        rate_of = {n_groups: decode_rate(RELEASE, placement, n_requests, n_groups, CHOICE_RATES) for n_groups in tried}
        assert rate_of[chosen] >= 0.9 * max(rate_of.values())


def test_groups_of_few_requests_and_of_one_card():
    placement = placed("folded", 1 << 20)
    assert [best_groups(RELEASE, placement, n_requests) for n_requests in (1, 3, 8)] == [1, 3, 8]
    one = Placer(RELEASE, "folded", [0, 0], lambda visits: 0, [1, 1], 4096, 1024).choose()
    assert best_groups(RELEASE, one, 8) == 1
    assert best_groups(RELEASE, equal_cut(RELEASE.config, 8), 8) == 4  # two a step: its fullest card reads less


@pytest.mark.parametrize(("n_requests", "n_groups"), [(1, 1), (8, 1), (8, 8), (9, 4), (64, 8)])
def test_no_rate_is_above_its_bound(n_requests, n_groups):
    placement = placed("folded", 65_536)
    bound = decode_bound(CostTiming(RELEASE, placement, CHOICE_RATES, DECODE_HISTORY), n_requests, n_groups)
    rate = decode_rate(RELEASE, placement, n_requests, n_groups, CHOICE_RATES)
    assert 0.9 * bound <= rate <= 1.03 * bound  # the count of tokens ends in the middle of a step of several
