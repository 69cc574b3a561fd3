"""Taking and releasing one by one: reuse, re-cut, runs, the shelf, waiting, refusals, re-entry."""

import gc

import pytest
from arena_fakes import FakeStreams, check_tiles

from rocline.arena.arena import POLL_EVERY, Arena
from rocline.arena.classes import align_up
from rocline.arena.reuse import MAX_TURNED_AWAY
from rocline.arena.slab import KEPT_PART
from rocline.arena.spans import MIB, ArenaFull, ArenaMisuse

SLAB_BYTES = 64 * MIB


def test_a_finished_span_of_the_same_size_is_lent_again_whole():
    arena = Arena(SLAB_BYTES)
    first = arena.take(100_000, "compute")
    arena.take(100_000, "compute")
    arena.release(first)
    again = arena.take(99_900, "compute")  # the same granules
    assert again.offset == first.offset
    assert arena.stats().reuses == 1
    check_tiles(arena)


def test_a_released_span_object_stays_dead_when_its_bytes_are_lent_again():
    arena = Arena(SLAB_BYTES)
    old = arena.take(4096)
    arena.release(old)
    new = arena.take(4096)
    assert new.offset == old.offset
    with pytest.raises(ArenaMisuse, match=r"not lent by this arena now.*once"):
        arena.release(old)
    assert arena.live_spans() == [new]


@pytest.mark.parametrize("size", [0, -1, 1.5, "4096", None])
def test_sizes_that_are_no_positive_integer_are_refused(size):
    arena = Arena(SLAB_BYTES, name="arena on device 3")
    with pytest.raises(ArenaMisuse, match=r"arena on device 3: asked for .* bytes"):
        arena.take(size)
    assert check_tiles(arena) == [(0, SLAB_BYTES, "free", None)]


@pytest.mark.parametrize("size", [SLAB_BYTES + 1, 1 << 62])
def test_a_request_above_the_slab_is_refused_without_waiting(size):
    streams = FakeStreams()
    arena = Arena(SLAB_BYTES, streams.record)
    arena.release(arena.take(MIB))
    with pytest.raises(ArenaFull, match=r"no room for"):
        arena.take(size)
    assert arena.stats().waits == 0
    check_tiles(arena)


def test_spans_of_another_arena_are_refused():
    one, other = Arena(SLAB_BYTES), Arena(SLAB_BYTES)
    span = one.take(4096)
    with pytest.raises(ArenaMisuse, match="to the arena that lent it"):
        other.release(span)
    one.release(span)
    assert other.stats().releases == 0
    check_tiles(other)


@pytest.mark.parametrize("slab_bytes", [0, 255, -1, 1 << 41])
def test_slabs_that_cannot_be_are_refused(slab_bytes):
    with pytest.raises(ArenaMisuse, match="a slab of"):
        Arena(slab_bytes)


def test_the_refusal_says_what_is_where_and_what_to_change():
    streams = FakeStreams()
    arena = Arena(SLAB_BYTES, streams.record, name="arena on device 3", wait_s=0)
    spans = [arena.take(8 * MIB, "compute") for _ in range(8)]
    arena.release(spans[1])
    arena.release(spans[4])
    arena.release(spans[6])
    streams.finish("compute", 2)
    with pytest.raises(ArenaFull) as refused:
        arena.take(20 * MIB, "copy")
    assert str(refused.value) == (
        "arena on device 3: no room for 20.0 MiB; 16.0 free in 2 spans, largest 8.0; 8.0 pending in 1; "
        "40.0 of 64.0 used by 5; lower --chunk-rows or raise --arena-gib"
    )
    assert arena.stats().refusals == 1


def test_another_stream_gets_a_span_only_when_its_work_has_finished():
    streams = FakeStreams()
    arena = Arena(SLAB_BYTES, streams.record, wait_s=0)
    span = arena.take(SLAB_BYTES, "compute")
    arena.release(span)
    assert arena.layout() == [(0, SLAB_BYTES, "pending", "compute")]
    with pytest.raises(ArenaFull):
        arena.take(4096, "copy")
    own = arena.take(4096, "compute")  # queued behind the work, so it may have it
    assert own.offset == SLAB_BYTES - 4096  # on the shelf, as if all were free
    streams.finish("compute")
    assert arena.take(4096, "copy").offset == SLAB_BYTES - 2 * 4096
    check_tiles(arena)


