"""What a product does beside multiplying, against the operators it takes the place of, bit for bit.

ActQuant8 of rows on their way in, ActQuant8 or the rotation of outputs, two weights in one launch; rows alone and in
company (B23).
"""

import pytest
import torch

from rocline.hip_kernels import linear_hip
from rocline.hip_kernels.act_quant import act_round8_hip
from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.grouped_projection_hip import grouped_projection_hip
from rocline.hip_kernels.linear import Fp8Weight
from rocline.hip_kernels.linear_hip import (
    Product,
    Turn,
    fp8_linear_hip,
    multiply_together,
    prepare_bf16_weight,
    prepare_fp8_weight,
    rounds_rows,
    workspace_floats,
)
from rocline.hip_kernels.rope import rope_hip

ROWS = [1, 6, 16, 17, 64, 65, 130]


def fp8_tiles(device, rng, n_out, n_in, groups=1):
    codes = torch.from_numpy(rng.integers(0, 256, (groups * n_out, n_in))).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x38
    scales = torch.from_numpy(rng.integers(115, 123, (-(-groups * n_out // 32), n_in // 32))).to(torch.uint8)
    return prepare_fp8_weight(Fp8Weight(device.put(codes), device.put(scales)), groups)


def rows(rng, n_rows, n_in):
    return torch.from_numpy(rng.standard_normal((n_rows, n_in))).bfloat16()


def turn_of(device, rng, n_rows, n_pairs, head_width):
    angles = torch.from_numpy(rng.uniform(0, 6.3, (n_rows, n_pairs))).float()
    return Turn(device.put(angles.cos()), device.put(angles.sin()), head_width)


def room(device, n_rows, *tiles):
    return device.full((max(1, workspace_floats(n_rows, *tiles)),), float("nan"))


def same_bits(a, b):
    """NaNs by place: a sum does not say which of several it keeps."""
    whole = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[a.dtype]
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7).view(whole), b.nan_to_num(7).view(whole))


def product(device, x, tiles, dtype=torch.float32, **how):
    """One product's output, on the host; x is there too."""
    out = device.full((len(x), tiles.groups * tiles.n_out), float("nan"), dtype)
    multiply_together("product", device.put(x), [Product(tiles, out)], room(device, len(x), tiles), **how)
    return device.get(out)


def rounded(device, x):
    out = device.put(x)
    act_round8_hip(out, out)
    return device.get(out)


def wild_rows(rng, n_rows, n_in):
    """Groups of every kind: of sizes far apart, of a few zeros or nothing else, tiny, huge and broken ones."""
    x = rows(rng, n_rows, n_in).float().unflatten(1, (-1, 32))
    kind = torch.from_numpy(rng.integers(0, 8, (n_rows, n_in // 32)))
    spread = torch.from_numpy(rng.integers(-24, 1, x.shape))
    x = torch.where((kind == 1)[..., None], x * torch.exp2(spread.float()), x)
    x[(kind == 2)[..., None] & (spread < -12)] = 0
    x[kind == 3] = 0
    x[kind == 4] *= 2.0**-130
    x[kind == 5] *= 2.0**120
    steps = torch.from_numpy(rng.integers(-511, 512, x.shape)).float()  # halfway between two codes, and 448 and beyond
    x = torch.where((kind == 6)[..., None], steps, x)
    broken = (kind == 7) & (torch.from_numpy(rng.integers(0, 4, kind.shape)) == 0)
    x[..., 5] = torch.where(broken, float("nan"), x[..., 5])
    x[..., 9] = torch.where(broken & (spread[..., 0] < -20), float("inf"), x[..., 9])
    return x.flatten(1).bfloat16()


def identity_tiles(device, n):
    codes = torch.eye(n).to(torch.float8_e4m3fn).view(torch.uint8)
    return prepare_fp8_weight(Fp8Weight(device.put(codes), device.full((n // 32, n // 32), 127, torch.uint8)))


@pytest.mark.parametrize("n_rows", [1, 7, 16])
def test_rows_are_rounded_as_they_are_read(device, rng, n_rows):
    """By weights that are an identity, so that every channel of the rounded rows is an output."""
    x = wild_rows(rng, n_rows, 256)
    want, got = rounded(device, x), product(device, x, identity_tiles(device, 256), round_rows=True)
    whole = ~want.isnan().any(1)  # a NaN spreads over its row
    assert same_bits(got[whole] + 0.0, want[whole].float() + 0.0)
    assert got[~whole].isnan().all()


@pytest.mark.parametrize("exponent", range(-12, -3))
def test_rounding_where_codes_change_their_spacing(device, exponent):
    """One small channel in each group, of all mantissas, beside ones that set the scale to 1."""
    x = torch.full((128, 32), 300.0)
    x[:, 7] = (1 + torch.arange(128) / 128) * 2.0**exponent
    x = x.view(16, 256).bfloat16()
    got = product(device, x, identity_tiles(device, 256), round_rows=True)
    assert same_bits(got, rounded(device, x).float())


@pytest.mark.parametrize(("n_out", "n_in"), [(40, 96), (136, 256), (264, 320), (16, 1280)])
@pytest.mark.parametrize("n_rows", [1, 2, 6, 15, 16])
def test_rounding_on_the_way_in_changes_no_bit(device, rng, n_rows, n_out, n_in):
    tiles, x = fp8_tiles(device, rng, n_out, n_in), wild_rows(rng, n_rows, n_in)
    assert same_bits(product(device, x, tiles, round_rows=True), product(device, rounded(device, x), tiles))


@pytest.mark.parametrize("n_rows", ROWS)
@pytest.mark.parametrize(("n_heads", "width", "n_pairs"), [(3, 64, 8), (2, 128, 32), (5, 40, 20), (1, 8, 4)])
def test_outputs_rotate(device, rng, n_rows, n_heads, width, n_pairs):
    tiles, x = fp8_tiles(device, rng, n_heads * width, 320), rows(rng, n_rows, 320)
    turn = turn_of(device, rng, n_rows, n_pairs, width)
    want = device.put(product(device, x, tiles, torch.bfloat16)).unflatten(1, (n_heads, width))
    rope_hip(want, turn.cos_f32, turn.sin_f32, want)
    got = device.full((n_rows, n_heads * width), float("nan"), torch.bfloat16)
    fp8_linear_hip(device.put(x), tiles, got, room(device, n_rows, tiles), turn=turn)
    assert same_bits(device.get(got), device.get(want).flatten(1))


@pytest.mark.parametrize(("groups", "n_out"), [(2, 64), (3, 160), (2, 40)])  # 40: rounded by a launch of its own
@pytest.mark.parametrize("n_rows", ROWS)
def test_outputs_are_rounded(device, rng, n_rows, groups, n_out):
    tiles = fp8_tiles(device, rng, n_out, 192, groups)
    heads = rows(rng, n_rows, groups * 192)
    heads[n_rows // 2, :32] *= 2.0**-40
    heads[-1, 7] = float("nan")
    x = device.put(heads.view(n_rows, 2 * groups, -1))
    got, want = (device.full((n_rows, groups * n_out), float("nan"), torch.bfloat16) for _ in range(2))
    grouped_projection_hip(x, tiles, want, room(device, n_rows, tiles))
    act_round8_hip(want, want)
    grouped_projection_hip(x, tiles, got, room(device, n_rows, tiles), round_out=True)
    assert same_bits(device.get(got), device.get(want))


@pytest.mark.parametrize("kind", ["e4m3", "bf16"])
@pytest.mark.parametrize("enough", [0, 192])  # segments in one workgroup, and in workgroups of their own
@pytest.mark.parametrize("n_rows", ROWS)
def test_two_weights_in_one_launch(device, rng, monkeypatch, n_rows, enough, kind):
    monkeypatch.setattr(linear_hip, "_plan", linear_hip._plan.__wrapped__)  # which remembers
    monkeypatch.setattr(linear_hip, "ENOUGH_WORKGROUPS", {64: enough, 128: enough})
    monkeypatch.setitem(linear_hip._SEGMENTS, (72, 320), 2)  # unlike the other's
    if kind == "e4m3":
        tiles = fp8_tiles(device, rng, 192, 320), fp8_tiles(device, rng, 72, 320)
    else:
        tiles = tuple(prepare_bf16_weight(device.put(rows(rng, n_out, 320))) for n_out in (192, 72))
    x = rows(rng, n_rows, 320)
    how = {"turn": turn_of(device, rng, n_rows, 16, 64), "round_rows": kind == "e4m3" and rounds_rows(n_rows, 320)}
    outs = (
        device.full((n_rows, 192), float("nan"), torch.bfloat16),
        device.full((n_rows, 72), float("nan"), torch.float32),
    )
    workspace = room(device, n_rows, *tiles)
    multiply_together("both", device.put(x), list(map(Product, tiles, outs)), workspace, **how)
    for out, want in zip(
        outs,
        (
            product(device, x, tiles[0], torch.bfloat16, **how),
            product(device, x, tiles[1], round_rows=how["round_rows"]),
        ),
        strict=True,
    ):
        assert same_bits(device.get(out), want)


def test_b23_a_finished_rows_bits_are_its_own(device, rng):
    """Rounded on the way in or before, rotated or rounded on the way out; beside a NaN, through every kernel."""
    tiles, x = fp8_tiles(device, rng, 192, 320), rows(rng, 130, 320)
    turn = turn_of(device, rng, 130, 16, 64)
    broken = x.clone()
    broken[1] = float("nan")

    def bits(part, way, first=0):
        few = rounds_rows(len(part), 320)
        if way == "turn":
            cos, sin = (table[first : first + len(part)].contiguous() for table in turn[:2])
            how = {"turn": Turn(cos, sin, 64)}
        else:
            how = {"round_out": True}
        part = part if few else rounded(device, part)
        return product(device, part, tiles, torch.bfloat16, round_rows=few, **how).view(torch.int16)

    for way in ("turn", "round"):
        alone = torch.cat([bits(x[i : i + 1], way, i) for i in range(0, 130, 13)])
        for n_rows in (16, 17, 64, 65, 130):
            assert torch.equal(bits(x[:n_rows], way)[::13], alone[: -(-n_rows // 13)])
            assert torch.equal(bits(broken[:n_rows], way)[::13], alone[: -(-n_rows // 13)])


def test_rows_are_rounded_where_a_workgroup_has_room():
    fit = {(1, 8192): True, (4, 5120): True, (5, 5120): False, (16, 1280): True, (17, 64): False}
    assert {shape: rounds_rows(*shape) for shape in fit} == fit


def test_what_cannot_be_done_is_refused(device, rng):
    tiles, other = fp8_tiles(device, rng, 64, 64), fp8_tiles(device, rng, 64, 96)
    x = device.put(rows(rng, 17, 64))
    out, wide = device.full((17, 64), 0, torch.bfloat16), device.full((17, 64), 0)
    with pytest.raises(BindError, match="17 rows of 64 to be rounded"):
        multiply_together("it", x, [Product(tiles, out)], room(device, 17, tiles), round_rows=True)
    with pytest.raises(BindError, match="want two alike"):
        multiply_together("it", x, [Product(tiles, out), Product(other, out)], room(device, 17, tiles, other))
    with pytest.raises(BindError, match="want BF16"):
        multiply_together("it", x, [Product(tiles, wide)], room(device, 17, tiles), round_out=True)
    with pytest.raises(BindError, match="want whole heads"):
        multiply_together("it", x, [Product(tiles, out)], room(device, 17, tiles), turn=turn_of(device, rng, 17, 8, 48))
    with pytest.raises(BindError, match="take workspace_floats"):
        multiply_together("it", x, [Product(tiles, out)] * 2, room(device, 17, tiles))
