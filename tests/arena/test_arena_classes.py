"""Size classes, best fit, coalescing and pending order against brute force."""

import itertools

import pytest

from rocline.arena.classes import GRANULE_BYTES, FreeSpans, SpansBySize, align_up, class_of
from rocline.arena.completions import PendingSpans

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


def test_pending_spans_leave_in_the_order_of_their_places(rng):
    pending = PendingSpans(SLAB_GRANULES * GRANULE_BYTES)
    places = {}
    for step in range(3000):
        offset = int(rng.integers(64)) * 1024
        if offset in places:  # gone early, or cut: the rest keeps its place
            place = places.pop(offset)
            if pending.starts[offset] == 1024 and rng.integers(2):
                pending.cut(offset, 512)
                pending.cut(offset + 512, 256)
                assert pending.starts[offset + 768] == 256
                assert pending.pop_passed(place - 1) == [] or min(places.values()) < place
                places = {at: p for at, p in places.items() if p >= place}
                assert (offset + 768, 256) in pending.pop_passed(place)
                places = {at: p for at, p in places.items() if p > place}
            else:
                pending.cut(offset, 1024)
        else:
            pending.put(offset, 1024, step + 1)
            places[offset] = step + 1
        if step % 50 == 0 and places:
            passed = sorted(places.values())[len(places) // 2]
            assert sorted(pending.pop_passed(passed)) == sorted((at, 1024) for at, p in places.items() if p <= passed)
            places = {at: p for at, p in places.items() if p > passed}
        assert set(pending.starts) == set(places)
        assert len(pending._order) <= 64 + 4 * len(places) + 1
