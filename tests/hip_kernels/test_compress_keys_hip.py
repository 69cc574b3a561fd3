"""Compressed rows and index keys in one launch: the bits of the kernels that do it one by one."""

import pytest
import torch

from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.compressor_hip import FEW_KEYS, Keys, Pairs, Places, compress_hip, compress_keys_hip
from rocline.hip_kernels.index_vectors import index_key_hip
from rocline.hip_kernels.linear_hip import bf16_linear_hip, prepare_bf16_weight

EPS = 1e-20
PAGES, SLOTS = 10, 32


def f32(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape)).float()


class Case:
    """n_rows groups of two sequences, of pairs of tokens, some of which are held, or of single projections."""

    def __init__(self, device, rng, n_rows, width, from_pairs):
        put = device.put
        self.device, self.n_rows, self.width = device, n_rows, width
        angle = torch.from_numpy(rng.uniform(-3, 3, (n_rows, 32))).float()
        self.turn = put(angle.cos()), put(angle.sin())
        self.norm, self.key_norm = put(f32(rng, width).bfloat16()), put(f32(rng, 128).bfloat16())
        self.weight = prepare_bf16_weight(put(f32(rng, 128, width).bfloat16()))
        positions = torch.from_numpy(rng.permutation(64)[:n_rows]).int()
        if n_rows > 1:
            positions[1] = -1  # kept already
        tables = torch.tensor([[9, 1], [2, 8]], dtype=torch.int32)
        self.through = put(positions), put(torch.arange(n_rows, dtype=torch.int32) % 2), put(tables)
        if from_pairs:
            tokens = f32(rng, 2 * n_rows + 1, 2, width)
            tokens[0, 1, 3] = float("nan")
            self.held, self.tokens = f32(rng, 60, 2, width), put(tokens)
            self.pairs = put(torch.from_numpy(rng.integers(-3, len(tokens), (n_rows, 2))).int())
            slots = rng.permutation(50)[: len(tokens)] + 3  # where no pair reads
            slots[0] = -1
            self.slots = put(torch.from_numpy(slots).int())
        else:
            self.projected = put(f32(rng, n_rows, width).bfloat16())

    def source(self, held):
        if not hasattr(self, "pairs"):
            return self.projected
        return Pairs(self.tokens[:, 0], self.tokens[:, 1], held, self.pairs, self.slots)

    def run(self, counter):
        """Latents, rows, pages, keys, their pages, prepared ones, held tokens; by one launch with a counter."""
        full, u8, put = self.device.full, torch.uint8, self.device.put
        row_bytes = self.width // 2 + self.width // 16
        latents = full((self.n_rows, self.width), float("nan"), torch.bfloat16)
        projected = full((self.n_rows, 128), float("nan"), torch.bfloat16)
        rows, pool = full((self.n_rows, row_bytes), 0xEE, u8), full((PAGES, SLOTS, row_bytes), 0xEE, u8)
        keys, key_pool = full((self.n_rows, 68), 0xEE, u8), full((PAGES, SLOTS, 68), 0xEE, u8)
        prepared = full((PAGES, SLOTS // 16, 2112), 0xEE, u8)
        held = put(self.held) if hasattr(self, "held") else None
        places, into = Places(pool, *self.through), Places(key_pool, *self.through)
        first = self.source(held), self.norm, EPS, latents, self.turn, rows, places
        if counter is None:
            compress_hip(*first)
            bf16_linear_hip(latents, self.weight, projected)
            index_key_hip(projected, self.key_norm, EPS, *self.turn, keys, into, prepared)
        else:
            of_keys = Keys(self.weight, self.key_norm, projected, keys, key_pool, prepared)
            compress_keys_hip(*first, of_keys, counter)
        out = [latents, rows, pool, keys, key_pool, prepared, *([] if held is None else [held])]
        got = [self.device.get(tensor) for tensor in out]
        got[0][got[0].isnan()] = float("nan")  # which one a sum of two keeps is the compiler's choice
        return [tensor.view(torch.uint8) for tensor in got]


@pytest.mark.parametrize("from_pairs", [True, False])
@pytest.mark.parametrize(("n_rows", "width"), [(1, 128), (3, 64), (FEW_KEYS, 512)])
def test_the_same_bits_as_one_by_one(device, rng, n_rows, width, from_pairs):
    case, counter = Case(device, rng, n_rows, width, from_pairs), device.full((1,), 0, torch.int32)
    want = case.run(None)
    for _ in range(3):  # a race would give several answers
        assert all(map(torch.equal, case.run(counter), want))
    assert not device.get(counter).any()
    assert (want[4] != 0xEE).any()


@pytest.mark.parametrize("n_rows", [1, 2, FEW_KEYS])
def test_rows_are_their_own(device, rng, n_rows):
    """Each group alone makes what it makes among others."""
    case, counter = Case(device, rng, n_rows, 64, False), device.full((1,), 0, torch.int32)
    case.projected[n_rows // 2, 5] = float("nan")
    latents, rows, _, keys, *_ = case.run(counter)
    for row in range(n_rows):
        alone = Case(device, rng, 1, 64, False)
        alone.projected, alone.norm, alone.key_norm = case.projected[row : row + 1], case.norm, case.key_norm
        alone.weight, alone.turn = case.weight, tuple(part[row : row + 1] for part in case.turn)
        got = alone.run(counter)
        for index, of_all in ((0, latents), (1, rows), (3, keys)):
            assert torch.equal(got[index][0], of_all[row])


def test_more_groups_are_refused(device, rng):
    case = Case(device, rng, FEW_KEYS + 1, 64, False)
    with pytest.raises(BindError, match=r"5 groups, a weight of 1 x \[128, 64\]; want 1 to 4"):
        case.run(device.full((1,), 0, torch.int32))
