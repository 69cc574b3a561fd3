"""Index queries and keys from the kernels: stored rows and their prepared form, byte for byte (case B36)."""

import pytest
import torch

from rocline.hip_kernels.compressor_hip import Places
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.index_prepared import (
    TILE_BYTES,
    Slots,
    from_tiles,
    index_prepare,
    index_prepare_hip,
    prepare_ref,
)
from rocline.hip_kernels.index_vectors import index_key_hip, index_query, index_query_hip, weight_scale
from rocline.hip_kernels.rmsnorm import rmsnorm

ROW = RowFormat("index_key", 128)


def vectors(rng, n_rows, n_heads, spread):
    """[n, h, 128] BF16 whose groups' sizes differ by up to 2^spread; some groups and one vector are zero."""
    x = rng.standard_normal((n_rows, n_heads, 4, 32))
    x *= 2.0 ** rng.integers(-spread // 2, spread // 2 + 1, (n_rows, n_heads, 4, 1))
    x[rng.random((n_rows, n_heads, 4)) < 0.1] = 0.0
    x[0, 0] = 0.0
    return torch.from_numpy(x).flatten(-2).bfloat16()


@pytest.mark.parametrize("n_heads", [1, 3, 32])
@pytest.mark.parametrize("n_rows", [1, 5, 17])
def test_stored_rows(device, rng, n_rows, n_heads):
    x = vectors(rng, n_rows, n_heads, 40)
    x[0, 0, 3], x[-1, -1, 40], x[-1, 0, 70] = float("inf"), float("nan"), -float("nan")
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -0.0]).bfloat16()
    x[-1, -1, 96 : 96 + len(edges)] = edges  # ties of every code
    angle = torch.from_numpy(rng.uniform(-3, 3, (n_rows, 32))).float()
    cos, sin = angle.cos(), angle.sin()
    want = torch.zeros((n_rows, n_heads, 68), dtype=torch.uint8)
    index_query(x, cos, sin, want)
    for _ in range(2):
        got = device.full((n_rows, n_heads, 68), 0xEE, torch.uint8)
        index_query_hip(device.put(x), device.put(cos), device.put(sin), got)
        assert torch.equal(device.get(got), want)


@pytest.mark.parametrize("spread", [0, 3, 8, 60, 250])
def test_prepared_vectors_are_the_stored_ones(rng, spread):
    rows = ROW.pack(vectors(rng, 40, 3, spread))
    values, scales = ROW.split(rows)
    codes_i8, scales_e8m0 = prepare_ref(rows)
    back = codes_i8.double() / 2 * torch.exp2(scales_e8m0.double() - 127)[..., None]
    assert torch.equal(back, values.double() * scales.double()[..., None])
    assert codes_i8.abs().max() <= 96
    if spread == 3:
        aligned = (scales_e8m0 == scales_e8m0[..., :1]).all(-1)
        assert aligned.float().mean() > 0.5  # else nothing would take the short way
    if spread == 60:
        assert not (scales_e8m0 == scales_e8m0[..., :1]).all()


@pytest.mark.parametrize("n_heads", [1, 8])
@pytest.mark.parametrize("spread", [0, 6, 60, 250])
def test_tiles_in_order_of_the_rows(device, rng, n_heads, spread):
    rows = ROW.pack(vectors(rng, 33, n_heads, spread))
    rows[5, 0, 65] = 255
    want = torch.full((3, n_heads, TILE_BYTES), 0xEE, dtype=torch.uint8)
    index_prepare(rows, want)
    got = device.full(want.shape, 0xEE, torch.uint8)
    index_prepare_hip(device.put(rows), got)
    assert torch.equal(device.get(got), want)
    codes, scales = from_tiles(want)
    assert torch.equal((codes[:33] * 2).to(torch.int8), prepare_ref(rows)[0])
    assert scales[5, 0, 1].isnan()


