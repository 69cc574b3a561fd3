"""The router on the GPU: given equal logits the reference's bits, ties and broken logits included (case B32)."""

import pytest
import torch
import torch.nn.functional as F

from rocline.hip_kernels.act_quant import act_round8
from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.linear_hip import prepare_bf16_weight, workspace_floats
from rocline.hip_kernels.router import router_ref, sqrt_softplus_f32
from rocline.hip_kernels.router_hip import router_choose_hip, router_hip


def assert_same(got, want):
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.0).view(torch.int32), want.nan_to_num(0.0).view(torch.int32))


def choose(device, logits, bias, k, in_place):
    put_logits = device.put(logits)
    scores = put_logits if in_place else device.full(logits.shape, float("nan"))
    ids = device.full((len(logits), k), -7, torch.int32)
    weights = device.full((len(logits), k), float("nan"))
    router_choose_hip(put_logits, device.put(bias), 1.5, scores, ids, weights)
    return tuple(map(device.get, (scores, ids, weights)))


@pytest.mark.parametrize(("n_experts", "k"), [(1, 1), (8, 2), (33, 3), (384, 6)])
@pytest.mark.parametrize("n_rows", [1, 7, 17])
def test_the_references_bits(device, rng, n_rows, n_experts, k):
    logits = torch.from_numpy(rng.standard_normal((n_rows, n_experts)) * 12).float()
    logits[-1] = torch.from_numpy(rng.integers(-1, 2, n_experts)).float()  # ties everywhere
    logits[n_rows // 2] = torch.from_numpy(rng.uniform(-90, 30, n_experts)).float()
    bias = torch.from_numpy(rng.integers(-2, 3, n_experts) / 4).float()
    want = router_ref(logits, bias, k, 1.5)
    for in_place in (False, True):
        got = choose(device, logits, bias, k, in_place)
        assert_same(got[0], want[0])
        assert torch.equal(got[1], want[1])
        assert_same(got[2], want[2])


def test_broken_logits_and_zeros(device):
    logits = torch.zeros(4, 40)
    logits[0, 3], logits[0, 7] = float("inf"), -float("inf")
    logits[1, 5] = float("nan")
    logits[2] = -float("inf")
    logits[3] = -100.0
    bias = torch.zeros(40)
    bias[0] = -0.0
    want = router_ref(logits, bias, 6, 1.5)
    got = choose(device, logits, bias, 6, False)
    assert torch.equal(got[1], want[1])
    assert want[1][1, 0] == 5  # a NaN is not lost among numbers
    assert_same(got[0], want[0])
    assert_same(got[2], want[2])


def test_scores_are_close_to_the_librarys():
    """Also where e^x is subnormal in FP32, below -87."""
    x = torch.linspace(-150, 25, 100_001)
    exact = F.softplus(x.double()).sqrt()
    assert ((sqrt_softplus_f32(x) - exact) / exact).abs().max() < 4 * 2.0**-24  # half of log's, and the root's


class Case:
    """A gate and its bias, as the kernels take them."""

    def __init__(self, device, rng, n_experts, width, k):
        self.device, self.k = device, k
        self.gate = torch.from_numpy(rng.standard_normal((n_experts, width)) / 8).bfloat16()
        self.bias = torch.from_numpy(rng.standard_normal(n_experts) / 8).float()
        self.tiles = prepare_bf16_weight(device.put(self.gate))
        self.counter = device.full((1,), 0, torch.int32)

    def kernels(self, u):
        """scores, ids, weights and the rounded rows."""
        device, n_rows, n_experts = self.device, len(u), len(self.gate)
        outs = device.full((n_rows, n_experts), float("nan")), device.full((n_rows, self.k), -7, torch.int32)
        weights, rounded = device.full((n_rows, self.k), float("nan")), device.full(u.shape, -7, torch.bfloat16)
        room = device.full((max(1, workspace_floats(n_rows, self.tiles)),), float("nan"))
        operands = device.put(u), self.tiles, device.put(self.bias), 1.5, *outs, weights, self.counter, room, rounded
        router_hip(*operands)
        assert device.get(self.counter).tolist() == [0]
        return tuple(map(device.get, (*outs, weights, rounded)))


@pytest.mark.parametrize(("n_experts", "width", "k"), [(24, 96, 6), (33, 1280, 2), (130, 64, 6), (384, 32, 6)])
@pytest.mark.parametrize("n_rows", [1, 6, 16, 17])
def test_whole_router(device, rng, n_rows, n_experts, width, k):
    """Logits agree within FP32's order of addition; the choice is the reference's for the logits that were found."""
    case = Case(device, rng, n_experts, width, k)
    u = torch.from_numpy(rng.standard_normal((n_rows, width))).bfloat16()
    scores, ids, weights, rounded = case.kernels(u)
    want = sqrt_softplus_f32(F.linear(u.double(), case.gate.double()).float())
    assert (scores - want).abs().max() < 1e-5
    order = torch.sort(scores + case.bias, dim=1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(ids.long(), order)
    chosen = scores.gather(1, order)
    assert torch.allclose(weights, chosen / chosen.sum(1, keepdim=True) * 1.5, rtol=1e-6)
    act_round8(u, u)
    assert torch.equal(rounded.view(torch.int16), u.view(torch.int16))


def test_b23_a_rows_bits_are_its_own(device, rng):
    """Alone, in 16, in 40, in reverse, beside a broken row: the same; 40 rows take other kernels. Experts tie."""
    case = Case(device, rng, 40, 320, 6)
    case.gate[20:], case.bias[20:] = case.gate[:20], case.bias[:20]
    case.tiles = prepare_bf16_weight(device.put(case.gate))
    u = torch.from_numpy(rng.standard_normal((40, 320))).bfloat16()

    def bits(rows):
        return [t.view(torch.int16 if t.element_size() == 2 else torch.int32) for t in case.kernels(u[rows])]

    def assert_equal(got, want):
        assert all(map(torch.equal, got, want))

    alone = [torch.cat(parts) for parts in zip(*(bits(slice(row, row + 1)) for row in range(0, 40, 5)), strict=True)]
    assert_equal([part[::5] for part in bits(slice(0, 16))], [part[:4] for part in alone])
    assert_equal([part[::5] for part in bits(slice(0, 40))], alone)
    assert_equal([part.flip(0)[::5] for part in bits(torch.arange(39, -1, -1))], alone)
    u[1] = float("nan")
    assert_equal([part[::5] for part in bits(slice(0, 16))], [part[:4] for part in alone])
    assert_equal([part[::5] for part in bits(slice(0, 40))], alone)


def test_refusals(device):
    with pytest.raises(BindError, match="3 of 2 experts"):
        choose(device, torch.zeros(1, 2), torch.zeros(2), 3, False)
