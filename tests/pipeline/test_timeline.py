"""Timelines: recording, files, where idle time went, the picture and the command."""

import json
import threading
import time
import tracemalloc
import xml.etree.ElementTree as ET
from heapq import heappop, heappush

import numpy as np
import pytest

from rocline.pipeline import timeline
from rocline.pipeline.timeline import Kind, StageTime, Timeline, TimelineError, draw, idle_split, load, save
from rocline.tools import cli

PREFILL, DECODE, VERIFY, COPY, WAIT = Kind
SVG = "{http://www.w3.org/2000/svg}"


def made(*rows):
    """Intervals from (stage, visit, kind, job, rows, start_ns, end_ns)."""
    found = np.array([(start, end, job, n, stage, visit, kind) for stage, visit, kind, job, n, start, end in rows],
                     timeline.INTERVAL)  # fmt: skip
    return found[np.argsort(found["start_ns"], kind="stable")]


def random_intervals(rng, n=200, n_stages=4, span=500):
    starts = rng.integers(0, span, n)
    return made(*(
        (int(rng.integers(n_stages)), int(rng.integers(2)), int(rng.integers(5)), job, 8, int(start),
         int(start + rng.integers(0, 20)))
        for job, start in enumerate(starts)
    ))  # fmt: skip


def pipeline(n_chunks, n_stages, chunk_ns=100, halo_chunks=0, halo_ns=20, contiguous_from=None):
    """Equal chunks through stages, first come, first served; then halo rows of the last ones, through all stages a
    second time, or through those from `contiguous_from` on."""
    path = [(stage, 0, chunk_ns) for stage in range(contiguous_from or n_stages)]
    whole = len(path)
    path += [(stage, int(contiguous_from is None), halo_ns) for stage in range(contiguous_from or 0, n_stages)]
    rows, free = [], [0] * n_stages
    arrivals = [(0, chunk, 0) for chunk in range(n_chunks)]
    while arrivals:
        arrived, chunk, place = heappop(arrivals)
        stage, visit, lasts = path[place]
        start = max(arrived, free[stage])
        free[stage] = start + lasts
        rows.append((stage, visit, PREFILL, chunk, 1024, start, free[stage]))
        if place + 1 < (len(path) if chunk >= n_chunks - halo_chunks else whole):
            heappush(arrivals, (free[stage], chunk, place + 1))
    return made(*rows)


# Recording


def test_what_is_recorded_is_there():
    record = Timeline(3, 16)
    record.record(20, 30, 2, 1, DECODE, 7, 8)
    record.record(10, 2**62, 0, 0, PREFILL, 2**40, 1024)
    assert record.intervals().tolist() == [(10, 2**62, 2**40, 1024, 0, 0, PREFILL), (20, 30, 7, 8, 2, 1, DECODE)]
    assert len(Timeline(3).intervals()) == 0


def test_the_newest_are_kept():
    record = Timeline(1, 100)
    for job in range(1234):
        record.record(job, job + 1, 0, 0, DECODE, job, 1)
    # Two less than fit: one may be half written by then, and only after the next is nothing missing.
    assert record.intervals()["job"].tolist() == list(range(1136, 1234))


def test_all_stages_begin_where_the_fullest_one_does():
    """A chunk that is lost on one stage must not look as if that stage had been idle."""
    record = Timeline(2, 10)
    for job in range(20):
        record.record(10 * job, 10 * job + 5, 0, 0, PREFILL, job, 64)
        if job % 4 == 0:
            record.record(10 * job + 5, 10 * job + 9, 1, 0, PREFILL, job, 64)
    found = record.intervals()
    assert found["job"][found["stage"] == 0].tolist() == list(range(12, 20))
    assert found["job"][found["stage"] == 1].tolist() == [12, 16]


