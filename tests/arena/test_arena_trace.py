"""Recording, CSV files, RMM logs, replay, planning and the report."""

import io
import re
import xml.etree.ElementTree as ElementTree

import pytest
from arena_fakes import FakeStreams

from rocline.arena.arena import Arena
from rocline.arena.classes import align_up
from rocline.arena.replay import held_for_life, peaks, plan, replay
from rocline.arena.report import report_html
from rocline.arena.spans import MIB
from rocline.arena.trace import COLUMNS, Recorder, TraceError, TraceEvent, read_csv, write_csv


def take(time_ns, span, n_bytes, stream=0, operator=""):
    return TraceEvent(time_ns, 1, stream, "take", span, n_bytes, 0, operator)


def release(time_ns, span, n_bytes, stream=0, after_ns=0, operator=""):
    return TraceEvent(time_ns, 1, stream, "release", span, n_bytes, after_ns, operator)


def random_trace(rng, n_spans=120, streams=(0,), after_ns=0):
    events, live, now_ns = [], [], 0
    for span in range(n_spans):
        now_ns += int(rng.integers(1, 1000))
        size = int(2 ** rng.uniform(8, 24))
        operator = f"op{span % 5}"
        stream = streams[span % len(streams)]
        events.append(take(now_ns, span, size, stream, operator))
        live.append((span, size, stream, operator))
        while live and rng.random() < 0.45:
            now_ns += int(rng.integers(1, 1000))
            span_out, size_out, stream_out, operator_out = live.pop(int(rng.integers(len(live))))
            events.append(release(now_ns, span_out, size_out, stream_out, after_ns, operator_out))
    return events


def test_a_recorded_run_reads_back_and_replays(tmp_path):
    now_ns = 0

    def clock():
        return now_ns

    streams = FakeStreams()
    arena = Arena(64 * MIB, streams.record)
    arena.recorder = recorder = Recorder(clock)
    now_ns = 100
    scores = arena.take(1000, "compute", label="index_score")
    handed = arena.take(5000, "compute", label="hand-off")
    now_ns = 200
    arena.release(scores)
    now_ns = 300
    arena.release(handed, "copy")
    lost = arena.take(256, "copy")
    now_ns = 450
    streams.finish("compute")
    arena.poll()
    now_ns = 900
    streams.finish("copy")
    arena.poll()
    arena.release(lost)  # never seen to finish
    thread = recorder.events[0].thread
    expected = [
        TraceEvent(100, thread, "compute", "take", 1, 1000, 0, "index_score"),
        TraceEvent(100, thread, "compute", "take", 2, 5000, 0, "hand-off"),
        TraceEvent(200, thread, "compute", "release", 1, 1000, 250, "index_score"),
        TraceEvent(300, thread, "copy", "release", 2, 5000, 600, "hand-off"),
        TraceEvent(300, thread, "copy", "take", 3, 256, 0, ""),
        TraceEvent(900, thread, "copy", "release", 3, 256, None, ""),
    ]
    assert recorder.events == expected
    path = tmp_path / "trace.csv"
    with path.open("w") as out:
        write_csv(recorder.events, out)
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert read_csv(path) == expected
    assert replay(read_csv(path), 64 * MIB).failures == 0


def test_a_trace_without_operators_reads(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "time_ns,thread,stream,action,span,bytes,completed_after_ns\n5,1,0,take,7,300,0\n9,1,0,release,7,300,\n"
    )
    assert read_csv(path) == [take(5, 7, 300), release(9, 7, 300, after_ns=None)]


