"""Low-rank queries and window rows in one launch: the bits of the kernels that do it one by one."""

import pytest
import torch

from rocline.hip_kernels.act_quant import act_round8, act_round8_hip
from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.latents_hip import FEW_ROWS, latents_few_hip
from rocline.hip_kernels.linear import Fp8Weight
from rocline.hip_kernels.linear_hip import fp8_linear_hip, prepare_fp8_weight
from rocline.hip_kernels.window_row import latent_norms_hip

EPS = 1e-20
SHAPES = [(96, 64, 64), (1280, 512, 5120)]  # queries, window rows, channels in


def bf16(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape)).bfloat16()


def fp8(rng, n_out, n_in):
    codes = torch.from_numpy(rng.integers(0, 0x7F, (n_out, n_in)) + 128 * rng.integers(0, 2, (n_out, n_in)))
    scales = torch.from_numpy(rng.integers(112, 122, (-(-n_out // 32), n_in // 32)))
    return Fp8Weight(codes.to(torch.uint8), scales.to(torch.uint8))


class Case:
    def __init__(self, device, rng, n_rows, shape):
        query_width, width, n_in = shape
        put = device.put
        x = bf16(rng, n_rows, n_in)
        act_round8(x, x)
        angle = torch.from_numpy(rng.uniform(-3, 3, (n_rows, width // 8))).float()
        self.device, self.shape, self.x = device, shape, put(x)
        self.weights = [prepare_fp8_weight(Fp8Weight(*map(put, fp8(rng, n, n_in)))) for n in (query_width, width)]
        self.norms = put(bf16(rng, query_width)), put(bf16(rng, width))
        self.turn = put(angle.cos()), put(angle.sin())
        self.slots = put(torch.from_numpy(rng.permutation(2 * n_rows)[:n_rows]).int())

    def room(self):
        """Queries, projections, window rows in 2 R slots, rounded queries."""
        (query_width, width, _), n_rows, full = self.shape, len(self.x), self.device.full
        widths = query_width, width, query_width
        qr, projected, rounded = (full((n_rows, w), float("nan"), torch.bfloat16) for w in widths)
        return qr, projected, full((2 * n_rows, width + width // 32), 0xEE, torch.uint8), rounded

    def together(self, counter):
        qr, projected, rows, rounded = self.room()
        products = self.x, self.weights[0], qr, self.weights[1], projected
        latents_few_hip(*products, *self.norms, EPS, *self.turn, rows, self.slots, rounded, counter)
        return [self.device.get(x) for x in (qr, rows, rounded)]

    def one_by_one(self):
        qr, projected, rows, rounded = self.room()
        for weight, out in zip(self.weights, (qr, projected), strict=True):
            fp8_linear_hip(self.x, weight, out)
        latent_norms_hip(qr, self.norms[0], projected, self.norms[1], EPS, *self.turn, rows, self.slots)
        act_round8_hip(qr, rounded)
        return [self.device.get(x) for x in (qr, rows, rounded)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_rows", [1, FEW_ROWS])
def test_the_same_bits_as_one_by_one(device, rng, n_rows, shape):
    if shape == SHAPES[-1] and n_rows > 1 and not device.is_card:
        pytest.skip("the release's width in many rows needs a GPU: --hip rocm, or --hip cuda on an NVIDIA one")
    case = Case(device, rng, n_rows, shape)
    counter = device.full((1,), 0, torch.int32)
    want = case.one_by_one()
    for _ in range(3):  # a race would give several answers
        for got, wanted in zip(case.together(counter), want, strict=True):
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    assert not device.get(counter).any()


def test_more_rows_are_refused(device, rng):
    case = Case(device, rng, FEW_ROWS + 1, SHAPES[0])
    with pytest.raises(BindError, match="3 rows of 64 and 64 channels to queries of 96; want at most 2"):
        case.together(device.full((1,), 0, torch.int32))
