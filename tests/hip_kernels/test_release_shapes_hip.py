"""Matrix products at the release's shapes, which only a card computes in reasonable time."""

import pytest
import torch

from rocline.hip_kernels.act_quant import act_round8
from rocline.hip_kernels.experts import experts
from rocline.hip_kernels.experts_hip import ExpertRoom, ExpertWeights, experts_hip, prepare_fp4_weight
from rocline.hip_kernels.formats import dequantise_tiles
from rocline.hip_kernels.linear import Fp4Weight, Fp8Weight
from rocline.hip_kernels.linear_hip import f32_linear_hip, prepare_fp8_weight, workspace_floats


def fp8_weight(rng, n_out, n_in):
    codes = torch.from_numpy(rng.standard_normal((n_out, n_in)) * 16).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.from_numpy(rng.integers(117, 121, (-(-n_out // 32), n_in // 32))).to(torch.uint8)
    return Fp8Weight(codes, scales)


def rounded_rows(rng, n_rows, n_in):
    x = torch.from_numpy(rng.standard_normal((n_rows, n_in))).bfloat16()
    act_round8(x, x)
    return x


def check_linear(device, rng, n_out, n_in, n_rows):
    """Against FP64, and rows alone against the same rows in company."""
    weight, x = fp8_weight(rng, n_out, n_in), rounded_rows(rng, n_rows, n_in)
    tiles = prepare_fp8_weight(Fp8Weight(*map(device.put, weight)))

    def product(rows):
        got = device.full((len(rows), n_out), float("nan"))
        room = device.full((max(1, workspace_floats(len(rows), tiles)),), float("nan"))
        f32_linear_hip(device.put(rows), tiles, got, room)
        return device.get(got)

    got = product(x)
    dense, wide = (device.put(t).double() for t in (dequantise_tiles(*weight), x))
    want, sizes = (device.get(t) for t in (wide @ dense.T, wide.abs() @ dense.abs().T))
    # A K-step of 16 is added at once, off by at most a part in 2^23 of the sum so far, truncated sums included.
    assert ((got.double() - want).abs() <= sizes * (n_in / 16 + 8) * 2.0**-23).all()
    for row in {0, n_rows // 2, n_rows - 1}:
        assert torch.equal(product(x[row : row + 1])[0].view(torch.int32), got[row].view(torch.int32))


@pytest.mark.parametrize(("n_out", "n_in"), [(512, 5120), (5120, 8192), (32768, 1280), (5120, 2304)])
@pytest.mark.parametrize("n_rows", [6, 48, 128, 300])
def test_fp8_linears(card, rng, n_out, n_in, n_rows):
    check_linear(card, rng, n_out, n_in, n_rows)


def check_experts(device, rng, width, inner, n_experts, n_rows):
    """Rows against the reference, as whole vectors: a hidden channel may move by a step of E4M3."""
    shapes = ((inner, width), (inner, width), (width, inner))
    routed = tuple(
        Fp4Weight(
            torch.from_numpy(rng.integers(0, 256, (n_experts, n_out, n_in // 2))).to(torch.uint8),
            torch.from_numpy(rng.integers(117, 120, (n_experts, n_out, n_in // 32))).to(torch.uint8),
        )
        for n_out, n_in in shapes
    )
    shared = tuple(fp8_weight(rng, *shape) for shape in shapes)
    routed_tiles = ExpertWeights(*(prepare_fp4_weight(Fp4Weight(*map(device.put, w))) for w in routed))
    shared_tiles = ExpertWeights(*(prepare_fp8_weight(Fp8Weight(*map(device.put, w))) for w in shared))
    u = torch.from_numpy(rng.standard_normal((n_rows, width))).bfloat16()
    ids = torch.stack([torch.from_numpy(rng.permutation(n_experts)[:2]) for _ in range(n_rows)]).int()
    weights = torch.from_numpy(rng.uniform(0.1, 1.0, ids.shape)).float()
    want, rounded = torch.empty_like(u), torch.empty_like(u)
    experts(u, ids, weights, routed, shared, 10.0, want)
    act_round8(u, rounded)
    room = device.full((ExpertRoom.bytes_for(n_rows, 2, routed_tiles, shared_tiles),), 0xFF, torch.uint8)
    got = device.full(u.shape, float("nan"), torch.bfloat16)
    put = device.put
    experts_hip(put(rounded), put(ids), put(weights), routed_tiles, shared_tiles, 10.0, room, got)
    error = (device.get(got).float() - want.float()).norm(dim=1) / want.float().norm(dim=1)
    assert error.max() < 2e-2


@pytest.mark.parametrize("n_rows", [6, 70])  # tiles of 16 rows, of 64
def test_experts(card, rng, n_rows):
    check_experts(card, rng, 5120, 2304, 3, n_rows)
