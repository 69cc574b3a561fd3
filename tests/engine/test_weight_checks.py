"""Which codes and scales a loader takes: every code byte with every scale byte; where a bad one is named."""

import pytest
import torch

from rocline.engine.shards import CheckpointError
from rocline.engine.weight_checks import check_finite, check_quantised
from rocline.hip_kernels.formats import e2m1_decode, e4m3_decode, e8m0_decode, unpack_e2m1

NAME = "layers.1.attn.wq_a.weight"


def allowed(kind):
    """The rule in FP64, [256 code bytes, 256 scale bytes]: products zero or normal, and exact in BF16."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = e4m3_decode(codes)[:, None] if kind == "e4m3" else e2m1_decode(unpack_e2m1(codes[:, None]))
    products = values.double()[:, None] * e8m0_decode(codes).double()[:, None]
    normal = (products.abs() >= 2.0**-126) & (products.abs() <= torch.finfo(torch.bfloat16).max)
    exact = products.bfloat16().double() == products  # not so for NaN
    return (((products == 0) | normal) & exact).all(dim=-1)


def refused(*args, **options):
    try:
        check_quantised(NAME, *args, **options)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("kind", "group_bytes", "safe"), [("e4m3", 32, range(10, 247)), ("e2m1x2", 16, range(2, 253))])
def test_every_code_with_every_scale(kind, group_bytes, safe):
    """Cases B24 to B26 and B30: a code byte alone in its row, with the scales it may have and with others."""
    rule = allowed(kind)
    assert rule[rule.any(dim=1)].all(dim=0).nonzero()[:, 0].tolist() == list(safe)
    for code in range(256):
        scales = rule[code].nonzero().to(torch.uint8)
        codes = torch.zeros(len(scales), group_bytes, dtype=torch.uint8)
        codes[:, 5] = code
        if len(scales):
            assert refused(kind, codes, scales) is None
        for scale in {*range(256)} - {*scales[:, 0].tolist()} if code % 16 in (1, 15) else ():
            one = torch.zeros(2, group_bytes, dtype=torch.uint8)
            one[1, 5] = code
            message = refused(kind, one, torch.tensor([[127], [scale]], dtype=torch.uint8))
            assert message is not None, (code, scale)
            assert message.startswith(NAME)


def test_a_tile_holds_its_scale_for_32_rows():
    codes = torch.zeros(70, 96, dtype=torch.uint8)  # three row tiles, the last of 6 rows
    scales = torch.full((3, 3), 120, dtype=torch.uint8)
    scales[2, 1] = 9
    assert refused("e4m3", codes, scales) is None  # zeros take any scale
    codes[69, 63] = 0x01  # 2^-9 * 2^-118 is below 2^-126
    message = refused("e4m3", codes, scales)
    assert "code byte 0x01 times scale byte 9 at [69, 63]" in message
    codes[69, 63] = 0x02  # 2^-126 is the smallest normal number
    codes[63, 63] = 0x01  # another tile's row
    assert refused("e4m3", codes, scales) is None


def test_a_row_range_names_the_tensors_own_row():
    codes = torch.zeros(64, 32, dtype=torch.uint8)
    codes[40, 3] = 0x7E  # 448
    scales = torch.full((2, 1), 127, dtype=torch.uint8)
    scales[1] = 247
    assert "0x7E times scale byte 247 at [1064, 3]" in refused("e4m3", codes, scales, row_start=1024)
    codes[7, 0] = 0xFF
    assert "code 0xFF (NaN) at [1031, 0]" in refused("e4m3", codes, scales, row_start=1024)
    scales[1] = 255
    assert "scale byte 255 (NaN) at scale [33, 0]" in refused("e4m3", codes, scales, row_start=1024)


def test_packed_rows_have_a_scale_each():
    codes = torch.zeros(5, 48, dtype=torch.uint8)
    scales = torch.full((5, 3), 100, dtype=torch.uint8)
    scales[3, 2] = 1
    codes[3, 47] = 0x20  # the high nibble: 1.0, and 2^-126 is normal
    assert refused("e2m1x2", codes, scales) is None
    codes[3, 47] = 0x12  # the high nibble: 0.5
    assert "code byte 0x12 times scale byte 1 at [3, 47]" in refused("e2m1x2", codes, scales)
    codes[3, 47] = 0xF7  # +-6
    scales[3, 2] = 253
    assert "times scale byte 253" in refused("e2m1x2", codes, scales)
    scales[3, 2] = 252
    assert refused("e2m1x2", codes, scales) is None


def test_extreme_scales_beyond_one_look_up(monkeypatch):
    monkeypatch.setattr("rocline.engine.weight_checks._CODE_BYTES_AT_ONCE", 100)
    codes = torch.zeros(1000, 32, dtype=torch.uint8)
    scales = torch.zeros(1000, 1, dtype=torch.uint8)
    assert refused("e4m3", codes, scales) is None
    codes[998, 31] = 0x81
    assert "at [998, 31]" in refused("e4m3", codes, scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_plain_weights_are_finite(dtype, bad):
    values = torch.full((4, 8), torch.finfo(dtype).max, dtype=dtype)
    check_finite(NAME, values, row_start=10)
    values[2, 7] = bad
    with pytest.raises(CheckpointError, match=rf"{bad} at \[12, 7\], 1 not finite"):
        check_finite(NAME, values, row_start=10)
    with pytest.raises(CheckpointError, match=r"at \[7\]"):
        check_finite(NAME, values[2])
