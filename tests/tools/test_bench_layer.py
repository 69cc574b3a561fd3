"""bench_layer: its names are of operators that it has, and without a card it says so."""

import torch

from rocline.tools.bench_layer import ORDER, Rows, main


def test_every_operator_is_there():
    assert all(hasattr(Rows, "mixture" if what == "experts" else what) for what in ORDER)


def test_no_card(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--rows", "1"]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err
