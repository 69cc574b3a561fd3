"""`rocline trace`: what it writes, prints, draws and refuses."""

import json
import re
from pathlib import Path

import pytest

from rocline.arena.replay import plan
from rocline.arena.trace import read_csv
from rocline.tools import cli, trace

SHIPPED = Path(__file__).resolve().parent.parent / "data" / "traces" / "hip-shapes-chunk256-stage3.csv"
HEADER = "time_ns,thread,stream,action,span,bytes,completed_after_ns\n"
TWO_AT_ONCE = "0,1,0,take,1,1000,0\n1,1,0,take,2,3000,0\n2,1,0,release,1,1000,0\n3,1,0,release,2,3000,0\n"


@pytest.fixture
def rocline(capsys):
    """Run `rocline trace ...`: its status, stdout and stderr."""

    def run(*words):
        status = cli.main(["trace", *map(str, words)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.csv"
    path.write_text(HEADER + TWO_AT_ONCE)
    return path


@pytest.fixture
def micro(data_folder):
    return data_folder / "micro" / "model"


def test_replay_on_the_planned_slab(rocline):
    status, out, err = rocline("replay", SHIPPED, "--json")
    assert (status, err) == (0, "")
    figures = json.loads(out)
    events = read_csv(SHIPPED)
    planned = plan(events)
    assert figures["slab_bytes"] == planned.slab_bytes
    assert figures["high_water_bytes"] == figures["peak_used_bytes"] == planned.peak_used_bytes
    assert figures["slab_to_peak_used_pending"] == planned.ratio
    assert figures["slab_to_peak_used"] == planned.ratio_used
    assert figures["largest_free_bytes"] == planned.slab_bytes  # everything was released
    assert (figures["failures"], figures["first_failure"], figures["waits"]) == (0, "", 0)
    assert figures["n_takes"] == len(events) / 2
    assert figures["splits"] > 0


def test_the_table_says_the_same(rocline, small):
    _, out, _ = rocline("replay", small, "--json")
    status, table, err = rocline("replay", small)
    assert (status, err) == (0, "")
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in table.splitlines())
    figures = json.loads(out)
    assert rows.keys() == figures.keys()
    assert rows["trace"] == str(small)
    assert rows["slab_bytes"] == f"{figures['slab_bytes']:,}" == "4,096"
    assert rows["slab_to_peak_used"] == "1.000"


def test_replay_on_a_slab_that_is_too_small(rocline, small):
    status, out, err = rocline("replay", small, "--slab-bytes", 3072, "--json")
    assert status == 1
    figures = json.loads(out)
    assert (figures["failures"], figures["high_water_bytes"]) == (1, 1024)
    assert figures["first_failure"].startswith("replay: no room for 0.0 MiB")
    assert err == f"trace: 1 of 2 takes found no room in 3,072 bytes; the first: {figures['first_failure']}\n"
    assert "raise --slab-bytes" in err


def test_report_draws_what_had_room(rocline, small, tmp_path):
    page = tmp_path / "page.html"
    status, out, err = rocline("report", small, "--out", page)
    assert (status, out) == (0, "")
    assert err == f"trace: {page} shows 2 spans\n"
    assert "<h1>small.csv on 0.0 MiB</h1>" in page.read_text()
    status, _, err = rocline("report", small, "--out", page, "--slab-bytes", 3072)
    assert status == 1
    assert "shows 1 spans" in err
    assert "no room for" in page.read_text()


def test_report_of_a_trace_of_which_nothing_fits_writes_no_page(rocline, small, tmp_path):
    status, _, err = rocline("report", small, "--out", tmp_path / "page.html", "--slab-bytes", 256)
    assert status == 1
    assert err.startswith("trace: 2 of 2 takes found no room")
    assert not (tmp_path / "page.html").exists()


def test_an_rmm_log_replays(rocline, tmp_path):
    path = tmp_path / "rmm.csv"
    path.write_text("Thread,Time,Action,Pointer,Size,Stream\n1,10.5,allocate,0x1,800,0\n1,10.6,free,0x1,800,0\n")
    status, out, _ = rocline("replay", path, "--json")
    assert status == 0
    assert json.loads(out)["slab_bytes"] == 1024


@pytest.mark.parametrize("action", [("replay",), ("report", "--out", "page.html")])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"a,b\n1,2\n", "columns are a, b; want time_ns, thread"),
        (b"", "columns are missing; want"),
        (b"\x7fELF\xd0\n", "no trace: not UTF-8"),
        (HEADER.encode() + b"x" * 200_000, "no trace: field larger than field limit"),
        (HEADER.encode(), "takes nothing; record a trace that does"),
        (HEADER.encode() + b"0,1,0,take,1,0,0\n", "line 2: take of 0 bytes; correct or remove the row"),
        (None, "No such file or directory"),
    ],
)
def test_what_is_no_trace_is_refused(rocline, tmp_path, monkeypatch, action, content, complaint):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.csv"
    if content is not None:
        path.write_bytes(content)
    name, *flags = action
    status, out, err = rocline(name, path, *flags)
    assert (status, out) == (2, "")
    assert err.startswith(f"trace: {path}")
    assert complaint in err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("slab_bytes", ["0", "-4096", "255", str(1 << 41)])
