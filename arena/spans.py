"""What a caller holds, and how the arena says no."""

from collections.abc import Hashable
from itertools import islice
from types import CodeType

MIB = 1 << 20
TakenIn = tuple[CodeType, int]  # code and instruction of a take


class ArenaFull(MemoryError):
    """A request has no room. The text gives request, free, pending, largest free, and what to change."""


class ArenaMisuse(ValueError):
    """A request or release that can only be a mistake of the caller. Nothing was changed."""


class Span:
    """Bytes lent by an arena: [offset, offset + size_bytes) of its slab, until released.

    A new object for every take, so that a second release of an old one is seen even when the same bytes
    have been lent again. Attributes are for reading.
    """

    __slots__ = ("_taken_in", "label", "lasting", "number", "offset", "size_bytes", "stream", "thread")

    def __init__(
        self,
        offset: int,
        size_bytes: int,
        stream: Hashable,
        number: int,
        label: str,
        lasting: bool,
        thread: int,
        taken_in: TakenIn,
    ) -> None:
        self.offset = offset
        self.size_bytes = size_bytes  # the request, up to the next granule
        self.stream = stream
        self.number = number  # counts takes of this arena; the span's name in a trace
        self.label = label
        self.lasting = lasting
        self.thread = thread
        self._taken_in = taken_in

    @property
    def taken_at(self) -> str:
        """`file:line` of the take."""
        # Code and instruction are kept rather than the line: looking the line up costs more than a take.
        code, instruction = self._taken_in
        line = next(islice(code.co_positions(), instruction // 2, None))[0]
        return f"{code.co_filename}:{line}"

    def __repr__(self) -> str:
        label = f"{self.label}, " if self.label else ""
        return (
            f"Span({label}{self.size_bytes / MIB:.3f} MiB at {self.offset:#x}, stream {self.stream}, "
            f"taken at {self.taken_at})"
        )
