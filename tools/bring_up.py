"""`rocline bring-up`: from nothing to a million tokens, a rung at a time, and no further than the first that fails."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rocline.engine.config import ConfigError, ModelConfig
from rocline.engine.pages import PAGE_POSITIONS
from rocline.pipeline.options import Options
from rocline.tools import doctor_software
from rocline.tools.bring_up_report import Report, ReportError, code_sha256, model_sha256, old_place, open_report
from rocline.tools.bring_up_rungs import rungs_of
from rocline.tools.bring_up_site import Expected, Lengths, Rung, Site
from rocline.tools.device import DEVICE_ERRORS
from rocline.tools.doctor_checks import Cards, Check, System, find_cards
from rocline.tools.engine_options import add_engine_options, engine_options
from rocline.tools.serve import ConfigurationError

EXIT_FAILED, EXIT_WRONG_INPUT = 1, 2
PAGE = "docs/bring-up.md"
PACKAGE = Path(__file__).absolute().parent.parent  # unresolved: of a checkout the folder of links to the others


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bring-up",
        description="Climb from one kernel to the longest prompt, and stop at the first rung that fails. Rungs that "
        "this build has done with this model on this device are passed over. Exit status 0: at the top, 1: a rung "
        "failed, 2: wrong input.",
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="folder of the checkpoint")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="RUNG",
        help="climb again from this rung on (default: from the first that is not done)",
    )
    parser.add_argument("--list", action="store_true", help="show the rungs, how long each takes, and end")
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("bring-up.json"),
        metavar="FILE",
        help="where results are kept; written after every rung (default %(default)s)",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    try:
        config = ModelConfig.load(args.model)
        options = _options(args, config)
        site = Site(args.model, config, options, _cards(options), _golden(os.environ.get("ROCLINE_GOLDEN")))
        rungs = rungs_of(site)
        _check_start(args.start, rungs)
        report, other = open_report(args.report, identity_of(site), about(site))
        if args.list:
            return _list(rungs, report)
        report.begin(bool(other))
    except (ConfigError, ConfigurationError, ReportError, *DEVICE_ERRORS) as error:
        print(f"bring-up: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    _say(f"{args.model}, --device {options.device}; {args.report} is written after every rung")
    if other:
        _say(f"the report there was of another {' and '.join(other)}: it is {old_place(args.report)} now")
    if site.lengths != Lengths.of(config, 1 << 20):
        _say(f"prompts are of {_shown(site.lengths)} tokens: what the release's are in a context of {site.context:,}")
    try:
        return climb(rungs, report, args.start)
    finally:
        site.close()


def _options(args: argparse.Namespace, config: ModelConfig) -> Options:
    """As served, but for small models: chunks that prompts of theirs are cut in, and pages for two requests."""
    context = config.text_config.max_position_embeddings
    chunk_rows = min(1024, max(16, Lengths.of(config, context).request // 4))
    small = {"chunk_rows": chunk_rows, "mixed_chunk_rows": min(256, max(8, chunk_rows // 4))}
    options = engine_options(args, config, **small)
    kv_tokens = 2 * max(min(options.context or context, context), PAGE_POSITIONS)
    return replace(options, kv_tokens=options.kv_tokens or kv_tokens, prefill="halo")


def _cards(options: Options) -> Cards:
    """Those that the engine will use. Raises ConfigurationError where it has none."""
    if options.device == "cpu":
        return Cards()
    found = find_cards(System())
    if not found.cards:
        raise ConfigurationError(f"--device hip: {found.why_none or 'HIP shows no card'}; rocline doctor says more")
    n_cards = min(options.devices or options.stages, len(found.cards))
    return Cards(found.cards[:n_cards], found.devices[:n_cards])


def _shown(lengths: Lengths) -> str:
    return ", ".join(f"{n:,}" for n in vars(lengths).values())


def _golden(word: str | None) -> Path | None:
    return Path(word) if word else None


def _check_start(start: str | None, rungs: Sequence[Rung]) -> None:
    if start is not None and start not in [rung.name for rung in rungs]:
        raise ConfigurationError(f"--from {start}: no rung; there are {', '.join(rung.name for rung in rungs)}")


def climb(rungs: Sequence[Rung], report: Report, start: str | None = None) -> int:
    """Make the rungs that are not done, in order, each into the report; the exit status.

    start: of which and all after it earlier results do not count, and none before it is made. Raises KeyboardInterrupt
    after the report has been written.
    """
    names = [rung.name for rung in rungs]
    first = names.index(start) if start else 0
    if died := [name for name in names if report.state(name) == "running"]:
        _say(f"the last climb ended inside {died[0]} without a word: its process was killed, crashed or hung")
    report.forget(names[first:] if start else [name for name in names if not report.is_done(name)])
    for number, rung in enumerate(rungs, start=1):
        head = f"rung {number} of {len(rungs)}, {rung.name}"
        if number <= first or report.is_done(rung.name):
            _say(f"{head}: {report.state(rung.name) or 'left out'}{', earlier' * report.is_done(rung.name)}")
            continue
        expected = rung.expects()
        _say(f"{head}: {rung.what} ({expected})")
        try:
            if not _make(rung, expected, report):
                _say(
                    f"stopped at {rung.name}; {PAGE} says more, {report.path} has all values; run again to go on there"
                )
                return EXIT_FAILED
        except ReportError as error:
            _say(str(error))
            return EXIT_FAILED
    _say(f"at the top: {', '.join(f'{name} {report.state(name) or chr(45)}' for name in names)}")
    return 0


def _make(rung: Rung, expected: Expected, report: Report) -> bool:
    """Whether the climb may go on. What a process that dies leaves behind says where: "running"."""
    began_s = time.monotonic()
    entry = report.rungs[rung.name] = {
        "name": rung.name,
        "state": "running",
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "expected_s": expected.seconds,
        "expected_basis": expected.basis,
    }
    check, state = Check(rung.name), "interrupted"
    try:
        report.write()
        check = rung.make()
        state = {"problem": "failed", "not applicable": "not applicable"}.get(check.verdict, "passed")
    except ReportError:
        raise
    except Exception as error:
        check.problem(f"{type(error).__name__}: {error}", f"see {PAGE}, {rung.name}")
        state = "failed"
    except KeyboardInterrupt:
        _say(f"interrupted in {rung.name}; {report.path} keeps what was done")
        raise
    finally:
        took_s = round(time.monotonic() - began_s, 3)
        entry |= check.as_json() | {"name": rung.name, "state": state, "took_s": took_s}
        report.write()
    for found in check.entries:
        _say(f"  {found.verdict}: {found.found}")
        if found.advice:
            _say(f"    -> {found.advice}")
    _say(f"  {state} in {took_s:.1f} s")
    return state != "failed"


def _list(rungs: Sequence[Rung], report: Report) -> int:
    rows = [(rung.name, report.state(rung.name) or "-", f"{rung.what}; {rung.expects()}") for rung in rungs]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, state, what in rows:
        print(f"{name:{widths[0]}}  {state:{widths[1]}}  {what}")
    return 0


def _say(line: str) -> None:
    print(f"bring-up: {line}", file=sys.stderr, flush=True)


def identity_of(site: Site) -> dict[str, Any]:
    """What rungs count for: other code, weights or cards are another climb."""
    return {
        "build": code_sha256(PACKAGE),
        "model": model_sha256(site.folder),
        "device": {
            "kind": site.options.device,
            "cards": [[card.name, card.arch, card.total_bytes] for card in site.found.cards],
            "runtime": doctor_software.installed(site.found).hip_runtime,
            "reference_ops": sorted(site.options.reference_op),
        },
    }


def about(site: Site) -> dict[str, Any]:
    options = site.options
    return {
        "folder": str(site.folder),
        "versions": doctor_software.installed(site.found)._asdict(),
        "settings": {name: getattr(options, name) for name in options.__dataclass_fields__},
    }
