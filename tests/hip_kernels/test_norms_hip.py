"""RMSNorm and window rows from the kernels: exact where the sum is, close elsewhere; each row by itself."""

import pytest
import torch
from safetensors.torch import load_file

from rocline.hip_kernels.act_quant import act_round8_hip
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.rmsnorm import rmsnorm, rmsnorm_hip
from rocline.hip_kernels.window_row import latent_norms_hip, window_row, window_row_hip

EPS = 1e-20
ROW_COUNTS = [1, 2, 6, 15, 16, 17, 33, 64, 65]


def bf16(rng, *shape, scale=1.0):
    return torch.from_numpy(rng.standard_normal(shape) * scale).bfloat16()


def whole(rng, *shape):
    """Small whole numbers: their squares add up to the same FP32 number in any order."""
    return torch.from_numpy(rng.integers(-15, 16, shape)).bfloat16()


def run_norm(device, x, weight):
    got = device.full(x.shape, float("nan"), torch.bfloat16)
    rmsnorm_hip(device.put(x), device.put(weight), EPS, got)
    return device.get(got)


@pytest.mark.parametrize("width", [8, 96, 1280, 5120])
def test_norm_is_exact_where_its_sum_is(device, rng, width):
    x, weight, want = whole(rng, 5, width), bf16(rng, width), torch.empty(5, width).bfloat16()
    x[1] = 0
    rmsnorm(x, weight, EPS, want)
    assert torch.equal(run_norm(device, x, weight), want)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e12])
def test_norm_is_close_in_any_order(device, rng, scale):
    x, weight = bf16(rng, 7, 1280, scale=scale), bf16(rng, 1280)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    got = run_norm(device, x, weight).double()
    assert ((got - exact).abs() <= 2**-8 * 1.001 * exact.abs()).all()  # one rounding to BF16, and some of FP32


def test_norm_table_of_the_specification(device, data_folder):
    ops = load_file(data_folder / "ops.safetensors")
    got = run_norm(device, ops["rmsnorm.x"], ops["rmsnorm.w"])
    # Sums in another order move an element over a rounding boundary now and then, by one unit in the last place.
    away = (got.view(torch.int16).int() - ops["rmsnorm.y"].view(torch.int16).int()).abs()
    assert away.max() <= 1
    assert (away > 0).float().mean() < 0.01


def test_norm_rows_are_their_own(device, rng):
    x, weight = bf16(rng, 65, 96), bf16(rng, 96)
    x[3, 5], x[7, 0], x[8] = float("nan"), float("inf"), 3e38
    alone = torch.cat([run_norm(device, x[row : row + 1], weight) for row in range(0, 65, 4)])
    for n_rows in ROW_COUNTS:
        got = run_norm(device, x[:n_rows], weight)
        assert torch.equal(got[::4].view(torch.int16), alone[: -(-n_rows // 4)].view(torch.int16))
    assert got[3].isnan().all()
    assert got[[2, 4, 6, 9]].isfinite().all()


def window_case(rng, n_rows, width, n_pairs, norms):
    angle = torch.from_numpy(rng.uniform(-3, 3, (n_rows, n_pairs))).float()
    return norms(rng, n_rows, width), bf16(rng, width), angle.cos(), angle.sin()


def run_window(device, projected, weight, cos, sin):
    n_rows, width = projected.shape
    got = device.full((n_rows, width + width // 32), 0xEE, torch.uint8)
    window_row_hip(device.put(projected), device.put(weight), EPS, device.put(cos), device.put(sin), got)
    return device.get(got)


@pytest.mark.parametrize(("width", "n_pairs"), [(512, 32), (128, 16), (64, 8)])
@pytest.mark.parametrize("n_rows", [1, 6, 17])
def test_window_rows_have_the_reference_bytes(device, rng, n_rows, width, n_pairs):
    projected, weight, cos, sin = window_case(rng, n_rows, width, n_pairs, whole)
    projected[0, :40] = 0  # a group of zeros
    projected[-1, 1] = 9
    weight[64 - n_pairs : 64] *= 1000  # groups of very different sizes
    want = torch.zeros((n_rows, width + width // 32), dtype=torch.uint8)
    window_row(projected, weight, EPS, cos, sin, want)
    assert torch.equal(run_window(device, projected, weight, cos, sin), want)


@pytest.mark.parametrize("n_rows", [1, 7])
def test_window_rows_go_into_slots(device, rng, n_rows):
    case = window_case(rng, n_rows, 128, 16, bf16)
    plain, slots = run_window(device, *case), torch.from_numpy(rng.permutation(30)[:n_rows]).int()
    slots[-1] = -1 if n_rows > 1 else slots[-1]
    projected, weight, *turn = map(device.put, case)
    want = torch.full((30, 132), 0xEE, dtype=torch.uint8)
    want[slots[slots >= 0].long()] = plain[slots >= 0]
    got = device.full((30, 132), 0xEE, torch.uint8)
    window_row_hip(projected, weight, EPS, *turn, got, device.put(slots))
    assert torch.equal(device.get(got), want)
    reference = torch.full((30, 132), 0xEE, dtype=torch.uint8)
    window_row(*case[:2], EPS, *case[2:], reference, slots)
    assert torch.equal((reference == 0xEE).all(1), (want == 0xEE).all(1))


@pytest.mark.parametrize("n_rows", [1, 4, 9])
def test_norms_together_are_those_apart(device, rng, n_rows):
    case = window_case(rng, n_rows, 128, 16, bf16)
    query, query_weight = bf16(rng, n_rows, 96), bf16(rng, 96)
    projected, weight, *turn = map(device.put, case)
    got_query, got = device.put(query), device.full((n_rows, 132), 0xEE, torch.uint8)
    rounded = device.full(query.shape, float("nan"), torch.bfloat16)
    given = got_query, device.put(query_weight), projected, weight, EPS
    latent_norms_hip(*given, *turn, got, rounded_bf16=rounded)
    assert torch.equal(device.get(got), run_window(device, *case))
    want_rounded = device.full(query.shape, float("nan"), torch.bfloat16)
    act_round8_hip(got_query, want_rounded)
    assert torch.equal(device.get(rounded), device.get(want_rounded))
    assert torch.equal(device.get(got_query), run_norm(device, query, query_weight))


def test_window_codes_of_every_bf16_size(device, rng):
    """Rows scaled over the whole range, so that codes of all sizes, subnormal ones and ties occur."""
    projected, _, cos, sin = window_case(rng, 64, 64, 8, whole)
    weight = (whole(rng, 64) * torch.exp2(torch.arange(64) % 23 - 11.0)).bfloat16()
    projected[:, ::3] = 1
    want = torch.zeros((64, 66), dtype=torch.uint8)
    window_row(projected, weight, EPS, cos, sin, want)
    assert torch.equal(run_window(device, projected, weight, cos, sin), want)
    assert len(want[:, :64].unique()) > 150


def test_window_rows_are_their_own_and_nan_poisons_itself(device, rng):
    case = window_case(rng, 65, 64, 8, bf16)
    case[0][9, 3] = float("nan")
    case[0][11, 60] = float("inf")
    full = run_window(device, *case)
    for n_rows in ROW_COUNTS:
        got = run_window(device, case[0][:n_rows], case[1], case[2][:n_rows], case[3][:n_rows])
        assert torch.equal(got, full[:n_rows])
    values = RowFormat("window", 64).unpack(full)
    assert values[9].isnan().all()
    assert values[11, 32:].isnan().all()
    rest = [row for row in range(65) if row not in (9, 11)]
    assert values[rest].isfinite().all()
