"""The schedule's benchmark: every figure is there, and what the schedule itself costs is small."""

import json

import pytest

from rocline.pipeline.placement import Placer
from rocline.tools import bench_schedule


@pytest.fixture
def quick(monkeypatch):
    """A cut without the traces of its memory, and fewer short requests."""

    def folded_cut(model, context):
        return Placer(model, "folded", range(8), lambda visits: 0, [0] * 8, context, 1024).choose()

    monkeypatch.setattr(bench_schedule, "folded_cut", folded_cut)
    monkeypatch.setattr(bench_schedule, "N_SHORT", 2)


def test_every_figure_is_there(quick, capsys):
    words = ["--prompt-tokens", "8000", "20000", "--tokens", "20"]
    assert bench_schedule.main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = [json.loads(line) for line in out.splitlines()]
    kinds = [row["what"].split(":")[0] for row in rows]
    assert kinds == ["measured"] * 2 + ["modelled"] * (len(rows) - 2)
    prefills = [row for row in rows if "times_contiguous" in row]
    assert {row["what"] for row in prefills} == {
        f"modelled: {tokens} tokens, cut for {context}" for tokens in (8000, 20000) for context in (8000, 20000)
    }
    assert all(row["times_contiguous"] > 1 and row["fill"].endswith("%") for row in prefills)
    beside = [row for row in rows if "rate_kept" in row]
    assert sum(row["what"].endswith("(chosen)") for row in beside) == 1
    for row in beside:
        assert 0 < row["rate_kept"] <= 1.1
        assert 0 < row["ms_between_tokens_p50"] <= row["p99"]
        assert row["short_ttft_s_most"] > 0
    decode = [row for row in rows if "chosen" in row]
    assert [len([name for name in row if name.startswith("G=")]) for row in decode] == [1, 8, 8]


def test_the_table_is_for_people(quick, monkeypatch, capsys):
    for part in ("compare_prefill", "beside_prefill"):
        monkeypatch.setattr(bench_schedule, part, lambda *args: None)
    assert bench_schedule.main(["--prompt-tokens", "8000", "--tokens", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("measured: overhead of 8 requests ")
    assert lines[-1].startswith("modelled: decode of 64, token/s ")


@pytest.mark.parametrize("n_requests", [8, 64])
def test_a_stage_step_costs_the_schedule_little(n_requests):
    """The goal is 200 us with everything; this part is a few."""
    assert min(bench_schedule.overhead_us(n_requests, 50) for _ in range(3)) < 60
