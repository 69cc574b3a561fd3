"""python -m rocline.tools.bench_arena TRACE...: the arena beside torch's allocators, and RMM's benchmark shapes.

Every ratio is of one run. Times are of single calls from Python, the clock's own 0.1 us in each.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from math import log2
from pathlib import Path
from statistics import linear_regression, mean, median
from threading import Barrier
from typing import Any, NamedTuple

import torch

from rocline.arena.arena import SPARE_PART, Arena
from rocline.arena.completions import Completion, LatestWork, Stream
from rocline.arena.replay import plan
from rocline.arena.scope import Scope
from rocline.arena.spans import ArenaFull, Span
from rocline.arena.trace import TraceError, TraceEvent, read_csv
from rocline.engine import scratch
from rocline.engine.scratch import StageMemory

FREE_SPANS = (16, 64, 256, 1024, 4096)
OWNER_STREAMS = (1, 2, 4, 8, 16, 32, 64, 128)
SLAB_BYTES = 1 << 30  # of RMM's shapes: offsets only
LEAST_BYTES, MOST_BYTES = 16 << 10, 32 << 10  # of free spans: the more there are, the fuller their size classes
OUTSTANDING = 256  # releases until a piece of work has finished

Trace = tuple[str, Sequence[TraceEvent], int]  # name, events, planned slab_bytes
Tell = Callable[..., None]
clock = time.perf_counter_ns


# A tensor and back


class Block(NamedTuple):
    """A part of a trace as a stage runs it: takes, then everything that goes before the next take.

    outer  (span, bytes) taken in the chunk's scope;  inner  in the scope of a layer
    dies   spans of the layer that end with its scope;  kept  those that do not
    freed  spans of the chunk's scope that go;  last  nothing is lent after it: the chunk's scope ends
    """

    outer: list[tuple[int, int]]
    inner: list[tuple[int, int]]
    dies: list[int]
    kept: list[int]
    freed: list[int]
    last: bool


def blocks_of(events: Sequence[TraceEvent]) -> list[Block]:
    """A trace's blocks; what it never releases goes at its end. A chunk begins by copying its hand-off."""
    blocks: list[Block] = []
    live: set[int] = set()  # spans of the chunk's scope
    at = 0
    while at < len(events):
        outer: list[tuple[int, int]] = []
        inner: list[tuple[int, int]] = []
        gone: list[int] = []
        while at < len(events) and events[at].action == "take":
            copied = not live and not inner and events[at].operator == "copy"
            (outer if copied else inner).append((events[at].span, events[at].n_bytes))
            at += 1
        while at < len(events) and events[at].action == "release":
            gone.append(events[at].span)
            at += 1
        live.update(span for span, _ in (*outer, *inner))
        if at == len(events):
            gone += [span for span in live if span not in gone]
        live.difference_update(gone)
        own = [span for span, _ in inner]
        dies = [span for span in own if span not in live]
        freed = [span for span in gone if span not in dies]
        blocks.append(Block(outer, inner, dies, [span for span in own if span in live], freed, not live))
    return blocks


class TorchEmpty:
    """torch.empty, and del."""

    def __init__(self, slab_bytes: int, device: str) -> None:
        self.take: Callable[[int], Any] = lambda n_bytes: torch.empty(n_bytes, dtype=torch.uint8, device=device)

    def enter(self) -> None:
        """A scope begins."""

    def leave(self, kept: list[Any]) -> None:
        """A scope ends."""

    def free(self, freed: list[Any]) -> None:
        """These go before their scope ends."""