def test_keys_are_appended_through_the_page_table(device, rng):
    """Two calls, an odd first row, pages out of order; what lies before and after stays."""
    rows = ROW.pack(vectors(rng, 41, 1, 10))
    table = torch.tensor([3, 0, 2], dtype=torch.int32)

    def slots(start, stop, put):
        positions = torch.arange(19 + start, 19 + stop, dtype=torch.int32)
        return Slots(put(positions), put(torch.zeros_like(positions)), put(table[None]), 32)

    want = torch.full((4 * 2, 1, TILE_BYTES), 0xEE, dtype=torch.uint8)
    got = device.full(want.shape, 0xEE, torch.uint8)
    for start, stop in ((0, 7), (7, 41)):
        index_prepare(rows[start:stop], want, slots(start, stop, lambda tensor: tensor))
        index_prepare_hip(device.put(rows[start:stop].contiguous()), got, slots(start, stop, device.put))
    assert torch.equal(device.get(got), want)
    flat = from_tiles(want)[0].flatten(1)
    for row in range(41):
        slot = int(table[(19 + row) // 32]) * 32 + (19 + row) % 32
        assert torch.equal(flat[slot] * 2, prepare_ref(rows)[0][row].flatten().float())


def test_keys_of_several_sequences_where_some_have_none(device, rng):
    """Each at a position of its own, in pages of its own; a negative position is nowhere."""
    n_rows = 21
    rows = ROW.pack(vectors(rng, n_rows, 1, 10))
    tables = torch.from_numpy(rng.permutation(3 * n_rows).reshape(n_rows, 3)).int()
    positions = torch.from_numpy(rng.integers(0, 3 * 16, n_rows)).int()
    positions[rng.permutation(n_rows)[:5]] = -1
    sequences = torch.from_numpy(rng.permutation(n_rows)).int()
    want = torch.full((3 * n_rows, 1, TILE_BYTES), 0xEE, dtype=torch.uint8)
    got = device.full(want.shape, 0xEE, torch.uint8)
    index_prepare(rows, want, Slots(positions, sequences, tables, 16))
    index_prepare_hip(device.put(rows), got, Slots(*map(device.put, (positions, sequences, tables)), 16))
    assert torch.equal(device.get(got), want)
    values, _ = from_tiles(want)
    written = torch.zeros(len(values), dtype=torch.bool)
    for row in range(n_rows):
        if positions[row] >= 0:
            slot = int(tables[sequences[row], positions[row] // 16]) * 16 + int(positions[row]) % 16
            assert torch.equal((values[slot] * 2).to(torch.int8), prepare_ref(rows)[0][row])
            written[slot] = True
    codes = want[..., : 16 * 128].unflatten(-1, (4, 16, -1)).permute(0, 3, 1, 2, 4).flatten(0, 1)
    assert (codes[~written] == 0xEE).all()


@pytest.mark.parametrize("n_heads", [1, 8])
@pytest.mark.parametrize("n_rows", [1, 17])
def test_queries_are_prepared_and_their_weights_scaled_at_once(device, rng, n_rows, n_heads):
    x, angle = vectors(rng, n_rows, n_heads, 10), torch.from_numpy(rng.uniform(-3, 3, (n_rows, 32))).float()
    weights = torch.from_numpy(rng.standard_normal((n_rows, n_heads))).bfloat16()
    rows = torch.zeros((n_rows, n_heads, 68), dtype=torch.uint8)
    index_query(x, angle.cos(), angle.sin(), rows)
    want = torch.full((-(-n_rows // 16), n_heads, TILE_BYTES), 0xEE, dtype=torch.uint8)
    index_prepare(rows, want)
    got, scaled = device.full(want.shape, 0xEE, torch.uint8), device.put(weights)
    index_query_hip(*map(device.put, (x, angle.cos(), angle.sin())), None, got, scaled)
    assert torch.equal(device.get(got), want)
    assert torch.equal(device.get(scaled), (weights.float() * weight_scale(128, n_heads)).bfloat16())


@pytest.mark.parametrize("n_rows", [1, 9, 40])
def test_keys_are_normed_stored_and_prepared_at_once(device, rng, n_rows):
    """Two sequences' keys, of which one is kept already, against the parts one after the other."""
    x = torch.from_numpy(rng.integers(-15, 16, (n_rows, 128))).bfloat16()  # exact sums: any order gives the same norm
    norm, angle = vectors(rng, 2, 1, 4)[1, 0], torch.from_numpy(rng.uniform(-3, 3, (n_rows, 32))).float()
    key, rows = torch.empty_like(x), torch.zeros((n_rows, 1, 68), dtype=torch.uint8)
    rmsnorm(x, norm, 1e-20, key)
    index_query(key[:, None], angle.cos(), angle.sin(), rows)
    positions, sequences = torch.arange(n_rows, dtype=torch.int32), torch.arange(n_rows, dtype=torch.int32) % 2
    positions[n_rows // 2] = -1 if n_rows > 1 else 0
    tables = torch.tensor([[5, 1], [0, 3]], dtype=torch.int32)
    want_pool = torch.full((6, 32, 68), 0xEE, dtype=torch.uint8)
    want_tiles = torch.full((6 * 2, 1, TILE_BYTES), 0xEE, dtype=torch.uint8)
    for row, (position, sequence) in enumerate(zip(positions.tolist(), sequences.tolist(), strict=True)):
        if position >= 0:
            want_pool[tables[sequence, position // 32], position % 32] = rows[row, 0]
            one = torch.zeros(1, dtype=torch.int32)
            index_prepare(rows[row : row + 1], want_tiles, Slots(one + position, one + sequence, tables, 32))
    pool, tiles = device.full((6, 32, 68), 0xEE, torch.uint8), device.full((6, 2, TILE_BYTES), 0xEE, torch.uint8)
    got = device.full((n_rows, 68), 0xEE, torch.uint8)
    places = Places(pool, *map(device.put, (positions, sequences, tables)))
    index_key_hip(*map(device.put, (x, norm)), 1e-20, *map(device.put, (angle.cos(), angle.sin())), got, places, tiles)
    assert torch.equal(device.get(got), rows[:, 0])
    assert torch.equal(device.get(pool), want_pool)
    assert torch.equal(device.get(tiles).flatten(0, 1)[:, None], want_tiles)
