"""`rocline tune`: which chunk size and arena size to serve with, from complete cold requests (docs/tune.md)."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from rocline.arena.trace import TraceError
from rocline.engine.config import ConfigError, ModelConfig
from rocline.engine.release import release_config
from rocline.engine.synthetic import seed_of
from rocline.http.settings import Settings
from rocline.pipeline.options import Options
from rocline.pipeline.placement import CHOICE_RATES
from rocline.tools.bench import Talk
from rocline.tools.files import explained
from rocline.tools.load_client import InputError
from rocline.tools.load_protocols import draw_prompts, prompts_sha256, usable_ids
from rocline.tools.load_report import environment
from rocline.tools.serve import (
    CONFIG_FILE,
    PREFIX,
    ConfigurationError,
    api_keys,
    build,
    check_context,
    configuration,
)
from rocline.tools.synthetic_model import files_of
from rocline.tools.tune_cells import GIB, Cell, Outcome, advice, choose, hashes
from rocline.tools.tune_child import CellRunner
from rocline.tools.tune_flags import OF_CELLS, add_flags
from rocline.tools.tune_forecast import Forecaster, by_promise
from rocline.tools.tune_report import CAPTION, FORECAST_CAPTION, Report, forecast_table, write_forecasts
from rocline.tools.tune_results import Results, ResultsError
from rocline.tools.tune_sweep import sweep
from rocline.tools.tune_toml import TomlError, check_writable, write

EXIT_NONE, EXIT_WRONG_INPUT, EXIT_ANOTHER_HASH, EXIT_INTERRUPTED = 1, 2, 3, 130
FLAGS = ("device", "devices", "stages")  # settings that have a flag here


def add_parser(subparsers: Any) -> None:
    add_flags(
        subparsers.add_parser(
            "tune",
            description="Try every chunk size with every arena size: a fresh `rocline serve` each, and one cold "
            "request. Recommends the fastest cell that leaves every card enough free memory. A line for each cell goes "
            "into the results file as it comes, and a second run goes on where the first one ended. CSV or JSON goes "
            "to stdout, everything else to stderr.",
            epilog="Exit status: 0, a cell is recommended; 1, none is; 2, wrong input; 3, cells with different "
            "outputs; 130, interrupted. docs/tune.md has the rules.",
        )
    )


def run(args: argparse.Namespace) -> int:
    with Talk() as talk, ExitStack() as stack:
        try:
            files = stack.enter_context(files_of(args.model)) if args.model else None
            setup = Setup.of(args, files)
            return _dry_run(args, setup, talk) if args.dry_run else _tune(args, setup, talk)
        except (InputError, ConfigurationError, ConfigError, ResultsError, TomlError, TraceError) as error:
            talk.say(f"tune: {error}")
        except OSError as error:
            talk.say(f"tune: {explained(error)}")
        return EXIT_WRONG_INPUT


@dataclass(frozen=True)
class Setup:
    """What the flags come to.

    model            as it was told: a folder, or synthetic:SEED
    files            folder of its config.json and tokenizer.json; None for the release without a checkpoint
    server_settings  NAME=VALUE that every server gets as flags; the rest it finds itself
    toml             where --write writes
    """

    model: str
    files: Path | None
    config: ModelConfig
    options: Options
    api_key: str | None
    server_settings: tuple[str, ...]
    toml: Path
    cells: tuple[Cell, ...]

    @staticmethod
    def of(args: argparse.Namespace, files: Path | None) -> Setup:
        """Raises InputError, ConfigurationError and ConfigError for what cannot be served so."""
        if args.release and not args.dry_run:
            raise InputError("--release has no weights; name the checkpoint with --model, or say --dry-run")
        if args.traces and not args.traces.is_dir():
            raise InputError(f"--traces {args.traces}: not a folder; write one with `rocline trace record`")
        if args.dry_run and args.model and seed_of(args.model) is not None:
            raise InputError(f"--dry-run plans a checkpoint's memory, not {args.model}'s; say --release instead")
        config = ModelConfig.load(files) if files else release_config()
        told = {name: str(value) for name in FLAGS if (value := getattr(args, name)) is not None}
        if args.release:
            told.setdefault("device", "hip")
        sets = dict(word.split("=", 1) for word in args.set)
        model = args.model or "the release"
        values = configuration(told | {"model": model}, os.environ, args.config, sets)
        options, settings = build(values, Options), build(values, Settings)
        check_context(values, config)
        _check_lengths(args, config, options)
        words = [f"{name}={value}" for name, value in (told | sets).items()]
        if args.config:
            words.append(f"config={args.config}")
        cells = tuple(Cell(*sizes) for sizes in product(args.chunk_rows, args.arena_gib))
        for cell in cells:
            try:
                replace(options, **cell._asdict())
            except ValueError as error:
                raise InputError(f"{cell}: {error}") from None
        return Setup(
            model=model,
            files=files,
            config=config,
            options=options,
            api_key=next(iter(api_keys(settings, os.environ)), None),
            server_settings=tuple(words),
            toml=Path(args.config or os.environ.get(PREFIX + "CONFIG") or CONFIG_FILE),
            cells=cells,
        )

    def forecaster(self, args: argparse.Namespace, talk: Talk) -> Forecaster:
        return Forecaster(
            self.config,
            self.options,
            args.prompt_tokens,
            round(args.card_gib * GIB),
            args.traces,
            plans=seed_of(self.model) is None,  # whose layers do not share experts
            with_rates=args.dry_run,
            say=talk.status,
        )

    def work(self, args: argparse.Namespace, prompt: Sequence[int]) -> dict[str, Any]:
        """What two cells must have in common to be compared."""
        assert self.files
        about, config = environment(), (self.files / "config.json").read_bytes()
        defaults = {f.name: f.default for f in fields(Options) if f.default is not MISSING and f.name not in OF_CELLS}
        settings = {name: getattr(self.options, name) for name in defaults}
        return {
            "model": self.model if seed_of(self.model) is not None else str(self.files.resolve()),
            "config_sha256": hashlib.sha256(config).hexdigest(),
            "rocline": about["rocline"],
            "commit": about["commit"],
            "prompt_tokens": args.prompt_tokens,
            "output_tokens": args.output_tokens,
            "seed": args.seed,
            "prompt_sha256": prompts_sha256([prompt]),
            "settings": json.loads(json.dumps({n: v for n, v in settings.items() if v != defaults[n]})),
        }


def _check_lengths(args: argparse.Namespace, config: ModelConfig, options: Options) -> None:
    context = options.context or config.text_config.max_position_embeddings
    n_tokens = args.prompt_tokens + args.output_tokens
    if n_tokens > context:
        raise InputError(
            f"--prompt-tokens {args.prompt_tokens} and --output-tokens {args.output_tokens} are {n_tokens} tokens; "
            f"the context holds {context}"
        )


def _dry_run(args: argparse.Namespace, setup: Setup, talk: Talk) -> int:
    forecaster = setup.forecaster(args, talk)
    forecasts = {cell: forecaster.of(cell) for cell in setup.cells}
    cells = by_promise(setup.cells, forecasts)
    talk.quiet()
    write_forecasts(sys.stdout, cells, forecasts, args.json)
    talk.console.print(forecast_table(cells, forecasts))
    talk.say(FORECAST_CAPTION)
    if setup.options.device == "hip":
        talk.say(
            f"Nothing here is measured. Planned for cards of {args.card_gib:g} GiB; rates are modelled, for a card at "
            f"{CHOICE_RATES.flops_per_s / 1e12:g} TFLOP/s while busy."
        )
    else:
        talk.say("Nothing is planned for the CPU, whose arenas are address space until used; say --device hip.")
    return EXIT_NONE if all(forecast.refused for forecast in forecasts.values()) else 0


def _tune(args: argparse.Namespace, setup: Setup, talk: Talk) -> int:
    """Raises what says that nothing was begun."""
    assert setup.files
    prompt = draw_prompts(usable_ids(setup.files), args.seed, 1, args.prompt_tokens)[0]
    if args.html:
        _check_page(args.html)
    if args.write:
        check_writable(setup.toml, _values(setup.cells[0]))
    run_cell = CellRunner(
        setup.model, setup.server_settings, prompt, args.output_tokens, setup.api_key, args.cell_timeout_s, talk
    )
    work = setup.work(args, prompt)
    with Results(args.results, work) as results:
        if results.n_dropped:
            talk.say(f"{args.results}: left out {results.n_dropped} bytes of a line that was not written to its end")
        if results.outcomes and (work["commit"] or "").endswith("+"):
            talk.say("the checkout has changes; whether the cells in the file were of the same ones is not known")
        status, error = 0, ""
        try:
            sweep(
                setup.cells,
                results,
                run_cell,
                setup.forecaster(args, talk).of,
                talk,
                hopeless_factor=args.hopeless_factor,
                retries_failed=args.retry_failed,
            )
        except KeyboardInterrupt:
            status, error = EXIT_INTERRUPTED, "interrupted; the same command goes on from here"
        except OSError as failed:
            status, error = EXIT_NONE, explained(failed, failed.filename or args.results)
        talk.quiet()
        return _finish(args, setup, talk, list(results.outcomes.values()), work, status, error)


def _check_page(path: Path) -> None:
    """Raises OSError if it cannot be written, and leaves what is there as it is."""
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()


def _finish(
    args: argparse.Namespace,
    setup: Setup,
    talk: Talk,
    outcomes: Sequence[Outcome],
    work: dict[str, Any],
    status: int,
    error: str,
) -> int:
    """Everything that is told of the cells there are. status, error: why the sweep did not come to its end."""
    floor_bytes, choice = round(args.min_headroom_gib * GIB), None
    if told := _unequal(outcomes):
        status, error = EXIT_ANOTHER_HASH, "; ".join(filter(None, [told, error]))
    if not status:
        choice = choose(outcomes, floor_bytes)
        if not choice.outcome:
            status, error = EXIT_NONE, advice(outcomes, choice, floor_bytes)
    report = Report(outcomes, choice, error, floor_bytes, work, environment(), ["rocline", *sys.argv[1:]])
    if error:
        talk.say(f"tune: {error}")
    (report.write_json if args.json else report.write_csv)(sys.stdout)
    sys.stdout.flush()
    talk.console.print(report.table())
    talk.say(CAPTION)
    try:
        if args.html:
            args.html.write_text(report.page(), "utf-8")
        if report.recommended:
            _recommend(args, setup, talk, report)
    except (OSError, TomlError) as failed:
        talk.say(f"tune: {explained(failed)}")
        return status or EXIT_NONE
    return status


def _unequal(outcomes: Sequence[Outcome]) -> str:
    """Which cells had which output, if it was not one."""
    found = hashes(outcomes)
    if len(found) < 2:
        return ""
    told = "; ".join(f"{digest} of {' and '.join(map(str, cells))}" for digest, cells in found.items())
    return f"the outputs differ, and no size may change a bit of them: {told}. Nothing is recommended; report this"


def _recommend(args: argparse.Namespace, setup: Setup, talk: Talk, report: Report) -> None:
    """Raises OSError and TomlError where --write fails."""
    assert report.recommended
    talk.say(report.verdict())
    values = _values(report.recommended.cell)
    lines = ", ".join(f"{name} = {value}" for name, value in values.items())
    if not args.write:
        talk.say(f"To serve with it, put {lines} into {setup.toml}; --write does that")
        return
    write(setup.toml, values)
    talk.say(f"Written to {setup.toml}: {lines}")
    for variable in (PREFIX + name.upper() for name in values):
        if variable in os.environ:
            talk.say(f"Warning: {variable} is set in the environment, and counts before the file")


def _values(cell: Cell) -> dict[str, int | float]:
    """As settings."""
    arena = int(cell.arena_gib) if cell.arena_gib.is_integer() else cell.arena_gib
    return {"chunk_rows": cell.chunk_rows, "arena_gib": arena}