class ArenaAlone:
    """Spans of an arena's scopes."""

    def __init__(self, slab_bytes: int, device: str) -> None:
        self._arena = Arena(slab_bytes, LatestWork(recorded_event) if device == "cuda" else None)
        self._scopes: list[Scope] = []

    def take(self, n_bytes: int) -> Span:
        return self._scopes[-1].take(n_bytes)

    def enter(self) -> None:
        self._scopes.append(self._arena.scope().__enter__())

    def leave(self, kept: list[Span]) -> None:
        scope = self._scopes.pop()
        for span in kept:
            scope.keep(span)
        scope.__exit__(None, None, None)

    def free(self, freed: list[Span]) -> None:
        self._arena.release_together(freed, 0)


class Tensors:
    """Tensors of a stage's memory, as its operators ask for them."""

    take = staticmethod(scratch.u8)

    def __init__(self, memory: StageMemory) -> None:
        self.memory = memory
        self._scopes: list[AbstractContextManager[None]] = []

    def enter(self) -> None:
        self._scopes.append(self.memory.scope())
        self._scopes[-1].__enter__()

    def leave(self, kept: list[torch.Tensor]) -> None:
        if kept:
            self.memory.keep(kept)
        self._scopes.pop().__exit__(None, None, None)

    def free(self, freed: list[torch.Tensor]) -> None:
        self.memory.free(freed)


def stage_memory(slab_bytes: int, device: str) -> Tensors:
    slab_u8, record = None, None
    if device == "cuda":
        slab_u8, record = torch.empty(slab_bytes, dtype=torch.uint8, device=device), recorded_event
    return Tensors(StageMemory(slab_bytes, slab_u8=slab_u8, record_completion=record))


CONTENDERS = {
    "torch.empty and del": TorchEmpty,
    "arena: a span and back": ArenaAlone,
    "stage memory: a tensor and back": stage_memory,
}


def recorded_event(stream: Stream) -> Completion:
    """When what this thread's stream has queued so far is done. Nothing is queued here: only the event costs."""
    event = torch.cuda.Event()
    event.record()
    return event.query


