"""Scores, candidate blocks and top-k lists of the kernels against the torch references, bit for bit.

Cases B16 to B18, B20 and B36. The oracle works on stored rows, so the prepared form is judged with the kernels.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rocline.hip_kernels import index_slots
from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.driver import devices
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.graph import capture
from rocline.hip_kernels.index_prepared import TILE_BYTES, index_prepare
from rocline.hip_kernels.index_score import (
    History,
    Queries,
    RowTiles,
    index_score,
    index_score_hip,
    index_score_ref,
    maxima_stride,
    prepared_scores_ref,
)
from rocline.hip_kernels.index_select import (
    Workspace,
    index_select,
    index_select_among,
    index_select_among_hip,
    index_select_hip,
)
from rocline.hip_kernels.selection import candidate_blocks_ref, restrict_ref, top_k_list_ref

ROW = RowFormat("index_key", 128)


@dataclass
class Case:
    """Sequences with their own histories in one pool, rows that see prefixes of them, and the scores they get."""

    q: Tensor  # [R, H, 68]
    weights: Tensor
    keys: Tensor  # [pages, rows per page, 68]
    tables: Tensor
    visible: Tensor
    row_tiles: RowTiles
    scores: Tensor  # [R, P]

    def see(self, visible):
        """Set what each row sees, and the scores, by the operator on stored rows."""
        self.visible = visible
        for sequence, table in enumerate(self.tables):
            rows = self.row_tiles.sequences_i32 == sequence
            scores = torch.empty(int(rows.sum()), self.scores.shape[1])
            index_score(self.q[rows], self.weights[rows], self.keys, table, visible[rows], scores)
            self.scores[rows] = scores

    def prepared(self, put):
        """As the kernels take it; unwritten slots are poisoned."""
        n_rows, n_heads = self.weights.shape
        n_pages, per_page, _ = self.keys.shape
        tiles = torch.full((-(-n_rows // 16), n_heads, TILE_BYTES), 0xEE, dtype=torch.uint8)
        index_prepare(self.q, tiles)
        keys = torch.full((n_pages * per_page // 16, 1, TILE_BYTES), 0xEE, dtype=torch.uint8)
        index_prepare(self.keys.view(-1, 1, 68), keys)
        keys = keys.view(n_pages, per_page // 16, TILE_BYTES)
        queries = Queries(put(tiles), put(self.weights), put(self.visible), placed(self.row_tiles, put))
        return queries, History(put(keys), put(self.tables), self.scores.shape[1])


def placed(row_tiles, put):
    return replace(row_tiles, tiles_i32=put(row_tiles.tiles_i32), sequences_i32=put(row_tiles.sequences_i32))


def unscored(rng, rows_per_sequence, n_heads, n_positions, spread, tied, per_page):
    """A Case without scores; the first row sees nothing, the last all."""
    n_rows, n_sequences = sum(rows_per_sequence), len(rows_per_sequence)
    n_pages = -(-n_positions // per_page)
    weights = torch.from_numpy(rng.standard_normal((n_rows, n_heads)) * 2.0**-6).bfloat16()
    weights[rng.random(weights.shape) < 0.1] = 0.0
    visible = torch.from_numpy(rng.integers(0, n_positions + 1, n_rows)).int()
    visible[0], visible[-1] = 0, n_positions
    return Case(
        q=ROW.pack(vectors(rng, (n_rows, n_heads), spread, tied)),
        weights=weights,
        keys=ROW.pack(vectors(rng, (n_sequences * n_pages, per_page), spread, tied)),
        tables=torch.from_numpy(rng.permutation(n_sequences * n_pages).reshape(n_sequences, n_pages)).int(),
        visible=visible,
        row_tiles=RowTiles.of(rows_per_sequence),
        scores=torch.empty(n_rows, n_positions),
    )


def make_case(rng, rows_per_sequence, n_heads, n_positions, spread=2, tied=False):
    case = unscored(rng, rows_per_sequence, n_heads, n_positions, spread, tied, per_page=32)
    case.see(case.visible)
    return case


def vectors(rng, shape, spread, tied):
    """BF16 [*shape, 128]: normal, or few whole numbers that tie by the hundred; groups' sizes differ by 2^spread."""
    x = rng.integers(-1, 2, (*shape, 4, 32)) if tied else rng.standard_normal((*shape, 4, 32), dtype=np.float32)
    x = x * np.exp2(rng.integers(-(spread // 2), spread - spread // 2 + 1, (*shape, 4, 1))).astype(np.float32)
    x[rng.random((*shape, 4)) < 0.05] = 0.0
    return torch.from_numpy(x).flatten(-2).bfloat16()


def same_bits(a, b):
    return torch.equal(a.nan_to_num(nan=1e38), b.nan_to_num(nan=1e38))


def check_scores(device, case):
    queries, history = case.prepared(device.put)
    first = None
    for _ in range(2):
        scores = device.full(tuple(case.scores.shape), float("nan"))
        index_score_hip(queries, history, scores)
        got = device.get(scores)
        assert same_bits(got, case.scores)
        assert first is None or torch.equal(got.view(torch.int32), first.view(torch.int32))
        first = got


def check_lists(device, case, k, n_keep):
    visible = case.visible
    blocks_want = candidate_blocks_ref(case.scores, visible, 8, n_keep)
    queries, history = case.prepared(device.put)
    n_rows = len(visible)
    workspace = Workspace(device.full((Workspace.bytes_for(n_rows, history.n_positions, k),), 0xEE, torch.uint8))
    among = Workspace(device.full((Workspace.bytes_for(n_rows, 0, n_keep),), 0xEE, torch.uint8))
    zeros = device.full((n_rows,), 0, torch.int32)
    for counters in (None, zeros, zeros):
        selected = device.full((n_rows, k), 77, torch.int32)
        blocks = device.full((n_rows, n_keep), 77, torch.int32)
        index_select_hip(queries, history, workspace, selected, blocks, counters)
        assert torch.equal(device.get(blocks), blocks_want)
        assert torch.equal(device.get(selected), top_k_list_ref(case.scores, visible, k))
        selected = device.full((n_rows, k), 77, torch.int32)
        index_select_among_hip(queries, history, among, device.put(blocks_want), selected, counters)
        assert torch.equal(device.get(selected), top_k_list_ref(restrict_ref(case.scores, blocks_want, 8), visible, k))
    assert not device.get(zeros).any()


@pytest.mark.parametrize("n_positions", [1, 15, 16, 17, 31, 33, 255, 256, 257, 530])
def test_scores_at_every_tail(device, rng, n_positions):
    check_scores(device, make_case(rng, [5], 3, n_positions))


@pytest.mark.parametrize("n_heads", [1, 8, 9, 32, 64])
@pytest.mark.parametrize("spread", [0, 3, 9, 40, 60])
def test_scores_of_all_head_counts_and_spans(device, rng, n_heads, spread):
    check_scores(device, make_case(rng, [3], n_heads, 70, spread))


@pytest.mark.parametrize("rows", [[1], [15], [16], [17], [64], [3, 1, 14, 20], [0, 5, 16]])
def test_scores_of_rows_and_sequences(device, rng, rows):
    check_scores(device, make_case(rng, rows, 4, 100, 5))


def test_scores_with_scales_beyond_all_bounds(device, rng):
    """What only the reference's own operations get right: tiny and huge scales, NaNs, weights to the extreme."""
    case = make_case(rng, [18], 4, 100, 3)
    case.q[0, 0, 64:], case.q[-1, -1, 65] = 1, 255
    case.keys[0, 3, 64:], case.keys[-1, 5, 66], case.keys[0, 7, 64:] = 250, 255, 2
    case.weights[-1, 0], case.weights[0, -1] = float("inf"), 1e-38
    case.see(torch.full((18,), 100, dtype=torch.int32))
    assert case.scores.isnan().any()
    assert case.scores.isinf().any()
    check_scores(device, case)
    check_lists(device, case, 9, 4)


@pytest.mark.parametrize("n_positions", [1, 7, 8, 9, 100, 257])
@pytest.mark.parametrize("rows", [[2], [16], [11, 9]])
@pytest.mark.parametrize("tied", [False, True])
def test_lists_at_tails_and_ties(device, rng, n_positions, rows, tied):
    check_lists(device, make_case(rng, rows, 2, n_positions, 1, tied), 9, 4)


@pytest.mark.parametrize("n_heads", [1, 32, 64])
def test_lists_of_all_head_counts(device, rng, n_heads):
    check_lists(device, make_case(rng, [3], n_heads, 300, 12, tied=True), 16, 8)


def test_lists_at_the_release_widths_where_the_restriction_bites(device, rng):
    """Two rows past 16,384 positions, 2,048 candidate blocks, top 512, ties at both cuts."""
    case = make_case(rng, [2], 1, 17_000, 0, tied=True)
    case.see(torch.tensor([16_999, 16_390], dtype=torch.int32))
    check_lists(device, case, 512, 2048)


@pytest.mark.parametrize("visible", range(1, 34))
def test_every_causal_prefix(device, rng, visible):
    case = make_case(rng, [2, 17], 2, 40, 2)
    case.see(torch.full((19,), visible, dtype=torch.int32))
    check_scores(device, case)
    check_lists(device, case, 5, 2)


def test_rows_choose_the_same_alone_and_in_a_crowd(device, rng):
    """The shapes of a decode step and of a chunk take different kernels."""
    case = make_case(rng, [40], 8, 200, 2)
    queries, history = case.prepared(device.put)
    workspace = Workspace(device.full((Workspace.bytes_for(40, 200, 9),), 0xEE, torch.uint8))
    together = device.full((40, 9), 77, torch.int32)
    index_select_hip(queries, history, workspace, together)
    case.q, case.weights, case.visible = case.q[20:21], case.weights[20:21], case.visible[20:21]
    case.row_tiles = RowTiles.of([1])
    alone = device.full((1, 9), 77, torch.int32)
    index_select_hip(case.prepared(device.put)[0], history, workspace, alone)
    assert torch.equal(device.get(alone)[0], device.get(together)[20])


class Captured:
    """Lists of one call captured for more positions than any row sees, with pages behind that are not there."""

    LARGEST, TOP, KEEP = 24_576, 512, 2048

    def __init__(self, device, case):
        self.device, self.case = device, case
        queries, history = case.prepared(device.put)
        n_rows, n_pages = len(case.visible), self.LARGEST // history.rows_per_page
        tables = torch.full((len(case.tables), n_pages), 2**30, dtype=torch.int32)
        tables[:, : case.tables.shape[1]] = case.tables
        history = History(history.keys_u8, device.put(tables), self.LARGEST)
        self.visible = queries.visible_i32
        room, among_room = (
            Workspace(device.full((Workspace.bytes_for(n_rows, n, listed),), 0xEE, torch.uint8))
            for n, listed in ((self.LARGEST, self.TOP), (0, self.KEEP))
        )
        self.counters = device.full((8,), 0, torch.int32)
        self.blocks, self.selected, self.alone, self.among = (
            device.full((n_rows, width), 77, torch.int32) for width in (self.KEEP, self.TOP, self.TOP, self.TOP)
        )

        def work():
            index_select_hip(queries, history, room, self.selected, self.blocks, self.counters)
            index_select_among_hip(queries, history, among_room, self.blocks, self.among, self.counters)
            index_select_hip(queries, history, room, self.alone)

        self.kept = room, among_room, queries, history  # a graph's memory stays
        device.get(self.counters)
        with devices()[0].stream() as self.stream:
            work()  # loads the kernels
            with capture() as self.graph:
                work()

    def check(self, visible):
        """That a launch gives the reference's lists of rows that see so much."""
        case, device = self.case, self.device
        case.see(torch.tensor(visible, dtype=torch.int32))
        self.visible.copy_(case.visible)
        device.get(self.visible)
        with self.stream:
            self.graph.launch()
        blocks = candidate_blocks_ref(case.scores, case.visible, 8, self.KEEP)
        assert torch.equal(device.get(self.blocks), blocks)
        assert torch.equal(device.get(self.selected), top_k_list_ref(case.scores, case.visible, self.TOP))
        assert torch.equal(device.get(self.alone), device.get(self.selected))
        restricted = restrict_ref(case.scores, blocks, 8)
        assert torch.equal(device.get(self.among), top_k_list_ref(restricted, case.visible, self.TOP))
        assert not device.get(self.counters).any()


def test_a_capture_at_100_visible_rows_serves_20_001(device, rng):
    case = unscored(rng, [1], 1, 20_001, 2, False, per_page=2048)
    case.see(torch.tensor([100], dtype=torch.int32))
    captured = Captured(device, case)
    for visible in (100, 20_001, 100, 0, 7, 1):  # what a longer one left in the workspace is not looked at
        captured.check([visible])


@pytest.mark.parametrize("visible", [[511, 512], [1023, 1024], [16_383, 16_384]])
def test_a_capture_serves_rows_that_straddle_a_bound(device, rng, visible):
    """512 are listed; 2,048 candidate blocks hold 16,384."""
    case = unscored(rng, [1, 1], 1, visible[1] + 9, 0, True, per_page=2048)
    case.see(torch.tensor([3, 3], dtype=torch.int32))
    captured = Captured(device, case)
    for seen in (visible, visible[::-1], [visible[1] + 1, visible[0] - 1]):
        captured.check(seen)


def test_a_capture_serves_sequences_of_different_lengths(device, rng):
    """In one call; some see nothing, and several have a workgroup's tile of 128 positions not filled."""
    case = unscored(rng, [1] * 7, 3, 1500, 3, False, per_page=512)
    captured = Captured(device, case)
    captured.check([0, 1, 127, 128, 129, 1500, 640])
    captured.check([1500, 0, 0, 1100, 3, 0, 9])
    captured.check([0] * 7)


def test_more_rows_than_a_wave_has_lanes_share_workgroups(device, rng):
    """Few workgroups for many tiles: a workgroup goes on from one row to the next, and past a wave's 32 rows."""
    case = make_case(rng, [1] * 45, 2, 300, 2)
    queries, history = case.prepared(device.put)
    maxima = [device.full((45, maxima_stride(300)), 0x55, torch.int16) for _ in range(3)]
    for n_groups, maxima_i16 in zip((1, 7, 1024), maxima, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(index_slots, "WORKGROUPS", n_groups)
            index_slots.block_maxima_few_hip(queries, history, range(45), maxima_i16)
    blocks = F.pad(case.scores, (0, -300 % 8), value=float("-inf")).unflatten(1, (-1, 8)).amax(2)
    for maxima_i16 in maxima:
        got = device.get(maxima_i16)
        for row, visible in enumerate(case.visible.tolist()):
            n_blocks = -(-visible // 8)
            assert (got[row, n_blocks:] == 0x55).all()
            assert order_of(got[row, :n_blocks].int() & 0xFFFF) == order_of(blocks[row, :n_blocks])


def order_of(x):
    """Each element's rank, equals sharing one."""
    return x.unique(return_inverse=True)[1].tolist()


def test_a_small_workspace_gives_the_same_lists(device, rng):
    case = make_case(rng, [7, 30, 11], 2, 90, 2)
    queries, history = case.prepared(device.put)
    n_bytes = Workspace.bytes_for(48, 90, 9, most_bytes=1)
    assert n_bytes == 16 * Workspace.row_bytes(90, 9)
    selected, blocks = device.full((48, 9), 77, torch.int32), device.full((48, 3), 77, torch.int32)
    index_select_hip(queries, history, Workspace(device.full((n_bytes,), 0xEE, torch.uint8)), selected, blocks)
    assert torch.equal(device.get(selected), top_k_list_ref(case.scores, case.visible, 9))
    assert torch.equal(device.get(blocks), candidate_blocks_ref(case.scores, case.visible, 8, 3))
    with pytest.raises(BindError, match=f"{n_bytes - 1} bytes, 16 rows of 90 positions and 9 blocks need {n_bytes}"):
        index_select_hip(queries, history, Workspace(device.full((n_bytes - 1,), 0, torch.uint8)), selected)


def test_workspace_stays_below_128_mib_for_everything_served():
    for n_rows, n_positions in ((4096, 1 << 20), (4096, 1000), (1, 1 << 20)):
        assert Workspace.bytes_for(n_rows, n_positions, 512) <= 128 << 20
        assert Workspace.bytes_for(n_rows, 0, 2048) <= 128 << 20


def test_the_references_on_prepared_vectors_are_those_on_stored_ones(rng):
    case = make_case(rng, [3, 18], 3, 75, 6)
    queries, history = case.prepared(lambda x: x)
    assert same_bits(prepared_scores_ref(queries, history), case.scores)
    selected, blocks = torch.empty((21, 9), dtype=torch.int32), torch.empty((21, 4), dtype=torch.int32)
    index_select(queries, history, selected, blocks)
    assert torch.equal(selected, top_k_list_ref(case.scores, case.visible, 9))
    assert torch.equal(blocks, candidate_blocks_ref(case.scores, case.visible, 8, 4))
    index_select_among(queries, history, blocks, selected)
    assert torch.equal(selected, top_k_list_ref(restrict_ref(case.scores, blocks, 8), case.visible, 9))


def test_rounding_in_two_operations():
    """index_score.hip's to_bf16: x * 65536 + (x - 65536 x in FP32), over every significand."""
    x = np.arange(1 << 23, 1 << 24).astype(np.float32)
    low = (x.astype(np.float64) * -65535).astype(np.float32)  # 40 bits: FP64 is exact, so this rounds once, as an fma
    got = (x.astype(np.float64) * 65536 + low).astype(np.float32)
    assert torch.equal(torch.from_numpy(got), torch.from_numpy(x).bfloat16().float())


def test_b36_keys_and_scores_past_2_to_31(card, rng):
    """Pages far into a pool of 2.6 GB, and the last rows of 2,304 x 1,000,000 scores, as the same rows elsewhere."""
    n_positions, n_rows = 1_000_000, 2304
    n_pages = -(-n_positions // 2048)
    case = card_case(rng, [1], n_positions, n_heads=1)
    rows = torch.zeros((n_rows, 1, 68), dtype=torch.uint8)
    rows[-1] = case.q[0]
    tiles = torch.zeros((n_rows // 16, 1, TILE_BYTES), dtype=torch.uint8)
    index_prepare(rows, tiles)
    near = torch.zeros((n_pages * 128, 1, TILE_BYTES), dtype=torch.uint8)
    index_prepare(case.keys.view(-1, 1, 68), near)
    pool = torch.empty((9600, 128, TILE_BYTES), dtype=torch.uint8, device="cuda")
    pool[-n_pages:] = near.view(n_pages, 128, TILE_BYTES).cuda()
    weights = case.weights.expand(n_rows, 1).contiguous()
    visible = torch.full((n_rows,), n_positions, dtype=torch.int32)
    history = History(pool, (case.tables + 9600 - n_pages).cuda(), n_positions)
    scores = card.full((n_rows, n_positions), float("nan"))
    queries = Queries(tiles.cuda(), weights.cuda(), visible.cuda(), placed(RowTiles.of([n_rows]), card.put))
    index_score_hip(queries, history, scores)
    assert torch.equal(scores[-1], case.scores[0])
    assert not scores[:-1].any()


def card_case(rng, rows_per_sequence, n_positions, n_heads=32, spread=3):
    """A case of full size; the reference runs on the card, in slabs of rows."""
    case = unscored(rng, rows_per_sequence, n_heads, n_positions, spread, tied=False, per_page=2048)
    case.scores = torch.full(case.scores.shape, float("-inf"), device="cuda")
    positions = torch.arange(n_positions, device="cuda")
    for sequence, table in enumerate(case.tables):
        k = [x.cuda() for x in ROW.split(case.keys[table.long()].flatten(0, 1)[:n_positions])]
        for row in (case.row_tiles.sequences_i32 == sequence).nonzero()[:, 0].split(16):
            q = [x.cuda() for x in ROW.split(case.q[row])]
            seen = positions < case.visible[row, None].cuda()
            case.scores[row] = index_score_ref(*q, *k, case.weights[row].cuda()).where(seen, float("-inf"))
    return case


@pytest.mark.parametrize("n_heads", [1, 8, 32, 64])
@pytest.mark.parametrize("rows", [[1], [15], [16], [17], [64], [5, 40, 1]])
def test_full_sizes(card, rng, rows, n_heads):
    check_full(card, card_case(rng, rows, 131_072 - 3, n_heads))


@pytest.mark.parametrize("rows", [[1], [17]])
def test_longest_history(card, rng, rows):
    check_full(card, card_case(rng, rows, (1 << 20) - 5))


def test_full_chunk(card, rng):
    check_full(card, card_case(rng, [1500, 548], 60_001))


def test_every_group_apart(card, rng):
    check_full(card, card_case(rng, [33], 50_000, spread=60))


def check_full(card, case):
    visible = case.visible
    queries, history = case.prepared(card.put)
    scores = card.full(tuple(case.scores.shape), float("nan"))
    index_score_hip(queries, history, scores)
    assert same_bits(card.get(scores), case.scores.cpu())
    del scores
    n_rows, n_positions = case.scores.shape
    seen = visible.cuda()
    lists = [top_k_list_ref(case.scores, seen, 512), candidate_blocks_ref(case.scores, seen, 8, 2048)]
    room = Workspace(card.full((max(Workspace.bytes_for(n_rows, n_positions, 512), 64 << 20),), 0xEE, torch.uint8))
    for _ in range(2):
        selected, blocks = card.full((n_rows, 512), 7, torch.int32), card.full((n_rows, 2048), 7, torch.int32)
        index_select_hip(queries, history, room, selected, blocks)
        assert torch.equal(card.get(selected), lists[0].cpu())
        assert torch.equal(card.get(blocks), lists[1].cpu())
    among = top_k_list_ref(restrict_ref(case.scores, lists[1], 8), seen, 512)
    index_select_among_hip(queries, history, room, lists[1].contiguous(), selected)
    assert torch.equal(card.get(selected), among.cpu())
