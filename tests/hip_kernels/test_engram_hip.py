"""Engram from the kernels: table rows exactly, gates within FP32, dead rows, rows by themselves."""

import pytest
import torch

from rocline.hip_kernels.act_quant import act_round8_hip
from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.engram import engram_gate_ref, engram_gather_ref
from rocline.hip_kernels.engram_hip import (
    FEW_ROWS,
    engram_decode_hip,
    engram_few_hip,
    engram_gate_hip,
    engram_merge_hip,
)
from rocline.hip_kernels.linear import Fp8Weight
from rocline.hip_kernels.linear_hip import fp8_linear_hip, prepare_fp8_weight
from rocline.hip_kernels.mhc import mhc_merge_ref

EPS = 1e-20


def bf16(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape)).bfloat16()


@pytest.mark.parametrize("width", [32, 256])
@pytest.mark.parametrize("n_rows", [1, 24, 99])
def test_table_rows(device, rng, n_rows, width):
    codes = torch.from_numpy(rng.integers(0, 256, (n_rows, width), dtype="uint8"))  # every code, NaN too
    scales = torch.from_numpy(rng.integers(60, 190, (n_rows, width // 32), dtype="uint8"))
    scales[0, 0] = 255
    codes[-1, 8:16] = torch.tensor([0x7F, 0, 0xFF, 1, 2, 3, 4, 0x7F])  # no numbers at either end of a word
    codes[-1, 16:24] = torch.tensor([0x7E, 0xFE, 0x7E, 0xFE, 0x7E, 0xFE, 0x7E, 0xFF])
    want = engram_gather_ref(torch.arange(n_rows)[:, None], codes, scales).bfloat16()
    got = device.full((n_rows, width), 7.0, torch.bfloat16)
    engram_decode_hip(device.put(codes), device.put(scales), got)
    got = device.get(got)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~got.isnan()].view(torch.int16), want[~want.isnan()].view(torch.int16))


class Case:
    def __init__(self, rng, n_rows, width):
        self.rows = [bf16(rng, n_rows, 4, width), bf16(rng, n_rows, 5 * width)]
        self.alive = torch.from_numpy(rng.integers(0, 4, n_rows) > 0).byte()
        self.weights = [bf16(rng, 4, width) for _ in range(2)]

    def run(self, device, rows=slice(None)):
        put = device.put
        streams, kv = (put(x[rows]) for x in self.rows)
        gates = device.full((len(streams), 4), float("nan"))
        engram_gate_hip(streams, kv, *map(put, self.weights), put(self.alive[rows]), EPS, streams, gates)
        return device.get(streams), device.get(gates)


@pytest.mark.parametrize("width", [96, 520, 5120])
@pytest.mark.parametrize("n_rows", [1, 6])
def test_gates(device, rng, n_rows, width):
    case = Case(rng, n_rows, width)
    case.rows[1][0, : 4 * width] = case.rows[0][0].flatten()  # a strong gate
    case.alive[0] = 1
    out, gates = case.run(device)
    _, want = engram_gate_ref(*case.rows, *case.weights, case.alive, EPS)
    # d is a sum of both signs divided by its terms' size: 1e-6 of that, and a root takes half as many digits near 0.
    assert (gates - want).abs().max() < 1e-3
    assert (gates - want).abs().median() < 1e-6
    streams, value = case.rows[0].float(), case.rows[1].float().unflatten(1, (5, width))[:, 4:]
    assert torch.equal(out, (streams + gates[:, :, None] * value).bfloat16())  # given its gates, every bit
    assert torch.equal(gates == 0, (case.alive == 0)[:, None].expand(-1, 4))


@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize("width", [96, 520])
def test_a_sublayer_may_be_merged_first(device, rng, width, merges):
    n_rows, case, put = 5, Case(rng, 5, width), device.put
    sublayer, post, comb = bf16(rng, n_rows, width), bf16(rng, n_rows, 4).float(), bf16(rng, n_rows, 4, 4).float()
    lookback = torch.from_numpy(rng.integers(0, 9, (n_rows, 3))).int()
    lookback[:, 0] = torch.where(case.alive == 0, -1, lookback[:, 0])
    streams, kv = map(put, case.rows)
    gates = device.full((n_rows, 4), float("nan"))
    merging = map(put, (sublayer, post, comb)) if merges else (None, None, None)
    engram_merge_hip(streams, *merging, kv, *map(put, case.weights), put(lookback), EPS, gates)
    if merges:
        case.rows[0] = mhc_merge_ref(sublayer, case.rows[0], post, comb)
    for got, want in zip((streams, gates), case.run(device), strict=True):
        assert torch.equal(device.get(got), want)


@pytest.mark.parametrize("n_rows", [1, 2, 6, 15, 16, 17, 33, 64, 65])
def test_rows_are_their_own(device, rng, n_rows):
    case = Case(rng, 65, 96)
    case.alive[60:] = 1
    case.rows[0][64, 1, 3], case.rows[1][62, 2 * 96 + 1] = float("nan"), float("inf")
    full, some = case.run(device), case.run(device, slice(65 - n_rows, 65))
    for got, want in zip(some, full, strict=True):
        assert torch.equal(got.view(torch.uint8), want[65 - n_rows :].view(torch.uint8))
    assert full[1][64, 1].isnan()
    assert full[1][64, [0, 2, 3]].isfinite().all()
    assert full[0][:62].isfinite().all()


class Whole:
    """Rows from the table's on, of `width` channels a stream and n_in from the table."""

    def __init__(self, device, rng, n_rows, width, n_in):
        put = device.put

        def u8(low, high, *shape):
            return torch.from_numpy(rng.integers(low, high, shape)).byte()

        codes = u8(0, 256, n_rows, n_in)
        codes[codes & 0x7F == 0x7F] = 0x80
        if n_rows > 1:
            codes[0, 3] = 0xFF  # not a number: in its own row alone
        self.device, self.table = device, (put(codes), put(u8(118, 126, n_rows, n_in // 32)))
        weight = Fp8Weight(u8(0, 0x7F, 5 * width, n_in), u8(112, 120, -(-5 * width // 32), n_in // 32))
        self.wkv = prepare_fp8_weight(Fp8Weight(*map(put, weight)))
        self.streams, self.merging = (
            bf16(rng, n_rows, 4, width),
            tuple(map(put, (bf16(rng, n_rows, width), bf16(rng, n_rows, 4).float(), bf16(rng, n_rows, 4, 4).float()))),
        )
        self.weights = [put(bf16(rng, 4, width)) for _ in range(2)]
        lookback = torch.from_numpy(rng.integers(0, 9, (n_rows, 3))).int()
        lookback[1:, 0] = -1  # dead
        self.lookback = put(lookback)

    def run(self, merges, counter):
        """Streams and gates; by one launch where a counter is given."""
        n_rows, _, width = self.streams.shape
        streams, full = self.device.put(self.streams), self.device.full
        kv = full((n_rows, 5 * width), float("nan"), torch.bfloat16)
        gates, merging = full((n_rows, 4), float("nan")), self.merging if merges else (None, None, None)
        at_end = *self.weights, self.lookback, EPS, gates
        if counter is None:
            values = full((n_rows, self.wkv.n_in), float("nan"), torch.bfloat16)
            engram_decode_hip(*self.table, values)
            act_round8_hip(values, values)
            fp8_linear_hip(values, self.wkv, kv)
            engram_merge_hip(streams, *merging, kv, *at_end)
        else:
            engram_few_hip(*self.table, self.wkv, kv, streams, *merging, *at_end, counter)
        got = [self.device.get(tensor) for tensor in (streams, gates)]
        for tensor in got:
            tensor[tensor.isnan()] = float("nan")  # which one a sum of two keeps is the compiler's choice
        return [tensor.view(torch.uint8) for tensor in got]


@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize(("width", "n_in"), [(96, 64), (520, 1024), (5120, 6144)])
@pytest.mark.parametrize("n_rows", [1, FEW_ROWS])
def test_the_same_bits_as_one_by_one(device, rng, n_rows, width, n_in, merges):
    if width == 5120 and not device.is_card:
        pytest.skip("the release's width needs a GPU: --hip rocm, or --hip cuda on an NVIDIA one")
    case, counter = Whole(device, rng, n_rows, width, n_in), device.full((1,), 0, torch.int32)
    want = case.run(merges, None)
    for _ in range(3):  # a race would give several answers
        assert all(map(torch.equal, case.run(merges, counter), want))
    assert not device.get(counter).any()
    gates = want[1].view(torch.float32)
    assert gates[-1].isfinite().all()
    assert gates.isnan().any() == (n_rows > 1)


def test_more_rows_are_refused(device, rng):
    case = Whole(device, rng, FEW_ROWS + 1, 32, 64)
    with pytest.raises(BindError, match="3 rows, a weight of 1 x 160 columns; want at most 2, and 160"):
        case.run(True, device.full((1,), 0, torch.int32))


def test_what_does_not_fit_is_named():
    with pytest.raises(BindError, match="rows of 64 codes with 3 scales"):
        engram_decode_hip(torch.zeros(2, 64).byte(), torch.zeros(2, 3).byte(), torch.zeros(2, 64).bfloat16())