def pair_times_ns(trace: Trace, contender: Any, device: str, repeats: int) -> list[int]:
    """For every span of a trace its take and its share of the scope that gives it back, `repeats` times over.

    A first time does not count.
    """
    _, events, slab_bytes = trace
    blocks, times = blocks_of(events), list[int]()
    lender = contender(slab_bytes + slab_bytes // (SPARE_PART - 1), device)
    with scratch.use(lender.memory) if isinstance(lender, Tensors) else nullcontext():
        for repeat in range(repeats + 1):
            took_ns = run_blocks(blocks, lender)
            times += took_ns.values() if repeat else ()
    return times


def run_blocks(blocks: Sequence[Block], lender: Any) -> dict[int, int]:
    """Every span's ns, once through a trace."""
    held: dict[int, Any] = {}
    took_ns: dict[int, int] = {}
    take, begins = lender.take, True

    def take_all(spans: Iterable[tuple[int, int]]) -> None:
        for span, n_bytes in spans:
            began = clock()
            held[span] = take(n_bytes)
            took_ns[span] = clock() - began

    for outer, inner, dies, kept, freed, last in blocks:
        scopes_ns = 0
        if begins:
            began = clock()
            lender.enter()
            scopes_ns = clock() - began
        take_all(outer)
        began = clock()
        lender.enter()
        scopes_ns += clock() - began
        take_all(inner)
        began = clock()
        lender.leave([held[span] for span in kept])
        for span in dies:
            del held[span]
        if freed:
            lender.free([held.pop(span) for span in freed])
        if last:
            lender.leave([])
        scopes_ns += clock() - began
        for span in (*dies, *freed):
            took_ns[span] += scopes_ns // (len(dies) + len(freed))
        begins = last
    return took_ns


def bench_pairs(traces: Sequence[Trace], device: str, repeats: int, tell: Tell) -> None:
    """Each contender with 1 thread that runs every trace, and 8 that share them out, each with its own memory."""
    for n_threads in (1, 8):
        torch_us: tuple[float, float] | None = None
        parts = [traces[number::n_threads] for number in range(n_threads)]
        for name, contender in CONTENDERS.items():
            begin = Barrier(n_threads)

            def work(part: Sequence[Trace], contender: Any = contender, begin: Barrier = begin) -> list[int]:
                begin.wait()
                return [ns for trace in part for ns in pair_times_ns(trace, contender, device, repeats)]

            with ThreadPoolExecutor(n_threads) as pool:
                times = sorted(chain.from_iterable(pool.map(work, parts)))
            median_us, p99_us, mean_us = (
                times[len(times) // 2] / 1e3,
                times[len(times) * 99 // 100] / 1e3,
                mean(times) / 1e3,
            )
            torch_us = torch_us or (median_us, mean_us)
            facts = {"device": device, "threads": n_threads, "pairs": len(times)}
            took = {"median_us": median_us, "p99_us": p99_us, "mean_us": mean_us}
            tell(name, **facts, **took, to_torch=median_us / torch_us[0], mean_to_torch=mean_us / torch_us[1])


# RMM's shapes


def timed_us(call: Callable[[], object]) -> float:
    began = clock()
    call()
    return (clock() - began) / 1e3


def holed_arena(n_holes: int, rng: random.Random) -> Arena:
    """n_holes free spans of random size, a lent one between any two."""
    arena = Arena(SLAB_BYTES)
    pairs = [(arena.take(rng.randrange(LEAST_BYTES, MOST_BYTES)), arena.take(256)) for _ in range(n_holes)]
    for hole, _ in pairs:
        arena.release(hole)
    arena.trim()
    return arena


def fit_us(n_holes: int, rng: random.Random) -> float:
    """A take among n_holes free spans."""
    arena = holed_arena(n_holes, rng)
    times = []
    for _ in range(500):
        began = clock()
        span = arena.take(rng.randrange(LEAST_BYTES, MOST_BYTES))
        times.append((clock() - began) / 1e3)
        arena.release(span)
        arena.trim()  # so that the next one searches too
    return median(times)


def failed_lookup_us(n_holes: int, rng: random.Random) -> float:
    """A refusal, error text and all, with n_holes free spans that are all too small."""
    arena = holed_arena(n_holes, rng)
    arena.take(arena.largest_free_bytes())

    def refused() -> None:
        try:
            arena.take(MOST_BYTES + 1)
        except ArenaFull:
            return
        raise AssertionError("a hole is larger than any that was made")

    return median(timed_us(refused) for _ in range(500))


def owner_streams_us(n_streams: int, rng: random.Random) -> float:
    """Take and release by streams in turn, the work of the last OUTSTANDING releases unfinished."""
    n_released = 0

    def record(stream: Stream) -> Completion:
        due = n_released + OUTSTANDING
        return lambda: n_released >= due

    arena = Arena(SLAB_BYTES, record)
    times = []
    for turn in range(4000):
        want_bytes, stream = rng.randrange(LEAST_BYTES, MOST_BYTES), turn % n_streams
        times.append(timed_us(lambda want=want_bytes, on=stream: arena.release(arena.take(want, on))))  # type: ignore[misc]
        n_released += 1
    return median(times[1000:])


def recovery_us(n_spans: int, rng: random.Random) -> float:
    """For each of n_spans that crossed to another stream: from the end of their work to one take of everything."""
    times = []
    for _ in range(max(3, 2048 // n_spans)):
        finished = False
        arena = Arena(SLAB_BYTES, lambda stream: lambda: finished)  # noqa: B023  asked in this turn only
        spans: list[Span] = [arena.take(rng.randrange(LEAST_BYTES, MOST_BYTES), 0) for _ in range(n_spans)]
        for span in spans:
            arena.release(span, 1)
        finished = True
        times.append(timed_us(lambda: arena.take(SLAB_BYTES)) / n_spans)  # noqa: B023
    return median(times)


SHAPES = {
    "fit among free spans": (fit_us, FREE_SPANS),
    "failed lookup among free spans": (failed_lookup_us, FREE_SPANS),
    "take and release by owner streams": (owner_streams_us, OWNER_STREAMS),
    "recovery of cross-stream frees, each": (recovery_us, FREE_SPANS),
}


def bench_shapes(tell: Tell) -> None:
    """Median time for each number of spans or streams, and what doubling the number adds to it."""
    for name, (measure, counts) in SHAPES.items():
        rng = random.Random(1)
        times = [measure(n, rng) for n in counts]
        slope, _ = linear_regression([log2(n) for n in counts], times)
        tell(name, **{f"us_at_{n}": us for n, us in zip(counts, times, strict=True)}, us_per_doubling=slope)


# Memory


def bench_plans(traces: Sequence[Trace], device: str, tell: Tell) -> None:
    """Planned slab of each trace beside its peaks, and beside what torch's allocator reserves for it on a GPU."""
    for name, events, _ in traces:
        planned = plan(events)
        facts: dict[str, object] = {
            "slab_bytes": planned.slab_bytes,
            "to_peak_used_pending": planned.ratio,
            "to_peak_used": planned.ratio_used,
        }
        if device == "cuda":
            reserved_bytes = torch_reserved_bytes(events)
            facts |= {"torch_reserved_bytes": reserved_bytes, "to_torch": planned.slab_bytes / reserved_bytes}
        tell(f"plan of {name}", **facts)
    if device != "cuda":
        tell("torch's caching allocator on the same traces", not_measured="it needs --device gpu")


def torch_reserved_bytes(events: Sequence[TraceEvent]) -> int:
    """The most that torch's caching allocator reserves for a trace, on one stream and beginning with nothing."""
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    held: dict[int, torch.Tensor] = {}
    for event in events:
        if event.action == "take":
            held[event.span] = torch.empty(event.n_bytes, dtype=torch.uint8, device="cuda")
        else:
            del held[event.span]
    return torch.cuda.max_memory_reserved() - before_bytes


# The command


def main(argv: Sequence[str] | None = None) -> int:
    """Run all benchmarks: a table, or JSON lines, to stdout."""
    parser = argparse.ArgumentParser(prog="bench_arena", description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="a trace file, or a folder of them")
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), default="cpu", help="where tensors are (default %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="times that each trace runs (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    args = parser.parse_args(argv)
    device = "cuda" if args.device == "gpu" else "cpu"  # ROCm builds of torch call theirs cuda too
    if device == "cuda" and not torch.cuda.is_available():
        print("bench_arena: torch sees no GPU; install its build for this one, or leave --device out", file=sys.stderr)
        return 1
    try:
        traces = [_read(path) for given in args.traces for path in _files(given)]
    except OSError as error:
        print(f"bench_arena: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:  # no trace, or one that takes nothing
        print(f"bench_arena: {error}", file=sys.stderr)
        return 2

    def tell(what: str, **facts: object) -> None:
        facts = {name: round(fact, 3) if isinstance(fact, float) else fact for name, fact in facts.items()}
        rest = "  ".join(f"{name} {fact}" for name, fact in facts.items())
        print(json.dumps({"what": what, **facts}) if args.json else f"{what:46}  {rest}", flush=True)

    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    tell("torch", version=torch.__version__, device=where, python=sys.version.split()[0])
    bench_pairs(traces, device, args.repeats, tell)
    bench_shapes(tell)
    bench_plans(traces, device, tell)
    return 0


def _files(given: Path) -> list[Path]:
    if not given.is_dir():
        return [given]
    if files := sorted(given.glob("*.csv")):
        return files
    raise TraceError(f"{given}: no *.csv in it; name a folder of traces")


def _read(path: Path) -> Trace:
    events = sorted(read_csv(path), key=lambda event: event.time_ns)
    return path.stem, events, plan(events).slab_bytes


if __name__ == "__main__":
    sys.exit(main())
