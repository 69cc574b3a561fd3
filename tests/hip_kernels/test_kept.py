"""Decoded weights kept from call to call: as long as their source lives and stays as it is, up to a bound."""

import gc

import pytest
import torch

from rocline.hip_kernels import linear
from rocline.hip_kernels.kept import Kept
from rocline.hip_kernels.linear import Fp8Weight, fp8_linear


def counting(source):
    """What makes source + 1, and how often it did."""
    calls = []

    def make():
        calls.append(1)
        return (source + 1,)

    return make, calls


def test_made_once_for_each_name():
    kept, source = Kept(), torch.zeros(4)
    make, calls = counting(source)
    first = kept.of(source, 0, make)
    assert kept.of(source, 0, make) is first
    assert kept.of(source, 1, make) is not first
    assert len(calls) == 2
    assert kept.n_bytes == 2 * 16


def test_made_again_after_a_write():
    kept, source = Kept(), torch.zeros(4)
    make, _ = counting(source)
    kept.of(source, 0, make)
    source[2] = 5.0
    assert kept.of(source, 0, make)[0].tolist() == [1.0, 1.0, 6.0, 1.0]
    assert kept.n_bytes == 16


def test_gone_with_its_source():
    kept = Kept()
    for n in range(50):  # addresses come back
        source = torch.full((4,), float(n))
        make, _ = counting(source)
        assert kept.of(source, 0, make)[0][0] == n + 1
        del source, make
        gc.collect()
        assert kept.n_bytes == 0


def test_no_more_than_fits():
    kept, sources = Kept(most_bytes=40), [torch.zeros(4) for _ in range(3)]
    for source in sources:
        make, calls = counting(source)
        kept.of(source, 0, make)
        kept.of(source, 0, make)
        assert len(calls) == (1 if source is not sources[2] else 2)
    assert kept.n_bytes == 32


def test_nothing_of_inference_tensors():
    with torch.inference_mode():
        kept, source = Kept(), torch.zeros(4)
        make, calls = counting(source)
        kept.of(source, 0, make)
        source[0] = 7.0
        assert kept.of(source, 0, make)[0][0] == 8.0
    assert len(calls) == 2
    assert kept.n_bytes == 0


@pytest.mark.parametrize("most_bytes", [0, 1 << 20])
def test_a_linear_sees_its_weight_change(monkeypatch, most_bytes):
    monkeypatch.setattr(linear, "kept", Kept(most_bytes))
    weight = Fp8Weight(torch.full((32, 32), 0x38, dtype=torch.uint8), torch.full((1, 1), 127, dtype=torch.uint8))
    x, out = torch.ones(2, 32).bfloat16(), torch.empty(2, 32).bfloat16()
    for _ in range(2):
        fp8_linear(x, weight, out)
        assert (out == 32).all()
    weight.codes_e4m3[5] = 0x40  # 2.0
    fp8_linear(x, weight, out)
    assert (out[:, 5] == 64).all()
    assert (out[:, 6] == 32).all()
