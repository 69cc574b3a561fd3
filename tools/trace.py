"""`rocline trace`: what the stages take from their arenas, as CSV files: record them, replay them, draw them."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from rocline.arena.replay import ReplayReport, peaks, plan, replay
from rocline.arena.report import report_html
from rocline.arena.spans import MIB, ArenaFull, ArenaMisuse
from rocline.arena.trace import TraceError, TraceEvent, read_csv, write_csv
from rocline.engine.config import ConfigError, ModelConfig
from rocline.engine.home import DeviceKind
from rocline.engine.model import split_layers
from rocline.engine.release import release_config
from rocline.engine.shapes import prefill_traces
from rocline.tools.files import explained
from rocline.tools.flags import positive_int
from rocline.tools.trace_timeline import add_timeline

EXIT_FAILED, EXIT_WRONG_INPUT = 1, 2
CHUNK_ROWS = (256, 512, 1024, 2048)
COUNTERS = ("splits", "merges", "reuses", "recuts", "fuses")  # of Stats, in the words of `replay`


class FlagError(ValueError):
    """A flag's value that does not go with the model or the other flags."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("trace", description="Record, replay and draw what stages take from their arenas.")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_record(actions)
    one = actions.add_parser(
        "replay",
        help="replay a trace on a slab, in numbers",
        description="Replay a trace on a slab. Exit status 0: every take found room, 1: one or more did not, 2: wrong "
        "input.",
    )
    one.set_defaults(action=replay_trace)
    one.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    _add_trace(one)
    one = actions.add_parser(
        "report",
        help="draw the replay of a trace as one HTML page",
        description="Draw the replay of a trace as one HTML page. Exit status as of `replay`.",
    )
    one.set_defaults(action=draw_trace)
    one.add_argument("--out", type=Path, required=True, metavar="F.html", help="the page to write")
    _add_trace(one)
    add_timeline(actions)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace, or a replay log of RMM")
    parser.add_argument(
        "--slab-bytes", type=int, metavar="N", help="bytes of the slab (default: the fewest that will do)"
    )


def _add_record(actions: Any) -> None:
    parser = actions.add_parser(
        "record",
        help="write the traces of a prompt's prefill, from shapes alone",
        description="Write one trace per stage and chunk size: the end of a prompt's prefill, from shapes alone, "
        "without weights or arithmetic. Time counts events.",
    )
    parser.set_defaults(action=record_traces)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--release", action="store_true", help="take the release's sizes; no file is needed")
    model.add_argument("--model", type=Path, metavar="FOLDER", help="take the sizes of this folder's config.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the files go; made if absent")
    parser.add_argument(
        "--device",
        choices=get_args(DeviceKind),
        default="hip",
        help="whose temporaries: the kernels', or cpu, the torch references' (default %(default)s)",
    )

    def count(flag: str, default: int | tuple[int, ...], help_text: str, **how: Any) -> None:
        told = " ".join(map(str, default)) if isinstance(default, tuple) else default
        help_text += f" (default {told})"
        parser.add_argument(flag, type=positive_int, default=default, metavar="N", help=help_text, **how)

    count("--chunk-rows", CHUNK_ROWS, "prompt rows run together: one size or more", nargs="+")
    count("--stages", 8, "stages that share the layers")
    count("--prompt-tokens", 32768, "length of the prompt, in tokens")
    count("--chunks", 3, "how many chunks are recorded, the prompt's last ones")


def run(args: argparse.Namespace) -> int:
    try:
        return args.action(args)
    except OSError as error:
        print(f"trace: {explained(error)}", file=sys.stderr)
    except (FlagError, ConfigError, TraceError, ArenaMisuse, ArenaFull) as error:
        print(f"trace: {error}", file=sys.stderr)
    return EXIT_WRONG_INPUT


