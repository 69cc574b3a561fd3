"""Disjoint spans found by size: two-level size classes with a bitmap, best fit inside a class."""

from bisect import bisect_left, insort

GRANULE_BYTES = 256  # every offset and size is a multiple: one cache line pair, and any dtype's alignment
MAX_SLAB_BYTES = 1 << 40  # an offset fits below the size in one integer key
_OFFSET_BITS = 40
_OFFSET_MASK = MAX_SLAB_BYTES - 1


def align_up(want_bytes: int) -> int:
    """The smallest multiple of GRANULE_BYTES that holds want_bytes."""
    return (want_bytes + GRANULE_BYTES - 1) & -GRANULE_BYTES


def class_of(size_bytes: int) -> int:
    """The size class: powers of two, each in 16 steps (first level and second level in one number).

    Up to 31 granules every size has its own class; above, a class is at most 1/16 wide. Classes ascend
    with size, so everything in a higher class is larger than everything in a lower one.
    """
    granules = size_bytes >> 8
    shift = granules.bit_length() - 5
    return granules if shift <= 0 else (shift << 4) + (granules >> shift)


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(offset, size_bytes) of disjoint (begin, end) ranges, ascending, with neighbours joined."""
    out: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if out and sum(out[-1]) == begin:
            begin = out.pop()[0]
        out.append((begin, end - begin))
    return out


class SpansBySize:
    """Disjoint spans of one kind, indexed by size, by start and by end.

    A key is `size << 40 | offset`; each class is a sorted list of keys, so the best fit inside a class is
    one bisection, the lowest offset first among equals, and across classes one bit search. That makes
    every answer the best fit of all spans. Lists stay short because spans spread over the classes.
    """

    __slots__ = ("_bits", "_keys", "ends", "starts", "total_bytes")

    def __init__(self, slab_bytes: int) -> None:
        self._keys: list[list[int]] = [[] for _ in range(class_of(slab_bytes) + 1)]
        self._bits = 0  # bit c is set when class c has a span
        self.starts: dict[int, int] = {}  # offset -> size
        self.ends: dict[int, int] = {}  # offset just after a span -> its offset
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self.starts)

    def add(self, offset: int, size_bytes: int) -> None:
        """Take in a span as it is. It must not overlap one that is here."""
        self.starts[offset] = size_bytes
        self.ends[offset + size_bytes] = offset
        self.total_bytes += size_bytes
        self._index(offset, size_bytes)

    def remove(self, offset: int) -> int:
        """Give up the span that starts at offset, whole; its size."""
        size_bytes = self.starts.pop(offset)
        del self.ends[offset + size_bytes]
        self.total_bytes -= size_bytes
        self._unindex(offset, size_bytes)
        return size_bytes

    def best_fit(self, want_bytes: int) -> int:
        """Offset of the smallest span of at least want_bytes, the lowest of equals; -1 when none."""
        number = class_of(want_bytes)
        if number >= len(self._keys):
            return -1
        keys = self._keys[number]
        if keys:
            at = bisect_left(keys, want_bytes << _OFFSET_BITS)
            if at < len(keys):
                return keys[at] & _OFFSET_MASK
        above = self._bits >> number + 1
        if not above:
            return -1
        return self._keys[number + (above & -above).bit_length()][0] & _OFFSET_MASK

    def cut(self, offset: int, want_bytes: int, *, from_top: bool = False) -> int:
        """Take want_bytes out of the span at offset; the rest stays here. Offset of the part taken."""
        size_bytes = self.starts[offset]
        rest = size_bytes - want_bytes
        if not rest:
            self.remove(offset)
            return offset
        self._unindex(offset, size_bytes)
        if from_top:
            taken, kept = offset + rest, offset
            del self.ends[offset + size_bytes]
        else:
            taken, kept = offset, offset + want_bytes
            del self.starts[offset]
        self.starts[kept] = rest
        self.ends[kept + rest] = kept
        self.total_bytes -= want_bytes
        self._index(kept, rest)
        return taken

    def largest_bytes(self) -> int:
        """Size of the largest span, 0 when empty. Constant time."""
        return self._keys[self._bits.bit_length() - 1][-1] >> _OFFSET_BITS if self._bits else 0

    def _index(self, offset: int, size_bytes: int) -> None:
        number = class_of(size_bytes)
        keys = self._keys[number]
        if keys:
            insort(keys, size_bytes << _OFFSET_BITS | offset)
        else:
            keys.append(size_bytes << _OFFSET_BITS | offset)
            self._bits |= 1 << number

    def _unindex(self, offset: int, size_bytes: int) -> None:
        number = class_of(size_bytes)
        keys = self._keys[number]
        if len(keys) == 1:
            keys.clear()
            self._bits ^= 1 << number
        else:
            del keys[bisect_left(keys, size_bytes << _OFFSET_BITS | offset)]


class FreeSpans(SpansBySize):
    """Spans that anyone may have. Neighbours coalesce at once, so no two of them touch."""

    __slots__ = ("n_merges",)

    def __init__(self, slab_bytes: int) -> None:
        super().__init__(slab_bytes)
        self.n_merges = 0

    def put(self, offset: int, size_bytes: int) -> int:
        """Add a span, joined with the free neighbours on both sides; offset of the joined span."""
        left = self.ends.get(offset)
        if left is not None:
            size_bytes += self.remove(left)
            offset = left
            self.n_merges += 1
        right = offset + size_bytes
        if right in self.starts:
            size_bytes += self.remove(right)
            self.n_merges += 1
        self.add(offset, size_bytes)
        return offset
