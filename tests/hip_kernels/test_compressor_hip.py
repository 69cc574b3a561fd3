"""Compressed rows from the kernel: the reference's bytes, pools within FP32, pages and held tokens, rows alone."""

import pytest
import torch

from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.compressor import compressed_row, pool_pairs
from rocline.hip_kernels.compressor_hip import Pairs, Places, compress_hip, compressed_row_hip, pool_pairs_hip

EPS = 1e-20
SHAPES = [(512, 32), (128, 16), (64, 8)]


def f32(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape)).float()


def turned(rng, n_rows, n_pairs):
    angle = torch.from_numpy(rng.uniform(-3, 3, (n_rows, n_pairs))).float()
    return angle.cos(), angle.sin()


def row_bytes(width):
    return width // 2 + width // 16


def packed(device, latent, cos, sin):
    got = device.full((len(latent), row_bytes(latent.shape[1])), 0xEE, torch.uint8)
    compressed_row_hip(device.put(latent), device.put(cos), device.put(sin), got)
    return device.get(got)


@pytest.mark.parametrize(("width", "n_pairs"), SHAPES)
@pytest.mark.parametrize("n_rows", [1, 6, 17])
def test_rows_have_the_reference_bytes(device, rng, n_rows, width, n_pairs):
    sizes = torch.exp2(torch.from_numpy(rng.integers(-20, 20, (n_rows, width // 16, 1))).float())
    latent = (f32(rng, n_rows, width // 16, 16) * sizes).flatten(1).bfloat16()
    latent[0, :16] = 0  # its scale is the least
    latent[-1, 5], latent[-1, 17], latent[-1, 33] = 3e38, float("inf"), float("nan")
    latent[0, 16:28] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0, -0.0, 0.5]).bfloat16()
    latent[0, 28:32] = 0
    turn = turned(rng, n_rows, n_pairs)
    want = torch.zeros((n_rows, row_bytes(width)), dtype=torch.uint8)
    compressed_row(latent, *turn, want)
    assert torch.equal(packed(device, latent, *turn), want)


def test_scales_of_every_size(device, rng):
    """Groups over the whole range of E4M3 scales and beyond: below, saturated, and every rounding between."""
    latent = (f32(rng, 64, 64) * torch.exp2(torch.linspace(-12, 16, 64))[:, None]).bfloat16()
    turn = turned(rng, 64, 8)
    want = torch.zeros((64, 36), dtype=torch.uint8)
    compressed_row(latent, *turn, want)
    assert torch.equal(packed(device, latent, *turn), want)
    assert len(want[:, 32:].unique()) > 50


@pytest.mark.parametrize(("width", "n_pairs"), SHAPES)
def test_pooling_is_close(device, rng, width, n_pairs):
    n_pairs_pooled = 5
    values, gates = f32(rng, n_pairs_pooled, 2, width), f32(rng, n_pairs_pooled, 2, width) * 5
    gates[0, :, 0], gates[0, :, 1] = torch.tensor([400.0, -400.0]), torch.tensor([3.0, 3.0])
    weight = f32(rng, width).bfloat16()
    want = torch.empty(n_pairs_pooled, width).bfloat16()
    pool_pairs(values, gates, weight, EPS, want)
    got = device.full(want.shape, float("nan"), torch.bfloat16)
    pool_pairs_hip(device.put(values), device.put(gates), device.put(weight), EPS, got)
    # Other sums and another exp move a value over a rounding boundary now and then, of the pool or of the norm.
    got = device.get(got)
    assert ((got.float() - want.float()).abs() <= 2**-7 * want.float().abs() + 1e-30).all()
    assert (got == want).float().mean() > 0.98


@pytest.mark.parametrize("n_rows", [1, 2, 6, 15, 16, 17, 33, 64, 65])
def test_rows_are_their_own_and_go_to_their_pages(device, rng, n_rows):
    """One call that pools, norms, rotates, packs and stores, against its parts one after the other."""
    values, gates, held = f32(rng, 90, 64), f32(rng, 90, 64), f32(rng, 3, 2, 64)
    weight, turn = f32(rng, 64).bfloat16(), turned(rng, 65, 8)
    pairs = torch.from_numpy(rng.integers(-3, 90, (65, 2))).int()
    values[pairs[3, 0]] = float("nan")
    tokens = torch.cat((torch.stack((values, gates), 1), held.flip(0)))[pairs.long()]  # -1 is held 0
    broken = tokens.isnan().any(3).any(2).any(1)
    latents = device.full((65, 64), float("nan"), torch.bfloat16)
    put = device.put
    pool_pairs_hip(*(put(tokens[:, :, i].contiguous()) for i in (0, 1)), put(weight), EPS, latents)
    want_rows = packed(device, device.get(latents), *turn)

    part = slice(65 - n_rows, 65)
    positions, sequences = torch.arange(65, dtype=torch.int32)[part], torch.arange(65, dtype=torch.int32)[part] % 2
    positions = torch.where(torch.arange(n_rows) == 1, -1, positions)
    tables = torch.tensor([[9, 1, 7], [2, 8, 0]], dtype=torch.int32)
    pool = device.full((10, 32, 36), 0xEE, torch.uint8)
    got = device.full((n_rows, 64), float("nan"), torch.bfloat16)
    places = Places(pool, put(positions), put(sequences), put(tables))
    slots = torch.from_numpy(rng.permutation(120)[:90] - 20).int().clamp_min(-1)  # of tokens, where they are held
    slots[slots < 3] = -1  # not where pairs read
    holding = put(torch.cat((held, torch.zeros(100, 2, 64))))
    source = Pairs(put(values), put(gates), holding, put(pairs[part]), put(slots))
    rows = device.full((n_rows, 36), 0xEE, torch.uint8)
    compress_hip(source, put(weight), EPS, got, tuple(put(x[part]) for x in turn), rows, places)
    assert torch.equal(device.get(rows), want_rows[part])
    want_held = torch.cat((held, torch.zeros(100, 2, 64)))
    want_held[slots[slots >= 0].long()] = torch.stack((values, gates), 1)[slots >= 0]
    assert torch.equal(device.get(holding).view(torch.int32), want_held.view(torch.int32))
    assert torch.equal(device.get(got).view(torch.int16), device.get(latents)[part].view(torch.int16))
    want = torch.full((10, 32, 36), 0xEE, dtype=torch.uint8)
    for row, position, sequence in zip(range(65 - n_rows, 65), positions.tolist(), sequences.tolist(), strict=True):
        if position >= 0:
            want[tables[sequence, position // 32], position % 32] = want_rows[row]
    assert torch.equal(device.get(pool), want)
    assert device.get(latents)[~broken].isfinite().all()


def test_tokens_may_be_held_without_a_pair(device, rng):
    values, gates, held = f32(rng, 3, 64), f32(rng, 3, 64), f32(rng, 4, 2, 64)
    holding, put = device.put(held), device.put
    no_pair, slots = torch.zeros((0, 2), dtype=torch.int32), torch.tensor([2, -1, 0], dtype=torch.int32)
    latents = device.full((0, 64), 0, torch.bfloat16)
    compress_hip(Pairs(put(values), put(gates), holding, put(no_pair), put(slots)), None, EPS, latents)
    held[2], held[0] = torch.stack((values[0], gates[0])), torch.stack((values[2], gates[2]))
    assert torch.equal(device.get(holding), held)


def test_a_single_source_is_normed_here(device, rng):
    x, weight, turn = f32(rng, 4, 64).bfloat16(), f32(rng, 64).bfloat16(), turned(rng, 4, 8)
    latents, rows = device.full((4, 64), 0, torch.bfloat16), device.full((4, 36), 0xEE, torch.uint8)
    compress_hip(device.put(x), device.put(weight), EPS, latents, tuple(map(device.put, turn)), rows)
    exact = x.double() * weight.double() / x.double().square().mean(1, keepdim=True).sqrt()
    assert ((device.get(latents).double() - exact).abs() <= 2**-8 * 1.001 * exact.abs()).all()
    assert torch.equal(device.get(rows), packed(device, device.get(latents), *turn))


def test_what_does_not_fit_is_named():
    x = torch.zeros(3, 64)
    with pytest.raises(BindError, match="3 tokens are not whole pairs"):
        compress_hip(Pairs(x, x), None, EPS, torch.zeros(1, 64).bfloat16())
    with pytest.raises(BindError, match="rows need cosines"):
        compress_hip(x.bfloat16(), None, EPS, None, None, torch.zeros(3, 36).byte())
    with pytest.raises(BindError, match=r"rows_u8 is \[3, 35\]"):
        compressed_row_hip(x.bfloat16(), x[:, :8], x[:, :8], torch.zeros(3, 35).byte())