def test_readers_beside_a_writer_see_whole_rows_in_order():
    record = Timeline(1, 64)
    stop = threading.Event()

    def write():
        job = 0
        while not stop.is_set():
            record.record(job, job + job % 2, 0, job % 2, job % 5, job, job % 1000)
            job += 1

    thread = threading.Thread(target=write)
    thread.start()
    n_seen = 0
    try:
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            found = record.intervals()
            job = found["job"]
            n_seen += len(found)
            assert (np.diff(job) == 1).all()
            for column, want in (("start_ns", job), ("end_ns", job + job % 2), ("visit", job % 2), ("kind", job % 5),
                                 ("rows", job % 1000)):  # fmt: skip
                assert (found[column] == want).all()
    finally:
        stop.set()
        thread.join()
    assert n_seen > 100


def test_recording_is_cheap():
    """Under 2 µs, about a fifth of it where nobody else has the processor; and no memory."""
    record = Timeline(8)
    best_s = 1.0
    for _ in range(50):
        began_s = time.perf_counter()
        for job in range(1000):
            record.record(1 << 50, 1 << 51, 3, 1, DECODE, job, 8)
        best_s = min(best_s, (time.perf_counter() - began_s) / 1000)
    assert best_s < 2e-6
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for job in range(10_000):
            record.record(1 << 50, 1 << 51, 3, 1, DECODE, job, 8)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 2000


# Files


@pytest.mark.parametrize("name", ["a.csv", "a.json"])
def test_files_keep_everything(tmp_path, rng, name):
    intervals = random_intervals(rng)
    intervals["job"] += 2**60
    save(intervals, tmp_path / name)
    assert np.array_equal(load(tmp_path / name), intervals)


HEADER = "start_ns,end_ns,job,rows,stage,visit,kind\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "a.csv: no timeline: its columns are"),
        ("a.csv", "time,action\n1,take\n", "no timeline: its columns are"),
        ("a.csv", HEADER, "without intervals"),
        ("a.csv", HEADER + "1,2,3,4,0,0,prefill\n1,2,3,4,0,0\n", "interval 2, .*ValueError"),
        ("a.csv", HEADER + "1,2,3,4,0,0,pause\n", "interval 1, .*PAUSE"),
        ("a.csv", HEADER + "1,x,3,4,0,0,prefill\n", "interval 1, .*'x'"),
        ("a.csv", HEADER + "1,2,3,4,0,0,prefill,9\n", "interval 1, .*"),
        ("a.csv", HEADER + "3,2,3,4,0,0,prefill\n", "an end before its start"),
        ("a.csv", HEADER + "1,2,3,4,-1,0,prefill\n", "out of range"),
        ("a.csv", HEADER + "1,2,3,4,0,128,prefill\n", "out of range"),
        ("a.csv", HEADER + f"1,{2**63},3,4,0,0,prefill\n", "out of range"),
        ("a.csv", "\0\xff", "no timeline"),
        ("a.json", "{", "no timeline: JSONDecodeError"),
        ("a.json", "[]", "no timeline: TypeError"),
        ("a.json", "{}", "no timeline: KeyError"),
        ("a.json", '{"columns": [], "intervals": []}', "no timeline: its columns"),
        ("a.json", json.dumps({"columns": timeline.COLUMNS, "intervals": [[1, 2.5, 3, 4, 0, 0, "copy"]]}), "'2.5'"),
    ],
)  # fmt: skip
def test_what_is_no_timeline_is_named(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text, encoding="latin-1")
    with pytest.raises(TimelineError, match=message):
        load(path)


# Idle time


