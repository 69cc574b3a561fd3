"""`rocline bench`: how fast a server is by the published protocols, and with which answers (docs/bench.md)."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import re
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.text import Text

from rocline.tools.bench_engine_flags import add_engine, add_page
from rocline.tools.files import FileError, read_text
from rocline.tools.flags import above_0, positive_int
from rocline.tools.load_answer import LoadError
from rocline.tools.load_client import APIS, Api, InputError, LoadClient, ServerInfo, key_in, open_client
from rocline.tools.load_protocols import (
    AnotherHash,
    Decode,
    Measurement,
    Prefill,
    RandomIds,
    Serve,
    draw_prompts,
    now,
    prompts_sha256,
    usable_ids,
)
from rocline.tools.load_report import FORMAT, compare, environment, only_hashes, print_comparison, print_report
from rocline.tools.load_server import child_server

# Loaded where they are asked for: torch takes seconds. Each has run(args, talk) -> exit status.
SERVERLESS = {"engine": "rocline.tools.bench_engine", "page": "rocline.tools.bench_page"}
EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_ANOTHER_HASH, EXIT_INTERRUPTED = 1, 2, 3, 130
EXIT_STATUS = "Exit status 0: done, 1: failed on the way, 2: wrong input, 3: another output, 130: interrupted."
STATUS_EVERY_S = 10.0  # where lines are not overwritten
NO_TERMINAL_WIDTH = 120
REPEATED: dict[str, Callable[..., Measurement]] = {"prefill": Prefill, "random": RandomIds, "decode": Decode}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        description="Measure a server of OpenAI's or SGLang's kind over HTTP, or one that is started for it; or an "
        "engine without a server. JSON goes to stdout, everything else to stderr. docs/bench.md defines every figure.",
    )
    protocols = parser.add_subparsers(metavar="PROTOCOL", required=True, dest="protocol")
    _add_prefill(protocols)
    _add_random(protocols)
    _add_decode(protocols)
    _add_serve(protocols)
    add_engine(protocols)
    add_page(protocols)
    compared = _protocol(protocols, "compare", "compare two reports, if their answers are the same")
    compared.add_argument("reports", nargs=2, metavar="FILE", help="what an earlier measurement wrote to stdout")


def _protocol(protocols: Any, name: str, text: str) -> Any:
    description = f"{text[0].upper()}{text[1:]}. {EXIT_STATUS}"
    return protocols.add_parser(name, help=text, description=description)


def _add_prefill(protocols: Any) -> None:
    parser = _protocol(protocols, "prefill", "time a cold prompt up to its first text")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt-tokens", type=positive_int, metavar="N", help="length of a prompt of random ids")
    prompt.add_argument("--prompt", metavar="FILE", help="UTF-8 text; servers of OpenAI's kind get it as a chat")
    _number(parser, "--output-tokens", 16, "tokens to ask for")
    _number(parser, "--runs", 1, "how often, each time after a flush of the prefix cache")
    _add_common(parser)


def _add_random(protocols: Any) -> None:
    parser = _protocol(protocols, "random", "run one stream of random ids: the published `random 4k/1k`")
    _number(parser, "--prompt-tokens", 4096, "random ids of the prompt")
    _number(parser, "--output-tokens", 1024, "tokens to ask for in each run")
    _number(parser, "--runs", 6, "how often, after one run that is not counted")
    _add_common(parser)


def _add_decode(protocols: Any) -> None:
    parser = _protocol(protocols, "decode", "time one stream or several while all of them decode")
    _number(parser, "--streams", 1, "requests at once")
    _number(parser, "--prompt-tokens", 1024, "random ids of each stream's prompt")
    _number(parser, "--output-tokens", 2048, "tokens to ask for in each stream")
    _number(parser, "--runs", 2, "how often all streams are run")
    _add_common(parser)


def _add_serve(protocols: Any) -> None:
    parser = _protocol(protocols, "serve", "send many requests, so many of them at once all the time")
    _number(parser, "--concurrency", 64, "requests at once")
    _number(parser, "--requests", 1024, "requests that are counted")
    _number(parser, "--warm-ups", 64, "requests before those")
    _number(parser, "--prompt-tokens", 4096, "random ids of each prompt")
    _number(parser, "--output-tokens", 1024, "tokens to ask for in each request")
    _add_common(parser)


def _number(parser: Any, flag: str, default: int, text: str) -> None:
    parser.add_argument(flag, type=positive_int, default=default, metavar="N", help=f"{text} (default %(default)s)")


def _add_common(parser: Any) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--url", help="a server that runs; what it speaks is found out by asking")
    server.add_argument(
        "--model",
        metavar="FOLDER",
        help="what `rocline serve` is started over, or synthetic:SEED; with --url, for its tokenizer alone",
    )
    server.add_argument("--set", action="append", default=[], type=_setting, metavar="NAME=VALUE",
                        help="a setting of the server that is started; may be repeated")  # fmt: skip
    server.add_argument("--api", choices=APIS, help="speak this API, whatever else the server speaks")
    server.add_argument("--name", metavar="MODEL", help="the model's name in requests (default: the first one listed)")
    server.add_argument("--api-key-file", metavar="FILE", help="file whose first line is a key of the server")
    server.add_argument("--read-timeout-s", type=above_0, default=1800.0, metavar="S",
                        help="longest wait for a byte, comments included (default %(default)g)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="of the random ids (default %(default)s)")
    parser.add_argument("--expect", metavar="SHA256", type=_sha256, help="hash of the output; another is exit status 3")


def _setting(word: str) -> str:
    if not re.fullmatch(r"\w+=.*", word):
        raise argparse.ArgumentTypeError(f"{word}: write NAME=VALUE, as in chunk_rows=256")
    return word


def _sha256(word: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", word):
        raise argparse.ArgumentTypeError(f"{word}: must be 64 hexadecimal digits")
    return word


def run(args: argparse.Namespace) -> int:
    with Talk() as talk:
        try:
            if args.protocol == "compare":
                comparison = compare(tuple(args.reports))
                print(json.dumps(comparison, indent=2))
                print_comparison(talk.console, comparison)
                return 0
            if module := SERVERLESS.get(args.protocol):
                done: int = importlib.import_module(module).run(args, talk)
                return done
            return Bench(args, talk).run()
        except (FileError, InputError) as error:
            talk.say(f"bench: {error}")
            return EXIT_WRONG_INPUT
        except AnotherHash as error:
            talk.say(f"bench: {error}")
            return EXIT_ANOTHER_HASH


class Talk:
    """stderr: lines that stay, and one that tells how it goes."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, markup=False, emoji=False)  # lines quote what was typed
        if not self.console.is_terminal:
            self.console.width = NO_TERMINAL_WIDTH
        self._live = self.console.status("") if self.console.is_terminal else None
        self._told_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.quiet()

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    def status(self, line: str) -> None:
        """May be lost; may quote a server."""
        shown = "".join(char if char.isprintable() else " " for char in line)
        if self._live:
            self._live.update(Text(shown))
            self._live.start()
        elif time.monotonic() - self._told_s >= STATUS_EVERY_S:
            self._told_s = time.monotonic()
            self.say(shown)

    def quiet(self) -> None:
        """Take the line away that is overwritten."""
        if self._live:
            self._live.stop()


