"""Attention from the kernel against the reference: lists, empty slots, pages, rings, and each row by itself."""

import numpy as np
import pytest
import torch

from rocline.hip_kernels import attention_hip as attention_hip_file
from rocline.hip_kernels.attention import attention
from rocline.hip_kernels.attention_hip import (
    FEW_ROWS,
    FEW_WINDOWS,
    Selected,
    Turn,
    Windows,
    attention_hip,
    room_bytes,
)
from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.rope import rope_hip

SMALL, TINY, RELEASE = (4, 64), (8, 128), (64, 512)


def bf16(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape)).bfloat16()


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


class Case:
    """n_rows of one sequence over contiguous window rows and pages out of order."""

    def __init__(self, rng, n_rows, shape, window, n_selected, n_history=96):
        self.shape, self.window, self.n_selected = shape, window, n_selected
        n_heads, width = shape
        self.q, self.sink = bf16(rng, n_rows, n_heads, width), torch.from_numpy(rng.standard_normal(n_heads)).float()
        self.window_u8 = RowFormat("window", width).pack(bf16(rng, window + n_rows, width))
        self.pages_u8 = RowFormat("compressed", width).pack(bf16(rng, n_history // 32 + 1, 32, width))
        self.table = torch.from_numpy(rng.permutation(n_history // 32 + 1)[: n_history // 32]).int()
        self.count = torch.from_numpy(rng.integers(1, window + 1, n_rows)).int()
        self.count[0] = window
        self.first = torch.from_numpy(rng.integers(0, n_rows + 1, n_rows)).int()
        picks = np.full((n_rows, n_selected), -1)
        for row in range(n_rows):
            n = n_selected if row == 0 else rng.integers(0, n_selected + 1)
            picks[row, :n] = np.sort(rng.permutation(n_history)[:n])
        self.selected = torch.from_numpy(picks).int() if n_selected else None
        self.turn = None  # cosines and sines [R, I]

    def reference(self):
        out = torch.full(self.q.shape, float("nan"), dtype=torch.bfloat16)
        rows = (self.pages_u8, self.table, self.selected) if self.n_selected else (None, None, None)
        attention(self.q, self.window_u8, self.first, self.count, self.window, *rows, self.sink, out)
        return out

    def operands(self, device, rows=slice(None)):
        put = device.put
        ring = torch.zeros(len(self.q[rows]), dtype=torch.int32)
        windows = Windows(
            put(self.window_u8[None]), put(ring), put(self.first[rows]), put(self.count[rows]), self.window
        )
        if not self.n_selected:
            return windows, None
        return windows, Selected(put(self.pages_u8), put(self.table[None]), put(ring), put(self.selected[rows]))

    def run(self, device, rows=slice(None), in_place=True):
        q = device.put(self.q[rows])
        out = q if in_place else device.full(q.shape, float("nan"), torch.bfloat16)
        turn = Turn(*(device.put(part[rows]) for part in self.turn)) if self.turn else None
        attend(device, q, *self.operands(device, rows), device.put(self.sink), out, turn)
        return device.get(out)

    def run_many(self, device):
        """The rows among so many that each is a workgroup's."""
        return self.run(device, torch.arange(FEW_ROWS + len(self.q)) % len(self.q))[: len(self.q)]


def attend(device, q, windows, selected, sink, out, turn=None):
    """With as much room as is asked for, full of what is not a number."""
    n_bytes = room_bytes(q, windows, selected, out)
    room = device.full((n_bytes,), 0xFF, torch.uint8) if n_bytes else None
    attention_hip(q, windows, selected, sink, out, room, turn)


def assert_close(got, want):
    """BF16 weights are rounded against the same running maximum, so few cross a boundary; one BF16 step then, of it
    or of the output. 2^-7 of the row's size bounds what a sum of such steps reaches."""
    size = want.float().abs().amax(-1, keepdim=True)
    error = (got.float() - want.float()).abs()
    assert (error <= 2**-7 * size).all()
    assert (error <= 2**-9 * size).float().mean() > 0.95


@pytest.mark.parametrize(
    ("shape", "window", "n_selected"),
    [
        (SMALL, 16, 16),
        (SMALL, 24, 48),
        (SMALL, 64, 64),
        (TINY, 16, 0),
        (TINY, 63, 2),
        (TINY, 16, 113),
        ((16, 320), 8, 9),
        ((48, 192), 8, 9),
        (RELEASE, 8, 1),
    ],
)
def test_close_to_the_reference(device, rng, shape, window, n_selected):
    case = Case(rng, 2 if shape == RELEASE else 5, shape, window, n_selected, 128)
    few = case.run(device)
    assert_close(few, case.reference())
    assert torch.equal(few, case.run_many(device))


def test_release_shape(card, rng):
    case = Case(rng, 40, RELEASE, 128, 512, 2048)
    few = case.run(card)
    assert_close(few, case.reference())
    assert torch.equal(few, case.run_many(card))


def test_release_shape_with_broken_rows_and_gaps(card, rng):
    """One workgroup a row and many give the same bits of what is not a number, not there, and turned back."""
    case = Case(rng, FEW_ROWS, RELEASE, 128, 512, 2048)
    case.turn = [torch.from_numpy(rng.standard_normal((FEW_ROWS, 32))).float() for _ in range(2)]
    case.q[3, 5, 7], case.q[4, 9, 100] = float("nan"), float("inf")
    case.window_u8[120, 512], case.pages_u8[5, 17, 256] = 255, 127  # scales that are not numbers
    case.count[5], case.selected[5] = 0, -1
    few, many = case.run(card), case.run_many(card)
    assert torch.equal(few.view(torch.int16), many.view(torch.int16))
    assert few[0].isnan().all()
    assert few[3, 5].isnan().all()
    assert not few[4, 9].isfinite().any()
    assert not few[5].any()
    assert few.isfinite().all(-1).float().mean() > 0.1
    short = [case.run(card, slice(row, row + 1))[0] for row in (3, 7)]
    assert torch.equal(torch.stack(short).view(torch.int16), few[[3, 7]].view(torch.int16))


@pytest.mark.parametrize("n_rows", [1, 2, 6, 15, 16, 17, 33, 64, 65])
def test_rows_are_their_own(device, rng, n_rows):
    case = Case(rng, 65, SMALL, 16, 48)
    case.q[64, 0, 3], case.q[63, 1, 5] = float("nan"), float("inf")
    case.count[63], case.selected[63] = 16, torch.arange(48)  # of a single slot whose score is -inf it makes zeros
    full = case.run(device)
    assert torch.equal(
        case.run(device, slice(65 - n_rows, 65)).view(torch.int16), full[65 - n_rows :].view(torch.int16)
    )
    assert full[64, 0].isnan().all()
    assert full[64, 1:].isfinite().all()
    assert not full[63, 1].isfinite().any()
    assert full[:63].isfinite().all()


@pytest.mark.parametrize("enough", [1, 7, 40])
def test_how_halves_are_shared_out_changes_nothing(device, rng, monkeypatch, enough):
    """4 rows of 10 halves: all in one workgroup, in sixes with a rest of four, one each."""
    case = Case(rng, 4, SMALL, 64, 200, 256)
    want = case.run_many(device)
    monkeypatch.setattr(attention_hip_file, "ENOUGH_WORKGROUPS", enough)
    assert torch.equal(case.run(device), want)


@pytest.mark.parametrize(
    ("shape", "window"), [(TINY, 16), (TINY, 200), ((5, 256), 63), ((32, 256), 65), ((16, 512), 8), (RELEASE, 128)]
)
@pytest.mark.parametrize("n_rows", [1, 3, FEW_WINDOWS])
def test_a_window_alone_may_be_shared_out(device, rng, n_rows, shape, window):
    """By heads and channels, to outputs beside the queries: the bits of two launches, and of a workgroup a row."""
    if shape == RELEASE and n_rows > 1 and not device.is_card:
        pytest.skip("the release's shape in many rows needs a GPU: --hip rocm, or --hip cuda on an NVIDIA one")
    case = Case(rng, n_rows, shape, window, 0)
    case.turn = [torch.from_numpy(rng.standard_normal((n_rows, 8))).float() for _ in range(2)]
    case.q[0, 1, 7], case.q[-1, 0, 3] = float("inf"), float("nan")
    # Rows of many sizes, each with its opposite, all of one weight to head 2: what is left depends on every order.
    rows = bf16(rng, window + n_rows, shape[1]) * torch.exp2(torch.arange(window + n_rows) * 5 % 23)[:, None]
    rows[window // 2 : window // 2 * 2], case.q[:, 2] = -rows[: window // 2], 0
    case.window_u8 = RowFormat("window", shape[1]).pack(rows.bfloat16())
    if n_rows > 1:
        case.count[1] = 0
        case.first[:2] = i32([1, 0])
        case.window_u8[0, shape[1]] = 255  # a scale that is not a number
    q = case.q
    assert room_bytes(q, *case.operands(device), torch.empty_like(q)) == 0
    got = case.run(device, in_place=False)
    for want in (case.run(device), case.run_many(device)):
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    assert got[0, 0].isfinite().all() == (n_rows > 1)
    assert n_rows == 1 or not got[1].any()


def test_a_broken_row_of_the_cache_reaches_only_who_sees_it(device, rng):
    case = Case(rng, 3, SMALL, 16, 16)
    case.count[:] = 16
    case.first[:] = i32([0, 1, 2])
    case.window_u8[0, 64] = 255  # its first group is not a number
    for got in (case.run(device), case.run_many(device)):
        assert got[0].isnan().all()
        assert got[1:].isfinite().all()


def test_empty_slots_count_and_empty_lists_are_zeros(device, rng):
    """The same entries, once in the first 64 slots and once behind an empty block of the window."""
    case = Case(rng, 2, TINY, 64, 32)
    case.count[:] = i32([1, 0])
    case.selected[1] = -1
    assert_close(case.run(device)[:1], case.reference()[:1])
    assert not case.run(device)[1].any()
    assert torch.equal(case.run(device), case.run_many(device))


def test_blocks_that_are_all_empty_change_nothing(device, rng):
    case = Case(rng, 3, SMALL, 64, 16)
    short = case.run(device)
    case.selected = torch.cat((case.selected, torch.full((3, 128), -1, dtype=torch.int32)), 1)
    case.n_selected = 144
    assert torch.equal(case.run(device), short)
    assert torch.equal(case.run_many(device), short)


def test_rings_and_sequences(device, rng):
    """Decode rows of three sequences in one call are the bits of each by itself, its window not wrapped."""
    n_slots, window, n_selected = 24, 16, 16
    cases = [Case(rng, 1, SMALL, window, n_selected) for _ in range(3)]
    rings = torch.full((3, n_slots, 66), 0xEE, dtype=torch.uint8)
    firsts = [3, 20, 13]
    for ring, case, first in zip(rings, cases, firsts, strict=True):
        case.first[:], case.sink = 0, cases[0].sink
        ring[(torch.arange(window) + first) % n_slots] = case.window_u8[:window]
    alone = torch.cat([case.run(device) for case in cases])
    put, order = device.put, torch.arange(3, dtype=torch.int32)
    windows = Windows(put(rings), put(order), put(i32(firsts)), put(torch.cat([c.count for c in cases])), window)
    pages, tables = [], []
    for case in cases:
        tables.append(case.table + sum(map(len, pages)))
        pages.append(case.pages_u8)
    chosen = torch.cat([case.selected for case in cases])
    selected = Selected(put(torch.cat(pages)), put(torch.stack(tables)), put(order), put(chosen))
    q = put(torch.cat([case.q for case in cases]))
    out = device.full(q.shape, float("nan"), torch.bfloat16)
    attend(device, q, windows, selected, put(cases[0].sink), out)
    assert torch.equal(device.get(out), alone)


@pytest.mark.parametrize("n_selected", [0, 16])
@pytest.mark.parametrize("n_rows", [1, FEW_WINDOWS, 6, FEW_ROWS + 1])
def test_verified_rows_see_up_to_themselves(device, rng, n_rows, n_selected):
    """Rows of two sequences in turn, in rings that hold all their rows and that some windows wrap round in: the bits
    of each by itself over its own contiguous window."""
    window, first_position = 16, 29
    n_slots = window + (n_rows + 1) // 2 - 1
    case = Case(rng, n_rows, TINY, window, n_selected)
    history = RowFormat("window", 128).pack(bf16(rng, 2 * (first_position + n_rows), 128)).unflatten(0, (2, -1))
    rings = torch.full((3, n_slots, 132), 0xEE, dtype=torch.uint8)
    sequence, position = torch.arange(n_rows) % 2, first_position + torch.arange(n_rows) // 2
    for row in range(n_rows):
        seen = torch.arange(position[row] - window + 1, position[row] + 1)
        rings[2 - sequence[row], seen % n_slots] = history[sequence[row], seen]
    put = device.put
    first = (position - window + 1) % n_slots
    count = torch.full((n_rows,), window, dtype=torch.int32)
    windows = Windows(put(rings), put((2 - sequence).int()), put(first.int()), put(count), window)
    out = device.full(case.q.shape, float("nan"), torch.bfloat16)
    attend(device, put(case.q), windows, case.operands(device)[1], put(case.sink), out)
    for row in {0, n_rows // 2, n_rows - 1}:
        begin = int(position[row]) - window + 1
        alone = history[sequence[row], begin : begin + window].contiguous()
        windows = Windows(put(alone[None]), put(i32([0])), put(i32([0])), put(count[:1]), window)
        want = put(case.q[row : row + 1])
        selected = case.operands(device, slice(row, row + 1))[1]
        attend(device, want, windows, selected, put(case.sink), want)
        assert torch.equal(device.get(out)[row], device.get(want)[0])


@pytest.mark.parametrize("n_rows", [1, 5, FEW_ROWS + 1])
@pytest.mark.parametrize(("shape", "n_pairs"), [(SMALL, 8), (SMALL, 32), (TINY, 20)])
def test_turned_back_as_by_rope(device, rng, shape, n_pairs, n_rows):
    """B34's kind: heads that come out turned back have the bits of the rotation after attention."""
    case = Case(rng, n_rows, shape, 16, 16)
    case.q[n_rows - 1, 1, 0] = float("nan")
    turn = Turn(*(device.put(torch.from_numpy(rng.standard_normal((n_rows, n_pairs))).float()) for _ in range(2)))
    want = device.put(case.run(device))
    rope_hip(want, turn.cos_f32, turn.sin_f32, want, inverse=True)
    got = device.put(case.q)
    attend(device, got, *case.operands(device), device.put(case.sink), got, turn)
    assert torch.equal(device.get(got).view(torch.int16), device.get(want).view(torch.int16))


def test_absurd_scores_stay_finite(device, rng):
    """Scores of +-10^4 that grow from block to block: the running maximum moves, weights underflow, nothing breaks."""
    case = Case(rng, 2, SMALL, 64, 64)
    case.q *= 2000
    got = case.run(device)
    assert torch.equal(got, case.run_many(device))
    assert got.isfinite().all()
    size = case.reference().float().abs().amax(-1, keepdim=True)
    assert ((got.float() - case.reference().float()).abs() <= 2**-6 * size).float().mean() > 0.98


def test_what_does_not_fit_is_named(device, rng):
    case = Case(rng, 1, SMALL, 16, 16)
    windows, selected = case.operands(device)
    q = torch.zeros(1, 24, 64).bfloat16()
    with pytest.raises(BindError, match="24 heads of 64"):
        attention_hip(q, windows, None, torch.zeros(24), q, None)
    q = torch.zeros(1, 4, 128).bfloat16()
    with pytest.raises(BindError, match=r"window_rows_u8 is \[1, 17, 66\], want \[N=1, S=17, 132\]"):
        attention_hip(q, windows, None, torch.zeros(4), q, None)
    q = device.put(case.q)
    room, sink = device.full((room_bytes(q, windows, selected, q) - 1,), 0, torch.uint8), device.put(case.sink)
    with pytest.raises(BindError, match=r"room_u8 is torch.uint8 \[12295\], want 12296 bytes for 1 rows"):
        attention_hip(q, windows, selected, sink, q, room)
    with pytest.raises(BindError, match=r"room_u8 is none, want 12296 bytes"):
        attention_hip(q, windows, selected, sink, q, None)
    with pytest.raises(BindError, match=r"room_u8 starts at \w+, want a multiple of 16"):
        attention_hip(q, windows, selected, sink, q, device.full((12297,), 0, torch.uint8)[1:])
    turn = Turn(torch.zeros(1, 6), torch.zeros(1, 6))
    with pytest.raises(BindError, match="6 pairs of 64 channels"):
        attention_hip(q, windows, None, device.put(case.sink), q, None, turn)
    windows = Windows(windows.rows_u8, windows.ring_i32, windows.first_i32, windows.count_i32, 641)
    with pytest.raises(BindError, match="lists of 704 slots, want at most 640"):
        attention_hip(q, windows, None, device.put(case.sink), q, None)


def test_rows_are_where_wide_loads_reach(device, rng):
    case = Case(rng, 1, RELEASE, 16, 0)
    put = device.put
    packed = device.full((16 * 528 + 8,), 0, torch.uint8)[8:].view(1, 16, 528)
    windows = Windows(packed, put(i32([0])), put(i32([0])), put(i32([16])), 16)
    q = put(case.q)
    with pytest.raises(BindError, match=r"window_rows_u8 starts at \w+8, want a multiple of 16"):
        attention_hip(q, windows, None, put(case.sink), q, None)