def test_each_part_by_hand():
    intervals = made(
        (0, 0, PREFILL, 0, 64, 100, 200),
        (0, 0, PREFILL, 1, 64, 200, 300),
        (1, 0, WAIT, 0, 64, 190, 210),
        (1, 0, COPY, 0, 64, 210, 220),
        (1, 0, PREFILL, 0, 64, 220, 290),
        (1, 0, DECODE, 9, 1, 230, 240),  # inside the chunk
        (1, 0, PREFILL, 1, 64, 330, 400),
        (1, 0, COPY, 1, 64, 320, 340),  # the last 10 ns of it beside work
        (1, 0, VERIFY, 8, 6, 420, 430),
    )
    assert idle_split(intervals, 3) == [
        StageTime(0, busy=200, transport=0, fill=130, halo_tail=0, imbalance=0),
        StageTime(1, busy=150, transport=40, fill=90, halo_tail=0, imbalance=50),
        StageTime(2, busy=0, transport=0, fill=330, halo_tail=0, imbalance=0),
    ]


def test_parts_add_up_on_random_intervals(rng):
    """Against a picture of every nanosecond."""
    intervals = random_intervals(rng)
    begin, end = intervals["start_ns"].min(), intervals["end_ns"].max()
    for row in idle_split(intervals):
        work, other = np.zeros(end - begin, bool), np.zeros(end - begin, bool)
        for start, stop, *_, kind in intervals[intervals["stage"] == row.stage].tolist():
            (work if kind in (PREFILL, DECODE, VERIFY) else other)[start - begin : stop - begin] = True
        mine = intervals[intervals["stage"] == row.stage]
        assert row.total == end - begin
        assert row.busy == work.sum()
        assert row.transport == (other & ~work).sum()
        assert row.fill == (mine["start_ns"].min() - begin) + (end - mine["end_ns"].max())
        assert min(row.halo_tail, row.imbalance) >= 0
    total = timeline.all_stages(idle_split(intervals))
    assert sum(total.shares().values()) == pytest.approx(1)


def test_a_pipeline_of_equal_stages_only_fills_and_drains():
    for row in idle_split(pipeline(128, 8)):
        assert row == StageTime(row.stage, busy=12800, transport=0, fill=700, halo_tail=0, imbalance=0)


def test_folded_stages_wait_for_the_halo():
    """The last chunks' halo rows come to every stage again, after all chunks have left it."""
    intervals = pipeline(16, 4, halo_chunks=3)
    intervals["rows"][intervals["visit"] == 1] -= 24
    for row in idle_split(intervals):
        mine = intervals[intervals["stage"] == row.stage]
        whole_ns, halo_ns = (mine["end_ns"][mine["visit"] == visit].max() for visit in (0, 1))
        busy_in_tail = sum(np.diff(mine[["start_ns", "end_ns"]].tolist())[mine["start_ns"] >= whole_ns, 0])
        assert row.halo_tail == halo_ns - whole_ns - busy_in_tail
        assert row.halo_tail > 0
        assert row.imbalance <= 2 * 20  # where halo rows go between two chunks, the next stage waits for them


def test_a_halo_with_all_rows_of_its_chunks_is_known_by_those_that_do_not_come():
    whole, cut = pipeline(16, 4, halo_chunks=3), pipeline(16, 4, halo_chunks=3)
    cut["rows"][cut["visit"] == 1] -= 24
    assert idle_split(whole) == idle_split(cut)


def test_contiguous_stages_of_the_decoder_see_only_the_halo():
    split = idle_split(pipeline(16, 4, halo_chunks=3, contiguous_from=2))
    assert [row.halo_tail for row in split[:2]] == [0, 0]
    for row in split[2:]:
        assert (row.busy, row.halo_tail, row.imbalance) == (60, 160, 0)  # 3 x 20 ns, two gaps of 80 before the next


def test_full_prefill_has_no_halo_tail():
    for row in idle_split(pipeline(16, 4, halo_chunks=16)):
        assert row.halo_tail == 0


def test_a_cancelled_chunk_makes_no_halo():
    intervals = pipeline(16, 4)
    intervals = intervals[(intervals["job"] != 7) | (intervals["stage"] < 2)]
    assert [row.halo_tail for row in idle_split(intervals)] == [0] * 4


