"""`rocline vram`: how much memory the cards have free, ten times a second: minima, alarms, a table, a picture."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from rocline.pipeline.card_watch import GIB, NO_SENSORS, CardWatch, Watched
from rocline.pipeline.sysfs_cards import SYSFS, CardMemory, Sensors, card_at, cards
from rocline.tools.files import explained
from rocline.tools.flags import at_least
from rocline.tools.vram_picture import clock, draw
from rocline.tools.vram_server import Server, ServerError
from rocline.tools.vram_session import Session

if TYPE_CHECKING:
    from rocline.hip_kernels.driver import Device

EXIT_ALARM, EXIT_WRONG_INPUT = 1, 2
FLOOR_GIB = 1.5  # what a plan leaves
KEYS_VARIABLE = "ROCLINE_API_KEYS"
Say = Callable[[str], None]


class VramError(RuntimeError):
    """Nothing can be watched as asked."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "vram",
        description="Watch the cards' memory, whoever uses it, until --seconds are over or Ctrl-C. Free is what the "
        "amdgpu driver says, or HIP where that is less; sensors are read once a second. Exit status 0: all was well, "
        "1: a card was below the floor, could not be read, or had counters that stood still, 2: wrong input, or no "
        "card.",
    )

    def number(flag: str, least: float, help_text: str, default: float | None = None) -> None:
        parser.add_argument(flag, type=at_least(least), default=default, metavar="N", help=help_text)

    number("--interval-ms", 1, "milliseconds from look to look (default %(default)s)", 100)
    number("--seconds", 0.001, "how long to watch (default: until Ctrl-C)")
    number("--floor-gib", 0, "alarm where a card has fewer GiB free (default %(default)s; 0: never)", FLOOR_GIB)
    parser.add_argument(
        "--card",
        action="append",
        metavar="PCI_ID",
        help="watch only this card, such as 0000:03:00.0; may be repeated (default: all)",
    )
    parser.add_argument("--csv", metavar="FILE", help="write a line for each look at each card, once a second")
    parser.add_argument("--svg", metavar="FILE", help="write a picture, at the end")
    parser.add_argument("--json", action="store_true", help="also print a summary as one JSON object on stdout")
    parser.add_argument(
        "--url",
        metavar="URL",
        help="a running `rocline serve`, for its arenas' high-water marks and its own headroom; it asks HIP already, "
        f"so this command does not; the key, if any, is the first of {KEYS_VARIABLE}",
    )
    parser.add_argument("--no-hip", action="store_true", help="do not ask HIP, which takes some memory of each card")
    parser.add_argument("--sysfs", type=Path, metavar="FOLDER", help="look there in place of /sys, and do not ask HIP")


def run(args: argparse.Namespace) -> int:
    try:
        with ExitStack() as held:
            return _watch(args, held)
    except (VramError, ServerError) as error:
        print(f"vram: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT


def _watch(args: argparse.Namespace, held: ExitStack) -> int:
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120, markup=False, emoji=False)

    def say(text: str) -> None:
        console.print(f"vram: {clock(time.time())}: {text}", highlight=False, soft_wrap=True)

    shown = _cards(args, say)
    csv_file = held.enter_context(_opened(args.csv)) if args.csv else None
    svg_file = held.enter_context(_opened(args.svg)) if args.svg else None
    server = _server(args.url, shown, say, held) if args.url else None
    asks_hip = not (args.no_hip or args.url or args.sysfs or any(isinstance(card, HipCard) for card in shown))
    hip = _hip_free(shown, say) if asks_hip else {}
    floor_bytes = int(args.floor_gib * GIB)
    watches = [CardWatch(card, floor_bytes, say, hip.get(card.pci_id)) for card in shown]
    session = Session(watches, args.interval_ms / 1000, say, server, csv_file, keeps_curves=bool(svg_file))
    with _stopped_by_signals() as stop:
        session.watch(stop, args.seconds, console)
    if server:
        server.close()  # it has asked once more
    console.print(session.table())
    console.print(session.closing_line(), highlight=False)
    if args.json:
        print(json.dumps({"floor_bytes": floor_bytes, "server": args.url} | session.summary()))
    if svg_file:
        _write(svg_file, draw(watches, session.curves, session.began_s, session.seconds))
    return EXIT_ALARM if session.has_failed else 0


