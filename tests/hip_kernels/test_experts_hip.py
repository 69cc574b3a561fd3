"""Experts on the GPU: the sort exactly, the rest within FP32's order of addition; a row's bits its own (B23, B26)."""

import pytest
import torch

from rocline.hip_kernels import experts_hip as experts_hip_module
from rocline.hip_kernels.act_quant import act_round8
from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.experts import experts
from rocline.hip_kernels.experts_hip import (
    FEW_ROWS,
    TILE_ROWS,
    ExpertRoom,
    ExpertWeights,
    expert_sort_hip,
    experts_hip,
    most_tiles,
    prepare_fp4_weight,
    prepare_fp4_weights,
    routed_down_hip,
    shared_up_hip,
)
from rocline.hip_kernels.formats import e2m1x2_decode
from rocline.hip_kernels.kernel import launch_counts
from rocline.hip_kernels.linear import Fp4Weight, Fp8Weight
from rocline.hip_kernels.linear_hip import prepare_fp8_weight

LIMIT = 10.0


def sorted_by_hand(ids, n_experts, tile_rows):
    """pairs and tiles of a stable sort, tiles padded to most_tiles with empty ones."""
    flat = ids.flatten()
    pairs = torch.sort(flat, stable=True).indices.int()
    tiles, first = [], 0
    for expert in range(n_experts):
        left = int((flat == expert).sum())
        while left > 0:
            tiles.append((expert, first, min(left, tile_rows)))
            first += min(left, tile_rows)
            left -= tile_rows
    return pairs, tiles


def choices(rng, n_rows, k, n_experts, skew):
    """[R, k] int32, distinct in a row; skew 1: every row's first is expert 0, others far apart in size."""
    ids = torch.stack([torch.from_numpy(rng.permutation(n_experts)[:k]) for _ in range(n_rows)]).int()
    if skew:
        ids[(ids != 0).all(1), 0] = 0
    return ids


@pytest.mark.parametrize("tile_rows", [FEW_ROWS, TILE_ROWS])
@pytest.mark.parametrize(
    ("n_rows", "k", "n_experts"), [(1, 2, 8), (6, 6, 384), (65, 3, 16), (700, 6, 384), (200, 1, 1)]
)
@pytest.mark.parametrize("skew", [False, True])
def test_sort(device, rng, n_rows, k, n_experts, tile_rows, skew):
    ids = choices(rng, n_rows, k, n_experts, skew)
    pairs, tiles = sorted_by_hand(ids, n_experts, tile_rows)
    for _ in range(2):
        got_pairs = device.full((n_rows * k,), -7, torch.int32)
        got_tiles = device.full((most_tiles(n_rows * k, n_experts, tile_rows), 4), -7, torch.int32)
        expert_sort_hip(device.put(ids), n_experts, tile_rows, got_pairs, got_tiles)
        assert torch.equal(device.get(got_pairs), pairs)
        used = device.get(got_tiles)
        assert used[: len(tiles), :3].tolist() == [list(tile) for tile in tiles]
        assert (used[len(tiles) :, 2] == 0).all()