@pytest.mark.parametrize("since_ns", [900, 1300, 1500])
def test_a_record_that_begins_in_the_middle_makes_no_halo(since_ns):
    intervals = pipeline(16, 8)
    intervals = intervals[(intervals["job"] != 13) | (intervals["stage"] < 7)]  # a gap that a tail would claim
    late = intervals[intervals["start_ns"] >= since_ns]
    assert [row.halo_tail for row in idle_split(late)] == [0] * 8


def test_a_short_prompt_all_of_whose_chunks_hold_halo_rows():
    """Only fewer rows tell it from a full prefill."""
    intervals = pipeline(3, 4, halo_chunks=3)
    assert [row.halo_tail for row in idle_split(intervals)] == [0] * 4
    intervals["rows"][(intervals["visit"] == 1) & (intervals["job"] == 0)] = 494
    assert all(row.halo_tail > 0 for row in idle_split(intervals))


def test_a_prompt_behind_the_tail_of_another():
    """Rows of the first were on their second visit when the record begins: they do not count as chunks that came."""
    halo = [(0, 1, PREFILL, 100 + n, 64, 10 * n, 10 * n + 5) for n in range(3)]
    whole = [(0, 0, PREFILL, n, 64, 100 + 10 * n, 110 + 10 * n) for n in range(4)]
    intervals = made(*halo, *whole, (0, 1, PREFILL, 3, 64, 200, 210))
    assert idle_split(intervals)[0].halo_tail == 60


def test_visits_without_rows_are_none():
    intervals = pipeline(16, 4, halo_chunks=3)
    empty = intervals[(intervals["visit"] == 0) & (intervals["job"] < 13)].copy()
    empty["visit"], empty["rows"], empty["start_ns"] = 1, 0, empty["end_ns"]
    assert idle_split(np.concatenate([intervals, empty])) == idle_split(intervals)


def test_decode_after_a_prompt_is_no_tail():
    """Gaps between decode steps are time in which other stages work."""
    intervals = pipeline(8, 2, halo_chunks=2)
    end = int(intervals["end_ns"].max())
    steps = [(stage, 0, DECODE, 100 + n, 1, end + 20 * n + 10 * stage, end + 20 * n + 10 * stage + 10)
             for n in range(50) for stage in range(2)]  # fmt: skip
    before = idle_split(intervals)
    after = idle_split(np.concatenate([intervals, made(*steps)]))
    assert [row.halo_tail for row in after] == [row.halo_tail for row in before]
    assert all(row.imbalance >= 49 * 10 for row in after)


# The picture


def parsed(picture):
    root = ET.fromstring(picture)
    texts = [text.text for text in root.iter(SVG + "text")]
    return root, texts


def test_a_picture_shows_every_wide_interval_once():
    intervals = pipeline(4, 3, halo_chunks=1)
    root, texts = parsed(draw(intervals))
    tips = [tip.text for tip in root.iter(SVG + "title")]
    assert len(tips) == len(intervals)
    assert "prefill, first visit, job 2, 1,024 rows: 100 ns from 200 ns on" in tips
    for name in ("stage 0", "stage 2", "all", "busy", "halo tail", "transport", "prefill, second visit", "idle"):
        assert name in texts
    assert "stage 3" not in texts
    assert "decode" not in texts  # the legend names what there is
    assert f"3 stages, {len(intervals)} intervals in 660 ns" in texts
    first = next(rect for rect in root.iter(SVG + "rect") if rect.find(SVG + "title") is not None)
    assert float(first.get("width")) == pytest.approx(1000 * 100 / 660, abs=1)


def test_shares_in_the_picture_are_those_of_the_split():
    intervals = pipeline(16, 4, halo_chunks=3)
    _, texts = parsed(draw(intervals))
    for row in idle_split(intervals):
        for share in row.shares().values():
            assert f"{share:.1%}" in texts


