"""Progress of long work: what is done, its rate and the time left. A bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

LINE_EVERY_S = 5.0


class _Progress(ABC):
    """Call advance(n) as work is done, from one thread; use it as a context manager.

    `stream` is standard error unless given; the first line comes after 5 s, so short work shows none but
    the last. `clock` counts seconds.
    """

    columns: tuple[ProgressColumn, ...]  # of the bar, between bar and time left

    def __init__(
        self,
        label: str,
        total: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label, self.total, self.done = label, total, 0
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._start_s = self._line_s = clock()
        self._bar = self._new_bar() if self._stream.isatty() else None

    @abstractmethod
    def done_text(self) -> str:
        """How much of the total is done."""

    @abstractmethod
    def rate_text(self, per_s: float) -> str:
        """A rate, with its unit."""

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        else:
            self._print_line()

    def advance(self, n: int) -> None:
        self.done += n
        if self._bar:
            self._bar.advance(self._bar.task_ids[0], n)
        elif self.done < self.total and self._clock() - self._line_s >= LINE_EVERY_S:
            self._line_s = self._clock()
            self._print_line()

    def _print_line(self) -> None:
        elapsed_s = max(self._clock() - self._start_s, 1e-9)
        rate = self.done / elapsed_s
        percent = 100 * self.done // max(self.total, 1)
        line = f"{self.label}: {self.done_text()} ({percent} %), {self.rate_text(rate)}"
        if self.done < self.total and rate:
            line += f", {_duration((self.total - self.done) / rate)} left"
        else:
            line += f", took {_duration(elapsed_s)}"
        print(line, file=self._stream, flush=True)

    def _new_bar(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), *self.columns, TimeRemainingColumn())
        bar = Progress(*columns, console=Console(file=self._stream, markup=False, emoji=False))
        bar.add_task(self.label, total=self.total)
        return bar


class ByteProgress(_Progress):
    """Progress of a read: total and advance(n) are bytes."""

    columns = (DownloadColumn(), TransferSpeedColumn())

    def done_text(self) -> str:
        return f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB"

    def rate_text(self, per_s: float) -> str:
        return f"{per_s / 1e9:.2f} GB/s"


class _RowRateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        elapsed_s = task.finished_time or task.elapsed  # rich's own speed needs two steps; a short prompt has one
        return Text(f"{task.completed / elapsed_s if elapsed_s else 0:,.1f} rows/s")


class RowProgress(_Progress):
    """Progress of a prefill: total and advance(n) are query rows."""

    columns = (MofNCompleteColumn(), _RowRateColumn())

    def done_text(self) -> str:
        return f"{self.done:,} of {self.total:,} rows"

    def rate_text(self, per_s: float) -> str:
        return f"{per_s:,.1f} rows/s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
