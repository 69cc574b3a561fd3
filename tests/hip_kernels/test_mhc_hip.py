"""mHC from the kernels: merge and collapse bit for bit, the projection against FP64, Sinkhorn, rows by themselves."""

import pytest
import torch
from safetensors.torch import load_file

from rocline.hip_kernels.act_quant import act_round8_hip
from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.mhc import (
    mhc_coefficients_ref,
    mhc_collapse_norm,
    mhc_collapse_ref,
    mhc_merge_ref,
    mhc_project_ref,
)
from rocline.hip_kernels.mhc_hip import (
    FEW_ROWS,
    Coefficients,
    Merge,
    Mixing,
    Projection,
    mhc_enter_hip,
    mhc_finish_hip,
    mhc_pass_hip,
    partials_shape,
    prepare_projection,
)

EPS, HC_EPS, ITERS = 1e-20, 1e-6, 20


def bf16(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape)).bfloat16()


def f32(rng, *shape, scale=1.0):
    return torch.from_numpy(rng.standard_normal(shape) * scale).float()


class Layer:
    """A sublayer's weights and a merge before it, for n_rows rows of width channels."""

    def __init__(self, device, rng, n_rows, width):
        self.device, self.width = device, width
        self.streams, self.sublayer = bf16(rng, n_rows, 4, width), bf16(rng, n_rows, width)
        self.post, self.comb, self.pre = f32(rng, n_rows, 4), f32(rng, n_rows, 4, 4), f32(rng, n_rows, 4)
        self.fn, self.norm = f32(rng, 24, 4 * width, scale=(4 * width) ** -0.5), bf16(rng, width)
        self.scale, self.base = f32(rng, 3), f32(rng, 24)

    def projection(self):
        put = self.device.put
        return Projection(self.width, put(prepare_projection(self.fn)), put(self.scale), put(self.base))

    def run(self, rows=slice(None), merge=True):
        """merged, collapsed, normed, pre, post, comb; in the streams' own place."""
        put, projection = self.device.put, self.projection()
        streams, pre = put(self.streams[rows]), put(self.pre[rows])
        n_rows = len(streams)
        made = Merge(put(self.sublayer[rows]), put(self.post[rows]), put(self.comb[rows])) if merge else None
        u = self.device.full((n_rows, self.width), float("nan"), torch.bfloat16)
        partials = self.device.full(partials_shape(n_rows, self.width), float("nan"))
        mhc_pass_hip(streams, made, streams if merge else None, pre, u, projection, partials)
        collapsed = self.device.get(u).clone()
        out = Coefficients(*(self.device.full((n_rows, *shape), float("nan")) for shape in ((4,), (4,), (4, 4))))
        mhc_finish_hip(u, put(self.norm), EPS, Mixing(projection, partials, out, HC_EPS, ITERS))
        found = (streams, collapsed, u, out.pre_f32, out.post_f32, out.comb_f32)
        return [self.device.get(x) for x in found]

    def enter(self, merge=True, mixing=True):
        """The same without `collapsed`, by mhc_enter_hip."""
        put, full, n_rows = self.device.put, self.device.full, len(self.streams)
        streams, u = put(self.streams), full((n_rows, self.width), float("nan"), torch.bfloat16)
        made = Merge(put(self.sublayer), put(self.post), put(self.comb)) if merge else None
        partials = full(partials_shape(n_rows, self.width), float("nan"))
        out = Coefficients(*(full((n_rows, *shape), float("nan")) for shape in ((4,), (4,), (4, 4))))
        mixed = Mixing(self.projection(), partials, out, HC_EPS, ITERS) if mixing else None
        counter, rounded = full((1,), 0, torch.int32), full(u.shape, float("nan"), torch.bfloat16)
        mhc_enter_hip(streams, made, put(self.pre), put(self.norm), EPS, mixed, u, counter, rounded)
        assert not self.device.get(counter).any()
        want = full(u.shape, float("nan"), torch.bfloat16)
        act_round8_hip(u, want)
        assert torch.equal(self.device.get(rounded).view(torch.int16), self.device.get(want).view(torch.int16))
        return [self.device.get(x) for x in (streams, u, out.pre_f32, out.post_f32, out.comb_f32)]


@pytest.mark.parametrize("width", [96, 192, 512])
@pytest.mark.parametrize("n_rows", [1, 6, 17, 33])
def test_merge_collapse_and_norm(device, rng, n_rows, width):
    layer = Layer(device, rng, n_rows, width)
    merged, collapsed, normed, *_ = layer.run()
    want = mhc_merge_ref(layer.sublayer, layer.streams, layer.post, layer.comb)
    assert torch.equal(merged, want)
    assert torch.equal(collapsed, mhc_collapse_ref(want, layer.pre))
    want_u = torch.empty_like(collapsed)
    mhc_collapse_norm(want, layer.pre, layer.norm, EPS, want_u)
    # The norm's sum has another order: a rounding boundary is crossed now and then.
    away = (normed.view(torch.int16).int() - want_u.view(torch.int16).int()).abs()
    assert away.max() <= 1
    assert (away > 0).float().mean() < 0.01


@pytest.mark.parametrize("width", [96, 512])
@pytest.mark.parametrize("n_rows", [1, 6, 33])
def test_coefficients(device, rng, n_rows, width):
    layer = Layer(device, rng, n_rows, width)
    merged, _, _, *found = layer.run()
    z64 = merged.double().flatten(1) @ layer.fn.double().T
    z64 *= (merged.double().flatten(1).square().mean(1, keepdim=True) + EPS).rsqrt()
    want = mhc_coefficients_ref(z64, layer.scale.double(), layer.base.double(), HC_EPS, ITERS)
    for got, exact in zip(found, want, strict=True):
        assert (got - exact).abs().max() < 4e-6  # FP32: 20 divisions on values up to 1, sums of 4 width terms


