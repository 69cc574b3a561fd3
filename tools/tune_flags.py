"""The flags of `rocline tune`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from rocline.engine.home import DeviceKind
from rocline.tools.flags import positive_int
from rocline.tools.serve import CONFIG_FILE, SETTINGS

CHUNK_ROWS, ARENA_GIB = "256,512,1024,2048,4096", "2,3,4,5"
RESULTS_FILE = Path("rocline-tune.jsonl")
OF_CELLS = ("chunk_rows", "arena_gib")
NOT_SETTABLE = (*OF_CELLS, "model", "port", "drain_s")  # a server is started with these


def add_flags(parser: Any) -> None:
    """All of them, to a parser."""
    _add_grid(parser)
    _add_server(parser.add_argument_group("server", "Settings are as `rocline serve` has them, from wherever."))
    _add_rules(parser.add_argument_group("rules"))
    _add_files(parser.add_argument_group("files"))


def _add_grid(parser: Any) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="FOLDER", help="the checkpoint to serve; or synthetic:SEED")
    model.add_argument("--release", action="store_true", help="with --dry-run: the released model; no file is needed")

    def number(flag: str, text: str, kind: Callable[[str], Any], default: Any, metavar: str = "N") -> None:
        text += " (default %(default)s)"
        parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)

    parser.add_argument(
        "--prompt-tokens", type=positive_int, required=True, metavar="N", help="length of the request, of random ids"
    )
    number("--chunk-rows", "chunk sizes to try, in prompt rows", _list_of(int), CHUNK_ROWS, "N,N")
    number("--arena-gib", "sizes to try of each stage's arena, in GiB", _list_of(float), ARENA_GIB, "N,N")
    number("--output-tokens", "output tokens of the request; their hash must be one over all cells", positive_int, 16)
    number("--seed", "of the random ids", int, 42)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="start nothing: print what the memory plan and the cost model say of each cell",
    )


def _add_server(group: Any) -> None:
    group.add_argument("--device", choices=get_args(DeviceKind), help="where the layers run")
    group.add_argument("--devices", type=positive_int, metavar="N", help="cards that the stages are spread over")
    group.add_argument("--stages", type=positive_int, metavar="N", help="pipeline stages")
    help_text = "another setting, as in context=300000; may be repeated"
    group.add_argument("--set", action="append", default=[], type=_setting, metavar="NAME=VALUE", help=help_text)
    group.add_argument("--config", metavar="FILE", help=f"file of settings (default: {CONFIG_FILE}, if it is there)")


def _add_rules(group: Any) -> None:
    def number(flag: str, default: float, text: str, kind: Callable[[str], float] = _at_least_0) -> None:
        group.add_argument(flag, type=kind, default=default, metavar="N", help=text)

    number("--min-headroom-gib", 1.5, "GiB that every card must have free at any time (default %(default)g)")
    number(
        "--hopeless-factor",
        3.0,
        "end a cell whose TTFT will be more than N times the best so far (default %(default)g; 0: end none)",
        _factor,
    )
    number("--cell-timeout-s", 7200.0, "seconds for a cell and its server's start (default %(default)g)", _above_0)
    number("--card-gib", 48.0, "GiB of a card, for the forecast that orders the cells (default %(default)g)", _above_0)
    group.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        help="what `rocline trace record` wrote: replayed in each cell's arena, for the forecast",
    )
    group.add_argument(
        "--retry-failed", action="store_true", help="run cells of the results file again that are there without figures"
    )


def _add_files(group: Any) -> None:
    group.add_argument(
        "--results",
        type=Path,
        default=RESULTS_FILE,
        metavar="FILE",
        help="JSON lines, one a cell; cells that are there already are not run again (default %(default)s)",
    )
    group.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures, at the end")
    group.add_argument("--json", action="store_true", help="print one JSON object in place of CSV")
    group.add_argument(
        "--write",
        action="store_true",
        help=f"put the recommended chunk_rows and arena_gib into {CONFIG_FILE}, or --config's file, and leave the rest "
        "of it as it is",
    )


def _list_of(kind: type) -> Callable[[str], list[Any]]:
    what = "whole numbers" if kind is int else "numbers"

    def read(text: str) -> list[Any]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        if not words:
            raise argparse.ArgumentTypeError("is empty; name one size at least")
        try:
            values = [kind(word) for word in words]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: must be {what} with commas between, as in 2,3") from None
        if twice := [word for word, value in zip(words, values, strict=True) if values.count(value) > 1]:
            raise argparse.ArgumentTypeError(f"{text}: {twice[0]} is there twice")
        return values

    return read


def _at_least_0(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word}: must be a number") from None
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{word}: must be 0 or more")
    return value


def _above_0(word: str) -> float:
    if not (value := _at_least_0(word)):
        raise argparse.ArgumentTypeError(f"{word}: must be more than 0")
    return value


def _factor(word: str) -> float:
    if 0 < (value := _at_least_0(word)) < 1:
        raise argparse.ArgumentTypeError(f"{word}: must be 1 or more, or 0 for none")
    return value


def _setting(word: str) -> str:
    name, equals, _ = word.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{word}: write NAME=VALUE, as in context=300000")
    if name not in SETTINGS:
        raise argparse.ArgumentTypeError(f"{word}: no setting {name}; `rocline serve --check` shows all")
    if name in NOT_SETTABLE:
        raise argparse.ArgumentTypeError(f"{word}: rocline tune sets {name} itself")
    return word
