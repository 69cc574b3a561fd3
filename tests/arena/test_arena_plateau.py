"""Small spans that stay alive must not fence off the large region: periodic workloads reach a plateau."""

import pytest
from arena_fakes import FakeStreams, check_tiles

from rocline.arena.arena import Arena
from rocline.arena.spans import MIB

SLAB_BYTES = 512 * MIB
N_PERIODS = 60


def footprint(arena):
    """Bytes of the slab not in its largest free span, with the reuse layer empty."""
    arena.trim()
    return SLAB_BYTES - arena.largest_free_bytes()


def run_periods(arena, period, small_lives, finish=lambda: None):
    """Run one list of steps again and again; the footprint at the end of each period.

    period       (size_bytes) to take, or -n to release the n-th of this period's
    small_lives  for each period, the (size_bytes, periods) of small spans taken between its steps
    """
    footprints = []
    small = []  # (period of death, span)
    for now in range(N_PERIODS):
        mine = []
        born = list(small_lives(now))
        for at, step in enumerate(period):
            if at < len(born):
                size_bytes, life = born[at]
                small.append((now + life, arena.take(size_bytes)))
            if step > 0:
                mine.append(arena.take(step))
            else:
                arena.release(mine[-step - 1])
        for due, span in small:
            if due <= now:
                arena.release(span)
        small = [(due, span) for due, span in small if due > now]
        finish()
        arena.poll()
        check_tiles(arena)
        footprints.append(footprint(arena))
    return footprints


def random_period(rng):
    """Large takes and releases in random order, never more than half of the slab at once."""
    sizes = [int(size) for size in rng.integers(MIB, 40 * MIB, size=12)]
    steps, open_spans, open_bytes = [], [], 0
    for at, size_bytes in enumerate(sizes):
        while open_bytes + size_bytes > SLAB_BYTES // 4 or (open_spans and rng.random() < 0.4):
            out = open_spans.pop(int(rng.integers(len(open_spans))))
            open_bytes -= sizes[out]
            steps.append(-out - 1)
        steps.append(size_bytes)
        open_spans.append(at)
        open_bytes += size_bytes
    return [*steps, *(-out - 1 for out in open_spans)]


@pytest.mark.parametrize("repeat", range(6))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_largest_free_span_reaches_a_plateau(rng, repeat, asynchronous):
    """Between periods only small long-lived spans remain, and they take what they need at one end."""
    streams = FakeStreams()
    arena = Arena(SLAB_BYTES, streams.record if asynchronous else None)
    most_alive = 0

    def small_lives(now):
        return [(int(rng.integers(256, SLAB_BYTES // 1024)), int(rng.integers(1, 12))) for _ in range(6)]

    footprints = run_periods(arena, random_period(rng), small_lives, streams.finish_all)
    most_alive = 6 * 12 * (SLAB_BYTES // 1024)
    assert max(footprints) <= most_alive  # however the large ones lay, they are one region again
    assert max(footprints[N_PERIODS // 2 :]) <= 1.5 * max(footprints[: N_PERIODS // 2])
    assert arena.stats().refusals == 0


def test_a_steady_period_repeats_its_layout(rng):
    """With lives that repeat too, the whole arena comes back to the same offsets, period after period."""
    arena = Arena(SLAB_BYTES)
    born = [(int(rng.integers(256, 60_000)), 3) for _ in range(4)]
    footprints = run_periods(arena, random_period(rng), lambda now: born)
    assert len(set(footprints[N_PERIODS // 2 :])) <= 4
    assert max(footprints[N_PERIODS // 2 :]) <= max(footprints[: N_PERIODS // 2])


def test_lasting_spans_of_any_size_leave_the_large_region_whole():
    """Hand-offs live from one period into the next; taken as lasting they stay out of the way."""
    arena = Arena(SLAB_BYTES)
    previous = None
    largest = []
    for _ in range(N_PERIODS):
        temporaries = [arena.take(20 * MIB) for _ in range(6)]
        handoff = arena.take(30 * MIB, lasting=True)
        for span in temporaries:
            arena.release(span)
        if previous is not None:
            arena.release(previous)
        previous = handoff
        arena.trim()
        largest.append(arena.largest_free_bytes())
    assert min(largest) >= SLAB_BYTES - 2 * 30 * MIB
    assert len(set(largest[2:])) <= 2
