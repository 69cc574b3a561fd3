"""What row kernels share: roots, exponentials, quantisers, decoders and transposed fragments, on the tests' device."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rocline.hip_kernels.explog import EXP_FLOOR, exp_f32, log_f32
from rocline.hip_kernels.formats import e2m1_encode, e2m1x2_decode, e4m3_decode, e4m3_encode, e8m0_decode
from rocline.hip_kernels.kernel import Kernel, launch

PROBES = Path(__file__).with_name("row_probes.hip")
FUNCTIONS = Kernel(PROBES, "functions", "P" * 8 + "i", threads=64)
VALUES = Kernel(PROBES, "values", "PPPPi", threads=64)
COLUMNS = Kernel(PROBES, "columns", "PPPPP", threads=32, lds_bytes=2 * 16 * 24 * 2)


def every_size(rng, n):
    """FP32 numbers of all exponents but subnormal ones, and the ends of explog.py's ranges."""
    x = np.exp2(rng.uniform(-126, 127, n)) * rng.choice([-1, 1], n)
    ends = [1.0, 2.0, 0.5, -EXP_FLOOR, np.nextafter(np.float32(86), np.float32(87)), 1.4142135, 448, 464, 0.0146484375]
    return torch.from_numpy(np.concatenate((x, rng.uniform(-100, 100, n), ends))).float()


def test_functions(device, rng):
    x = every_size(rng, 3000)
    n = len(x)
    outs = [device.full((n,), float("nan")) for _ in range(5)]
    codes = [device.full((n,), -1, torch.int32) for _ in range(2)]
    launch(FUNCTIONS, grid=(n // 64 + 1, 1), args=(device.put(x), *outs, *codes, n))
    roots, powers, logs, exps, sigmoids = map(device.get, outs)
    assert torch.equal(roots, x.abs().double().sqrt().float())
    exact = torch.exp2(x.double())
    normal = (exact > 2.0**-126) & (exact < 2.0**127)
    assert ((powers.double() - exact).abs() <= 2**-22 * exact)[normal].all()
    assert (powers[exact < 2.0**-150] == 0).all()
    assert torch.equal(logs, log_f32(x.abs()))
    assert torch.equal(exps, exp_f32(-x.abs()))
    e = exp_f32(-x.abs())
    assert torch.equal(sigmoids, torch.where(x < 0, e, 1.0) / (1.0 + e))
    assert torch.equal(device.get(codes[0]), e4m3_encode(x).int())
    assert torch.equal(device.get(codes[1]), e2m1_encode(x).int())


def test_quantisers_at_every_boundary(device):
    """All E4M3 values, the middles between neighbours, and a step to either side of each."""
    positive = e4m3_decode(torch.arange(0x7F, dtype=torch.uint8))
    exact = torch.cat((positive, (positive[1:] + positive[:-1]) / 2))
    around = torch.cat((exact, torch.nextafter(exact, exact + 1), torch.nextafter(exact, exact - 1)))
    x = torch.cat((around, -around, torch.tensor([float("inf"), -float("inf"), float("nan")])))
    n = len(x)
    outs = [device.full((n,), float("nan")) for _ in range(5)]
    codes = [device.full((n,), -1, torch.int32) for _ in range(2)]
    launch(FUNCTIONS, grid=(n // 64 + 1, 1), args=(device.put(x), *outs, *codes, n))
    assert torch.equal(device.get(codes[0])[:-1], e4m3_encode(x).int()[:-1])
    assert device.get(codes[0])[-1] & 0x7F == 0x7F
    assert torch.equal(device.get(codes[1]), e2m1_encode(x).int())
    assert device.get(outs[3])[-1].isnan()
    assert device.get(outs[4])[-1].isnan()


@pytest.mark.parametrize("broken", [False, True])
def test_decoders(device, rng, broken):
    n = 400
    codes = torch.from_numpy(rng.integers(0, 256, (n, 4), dtype="uint8"))
    codes[(codes & 0x7F) == 0x7F] = 0x7E  # a code that is no number goes with a scale that is none
    scales = torch.from_numpy(rng.integers(1, 0x7F, n)).int()  # the least that is ever stored is 2^-9
    if broken:
        scales[:] = 255
    got = [device.full((n, 8), 7.0, torch.bfloat16) for _ in range(2)]
    words = codes.view(torch.int32)[:, 0]
    launch(VALUES, grid=(n // 64 + 1, 1), args=(device.put(words), device.put(scales), *got, n))
    of_e2m1, of_e4m3 = map(device.get, got)
    eight = torch.cat((codes, codes.roll(-1, 0)), 1)
    if broken:
        assert of_e2m1.isnan().all()
        assert of_e4m3.isnan().all()
        return
    want = e2m1x2_decode(codes) * e4m3_decode(scales.to(torch.uint8))[:, None]
    assert torch.equal(of_e2m1.view(torch.int16), want.bfloat16().view(torch.int16))
    normal = (scales > 20)[:, None].expand(-1, 8)  # below, products are subnormal in BF16
    want = e4m3_decode(eight) * e8m0_decode(scales.to(torch.uint8))[:, None]
    assert torch.equal(of_e4m3.view(torch.int16)[normal], want.bfloat16().view(torch.int16)[normal])


def test_columns(device, rng):
    a, b = (torch.from_numpy(rng.integers(-8, 9, (16, 16))).bfloat16() for _ in range(2))
    out = device.full((256 + 32 * 4,), float("nan"))
    maxima, sums = device.full((16, 16), float("nan")), device.full((16, 16), float("nan"))
    launch(COLUMNS, grid=(1, 1), args=(device.put(a), device.put(b), out, maxima, sums), lds_bytes=COLUMNS.lds_bytes)
    product = a.float() @ b.float()  # whole numbers: exact
    assert torch.equal(device.get(out)[:256].view(16, 16), product)
    assert torch.equal(device.get(maxima), product.amax(0).expand(16, -1))
    assert torch.equal(device.get(sums), product.sum(0).expand(16, -1))
    own = device.get(out)[256:]
    assert set(own[~own.isnan()].int().tolist()) == set(range(16))
