"""What is computed from measured moments: windows that several streams share, and spreads."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rocline.tools.load_answer import LoadError, Mark

BEST_SHARE = 0.25  # of a window's tokens: the stretch that is shown as its best


@dataclass(frozen=True)
class Window:
    """The time in which every stream was decoding.

    start_s, stop_s  time.perf_counter()
    arrivals         (moment, new tokens) of every stream's events in it, ascending; none at start_s itself
    """

    start_s: float
    stop_s: float
    arrivals: Sequence[tuple[float, float]]

    @property
    def n_tokens(self) -> float:
        return sum(n_new for _, n_new in self.arrivals)

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / (self.stop_s - self.start_s)

    @property
    def best_tokens_per_s(self) -> float:
        """Of the shortest stretch between two events that brings a quarter of the tokens: luck, no result."""
        moments = [self.start_s, *(at_s for at_s, _ in self.arrivals)]
        sums = [0.0, *itertools.accumulate(n_new for _, n_new in self.arrivals)]
        best, stop = 0.0, 0
        for start, n_before in enumerate(sums):
            while stop < len(sums) and sums[stop] - n_before < BEST_SHARE * self.n_tokens:
                stop += 1
            if stop < len(sums) and moments[stop] > moments[start]:
                best = max(best, (sums[stop] - n_before) / (moments[stop] - moments[start]))
        return best


def common_window(streams: Sequence[Sequence[Mark]]) -> Window:
    """From the moment the last stream has its first token to the moment the first one has its last token.

    Raises LoadError if there is no such time.
    """
    start_s = max(marks[0].at_s for marks in streams)
    stop_s = min(marks[-1].at_s for marks in streams)
    if stop_s <= start_s:
        raise LoadError("no moment at which all streams were decoding; send fewer streams, or ask for more tokens")
    arrivals = [
        (after.at_s, after.n_tokens - before.n_tokens)
        for marks in streams
        for before, after in itertools.pairwise(marks)
        if start_s < after.at_s <= stop_s
    ]
    return Window(start_s, stop_s, sorted(arrivals))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Of a few runs."""
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Of many requests, between neighbours where they fall between two."""
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {"mean": statistics.fmean(values), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
