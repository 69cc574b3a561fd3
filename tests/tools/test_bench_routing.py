"""How rows spread over experts: counted from what was chosen, over an engine, and skewed on request."""

import json
import random

import pytest
import torch

from rocline.engine.config import ModelConfig
from rocline.tools import bench_engine, cli
from rocline.tools.bench_routing import spread


def test_all_rows_alike_and_none():
    same, apart = torch.tensor([[0, 1]] * 16), torch.arange(32).view(16, 2)
    figures = spread({0: same, 1: apart}, 32, random.Random(1))
    assert figures["most_over_mean"] == {"worst": 16.0, "median": 8.5}  # 16 rows over a mean of 1; and 1
    assert figures["experts_a_layer"] == {"1": 2, "8": (2 + 16) / 2, "16": (2 + 32) / 2}
    assert (figures["rows"], figures["layers"]) == (16, 2)


@pytest.fixture
def measured(data_folder, monkeypatch, capsys):
    """measured(words...): (exit status, the line of routing, stderr) of noise with micro's sizes."""
    folder = data_folder / "micro" / "model"
    monkeypatch.setattr(bench_engine, "release_config", lambda: ModelConfig.load(folder))

    def run(*words):
        settings = ["--set", "stages=2", "--set", "context=512", "--set", "kv_tokens=4096", "--set", "chunk_rows=256"]
        status = cli.main(["bench", "engine", "--weights", "synthetic:3", *settings, *words])
        out, err = capsys.readouterr()
        lines = [json.loads(line) for line in out.splitlines()]
        return status, [line for line in lines if line["line"] == "routing"], err

    return run


def test_noise_spreads_and_skewed_noise_does_not(measured):
    status, (even,), _ = measured("--routing", "200")
    assert status == 0
    status, (skewed,), _ = measured("--routing", "200", "--skewed")
    assert status == 0
    assert even["weights"] == "synthetic:3, stores=5"
    assert skewed["weights"] == "synthetic:3, stores=5, skewed"
    assert even["experts_a_layer"]["1"] == skewed["experts_a_layer"]["1"] == 2
    assert 1 <= even["most_over_mean"]["worst"] < 3
    assert skewed["most_over_mean"]["median"] > even["most_over_mean"]["median"]


def test_more_rows_than_a_chunk_are_refused(measured):
    status, _, err = measured("--routing", "300")
    assert (status, "--routing 300: they go through in one chunk; --chunk-rows is smaller" in err) == (2, True)
