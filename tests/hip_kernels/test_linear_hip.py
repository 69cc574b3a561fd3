"""Matrix products on the GPU: the references within FP32's order of addition, and rows that are their own.

Tails of rows, columns and channels, weights at extreme scales (cases B24 to B26), a row alone and in company (B23).
"""

import pytest
import torch

from rocline.hip_kernels import linear_hip
from rocline.hip_kernels.act_quant import act_round8
from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.formats import dequantise_tiles
from rocline.hip_kernels.grouped_projection import grouped_projection
from rocline.hip_kernels.grouped_projection_hip import grouped_projection_hip
from rocline.hip_kernels.head import head
from rocline.hip_kernels.head_hip import head_hip
from rocline.hip_kernels.linear import Fp8Weight, bf16_linear, f32_linear, fp8_linear
from rocline.hip_kernels.linear_hip import (
    bf16_linear_hip,
    f32_linear_hip,
    fp8_linear_hip,
    prepare_bf16_weight,
    prepare_fp8_weight,
    workspace_floats,
)

ROWS = [1, 2, 6, 15, 16, 17, 33, 64, 65]


def fp8_weight(rng, n_out, n_in, spread=4):
    """Finite codes of every kind, subnormal ones too, and scales around 2^-8."""
    codes = torch.from_numpy(rng.integers(0, 256, (n_out, n_in))).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x38
    scales = torch.from_numpy(rng.integers(119 - spread, 119 + spread + 1, (-(-n_out // 32), n_in // 32)))
    return Fp8Weight(codes, scales.to(torch.uint8))


def rows(rng, n_rows, n_in):
    return torch.from_numpy(rng.standard_normal((n_rows, n_in))).bfloat16()


def rounded(x):
    out = torch.empty_like(x)
    act_round8(x, out)
    return out


def workspace(device, n_rows, tiles):
    return device.full((max(1, workspace_floats(n_rows, tiles)),), float("nan"))


def put_weight(device, weight):
    return Fp8Weight(*map(device.put, weight))


def assert_near(got, want, x, weight_f32):
    """FP32 sums of K products in two orders: each rounds K times, a part in 2^24 of the sum of sizes; then BF16, where
    neighbours are up to a part in 2^7 apart."""
    sizes = x.float().abs() @ weight_f32.abs().T
    bound = sizes * x.shape[1] * 2.0**-23
    if got.dtype == torch.bfloat16:
        bound = bound + want.float().abs() * 2.0**-7
    assert ((got.float() - want.float()).abs() <= bound).all()


@pytest.mark.parametrize(("n_out", "n_in"), [(16, 32), (40, 96), (136, 256), (264, 320)])
@pytest.mark.parametrize("n_rows", ROWS)
def test_fp8_linear(device, rng, n_rows, n_out, n_in):
    weight, x = fp8_weight(rng, n_out, n_in), rows(rng, n_rows, n_in)
    want = torch.empty((n_rows, n_out), dtype=torch.bfloat16)
    fp8_linear(x, weight, want)
    tiles = prepare_fp8_weight(put_weight(device, weight))
    results = []
    for _ in range(2):
        got = device.full(want.shape, float("nan"), torch.bfloat16)
        fp8_linear_hip(device.put(rounded(x)), tiles, got, workspace(device, n_rows, tiles))
        results.append(device.get(got))
    assert_near(results[0], want, rounded(x), dequantise_tiles(*weight).float())
    assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16))


@pytest.mark.parametrize("scale", [0, 1, 6, 126, 127, 134])
def test_every_code_times_an_extreme_scale(device, scale):
    """B24, B25, B26: rows of an identity read single weights, wherever code times scale is a normal BF16 or zero."""
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    codes[(codes & 0x7F) == 0x7F] = 0
    weight = Fp8Weight(codes, torch.tensor([[scale]], dtype=torch.uint8))
    exact = codes.view(torch.float8_e4m3fn).double() * 2.0 ** (scale - 127)
    codes[(exact != 0) & ((exact.abs() < 2.0**-126) | (exact.abs() >= 2.0**128))] = 0  # the loader refuses these
    exact = codes.view(torch.float8_e4m3fn).double() * 2.0 ** (scale - 127)
    tiles = prepare_fp8_weight(put_weight(device, weight))
    got = device.full((32, 8), float("nan"))
    one = torch.eye(32).bfloat16()
    f32_linear_hip(device.put(one), tiles, got, workspace(device, 32, tiles))
    assert torch.equal(device.get(got).double(), exact.T)
    assert exact.count_nonzero() > 60


def test_scales_beyond_reach_are_refused(device):
    weight = Fp8Weight(torch.zeros((16, 32), dtype=torch.uint8), torch.tensor([[135]], dtype=torch.uint8))
    with pytest.raises(BindError, match="code 135"):
        prepare_fp8_weight(put_weight(device, weight))
    with pytest.raises(BindError, match="come in 32s"):
        prepare_bf16_weight(device.put(torch.zeros((16, 40)).bfloat16()))


@pytest.mark.parametrize(("n_out", "n_in"), [(8, 64), (130, 96), (200, 288)])
@pytest.mark.parametrize("n_rows", [1, 6, 17, 65])
def test_unquantised_linears(device, rng, n_rows, n_out, n_in):
    weight, x = rows(rng, n_out, n_in), rows(rng, n_rows, n_in)
    tiles = prepare_bf16_weight(device.put(weight))
    for dtype, reference, kernel in (
        (torch.bfloat16, bf16_linear, bf16_linear_hip),
        (torch.float32, f32_linear, f32_linear_hip),
    ):
        want = torch.empty((n_rows, n_out), dtype=dtype)
        reference(x, weight, want)
        got = device.full(want.shape, float("nan"), dtype)
        kernel(device.put(x), tiles, got, workspace(device, n_rows, tiles))
        assert_near(device.get(got), want, x, weight.float())


@pytest.mark.parametrize("n_rows", [1, 20, 70])
def test_head_flags_rows_that_are_not_finite(device, rng, n_rows):
    weight, x = rows(rng, 150, 64), rows(rng, n_rows, 64)
    x[-1, 3] = float("nan")
    x[n_rows // 2, 5] = float("inf")
    want, finite = torch.empty((n_rows, 150)), torch.empty(n_rows, dtype=torch.uint8)
    head(x, weight, want, finite)
    tiles = prepare_bf16_weight(device.put(weight))
    got, flags = device.full(want.shape, float("nan")), device.full((n_rows,), 7, torch.uint8)
    head_hip(device.put(x), tiles, got, flags, workspace(device, n_rows, tiles))
    assert torch.equal(device.get(flags), finite)
    good = finite.bool()
    assert_near(device.get(got)[good], want[good], x[good], weight.float())


@pytest.mark.parametrize(("groups", "n_out", "n_in"), [(2, 48, 128), (4, 40, 256), (2, 136, 32)])
@pytest.mark.parametrize("n_rows", [1, 17, 66])
def test_grouped_projection(device, rng, n_rows, groups, n_out, n_in):
    """Groups of 40 and 48 rows end inside a 32-row scale tile."""
    weight = fp8_weight(rng, groups * n_out, n_in)
    heads = rows(rng, n_rows, groups * n_in).view(n_rows, groups * 2, -1)
    want = torch.empty((n_rows, groups * n_out), dtype=torch.bfloat16)
    grouped_projection(heads, weight, groups, want)
    tiles = prepare_fp8_weight(put_weight(device, weight), groups)
    got = device.full(want.shape, float("nan"), torch.bfloat16)
    grouped_projection_hip(device.put(heads), tiles, got, workspace(device, n_rows, tiles))
    x = heads.flatten(1).unflatten(1, (groups, n_in))
    dense = dequantise_tiles(*weight).float().unflatten(0, (groups, n_out))
    for g in range(groups):
        columns = slice(g * n_out, (g + 1) * n_out)
        assert_near(device.get(got)[:, columns], want[:, columns], x[:, g], dense[g])


@pytest.mark.parametrize("n_in", [96, 320])  # fewer channel blocks than segments, and more
def test_b23_a_rows_bits_are_its_own(device, rng, n_in):
    """Alone, in 17, in 65, in 130, at another place: one answer, through every kernel and both ways to add segments."""
    n_out = 136
    weight, x = fp8_weight(rng, n_out, n_in), rounded(rows(rng, 130, n_in))
    tiles = prepare_fp8_weight(put_weight(device, weight))

    def bits(part):
        got = device.full((len(part), n_out), float("nan"))
        f32_linear_hip(device.put(part), tiles, got, workspace(device, len(part), tiles))
        return device.get(got).view(torch.int32)

    alone = torch.cat([bits(x[i : i + 1]) for i in range(0, 130, 13)])
    for n_rows in (17, 64, 65, 130):
        assert torch.equal(bits(x[:n_rows])[::13], alone[: -(-n_rows // 13)])
    assert torch.equal(bits(x.flip(0)).flip(0)[::13], alone)
    broken = x.clone()
    broken[1] = float("nan")  # a neighbour's NaN stays its own
    assert torch.equal(bits(broken)[::13], alone)


def test_segments_added_in_one_workgroup_or_by_many(device, rng, monkeypatch):
    weight, x = fp8_weight(rng, 136, 320), rounded(rows(rng, 70, 320))
    tiles = prepare_fp8_weight(put_weight(device, weight))
    monkeypatch.setattr(linear_hip, "_plan", linear_hip._plan.__wrapped__)  # which remembers
    results = []
    for enough in (0, 192):
        monkeypatch.setitem(linear_hip.ENOUGH_WORKGROUPS, 128, enough)
        assert (workspace_floats(70, tiles) > 0) == (enough > 0)
        got = device.full((70, 136), float("nan"))
        f32_linear_hip(device.put(x), tiles, got, workspace(device, 70, tiles))
        results.append(device.get(got))
    assert torch.equal(results[0].view(torch.int32), results[1].view(torch.int32))
