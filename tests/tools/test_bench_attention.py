"""The attention benchmark's arithmetic, and what it says where there is no card."""

import json

import pytest
import torch

from rocline.tools import bench_attention


def test_attention_operations():
    """A multiplication and an addition for each channel of each slot, once for scores and once for values."""
    assert bench_attention.attention_flops(2) == 2 * 64 * 640 * 512 * 2 * 2


def test_bytes_are_compared_with_a_copy_of_as_many(monkeypatch, capsys):
    """An operator of 2 ms beside a copy of as many bytes of 1 ms has half its rate."""
    asked = []

    def timed_ms(calls, repeats):
        asked.append((len(calls), repeats))
        return 2.0

    monkeypatch.setattr(bench_attention, "captured", lambda call: call)
    monkeypatch.setattr(bench_attention, "timed_ms", timed_ms)
    monkeypatch.setattr(bench_attention, "copy_gb_per_s", lambda n_bytes, repeats: n_bytes / 1e6)
    bench_attention.say("an operator", [print, print], 4_000_000_000, 7, rows=3)
    line = json.loads(capsys.readouterr().out)
    assert line == {"what": "an operator", "ms": 2.0, "gb_per_s": 2000, "of_copy": 0.5, "rows": 3}
    assert asked == [(2, 7)]


def test_without_a_card_it_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_attention.main([]) == 1
    assert "install its ROCm build" in capsys.readouterr().err


def test_a_wrong_flag_stops_it():
    with pytest.raises(SystemExit):
        bench_attention.main(["--repeats", "many"])
