"""wo_b and the streams behind it in one launch: the bits of the kernels that do it one after the other."""

import pytest
import torch

from rocline.hip_kernels.act_quant import act_round8
from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.linear import Fp8Weight
from rocline.hip_kernels.linear_hip import fp8_linear_hip, prepare_fp8_weight
from rocline.hip_kernels.mhc_hip import (
    FEW_ROWS,
    SEGMENT,
    Coefficients,
    Merge,
    Mixing,
    Projection,
    mhc_enter_hip,
    partials_shape,
    prepare_projection,
)
from rocline.hip_kernels.project_enter_hip import project_enter_hip

EPS, HC_EPS, ITERS = 1e-20, 1e-6, 20
# Channels out and in: less than a segment of channels; a last one with a single workgroup; the same, and more pieces of
# a row than threads norm at once. Of the first two some waves have no K. The release.
SHAPES = [(64, 32), (160, 96), (1056, 288), (5120, 8192)]


def noise(rng, *shape, scale=1.0):
    return torch.from_numpy(rng.standard_normal(shape) * scale).float()


class Case:
    def __init__(self, device, rng, n_rows, shape):
        width, n_in = shape
        put = device.put
        x = noise(rng, n_rows, n_in).bfloat16()
        act_round8(x, x)
        codes = torch.from_numpy(rng.integers(0, 0x7F, (width, n_in)) + 128 * rng.integers(0, 2, (width, n_in)))
        scales = torch.from_numpy(rng.integers(108, 114, (-(-width // 32), n_in // 32)))
        self.device, self.width, self.x = device, width, put(x)
        self.wo_b = prepare_fp8_weight(Fp8Weight(put(codes.to(torch.uint8)), put(scales.to(torch.uint8))))
        self.streams = noise(rng, n_rows, 4, width).bfloat16()
        self.by = Coefficients(*(put(noise(rng, n_rows, *of)) for of in ((4,), (4,), (4, 4))))
        fn = noise(rng, 24, 4 * width, scale=(4 * width) ** -0.5)
        self.projection = Projection(width, put(prepare_projection(fn)), put(noise(rng, 3)), put(noise(rng, 24)))
        self.norm = put(noise(rng, width).bfloat16())
        self.counters = device.full((2 + -(-width // SEGMENT),), 0, torch.int32)

    def run(self, project):
        """The streams, the output, the input of the next one, it rounded, and coefficients; by project(merge, ...)."""
        full, n_rows, nan = self.device.full, len(self.x), float("nan")
        out, into, rounded = (full((n_rows, self.width), nan, torch.bfloat16) for _ in range(3))
        made = Coefficients(*(full((n_rows, *of), nan) for of in ((4,), (4,), (4, 4))))
        mixing = Mixing(self.projection, full(partials_shape(n_rows, self.width), nan), made, HC_EPS, ITERS)
        streams, merge = self.device.put(self.streams.clone()), Merge(out, self.by.post_f32, self.by.comb_f32)
        project(streams, merge, self.by.pre_f32, self.norm, EPS, mixing, into, rounded)
        tensors = (streams, out, into, rounded, made.pre_f32, made.post_f32, made.comb_f32)
        return [self.device.get(tensor).clone() for tensor in tensors]

    def together(self, streams, *others):
        project_enter_hip(self.x, self.wo_b, streams, *others[:-1], self.counters, others[-1])

    def one_by_one(self, streams, merge, *others):
        fp8_linear_hip(self.x, self.wo_b, merge.sublayer_bf16)
        mhc_enter_hip(streams, merge, *others[:-1], self.counters[:1], others[-1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_rows", [1, FEW_ROWS])
def test_the_same_bits_as_one_by_one(device, rng, n_rows, shape):
    if shape == SHAPES[-1] and not device.is_card:
        pytest.skip("the release's width needs a GPU: --hip rocm, or --hip cuda on an NVIDIA one")
    case = Case(device, rng, n_rows, shape)
    want = case.run(case.one_by_one)
    for tensor in want:
        assert tensor.isfinite().all()
    for _ in range(20 if device.is_card else 2):  # a race would give several answers
        for got, wanted in zip(case.run(case.together), want, strict=True):
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
        assert not device.get(case.counters).any()


def test_a_broken_row_is_alone(device, rng):
    case = Case(device, rng, 2, SHAPES[1])
    want = case.run(case.together)
    case.streams[0, 2, 5] = float("nan")
    for got, wanted in zip(case.run(case.together), want, strict=True):
        assert torch.equal(got[1].view(torch.uint8), wanted[1].view(torch.uint8))


def test_what_does_not_fit_is_refused(device, rng):
    case = Case(device, rng, FEW_ROWS + 1, SHAPES[1])
    with pytest.raises(BindError, match="3 rows of 160 channels, a weight in 8 segments, 4 counters; want at most 2"):
        case.run(case.together)
    case = Case(device, rng, 1, SHAPES[1])
    case.counters = case.counters[:2]
    with pytest.raises(BindError, match=r"2 counters; want .* a counter for each 128 channels beside one"):
        case.run(case.together)
