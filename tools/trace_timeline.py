"""`rocline trace timeline`: where the stages' time went, in numbers and as a picture."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rocline.pipeline.timeline import StageTime, TimelineError, all_stages, draw, idle_split, load
from rocline.tools.files import FileError, read_text

EXIT_WRONG_INPUT = 2


def add_timeline(actions: Any) -> None:
    parser = actions.add_parser(
        "timeline",
        help="split the stages' idle time, and draw what they did when",
        description="Split the stages' idle time, and draw what they did when. The shares go to stdout.",
    )
    parser.set_defaults(action=show_timeline)
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="a timeline, such as demo/timeline.csv of `rocline demo`; JSON if its name ends in .json, else CSV",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="F.svg", help="the picture to write")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in ns, instead of the table")


def show_timeline(args: argparse.Namespace) -> int:
    """Write the picture; the split of the time goes to stdout. Raises OSError."""
    try:
        read_text(args.file)  # in words: load() would quote the bytes
        intervals = load(args.file)
    except (FileError, TimelineError) as error:
        print(f"trace: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    split = idle_split(intervals)
    args.out.write_text(draw(intervals), encoding="utf-8")
    if args.json:
        figures = {"timeline": str(args.file), "total_ns": split[0].total, "stages": [asdict(time) for time in split]}
        print(json.dumps(figures))
    else:
        print("\n".join(_table(split)))
    print(f"trace: {args.out} shows {len(intervals):,} intervals", file=sys.stderr)
    return 0


def _table(split: Sequence[StageTime]) -> list[str]:
    total = all_stages(split)
    out = [f"{'stage':<6}" + "".join(f"{name:>11}" for name in total.shares())]
    for time in (*split, total):
        name = "all" if time is total else str(time.stage)
        out.append(f"{name:<6}" + "".join(f"{share:>11.1%}" for share in time.shares().values()))
    return out
