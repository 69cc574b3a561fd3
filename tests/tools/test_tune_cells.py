"""Which cell of a sweep is recommended, and which never is."""

from tune_fakes import CELLS, done, failed

from rocline.tools.tune_cells import GIB, Cell, choose


def chosen(*outcomes, floor_gib=1.5):
    choice = choose(outcomes, int(floor_gib * GIB))
    return choice.outcome.cell if choice.outcome else None, choice.faults


def test_the_fastest_above_the_floor():
    cells = [done(CELLS[0], 100, 5), done(CELLS[2], 200, 1.5), done(CELLS[3], 300, 1.49)]
    assert chosen(*cells) == (CELLS[2], {CELLS[3]: "below the floor"})


def test_of_the_same_speed_the_one_with_more_headroom():
    assert chosen(done(CELLS[0], 100, 5), done(CELLS[1], 100.9, 2))[0] == CELLS[0]
    assert chosen(done(CELLS[0], 100, 5), done(CELLS[1], 101.2, 2))[0] == CELLS[1]


def test_an_arena_at_its_edge_is_never_recommended():
    edge, wide = done(CELLS[0], 300, share=0.96), done(CELLS[1], 100, share=0.5)
    assert chosen(edge, wide) == (CELLS[1], {CELLS[0]: "its arena was 96% full, and no smaller one worked"})
    assert chosen(edge)[0] is None
    assert chosen(done(CELLS[0], 300, share=0.95))[0] == CELLS[0]
    # Where a smaller one worked with the same chunks, a full one is not at its edge.
    assert chosen(done(CELLS[0], 100, share=0.99), done(CELLS[1], 90, share=0.99))[0] == CELLS[1]
    assert chosen(failed(CELLS[0]), done(CELLS[1], 90, share=0.99))[0] is None
    assert chosen(done(CELLS[0], 100, share=0.2), done(CELLS[3], 300, share=0.99))[0] == CELLS[0]


def test_a_cell_that_allocated_or_was_not_watched_is_never_recommended():
    assert chosen(done(CELLS[0], allocs=1))[1] == {CELLS[0]: "1 device allocations while serving, must be 0"}
    assert chosen(done(CELLS[0], headroom={"0": 9 * GIB, "1": None}))[1] == {CELLS[0]: "headroom of 1 not known"}
    assert chosen(done(CELLS[0], headroom={}))[1] == {CELLS[0]: "headroom of the cards not known"}


def test_the_choice_has_no_fault_and_no_faster_rival(rng):
    for _ in range(200):
        cells = [Cell(64 << int(n), 1.0 + int(m)) for n in range(3) for m in range(3)]
        outcomes = [
            done(cell, float(rng.uniform(50, 60)), float(rng.uniform(1, 3)), share=float(rng.uniform(0.9, 1)))
            if rng.random() < 0.8
            else failed(cell)
            for cell in cells
        ]
        choice = choose(outcomes, int(1.5 * GIB))
        sound = [o for o in outcomes if o.is_done and o.cell not in choice.faults]
        assert all(o.least_headroom[1] >= 1.5 * GIB - 1 for o in sound)
        if not sound:
            assert choice.outcome is None
            continue
        most = max(o.prefill_tokens_per_s for o in sound)
        assert choice.outcome in sound
        assert choice.outcome.prefill_tokens_per_s >= 0.99 * most
