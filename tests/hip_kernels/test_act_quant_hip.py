"""ActQuant8 on the GPU: byte for byte the reference, broken and extreme groups included (cases B24, B25, B30)."""

import pytest
import torch

from rocline.hip_kernels.act_quant import act_quant8_hip, act_round8, act_round8_hip
from rocline.hip_kernels.formats import act_quant8


def rows(rng, n_rows, width):
    """BF16 [R, K] whose groups' sizes span the format; some groups are zero, tiny, or hold no number."""
    x = rng.standard_normal((n_rows, width // 32, 32)) * 2.0 ** rng.integers(-40, 100, (n_rows, width // 32, 1))
    x[rng.random((n_rows, width // 32)) < 0.1] = 0.0
    x = torch.from_numpy(x).flatten(1).bfloat16()
    x[0, 0], x[-1, 33], x[-1, 70] = float("inf"), float("nan"), -float("nan")
    return x


def every_bf16_at_one_scale():
    """Groups led by 448, so that their scale is 1: every code, every tie, both signs."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    small = bits[bits.abs() <= 448]  # no NaN either
    small = torch.cat((small, small.new_zeros(-len(small) % 31))).view(-1, 31)
    return torch.cat((small.new_full((len(small), 1), 448.0), small), dim=1)


@pytest.mark.parametrize("width", [96, 128, 5120])
@pytest.mark.parametrize("n_rows", [1, 2, 6, 17])
def test_codes_and_scales(device, rng, n_rows, width):
    x = rows(rng, n_rows, width)
    codes, scales = act_quant8(x)
    for _ in range(2):
        got_codes, got_scales = (device.full(t.shape, 0xEE, torch.uint8) for t in (codes, scales))
        act_quant8_hip(device.put(x), got_codes, got_scales)
        assert torch.equal(device.get(got_codes), codes)
        assert torch.equal(device.get(got_scales), scales)


def test_every_rounding(device):
    x = every_bf16_at_one_scale()
    codes, scales = act_quant8(x)
    assert (scales == 127).all()
    got_codes, got_scales = (device.full(t.shape, 0xEE, torch.uint8) for t in (codes, scales))
    act_quant8_hip(device.put(x), got_codes, got_scales)
    assert torch.equal(device.get(got_codes), codes)
    assert torch.equal(device.get(got_scales), scales)


@pytest.mark.parametrize("n_rows", [1, 17])
def test_rounded_rows(device, rng, n_rows):
    x = rows(rng, n_rows, 192)
    want = torch.empty_like(x)
    act_round8(x, want)
    got = device.full(x.shape, float("nan"), torch.bfloat16)
    act_round8_hip(device.put(x), got)
    assert torch.equal(device.get(got).isnan(), want.isnan())
    assert torch.equal(device.get(got).nan_to_num(0.0).view(torch.int16), want.nan_to_num(0.0).view(torch.int16))
    in_place = device.put(x)
    act_round8_hip(in_place, in_place)
    assert torch.equal(device.get(in_place).nan_to_num(0.0), want.nan_to_num(0.0))
