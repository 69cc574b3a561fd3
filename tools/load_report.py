"""What a measurement leaves behind: a JSON object with all that is needed to repeat it, and a table for people."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from rocline.tools.checkout import commit
from rocline.tools.files import read_text
from rocline.tools.load_client import InputError
from rocline.tools.load_protocols import AnotherHash

FORMAT = 1  # of the JSON object; another number: fields have changed their meaning


class Figure(NamedTuple):
    title: str
    shape: str


FIGURES = {
    "ttft_s": Figure("TTFT s", ",.3f"),
    "prefill_tokens_per_s": Figure("prefill token/s", ",.2f"),
    "decode_tokens_per_s": Figure("decode token/s", ",.2f"),
    "tokens_per_s": Figure("token/s", ",.2f"),
    "output_tokens_per_s": Figure("output token/s of all", ",.2f"),
    "window_s": Figure("window s", ",.3f"),
    "accept_length": Figure("accept length", ".2f"),
    "inter_token_s": Figure("between tokens s", ",.4f"),
    "total_s": Figure("total s", ",.3f"),
}


def environment() -> dict[str, Any]:
    """The machine of the client, which is the server's only where one runs on the other."""
    return {
        "rocline": version("rocline"),
        "commit": commit(),
        "python": platform.python_version(),
        "aiohttp": version("aiohttp"),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def only_hashes(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs without figures: how fast a wrong answer came is nobody's business."""
    kept = ("run", "request", "started", "failed", "output_sha256", "hash_of")
    return [{name: run[name] for name in kept if name in run} for run in runs]


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Runs and their spread, or percentiles over requests; then what is no result, and warnings."""
    if report["protocol"] == "serve":
        _print_requests(console, report["result"])
    else:
        console.print(_runs(report))
    best = [run["best_range_tokens_per_s"] for run in report["runs"] if "best_range_tokens_per_s" in run]
    if best:
        console.print(f"No result: the best quarter of a window, {max(best):,.2f} token/s")
    if report["output_sha256"]:
        console.print(f"Hash of the output {report['hash_of']}: {report['output_sha256']}", soft_wrap=True)
    for words in report["warnings"]:
        console.print(f"Warning: {words}", soft_wrap=True)


def _runs(report: dict[str, Any]) -> Table:
    runs, result = report["runs"], report["result"]
    names = [name for name in FIGURES if any(run.get(name) is not None for run in runs)]
    table = _table("run", *(FIGURES[name].title for name in names))
    for run in runs:
        table.add_row(str(run["run"]), *(_shown(name, run.get(name)) for name in names))
    for kind in ("mean", "median") if len(runs) > 2 else ("mean",) if len(runs) > 1 else ():
        table.add_row(kind, *(_shown(name, result.get(name, {}).get(kind)) for name in names))
    return table


def _print_requests(console: Console, result: dict[str, Any]) -> None:
    rows = [name for name in FIGURES if isinstance(result.get(name), dict)]
    kinds = ("mean", "p50", "p90", "p99")
    table = _table("", *kinds)
    for name in rows:
        table.add_row(FIGURES[name].title, *(_shown(name, result[name][kind]) for kind in kinds))
    console.print(table)
    failed = sum(result["failures"].values())
    rate = _shown("output_tokens_per_s", result.get("output_tokens_per_s"))
    told = f"{result['answered']:,} answered, {failed:,} failed, {result['refusals']:,} times 429"
    console.print(told + (f"; {rate} output token/s of all" if rate else ""), soft_wrap=True)


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2))
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _shown(name: str, value: float | None) -> str:
    return "" if value is None else format(value, FIGURES[name].shape)


def load_report(path: str) -> dict[str, Any]:
    """Raises FileError, and InputError for a file that is not a whole measurement's."""
    try:
        report = json.loads(read_text(path))
    except json.JSONDecodeError:
        report = None
    if not isinstance(report, dict) or report.get("rocline_bench") != FORMAT:
        raise InputError(f"{path}: not a report of rocline bench; name a file with what a measurement wrote to stdout")
    if report["error"] is not None:
        raise InputError(f"{path}: not a whole measurement: {report['error']}")
    return report


def compare(paths: tuple[str, str]) -> dict[str, Any]:
    """Each figure's mean in both, and the second over the first.

    Raises InputError for measurements of different work, AnotherHash for different answers.
    """
    first, second = (load_report(path) for path in paths)
    works = [{"protocol": report["protocol"]} | report["config"] | {"runs": None} for report in (first, second)]
    if differing := [name for name in works[0] | works[1] if works[0].get(name) != works[1].get(name)]:
        told = ", ".join(f"{name} {works[0].get(name)} and {works[1].get(name)}" for name in differing)
        raise InputError(f"not the same work: {told}")
    if first["hash_of"] != second["hash_of"]:
        raise InputError(f"hashes of {first['hash_of']} and of {second['hash_of']} say nothing about each other")
    for path, report in zip(paths, (first, second), strict=True):
        if report["output_sha256"] is None:
            raise AnotherHash(f"{path} has no one hash: its runs were not answered the same")
    if first["output_sha256"] != second["output_sha256"]:
        raise AnotherHash(f"another output: {first['output_sha256']} and {second['output_sha256']}")
    figures = {}
    for name in FIGURES:
        if name in first["result"] and name in second["result"]:
            means = [_mean(report["result"][name]) for report in (first, second)]
            figures[name] = {"first": means[0], "second": means[1], "ratio": means[1] / means[0]}
    return {"output_sha256": first["output_sha256"], "hash_of": first["hash_of"], "figures": figures}


def _mean(figure: dict[str, float] | float) -> float:
    return figure["mean"] if isinstance(figure, dict) else figure


def print_comparison(console: Console, comparison: dict[str, Any]) -> None:
    table = _table("mean", "first", "second", "second / first")
    for name, figure in comparison["figures"].items():
        values = (_shown(name, figure["first"]), _shown(name, figure["second"]), f"{figure['ratio']:.3f}")
        table.add_row(FIGURES[name].title, *values)
    console.print(table)