def test_a_span_two_streams_touched_is_nobodys_until_both_have_finished():
    streams = FakeStreams()
    arena = Arena(SLAB_BYTES, streams.record, wait_s=0)
    arena.release(arena.take(SLAB_BYTES, "compute"), "copy", "side")
    for finished in ("copy", "side", "compute"):
        for stream in ("copy", "side", "other"):
            with pytest.raises(ArenaFull):
                arena.take(4096, stream)
        streams.finish(finished)
    assert arena.take(SLAB_BYTES, "other").offset == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_crossed_spans_come_back_in_whatever_order_streams_finish(order):
    streams = FakeStreams()
    arena = Arena(SLAB_BYTES, streams.record, wait_s=0)
    names = ["a", "b", "c"]
    for turn in range(6):  # each waits for all three, beginning with another one
        arena.release(arena.take(MIB, names[turn % 3]), *names)
    for at in order:
        streams.finish(names[at])
        arena.poll()
    arena.trim()
    assert arena.layout() == [(0, SLAB_BYTES, "free", None)]


def test_a_run_of_free_and_own_pending_neighbours_serves_its_stream_without_a_wait():
    streams = FakeStreams()
    arena = Arena(SLAB_BYTES, streams.record, wait_s=0)
    spans = [arena.take(8 * MIB, "compute") for _ in range(8)]
    arena.release(spans[2])
    arena.release(spans[4])
    streams.finish("compute")
    for at in (1, 3, 5):
        arena.release(spans[at])
    with pytest.raises(ArenaFull):
        arena.take(36 * MIB, "copy")
    run = arena.take(36 * MIB, "compute")  # pending, free, pending, free and half of the last pending one
    assert run.offset == 8 * MIB
    assert arena.stats().fuses == 1
    assert (44 * MIB, 4 * MIB, "pending", "compute") in check_tiles(arena)


def test_a_streams_own_pending_spans_serve_it_best_fit_first():
    streams = FakeStreams()
    arena = Arena(SLAB_BYTES, streams.record)
    spans = [arena.take(size * MIB, "compute") for size in (6, 2, 4, 2, 8)]
    for at in (0, 2, 4):
        arena.release(spans[at])
    got = arena.take(3 * MIB, "compute")
    assert got.offset == spans[2].offset  # the pending 4, before the pending 6 and the free rest
    assert (got.offset + 3 * MIB, MIB, "pending", "compute") in check_tiles(arena)
    stats = arena.stats()
    assert (stats.fuses, stats.waits) == (0, 0)
    streams.finish("compute", 1)  # the 6 of the oldest release
    arena.poll()
    assert arena.layout()[0] == (0, 6 * MIB, "free", None)


