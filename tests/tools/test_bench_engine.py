"""Requests through an engine's submit: counts, windows and rates, over a small checkpoint and over noise."""

import json

import pytest

from rocline.engine import release
from rocline.engine.config import ModelConfig
from rocline.tools import bench_engine

SMALL = ["--stages", "2", "--context", "512", "--kv-tokens", "2048", "--chunk-rows", "8", "--output-tokens", "6"]


@pytest.fixture
def micro_model(data_folder):
    return data_folder / "micro" / "model"


@pytest.fixture
def measure(capsys):
    """measure(words...): (exit status, lines of stdout, stderr)."""

    def run(*words):
        status = bench_engine.main([*SMALL, *words])
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()], err

    return run


def test_the_figures(measure, micro_model):
    words = ["--model", str(micro_model), "--decode", "1,2", "--decode-context", "5", "--prefill", "40"]
    status, (opened, one, two, *on_the_way, prefill), _ = measure(*words, "--report-rows", "8")
    assert status == 0
    assert opened["device"] == "cpu"
    assert opened["opened_s"] > 0
    assert one["tokens_s"] == pytest.approx(5 / one["window_s"])  # the first token begins the window
    assert (one["decode_streams"], two["decode_streams"]) == (1, 2)
    assert len(two["output_ids_sha256"]) == 2
    assert prefill["tokens_s"] == pytest.approx(40 / prefill["ttft_s"])
    assert prefill["device_allocs"] == [1, 1]
    assert all(line["on_the_way"] == 40 and 8 <= line["rows"] < 40 for line in on_the_way)
    assert [line["rows"] for line in on_the_way] == sorted({line["rows"] for line in on_the_way})


def test_the_same_seed_the_same_answers(measure, micro_model, monkeypatch):
    """Over noise: every line says what it is, and cut otherwise the ids are the same."""
    monkeypatch.setattr(bench_engine, "release_config", lambda: ModelConfig.load(micro_model))
    words = ["--decode", "1", "--decode-context", "9", "--prefill", "20", "--stores", "2"]
    hashes = []
    for cut in (["--seed", "3"], ["--seed", "3", "--chunk-rows", "5", "--stages", "3"], ["--seed", "4"]):
        status, lines, _ = measure(*words, *cut)
        assert status == 0
        assert {line["weights"] for line in lines} == {f"synthetic:{cut[1]}, stores=2"}
        hashes.append([line["output_ids_sha256"] for line in lines if "output_ids_sha256" in line])
    assert hashes[0] == hashes[1] != hashes[2]
    assert release.release_config().text_config.num_hidden_layers == 40


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--stages", "0"], "stages = 0"),
        (["--model", "nowhere"], "nowhere"),
        (["--decode", "1", "--decode-context", "600"], ""),
    ],
)
def test_wrong_input(measure, micro_model, words, why):
    model = [] if "--model" in words else ["--model", str(micro_model)]
    status, _, err = measure(*model, *words)
    assert status == 1
    assert err.startswith("bench_engine: ")
    assert why in err