def test_an_absurd_slab_is_refused(rocline, small, slab_bytes):
    status, out, err = rocline("replay", small, f"--slab-bytes={slab_bytes}")
    assert (status, out) == (2, "")
    assert err == f"trace: replay: a slab of {slab_bytes} bytes; give 256 to {1 << 40}\n"


def test_record_writes_a_file_for_each_stage_and_chunk_size(rocline, micro, tmp_path):
    folder = tmp_path / "new" / "traces"
    flags = ("--model", micro, "--stages", 2, "--prompt-tokens", 90, "--chunk-rows", 16, 32, "--chunks", 2)
    status, out, err = rocline("record", *flags, "--out", folder)
    assert status == 0
    names = [f"hip-shapes-chunk{chunk_rows}-stage{stage}.csv" for chunk_rows in (16, 32) for stage in (0, 1)]
    assert out.splitlines() == [str(folder / name) for name in names]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert re.search(r"chunk_rows 16: [\d,]+ events in ", err)
    for name in names:
        events = read_csv(folder / name)
        assert [event.time_ns for event in events] == list(range(len(events)))
        assert {event.thread for event in events} == {0}
        assert len({event.operator for event in events}) > 5
        assert sum(event.action == "take" for event in events) == len(events) / 2  # the hand-offs came back too
    before = {name: (folder / name).read_bytes() for name in names}
    rocline("record", *flags, "--out", folder)
    assert {name: (folder / name).read_bytes() for name in names} == before


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--stages", 6), "--stages 6: the model has 5 layers"),
        (("--chunks", 4), "--chunks 4: 90 tokens are 3 chunks of 32; raise --prompt-tokens or lower --chunk-rows"),
        (("--prompt-tokens", 10**9), "--prompt-tokens 1000000000: the context is "),
        (("--model", "nowhere"), "nowhere/config.json: No such file"),
    ],
)
def test_record_refuses_what_does_not_go_together(rocline, micro, tmp_path, flags, complaint):
    words = ("--model", micro, "--prompt-tokens", 90, "--chunk-rows", 32, *flags, "--out", tmp_path / "traces")
    status, out, err = rocline("record", "--stages", 2, *words)
    assert (status, out) == (2, "")
    assert err.startswith(f"trace: {complaint}")
    assert not (tmp_path / "traces").exists()


def test_every_shipped_size_is_recorded_by_default():
    sizes = {int(re.search(r"chunk(\d+)-", path.name)[1]) for path in SHIPPED.parent.iterdir()}
    assert sizes == set(trace.CHUNK_ROWS)