def test_rmm_logs_read_with_addresses_used_again_and_midnight_passed(tmp_path):
    path = tmp_path / "rmm.csv"
    path.write_text(
        "Thread,Time,Action,Pointer,Size,Stream\n"
        "11,23:59:59.999000,allocate,0x10,1000,0x7f00\n"
        "11,23:59:59.999500,free,0x10,1000,0x7f00\n"
        "12,00:00:00.000000,allocate failure,(nil),99999999,default\n"
        "12,00:00:00.001000,allocate,0x10,2000,default\n"
        "12,00:00:00:002000,free,0x10,2000,default\n"
    )
    assert read_csv(path) == [
        TraceEvent(0, 11, 0x7F00, "take", 1, 1000),
        TraceEvent(500_000, 11, 0x7F00, "release", 1, 1000),
        TraceEvent(2_000_000, 12, "default", "take", 2, 2000),
        TraceEvent(3_000_000, 12, "default", "release", 2, 2000),
    ]
    path.write_text("Thread,Time,Action,Pointer,Size,Stream\n1,1634567890.5,allocate,0x1,8,0\n")
    assert read_csv(path) == [TraceEvent(0, 1, 0, "take", 1, 8)]


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ("5,1,0,grab,7,300,0", "line 2: action 'grab'"),
        ("5,1,0,release,7,300,0", "line 2: release of span 7, which is not taken"),
        ("5,1,0,take,7,300,0\n6,1,0,take,7,300,0", "line 3: span 7 is taken twice"),
        ("5,1,0,take,7,0,0", "line 2: take of 0 bytes"),
        ("5,1,0,take,x,300,0", "line 2: invalid literal"),
        ("5,1,0", "line 2:"),
    ],
)
def test_rows_that_say_nothing_are_named(tmp_path, rows, complaint):
    path = tmp_path / "trace.csv"
    path.write_text(f"time_ns,thread,stream,action,span,bytes,completed_after_ns\n{rows}\n")
    with pytest.raises(TraceError, match=complaint):
        read_csv(path)


@pytest.mark.parametrize("text", ["", "time,what\n1,2\n"])
def test_a_file_of_other_columns_is_refused(tmp_path, text):
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"want time_ns, thread.* or RMM's Thread, Time"):
        read_csv(path)


def test_a_free_of_nothing_in_an_rmm_log_is_named(tmp_path):
    path = tmp_path / "rmm.csv"
    path.write_text("Thread,Time,Action,Pointer,Size,Stream\n1,00:00:01.0,free,0x1,8,0\n")
    with pytest.raises(TraceError, match="line 2: free of 0x1"):
        read_csv(path)


def test_peaks_count_pending_bytes_until_their_work_finishes():
    events = [
        take(0, 1, 1000),
        release(10, 1, 1000, after_ns=100),
        take(20, 2, 2000),
        release(30, 2, 2000, after_ns=None),
        take(200, 3, 256),
        take(200, 4, 300),
    ]
    assert peaks(events) == (align_up(2000), align_up(2000) + align_up(1000))
    assert held_for_life(events) == {3: 256, 4: 512}


def test_replay_reports_what_had_no_room():
    events = [take(0, 1, 3 * MIB), take(1, 2, 3 * MIB), release(2, 2, 3 * MIB), take(3, 3, MIB), release(9, 1, 3 * MIB)]
    report = replay(events, 4 * MIB)
    assert report.failures == 1
    assert report.first_failure.startswith("replay: no room for 3.0 MiB; 1.0 free in 1 spans, largest 1.0;")
    assert report.n_takes == 3
    assert report.high_water_bytes == 4 * MIB
    assert report.least_largest_free_bytes == 0
    assert report.largest_free_bytes == 3 * MIB  # span 3 stays


def test_replay_waits_in_trace_time_and_shifts_what_follows():
    events = [
        take(0, 1, 4 * MIB, "compute"),
        release(10, 1, 4 * MIB, "compute", after_ns=1000),
        take(20, 2, 4 * MIB, "copy"),
        release(30, 2, 4 * MIB, "copy"),
    ]
    report = replay(events, 4 * MIB, picture=True)
    assert (report.failures, report.waits, report.waited_ns) == (0, 1, 990)
    assert report.placements[1].taken_ns == 1010
    assert report.placements[1].released_ns == 1020
    never = list(events)
    never[1] = release(10, 1, 4 * MIB, "compute", after_ns=None)
    assert replay(never, 4 * MIB).failures == 1


