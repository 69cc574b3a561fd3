"""The shipped traces: recorded from the release's shapes, served by the planned slab, and not stale."""

import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

from rocline.arena.classes import align_up
from rocline.arena.replay import Plan, plan, repeated, replay
from rocline.arena.trace import TraceEvent, read_csv

FOLDER = Path(__file__).resolve().parent.parent / "data" / "traces"
CHUNK_ROWS = (256, 512, 1024, 2048)
STAGES = range(8)
COMPUTE, COPY = "compute", "copy"
KNOWN_LOOSE = {(256, 7): 1.07}  # the last stage's halo, where each layer drops rows; by chunk rows and stage


def trace_path(chunk_rows: int, stage: int) -> Path:
    return FOLDER / f"hip-shapes-chunk{chunk_rows}-stage{stage}.csv"


def check_served(events: list[TraceEvent], planned: Plan) -> None:
    report = replay(events, planned.slab_bytes)
    assert (report.failures, report.waits) == (0, 0), report.first_failure
    assert report.n_takes == sum(event.action == "take" for event in events)


def delayed(events: list[TraceEvent], after: int) -> list[TraceEvent]:
    """The same requests on a device: hand-offs arrive on a copy stream, and work ends `after` events late.

    Both streams touch an arriving hand-off, so that its release crosses from one to the other.
    """

    def on_device(event: TraceEvent) -> TraceEvent:
        arriving = event.action == "take" and event.operator == "copy"
        late = after if event.action == "release" else 0
        return replace(event, stream=COPY if arriving else COMPUTE, completed_after_ns=late)

    return [on_device(event) for event in events]


def peak_of_used_and_crossed(events: list[TraceEvent]) -> int:
    """Most bytes lent, or waiting for both streams, at once."""
    taken_on, steps = {}, []
    for event in events:
        size_bytes = align_up(event.n_bytes)
        if event.action == "take":
            taken_on[event.span] = event.stream
            steps.append((event.time_ns, size_bytes))
        else:
            crossed = taken_on[event.span] != event.stream
            steps.append((event.time_ns + crossed * event.completed_after_ns, -size_bytes))
    return max(accumulate(size_bytes for _, size_bytes in sorted(steps)))


def test_there_is_one_trace_for_every_stage_and_chunk_size():
    paths = {trace_path(chunk_rows, stage) for chunk_rows in CHUNK_ROWS for stage in STAGES}
    assert set(FOLDER.iterdir()) == paths
    assert sum(path.stat().st_size for path in paths) < 1_200_000


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("chunk_rows", CHUNK_ROWS)
def test_the_planned_slab_serves_it_and_is_near_the_peak(chunk_rows, stage):
    events = read_csv(trace_path(chunk_rows, stage))
    planned = plan(events)
    check_served(events, planned)
    check_served(repeated(events, 12), planned)
    assert planned.held_bytes == 0
    assert planned.ratio <= KNOWN_LOOSE.get((chunk_rows, stage), 1.05)
    print(f"{planned.slab_bytes:,} bytes: {planned.ratio:.3f} of used + pending, {planned.ratio_used:.3f} of used")


@pytest.mark.parametrize("after", [4, 16])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("chunk_rows", CHUNK_ROWS)
def test_work_that_ends_late_is_served_too(chunk_rows, stage, after):
    events = delayed(read_csv(trace_path(chunk_rows, stage)), after)
    planned = plan(events)
    check_served(events, planned)
    assert planned.ratio_used <= 1.10
    print(f"{planned.slab_bytes:,} bytes: {planned.ratio:.3f} of used + pending, {planned.ratio_used:.3f} of used")


@pytest.mark.parametrize("after", [4, 64])
@pytest.mark.parametrize("stage", [0, 4, 7])
def test_late_work_of_one_stream_costs_nothing(stage, after):
    """To their own stream pending spans are as good as free: the plan is that of work that ends at once."""
    events = read_csv(trace_path(512, stage))
    late = [replace(event, completed_after_ns=after if event.action == "release" else 0) for event in events]
    assert plan(late).slab_bytes == plan(events).slab_bytes


@pytest.mark.parametrize("stage", [0, 4, 7])
def test_much_later_work_of_two_streams_is_served(stage):
    """64 events are half a chunk. What the other stream or both have not finished nobody can have meanwhile."""
    events = delayed(read_csv(trace_path(512, stage)), 64)
    planned = plan(events)
    check_served(events, planned)
    assert planned.slab_bytes <= 1.20 * peak_of_used_and_crossed(events)
    print(f"{planned.slab_bytes:,} bytes: {planned.ratio_used:.3f} of used")


def test_a_new_recording_is_the_shipped_one(tmp_path):
    flags = ["--release", "--chunk-rows", "2048", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "rocline.tools.cli", "trace", "record", *flags], check=True, timeout=300)
    for stage in STAGES:
        shipped = trace_path(2048, stage)
        assert read_csv(tmp_path / shipped.name) == read_csv(shipped), (
            f"{shipped} is stale: rocline trace record --release --out {FOLDER}"
        )
