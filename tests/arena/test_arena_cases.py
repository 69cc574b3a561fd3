"""Reported failures B37 to B42, as far as they show without a card."""

import numpy as np
import pytest
from arena_fakes import FakeStreams, check_tiles

from rocline.arena.arena import Arena
from rocline.arena.spans import MIB, ArenaFull

GIB = 1 << 30


@pytest.mark.parametrize("n_streams", [2, 3, 16])
def test_b37_spans_freed_by_other_streams_coalesce_across_owners(rng, n_streams):
    """No room with plenty free: pieces stayed with the owners that had freed them."""
    streams = FakeStreams()
    arena = Arena(GIB, streams.record, wait_s=0)
    for _ in range(4):
        spans = [arena.take(int(rng.integers(1, 24 * MIB)), at % n_streams) for at in range(64)]
        for at in rng.permutation(64):  # half of them on another stream than their own
            arena.release(spans[at], int(rng.integers(n_streams)))
        with pytest.raises(ArenaFull, match=r"largest \d+\.\d"):
            arena.take(GIB, n_streams)
        streams.finish_all()
        everything = arena.take(GIB, n_streams)
        assert everything.offset == 0
        arena.release(everything)
        streams.finish_all()
    check_tiles(arena)


@pytest.mark.parametrize("seed", range(40))
def test_b37_a_small_span_leaves_no_floor_in_the_way(seed):
    """Few small spans among large ones: the shelf comes and goes. Without _lift_floor one of the draws fails."""
    rng, streams = np.random.default_rng(seed), FakeStreams()
    arena = Arena(GIB, streams.record, wait_s=0)
    spans = [arena.take(int(rng.integers(1, 24 * MIB)), at % 2) for at in range(64)]
    for at in rng.permutation(64):
        arena.release(spans[at], int(rng.integers(2)))
    with pytest.raises(ArenaFull):
        arena.take(GIB, 2)
    streams.finish_all()
    assert arena.take(GIB, 2).offset == 0


def test_b37_the_refusal_names_the_largest_free_span():
    arena = Arena(GIB, name="arena on device 0")
    spans = [arena.take(64 * MIB) for _ in range(16)]
    for span in spans[::2]:
        arena.release(span)
    with pytest.raises(ArenaFull, match=r"no room for 128\.0 MiB; 512\.0 free in 8 spans, largest 64\.0;"):
        arena.take(128 * MIB)


