"""A scope: a chunk's temporaries, given back together."""

import logging
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING

from rocline.arena.spans import MIB, Span

if TYPE_CHECKING:
    from rocline.arena.arena import Arena
    from rocline.arena.completions import Stream

log = logging.getLogger(__name__)


class Scope:
    """Lends spans for the length of a `with` body on one stream; used by one thread.

    At the end, also when the body raises, every span it still holds is released. Spans the same thread
    took from the arena directly in that time and still holds, other than lasting ones, are leaks: they are
    logged with where they were taken and listed in `leaked`, and stay lent, for their work may go on.
    """

    def __init__(self, arena: "Arena", stream: "Stream") -> None:
        self.leaked: list[Span] = []
        self._arena = arena
        self._stream = stream
        self._spans: dict[Span, None] = {}
        self._first = 0

    def take(self, want_bytes: int, *, label: str = "", frames_up: int = 1) -> Span:
        """As Arena.take; released at the end of the scope, or before by `release`."""
        span = self._arena.take(want_bytes, self._stream, label=label, frames_up=frames_up + 1)
        self._spans[span] = None
        return span

    def release(self, span: Span, *streams: "Stream") -> None:
        """Give one span back early."""
        self._arena.release(span, *streams)
        self._spans.pop(span, None)

    def keep(self, span: Span) -> Span:
        """Hand a span on: it outlives the scope, and whoever has it now releases it."""
        del self._spans[span]
        span.lasting = True
        return span

    def __enter__(self) -> "Scope":
        self._first = self._arena.n_takes
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Newest first: the next scope finds what it takes first on top of the reuse layer.
        self._arena.release_together(reversed(self._spans), self._stream)
        self._spans.clear()
        self.leaked = leaked_since(self._arena, self._first)


def leaked_since(arena: "Arena", first: int) -> list[Span]:
    """Log and return what this thread has taken since take number `first` and still holds, lasting spans apart."""
    thread, leaked = get_ident(), []
    for span in reversed(arena.taken_spans()):
        if span.thread != thread:
            continue
        if span.number <= first:
            break  # a thread's own spans are in the order of their takes
        if not span.lasting:
            leaked.append(span)
    for span in reversed(leaked):
        log.warning(
            "%s: %.1f MiB%s taken at %s outlive the scope they were taken in; release them in it, or take them as "
            "lasting",
            arena.name,
            span.size_bytes / MIB,
            f" ({span.label})" if span.label else "",
            span.taken_at,
        )
    return leaked[::-1]
