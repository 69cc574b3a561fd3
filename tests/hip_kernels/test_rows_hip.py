"""Kernels that move or turn rows: embedding, gather, copy, page writes, rotation; bit for bit (case B36)."""

import pytest
import torch

from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.embedding import embedding, embedding_hip
from rocline.hip_kernels.rope import rope, rope_hip
from rocline.hip_kernels.rows import copy_rows_hip, gather_rows_hip, put_rows, put_rows_hip

TAILS = [1, 2, 6, 15, 16, 17, 33, 64, 65]


def any_bf16(rng, *shape):
    """Every bit pattern, NaN and infinities among them."""
    return torch.from_numpy(rng.integers(-(2**15), 2**15, shape, dtype="int16")).view(torch.bfloat16)


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("n_rows", [1, 17])
@pytest.mark.parametrize("width", [96, 1032])
def test_embedding(device, rng, n_rows, width):
    table, ids = any_bf16(rng, 20, width), torch.from_numpy(rng.integers(0, 20, n_rows)).int()
    want = torch.empty((n_rows, 4, width), dtype=torch.bfloat16)
    embedding(ids, table, want)
    got = device.full(want.shape, float("nan"), torch.bfloat16)
    embedding_hip(device.put(ids), device.put(table), got)
    assert same_bytes(device.get(got), want)


@pytest.mark.parametrize("shape", [(33, 5120), (7, 3), (5,), (6, 68), (4, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.int32])
def test_gather_and_copy(device, rng, dtype, shape):
    rows = torch.from_numpy(rng.integers(0, 256, (*shape, 4), dtype="uint8")).view(torch.int32)[..., 0].to(dtype)
    index = torch.from_numpy(rng.integers(0, shape[0], 40))
    got = device.full((40, *shape[1:]), 0, dtype)
    gather_rows_hip(device.put(rows), device.put(index), got)
    assert same_bytes(device.get(got), rows[index])
    got = device.full(shape, 0, dtype)
    copy_rows_hip(device.put(rows), got)
    assert same_bytes(device.get(got), rows)


@pytest.mark.parametrize("row_bytes", [528, 288, 68, 33])
def test_rows_go_into_their_pages(device, rng, row_bytes):
    """Two sequences, pages out of order, a row that is not stored; what is not written stays."""
    rows = torch.from_numpy(rng.integers(0, 256, (9, row_bytes), dtype="uint8"))
    tables = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    positions = torch.tensor([0, 5, 7, -1, 3, 2, 1, 8, 15], dtype=torch.int32)
    sequences = torch.tensor([0, 0, 1, 1, 1, 0, 1, 0, 1], dtype=torch.int32)
    want = torch.full((4, 8, row_bytes), 0xEE, dtype=torch.uint8)
    got = device.full(want.shape, 0xEE, torch.uint8)
    put_rows(rows, positions, sequences, tables, want)
    put_rows_hip(*(device.put(x) for x in (rows, positions, sequences, tables)), got)
    assert torch.equal(device.get(got), want)
    assert torch.equal(want[2, 7], rows[8])
    assert (want == 0xEE).all(2).sum() == 4 * 8 - 8


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("width", "n_heads", "n_pairs"), [(512, 3, 32), (64, 4, 8), (128, 1, 16)])
@pytest.mark.parametrize("n_rows", [1, 6, 17])
def test_rope(device, rng, n_rows, width, n_heads, n_pairs, inverse):
    x = any_bf16(rng, n_rows, n_heads, width)
    cos, sin = (torch.from_numpy(rng.standard_normal((n_rows, n_pairs))).float() for _ in range(2))
    want = torch.empty_like(x)
    rope(x, cos, sin, want, inverse)
    got = device.full(x.shape, 7.0, torch.bfloat16)
    rope_hip(device.put(x), device.put(cos), device.put(sin), got, inverse)
    real = ~want.isnan()  # the sign and payload of a NaN are the processor's
    assert same_bytes(device.get(got)[real], want[real])
    assert device.get(got)[~real].isnan().all()
    x = device.put(x)
    rope_hip(x, device.put(cos), device.put(sin), x, inverse)
    assert same_bytes(device.get(x), device.get(got))


@pytest.mark.parametrize("n_rows", TAILS)
def test_rope_of_every_tail(device, rng, n_rows):
    x = torch.from_numpy(rng.standard_normal((n_rows, 1, 16))).bfloat16()
    cos, sin = (torch.from_numpy(rng.standard_normal((n_rows, 4))).float() for _ in range(2))
    want, got = torch.empty_like(x), device.full(x.shape, float("nan"), torch.bfloat16)
    rope(x, cos, sin, want)
    rope_hip(device.put(x), device.put(cos), device.put(sin), got)
    assert same_bytes(device.get(got), want)


def test_what_does_not_fit_is_named():
    x, turn = torch.ones(2, 3, 12).bfloat16(), torch.ones(2, 4)
    with pytest.raises(BindError, match="4 pairs of 12 channels"):
        rope_hip(x, turn, turn, x)
    with pytest.raises(BindError, match="rows of 12 channels"):
        embedding_hip(torch.zeros(2, dtype=torch.int32), x[0], x)
    ids = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(BindError, match=r"put_rows: pool_u8 is \[1, 4, 9\], want \[P=1, S=4, B=8\]"):
        put_rows_hip(torch.zeros(2, 8).byte(), ids, ids, ids[None], torch.zeros(1, 4, 9).byte())
    with pytest.raises(BindError, match="gather_rows"):
        gather_rows_hip(x, torch.zeros(1, dtype=torch.int32), x[:1])
