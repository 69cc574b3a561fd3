"""Many threads on one arena."""

import random
import sys
import threading

import pytest
from arena_fakes import check_tiles

from rocline.arena.arena import Arena
from rocline.arena.spans import MIB

SLAB_BYTES = 64 * MIB


@pytest.fixture(autouse=True)
def _switch_often():
    """Let threads interrupt each other between almost any two instructions."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


def run_threads(n_threads, body):
    """Run body(number) in threads; the first exception comes through, a hang fails."""
    errors = []

    def guarded(number):
        try:
            body(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "threads hang"
    if errors:
        raise errors[0]


class Owners:
    """Who has which granule: two at once is the failure the arena exists to prevent."""

    def __init__(self):
        self.of = [None] * (SLAB_BYTES // 4096)
        self.lock = threading.Lock()

    def claim(self, span, owner):
        with self.lock:
            for at in range(span.offset // 4096, (span.offset + span.size_bytes) // 4096):
                assert self.of[at] is None, f"{owner} got a page of {self.of[at]}"
                self.of[at] = owner

    def drop(self, span):
        with self.lock:
            for at in range(span.offset // 4096, (span.offset + span.size_bytes) // 4096):
                self.of[at] = None


@pytest.mark.parametrize("with_events", [False, True])
def test_no_two_threads_hold_the_same_bytes(rng, with_events):
    class Events:
        """Finish the second time they are asked; a driver's lock is held while they are made and asked."""

        def __init__(self):
            self.lock = threading.Lock()

        def record(self, stream):
            asked = []

            def done():
                with self.lock:
                    asked.append(1)
                    return len(asked) > 1

            with self.lock:
                return done

    arena = Arena(SLAB_BYTES, Events().record if with_events else None)
    owners = Owners()
    seed = int(rng.integers(1 << 30))
    handed_over = [[] for _ in range(4)]

    def body(number):
        choose = random.Random(seed + number)
        mine = []
        for _ in range(400):
            if len(mine) < 4 and choose.random() < 0.6:
                span = arena.take(choose.choice([1, 4, 4, 16, 64, 300]) * 4096, choose.randrange(3))
                owners.claim(span, number)
                mine.append(span)
            elif mine:
                span = mine.pop(choose.randrange(len(mine)))
                owners.drop(span)
                if choose.random() < 0.3:  # another thread releases it
                    handed_over[(number + 1) % 4].append(span)
                else:
                    arena.release(span, choose.randrange(3))
            while handed_over[number]:
                arena.release(handed_over[number].pop())
        for span in mine:
            owners.drop(span)
            arena.release(span)

    run_threads(4, body)
    for span in arena.live_spans():
        arena.release(span)
    n_pending = arena.stats().n_pending
    for _ in range(2 * n_pending):  # a completion may cost two looks
        arena.poll()
    arena.trim()
    assert check_tiles(arena) == [(0, SLAB_BYTES, "free", None)]
    stats = arena.stats()
    assert stats.takes == stats.releases > 400


def test_recut_under_contention(rng):
    """A kept span that one thread gives back to cut must not be lent by another in between."""
    large_bytes = SLAB_BYTES // 256  # the reuse layer keeps four
    arena = Arena(SLAB_BYTES)
    # Two smaller spans, wherever they lie, leave more than one large span of five in one piece.
    filler = arena.take(SLAB_BYTES - 5 * large_bytes)
    owners = Owners()
    owners.claim(filler, "filler")
    seed = int(rng.integers(1 << 30))

    def body(number):
        choose = random.Random(seed + number)
        for _ in range(500):
            span = arena.take(large_bytes if number == 0 else choose.randrange(17, 49) * 4096)
            owners.claim(span, number)
            owners.drop(span)
            arena.release(span)

    run_threads(3, body)
    stats = arena.stats()
    assert stats.recuts > 0
    assert stats.refusals == 0
    check_tiles(arena)


def test_only_one_of_two_releases_wins():
    arena = Arena(SLAB_BYTES)
    refused = []

    def body(number):
        for span in spans:
            try:
                arena.release(span)
            except ValueError:
                refused.append(span)

    spans = [arena.take(4096) for _ in range(300)]
    run_threads(4, body)
    assert len(refused) == 3 * len(spans)
    arena.trim()
    assert check_tiles(arena) == [(0, SLAB_BYTES, "free", None)]


def test_a_driver_lock_around_the_arena_and_inside_completions_does_not_deadlock():
    """One thread asks completions, which take the driver's lock, while another calls the arena under it."""
    driver = threading.RLock()

    def record(stream):
        with driver:
            return done

    def done():
        with driver:
            return True

    arena = Arena(SLAB_BYTES, record)

    def body(number):
        for turn in range(300):
            if number % 2:
                with driver:
                    arena.release(arena.take(SLAB_BYTES // 8, number))
            else:
                arena.release(arena.take(SLAB_BYTES // 8, number), turn % 4)
            arena.poll()

    run_threads(4, body)
    arena.poll()
    arena.trim()
    assert arena.largest_free_bytes() == SLAB_BYTES