def fp4_weight(rng, n_experts, n_out, n_in):
    codes = torch.from_numpy(rng.integers(0, 256, (n_experts, n_out, n_in // 2))).to(torch.uint8)
    scales = torch.from_numpy(rng.integers(122, 126, (n_experts, n_out, n_in // 32))).to(torch.uint8)
    return Fp4Weight(codes, scales)


def fp8_weight(rng, n_out, n_in):
    codes = torch.from_numpy(rng.standard_normal((n_out, n_in)) * 16).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.from_numpy(rng.integers(119, 123, (-(-n_out // 32), n_in // 32))).to(torch.uint8)
    return Fp8Weight(codes, scales)


class Case:
    """Weights of a layer, as the reference takes them and as the kernels do."""

    def __init__(self, device, rng, n_experts, width, inner):
        shapes = ((inner, width), (inner, width), (width, inner))
        self.routed = tuple(fp4_weight(rng, n_experts, *shape) for shape in shapes)
        self.shared = tuple(fp8_weight(rng, *shape) for shape in shapes)
        self.device, self.n_experts, self.width = device, n_experts, width
        self.routed_tiles = ExpertWeights(*(prepare_fp4_weight(Fp4Weight(*map(device.put, w))) for w in self.routed))
        self.shared_tiles = ExpertWeights(*(prepare_fp8_weight(Fp8Weight(*map(device.put, w))) for w in self.shared))

    def reference(self, u, ids, weights):
        out = torch.empty_like(u)
        experts(u, ids, weights, self.routed, self.shared, LIMIT, out)
        return out

    def kernels(self, u, ids, weights):
        rounded, put = torch.empty_like(u), self.device.put
        act_round8(u, rounded)
        n_bytes = ExpertRoom.bytes_for(*ids.shape, self.routed_tiles, self.shared_tiles)
        room = self.device.full((n_bytes,), 0xFF, torch.uint8)
        out = self.device.full(u.shape, float("nan"), torch.bfloat16)
        operands = (put(rounded), put(ids), put(weights), self.routed_tiles, self.shared_tiles, LIMIT)
        experts_hip(*operands, room, out)
        return self.device.get(out)


def inputs(rng, n_rows, width, ids):
    u = torch.from_numpy(rng.standard_normal((n_rows, width))).bfloat16()
    return u, ids, torch.from_numpy(rng.uniform(0.1, 1.0, ids.shape)).float()


def assert_near(got, want):
    """A hidden channel next to a rounding boundary moves by one E4M3 step, a part in 2^4 of it, when FP32 sums are
    added in another order; so outputs agree as whole rows, and nearly all of them to BF16's precision."""
    error = (got.float() - want.float()).norm(dim=1) / want.float().norm(dim=1).clamp_min(1e-6)
    assert error.max() < 2e-2
    close = (got.float() - want.float()).abs() <= want.float().abs() * 2.0**-7 + want.float().abs().amax() * 2.0**-12
    assert close.float().mean() > 0.9


@pytest.mark.parametrize(
    ("n_experts", "width", "inner"), [(8, 128, 64), (4, 96, 32), (3, 192, 96), (3, 512, 768)]
)  # the last: whole rounds of reading ahead
@pytest.mark.parametrize("n_rows", [1, 2, 6, 16, 17, 65])
def test_experts(device, rng, n_rows, n_experts, width, inner):
    case = Case(device, rng, n_experts, width, inner)
    u, ids, weights = inputs(rng, n_rows, width, choices(rng, n_rows, 2, n_experts, n_rows in (16, 65)))
    got = case.kernels(u, ids, weights)
    assert_near(got, case.reference(u, ids, weights))
    assert torch.equal(got.view(torch.int16), case.kernels(u, ids, weights).view(torch.int16))


def test_b23_a_rows_bits_are_its_own(device, rng):
    """Alone, in 16, in 17, in 70, in reverse, beside a broken row: the same; 17 rows are sorted first, 70 take the
    larger tiles."""
    case = Case(device, rng, 8, 128, 64)
    u, ids, weights = inputs(rng, 70, 128, choices(rng, 70, 2, 8, True))

    def bits(rows):
        return case.kernels(u[rows], ids[rows], weights[rows]).view(torch.int16)

    alone = torch.cat([bits(slice(row, row + 1)) for row in range(0, 70, 7)])
    for n_rows in (16, 17, 70):
        assert torch.equal(bits(slice(0, n_rows))[::7], alone[: -(-n_rows // 7)])
    backwards = torch.arange(69, -1, -1)
    assert torch.equal(bits(backwards).flip(0)[::7], alone)
    assert torch.equal(bits(backwards[-16:]).flip(0)[::7], alone[:3])
    u[1] = float("nan")
    assert torch.equal(bits(slice(0, 70))[::7], alone)
    assert torch.equal(bits(slice(0, 16))[::7], alone[:3])


def test_b23_at_lengths_read_in_whole_rounds(device, rng):
    case = Case(device, rng, 4, 512, 768)
    u, ids, weights = inputs(rng, 70, 512, choices(rng, 70, 3, 4, False))

    def bits(n_rows):
        return case.kernels(u[:n_rows], ids[:n_rows], weights[:n_rows]).view(torch.int16)

    together = bits(70)
    for n_rows in (1, 6, 9, 20):
        assert torch.equal(bits(n_rows), together[:n_rows])


def test_b23_of_the_shared_expert_in_many_workgroups(device, rng):
    """Of rows by 128 and by 64, on a card at the release's width: workgroups share a multiprocessor there, and a wave
    that overtakes the others overwrites what they still read."""
    n_rows, width, inner = (1_000, 5120, 2304) if device.is_card else (300, 128, 96)
    gate, up = (fp8_weight(rng, inner, width) for _ in range(2))
    gate, up = (prepare_fp8_weight(Fp8Weight(*map(device.put, weight))) for weight in (gate, up))
    shared = ExpertWeights(gate, up, gate)
    u = torch.from_numpy(rng.standard_normal((n_rows, width))).bfloat16()
    act_round8(u, u)
    x = device.put(u)

    def bits(first, n):
        hidden = device.full((n, inner), float("nan"), torch.bfloat16)
        shared_up_hip(x[first : first + n], shared, LIMIT, hidden)
        return device.get(hidden).view(torch.int16)

    by_64 = torch.cat([bits(first, min(64, n_rows - first)) for first in range(0, n_rows, 64)])
    for _ in range(3):
        assert torch.equal(bits(0, n_rows), by_64)


def test_few_rows_take_two_launches(device, rng):
    """As long as one workgroup can add up a column block of all their experts; 16 rows of 8 take the longer way."""
    case = Case(device, rng, 8, 128, 64)
    u, ids, weights = inputs(rng, 16, 128, choices(rng, 16, 8, 8, False))
    before = launch_counts()
    few = case.kernels(u[:14], ids[:14], weights[:14])
    assert launch_counts() - before == {("mixture_up", ""): 1, ("mixture_down", ""): 1}
    assert torch.equal(case.kernels(u, ids, weights)[:14].view(torch.int16), few.view(torch.int16))
    assert ("expert_sort", "") in launch_counts() - before


@pytest.mark.parametrize("scale", [2, 3, 127, 128])
def test_b26_every_code_times_an_extreme_scale(device, scale):
    """One expert's w1 applied through the down kernel's own decoding: an identity reads single weights."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)[None].expand(16, 32).contiguous()
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4)[None]
    weight = Fp4Weight(packed, torch.full((1, 16, 1), scale, dtype=torch.uint8))
    exact = e2m1x2_decode(packed)[0].double() * 2.0 ** (scale - 127)
    tiles = prepare_fp4_weight(Fp4Weight(*map(device.put, weight)))
    got = device.full((32, 16), float("nan"), torch.bfloat16)
    one, pairs = device.put(torch.eye(32).bfloat16()), device.put(torch.arange(32, dtype=torch.int32))
    for rows in (FEW_ROWS, TILE_ROWS):
        table = [(0, first, min(rows, 32 - first), 0) for first in range(0, 32, rows)]
        routed_down_hip(rows, one, tiles, device.put(torch.tensor(table, dtype=torch.int32)), pairs, got)
        assert torch.equal(device.get(got).double(), exact.T)


def test_weights_that_come_a_few_experts_at_a_time_are_the_same(device, rng, monkeypatch):
    """A release's layer has 7 GiB of them, and a card no room for it twice."""
    weights, counts = [fp4_weight(rng, 5, 48, 64), fp4_weight(rng, 3, 16, 32)], []

    def each(parts):
        for part in parts:
            counts.append([len(tensor) for tensor in part])
            yield list(map(device.put, part))

    monkeypatch.setattr(experts_hip_module, "PREPARED_BYTES", 2 * 48 * (32 + 2))
    in_parts = prepare_fp4_weights(weights, each)
    assert counts == [[2, 2], [2, 2], [1, 1], [3, 3]]
    for weight, parts in zip(weights, in_parts, strict=True):
        monkeypatch.undo()
        whole = prepare_fp4_weight(Fp4Weight(*map(device.put, weight)))
        for got, want in ((parts.codes_u8, whole.codes_u8), (parts.scales_u8, whole.scales_u8)):
            assert torch.equal(device.get(got), device.get(want))


def test_refusals(device, rng):
    weight = fp4_weight(rng, 1, 16, 32)
    weight.scales_e8m0[0, 3, 0] = 129
    with pytest.raises(BindError, match="code 129"):
        prepare_fp4_weight(Fp4Weight(*map(device.put, weight)))
    ids, tiles = device.full((4, 2), 0, torch.int32), device.full((1, 4), 0, torch.int32)
    with pytest.raises(BindError, match="most_tiles"):
        expert_sort_hip(ids, 8, FEW_ROWS, device.full((8,), 0, torch.int32), tiles)