@pytest.mark.parametrize("times", [2, 3, 8, 170.7])
def test_b39_a_large_kept_span_is_cut_for_a_small_request(times):
    """Lent whole, it hid its rest from the next large request."""
    large_bytes = 12 * MIB  # as large as the reuse layer keeps
    small_bytes = int(large_bytes / times)
    arena = Arena(GIB)
    spans = [arena.take(large_bytes) for _ in range(GIB // large_bytes)]
    rest = arena.take(GIB - len(spans) * large_bytes)
    arena.release(spans[7])
    assert arena.stats().kept_bytes == large_bytes
    small = arena.take(small_bytes, lasting=False)
    assert small.size_bytes < small_bytes + 256
    assert arena.stats().recuts == (small_bytes > GIB // 1024)  # smaller ones the shelf looks after
    assert arena.take(large_bytes - small.size_bytes).size_bytes == large_bytes - small.size_bytes
    assert rest in arena.live_spans()
    check_tiles(arena)


def test_b39_no_request_of_a_mixed_trace_falls_through(rng):
    """512 MiB, then a small one, then whatever still has room wherever the small one lies."""
    streams = FakeStreams()
    arena = Arena(GIB, streams.record, wait_s=0)
    for _ in range(200):
        large = arena.take(512 * MIB, "compute")
        arena.release(large)
        small = arena.take(int(rng.integers(1, 16 * MIB)), "compute")
        beside = arena.take((GIB - small.size_bytes) // 2 & -256, "compute")
        for at in rng.permutation(2):
            arena.release((small, beside)[at])
        if rng.integers(2):
            streams.finish("compute", int(rng.integers(1, 5)))
    stats = arena.stats()
    assert stats.refusals == 0
    assert stats.waits == 0
    check_tiles(arena)


def test_b40_a_span_handed_over_16_us_after_its_release_is_refused():
    """The work that reads it takes 5 ms; the other stream asks 16 us later. Time here is the test's."""
    now_us = 0
    finish_us = {}

    def record(stream):
        due_us = finish_us[stream]
        return lambda: now_us >= due_us

    arena = Arena(GIB, record, wait_s=0)
    reading = arena.take(GIB, "compute")
    finish_us["compute"] = 5000
    arena.release(reading)
    for now_us in (0, 16, 100, 4999):  # noqa: B007 (the completion reads it)
        with pytest.raises(ArenaFull):
            arena.take(MIB, "copy")
    now_us = 5000
    assert arena.take(MIB, "copy").size_bytes == MIB


def test_b40_every_pair_of_streams_and_sizes_keeps_the_gate(rng):
    """The same size asked for by the other stream is the tempting one: the reuse layer must not serve it."""
    streams = FakeStreams()
    arena = Arena(2 * GIB, streams.record)  # of 1 GiB the reuse layer keeps just what four streams' sizes come to
    guarded = []  # (offset, end, stream) of unfinished work
    for _ in range(2000):
        stream = int(rng.integers(4))
        span = arena.take(int(rng.choice([256, 4096, MIB, 3 * MIB])), stream)
        end = span.offset + span.size_bytes
        for begin, stop, owner in guarded:
            assert owner == stream or end <= begin or stop <= span.offset
        arena.release(span)
        guarded.append((span.offset, end, stream))
        if rng.integers(50) == 0:
            finished = int(rng.integers(4))
            streams.finish(finished)
            guarded = [row for row in guarded if row[2] != finished]
    assert arena.stats().reuses > 1900


@pytest.mark.parametrize("case", ["B41", "B42"])
def test_b41_b42_memory_stays_where_it_is(case):
    """Stream-ordered pools read zeros (B41) and growing segments lost a live canary (B42): the arena builds
    on neither. Its slab has one size for life, and a lent span keeps its bytes whatever happens around it."""
    streams = FakeStreams()
    arena = Arena(64 * MIB, streams.record, wait_s=0)
    memory = bytearray(64 * MIB // 256)  # one byte a granule
    canary = arena.take(3 * MIB, "compute", lasting=case == "B42")
    at = slice(canary.offset // 256, (canary.offset + canary.size_bytes) // 256)
    memory[at] = b"\xa5" * (at.stop - at.start)
    for turn in range(300):
        size_bytes = (turn * 7919 % 40 + 1) * MIB // 2
        span = arena.take(size_bytes, "compute")
        part = slice(span.offset // 256, (span.offset + span.size_bytes) // 256)
        memory[part] = bytes(part.stop - part.start)
        arena.release(span)
        streams.finish("compute", turn % 3)
        if turn % 50 == 0:
            with pytest.raises(ArenaFull):
                arena.take(64 * MIB, "copy")
    assert memory[at] == b"\xa5" * (at.stop - at.start)
    assert arena.slab_bytes == 64 * MIB
    assert arena.stats().device_allocs == 0


def test_b37_what_is_free_beyond_a_streams_own_run_comes_back_too():
    """The shelf's floor rose over a run, and left a free span of the shelf at it: largest free was 256 bytes short."""
    streams = FakeStreams()
    arena = Arena(MIB, streams.record, wait_s=0)
    arena.release(arena.take(1, "copy"), "compute")
    lasting = arena.take(4096, "side", lasting=True)
    large, small = arena.take(2048, "compute"), arena.take(1, "compute")
    arena.release(small, "compute", "side")
    for span in (large, lasting):
        arena.release(span)
    streams.finish_all()
    arena.poll()
    arena.trim()
    assert (arena.largest_free_bytes(), arena.stats().n_free) == (MIB, 1)
