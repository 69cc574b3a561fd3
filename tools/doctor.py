"""`rocline doctor`: whether this machine can serve, what stands in the way, and what to do about it."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rocline.engine.config import ConfigError, ModelConfig
from rocline.engine.home import DeviceKind
from rocline.engine.release import release_config
from rocline.tools import doctor_cards, doctor_disk, doctor_host, doctor_live, doctor_pci, doctor_plan, doctor_software
from rocline.tools.bootstrap import find_rocm
from rocline.tools.bundle import Bundle, BundleError
from rocline.tools.doctor_checks import Cards, Check, System, Verdict, find_cards, worst

EXIT_PROBLEM, EXIT_WRONG_INPUT = 1, 2
NO_TERMINAL_WIDTH = 100
STYLES: Mapping[Verdict, str] = {"ok": "green", "warning": "yellow", "problem": "bold red", "not applicable": "dim"}
MARKS: Mapping[Verdict, str] = {"ok": "ok", "warning": "warning", "problem": "PROBLEM", "not applicable": "-"}


class Step(NamedTuple):
    """A check to be made; name: for whoever waits."""

    name: str
    make: Callable[[], Check]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        description="Look at this machine: versions, cards, copies between them, a kernel, memory, disk. A table goes "
        "to stderr. Exit status 0: no problem, 1: one or more, 2: wrong input.",
    )
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="also look at this checkpoint, and the disk under it"
    )
    parser.add_argument(
        "--device",
        choices=get_args(DeviceKind),
        help="what to serve from: with hip, having no card is a problem (default: hip where there are cards for it)",
    )
    parser.add_argument("--json", action="store_true", help="also print everything as one JSON object on stdout")
    parser.add_argument(
        "--bundle",
        type=Path,
        metavar="OUT.tar.gz",
        help="pack what this finds into a file, to send to somebody; no prompts, no keys",
    )
    parser.add_argument(
        "--log",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a log of `rocline serve`, to go into the bundle; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    try:
        config = ModelConfig.load(args.model) if args.model else release_config()
        if args.log and not args.bundle:
            raise BundleError("--log is for --bundle: name the file to pack")
        bundle = Bundle.create(args.bundle, args.log) if args.bundle else None
    except (ConfigError, BundleError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    try:
        return _run(args, config, bundle)
    finally:
        if bundle:
            bundle.close()


def _run(args: argparse.Namespace, config: ModelConfig, bundle: Bundle | None) -> int:
    logging.getLogger("rocline").addHandler(logging.NullHandler())  # the table says what is logged of pairs of cards
    console = Console(stderr=True, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = NO_TERMINAL_WIDTH
    system, checks = System(), list[Check]()
    with console.status("HIP") as status:
        found = find_cards(system)
        must_serve = args.device == "hip" or (args.device is None and _is_for_cards(system, found))
        for step in steps(system, found, config, args.model, must_serve):
            status.update(step.name)
            checks.append(made(step))
    report = report_of(checks, found)
    show(console, checks, report)
    if args.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    if bundle:
        try:
            bundle.write(report, system.environ)
        except OSError as error:
            print(f"doctor: {args.bundle}: {error.strerror}", file=sys.stderr)
            return EXIT_PROBLEM
        print(f"doctor: wrote {args.bundle}: {', '.join(bundle.names)}", file=sys.stderr)
    return EXIT_PROBLEM if report["verdict"] == "problem" else 0


def _is_for_cards(system: System, found: Cards) -> bool:
    return doctor_cards.can_serve(system, found, find_rocm(system.environ) is not None)


def steps(system: System, found: Cards, config: ModelConfig, folder: Path | None, must_serve: bool) -> Iterator[Step]:
    """All checks, in the order of the table. What works on cards comes after what only looks at them."""
    yield Step("versions", lambda: doctor_software.versions(system, found, doctor_software.installed(found)))
    yield Step("HIP runtime", lambda: doctor_software.one_runtime(system))
    yield Step("environment", lambda: doctor_software.environment(system))
    yield Step("arithmetic", doctor_software.arithmetic)
    yield Step("cards", lambda: doctor_cards.cards(system, found, must_serve))
    yield Step("free memory", lambda: doctor_cards.free_memory(found))
    yield Step("other processes", lambda: doctor_cards.other_processes(system, found))
    yield Step("PCIe settings", lambda: doctor_pci.settings(system, found))
    yield Step("peer copies", lambda: doctor_live.peer_copies(found))
    yield Step("PCIe links", lambda: doctor_pci.links(found))  # not long after copies: an idle card slows its link
    yield Step("kernel", lambda: doctor_live.kernel(found))
    yield Step("canary", lambda: doctor_live.canary(found))
    yield Step("plan", lambda: doctor_plan.plan(found, config, str(folder) if folder else "the release"))
    yield Step("host memory", lambda: doctor_host.host_memory(system, config, bool(found.cards)))
    yield Step("limits", lambda: doctor_host.limits(system, found))
    yield Step("processor", lambda: doctor_host.processor(system, found))
    if folder:
        yield Step("checkpoint", lambda: doctor_disk.checkpoint(folder, config))
        yield Step("disk", lambda: doctor_disk.disk(folder))


def made(step: Step) -> Check:
    """The check; one that breaks down is a problem of its own, and the others go on."""
    try:
        return step.make()
    except Exception as error:
        check = Check(step.name)
        check.problem(f"the check itself failed: {type(error).__name__}: {error}", "send it in, with --bundle")
        return check


def report_of(checks: list[Check], found: Cards) -> dict[str, Any]:
    """JSON-ready. serves: whether rocline can, by the value of --device."""
    verdict = worst(check.verdict for check in checks)
    arithmetic = next(check for check in checks if check.name == "arithmetic")
    return {
        "verdict": verdict,
        "serves": {"cpu": arithmetic.verdict != "problem", "hip": bool(found.cards) and verdict != "problem"},
        "checks": [check.as_json() for check in checks],
    }


def show(console: Console, checks: list[Check], report: Mapping[str, Any]) -> None:
    table = Table(show_lines=True, expand=True)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found, and what to do", ratio=1)
    silent = [check for check in checks if check.verdict == "not applicable" and check.name != "cards"]
    for check in checks:
        if check in silent:
            continue
        table.add_row(Text(check.name), Text(MARKS[check.verdict], STYLES[check.verdict]), _said(check))
    console.print(table)
    if silent:
        console.print(Text(f"not applicable here: {', '.join(check.name for check in silent)}", "dim"))
    _show_rates(console, checks)
    n_problems, n_warnings = (sum(check.verdict == verdict for check in checks) for verdict in ("problem", "warning"))
    cpu, hip = ("yes" if report["serves"][kind] else "no" for kind in ("cpu", "hip"))
    console.print(
        Text(
            f"Problems: {n_problems}, warnings: {n_warnings}. Serves on the CPU (rocline demo): {cpu}, "
            f"on cards (--device hip): {hip}."
        )
    )


def _said(check: Check) -> Table:
    """A line for each entry, and its advice below, set in."""
    lines = Table.grid(padding=(0, 1))
    lines.add_column(overflow="fold")
    for entry in check.entries:
        lines.add_row(Text(entry.found, STYLES[entry.verdict] if entry.verdict in ("warning", "problem") else ""))
        if entry.advice:
            advice = Table.grid(padding=(0, 1))
            advice.add_row("  ->", Text(entry.advice, "bold"))
            lines.add_row(advice)
    return lines


def _show_rates(console: Console, checks: list[Check]) -> None:
    """GB/s from each card, a line, to each, a column."""
    pairs = next((check.values.get("pairs") for check in checks if check.name == "peer copies"), None)
    if not pairs:
        return
    cards = sorted({pair[end] for pair in pairs for end in ("from", "to")})
    rate = {(pair["from"], pair["to"]): f"{pair['bytes_per_s'] / 1e9:.1f}" for pair in pairs}
    table = Table(title="copies between cards, GB/s", box=None)
    table.add_column("from \\ to", justify="right")
    for card in cards:
        table.add_column(str(card), justify="right")
    for source in cards:
        table.add_row(str(source), *(rate.get((source, target), "-") for target in cards))
    console.print(table)
