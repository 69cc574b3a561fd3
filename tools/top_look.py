"""One look at a running server, its /metrics and /server_info, and what two looks tell of the time between."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from rocline.tools.load_client import InputError
from rocline.tools.vram_server import ServerError, get

Samples = list[tuple[dict[str, str], float]]  # labels, value
PHASES = ("queued", "prefill", "decode", "paused")
RESTART_S = 2.0  # a start that seems so much later is another one; less is the clocks' and the network's
_ARENA = ("used", "high_water", "slab")
_MEMORY = {
    "free_bytes": "rocline_headroom_bytes",
    "min_free_bytes": "rocline_headroom_min_bytes",
    "total_bytes": "rocline_memory_bytes",
}


class _Info(msgspec.Struct):
    """Of /server_info, what is shown."""

    version: str
    state: str
    served_model_name: str
    uptime_s: float
    requests: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Look:
    """at_s, started_s: time.monotonic() of the metrics and of the server's start."""

    at_s: float
    started_s: float
    info: _Info
    metrics: Mapping[str, Samples]

    def total(self, name: str) -> float | None:
        """A metric without labels; None where there is none, as while the engine loads."""
        return next((value for _, value in self.metrics.get(name, ())), None)

    def by(self, label: str, name: str) -> dict[str, float]:
        return {labels[label]: value for labels, value in self.metrics.get(name, ())}

    def about(self, name: str) -> list[dict[str, str]]:
        """The labels of a metric that has nothing else to tell."""
        return [labels for labels, _ in self.metrics.get(name, ())]


def look(url: str, api_key: str | None) -> Look:
    """Raises ServerError if nobody answers, or only a proxy; InputError for a refused key or another kind of server."""
    try:
        text, at_s = get(url + "/metrics", api_key), time.monotonic()
        metrics = _metrics(text)
        info, now_s = msgspec.json.decode(get(url + "/server_info", api_key), type=_Info), time.monotonic()
    except ServerError as error:
        if error.status in (401, 403):
            raise InputError(f"{error}; give the server's key with --api-key-file") from error
        if error.status and error.status < 500:
            raise InputError(f"{url} is no rocline server: {error}") from error
        raise
    except (ValueError, msgspec.DecodeError) as error:
        raise InputError(f"{url} is no rocline server: {error}") from error
    return Look(at_s, now_s - info.uptime_s, info, metrics)


def _metrics(text: str) -> Mapping[str, Samples]:
    metrics: dict[str, Samples] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            metrics[sample.name].append((sample.labels, sample.value))
    if "rocline_up" not in metrics:
        raise ValueError("its /metrics has no rocline_up")
    return dict(metrics)


def figures(url: str, before: Look | None, now: Look) -> dict[str, Any]:
    """Everything that is shown, JSON-ready; None and empty lists for what the server does not tell.

    before  a look some time ago, of whatever server was there; without one of this server there are no rates
    """
    if before and _is_another(before, now):
        before = None
    interval_s = now.at_s - before.at_s if before else None
    uptime_s = max(now.info.uptime_s, 1e-9)

    def rate(name: str) -> float | None:
        then, total = before.total(name) if before else None, now.total(name)
        return None if then is None or total is None or not interval_s else (total - then) / interval_s

    def mean(name: str) -> float | None:
        total = now.total(name)
        return None if total is None else total / uptime_s

    phases = now.by("phase", "rocline_requests_now")
    return {
        "url": url,
        "state": now.info.state,
        "version": now.info.version,
        "model": now.info.served_model_name,
        "uptime_s": now.info.uptime_s,
        "interval_s": interval_s,
        "requests": {phase: int(phases[phase]) for phase in PHASES if phase in phases},
        "running_limit": _whole(now.total("rocline_running_limit")),
        "queue_limit": _whole(now.total("rocline_queue_limit")),
        "tokens_per_s": {"in": rate("rocline_prompt_rows_total"), "out": rate("rocline_output_tokens_total")},
        "tokens_per_s_since_start": {
            "in": mean("rocline_prompt_rows_total"),
            "out": mean("rocline_output_tokens_total"),
        },
        "pages": _whole(now.total("rocline_kv_pages")),
        "free_pages": _whole(now.total("rocline_kv_pages_free")),
        "prefills": _prefills(now),
        "stages": _stages(before, now, interval_s),
        "devices": _devices(now),
    }


def _is_another(before: Look, now: Look) -> bool:
    """Whether the server, or its engine, has started anew in between."""
    counters = ("rocline_prompt_rows_total", "rocline_output_tokens_total")
    fell = any((before.total(name) or 0) > (now.total(name) or 0) for name in counters)
    return fell or now.started_s > before.started_s + RESTART_S


def _prefills(now: Look) -> list[dict[str, Any]] | None:
    """Of requests that are at it; None where the server does not tell."""
    if now.info.requests is None:
        return None
    names = ("id", "rows_done", "rows_total", "eta_s")
    return [{name: each[name] for name in names} for each in now.info.requests if each["phase"] == "prefill"]


def _stages(before: Look | None, now: Look, interval_s: float | None) -> list[dict[str, Any]]:
    """busy_share: of the interval. A step counts when it ends, so that one longer than the interval shows late."""
    name = "rocline_stage_busy_seconds_total"
    then = before.by("stage", name) if before else {}
    waiting = now.by("stage", "rocline_stage_waiting")
    about = {labels["stage"]: labels for labels in now.about("rocline_stage")}
    stages = []
    for stage, busy_s in now.by("stage", name).items():
        share = (busy_s - then[stage]) / interval_s if stage in then and interval_s else None
        told = about.get(stage)
        stages.append(
            {
                "stage": int(stage),
                "device": told and told["device"],
                "layers": [int(layer) for layer in told["layers"].split(",")] if told else [],
                "busy_share": None if share is None else min(max(share, 0.0), 1.0),
                "waiting": _whole(waiting.get(stage)),
            }
        )
    return stages


def _devices(now: Look) -> list[dict[str, Any]]:
    """Arenas by device, all its stages' together, and memory by device, which without cards is the host's."""
    pci_ids = {labels["device"]: labels["pci_id"] for labels in now.about("rocline_card")}
    arenas = {part: now.by("device", f"rocline_arena_{part}_bytes") for part in _ARENA}
    memory = {part: now.by("device", name) for part, name in _MEMORY.items()}
    names = dict.fromkeys([*arenas["slab"], *memory["total_bytes"]])
    return [
        {
            "device": name,
            "pci_id": pci_ids.get(name),
            "arena": {f"{part}_bytes": _whole(arenas[part].get(name)) for part in _ARENA},
            **{part: _whole(memory[part].get(name)) for part in _MEMORY},
        }
        for name in names
    ]


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
