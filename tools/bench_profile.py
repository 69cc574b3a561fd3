"""Time on the device by kernel, while an engine prefills or decodes: torch's profiler, and what it saw as lines."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch

from rocline.pipeline.engine import Engine
from rocline.pipeline.request import Phase
from rocline.pipeline.stream import Stream
from rocline.tools.bench_bounds import ONCE_A_LAYER, Bounds, Ceilings
from rocline.tools.bench_requests import LOOK_S, NoWindow, Requests, summary_of
from rocline.tools.load_protocols import Talk

DECODED_TOKENS = 32  # of each stream, under the profiler
MOST_OUTPUT_TOKENS = 1024
NAME_CHARS = 80
IDLE_SAID = 24
COPY = "Memcpy "  # what the profiler calls copies begins so


class Span(NamedTuple):
    """A kernel's or a copy's time on a device, in ns of any clock."""

    name: str
    device: int
    start_ns: int
    stop_ns: int


class Kernel(NamedTuple):
    ms: float
    launches: int


class Idle(NamedTuple):
    """Time in which a device had nothing to do, by what it had done and what it did next."""

    after: str
    before: str
    ms: float
    times: int


class Copies(NamedTuple):
    """Of one direction. hidden_ms: of that the time in which the same device computed too."""

    ms: float
    times: int
    hidden_ms: float


class Seen(NamedTuple):
    """
    kernels  by name, those with most time first
    wall_ms  from the first one's start to the last one's end
    busy_ms  of all devices together, what overlaps on one counted once
    idle     all of it, that with most time first
    copies   by name, which says their direction
    """

    kernels: dict[str, Kernel]
    wall_ms: float
    busy_ms: float
    idle: list[Idle]
    copies: dict[str, Copies]

    @property
    def launches(self) -> int:
        return sum(kernel.launches for kernel in self.kernels.values())


def seen(spans: Iterable[Span]) -> Seen:
    """Of all that ran while the profiler did."""
    ns, launches, busy_ns = defaultdict[str, int](int), defaultdict[str, int](int), 0
    gaps_ns = defaultdict[tuple[str, str], list[int]](list)
    ordered = sorted(spans, key=lambda span: (span.device, span.start_ns))
    for _, of_device in groupby(ordered, key=lambda span: span.device):
        done_ns, last = 0, ""
        for span in of_device:
            if last and span.start_ns > done_ns:
                gaps_ns[last, span.name].append(span.start_ns - done_ns)
            ns[span.name] += span.stop_ns - span.start_ns
            launches[span.name] += 1
            busy_ns += max(0, span.stop_ns - max(span.start_ns, done_ns))
            if span.stop_ns >= done_ns:
                done_ns, last = span.stop_ns, span.name
    names = sorted(ns, key=lambda name: -ns[name])
    wall_ns = max((s.stop_ns for s in ordered), default=0) - min((s.start_ns for s in ordered), default=0)
    kernels = {name: Kernel(ns[name] / 1e6, launches[name]) for name in names}
    idle = [Idle(*between, sum(gaps) / 1e6, len(gaps)) for between, gaps in gaps_ns.items()]
    return Seen(kernels, wall_ns / 1e6, busy_ns / 1e6, sorted(idle, key=lambda of: -of.ms), _copies(ordered))


def _copies(ordered: Sequence[Span]) -> dict[str, Copies]:
    """ordered: by device and start."""
    copies = defaultdict[str, list[tuple[int, int]]](list)  # ns, and hidden ones
    for _, of_device in groupby(ordered, key=lambda span: span.device):
        spans, computed = list(of_device), list[tuple[int, int]]()  # without gaps or overlaps
        for span in spans:
            if span.name.startswith(COPY):
                continue
            if computed and span.start_ns <= computed[-1][1]:
                computed[-1] = computed[-1][0], max(computed[-1][1], span.stop_ns)
            else:
                computed.append((span.start_ns, span.stop_ns))
        starts = [start_ns for start_ns, _ in computed]
        for name, _, start_ns, stop_ns in spans:
            if not name.startswith(COPY):
                continue
            meanwhile = computed[max(0, bisect_right(starts, start_ns) - 1) : bisect_right(starts, stop_ns)]
            hidden_ns = sum(max(0, min(stop_ns, stop) - max(start_ns, start)) for start, stop in meanwhile)
            copies[name].append((stop_ns - start_ns, hidden_ns))
    return {
        name: Copies(sum(ns for ns, _ in all_of) / 1e6, len(all_of), sum(ns for _, ns in all_of) / 1e6)
        for name, all_of in sorted(copies.items())
    }


@contextmanager
def profiled() -> Iterator[list[Span]]:
    """What the devices do meanwhile; the list has it afterwards. Nothing of the host is looked at."""
    spans: list[Span] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield spans
    events: Any = profiler.profiler.kineto_results.events()
    for event in events:
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            start_ns = event.start_ns()
            stop_ns = start_ns + event.duration_ns()
            spans.append(Span(event.name()[:NAME_CHARS], event.device_index(), start_ns, stop_ns))


class Profiles:
    """Of requests to one engine. ceilings: of its cards; say: gets the fields of each line."""

    def __init__(
        self, engine: Engine, requests: Requests, ceilings: Ceilings, say: Callable[..., None], talk: Talk
    ) -> None:
        self._engine, self._requests, self._ceilings = engine, requests, ceilings
        self._say, self._talk = say, talk
        with profiled():
            pass  # the first one loads what the later ones use

    def prefill(self, n_tokens: int) -> None:
        """A whole cold one. Raises EngineError."""
        with profiled() as spans:
            summary_of(self._requests.submit(f"prefill {n_tokens}", n_tokens, 1))
        options = self._engine.options
        bounds = Bounds(self._engine.config, self._ceilings)
        bounds.add_prefill(n_tokens, options.chunk_rows, options.prefill)
        self._tell(f"prefill of {n_tokens:,}", seen(spans), bounds)

    def decode(self, n_streams: int, n_context: int) -> None:
        """Some steps, when all streams decode. Raises EngineError, and NoWindow."""
        n_output = min(MOST_OUTPUT_TOKENS, self._engine.context - n_context)
        streams = self._requests.decoding(n_streams, n_context, n_output)
        try:
            self._wait(streams, lambda: all(stream.progress.phase is Phase.DECODE for stream in streams))
            for stream in streams:
                stream.poll()
            n_tokens = [0] * n_streams

            def have_enough() -> bool:
                for at, stream in enumerate(streams):
                    update = stream.poll()
                    n_tokens[at] += len(update.ids) if update else 0
                return min(n_tokens) >= DECODED_TOKENS

            with profiled() as spans:
                self._wait(streams, have_enough)
        finally:
            for stream in streams:
                stream.cancel()
        found, bounds = seen(spans), Bounds(self._engine.config, self._ceilings)
        once = found.kernels.get(ONCE_A_LAYER, Kernel(0.0, 0))
        n_steps = once.launches / self._engine.config.text_config.num_hidden_layers
        if n_steps:
            bounds.add_decode(self._requests.step_rows(n_streams), n_steps)
        self._tell(f"decode of {n_streams}, {n_context:,} tokens before", found, bounds, steps=round(n_steps, 2))

    def _wait(self, streams: Sequence[Stream], until: Callable[[], bool]) -> None:
        while not until():
            if any(stream.ended for stream in streams):
                for stream in streams:
                    if stream.error:
                        raise stream.error
                raise NoWindow(f"{len(streams)} streams did not decode long enough at the same time to be profiled")
            time.sleep(LOOK_S)

    def _tell(self, what: str, found: Seen, bounds: Bounds, **more: Any) -> None:
        """Lines, and the same as a table to people."""
        total_ms = sum(kernel.ms for kernel in found.kernels.values())
        figures = {"wall_ms": found.wall_ms, "busy_ms": found.busy_ms, "summed_ms": total_ms}
        self._say(line="profile", profile=what, **figures, launches=found.launches, **more)
        self._talk.say(f"{what}: wall {found.wall_ms:,.1f} ms, busy {found.busy_ms:,.1f}, {found.launches:,} launches")
        for name, (ms, launches) in found.kernels.items():
            share, mean_us = ms / total_ms, 1e3 * ms / launches
            self._say(line="kernel", profile=what, kernel=name, ms=ms, share=share, launches=launches, mean_us=mean_us)
            self._talk.say(f"{ms:10.2f} ms {share:6.1%} {launches:7d} x {mean_us:9.1f} us  {name}")
        for name, copies in found.copies.items():
            self._say(line="copies", profile=what, copies=name, **copies._asdict())
            self._talk.say(f"{copies.ms:10.2f} ms, {copies.hidden_ms:.2f} hidden  {copies.times:7d} x {name}")
        for idle in found.idle[:IDLE_SAID]:
            mean_us = 1e3 * idle.ms / idle.times
            self._say(line="idle", profile=what, **idle._asdict(), mean_us=mean_us)
            names = f"{idle.after} -> {idle.before}"
            self._talk.say(f"{idle.ms:10.2f} ms idle  {idle.times:7d} x {mean_us:9.1f} us  {names}")
        for fields in bounds.of({name: kernel.ms for name, kernel in found.kernels.items()}):
            self._say(line="bound", profile=what, **fields)
            self._talk.say(f"{fields['of_bound']:6.1%} of the bound by {fields['bound_by']}: {fields['what']}")