@pytest.mark.parametrize("n_stages", [1, 8])
def test_many_intervals_stay_a_small_picture(rng, n_stages):
    """Half of every pixel is covered, in pieces far below it: a column of middling strength, no solid bar."""
    n = 100_000
    steps = np.zeros(n, timeline.INTERVAL)
    steps["start_ns"] = np.arange(n) * 1000
    steps["end_ns"] = steps["start_ns"] + 500
    steps["kind"] = DECODE
    steps["stage"] = rng.integers(0, n_stages, n)
    picture = draw(steps)
    root, texts = parsed(picture)
    assert len(picture) < 500_000
    assert "100,000 intervals" in texts[0]
    strengths = [float(path.get("fill-opacity")) for path in root.iter(SVG + "path") if path.get("fill-opacity")]
    if n_stages == 1:
        assert strengths == [0.6]
    else:
        assert max(strengths) < 0.6


def test_cover_is_counted_by_pixel():
    """Ten nanoseconds a pixel: one interval over two pixels, one without length, and the two that span it all."""
    intervals = made(
        (0, 0, PREFILL, 0, 1, 0, 10),
        (0, 0, DECODE, 1, 1, 5, 13),
        (0, 0, VERIFY, 2, 1, 500, 500),
        (0, 0, PREFILL, 3, 1, 9000, 10_000),
    )
    root, _ = parsed(draw(intervals))
    columns = {
        (path.get("d").split("v")[0], path.get("fill-opacity"))
        for path in root.iter(SVG + "path")
        if path.get("fill-opacity")
    }
    assert columns == {("M76 99h1", "0.60"), ("M77 99h1", "0.40"), ("M126 99h1", "0.30")}


def test_all_kinds_and_odd_moments_can_be_drawn(rng):
    for intervals in (
        made((0, 0, PREFILL, 0, 0, 5, 5)),
        made((2, 0, WAIT, 0, 1, 0, 10**12), (0, 1, VERIFY, 1, 6, 10**12, 10**12)),
        random_intervals(rng, span=10**9),
        random_intervals(rng, span=10),
    ):
        root, texts = parsed(draw(intervals, 9))
        assert "stage 8" in texts
        width = float(root.get("width"))
        for rect in root.iter(SVG + "rect"):
            assert 0 <= float(rect.get("x", 0)) <= width
            assert float(rect.get("width")) > 0


# The command


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "run.csv"
    save(pipeline(16, 4, halo_chunks=3), path)
    return path


def test_the_command_prints_the_split_and_writes_the_picture(recorded, tmp_path, capsys):
    picture = tmp_path / "run.svg"
    assert cli.main(["trace", "timeline", str(recorded), "--out", str(picture)]) == 0
    out, err = capsys.readouterr()
    assert picture.read_text(encoding="utf-8") == draw(load(recorded))
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["stage", "busy", "fill", "imbalance", "halo", "tail", "transport"]
    assert [line[0] for line in lines[1:]] == ["0", "1", "2", "3", "all"]
    first = idle_split(load(recorded))[0]
    assert lines[1][1:] == [f"{share:.1%}" for share in first.shares().values()]
    assert str(picture) in err


def test_the_command_as_json(recorded, tmp_path, capsys):
    assert cli.main(["trace", "timeline", str(recorded), "--out", str(tmp_path / "run.svg"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    split = idle_split(load(recorded))
    assert printed["total_ns"] == split[0].total
    assert [StageTime(**stage) for stage in printed["stages"]] == split


@pytest.mark.parametrize(
    ("name", "text", "message"), [("run.csv", "x\n1\n", "no timeline"), ("none.csv", None, "No such file")]
)
def test_the_command_refuses_other_input(tmp_path, capsys, name, text, message):
    if text:
        (tmp_path / name).write_text(text)
    assert cli.main(["trace", "timeline", str(tmp_path / name), "--out", str(tmp_path / "run.svg")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"trace: {tmp_path / name}: ")
    assert message in err
    assert not (tmp_path / "run.svg").exists()
