"""What an arena did, as events: recording them, and CSV files of them, RMM's replay logs included."""

import csv
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import TextIO

from rocline.arena.completions import Completion, Stream
from rocline.arena.spans import Span

COLUMNS = ("time_ns", "thread", "stream", "action", "span", "bytes", "completed_after_ns", "operator")
RMM_COLUMNS = ("Thread", "Time", "Action", "Pointer", "Size", "Stream")
DAY_NS = 24 * 3600 * 10**9


class TraceError(ValueError):
    """A trace file that does not say what it must."""


@dataclass(slots=True)
class TraceEvent:
    """One take or release.

    completed_after_ns  of a release: time from it until its work was seen to finish; None: not seen to.
                        0 for a take.
    """

    time_ns: int
    thread: int
    stream: Stream
    action: str  # take, release
    span: int  # names one take and its release
    n_bytes: int  # as asked for
    completed_after_ns: int | None = 0
    operator: str = ""


class Recorder:
    """Set as `arena.recorder`, it writes down every take and release.

    `events` may be read at any time; poll the arena first, so that releases whose work has finished say
    when that was seen.
    """

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.events: list[TraceEvent] = []
        self._now_ns = now_ns
        self._asked: dict[Span, int] = {}  # bytes asked for, before rounding

    def note_take(self, span: Span, want_bytes: int) -> None:
        self._asked[span] = want_bytes
        self.events.append(
            TraceEvent(self._now_ns(), span.thread, span.stream, "take", span.number, want_bytes, 0, span.label)
        )

    def note_release(self, span: Span, marks: list[tuple[Stream, Completion]]) -> list[tuple[Stream, Completion]]:
        """The same completions, made to note when each is first seen to have passed; the last one counts."""
        now_ns = self._now_ns()
        # A span taken before the recording began has its rounded size.
        want_bytes = self._asked.pop(span, span.size_bytes)
        # Of several streams one column can hold one: the last, which is not the taker's, so that a replay
        # knows the span had crossed.
        stream = marks[-1][0] if marks else span.stream
        after_ns = None if marks else 0
        event = TraceEvent(now_ns, get_ident(), stream, "release", span.number, want_bytes, after_ns, span.label)
        self.events.append(event)
        waiting = {stream for stream, _ in marks}

        def noting(stream: Stream, completion: Completion) -> Completion:
            def noted() -> bool:
                if not completion():
                    return False
                waiting.discard(stream)
                if not waiting and event.completed_after_ns is None:
                    event.completed_after_ns = self._now_ns() - event.time_ns
                return True

            return noted

        return [(stream, noting(stream, completion)) for stream, completion in marks]


def write_csv(events: Iterable[TraceEvent], out: TextIO) -> None:
    """Write a trace. An unseen completion is an empty field."""
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(COLUMNS)
    for event in events:
        after = "" if event.completed_after_ns is None else event.completed_after_ns
        rows.writerow(
            (
                event.time_ns,
                event.thread,
                event.stream,
                event.action,
                event.span,
                event.n_bytes,
                after,
                event.operator,
            )
        )


def read_csv(path: Path) -> list[TraceEvent]:
    """Read a trace by its header: ours (the operator column may be absent) or an RMM replay log.

    Raises TraceError naming file and row for anything that is not a take or a release of a span taken
    before.
    """
    with path.open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(lines)
        columns = tuple(rows.fieldnames or ())
        if set(RMM_COLUMNS) <= set(columns):
            read = _read_rmm
        elif set(COLUMNS[:-1]) <= set(columns):
            read = _read_ours
        else:
            raise TraceError(
                f"{path}: columns are {', '.join(columns) or 'missing'}; want {', '.join(COLUMNS[:-1])} "
                f"[, operator] or RMM's {', '.join(RMM_COLUMNS)}"
            )
        events = []
        try:
            for event in read(rows):
                events.append(event)
        except (ValueError, TypeError, KeyError) as error:
            raise TraceError(f"{path} line {rows.line_num}: {error}; correct or remove the row") from error
    return events


def _stream(text: str) -> Stream:
    try:
        return int(text, 0)
    except ValueError:
        return text  # a name, or a bare hexadecimal address: only equality matters


def _read_ours(rows: Iterable[dict[str, str]]) -> Iterator[TraceEvent]:
    taken: dict[int, int] = {}  # span -> bytes
    for row in rows:
        after = row["completed_after_ns"]
        event = TraceEvent(
            int(row["time_ns"]),
            int(row["thread"]),
            _stream(row["stream"]),
            row["action"],
            int(row["span"]),
            int(row["bytes"]),
            None if after == "" else int(after),
            row.get("operator") or "",
        )
        if event.action == "take":
            if event.span in taken:
                raise ValueError(f"span {event.span} is taken twice without a release")
            if event.n_bytes <= 0:
                raise ValueError(f"take of {event.n_bytes} bytes")
            taken[event.span] = event.n_bytes
        elif event.action == "release":
            if event.span not in taken:
                raise ValueError(f"release of span {event.span}, which is not taken")
            del taken[event.span]
        else:
            raise ValueError(f"action {event.action!r} is neither take nor release")
        yield event


def _read_rmm(rows: Iterable[dict[str, str]]) -> Iterator[TraceEvent]:
    """RMM logs address, not identity, and not when work ended: a free counts as completed at once."""
    taken: dict[str, int] = {}  # pointer -> span
    n_spans = 0
    first_ns: int | None = None
    latest_ns = days_ns = 0
    for row in rows:
        at_ns = _rmm_time_ns(row["Time"]) + days_ns
        if at_ns < latest_ns - DAY_NS // 2:  # times of day: midnight has passed
            days_ns += DAY_NS
            at_ns += DAY_NS
        # Threads write in an order that their clocks need not share; the order of rows is the order.
        latest_ns = max(latest_ns, at_ns)
        first_ns = latest_ns if first_ns is None else first_ns
        pointer, action, size = row["Pointer"], row["Action"], int(row["Size"])
        if action == "allocate failure" or size == 0:
            continue  # lends nothing
        if action == "allocate":
            n_spans += 1
            taken[pointer] = n_spans
        elif action != "free":
            raise ValueError(f"action {action!r} is neither allocate, free nor allocate failure")
        elif pointer not in taken:
            raise ValueError(f"free of {pointer}, which no earlier row allocates")
        span = taken[pointer] if action == "allocate" else taken.pop(pointer)
        kind = "take" if action == "allocate" else "release"
        yield TraceEvent(latest_ns - first_ns, int(row["Thread"]), _stream(row["Stream"]), kind, span, size)


def _rmm_time_ns(text: str) -> int:
    """`HH:MM:SS.ffffff` (older logs: `HH:MM:SS:ffffff`) or seconds since the epoch."""
    parts = text.replace(".", ":").split(":")
    if len(parts) == 4:
        hours, minutes, seconds = (int(part) for part in parts[:3])
        return (hours * 3600 + minutes * 60 + seconds) * 10**9 + int(parts[3].ljust(9, "0")[:9])
    return round(float(text) * 10**9)
