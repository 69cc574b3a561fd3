"""Rooms: one piece for a scope's temporaries, handed out without a search, counted like takes."""

import pytest
from arena_fakes import FakeStreams, check_tiles

from rocline.arena.arena import SPARE_PART, Arena
from rocline.arena.completions import LatestWork
from rocline.arena.room import RoomPlan
from rocline.arena.spans import MIB, ArenaFull
from rocline.arena.trace import Recorder

SLAB_BYTES = 64 * MIB
SITE = (check_tiles.__code__, 0)


def plan_of(*sizes_bytes, besides_bytes=()):
    names = [f"op{at}" for at in range(len(sizes_bytes))]
    return RoomPlan(sizes_bytes, names, [SITE] * len(sizes_bytes), besides_bytes)


def test_what_a_room_hands_out_counts_as_takes():
    arena = Arena(SLAB_BYTES)
    room = arena.open_room(plan_of(MIB, 0, 2 * MIB, 3 * MIB), "compute")
    assert arena.stats().used_bytes == 0
    assert arena.stats().kept_bytes == 6 * MIB
    room.at = 3
    stats = arena.stats()
    assert (stats.used_bytes, stats.high_water_bytes, stats.n_used, stats.takes) == (3 * MIB, 3 * MIB, 2, 2)
    assert [(span.label, span.offset, span.size_bytes) for span in arena.live_spans()] == [
        ("op0", room.offset, MIB),
        ("op2", room.offset + MIB, 2 * MIB),
    ]
    assert (room.offset + 3 * MIB, 3 * MIB, "kept", "compute") in check_tiles(arena)
    assert arena.close_room(room) == 2
    stats = arena.stats()
    assert (stats.takes, stats.releases, stats.high_water_bytes) == (2, 2, 3 * MIB)
    assert arena.layout() == [(0, SLAB_BYTES, "free", None)]


def test_high_water_is_that_of_rooms_and_takes_together():
    arena = Arena(SLAB_BYTES)
    room = arena.open_room(plan_of(MIB, 2 * MIB), 0)
    span = arena.take(4 * MIB)
    room.at = 2
    arena.release(span)
    arena.close_room(room)
    assert arena.stats().high_water_bytes == 7 * MIB


def test_what_is_handed_over_outlives_the_room():
    arena = Arena(SLAB_BYTES)
    room = arena.open_room(plan_of(MIB, 2 * MIB, 3 * MIB), 0)
    room.at = 2
    assert room.lent_at(room.offset + MIB) == 1
    assert room.lent_at(room.offset + MIB + 256) is None
    assert room.lent_at(room.offset + 3 * MIB) is None  # not handed out yet
    span = arena.hand_over(room, 1)
    assert room.lent_at(span.offset) is None
    assert (span.offset, span.size_bytes, span.lasting) == (room.offset + MIB, 2 * MIB, True)
    assert arena.stats().used_bytes == 3 * MIB
    arena.close_room(room)
    assert arena.live_spans() == [span]
    check_tiles(arena)
    arena.release(span)
    assert arena.stats().takes == arena.stats().releases == 2
    assert arena.largest_free_bytes() == SLAB_BYTES


def test_a_skipped_request_is_not_lent_and_its_place_waits_for_the_end():
    arena = Arena(SLAB_BYTES)
    room = arena.open_room(plan_of(MIB, 2 * MIB, 3 * MIB), 0)
    room.skip(0)
    room.at = 2
    assert arena.stats().used_bytes == 2 * MIB
    assert room.unlent() == [(room.offset, MIB), (room.offset + 3 * MIB, 3 * MIB)]
    check_tiles(arena)
    arena.close_room(room)
    assert arena.stats().takes == 1


def test_a_room_that_shrinks_gives_back_its_tail_alone():
    arena = Arena(SLAB_BYTES)
    room = arena.open_room(plan_of(MIB, 45 * MIB), 0)
    room.at = 1
    with pytest.raises(ArenaFull):
        arena.take(40 * MIB)
    arena.shrink_room(room)
    arena.release(arena.take(40 * MIB))
    assert arena.stats().used_bytes == MIB
    check_tiles(arena)
    arena.close_room(room)
    assert arena.stats().used_bytes == 0


