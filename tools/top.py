"""`rocline top`: what a running server is doing, a frame a second, by its /metrics and /server_info alone."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rocline.tools.files import FileError
from rocline.tools.flags import at_least
from rocline.tools.load_client import InputError, key_in
from rocline.tools.top_look import Look, figures, look
from rocline.tools.top_view import Frame, elapsed
from rocline.tools.vram_server import ServerError

EXIT_FAILED, EXIT_WRONG_INPUT = 1, 2
URL = "http://127.0.0.1:8000"
NO_TERMINAL_WIDTH = 120


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "top",
        description="Show what a running `rocline serve` is doing, until Ctrl-C. A server that is not there, or starts "
        "again, is waited for. Exit status 1 with --once or --json if it does not answer; 2 for a wrong flag, a "
        "refused key, or a server of another kind.",
    )
    parser.add_argument("--url", default=URL, help="the server (default %(default)s)")
    parser.add_argument(
        "--interval-s",
        type=at_least(0.1),
        default=1.0,
        metavar="S",
        help="seconds from frame to frame (default %(default)g)",
    )
    parser.add_argument("--once", action="store_true", help="print one frame, with the rates of one interval, and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of a frame, and end")
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="file whose first line is a key of the server (default: no key)"
    )


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = NO_TERMINAL_WIDTH
    try:
        watch = Watch(_url(args.url), key_in(args.api_key_file) if args.api_key_file else None)
        if args.once or args.json:
            told = watch.once(args.interval_s)
            print(json.dumps(told)) if args.json else console.print(Frame(told))
            return 0
        _show(watch, console, args.interval_s)
        return 0
    except (FileError, InputError) as error:
        print(f"top: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    except ServerError as error:
        print(f"top: no answer: {error}", file=sys.stderr)
        return EXIT_FAILED


def _url(word: str) -> str:
    """Raises InputError for what is not http:// or https://."""
    url = urlsplit(word)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise InputError(f"--url {word}: not the URL of a server, as {URL} is")
    return word.rstrip("/").removesuffix("/metrics").removesuffix("/v1")


class Watch:
    """One look after another at a server that may come and go."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url, self._api_key = url, api_key
        self._before: Look | None = None
        self._lost_s: float | None = None

    def once(self, interval_s: float) -> dict[str, Any]:
        """The figures of two looks. Raises ServerError, InputError."""
        before = look(self._url, self._api_key)
        time.sleep(interval_s)
        return figures(self._url, before, look(self._url, self._api_key))

    def step(self) -> Frame | Text:
        """What there is to show now. Raises InputError for a server that will never do."""
        try:
            now = look(self._url, self._api_key)
        except ServerError as error:
            self._lost_s = self._lost_s or time.monotonic()
            since = elapsed(time.monotonic() - self._lost_s)
            return Text(f"No answer for {since}, trying again.\n{error}", "yellow")
        before, self._before, self._lost_s = self._before, now, None
        return Frame(figures(self._url, before, now))


def _show(watch: Watch, console: Console, interval_s: float) -> None:
    """Until Ctrl-C or SIGTERM: on a terminal in place, else one frame after another."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # the terminal's screen must come back
    try:
        with Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else nullcontext() as live:
            while True:
                began_s = time.monotonic()
                shown = watch.step()
                if live:
                    live.update(shown, refresh=True)
                else:
                    console.print(shown)
                time.sleep(max(0.0, interval_s - (time.monotonic() - began_s)))
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
