"""port.hip.h: every primitive, on whatever device the tests run, against plain arithmetic."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rocline.hip_kernels.kernel import Kernel, launch

PROBES = Path(__file__).with_name("port_probes.hip")
LANES = Kernel(PROBES, "lanes", "P" * 12, threads=64)
NUMBERS = Kernel(PROBES, "numbers", "P" * 13 + "i", threads=64)
PRODUCT_I8 = Kernel(PROBES, "product_i8", "PPPPii", threads=32)
PRODUCT_FROM = Kernel(PROBES, "product_from", "PPiP", threads=32, lds_bytes=2048)
PRODUCT_BF16 = Kernel(PROBES, "product_bf16", "PPPPii", threads=32, lds_bytes=65536)
EXCHANGE = Kernel(PROBES, "exchange", "PPP", threads=128, lds_bytes=136 * 4)
ADD_UP = Kernel(PROBES, "add_up", "PPPPi", threads=128, lds_bytes=4)
ROTATE = Kernel(PROBES, "rotate", "PP", threads=32, lds_bytes=128)
ARGUMENTS = Kernel(PROBES, "arguments", "PiqfPi", threads=32)


def ints(rng, *shape):
    return torch.from_numpy(rng.integers(-(2**31), 2**31, shape, dtype=np.int32))


def test_lanes(device, rng):
    v, x = ints(rng, 64), torch.from_numpy(rng.standard_normal(64, dtype=np.float32))
    source = torch.from_numpy(rng.integers(0, 32, 64, dtype=np.int32))  # not a permutation
    got = {name: device.full((64,), -1, torch.int32) for name in ("shuffled", "ballot", "rank", "wave", "sum", "max")}
    shuffled_f32, sums_f32 = device.full((64,), float("nan")), device.full((64,), float("nan"))
    xors = device.full((4, 64), -1, torch.int32)
    args = (got["shuffled"], shuffled_f32, xors, got["ballot"], got["rank"], got["wave"], got["sum"], sums_f32)
    launch(LANES, grid=(1, 1), args=(device.put(v), device.put(x), device.put(source), *args, got["max"]))
    got = {name: device.get(tensor) for name, tensor in got.items()}

    lane, wave = torch.arange(64) % 32, torch.arange(64) // 32 * 32
    assert torch.equal(got["shuffled"], v[wave + source])
    assert torch.equal(device.get(shuffled_f32), x[wave + source])
    for row, mask in zip(device.get(xors), (1, 7, 8, 16), strict=True):
        assert torch.equal(row, v[wave + (lane ^ mask)]), mask
    odd = (v & 1).view(2, 32)
    bits = (odd.long() << torch.arange(32)).sum(1).repeat_interleave(32)
    assert torch.equal(got["ballot"].long() & 0xFFFFFFFF, bits)
    assert torch.equal(got["rank"], (odd.cumsum(1) - odd).flatten().int())
    assert torch.equal(got["wave"], torch.arange(64, dtype=torch.int32))
    assert torch.equal(got["sum"], v.view(2, 32).sum(1, dtype=torch.int32).repeat_interleave(32))
    assert torch.equal(got["max"], v.view(2, 32).amax(1).repeat_interleave(32))
    halves = x.view(2, 32)
    for _ in range(5):  # the promised order: lane i with lane i + 16, then with i + 8, ...
        halves = halves[:, : halves.shape[1] // 2] + halves[:, halves.shape[1] // 2 :]
    assert torch.equal(device.get(sums_f32), halves.flatten().repeat_interleave(32))


def bf16_edges():
    """Halfway cases of both parities, the largest numbers, subnormals, infinities, zeros."""
    bits = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x00008000]
    bits += [0x00018000, 0x00000001, 0x007FFFFF, 0x7F800000, 0]
    return torch.tensor([*bits, *(b - 2**31 for b in bits)], dtype=torch.int32).view(torch.float32)


def run_numbers(device, a, b, x, y, z):
    n = len(a)
    outs = [device.full((n,), -1, torch.int32) for _ in range(3)]
    outs += [device.full((n,), -1, torch.int16)]
    outs += [device.full((n,), float("nan")) for _ in range(4)]
    launch(NUMBERS, grid=(n // 64 + 1, 1), args=(*(device.put(t) for t in (a, b, x, y, z)), *outs, n))
    return [device.get(out) for out in outs]


def test_numbers(device, rng):
    x = torch.cat((bf16_edges(), ints(rng, 4000).view(torch.float32)))
    x = x[~x.isnan()]
    n = len(x)
    a, b = ints(rng, n), ints(rng, n)
    a[0], a[1] = 0, 1
    y = torch.from_numpy(rng.standard_normal(n, dtype=np.float32))
    dots, ones, zeros, bf16, rounded, _, _, larger = run_numbers(device, a, b, x, y, y)
    signed = a.view(torch.int8).view(n, 4).long() * b.view(torch.int8).view(n, 4).long()
    assert torch.equal(dots.long(), signed.sum(1) + torch.arange(n))
    words = [int(v) & 0xFFFFFFFF for v in a]
    assert ones.tolist() == [word.bit_count() for word in words]
    assert zeros.tolist() == [32 - word.bit_length() for word in words]
    assert torch.equal(bf16, x.bfloat16().view(torch.int16))
    assert torch.equal(rounded.view(torch.int32), x.bfloat16().float().view(torch.int32))
    assert torch.equal(larger, torch.maximum(x, y))


def test_bf16_keeps_nan(device):
    bits = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7F80FFFF]  # a carry out of the payload would give infinity or zero
    x = torch.tensor([*bits, *(b - 2**31 for b in bits)], dtype=torch.int32).view(torch.float32)
    zero = torch.zeros(len(x))
    rounded = run_numbers(device, zero.int(), zero.int(), x, zero, zero)[4]
    assert rounded.isnan().all()
    assert torch.equal(torch.signbit(rounded), torch.signbit(x))


def test_nothing_is_contracted(device, rng):
    """x * y + z in the source is two roundings on every device, rl::fma one."""
    x, y = (torch.from_numpy(rng.standard_normal(4096, dtype=np.float32)) for _ in range(2))
    z = -(x * y)  # all that one rounding would leave is the product's own error
    two, one = run_numbers(device, x.int(), x.int(), x, y, z)[5:7]
    assert torch.equal(two, torch.zeros(4096))
    assert torch.equal(one, (x.double() * y.double() + z.double()).float())
    assert one.count_nonzero() > 4000


@pytest.mark.parametrize("depth", [32, 64, 160])
def test_product_i8(device, rng, depth):
    stride = depth + 16
    a, b = (torch.from_numpy(rng.integers(-128, 128, (16, stride), dtype=np.int8)) for _ in range(2))
    c, out = (
        torch.from_numpy(rng.integers(-9999, 9999, (16, 16), dtype=np.int32)),
        device.full((16, 16), -1, torch.int32),
    )
    launch(PRODUCT_I8, grid=(1, 1), args=(device.put(a), device.put(b), device.put(c), out, stride, depth))
    want = c + a[:, :depth].int() @ b[:, :depth].int().T  # neither matrix is symmetric, so no swap passes
    assert torch.equal(device.get(out), want)


@pytest.mark.parametrize("start", [0, -7, 0x4B400000])
def test_product_i8_from_lds(device, rng, start):
    a, b = (torch.from_numpy(rng.integers(-128, 128, (16, 48), dtype=np.int8)) for _ in range(2))
    out = device.full((16, 16), -1, torch.int32)
    launch(PRODUCT_FROM, grid=(1, 1), args=(device.put(a), device.put(b), start, out), lds_bytes=2048)
    assert torch.equal(device.get(out), start + a[:, 8:40].int() @ b[:, 8:40].int().T)


@pytest.mark.parametrize("depth", [16, 48, 128])
def test_product_bf16(device, rng, depth):
    stride = depth + 8
    # Small whole numbers: every order of the sums is exact, so one wrong element shows.
    a, b = (torch.from_numpy(rng.integers(-64, 65, (16, stride))).bfloat16() for _ in range(2))
    c, out = torch.from_numpy(rng.integers(-99, 99, (16, 16))).float(), device.full((16, 16), float("nan"))
    args = (device.put(a), device.put(b), device.put(c), out, stride, depth)
    launch(PRODUCT_BF16, grid=(1, 1), args=args, lds_bytes=2 * 16 * stride * 2)
    assert torch.equal(device.get(out), c + a[:, :depth].float() @ b[:, :depth].float().T)


def test_exchange_through_lds(device, rng):
    values = ints(rng, 6, 128)
    reversed_, counts = device.full((6, 128), -1, torch.int32), device.full((6, 8), -1, torch.int32)
    launch(EXCHANGE, grid=(3, 2), args=(device.put(values), reversed_, counts), lds_bytes=136 * 4)
    assert torch.equal(device.get(reversed_), values.flip(1))
    assert torch.equal(device.get(counts), torch.stack([(values & 7 == k).sum(1) for k in range(8)], 1).int())


def test_the_last_workgroup_sees_what_the_others_stored(device, rng):
    n_rows, n = 40, 24
    counters = device.full((n_rows,), 0, torch.int32)
    for _ in range(3):  # it leaves the counters as it found them
        values, doubled = ints(rng, n_rows, n, 128) >> 8, device.full((n_rows, n, 128), -1, torch.int32)
        sums = device.full((n_rows, 128), -1, torch.int32)
        launch(ADD_UP, grid=(n, n_rows), args=(device.put(values), doubled, sums, counters, n), lds_bytes=4)
        assert torch.equal(device.get(sums), (2 * values).sum(1).int())
        assert not device.get(counters).any()


def test_exchange_within_a_wave(device, rng):
    values, out = ints(rng, 32), device.full((32,), -1, torch.int32)
    launch(ROTATE, grid=(1, 1), args=(device.put(values), out), lds_bytes=128)
    assert torch.equal(device.get(out), values.roll(-2))


def test_arguments_of_every_kind(device, rng):
    values, out = (
        torch.from_numpy(rng.integers(0, 1000, (32, 4), dtype=np.int32)),
        device.full((32, 4), -1, torch.int32),
    )
    launch(ARGUMENTS, grid=(1, 1), args=(device.put(values), -5, 3 * 2**32 + 7, 0.25, out, 100))
    quarter = torch.tensor(0.25).view(torch.int32).item()
    want = torch.stack((values[:, 0] + 95, values[:, 1] + 3, values[:, 2] + 7, torch.full((32,), quarter)), 1)
    assert torch.equal(device.get(out), want.int())
