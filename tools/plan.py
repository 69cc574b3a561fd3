"""`rocline plan`: which card runs which layers, what fills its memory, what loading takes, what speed is expected."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from rocline.engine.config import ConfigError, ModelConfig
from rocline.engine.model import CHUNK_ROWS
from rocline.engine.release import release_config
from rocline.pipeline.costs import Rates
from rocline.pipeline.forecast import (
    DECODE_HISTORY,
    FORECAST_FLOPS,
    PUBLISHED,
    TOLERANCE,
    decode_rate,
    prefill,
    prefill_rate,
    published_runs,
    reproduces_published,
    stage_shares,
)
from rocline.pipeline.placement import CHOICE_RATES, MAX_STAGES, PlacedStage, PlacementError, PlacementKind
from rocline.pipeline.plan import GIB, HEADROOM_FLOOR_BYTES, KV_TOKENS, Drafts, Plan, Request, counted, make_plan
from rocline.tools.files import explained
from rocline.tools.flags import above_0, positive_int
from rocline.tools.picture import page
from rocline.tools.plan_load import Disk, host_lines, load_report, load_rows, measured, rate_line
from rocline.tools.plan_picture import draw

EXIT_INFEASIBLE, EXIT_WRONG_INPUT = 1, 2
DECODE_REQUESTS = (1, 8, 64)
MAX_GROUPS = 8


class FlagError(ValueError):
    """A flag's value that does not go with the model or the other flags."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        description="Place the layers on cards, count every card's memory, and forecast rates. Speeds of cards are "
        "modelled, none is measured. Exit status 0: the model fits, 1: it does not, and the message names a flag with "
        "which it does, 2: wrong input.",
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--model", type=Path, metavar="FOLDER", help="folder with the model's config.json; its weights are not read"
    )
    model.add_argument("--release", action="store_true", help="the released model; no file is needed")

    def option(flag: str, help_text: str, **how: Any) -> None:
        parser.add_argument(flag, help=f"{help_text} (default %(default)s)", **how)

    option(
        "--devices",
        "number of cards and memory of each, all alike. What is free counts: of a W7900's 48 GiB about 45 with ECC on",
        type=_devices,
        default="8x48GiB",
        metavar="NxSGiB",
    )
    parser.add_argument("--stages", type=positive_int, metavar="N", help="pipeline stages (default: one a card)")
    parser.add_argument(
        "--context",
        type=positive_int,
        metavar="N",
        help="tokens of the longest request, prompt and output (default: the model's limit)",
    )
    option(
        "--kv-tokens", "tokens that all requests together may hold", type=positive_int, default=KV_TOKENS, metavar="N"
    )
    option("--chunk-rows", "prompt rows that run together", type=positive_int, default=CHUNK_ROWS, metavar="N")
    option(
        "--placement",
        "how layers are cut: encoder and decoder layers on every card, or neighbours alone",
        choices=get_args(PlacementKind),
        default="folded",
    )
    option(
        "--drafts",
        "whether cards keep room for draft stages; auto: where there is room",
        choices=get_args(Drafts),
        default="auto",
    )
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument(
        "--disk-gib-s", type=above_0, metavar="X", help="GiB/s of the checkpoint's disk, for loading time"
    )
    rate.add_argument(
        "--measure-disk", action="store_true", help="measure that rate: read some of --model, past the cache"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the plan as a picture")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the picture with the tables below it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _devices(word: str) -> tuple[int, int]:
    """(cards, bytes of each) from 8x48GiB, or from several such with commas between, of one size."""
    found = [re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)GiB", part) for part in word.split(",")]
    groups = [(int(match[1]), float(match[2])) for match in found if match]
    if len(groups) < len(found):
        raise argparse.ArgumentTypeError(f"{word}: write it as 8x48GiB, cards times memory of each")
    n_devices, least_gib = sum(n for n, _ in groups), min(size_gib for _, size_gib in groups)
    if any(size_gib > least_gib for _, size_gib in groups):
        raise argparse.ArgumentTypeError(
            f"{word}: cards of different sizes; all are planned alike, so count each as the smallest: "
            f"{n_devices}x{least_gib:g}GiB"
        )
    return n_devices, round(least_gib * GIB)


def run(args: argparse.Namespace) -> int:
    try:
        config = release_config() if args.release else ModelConfig.load(args.model)
        _check_flags(args, config)
    except (ConfigError, FlagError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    try:
        found = make_plan(config, _request(args, config))
    except PlacementError as error:
        print(f"plan: {error}", file=sys.stderr)
        if args.json:
            why, _, advice = str(error).rpartition("; ")
            print(json.dumps({"fits": False, "why": why or advice, "advice": advice if why else None}, indent=2))
        return EXIT_INFEASIBLE
    report = plan_report(found, _disk(args))
    text = "\n".join(_text(found, report))
    try:
        if args.svg:
            args.svg.write_text(draw(report), encoding="utf-8")
        if args.html:
            args.html.write_text(page("rocline plan", draw(report), text), encoding="utf-8")
    except OSError as error:
        print(f"plan: {explained(error)}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    print(json.dumps(report, indent=2) if args.json else text)
    return 0


def _check_flags(args: argparse.Namespace, config: ModelConfig) -> None:
    """Raises FlagError for what no cards could do, however large."""
    n_devices, limit = args.devices[0], config.text_config.max_position_embeddings
    if args.measure_disk and not args.model:
        raise FlagError("--measure-disk reads a checkpoint: name its folder with --model")
    if n_devices > MAX_STAGES:
        raise FlagError(f"--devices: {n_devices} cards; must be 1 to {MAX_STAGES}, as every card has a stage")
    if args.stages and not n_devices <= args.stages <= MAX_STAGES:
        raise FlagError(f"--stages {args.stages}: must be {n_devices} to {MAX_STAGES}, one a card at least")
    if args.context and args.context > limit:
        raise FlagError(f"--context {args.context}: must be 1 to {limit}, the model's limit")


def _disk(args: argparse.Namespace) -> Disk | None:
    if args.measure_disk:
        return measured(args.model)
    return Disk(args.disk_gib_s * GIB, "given") if args.disk_gib_s else None


def _request(args: argparse.Namespace, config: ModelConfig) -> Request:
    n_devices, device_bytes = args.devices
    return Request(
        n_devices=n_devices,
        device_bytes=device_bytes,
        n_stages=args.stages or n_devices,
        kind=args.placement,
        context=args.context or config.text_config.max_position_embeddings,
        kv_tokens=args.kv_tokens,
        chunk_rows=args.chunk_rows,
        drafts=args.drafts,
    )


def plan_report(found: Plan, disk: Disk | None = None) -> dict[str, Any]:
    """Everything the command shows, as JSON-ready data. Bytes and tokens are counted; `modelled` holds what is not.

    disk  how fast the checkpoint is read, where that is known
    """
    request, placement = found.request, found.placement
    shares = stage_shares(found.model, placement, request.context, request.chunk_rows, CHOICE_RATES)
    stages = [
        {
            "stage": number,
            "device": stage.device,
            "visits": [{"layers": visit.layers, "kv_sides": sorted(visit.kv_sides)} for visit in stage.visits],
            "modelled": {"prefill_share": prefill_share, "decode_share": decode_share},
        }
        for number, (stage, prefill_share, decode_share) in enumerate(zip(placement.stages, *shares, strict=True))
    ]
    return {
        "fits": True,
        "layers": found.model.n_layers,
        "placement": placement.kind,
        "context": request.context,
        "kv_tokens": request.kv_tokens,
        "chunk_rows": request.chunk_rows,
        "drafts": request.drafts,
        "stages": stages,
        "devices": [
            {
                "capacity_bytes": memory.capacity,
                "weights_bytes": memory.weights,
                "kv_bytes": memory.kv,
                "kv_bytes_per_token": memory.kv_row_bytes,
                "prepared_bytes": memory.prepared,
                "prepared_bytes_per_token": memory.prepared_row_bytes,
                "graphs_bytes": memory.graphs,
                "arena_bytes": memory.arena,
                "runtime_bytes": memory.runtime,
                "headroom_bytes": memory.headroom,
            }
            for memory in found.memory
        ],
        "headroom_floor_bytes": HEADROOM_FLOOR_BYTES,
        "least_headroom_device": min(range(request.n_devices), key=lambda device: found.memory[device].headroom),
        "arena_trace": {"chunk_rows": request.chunk_rows, "at_positions": request.context},
        "load": load_report(found, disk),
        "modelled": _modelled(found),
    }


def _modelled(found: Plan) -> dict[str, Any]:
    busy_flops, runs = published_runs()
    published = [
        {
            "prompt_tokens": row.prompt_tokens,
            "published_tokens_per_s": row.measured_rate,
            "modelled_tokens_per_s": row.modelled_rate,
            "error": row.error,
        }
        for row in runs
    ]
    checked = {"published_busy_flops_per_s": busy_flops, "published": published}
    if not reproduces_published():
        return checked
    context = found.request.context
    prompts = [tokens for tokens, _ in PUBLISHED if tokens <= context] or [context]
    return checked | {
        "prefill": [_prefill(found, tokens, flops) for tokens in prompts for flops in FORECAST_FLOPS],
        "decode_history": min(DECODE_HISTORY, context),
        "decode_flops_per_s": CHOICE_RATES.flops_per_s,
        "decode": [_decode(found, n_requests) for n_requests in DECODE_REQUESTS],
    }


def _prefill(found: Plan, prompt_tokens: int, flops_per_s: float) -> dict[str, Any]:
    rates, chunk_rows = Rates(flops_per_s), found.request.chunk_rows
    line = prefill(found.model, found.placement, prompt_tokens, chunk_rows, rates)
    return {
        "prompt_tokens": prompt_tokens,
        "flops_per_s": flops_per_s,
        "tokens_per_s": prefill_rate(line, prompt_tokens),
        "seconds": line.total_s,
        "idle_share": line.bubble,
    }


def _decode(found: Plan, n_requests: int) -> dict[str, Any]:
    history = min(DECODE_HISTORY, found.request.context)
    rates = [
        decode_rate(found.model, found.placement, n_requests, n_groups, CHOICE_RATES, history)
        for n_groups in range(1, min(MAX_GROUPS, n_requests) + 1)
    ]
    return {"requests": n_requests, "tokens_per_s_by_groups": rates}


def _text(found: Plan, report: dict[str, Any]) -> Iterable[str]:
    request = found.request
    yield (
        f"{found.model.n_layers} layers, {request.kind}, over {counted(request.n_stages, 'stage')} on "
        f"{counted(request.n_devices, 'device')} of {request.device_bytes / GIB:g} GiB. Chunk {request.chunk_rows:,} "
        f"rows, context {request.context:,}, admitted tokens {request.kv_tokens:,}, drafts {request.drafts}."
    )
    yield from _stage_lines(found, report)
    yield from memory_lines(found)
    yield (
        f"Arenas: the smallest slab for what kernels take in chunks of {request.chunk_rows:,} rows at the end of "
        f"{request.context:,} positions, traced on paper."
    )
    yield from _load_lines(report)
    yield from _published_lines(report["modelled"])
    if "prefill" in report["modelled"]:
        yield from _forecast_lines(report["modelled"])
    else:
        yield f"No forecast: the cost model is more than {TOLERANCE:.0%} away from the published run."
    yield _verdict(report)


def _stage_lines(found: Plan, report: dict[str, Any]) -> Iterable[str]:
    rows: list[Sequence[str]] = [("stage", "device", "visit 1", "visit 2", "prefill share", "decode share")]
    for stage, placed in zip(report["stages"], found.placement.stages, strict=True):
        visits = _visits(placed)
        shares = [f"{stage['modelled'][part]:.1%}" for part in ("prefill_share", "decode_share")]
        rows.append((str(stage["stage"]), str(stage["device"]), *visits, *shares))
    yield "\nStages. Shares of all stages' work are modelled: of a halo prefill of the whole context, of a decoded row."
    yield from _table(rows)


def _visits(placed: PlacedStage) -> tuple[str, str]:
    words = []
    for visit in placed.visits:
        first, last = visit.layers[0], visit.layers[-1]
        early = sorted(visit.kv_sides - set(visit.layers))
        words.append((f"{first}-{last}" if last > first else f"{first}") + "".join(f" + kv {side}" for side in early))
    return words[0], words[1] if len(words) > 1 else "-"


def memory_lines(found: Plan) -> Iterable[str]:
    """A table of what each device's memory is for."""
    parts = ("weights", "kv", "prepared", "graphs", "arena", "runtime", "headroom")
    rows: list[Sequence[str]] = [("device", *parts, "kv B/token", "prepared B/token")]
    for device, memory in enumerate(found.memory):
        sizes = [f"{getattr(memory, part) / GIB:.2f}" for part in parts]
        rows.append((str(device), *sizes, f"{memory.kv_row_bytes:g}", f"{memory.prepared_row_bytes:g}"))
    sums = [f"{sum(getattr(memory, part) for memory in found.memory) / GIB:.2f}" for part in parts]
    per_token = [sum(memory.kv_row_bytes for memory in found.memory)]
    per_token.append(sum(memory.prepared_row_bytes for memory in found.memory))
    rows.append(("sum", *sums, *(f"{total:g}" for total in per_token)))
    yield "\nMemory in GiB. Weights, kv and prepared keys are counted, graphs and arena from shapes, runtime assumed."
    yield from _table(rows)


def _load_lines(report: dict[str, Any]) -> Iterable[str]:
    load = report["load"]
    yield "\nLoading, in GiB of the checkpoint" + (", without the draft stages." if report["drafts"] == "on" else ".")
    yield from _table(load_rows(load))
    yield rate_line(load)
    yield from host_lines(load)


def _verdict(report: dict[str, Any]) -> str:
    device = report["least_headroom_device"]
    least, floor = report["devices"][device]["headroom_bytes"], report["headroom_floor_bytes"]
    return f"\nFits: device {device} has the least headroom, {least / GIB:.2f} GiB, and {floor / GIB:.2f} are wanted."


def _published_lines(modelled: dict[str, Any]) -> Iterable[str]:
    busy = modelled["published_busy_flops_per_s"] / 1e12
    yield (
        "\nThe cost model against the published engine (eight W7900D, contiguous, all layers, 7.1 TFLOP/s a card on "
        f"average, {busy:.1f} while busy). The first row fixes that rate, the second is predicted."
    )
    rows: list[Sequence[str]] = [("prompt tokens", "published token/s", "modelled", "error")]
    for row in modelled["published"]:
        rates = (f"{row['published_tokens_per_s']:,.1f}", f"{row['modelled_tokens_per_s']:,.1f}")
        rows.append((f"{row['prompt_tokens']:,}", *rates, f"{row['error']:+.1%}"))
    yield from _table(rows)


def _forecast_lines(modelled: dict[str, Any]) -> Iterable[str]:
    yield "\nForecast, modelled and not measured: cold halo prefill, token/s (idle), at TFLOP/s of a busy card."
    rows: list[Sequence[str]] = [("prompt tokens", *(f"{flops / 1e12:g}" for flops in FORECAST_FLOPS))]
    for tokens in dict.fromkeys(row["prompt_tokens"] for row in modelled["prefill"]):
        cells = [row for row in modelled["prefill"] if row["prompt_tokens"] == tokens]
        rows.append((f"{tokens:,}", *(f"{row['tokens_per_s']:,.0f} ({row['idle_share']:.0%})" for row in cells)))
    yield from _table(rows)
    yield (
        f"\nForecast, modelled and not measured: decode, token/s of all requests by groups in flight, without drafts, "
        f"{modelled['decode_history']:,} positions each, {modelled['decode_flops_per_s'] / 1e12:g} TFLOP/s."
    )
    rows = [("requests", *(f"G={groups}" for groups in range(1, MAX_GROUPS + 1)))]
    for row in modelled["decode"]:
        rates = [f"{rate:,.1f}" for rate in row["tokens_per_s_by_groups"]]
        rows.append((str(row["requests"]), *rates, *["-"] * (MAX_GROUPS - len(rates))))
    yield from _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)) for row in rows]
