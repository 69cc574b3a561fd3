"""The reuse layer: released spans kept whole, for the next request of the same size and stream."""

from collections.abc import Callable, Iterator

from rocline.arena.completions import Stream

Kept = tuple[int, int]  # offset, place in the stream's order (0: finished when released)
KeptSpan = tuple[int, Stream, int, int]  # size_bytes, stream, offset, place

MAX_KEPT_SPANS = 256  # bounds what one drain costs
MAX_TURNED_AWAY = 32  # then one size must make room


class ReuseLayer:
    """Exact-size spans by (size, stream), newest first; a hit skips cut and coalesce.

    Its bytes are bounded: a kept span cannot coalesce, so memory kept here is memory that may lie across a
    large request. The owner drains it before it refuses one, and re-cuts (`fit`) before it drains.
    """

    __slots__ = ("_kept", "_max_bytes", "_n_turned_away", "kept_bytes", "n_kept")

    def __init__(self, max_bytes: int) -> None:
        self._kept: dict[tuple[int, Stream], list[Kept]] = {}
        self._max_bytes = max_bytes
        self._n_turned_away = 0
        self.kept_bytes = 0
        self.n_kept = 0

    def take(self, size_bytes: int, stream: Stream) -> int:
        """Offset of a span that stream released with just this size, -1 when none."""
        kept = self._kept.get((size_bytes, stream))
        if not kept:
            return -1
        self.kept_bytes -= size_bytes
        self.n_kept -= 1
        offset = kept.pop()[0]
        if not kept:
            del self._kept[size_bytes, stream]
        return offset

    def keep(self, size_bytes: int, stream: Stream, offset: int, place: int) -> bool:
        """Keep a span that stream released, if the bounds allow.

        What does not fit is turned away rather than put in another's place: a workload that goes round
        more sizes than fit would push every one out just before its turn.
        """
        if self.kept_bytes + size_bytes > self._max_bytes or self.n_kept == MAX_KEPT_SPANS:
            self._n_turned_away += 1
            return False
        kept = self._kept.get((size_bytes, stream))
        if kept is None:
            self._kept[size_bytes, stream] = [(offset, place)]
        else:
            kept.append((offset, place))
        self.kept_bytes += size_bytes
        self.n_kept += 1
        return True

    def pop_stale(self) -> list[KeptSpan]:
        """Now and then, when spans are turned away: take out the size that was longest without a hit.

        A hit takes a size out of the dictionary and its release puts it back last, so that is the first.
        """
        if self._n_turned_away < MAX_TURNED_AWAY or not self._kept:
            return []
        self._n_turned_away = 0
        size_bytes, stream = next(iter(self._kept))
        return self._pop_all(size_bytes, stream)

    def drain(self) -> list[KeptSpan]:
        """Take out everything, and begin anew."""
        self._n_turned_away = 0
        return [span for key in list(self._kept) for span in self._pop_all(*key)]

    def fit(self, want_bytes: int, usable: Callable[[Stream, int, int], bool]) -> KeptSpan | None:
        """Take out the smallest span of at least want_bytes that usable(stream, offset, place) allows."""
        for size_bytes, stream in sorted((key for key in self._kept if key[0] >= want_bytes), key=_size):
            kept = self._kept[size_bytes, stream]
            for at, (offset, place) in enumerate(kept):
                if usable(stream, offset, place):
                    del kept[at]
                    if not kept:
                        del self._kept[size_bytes, stream]
                    self.kept_bytes -= size_bytes
                    self.n_kept -= 1
                    return size_bytes, stream, offset, place
        return None

    def __iter__(self) -> Iterator[KeptSpan]:
        for (size_bytes, stream), kept in self._kept.items():
            for offset, place in kept:
                yield size_bytes, stream, offset, place

    def _pop_all(self, size_bytes: int, stream: Stream) -> list[KeptSpan]:
        kept = self._kept.pop((size_bytes, stream))
        self.kept_bytes -= size_bytes * len(kept)
        self.n_kept -= len(kept)
        return [(size_bytes, stream, offset, place) for offset, place in kept]


def _size(key: tuple[int, Stream]) -> int:
    return key[0]
