"""The number formats, exhaustively, against exact fractions and the reference's tables (cases B24 to B30)."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rocline.hip_kernels import formats
from rocline.hip_kernels.formats import RowFormat

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
BYTES = torch.arange(256, dtype=torch.uint8)


@pytest.fixture(scope="module")
def ops(data_folder):
    return load_file(data_folder / "ops.safetensors")


def e4m3_value(code: int) -> float:
    """By the definition: 1 sign, 4 exponent bits with bias 7, 3 mantissa bits, no infinity."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, but any NaN equals any NaN."""
    nan = a.isnan() & b.isnan()
    return a.shape == b.shape and bool(((a.view(torch.int32) == b.view(torch.int32)) | nan).all())


def test_b24_e8m0_has_a_subnormal_and_a_nan():
    got = formats.e8m0_decode(BYTES)
    want = torch.tensor([2.0 ** (b - 127) for b in range(255)] + [float("nan")], dtype=torch.float32)
    assert same(got, want)
    assert got[0] == 2.0**-127
    assert got[0] != 0


def test_b25_nan_is_the_code_255_and_not_the_value_128():
    assert formats.e8m0_decode(torch.tensor([134], dtype=torch.uint8)) == 128.0
    assert formats.e8m0_decode(torch.tensor([255], dtype=torch.uint8)).isnan()


def test_b26_every_e2m1_code_times_every_scale(ops):
    got = formats.e2m1_decode(BYTES[:16])[:, None] * formats.e8m0_decode(BYTES)
    assert same(got, ops["e2m1_e8m0.values"])
    assert got[1, 0] == 0.5 * 2.0**-127  # 0.5 * 2^-127 stays a number: adding exponents gives -inf


def test_b28_the_even_element_is_the_low_nibble():
    packed = torch.tensor([[0x21]], dtype=torch.uint8)
    assert formats.e2m1_decode(formats.unpack_e2m1(packed)).tolist() == [[0.5, 1.0]]
    codes = torch.arange(16, dtype=torch.uint8)[None]
    assert torch.equal(formats.unpack_e2m1(formats.pack_e2m1(codes)), codes)


def test_b29_scale_bytes_are_exponents_and_never_numbers():
    assert formats.e8m0_decode(torch.tensor([127, 108], dtype=torch.uint8)).tolist() == [1.0, 2.0**-19]


def test_b30_b31_e4m3_is_the_ocp_encoding(ops):
    got = formats.e4m3_decode(BYTES)
    assert same(got, torch.tensor([e4m3_value(code) for code in range(256)]))
    assert same(got, ops["e4m3.values"])
    assert got[0x7F].isnan()
    assert got[0xFF].isnan()
    assert got[0x7E] == 448  # FNUZ encodings end at 240


def nearest(value: Fraction, grid: list[float]) -> int:
    """Index of the nearest grid value, a tie to the even index."""
    distance = [abs(value - Fraction(g)) for g in grid]
    best = min(distance)
    ties = [i for i, d in enumerate(distance) if d == best]
    return ties[0] if len(ties) == 1 else next(i for i in ties if i % 2 == 0)


def test_e4m3_rounds_to_nearest_even_over_all_midpoints(rng):
    grid = [e4m3_value(code) for code in range(0x7F)]
    middles = [(a + b) / 2 for a, b in pairwise(grid)]
    beside = [np.nextafter(np.float32(m), np.float32(side)) for m in middles for side in (0, np.inf)]
    values = np.array([*middles, *beside, *rng.uniform(0, 500, 500), 448, 449, 1e30, 2.0**-12], dtype=np.float32)
    values = np.concatenate([values, -values])
    got = formats.e4m3_encode(torch.from_numpy(values))
    want = [nearest(min(Fraction(float(abs(v))), Fraction(448)), grid) + (128 if v < 0 else 0) for v in values]
    assert got.tolist() == want
    assert formats.e4m3_encode(torch.tensor([float("nan")])).item() in (0x7F, 0xFF)


def test_e2m1_rounds_to_nearest_even_and_keeps_the_sign_of_zero(rng):
    middles = [(a + b) / 2 for a, b in pairwise(E2M1)]
    beside = [np.nextafter(np.float32(m), np.float32(side)) for m in middles for side in (0, np.inf)]
    values = np.array([*middles, *beside, *E2M1, *rng.uniform(0, 8, 500), 6.5, 1e30], dtype=np.float32)
    values = np.concatenate([values, -values])
    got = formats.e2m1_encode(torch.from_numpy(values))
    want = [nearest(min(Fraction(float(abs(v))), Fraction(6)), E2M1) + (8 if np.signbit(v) else 0) for v in values]
    assert got.tolist() == want
    assert formats.e2m1_encode(torch.tensor([0.0, -0.0])).tolist() == [0, 8]