class Bench:
    """One measurement, from flags to exit status."""

    def __init__(self, args: argparse.Namespace, talk: Talk) -> None:
        """Raises FileError, InputError: of its files, before any server is asked or started."""
        self._args, self._talk = args, talk
        self._text = None if (file := getattr(args, "prompt", None)) is None else read_text(file)
        if self._text == "":
            raise InputError(f"{file}: empty; name a text of at least one character")
        self._api_key = key_in(args.api_key_file) if args.api_key_file else None
        self._measurement: Measurement | None = None
        self._server: ServerInfo | None = None
        self._config: dict[str, Any] = {}

    def run(self) -> int:
        """Raises InputError if nothing could be measured."""
        started, start_s = now(), time.monotonic()
        status, error = 0, None
        try:
            asyncio.run(self._main())
        except LoadError as failed:
            status, error = EXIT_FAILED, str(failed)
        except AnotherHash as other:
            status, error = EXIT_ANOTHER_HASH, str(other)
        except (KeyboardInterrupt, asyncio.CancelledError):
            status, error = EXIT_INTERRUPTED, "interrupted"
        self._talk.quiet()
        if error:
            self._talk.say(f"bench: {error}")
        if self._measurement:
            report = self._report(status, error, started, time.monotonic() - start_s)
            print(json.dumps(report, indent=2), flush=True)
            if status != EXIT_ANOTHER_HASH and report["runs"]:
                print_report(self._talk.console, report)
        return status

    async def _main(self) -> None:
        task = asyncio.current_task()
        assert task
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        args = self._args
        async with AsyncExitStack() as stack:
            url = args.url
            if url is None:
                if args.model is None:
                    raise InputError("which server? say --url, or --model for one that is started")
                self._talk.say(f"starting rocline serve over {args.model}")
                url = await stack.enter_async_context(child_server(args.model, args.set))
            elif args.set:
                raise InputError("--set is for the server that --model starts, and --url names one that runs")
            client = await stack.enter_async_context(
                open_client(
                    url,
                    apis=_apis(args),
                    model=args.name,
                    api_key=self._api_key,
                    read_timeout_s=args.read_timeout_s,
                )
            )
            self._server = client.server
            self._measurement = self._made(client)
            self._talk.say(f"{args.protocol}: {client.server.url}, {client.server.model}, by {client.server.api}'s API")
            await self._measurement.run()

    def _made(self, client: LoadClient) -> Measurement:
        args = self._args
        prompts = self._prompts(client.server)
        how: dict[str, Any] = {"client": client, "talk": self._talk, "prompts": prompts}
        how |= {"output_tokens": args.output_tokens, "expect": args.expect}
        names = ("prompt_tokens", "output_tokens", "runs", "streams", "requests", "concurrency", "warm_ups")
        self._config = {name: value for name in names if (value := getattr(args, name, None)) is not None}
        self._config |= {"prompts_sha256": prompts_sha256(prompts)}
        if args.protocol == "serve":
            return Serve(**how, n_runs=args.requests, concurrency=args.concurrency, n_warm_ups=args.warm_ups)
        return REPEATED[args.protocol](**how, n_runs=args.runs)

    def _prompts(self, server: ServerInfo) -> list[Any]:
        """Texts or ids. Raises InputError for what the server has no room for, and where ids cannot be drawn."""
        args = self._args
        if self._text is not None:
            return [self._text]
        n_tokens = args.prompt_tokens + args.output_tokens
        if server.context is not None and n_tokens > server.context:
            raise InputError(f"{n_tokens} tokens of prompt and output; the server's context holds {server.context}")
        folder = (args.model if args.url else None) or server.folder or args.model
        if folder is None:
            raise InputError("the server does not tell where its model is; name a folder with its tokenizer by --model")
        n_prompts = args.requests + args.warm_ups if args.protocol == "serve" else getattr(args, "streams", 1)
        return draw_prompts(usable_ids(folder), args.seed, n_prompts, args.prompt_tokens)

    def _report(self, status: int, error: str | None, started: str, took_s: float) -> dict[str, Any]:
        made, server = self._measurement, self._server
        assert made is not None
        assert server is not None
        is_right = status != EXIT_ANOTHER_HASH
        return {
            "rocline_bench": FORMAT,
            "protocol": self._args.protocol,
            "config": self._config,
            "seed": self._args.seed,
            "server": {"url": server.url, "api": server.api, "name": server.model, "settings": self._args.set}
            | server.about,
            "environment": environment(),
            "started": started,
            "took_s": took_s,
            "runs": made.runs if is_right else only_hashes(made.runs),
            "result": made.result() if is_right and made.runs else {},
            "output_sha256": made.output_sha256,
            "hash_of": made.hash_of,
            "warnings": made.warnings,
            "error": error,
        }


def _apis(args: argparse.Namespace) -> tuple[Api, ...]:
    """Text is best sent as a chat, whose reasoning counts too; ids where the answer's come back."""
    if args.api:
        return (args.api,)
    return ("openai", "sglang") if getattr(args, "prompt", None) else ("sglang", "openai")
