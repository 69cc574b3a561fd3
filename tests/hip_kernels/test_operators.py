"""Operators against independent arithmetic: attention, mHC, RoPE, router, experts, linears, Engram."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rocline.hip_kernels.attention import attention
from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.compressor import pool_pairs
from rocline.hip_kernels.engram import engram_gate, engram_hash
from rocline.hip_kernels.experts import experts
from rocline.hip_kernels.formats import RowFormat, act_quant8, e2m1_decode, e4m3_decode, e8m0_decode, unpack_e2m1
from rocline.hip_kernels.linear import Fp4Weight, Fp8Weight, fp4_linear, fp8_linear
from rocline.hip_kernels.mhc import mhc_coefficients_ref, mhc_merge, mhc_project_ref
from rocline.hip_kernels.rmsnorm import rmsnorm
from rocline.hip_kernels.rope import rope, rope_frequencies, rope_table, yarn_frequencies
from rocline.hip_kernels.router import router_ref


@pytest.fixture(scope="module")
def ops(data_folder):
    return load_file(data_folder / "ops.safetensors")


def bf16(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape)).bfloat16()


def naive_attention(q, entries, sink):
    """One head, FP64, entries in list order with None for an absent slot; P is rounded against the running max."""
    top, mass, out = -1e30, 0.0, np.zeros(len(q))
    for start in range(0, len(entries), 64):
        block = entries[start : start + 64]
        scores = [-math.inf if k is None else float(q @ k) * len(q) ** -0.5 for k in block]
        new_top = max([top, *scores])
        decay = math.exp(top - new_top)
        p = [0.0 if s == -math.inf else math.exp(s - new_top) for s in scores]
        mass = mass * decay + sum(p)
        rounded = torch.tensor(p, dtype=torch.float32).bfloat16().double().numpy()
        out = out * decay + sum(w * k for w, k in zip(rounded, block, strict=True) if k is not None)
        top = new_top
    return out / (mass + math.exp(sink - top))


@pytest.mark.parametrize(("window", "n_selected"), [(24, 48), (64, 64), (16, 0), (63, 2)])
def test_attention_lists_window_first_absent_slots_counted(rng, window, n_selected):
    n_rows, n_heads, width = 5, 3, 64
    q, sink = bf16(rng, n_rows, n_heads, width), torch.from_numpy(rng.standard_normal(n_heads)).float()
    window_u8 = RowFormat("window", width).pack(bf16(rng, 80, width))
    window_kv = RowFormat("window", width).unpack(window_u8)
    pages = RowFormat("compressed", width).pack(bf16(rng, 4, 32, width))
    table = torch.tensor([3, 1, 0], dtype=torch.int32)
    count = torch.from_numpy(rng.integers(1, window + 1, n_rows)).int()
    first = torch.from_numpy(rng.integers(0, 80 - window, n_rows)).int()
    selected = None
    if n_selected:
        picks = np.full((n_rows, n_selected), -1)
        for row in range(n_rows):
            n = rng.integers(0, n_selected + 1)
            picks[row, :n] = np.sort(rng.permutation(96)[:n])
        selected = torch.from_numpy(picks).int()
    out = torch.full((n_rows, n_heads, width), float("nan")).bfloat16()
    attention(q, window_u8, first, count, window, pages, table, selected, sink, out)
    rows = RowFormat("compressed", width).unpack(pages)
    for row in range(n_rows):
        entries = [window_kv[int(first[row]) + i].double().numpy() for i in range(int(count[row]))]
        entries += [None] * (window - len(entries))
        for pick in [] if selected is None else selected[row].tolist():
            entries.append(None if pick < 0 else rows[int(table[pick // 32]), pick % 32].double().numpy())
        for head in range(n_heads):
            want = naive_attention(q[row, head].double().numpy(), entries, float(sink[head]))
            got = out[row, head].double().numpy()
            assert np.allclose(got, want, rtol=2**-8, atol=2**-8 * np.abs(want).max())  # one BF16 rounding


def test_mhc_mix_against_fp64(ops):
    fn = (ops["mhc_mix_5120.fn_mul"][:, :, None] * ops["mhc_mix_5120.fn_tile"][:, None]).flatten(1)
    z = mhc_project_ref(ops["mhc_mix_5120.X"], fn, 1e-20)
    assert (z - ops["mhc_mix_5120.z64"]).abs().max() < 4e-5  # FP32 sums of 20,480 terms
    got = mhc_coefficients_ref(z, ops["mhc_mix_5120.scale"], ops["mhc_mix_5120.base"], 1e-6, 20)
    for value, name in zip(got, ("pre64", "post64", "comb64"), strict=True):
        assert (value - ops[f"mhc_mix_5120.{name}"]).abs().max() < 8e-6


def test_sinkhorn_ends_on_columns(rng):
    z = torch.from_numpy(rng.standard_normal((9, 24)) * 4).float()
    _, _, comb = mhc_coefficients_ref(z, torch.ones(3), torch.zeros(24), 1e-6, 20)
    assert (comb.sum(1) - 1).abs().max() < 1e-5  # columns, over the source stream
    assert (comb.sum(2) - 1).abs().max() > 1e-5  # a final row step would level these


def test_merge_contracts_the_first_index(rng):
    streams, comb = bf16(rng, 1, 4, 8), torch.zeros(1, 4, 4)
    comb[0, 2, 1] = 1.0  # source 2 goes to destination 1
    merged = torch.empty_like(streams)
    mhc_merge(torch.zeros(1, 8).bfloat16(), streams, torch.zeros(1, 4), comb, merged)
    assert torch.equal(merged[0, 1], streams[0, 2])
    assert not merged[0, [0, 2, 3]].any()


@pytest.mark.parametrize(("name", "position"), [("window", 0), ("yarn", 65_535), ("yarn", 1_048_575)])
def test_b34_each_kind_of_layer_has_its_own_table(ops, name, position):
    omega = rope_frequencies(10_000.0, 64) if name == "window" else yarn_frequencies(160_000.0, 64, 16, 32, 1, 65_536)
    assert torch.equal(omega, ops[f"rope_{name}.omega"])
    positions = torch.cat((ops["rope.pos"], torch.tensor([position], dtype=torch.int32)))
    cos, sin = torch.empty(len(positions), 32), torch.empty(len(positions), 32)
    rope_table(positions, omega, cos, sin)
    assert torch.equal(cos[:-1], ops[f"rope_{name}.cos"])
    assert torch.equal(sin[:-1], ops[f"rope_{name}.sin"])
    angle = (np.float32(position) * omega.numpy()).astype(np.float64)  # the FP32 product, then exact
    assert np.abs(cos[-1].numpy() - np.cos(angle)).max() < 1.2e-7
    assert np.abs(sin[-1].numpy() - np.sin(angle)).max() < 1.2e-7


def test_rope_turns_adjacent_pairs_of_the_last_channels(rng):
    x, out = bf16(rng, 2, 3, 10), torch.empty(2, 3, 10).bfloat16()
    quarter = torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    rope(x, *quarter, out)
    assert torch.equal(out[..., :6], x[..., :6])
    assert torch.equal(out[0, :, 6], -x[0, :, 7])
    assert torch.equal(out[0, :, 7], x[0, :, 6])
    assert torch.equal(out[0, :, 8:], x[0, :, 8:])
    back = torch.empty_like(out)
    rope(out, *quarter, back, inverse=True)
    assert torch.equal(back, x)


def test_b32_the_bias_selects_and_never_weighs():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    scores, ids, weights = router_ref(logits, torch.tensor([0.0, 0.0, 0.0, 50.0]), 2, 1.5)
    assert ids.tolist() == [[3, 0]]
    raw = torch.sqrt(torch.log1p(torch.exp(logits)))
    assert torch.allclose(scores, raw)
    assert torch.allclose(weights, raw[0, [3, 0]] / (raw[0, 3] + raw[0, 0]) * 1.5)


def test_router_ties_and_tails():
    _, ids, _ = router_ref(torch.full((1, 8), 0.25), torch.zeros(8), 3, 1.0)
    assert ids.tolist() == [[0, 1, 2]]
    scores, _, weights = router_ref(torch.tensor([[-60.0, -61.0, -80.0]]), torch.zeros(3), 2, 1.5)
    assert (scores > 0).all()  # log(1 + exp(x)) would be zero below -16.6
    assert weights.isfinite().all()
    assert router_ref(torch.tensor([[50.0]]), torch.zeros(1), 1, 1.0)[0].item() == pytest.approx(50**0.5, rel=1e-6)


def naive_linear(x, weight, kind):
    """Blocks of 32 in Python's integers and floats: exact inside a block, FP32 between blocks."""
    codes, x_scales = act_quant8(x)
    x_codes, x_scales = e4m3_decode(codes).double().numpy(), e8m0_decode(x_scales).numpy()
    w_scales = e8m0_decode(weight.scales_e8m0).numpy()
    raw = weight[0]
    w_codes = (e4m3_decode(raw) if kind == 8 else e2m1_decode(unpack_e2m1(raw))).double().numpy()
    out = np.zeros((len(x), len(w_codes)), dtype=np.float32)
    for row in range(len(x)):
        for n in range(len(w_codes)):
            total = np.float32(0)
            for b in range(x_codes.shape[1] // 32):
                block = slice(32 * b, 32 * b + 32)
                exact = np.float32(math.fsum(x_codes[row, block] * w_codes[n, block]))
                total += exact * x_scales[row, b] * w_scales[n if kind == 4 else n // 32, b]
            out[row, n] = total
    return torch.from_numpy(out).bfloat16()


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("n_out", [1, 31, 33])
@pytest.mark.parametrize("n_in", [32, 96])
@pytest.mark.parametrize("kind", [8, 4])
def test_quantised_linears_equal_scalar_sums(rng, kind, n_in, n_out, n_rows):
    x = bf16(rng, n_rows, n_in)
    out = torch.full((n_rows, n_out), float("nan")).bfloat16()
    if kind == 8:
        codes = rng.integers(0, 0x7F, (n_out, n_in)) + 128 * rng.integers(0, 2, (n_out, n_in))
        scales = rng.integers(100, 140, (-(-n_out // 32), n_in // 32))
        weight = Fp8Weight(torch.from_numpy(codes).to(torch.uint8), torch.from_numpy(scales).to(torch.uint8))
        fp8_linear(x, weight, out)
    else:
        codes, scales = rng.integers(0, 256, (n_out, n_in // 2)), rng.integers(100, 140, (n_out, n_in // 32))
        weight = Fp4Weight(torch.from_numpy(codes).to(torch.uint8), torch.from_numpy(scales).to(torch.uint8))
        fp4_linear(x, weight, out)
    assert torch.equal(out, naive_linear(x, weight, kind))


def test_experts_add_by_ascending_id_and_weigh_before_w2(rng):
    width, inner = 32, 32

    def make4(*shape):
        codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2))
        scales = rng.integers(118, 126, (*shape[:-1], shape[-1] // 32))
        return Fp4Weight(torch.from_numpy(codes).to(torch.uint8), torch.from_numpy(scales).to(torch.uint8))

    def make8(n, k):
        codes, scales = rng.integers(0, 0x7F, (n, k)), rng.integers(112, 118, (n // 32, k // 32))
        return Fp8Weight(torch.from_numpy(codes).to(torch.uint8), torch.from_numpy(scales).to(torch.uint8))

    routed = (make4(4, inner, width), make4(4, inner, width), make4(4, width, inner))
    shared = (make8(inner, width), make8(inner, width), make8(width, inner))
    u, ids = bf16(rng, 3, width), torch.tensor([[2, 0], [1, 3], [0, 1]], dtype=torch.int32)
    weights = torch.tensor([[0.7, 0.8], [1.0, 0.5], [0.3, 1.2]])
    out = torch.empty_like(u)
    experts(u, ids, weights, routed, shared, 10.0, out)

    def one(row, matrices, kind, weight):
        gate, up = (naive_linear(row, m, kind).float() for m in matrices[:2])
        hidden = torch.nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
        return naive_linear((hidden * weight).bfloat16(), matrices[2], kind)

    for row in range(3):
        total = torch.zeros(1, width)
        for expert, weight in sorted(zip(ids[row].tolist(), weights[row].tolist(), strict=True)):
            picked = [Fp4Weight(m.codes_e2m1x2[expert], m.scales_e8m0[expert]) for m in routed]
            total += one(u[row : row + 1], picked, 4, weight).float()
        total += one(u[row : row + 1], shared, 8, 1.0).float()
        want, got = total.bfloat16()[0], out[row]
        # silu's last bit may move a value over a rounding boundary of the second quantisation
        assert (got.float() - want.float()).abs().max() <= 2**-4 * want.float().abs().max()
        assert (got == want).float().mean() > 0.5


def test_pooling_is_a_softmax_over_two_tokens_per_channel(rng):
    values, gates = (torch.from_numpy(rng.standard_normal((5, 2, 64))).float() for _ in range(2))
    out = torch.empty(5, 64).bfloat16()
    pool_pairs(values, gates, torch.ones(64).bfloat16(), 1e-20, out)
    weight = 1 / (1 + np.exp((gates[:, 1] - gates[:, 0]).double().numpy()))
    mixed = values[:, 0].double().numpy() * weight + values[:, 1].double().numpy() * (1 - weight)
    want = mixed / np.sqrt((mixed**2).mean(1, keepdims=True))
    assert np.allclose(out.double().numpy(), want, rtol=2**-7, atol=2**-8)  # two BF16 roundings


HASH_VECTORS = {  # backbone.md section 11.3; columns 0, 7, 8, 15, 16, 23
    (1, 0): [9400104, 114349277, 128026094, 254838319, 261350200, 382122658],
    (1, 1): [11440887, 115349167, 133705728, 248589595, 269468428, 369904708],
    (1, 4): [14696343, 116632101, 139599246, 244037852, 265867436, 381014318],
    (14, 0): [11315085, 116830007, 135395884, 241909330, 269973942, 379075217],
    (14, 4): [15797704, 123339124, 129911872, 245900921, 257283293, 376336126],
}


def hash_rows(ops, table, sequence):
    lookback = [[sequence[p - i] if p >= i else -1 for i in range(4)] for p in range(len(sequence))]
    rows = torch.empty((len(sequence), 24), dtype=torch.int64)
    constants = (ops["engram.multipliers"][table], ops["engram.primes"][table].flatten(), ops["engram.offsets"][table])
    engram_hash(torch.tensor(lookback), *constants, 2, rows)
    return rows[:, [0, 7, 8, 15, 16, 23]]


def test_engram_hash_vectors_of_the_specification(ops):
    for (layer, position), want in HASH_VECTORS.items():
        rows = hash_rows(ops, (1, 14).index(layer), [10, 20, 30, 40, 99091])
        assert rows[position].tolist() == want
    dead = hash_rows(ops, 0, [10, 20, -1, 40, 50])
    assert dead[4].tolist() == [5457301, 114358063, 129810215, 243895285, 266760632, 369137122]


def test_engram_gate_is_zero_for_dead_tokens_and_keeps_the_sign(rng):
    streams, kv = bf16(rng, 3, 2, 32), bf16(rng, 3, 96)
    ones, out, gates = torch.ones(2, 32).bfloat16(), torch.empty_like(streams), torch.empty(3, 2)
    kv[1, :64] = -streams[1].flatten()  # keys opposite to the streams
    engram_gate(streams, kv, ones, ones, torch.tensor([1, 1, 0], dtype=torch.uint8), 1e-20, out, gates)
    assert torch.equal(out[2], streams[2])
    assert not gates[2].any()
    assert (gates[1] < 0.5).all()
    x, k = streams[0].double(), kv[0, :64].double().unflatten(0, (2, 32))
    d = (x * k).sum(1) / (x.square().mean(1).sqrt() * k.square().mean(1).sqrt()) * 32**-0.5
    want = torch.sigmoid(torch.copysign(d.abs().clamp(min=1e-6).sqrt(), d))
    assert torch.allclose(gates[0].double(), want, rtol=1e-5)


def test_rmsnorm_takes_zeros_and_tiny_rows(ops):
    out = torch.empty_like(ops["rmsnorm.x"])
    rmsnorm(ops["rmsnorm.x"], ops["rmsnorm.w"], 1e-20, out)
    assert torch.equal(out, ops["rmsnorm.y"])


def test_a_wrong_shape_is_named_with_its_source():
    with pytest.raises(BindError, match=r"rmsnorm: weight_bf16 is \[5\], want \[D=8\] from x_bf16"):
        rmsnorm(torch.ones(2, 8).bfloat16(), torch.ones(5).bfloat16(), 1e-20, torch.ones(2, 8).bfloat16())
    with pytest.raises(BindError, match="dtype"):
        rmsnorm(torch.ones(2, 8), torch.ones(8).bfloat16(), 1e-20, torch.ones(2, 8).bfloat16())