def record_traces(args: argparse.Namespace) -> int:
    """Write the traces; the files' names go to stdout."""
    config = release_config() if args.release else ModelConfig.load(args.model)
    text = config.text_config
    if args.stages > text.num_hidden_layers:
        raise FlagError(f"--stages {args.stages}: the model has {text.num_hidden_layers} layers")
    if args.prompt_tokens > text.max_position_embeddings:
        raise FlagError(f"--prompt-tokens {args.prompt_tokens}: the context is {text.max_position_embeddings}")
    for chunk_rows in args.chunk_rows:
        if (n_chunks := -(-args.prompt_tokens // chunk_rows)) < args.chunks:
            raise FlagError(
                f"--chunks {args.chunks}: {args.prompt_tokens} tokens are {n_chunks} chunks of {chunk_rows}; "
                "raise --prompt-tokens or lower --chunk-rows"
            )
    stages = split_layers(config, args.stages, early_kv_side=True)
    args.out.mkdir(parents=True, exist_ok=True)
    for chunk_rows in args.chunk_rows:
        began_s = time.monotonic()
        traces = prefill_traces(config, stages, args.prompt_tokens, chunk_rows, args.chunks, args.device)
        for stage, events in enumerate(traces):
            path = args.out / f"{args.device}-shapes-chunk{chunk_rows}-stage{stage}.csv"
            with path.open("w", encoding="utf-8") as out:
                # One thread runs them all; its number is another in every process.
                write_csv((replace(event, thread=0) for event in events), out)
            print(path, flush=True)
        n_events, took_s = sum(map(len, traces)), time.monotonic() - began_s
        print(f"trace: chunk_rows {chunk_rows}: {n_events:,} events in {took_s:.1f} s", file=sys.stderr)
    return 0


def replay_trace(args: argparse.Namespace) -> int:
    """Print what the slab went through. EXIT_FAILED when a request could not be served."""
    events = _events(args.file)
    report = replay(events, _slab_bytes(args, events))
    figures = _figures(args.file, report, events)
    if args.json:
        print(json.dumps(figures))
    else:
        width = max(map(len, figures))
        print(*(f"{name:{width}}  {_shown(value)}" for name, value in figures.items()), sep="\n")
    return _verdict(report)


def draw_trace(args: argparse.Namespace) -> int:
    """Write the picture. EXIT_FAILED when a request could not be served; the page shows the others."""
    events = _events(args.file)
    report = replay(events, _slab_bytes(args, events), picture=True)
    if report.placements:
        title = f"{args.file.name} on {report.slab_bytes / MIB:,.1f} MiB"
        args.out.write_text(report_html(report, title), encoding="utf-8")
        print(f"trace: {args.out} shows {len(report.placements):,} spans", file=sys.stderr)
    return _verdict(report)


def _events(path: Path) -> list[TraceEvent]:
    """Raises TraceError for what is no trace, or one that takes nothing."""
    try:
        events = read_csv(path)
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: no trace: not UTF-8") from error
    except csv.Error as error:
        raise TraceError(f"{path}: no trace: {error}") from error
    if not any(event.action == "take" for event in events):
        raise TraceError(f"{path}: takes nothing; record a trace that does")
    return events


def _slab_bytes(args: argparse.Namespace, events: Sequence[TraceEvent]) -> int:
    return plan(events).slab_bytes if args.slab_bytes is None else args.slab_bytes


def _figures(path: Path, report: ReplayReport, events: Sequence[TraceEvent]) -> dict[str, Any]:
    """A replay in numbers. The peaks are the trace's own: the most bytes at once, placed perfectly."""
    peak_used_bytes, peak_bytes = peaks(events)
    left_out = ("stats", "placements", "largest_free")
    stats = asdict(report.stats)
    return {
        "trace": str(path),
        **{name: value for name, value in asdict(report).items() if name not in left_out},
        "peak_used_bytes": peak_used_bytes,
        "slab_to_peak_used_pending": report.slab_bytes / peak_bytes,
        "slab_to_peak_used": report.slab_bytes / peak_used_bytes,
        **{name: stats[name] for name in COUNTERS},
    }


def _shown(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else str(value) or "none"


def _verdict(report: ReplayReport) -> int:
    if not report.failures:
        return 0
    print(
        f"trace: {report.failures:,} of {report.n_takes:,} takes found no room in {report.slab_bytes:,} bytes; "
        f"the first: {report.first_failure}",
        file=sys.stderr,
    )
    return EXIT_FAILED
