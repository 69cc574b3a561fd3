"""bench_gemm: the shapes it measures are the release's, and without a card it says so."""

import pytest
import torch

from rocline.engine.layout import expected_tensors
from rocline.engine.release import release_config
from rocline.tools.bench_gemm import DENSE, INNER, WIDTH, main


def release_shapes():
    return {name: tuple(spec.shape) for name, spec in expected_tensors(release_config()).items()}


@pytest.mark.parametrize("name", DENSE)
def test_dense_shapes_are_the_releases(name):
    part = name.replace("shared ", "shared_experts.")
    found = {shape for tensor, shape in release_shapes().items() if tensor.endswith(f".{part}.weight")}
    assert DENSE[name] in found


def test_expert_shapes_are_the_releases():
    shapes = release_shapes()
    assert shapes["layers.0.ffn.experts.0.w1.weight"] == (INNER, WIDTH // 2)  # two codes a byte
    assert shapes["layers.0.ffn.experts.0.w2.weight"] == (WIDTH, INNER // 2)


def test_no_card(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err
