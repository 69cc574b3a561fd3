"""The contract at operator level (design.md section 4): a row's bits are its own.

Every operator gets the same row at every place of a tile, in any number of rows, beside ordinary, huge
and NaN neighbours, with another thread count, and must answer with the same bits each time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from rocline.hip_kernels import formats
from rocline.hip_kernels.attention import attention
from rocline.hip_kernels.compressor import compressed_row, pool_pairs
from rocline.hip_kernels.embedding import embedding
from rocline.hip_kernels.engram import engram_gate, engram_gather, engram_hash
from rocline.hip_kernels.experts import experts
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.grouped_projection import grouped_projection
from rocline.hip_kernels.head import head
from rocline.hip_kernels.index_score import index_score
from rocline.hip_kernels.index_vectors import index_key, index_query, index_weights
from rocline.hip_kernels.linear import Fp4Weight, Fp8Weight, bf16_linear, f32_linear, fp4_linear, fp8_linear
from rocline.hip_kernels.mhc import mhc_collapse_norm, mhc_merge, mhc_mix
from rocline.hip_kernels.rmsnorm import rmsnorm
from rocline.hip_kernels.rope import rope, rope_table, yarn_frequencies
from rocline.hip_kernels.router import router
from rocline.hip_kernels.selection import candidate_blocks, top_k_list
from rocline.hip_kernels.window_row import window_row

EPS = 1e-20


@dataclass
class Case:
    """per_row draws R rows of every per-row input; run fills new outputs from them and returns these."""

    per_row: Callable[[int], list[Tensor]]
    run: Callable[[Sequence[Tensor]], list[Tensor]]


def bf16(rng, *shape, scale=1.0):
    return torch.from_numpy(rng.standard_normal(shape) * scale).bfloat16()


def f32(rng, *shape, scale=1.0):
    return torch.from_numpy(rng.standard_normal(shape) * scale).float()


def i32(rng, high, *shape, low=0):
    return torch.from_numpy(rng.integers(low, high, shape)).int()


def fp8(rng, n_out, n_in):
    codes = torch.from_numpy(rng.integers(0, 0x7F, (n_out, n_in)) + 128 * rng.integers(0, 2, (n_out, n_in)))
    scales = torch.from_numpy(rng.integers(112, 122, (-(-n_out // 32), -(-n_in // 32))))
    return Fp8Weight(codes.to(torch.uint8), scales.to(torch.uint8))


def fp4(rng, *shape):
    *lead, n_out, n_in = shape
    codes = torch.from_numpy(rng.integers(0, 256, (*lead, n_out, n_in // 2)))
    return Fp4Weight(
        codes.to(torch.uint8),
        torch.from_numpy(rng.integers(112, 125, (*lead, n_out, n_in // 32))).to(torch.uint8),
    )


def case(name, rng):
    if name == "rmsnorm":
        weight = bf16(rng, 96)
        return Case(lambda r: [bf16(rng, r, 96)], fill(lambda x, out: rmsnorm(x, weight, EPS, out), (96, "bf16")))
    if name == "mhc_mix":
        fn, scale, base = f32(rng, 24, 4 * 96, scale=0.1), f32(rng, 3), f32(rng, 24)
        return Case(
            lambda r: [bf16(rng, r, 4, 96)],
            fill(
                lambda x, *out: mhc_mix(x, fn, scale, base, EPS, 1e-6, 20, *out),
                (4, "f32"),
                (4, "f32"),
                (4, 4, "f32"),
            ),
        )
    if name == "mhc_collapse_norm":
        weight = bf16(rng, 96)
        return Case(
            lambda r: [bf16(rng, r, 4, 96), f32(rng, r, 4)],
            fill(lambda x, pre, out: mhc_collapse_norm(x, pre, weight, EPS, out), (96, "bf16")),
        )
    if name == "mhc_merge":
        return Case(
            lambda r: [bf16(rng, r, 96), bf16(rng, r, 4, 96), f32(rng, r, 4), f32(rng, r, 4, 4)],
            fill(mhc_merge, (4, 96, "bf16")),
        )
    if name == "rope_table":
        omega = yarn_frequencies(160000.0, 64, 16.0, 32.0, 1.0, 65536)
        return Case(
            lambda r: [i32(rng, 1048576, r)],
            fill(lambda p, cos, sin: rope_table(p, omega, cos, sin), (32, "f32"), (32, "f32")),
        )
    if name == "rope":
        return Case(
            lambda r: [bf16(rng, r, 3, 64), f32(rng, r, 16), f32(rng, r, 16)],
            fill(lambda x, cos, sin, out: rope(x, cos, sin, out, inverse=True), (3, 64, "bf16")),
        )
    if name == "window_row":
        norm = bf16(rng, 64)
        return Case(
            lambda r: [bf16(rng, r, 64), f32(rng, r, 16), f32(rng, r, 16)],
            fill(lambda x, cos, sin, out: window_row(x, norm, EPS, cos, sin, out), (66, "u8")),
        )
    if name == "fp8_linear":
        weight = fp8(rng, 72, 160)
        return Case(lambda r: [bf16(rng, r, 160)], fill(lambda x, out: fp8_linear(x, weight, out), (72, "bf16")))
    if name == "fp4_linear":
        weight = fp4(rng, 72, 160)
        return Case(lambda r: [bf16(rng, r, 160)], fill(lambda x, out: fp4_linear(x, weight, out), (72, "bf16")))
    if name == "bf16_linear":
        weight = bf16(rng, 72, 160)
        return Case(lambda r: [bf16(rng, r, 160)], fill(lambda x, out: bf16_linear(x, weight, out), (72, "bf16")))
    if name == "f32_linear":
        weight = bf16(rng, 72, 160)
        return Case(lambda r: [bf16(rng, r, 160)], fill(lambda x, out: f32_linear(x, weight, out), (72, "f32")))
    if name == "grouped_projection":
        weight = fp8(rng, 96, 128)
        return Case(
            lambda r: [bf16(rng, r, 4, 64)],
            fill(lambda x, out: grouped_projection(x, weight, 2, out), (96, "bf16")),
        )
    if name == "attention":
        window_kv = RowFormat("window", 64).pack(bf16(rng, 90, 64))
        pages = RowFormat("compressed", 64).pack(bf16(rng, 5, 8, 64))
        table, sink = torch.tensor([3, 0, 4, 1], dtype=torch.int32), f32(rng, 4)

        def rows(r):
            picks = np.stack([np.sort(rng.permutation(32)[:21]) for _ in range(r)])
            picks[:, 15:] = np.where(rng.random((r, 1)) < 0.5, -1, picks[:, 15:])
            count = i32(rng, 25, r, low=1)
            first = torch.minimum(i32(rng, 60, r), 90 - count)
            return [bf16(rng, r, 4, 64), first.int(), count, torch.from_numpy(picks).int()]

        return Case(
            rows,
            fill(
                lambda q, first, count, sel, out: attention(
                    q, window_kv, first, count, 24, pages, table, sel, sink, out
                ),
                (4, 64, "bf16"),
            ),
        )
    if name == "pool_pairs":
        weight = bf16(rng, 64)
        return Case(
            lambda r: [f32(rng, r, 2, 64), f32(rng, r, 2, 64)],
            fill(lambda v, g, out: pool_pairs(v, g, weight, EPS, out), (64, "bf16")),
        )
    if name == "compressed_row":
        return Case(lambda r: [bf16(rng, r, 64), f32(rng, r, 16), f32(rng, r, 16)], fill(compressed_row, (36, "u8")))
    if name == "index_key":
        weight, norm = bf16(rng, 32, 64), bf16(rng, 32)
        return Case(
            lambda r: [bf16(rng, r, 64), f32(rng, r, 8), f32(rng, r, 8)],
            fill(lambda x, cos, sin, out: index_key(x, weight, norm, EPS, cos, sin, out), (17, "u8")),
        )
    if name == "index_query":
        return Case(lambda r: [bf16(rng, r, 3, 32), f32(rng, r, 8), f32(rng, r, 8)], fill(index_query, (3, 17, "u8")))
    if name == "index_weights":
        weight = bf16(rng, 3, 96)
        return Case(lambda r: [bf16(rng, r, 96)], fill(lambda u, out: index_weights(u, weight, 32, out), (3, "bf16")))
    if name == "index_score":
        keys = RowFormat("index_key", 64).pack(bf16(rng, 4, 16, 64))
        table = torch.tensor([2, 3, 0], dtype=torch.int32)
        return Case(
            lambda r: [RowFormat("index_key", 64).pack(bf16(rng, r, 3, 64)), bf16(rng, r, 3), i32(rng, 46, r)],
            fill(lambda q, w, seen, out: index_score(q, w, keys, table, seen, out), (45, "f32")),
        )
    if name == "candidate_blocks":
        return Case(
            lambda r: [bf16(rng, r, 75).float(), i32(rng, 76, r)],
            fill(lambda s, seen, out: candidate_blocks(s, seen, 8, out), (4, "i32")),
        )
    if name == "top_k_list":
        return Case(
            lambda r: [bf16(rng, r, 75).float(), i32(rng, 76, r), i32(rng, 10, r, 4)],
            fill(lambda s, seen, blocks, out: top_k_list(s, seen, blocks, 8, out), (16, "i32")),
        )
    if name == "router":
        weight, bias = bf16(rng, 24, 96), f32(rng, 24)
        return Case(
            lambda r: [bf16(rng, r, 96)],
            fill(lambda u, *out: router(u, weight, bias, 1.5, *out), (24, "f32"), (6, "i32"), (6, "f32")),
        )
    if name == "experts":
        routed = (fp4(rng, 5, 64, 96), fp4(rng, 5, 64, 96), fp4(rng, 5, 96, 64))
        shared = (fp8(rng, 64, 96), fp8(rng, 64, 96), fp8(rng, 96, 64))
        return Case(
            lambda r: [
                bf16(rng, r, 96),
                torch.from_numpy(np.stack([rng.permutation(5)[:2] for _ in range(r)])).int(),
                f32(rng, r, 2).abs(),
            ],
            fill(lambda u, ids, w, out: experts(u, ids, w, routed, shared, 10.0, out), (96, "bf16")),
        )
    if name == "engram_hash":
        primes, offsets = torch.tensor([101, 103, 107, 109, 113, 127]), torch.arange(6) * 200
        multipliers = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
        return Case(
            lambda r: [torch.from_numpy(rng.integers(-1, 99092, (r, 4)))],
            fill(lambda t, out: engram_hash(t, multipliers, primes, offsets, 2, out), (6, "i64")),
        )
    if name == "engram_gather":
        codes, scales = fp8(rng, 300, 64).codes_e4m3, i32(rng, 130, 300, 2, low=110).to(torch.uint8)
        return Case(
            lambda r: [torch.from_numpy(rng.integers(0, 300, (r, 6)))],
            fill(lambda rows, out: engram_gather(rows, codes, scales, out), (384, "bf16")),
        )
    if name == "engram_gate":
        q_weight, k_weight = bf16(rng, 4, 96), bf16(rng, 4, 96)
        return Case(
            lambda r: [bf16(rng, r, 4, 96), bf16(rng, r, 480), i32(rng, 2, r).to(torch.uint8)],
            fill(
                lambda x, kv, alive, *out: engram_gate(x, kv, q_weight, k_weight, alive, EPS, *out),
                (4, 96, "bf16"),
                (4, "f32"),
            ),
        )
    if name == "embedding":
        table = bf16(rng, 50, 96)
        return Case(lambda r: [i32(rng, 50, r)], fill(lambda ids, out: embedding(ids, table, out), (4, 96, "bf16")))
    assert name == "head"
    weight = bf16(rng, 301, 96)
    return Case(lambda r: [bf16(rng, r, 96)], fill(lambda h, *out: head(h, weight, *out), (301, "f32"), ("u8",)))


DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8}


def fill(op, *outs):
    """A runner that gives `op` outputs of the described shapes, poisoned so that an unwritten element shows."""

    def run(inputs):
        made = []
        for *shape, dtype in outs:
            poison = 77 if dtype in ("i32", "i64", "u8") else float("nan")
            made.append(torch.full((len(inputs[0]), *shape), poison, dtype=DTYPES[dtype]))
        op(*inputs, *made)
        return made

    return run


NAMES = [
    "rmsnorm",
    "mhc_mix",
    "mhc_collapse_norm",
    "mhc_merge",
    "rope_table",
    "rope",
    "window_row",
    "fp8_linear",
    "fp4_linear",
    "bf16_linear",
    "f32_linear",
    "grouped_projection",
    "attention",
    "pool_pairs",
    "compressed_row",
    "index_key",
    "index_query",
    "index_weights",
    "index_score",
    "candidate_blocks",
    "top_k_list",
    "router",
    "experts",
    "engram_hash",
    "engram_gather",
    "engram_gate",
    "embedding",
    "head",
]
PLACES = {  # by rows: at the edges of tiles, and of what the references take at a time
    1: [0],
    2: [0, 1],
    63: [0, 31, 62],
    64: range(64),
    65: [0, 63, 64],
    130: [1, 63, 64, 100, 129],
    300: [127, 255, 256, 299],
}


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_a_rows_bits_are_its_own(name, rng):
    torch.manual_seed(0)
    it = case(name, rng)
    row = it.per_row(1)
    alone = it.run(row)
    for n_rows, places in PLACES.items():
        for place in places:
            neighbours = it.per_row(n_rows)
            for tensor, own in zip(neighbours, row, strict=True):
                spoil(tensor, rng)
                tensor[place] = own[0]
            got = it.run(neighbours)
            for out, want in zip(got, alone, strict=True):
                assert same_bits(out[place : place + 1], want), f"{name}: row at {place} of {n_rows}"


def spoil(tensor, rng):
    """Some neighbours become NaN, some huge; indices stay in range."""
    if tensor.dtype.is_floating_point and len(tensor) > 1:
        tensor[rng.integers(len(tensor))] = float("nan")
        tensor[rng.integers(len(tensor))] = 3e38


@pytest.mark.parametrize("name", NAMES)
def test_the_thread_count_changes_nothing(name, rng):
    it = case(name, rng)
    rows = it.per_row(70)
    first = it.run(rows)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        again = it.run(rows)
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))


def test_no_rows_and_no_history_are_fine(rng):
    for name in NAMES:
        it = case(name, rng)
        assert all(len(out) == 0 for out in it.run([x[:0] for x in it.per_row(1)]))
    selected = torch.full((2, 4), 77, dtype=torch.int32)
    top_k_list(torch.empty(2, 0), torch.zeros(2, dtype=torch.int32), None, 8, selected)
    assert (selected == -1).all()


def test_formats_agree_for_wide_and_narrow_rows(rng):
    x = bf16(rng, 3, 64)
    wide = torch.cat((x, bf16(rng, 3, 64)), dim=1)
    assert same_bits(formats.act_quant8(x)[0], formats.act_quant8(wide)[0][:, :64])