def _opened(path: str) -> TextIO:
    """For writing, now: what cannot be written is refused before anything is watched."""
    try:
        return open(path, "w", encoding="utf-8", newline="")
    except OSError as error:
        raise VramError(explained(error, path)) from error


def _write(file: TextIO, text: str) -> None:
    try:
        file.write(text)
        file.flush()
    except OSError as error:
        with suppress(OSError):  # once: it holds what it could not write
            file.close()
        raise VramError(explained(error, file.name)) from error


class HipCard:
    """A card of which only HIP tells, and memory alone: a container may have no /sys."""

    def __init__(self, device: Device, pci_id: str) -> None:
        self.pci_id, self.name, self._device = pci_id, device.name, device

    def memory(self) -> CardMemory:
        try:
            reading = self._device.memory()
        except RuntimeError as error:
            raise OSError(errno.EIO, str(error), self.pci_id) from error
        return CardMemory(reading.total_bytes - reading.free_bytes, reading.total_bytes)

    def sensors(self) -> Sensors:
        return NO_SENSORS


def _hip_cards(why_not: str, say: Say) -> list[Watched]:
    """Where the driver shows none. Raises VramError, with why_not, where HIP shows none either."""
    # Only where it is needed: torch, which comes with it, takes seconds and 200 MB.
    from rocline.hip_kernels.driver import devices
    from rocline.hip_kernels.runtime import HipError
    from rocline.pipeline.headroom import pci_id_of

    try:
        found: list[Watched] = [HipCard(device, pci_id_of(device)) for device in devices()]
    except HipError as error:
        raise VramError(f"{why_not}; nor does HIP: {error}") from error
    if not found:
        raise VramError(f"{why_not}, and HIP none: there is no GPU to watch on this host")
    say(f"{why_not}: HIP alone is asked, which has no sensors")
    return found


def _cards(args: argparse.Namespace, say: Say) -> list[Watched]:
    sysfs = args.sysfs or SYSFS
    if not sysfs.is_dir():
        raise VramError(f"{sysfs}: not a folder")
    shown: list[Watched] = [*cards(sysfs)]
    if not shown:
        why_not = f"{sysfs}/class/drm shows no card of the amdgpu driver"
        if args.sysfs or args.no_hip or args.url:
            raise VramError(f"{why_not}: there is no GPU to watch on this host")
        shown = _hip_cards(why_not, say)
    chosen = {pci_id: card_at(shown, pci_id) for pci_id in args.card or ()}
    if missing := [pci_id for pci_id, card in chosen.items() if card is None]:
        there = ", ".join(card.pci_id for card in shown)
        raise VramError(f"--card {missing[0]}: there is no such card; there is {there}")
    return [card for card in shown if card in chosen.values()] if chosen else shown


def _server(url: str, shown: Sequence[Watched], say: Say, held: ExitStack) -> Server:
    keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",")]
    server = held.enter_context(closing(Server(url, next(filter(None, keys), None), say)))
    if not any(server.is_on(card.pci_id) for card in shown):
        say(f"the server at {url} is on none of these cards")
    return server


def _hip_free(shown: Sequence[Watched], say: Say) -> dict[str, Callable[[], int]]:
    """HIP's word for the free bytes of those cards that it knows, by PCI id."""
    from rocline.hip_kernels.driver import devices
    from rocline.hip_kernels.runtime import HipError
    from rocline.pipeline.headroom import pci_id_of

    def free_of(device: Device) -> Callable[[], int]:
        return lambda: device.memory().free_bytes

    try:
        known = [(card_at(shown, pci_id_of(device)), device) for device in devices()]
    except HipError as error:
        say(f"the driver alone is asked, not HIP: {error}")
        return {}
    return {card.pci_id: free_of(device) for card, device in known if card}


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """Set by Ctrl-C or SIGTERM; a second one interrupts whatever holds it up."""
    stop = threading.Event()

    def end(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
