"""Size classes, best fit, coalescing and pending order against brute force."""

import itertools

import pytest

from rocline.arena.classes import GRANULE_BYTES, FreeSpans, SpansBySize, align_up, class_of, joined
from rocline.arena.completions import Unfinished

SLAB_GRANULES = 1 << 14


def test_classes_ascend_without_gaps_and_stay_narrow():
    numbers = [class_of(granules * GRANULE_BYTES) for granules in range(1, 1 << 15)]
    assert numbers[:31] == list(range(1, 32))  # each of the smallest sizes is its own class
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    assert steps == {0, 1}
    lowest, highest = {}, {}
    for granules, number in enumerate(numbers, 1):
        lowest.setdefault(number, granules)
        highest[number] = granules
    assert all(highest[number] - lowest[number] < max(1, lowest[number] / 16) for number in lowest)


@pytest.mark.parametrize(("want", "size"), [(1, 256), (255, 256), (256, 256), (257, 512), (1 << 39, 1 << 39)])
def test_sizes_round_up_to_the_granule(want, size):
    assert align_up(want) == size


def brute_best_fit(spans, want):
    fits = [(size, offset) for offset, size in spans.items() if size >= want]
    return min(fits)[1] if fits else -1


def test_best_fit_is_the_smallest_then_the_lowest(rng):
    spans = SpansBySize(SLAB_GRANULES * GRANULE_BYTES)
    offset = 0
    while offset < SLAB_GRANULES:  # disjoint spans with gaps; few sizes, so that equals occur
        size = int(rng.choice([1, 2, 17, 31, 32, 33, 63, 64, 65, 200]))
        if offset + size > SLAB_GRANULES:
            break
        spans.add(offset * GRANULE_BYTES, size * GRANULE_BYTES)
        offset += size + 1
    while spans.starts:
        want = int(rng.integers(1, 220)) * GRANULE_BYTES
        expected = brute_best_fit(spans.starts, want)
        assert spans.best_fit(want) == expected
        if expected < 0:
            assert spans.largest_bytes() < want
            expected = min(spans.starts)
            want = int(rng.integers(1, spans.starts[expected] // GRANULE_BYTES + 1)) * GRANULE_BYTES
        size, from_top = spans.starts[expected], bool(rng.integers(2))
        taken = spans.cut(expected, want, from_top=from_top)
        assert taken == (expected + size - want if from_top else expected)
        rest = expected if from_top else expected + want
        assert spans.starts.get(rest) == (size - want or None)
        assert spans.total_bytes == sum(spans.starts.values())
        assert spans.ends == {start + length: start for start, length in spans.starts.items()}
        assert spans.largest_bytes() == max(spans.starts.values(), default=0)
    assert spans.best_fit(GRANULE_BYTES) == -1


def test_a_request_above_the_largest_class_fits_nothing():
    assert SpansBySize(1024).best_fit(1 << 30) == -1


def test_free_neighbours_join_in_any_order(rng):
    free = FreeSpans(SLAB_GRANULES * GRANULE_BYTES)
    for at in rng.permutation(64):
        free.put(int(at) * 512, 512)
        assert not set(free.starts) & set(free.ends)  # no two touch
    assert free.starts == {0: 64 * 512}
    assert free.n_merges == 63


def granules_of(unfinished, first, last):
    return {at for begin, end in unfinished.within(first, last) for at in range(begin, end)}


def test_unfinished_ranges_against_one_place_a_granule(rng):
    """Ranges are put, lent again in any cut, and finish by place; the naive model keeps a place for each granule."""
    unfinished, places, passed = Unfinished(), {}, 0
    for step in range(3000):
        begin, n = int(rng.integers(200)), int(rng.integers(1, 12))
        granules = range(begin, begin + n)
        if rng.integers(3) and not any(at in places for at in granules):
            place = passed + 1 + int(rng.integers(6))
            unfinished.put(begin, begin + n, place)
            places |= dict.fromkeys(granules, place)
        elif rng.integers(2):
            touched = unfinished.cut(begin, begin + n)
            assert (touched > 0) == any(at in places for at in granules)
            places = {at: place for at, place in places.items() if at not in granules}
        elif rng.integers(4) == 0:
            passed += 1
            unfinished.pop_passed(passed)
            places = {at: place for at, place in places.items() if place > passed}
        assert unfinished.total_bytes == len(places)
        assert granules_of(unfinished, 0, 300) == set(places)
        assert granules_of(unfinished, begin, begin + n) == {at for at in granules if at in places}
        assert bool(unfinished) == bool(places)
        assert len(unfinished) <= len(places)
        assert len(unfinished._order) <= 64 + 4 * len(unfinished) + 1, step


def test_neighbours_that_end_together_are_one_range():
    unfinished = Unfinished()
    for begin, place in ((0, 1), (2, 1), (3, 2), (1, 1)):
        unfinished.put(begin, begin + 1, place)
    assert len(unfinished) == 2
    assert list(unfinished.within(0, 9)) == [(0, 4)]
    unfinished.pop_passed(1)
    assert list(unfinished.within(0, 9)) == [(3, 4)]


def test_joined_neighbours():
    assert joined([(6, 9), (0, 2), (2, 4), (5, 6)]) == [(0, 4), (5, 4)]
    assert joined([]) == []