@pytest.mark.parametrize("n_rows", [1, 6, 33, 2_048, 4_096])
def test_projection_is_no_worse_than_fp32(device, rng, n_rows):
    """At the release's width: the projection's sums, and the coefficients, against FP64."""
    if n_rows > 33 and not device.is_card:
        pytest.skip(f"{n_rows:,} rows need a GPU: --hip rocm, or --hip cuda on an NVIDIA one")
    width = 5120
    layer = Layer(device, rng, n_rows, width)
    layer.base.zero_()
    layer.scale.fill_(1.0)
    merged, _, _, pre, post, comb = layer.run(merge=False)
    flat = merged.double().flatten(1)
    z64 = flat @ layer.fn.double().T * (flat.square().mean(1, keepdim=True) + EPS).rsqrt()
    z32 = mhc_project_ref(merged, layer.fn, EPS)
    mine = (partial_sums(device, layer) - flat @ layer.fn.double().T).abs()
    theirs = ((z32.double() - z64) * (flat.square().mean(1, keepdim=True) + EPS).sqrt()).abs()
    assert mine.square().mean() <= theirs.square().mean()
    assert mine.max() <= 2 * theirs.max()
    want = mhc_coefficients_ref(z64, layer.scale.double(), layer.base.double(), HC_EPS, ITERS)
    for got, exact in zip((pre, post, comb), want, strict=True):
        assert (got - exact).abs().max() < 4e-6


def partial_sums(device, layer):
    """[R, 24] FP32, in the order in which mhc_finish adds."""
    partials = device.full(partials_shape(len(layer.streams), layer.width), float("nan"))
    mhc_pass_hip(device.put(layer.streams), None, None, None, None, layer.projection(), partials)
    total = torch.zeros(len(layer.streams), 24)
    for segment in device.get(partials).unbind(1):
        total += segment[:, :24]
    return total.double()


@pytest.mark.parametrize("n_rows", [1, 2, 6, 15, 16, 17, 33, 64, 65])
def test_rows_are_their_own(device, rng, n_rows):
    layer = Layer(device, rng, 65, 96)
    layer.streams[40, 1, 3], layer.sublayer[13, 5] = float("nan"), float("inf")
    full = layer.run()
    some = layer.run(slice(65 - n_rows, 65))
    for got, want in zip(some, full, strict=True):
        assert torch.equal(got.view(torch.uint8), want[65 - n_rows :].view(torch.uint8))
    rest = [row for row in range(65) if row not in (13, 40)]
    for got in full:
        assert got[rest].isfinite().all()
        assert not got[40].isfinite().all()


@pytest.mark.parametrize("width", [96, 1056, 5120])  # less than a wave's pieces, not whole rounds of them, the release
@pytest.mark.parametrize("n_rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_one_launch_or_two_give_the_same_bits(device, rng, n_rows, width):
    layer = Layer(device, rng, n_rows, width)
    for merge in (True, False):
        merged, _, *want = layer.run(merge=merge)
        for got, wanted in zip(layer.enter(merge), (merged, *want), strict=True):
            assert torch.equal(got, wanted)
    streams, u, *_ = layer.enter(merge=False, mixing=False)
    assert torch.equal(streams, layer.streams)
    assert torch.equal(u, want[0])


def test_components_are_the_weight(rng):
    fn = f32(rng, 24, 4 * 160) * torch.exp2(torch.from_numpy(rng.integers(-60, 60, (24, 640))))
    steps = prepare_projection(fn)  # [2, 4, 8, 5, 16, 16]
    columns = steps.double().permute(3, 4, 1, 0, 2, 5).reshape(80, 4, 256)
    assert torch.equal(columns[:72].unflatten(0, (3, 24)).sum(0)[..., :160].flatten(1), fn.double())
    assert not columns[..., 160:].any()
    assert not columns[72:].any()


def test_sinkhorn_table_of_the_specification(device, data_folder):
    ops = load_file(data_folder / "ops.safetensors")
    streams = ops["mhc_mix_5120.X"]
    fn = (ops["mhc_mix_5120.fn_mul"][:, :, None] * ops["mhc_mix_5120.fn_tile"][:, None]).flatten(1)
    put = device.put
    projection = Projection(
        5120, put(prepare_projection(fn)), put(ops["mhc_mix_5120.scale"]), put(ops["mhc_mix_5120.base"])
    )
    partials = device.full(partials_shape(len(streams), 5120), float("nan"))
    mhc_pass_hip(put(streams), None, None, None, None, projection, partials)
    out = Coefficients(*(device.full((len(streams), *shape), float("nan")) for shape in ((4,), (4,), (4, 4))))
    u, ones = device.full((len(streams), 5120), 1.0, torch.bfloat16), device.full((5120,), 1.0, torch.bfloat16)
    mhc_finish_hip(u, ones, EPS, Mixing(projection, partials, out, HC_EPS, ITERS))
    for value, name in zip((out.pre_f32, out.post_f32, out.comb_f32), ("pre64", "post64", "comb64"), strict=True):
        assert (device.get(value) - ops[f"mhc_mix_5120.{name}"]).abs().max() < 8e-6


def test_an_output_needs_its_inputs():
    x = torch.zeros(1, 4, 32).bfloat16()
    with pytest.raises(BindError, match="give both"):
        mhc_pass_hip(x, None, x, None, None, None, None)
    with pytest.raises(BindError, match="24 channels"):
        mhc_pass_hip(
            torch.zeros(1, 4, 24).bfloat16(), None, None, torch.zeros(1, 4), torch.zeros(1, 24).bfloat16(), None, None
        )
