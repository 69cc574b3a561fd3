"""Rings, pages and the halo's floors: the state a sequence keeps on a stage."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocline.engine.config import ModelConfig
from rocline.engine.handoff import HandOff, Reach, RowKind, RowSpan, reach_for
from rocline.engine.pages import OutOfPages, PagePlanes, Pages
from rocline.engine.release import release_config
from rocline.engine.sequence import REWIND_ROWS, Ring, ring_slots


@settings(max_examples=200, deadline=None)
@given(
    reads=st.integers(1, 20),
    steps=st.lists(st.tuples(st.sampled_from(["append", "gap", "truncate", "clone"]), st.integers(1, 45)), max_size=25),
)
def test_a_ring_holds_exactly_the_rows_that_were_not_overwritten(reads, steps):
    """Against a plain dictionary of every row of the present run."""
    ring, rows_in, oldest, value = Ring(torch.zeros((ring_slots(reads), 2), dtype=torch.int64)), {}, 0, 0
    for action, n in steps:
        if action == "clone":
            twin = ring.clone()
            ring.append(ring.end, torch.full((n, 2), -1))  # the twin must not see this
            ring = twin
        elif action == "truncate":
            length = max(ring.first, ring.end - n)
            ring.truncate(length)
            rows_in = {p: v for p, v in rows_in.items() if p < length}
            oldest = min(oldest, length)
        else:
            start = ring.end + (n if action == "gap" else 0)
            if action == "gap":
                rows_in, oldest = {}, start
            ring.append(start, torch.arange(value, value + n)[:, None].expand(n, 2))
            rows_in |= {start + i: value + i for i in range(n)}
            oldest = max(oldest, start + n - reads - REWIND_ROWS)
            value += n
        assert (ring.first, ring.end) == (oldest, max(rows_in, default=oldest - 1) + 1)
        assert ring.read(ring.first, ring.end)[:, 0].tolist() == [rows_in[p] for p in range(ring.first, ring.end)]


def test_a_ring_can_be_read_in_full_after_a_rejected_verify_step():
    ring = Ring(torch.zeros(ring_slots(16), dtype=torch.int64))
    ring.append(0, torch.arange(50))
    ring.append(50, torch.arange(50, 50 + REWIND_ROWS))
    ring.truncate(50)
    assert ring.read(50 - 16, 50).tolist() == list(range(34, 50))


def test_a_ring_refuses_what_it_does_not_hold():
    ring = Ring(torch.zeros(ring_slots(4), dtype=torch.int64))
    ring.append(10, torch.arange(3))
    for start, stop in ((9, 11), (12, 14), (0, 1)):
        with pytest.raises(RuntimeError, match=r"ring holds positions 10\.\.13, asked for"):
            ring.read(start, stop)


@pytest.fixture
def text(data_folder):
    return ModelConfig.load(data_folder / "micro" / "model").text_config


def test_pages_are_given_all_or_none_and_come_back():
    pages = Pages(5, page_positions=16)
    assert [pages.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    first, second = [], []
    pages.grow([(first, 17), (second, 16)])
    assert (len(first), len(second), pages.n_free) == (2, 1, 2)
    pages.grow([(first, 32), (second, 1)])  # nothing more is needed
    assert (len(first), len(second)) == (2, 1)
    with pytest.raises(OutOfPages, match=r"112 positions need 4 more pages of 16; 2 of 5 are free"):
        pages.grow([(first, 48), (second, 64)])
    assert (len(first), len(second), pages.n_free) == (2, 1, 2)
    pages.give_back(first, 16)
    assert (len(first), pages.n_free) == (1, 3)
    pages.give_back(first)
    pages.give_back(second)
    assert pages.n_free == 5


def test_rows_are_written_across_pages(text):
    planes = PagePlanes(text, {1, 2}, n_pages=6, page_positions=16)
    table = torch.tensor([4, 0, 5], dtype=torch.int32)
    rows = torch.arange(20 * planes.row_format.row_bytes).view(20, -1).to(torch.uint8)
    keys = torch.arange(20 * planes.key_format.row_bytes).view(20, -1).to(torch.uint8)
    planes.write(1, table, 3, rows, keys)  # source 1 has ratio 2: 8 rows a page
    assert torch.equal(planes.rows_u8[1][4, 3:], rows[:5])
    assert torch.equal(planes.rows_u8[1][0], rows[5:13])
    assert torch.equal(planes.keys_u8[1][5, :7], keys[13:])
    assert not planes.rows_u8[2].any()


def test_a_page_never_cuts_a_pair_or_a_candidate_block(text):
    with pytest.raises(ValueError, match="page_positions = 12"):
        PagePlanes(text, {1}, n_pages=1, page_positions=12)


def test_the_releases_halo():
    """Design.md section 5: 2,541 window rows and 2,414 attention rows at layer 20."""
    text = release_config().text_config
    end = 261_933
    reach = reach_for(text, "halo", end)
    assert end - reach.floor(20) == 2541
    assert end - reach.floor(21) == end - reach.enters(21) == 2414
    assert [end - reach.floor(layer) for layer in (38, 39, 40)] == [255, 128, 1]
    assert [reach.enters(layer) for layer in (0, 1, 19, 20)] == [0, 0, 0, 0]
    full = reach_for(text, "full", end)
    assert [full.enters(layer) for layer in (0, 20, 40)] == [0, 0, 0]
    again = Reach(end, text.sliding_window, text.num_hidden_layers, 0)
    assert end - again.floor(0) == 128 + 39 * 127
    assert Reach(50, 128, 40, 0).floor(0) == 0


def test_a_hand_off_keeps_the_rows_at_or_after_each_floor():
    reach = Reach(100, 16, 5, 2)
    spans = tuple(
        RowSpan(number, start, n, RowKind.PREFILL, reach, 99) for number, start, n in ((0, 5, 3), (1, 40, 4), (2, 7, 0))
    )
    positions = torch.tensor([5, 6, 7, 40, 41, 42, 43], dtype=torch.int32)
    streams = positions[:, None, None].expand(7, 4, 2).bfloat16()
    rows = HandOff(spans, positions, positions[:, None], streams, torch.zeros(7, 4), selected_i32=positions[:, None])
    kept = rows.from_floors([7, 42, 100])
    assert kept.positions_i32.tolist() == [7, 42, 43]
    assert [(s.start, s.n_rows, s.end) for s in kept.spans] == [(7, 1, 8), (42, 2, 44), (7, 0, 7)]
    assert kept.selected_i32.tolist() == [[7], [42], [43]]
    assert [place for _, place in kept.slices()] == [slice(0, 1), slice(1, 3), slice(3, 3)]
    assert rows.from_floors([0, 0, 0]) is rows
    assert rows.from_floors([99, 99, 99]).n_rows == 0