def test_pow2ceil_decides_on_bits(ops, rng):
    for constant, name in ((formats.RECIPROCAL_448, "c448"), (formats.RECIPROCAL_6, "c6")):
        got = formats.e8m0_decode(formats.pow2ceil_e8m0(ops["pow2ceil.amax"] * constant))
        assert same(got, ops[f"pow2ceil.{name}"])
    powers = torch.ldexp(torch.ones(253), torch.arange(-126, 127))
    assert formats.pow2ceil_e8m0(powers).tolist() == list(range(1, 254))  # exact powers stay
    above = torch.from_numpy(np.nextafter(powers.numpy(), np.float32(np.inf)))
    assert formats.pow2ceil_e8m0(above).tolist() == list(range(2, 255))
    for amax in (448.0 * 2.0**k for k in range(-20, 20)):  # the product with the rounded reciprocal is exact
        assert formats.e8m0_decode(formats.pow2ceil_e8m0(torch.tensor([amax]) * formats.RECIPROCAL_448)) == amax / 448


@pytest.mark.parametrize(
    ("table", "quantise", "scale"),
    [
        ("actquant8", formats.act_quant8, "scale_e8m0"),
        ("actquant4_g32_e8m0", formats.act_quant4_e8m0, "scale_byte"),
        ("actquant4_g16_e4m3", formats.act_quant4_e4m3, "scale_byte"),
    ],
)
def test_quantisers_equal_the_reference_tables(ops, table, quantise, scale):
    codes, scales = quantise(ops[f"{table}.x"])
    assert torch.equal(codes, ops[f"{table}.codes"])
    assert torch.equal(scales, ops[f"{table}.{scale}"])


@pytest.mark.parametrize(
    ("kind", "table"),
    [("window", "actquant8"), ("index_key", "actquant4_g32_e8m0"), ("compressed", "actquant4_g16_e4m3")],
)
def test_packed_rows_lose_nothing(ops, rng, kind, table):
    row_format = RowFormat(kind, 32)
    assert torch.equal(row_format.unpack(row_format.pack(ops[f"{table}.x"])), ops[f"{table}.dequant"])
    wide = RowFormat(kind, 512)
    x = torch.from_numpy(rng.standard_normal((9, 512)) * np.exp2(rng.integers(-2, 9, (9, 1)))).bfloat16()
    values = wide.unpack(wide.pack(x))
    assert torch.equal(wide.unpack(wide.pack(values)), values)


def test_compressed_rows_are_never_packed_twice():
    """A subnormal E4M3 scale is too coarse to be found again: rows must travel as bytes, not as values."""
    row_format = RowFormat("compressed", 16)
    x = torch.full((1, 16), 9 * 2.0**-9).bfloat16()  # amax/6 = 1.5 * 2^-9 ties to 2 * 2^-9
    once = row_format.unpack(row_format.pack(x))
    assert not torch.equal(row_format.unpack(row_format.pack(once)), once)


def test_row_sizes_are_the_releases():
    assert RowFormat("window", 512).row_bytes == 528
    assert RowFormat("compressed", 512).row_bytes == 288
    assert RowFormat("index_key", 128).row_bytes == 68


@pytest.mark.parametrize("kind", ["window", "index_key", "compressed"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_value_poisons_its_own_group_and_no_other(rng, kind, bad):
    x = torch.from_numpy(rng.standard_normal((3, 64))).bfloat16()
    clean = RowFormat(kind, 64).unpack(RowFormat(kind, 64).pack(x))
    x[1, 5] = bad
    got = RowFormat(kind, 64).unpack(RowFormat(kind, 64).pack(x))
    group = 16 if kind == "compressed" else 32
    assert torch.equal(got[[0, 2]], clean[[0, 2]])
    assert torch.equal(got[1, group:], clean[1, group:])
    if kind != "compressed" or bad != float("inf"):  # an E4M3 scale saturates instead
        assert not got[1, :group].isfinite().all()


def test_dequantised_tiles_may_end_in_the_middle_of_a_scale(rng):
    codes = torch.from_numpy(rng.integers(0, 0x7F, (40, 96), dtype=np.uint8))
    scales = torch.from_numpy(rng.integers(100, 150, (2, 3), dtype=np.uint8))
    got = formats.dequantise_tiles(codes, scales)
    for row, column in ((0, 0), (31, 95), (32, 32), (39, 63)):
        want = e4m3_value(int(codes[row, column])) * 2.0 ** (int(scales[row // 32, column // 32]) - 127)
        assert got[row, column].item() == want