@pytest.mark.parametrize("streams", [(0,), (0, 1, 2)])
@pytest.mark.parametrize("after_ns", [0, 2000, 1_000_000])
def test_the_planned_slab_serves_its_trace_without_failures_or_waits(rng, streams, after_ns):
    events = random_trace(rng, streams=streams, after_ns=after_ns)
    planned = plan(events)
    report = replay(events, planned.slab_bytes)
    assert (report.failures, report.waits) == (0, 0)
    assert planned.peak_used_bytes <= planned.slab_bytes
    assert planned.peak_used_bytes == report.high_water_bytes
    assert planned.peak_used_bytes <= planned.peak_used_pending_bytes == report.peak_used_pending_bytes
    assert planned.ratio == planned.slab_bytes / planned.peak_used_pending_bytes
    assert replay(events, planned.peak_used_bytes - 256).failures + report.waits > 0 or after_ns


def test_a_stack_is_planned_without_waste():
    events, now_ns = [], 0
    for turn in range(5):
        sizes = [1000, 70_000, 300, 5 * MIB, 20_000]
        for at, size in enumerate(sizes):
            events.append(take(now_ns := now_ns + 1, 10 * turn + at, size))
        for at, size in reversed(list(enumerate(sizes))):
            events.append(release(now_ns := now_ns + 1, 10 * turn + at, size))
    planned = plan(events)
    assert planned.ratio == planned.ratio_used == 1
    assert planned.held_bytes == 0


def test_a_trace_without_takes_has_no_plan():
    with pytest.raises(ValueError, match="takes nothing"):
        plan([])


def test_the_report_is_one_well_formed_page_with_every_span(rng):
    events = random_trace(rng, n_spans=40, streams=(0, 1), after_ns=5000)
    events.append(take(10**6, 1000, 4096, 0, '<script>"&'))
    page = report_html(replay(events, 256 * MIB, picture=True), "stage 3 <chunk 256>")
    assert "stage 3 &lt;chunk 256&gt;" in page
    assert "<script>" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    space = "{http://www.w3.org/2000/svg}"
    titles = [title.text for title in svg.iter(f"{space}title")]
    n_takes = sum(event.action == "take" for event in events)
    n_releases = len(events) - n_takes
    assert sum(" used " in title for title in titles) == n_takes
    assert sum(" pending " in title for title in titles) == n_releases
    fills = {rect.get("fill") for rect in svg.iter(f"{space}rect")}
    assert {pattern.get("id") for pattern in svg.iter(f"{space}pattern")} >= {
        fill[5:-1] for fill in fills if fill and fill.startswith("url(#")
    }
    (line,) = svg.iter(f"{space}polyline")
    assert len(line.get("points").split()) > 10


@pytest.mark.parametrize(
    ("step_ns", "first", "last"),
    [(1, "0 ns", "8 ns"), (1500, "0.000 us", "12.000 us"), (10**7, "0.000 ms", "80.000 ms")],
)
def test_the_report_counts_time_from_the_traces_start(step_ns, first, last):
    start_ns = 5 * 3600 * 10**9  # the machine's uptime
    events = [take(start_ns, 1, MIB), release(start_ns + 4 * step_ns, 1, MIB), take(start_ns + 8 * step_ns, 2, MIB)]
    page = report_html(replay(events, 4 * MIB, picture=True), "late")
    times = re.findall(r'class="under"[^>]*>([^<]*)<', page)
    assert (len(times), times[0], times[-1]) == (9, first, last)
    assert f"used {first} to {times[4]}</title>" in page


def test_a_report_without_a_picture_is_refused():
    with pytest.raises(ValueError, match="picture=True"):
        report_html(replay([take(0, 1, 256)], MIB), "empty")


def test_csv_leaves_an_unseen_completion_empty():
    out = io.StringIO()
    write_csv([release(9, 7, 300, after_ns=None)], out)
    assert out.getvalue().splitlines()[1] == "9,1,0,release,7,300,,"
