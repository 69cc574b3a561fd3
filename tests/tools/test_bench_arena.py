"""The arena's benchmark: what it prints, on any traces; that time does not grow with the number of free spans."""

import json
import random
from pathlib import Path

import pytest

from rocline.arena.arena import SPARE_PART
from rocline.arena.replay import plan
from rocline.arena.trace import read_csv
from rocline.engine import scratch
from rocline.engine.scratch import StageMemory
from rocline.tools import bench_arena

SHIPPED = Path(__file__).resolve().parent.parent / "data" / "traces"
TRACE = SHIPPED / "hip-shapes-chunk512-stage7.csv"


@pytest.fixture
def few(monkeypatch):
    """Counts that take no time."""
    shapes = {name: (measure, (1, 4, 8)) for name, (measure, _) in bench_arena.SHAPES.items()}
    monkeypatch.setattr(bench_arena, "SHAPES", shapes)


def rows_of(text):
    return {(row.pop("what"), row.get("threads")): row for row in map(json.loads, text.splitlines())}


def test_every_figure_is_there(few, capsys):
    assert bench_arena.main([str(TRACE), "--json", "--repeats", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = rows_of(out)
    events = read_csv(TRACE)
    for threads in (1, 8):
        for name in bench_arena.CONTENDERS:
            row = rows[name, threads]
            assert row["pairs"] == 2 * sum(event.action == "take" for event in events)
            assert 0 < row["median_us"] <= row["p99_us"]
        assert rows["torch.empty and del", threads]["to_torch"] == 1
    for name in bench_arena.SHAPES:
        assert rows[name, None].keys() == {"us_at_1", "us_at_4", "us_at_8", "us_per_doubling"}
    planned = plan(events)
    row = rows[f"plan of {TRACE.stem}", None]
    assert row["slab_bytes"] == planned.slab_bytes
    assert row["to_peak_used"] == pytest.approx(planned.ratio_used, abs=1e-3)
    assert rows["torch's caching allocator on the same traces", None] == {"not_measured": "it needs --device gpu"}


def test_blocks_are_what_a_stage_does():
    """Every span is taken in one block and goes in one, layers' temporaries with their scope."""
    events = read_csv(TRACE)
    live, n_taken = set(), 0
    for outer, inner, dies, kept, freed, last in bench_arena.blocks_of(events):
        spans = [span for span, _ in (*outer, *inner)]
        assert not live.intersection(spans)
        live.update(spans)
        assert set(dies) | set(kept) == {span for span, _ in inner}
        live.difference_update(dies, freed)
        assert last == (not live)
        n_taken += len(spans)
    assert n_taken == sum(event.action == "take" for event in events)
    assert last


@pytest.mark.parametrize(("spare", "late"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("stage", range(8))
@pytest.mark.parametrize("chunk_rows", [256, 1024])
def test_a_stage_runs_in_the_planned_slab_and_by_heart_in_one_with_room_to_spare(chunk_rows, stage, spare, late):
    """Whether work ends at once or never."""
    events = read_csv(SHIPPED / f"hip-shapes-chunk{chunk_rows}-stage{stage}.csv")
    planned = plan(events)
    slab_bytes = planned.peak_used_bytes * SPARE_PART // (SPARE_PART - 1) + 4096 if spare else planned.slab_bytes
    memory = StageMemory(slab_bytes, record_completion=(lambda stream: lambda: False) if late else None)
    tensors, blocks = bench_arena.Tensors(memory), bench_arena.blocks_of(events)
    with scratch.use(memory):
        for _ in range(4):
            bench_arena.run_blocks(blocks, tensors)
    stats = memory.arena.stats()
    assert (stats.used_bytes, stats.waits) == (0, 0)
    assert stats.takes == 2 * len(events)
    assert stats.high_water_bytes <= planned.peak_used_bytes
    assert memory.scripts


def test_a_folder_and_a_trace_that_keeps_a_span(few, capsys, tmp_path):
    header = "time_ns,thread,stream,action,span,bytes,completed_after_ns\n"
    (tmp_path / "kept.csv").write_text(f"{header}0,1,0,take,1,1000,0\n1,1,0,take,2,3000,0\n2,1,0,release,1,1000,0\n")
    (tmp_path / "other.csv").write_text(f"{header}0,1,0,take,1,500,0\n")
    assert bench_arena.main([str(tmp_path), "--repeats", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines if line.startswith("plan of ")] == ["kept", "other"]
    assert any(line.split()[:4] == ["stage", "memory:", "a", "tensor"] and "pairs 15 " in line for line in lines)


@pytest.mark.parametrize("name", ["fit among free spans", "failed lookup among free spans"])
def test_time_does_not_grow_with_the_number_of_free_spans(name):
    measure, counts = bench_arena.SHAPES[name]
    few_us, many_us = (measure(n, random.Random(1)) for n in (counts[0], counts[-1]))
    assert many_us < 4 * few_us  # for 256 times as many


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("a,b\n", "columns are a, b"), (None, "No such file or directory")],
)
def test_what_is_no_trace_is_refused(capsys, tmp_path, content, complaint):
    path = tmp_path / "trace.csv"
    if content is not None:
        path.write_text(content)
    assert bench_arena.main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"bench_arena: {path}: ")
    assert complaint in err


def test_a_folder_without_traces_is_refused(capsys, tmp_path):
    assert bench_arena.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"bench_arena: {tmp_path}: no *.csv in it; name a folder of traces\n"


def test_a_gpu_that_is_not_there_is_named(monkeypatch, capsys):
    monkeypatch.setattr(bench_arena.torch.cuda, "is_available", lambda: False)
    assert bench_arena.main([str(TRACE), "--device", "gpu"]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err