@pytest.mark.parametrize("end", ["close", "shrink"])
def test_other_streams_wait_for_a_rooms_work(end):
    """Also for the part that the room never handed out: its stream had work there before."""
    streams = FakeStreams()
    arena = Arena(SLAB_BYTES, streams.record, wait_s=0)
    arena.release(arena.take(48 * MIB, "compute"))
    room = arena.open_room(plan_of(40 * MIB), "compute")
    if end == "close":
        arena.close_room(room)
    else:
        arena.shrink_room(room)
    with pytest.raises(ArenaFull):
        arena.take(17 * MIB, "copy")
    assert arena.take(40 * MIB, "compute").offset == 0
    streams.finish_all()
    assert arena.take(17 * MIB, "copy").size_bytes == 17 * MIB
    check_tiles(arena)


def test_a_room_closes_behind_one_completion():
    streams = FakeStreams()
    arena = Arena(SLAB_BYTES, streams.record)
    room = arena.open_room(plan_of(*[MIB] * 20), "compute")
    room.at = 20
    arena.close_room(room)
    assert streams.work == {"compute": [False]}
    assert arena.layout()[0] == (0, 20 * MIB, "pending", "compute")


def test_no_room_where_it_would_be_in_the_way():
    arena = Arena(SLAB_BYTES)
    lent = arena.take(30 * MIB)
    assert arena.open_room(plan_of(40 * MIB), 0) is None
    assert arena.open_room(plan_of(20 * MIB, besides_bytes=[11 * MIB]), 0) is None  # leaves less than SPARE_PART
    in_the_middle = arena.take(2 * MIB)
    arena.take(14 * MIB)
    arena.release(lent)  # 30 and 18 MiB are free
    assert arena.open_room(plan_of(12 * MIB, besides_bytes=[9 * MIB, 9 * MIB]), 0) is not None
    assert arena.open_room(plan_of(8 * MIB, besides_bytes=[25 * MIB]), 0) is None  # no piece of 25 would be left
    arena.release(in_the_middle)
    check_tiles(arena)


def test_a_slab_that_has_been_all_but_full_has_no_rooms():
    """Only single takes keep to the layout that the plan has tried."""
    arena = Arena(SLAB_BYTES)
    arena.release(arena.take(SLAB_BYTES - SLAB_BYTES // SPARE_PART))
    arena.close_room(arena.open_room(plan_of(MIB), 0))
    arena.release(arena.take(SLAB_BYTES - SLAB_BYTES // SPARE_PART + 256))
    assert arena.open_room(plan_of(MIB), 0) is None


def test_no_room_while_every_take_is_recorded():
    arena = Arena(SLAB_BYTES)
    arena.recorder = Recorder()
    assert arena.open_room(plan_of(MIB), 0) is None


# One completion for all releases until somebody asks


def test_work_is_recorded_when_somebody_asks():
    recorded = []

    def record(stream):
        recorded.append(stream)
        return lambda: finished

    finished = False
    arena = Arena(SLAB_BYTES, LatestWork(record), wait_s=0)
    for _ in range(1000):
        arena.release(arena.take(MIB, "compute"))
    assert recorded == []
    with pytest.raises(ArenaFull):
        arena.take(SLAB_BYTES, "copy")
    assert recorded == ["compute"]
    arena.release(arena.take(MIB, "compute"))  # after what was recorded: not covered by it
    arena.poll()
    assert recorded == ["compute"]  # a stream works in order: the first is asked alone
    finished = True
    assert arena.take(SLAB_BYTES, "copy").offset == 0
    assert recorded == ["compute", "compute"]


def test_nothing_outstanding_counts_as_finished():
    arena = Arena(SLAB_BYTES, LatestWork(lambda stream: None))
    arena.release(arena.take(SLAB_BYTES, "compute"))
    assert arena.take(SLAB_BYTES, "copy").offset == 0