def test_what_another_stream_has_not_finished_with_is_not_cut():
    streams = FakeStreams()
    arena = Arena(SLAB_BYTES, streams.record, wait_s=0)
    kept_bytes = SLAB_BYTES // KEPT_PART
    kept = arena.take(kept_bytes, "compute")
    arena.take(SLAB_BYTES - kept_bytes, "compute")
    arena.release(kept)
    with pytest.raises(ArenaFull):
        arena.take(kept_bytes // 4, "copy")
    assert arena.stats().recuts == 0
    streams.finish("compute")
    assert arena.take(kept_bytes // 4, "copy").offset == 0


def test_a_small_span_that_had_to_go_to_the_large_part_is_not_kept_there():
    arena = Arena(SLAB_BYTES)
    low = arena.take(SLAB_BYTES - MIB)
    high = arena.take(MIB)  # reaches up to the shelf's floor
    arena.release(low)
    small = arena.take(4096)
    assert small.offset == 0
    arena.release(small)
    assert arena.stats().kept_bytes == 0
    assert arena.largest_free_bytes() == SLAB_BYTES - MIB
    arena.release(high)


def test_small_spans_stand_on_the_shelf_and_its_floor_rises_again():
    arena = Arena(SLAB_BYTES)
    small = [arena.take(SLAB_BYTES // 1024) for _ in range(3)]
    large = arena.take(SLAB_BYTES // 1024 + 1)
    assert [span.offset for span in small] == [SLAB_BYTES - (at + 1) * 65536 for at in range(3)]
    assert large.offset == 0
    for span in (small[1], small[0], small[2], large):
        arena.release(span)
        arena.trim()
        check_tiles(arena)
    assert arena.largest_free_bytes() == SLAB_BYTES


def test_lasting_spans_do_not_divide_the_large_region():
    arena = Arena(SLAB_BYTES)
    chunk = [arena.take(8 * MIB) for _ in range(3)]
    handoff = arena.take(4 * MIB, lasting=True)
    for span in chunk:
        arena.release(span)
    arena.trim()
    assert arena.largest_free_bytes() == SLAB_BYTES - handoff.size_bytes


def test_both_parts_help_out_before_a_refusal():
    arena = Arena(SLAB_BYTES)
    arena.take(SLAB_BYTES - 8 * MIB, lasting=True)
    in_main = arena.take(8 * MIB)
    arena.release(in_main)
    small = [arena.take(65536) for _ in range(8 * MIB // 65536)]  # the floor sinks to 0
    with pytest.raises(ArenaFull):
        arena.take(256)
    for span in small[::2]:
        arena.release(span)
    large = [arena.take(65536 - 256, lasting=at % 2 == 0) for at in range(len(small) // 2)]
    check_tiles(arena)
    for span in (*small[1::2], *large):
        arena.release(span)
    arena.trim()
    assert arena.largest_free_bytes() == 8 * MIB
    assert arena.take(8 * MIB).offset == 0


def test_the_reuse_layer_stays_within_its_bounds_and_lets_old_sizes_go():
    arena = Arena(SLAB_BYTES)
    for at in range(2000):
        spans = [arena.take(256 * (1 + (at + k) % 700)) for k in range(5)]
        for span in spans:
            arena.release(span)
    stats = arena.stats()
    assert 0 < stats.kept_bytes <= SLAB_BYTES // KEPT_PART
    check_tiles(arena)
    held = arena.take(SLAB_BYTES)  # drains the rest
    assert held.offset == 0
    assert arena.stats().kept_bytes == 0


def test_sizes_that_a_workload_left_behind_make_room_for_its_new_ones():
    arena = Arena(SLAB_BYTES)
    bound = SLAB_BYTES // KEPT_PART
    for old in [arena.take(bound // 4) for _ in range(4)]:
        arena.release(old)
    for _ in range(10 * MAX_TURNED_AWAY):
        for new in [arena.take(bound // 2), arena.take(bound // 3)]:
            arena.release(new)
    assert arena.stats().kept_bytes == bound // 2 + align_up(bound // 3)
    before = arena.stats().reuses
    for new in [arena.take(bound // 2), arena.take(bound // 3)]:
        arena.release(new)
    assert arena.stats().reuses == before + 2


def test_going_round_more_sizes_than_fit_still_hits_most():
    arena = Arena(SLAB_BYTES)
    bound = SLAB_BYTES // KEPT_PART
    sizes = [bound // 5 - 256 * at for at in range(6)]  # five fit
    for _ in range(100):
        for size in sizes:
            arena.release(arena.take(size))
    assert arena.stats().reuses > 0.6 * 600


def test_completions_are_looked_at_while_spans_come_back():
    """Without pressure nothing is asked by takes, yet the queue of completions must not grow for ever."""
    streams = FakeStreams()
    arena = Arena(SLAB_BYTES, streams.record)
    for _ in range(100 * POLL_EVERY):
        arena.release(arena.take(4096, "compute"))
        streams.finish("compute")
    (line,) = arena._slab.timelines.values()
    assert len(line.marks) <= 3 * POLL_EVERY
    assert streams.asked <= 2 * 100 * POLL_EVERY


def test_a_completion_shared_by_releases_keeps_one_place():
    finished = False
    arena = Arena(SLAB_BYTES, lambda stream: done, wait_s=0)

    def done():
        return finished

    for span in [arena.take(MIB, "compute") for _ in range(64)]:
        arena.release(span)
    (line,) = arena._slab.timelines.values()
    assert len(line.marks) == 1
    with pytest.raises(ArenaFull):
        arena.take(MIB, "copy")
    finished = True
    assert arena.take(SLAB_BYTES, "copy").offset == 0


def test_a_take_waits_for_pending_work_and_counts_it():
    streams = FakeStreams()
    pauses = []

    def pause():
        pauses.append(1)
        if len(pauses) == 3:
            streams.finish("compute")

    arena = Arena(SLAB_BYTES, streams.record, pause=pause)
    arena.release(arena.take(SLAB_BYTES, "compute"))
    assert arena.take(SLAB_BYTES, "copy").offset == 0
    assert len(pauses) == 3
    assert arena.stats().waits == 1


def test_a_wait_ends_with_a_refusal_when_work_hangs():
    streams = FakeStreams()
    arena = Arena(SLAB_BYTES, streams.record, wait_s=0.02)
    arena.release(arena.take(SLAB_BYTES, "compute"))
    with pytest.raises(ArenaFull, match=r"64\.0 pending in 1"):
        arena.take(SLAB_BYTES, "copy")
    check_tiles(arena)


def test_what_the_driver_raises_comes_through_and_loses_nothing():
    class Broken(RuntimeError):
        pass

    fail_record = fail_ask = False

    def record(stream):
        if fail_record:
            raise Broken

        def done():
            if fail_ask:
                raise Broken
            return True

        return done

    arena = Arena(SLAB_BYTES, record)
    span = arena.take(SLAB_BYTES, "compute")
    fail_record = True
    with pytest.raises(Broken):
        arena.release(span)
    assert arena.live_spans() == [span]  # still the caller's
    fail_record, fail_ask = False, True
    arena.release(span)
    with pytest.raises(Broken):
        arena.take(SLAB_BYTES, "copy")
    fail_ask = False
    assert arena.take(SLAB_BYTES, "copy").offset == 0


def test_a_finaliser_may_release_in_the_middle_of_a_take(monkeypatch):
    """The collector can run a finaliser at any allocation, also one inside the arena."""
    arena = Arena(SLAB_BYTES)
    held = [arena.take(MIB)]
    place = arena._slab.place

    def interrupted(*args):
        if held:
            arena.release(held.pop())
        return place(*args)

    monkeypatch.setattr(arena._slab, "place", interrupted)
    span = arena.take(2 * MIB)
    check_tiles(arena)
    assert arena.live_spans() == [span]


def test_a_take_inside_a_take_is_refused_instead_of_deadlocking(monkeypatch):
    arena = Arena(SLAB_BYTES)
    place = arena._slab.place
    seen = []

    def interrupted(*args):
        for call in (lambda: arena.take(256), arena.poll, arena.stats):
            with pytest.raises(RuntimeError, match="only release may be called there") as refused:
                call()
            seen.append(refused)
        return place(*args)

    monkeypatch.setattr(arena._slab, "place", interrupted)
    arena.take(MIB)
    assert len(seen) == 3
    monkeypatch.undo()
    arena.take(MIB)
    check_tiles(arena)


def test_completions_are_asked_and_dropped_outside_the_lock():
    """A completion may own what releases spans when it dies, and may take locks while it is asked."""
    arena = None
    inside = []

    class Event:
        def __init__(self):
            self.done = False

        def __call__(self):
            inside.append(arena._lock.inside)
            return self.done

        def __del__(self):
            inside.append(arena._lock.inside)

    events = []

    def record(stream):
        inside.append(arena._lock.inside)
        events.append(Event())
        return events[-1]

    arena = Arena(SLAB_BYTES, record)
    for turn in range(50):
        arena.release(arena.take(MIB, turn % 3), *range(turn % 2))
        for event in events:
            event.done = True
        events.clear()
        if turn % 10 == 0:
            arena.poll()
    arena.release(arena.take(SLAB_BYTES, 7))
    gc.collect()
    assert len(inside) > 150
    assert not any(inside)
