"""Prometheus metrics: what requests met, counted as they end; the engine's own figures, read when asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rocline.http.job import Choice, Job
from rocline.pipeline.stats import MemoryStats, StageStats, State, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LONG_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
_STEP_S = (0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 5)
_RATES = (10, 25, 50, 100, 250, 500, 1000, 2000, 4000, 8000, 16000)
_ARENA = ("used_bytes", "pending_bytes", "free_bytes", "high_water_bytes", "largest_free_bytes", "slab_bytes")
_ARENA_COUNTS = ("takes", "reuses", "recuts", "splits", "merges", "waits", "refusals", "device_allocs")


class Metrics:
    """outcome is a finish reason, how the server ended a request, or "http_" and the status of one never begun."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineFigures(stats))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._requests = Counter(
            "rocline_requests", "Requests by route and outcome", ["route", "outcome"], registry=registry
        )
        self._prompt = Counter("rocline_prompt_tokens", "Prompt tokens of ended requests", registry=registry)
        self._cached = Counter("rocline_cached_tokens", "Prompt tokens that were not run again", registry=registry)
        self._wait = histogram("rocline_queue_wait_seconds", "Submit to admission", _LONG_S)
        self._ttft = histogram("rocline_ttft_seconds", "Arrival to the first text of the answer", _LONG_S)
        self._end = histogram("rocline_request_seconds", "Arrival to the end of the answer", _LONG_S)
        self._cold = histogram("rocline_cold_prefill_tokens_per_second", "Prompt tokens / TTFT, nothing cached", _RATES)
        self.step = histogram("rocline_inter_token_seconds", "Between texts of an answer", _STEP_S)

    def refused(self, route: str, status: int) -> None:
        """A request that never reached the engine."""
        self._requests.labels(route, f"http_{status}").inc()

    def ended(self, job: Job, choice: Choice, outcome: str) -> None:
        """One choice of a request."""
        self._requests.labels(job.route, outcome).inc()
        self._prompt.inc(choice.prompt_tokens)
        self._cached.inc(choice.cached_tokens)
        self._end.observe(time.monotonic() - job.arrived_s)
        summary = choice.stream.summary
        if summary and summary.admitted_s is not None:
            self._wait.observe(summary.admitted_s)
        if choice.first_text_s is not None:
            ttft_s = choice.first_text_s - job.arrived_s
            self._ttft.observe(ttft_s)
            if not choice.cached_tokens and ttft_s > 0:
                self._cold.observe(choice.prompt_tokens / ttft_s)

    def text(self) -> bytes:
        """Everything, in the text format 0.0.4."""
        return generate_latest(self._registry)


class _EngineFigures(Collector):
    """Reads the engine at scrape time, so nothing is kept up to date in between."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._stats = stats
        self._scraped: tuple[float, dict[int, float]] = (0.0, {})  # (uptime_s, busy_s by stage) last time

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield _gauge(
            "rocline_up", "1 while the engine takes requests", stats is not None and stats.state is State.READY
        )
        if stats is None:
            return
        phases = {"queued": stats.queued, "prefill": stats.prefilling, "decode": stats.decoding, "paused": stats.paused}
        yield _by("rocline_requests_now", "Requests by phase", "phase", phases)
        yield _gauge("rocline_running_limit", "Requests that may run at a time", stats.running_limit)
        yield _gauge("rocline_queue_limit", "Requests that may wait", stats.queue_limit)
        yield CounterMetricFamily("rocline_prompt_rows", "Rows through prefill", value=stats.prompt_rows)
        yield CounterMetricFamily("rocline_output_tokens", "Tokens chosen", value=stats.output_tokens)
        yield CounterMetricFamily("rocline_engram_wait_seconds", "Waits for Engram rows", value=stats.engram_wait_s)
        yield _gauge("rocline_kv_pages", "KV pages", stats.n_pages)
        yield _gauge("rocline_kv_pages_free", "KV pages that no request holds", stats.free_pages)
        yield from _memory(stats.memory)
        yield from self._stages(stats.stages, stats.uptime_s)

    def _stages(self, stages: tuple[StageStats, ...], uptime_s: float) -> Iterator[Metric]:
        busy_s = {stage.stage: stage.busy_s for stage in stages}
        yield _by(
            "rocline_stage_busy_seconds",
            "Time at work, of decode steps by every eighth",
            "stage",
            busy_s,
            CounterMetricFamily,
        )
        (then_s, before_s), self._scraped = self._scraped, (uptime_s, busy_s)
        ratio = {n: (busy - before_s.get(n, 0.0)) / max(uptime_s - then_s, 1e-9) for n, busy in busy_s.items()}
        yield _by("rocline_stage_busy_ratio", "Share of time at work since the last scrape", "stage", ratio)
        about = GaugeMetricFamily("rocline_stage", "Where a stage runs what", labels=["stage", "device", "layers"])
        for each in stages:
            about.add_metric([str(each.stage), str(each.device), ",".join(map(str, each.layers))], 1)
        yield about
        yield _by("rocline_stage_waiting", "Jobs at the door", "stage", {s.stage: s.waiting for s in stages})
        # Stages on one device share nothing, its arenas add up: the gauge of a device is their sum.
        devices = sorted({stage.device for stage in stages})

        def summed(name: str) -> dict[int, float]:
            return {d: sum(getattr(s.arena, name) for s in stages if s.device == d) for d in devices}

        for name in _ARENA:
            yield _by(f"rocline_arena_{name}", f"Arena: {name}", "device", summed(name))
        for name in _ARENA_COUNTS:
            yield _by(f"rocline_arena_{name}", f"Arena: {name}", "device", summed(name), CounterMetricFamily)


def _memory(memory: tuple[MemoryStats, ...]) -> Iterator[Metric]:
    """What cannot be read now is absent: its last figure would look as if all were well."""
    named = {"host" if each.device is None else str(each.device): each for each in memory}
    free = {name: each.free_bytes for name, each in named.items() if each.free_bytes is not None}
    least = {name: each.min_free_bytes for name, each in named.items() if each.min_free_bytes is not None}
    yield _by("rocline_headroom_bytes", "Free memory, whoever uses the rest", "device", free)
    yield _by("rocline_headroom_min_bytes", "The least of it since the start", "device", least)
    totals = {name: each.total_bytes for name, each in named.items()}
    yield _by("rocline_memory_bytes", "Memory", "device", totals)
    cards = GaugeMetricFamily("rocline_card", "Which card a device is", labels=["device", "pci_id"])
    for name, each in named.items():
        if each.pci_id:
            cards.add_metric([name, each.pci_id], 1)
    yield cards


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _by(name: str, text: str, label: str, values: dict[Any, Any], family: Any = GaugeMetricFamily) -> Metric:
    metric: Metric = family(name, text, labels=[label])
    for key, value in values.items():
        metric.add_metric([str(key)], value)  # type: ignore[attr-defined]
    return metric
