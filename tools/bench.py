"""`rocline bench`: how fast a server is by the published protocols, and with which answers (docs/bench.md)."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.text import Text

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

EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_ANOTHER_HASH, EXIT_INTERRUPTED = 1, 2, 3, 130
STATUS_EVERY_S = 10.0  # where lines are not overwritten
NO_TERMINAL_WIDTH = 120
REPEATED: dict[str, Callable[..., Measurement]] = {"prefill": Prefill, "random": RandomIds, "decode": Decode}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        description="Measure a server of OpenAI's or SGLang's kind over HTTP, or one that is started for it. JSON goes "
        "to stdout, everything else to stderr. docs/bench.md defines every figure.",
    )
    protocols = parser.add_subparsers(metavar="PROTOCOL", required=True, dest="protocol")
    _add_prefill(protocols)
    _add_random(protocols)
    _add_decode(protocols)
    _add_serve(protocols)
    compared = protocols.add_parser("compare", help="two reports, if their answers are the same")
    compared.add_argument("reports", nargs=2, metavar="FILE", help="stdout of an earlier measurement")


def _add_prefill(protocols: Any) -> None:
    parser = protocols.add_parser("prefill", help="a cold prompt, up to its first text")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt-tokens", type=_positive, metavar="N", help="so many random ids")
    prompt.add_argument("--prompt", metavar="FILE", help="text; a chat's message for servers of OpenAI's kind")
    _number(parser, "--output-tokens", 16, "until the end of the request")
    _number(parser, "--runs", 1, "each after a flush of the prefix cache")
    _add_common(parser)


def _add_random(protocols: Any) -> None:
    parser = protocols.add_parser("random", help="one stream of random ids: the published `random 4k/1k`")
    _number(parser, "--prompt-tokens", 4096, "ids")
    _number(parser, "--output-tokens", 1024, "of each run")
    _number(parser, "--runs", 6, "after one that is not counted")
    _add_common(parser)


def _add_decode(protocols: Any) -> None:
    parser = protocols.add_parser("decode", help="one stream or several, while all of them decode")
    _number(parser, "--streams", 1, "at once")
    _number(parser, "--prompt-tokens", 1024, "ids of each stream")
    _number(parser, "--output-tokens", 2048, "of each stream")
    _number(parser, "--runs", 2, "of all streams")
    _add_common(parser)


def _add_serve(protocols: Any) -> None:
    parser = protocols.add_parser("serve", help="many requests, so many of them at once all the time")
    _number(parser, "--concurrency", 64, "requests at once")
    _number(parser, "--requests", 1024, "that are counted")
    _number(parser, "--warm-ups", 64, "requests before them")
    _number(parser, "--prompt-tokens", 4096, "ids of each")
    _number(parser, "--output-tokens", 1024, "of each")
    _add_common(parser)


def _number(parser: Any, flag: str, default: int, text: str) -> None:
    parser.add_argument(flag, type=_positive, default=default, metavar="N", help=f"{text} (default %(default)s)")


def _add_common(parser: Any) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--url", help="of a server that runs; found out by asking: what it speaks")
    server.add_argument(
        "--model", metavar="FOLDER", help="start `rocline serve` over it; with --url: for its tokenizer"
    )
    server.add_argument("--set", action="append", default=[], type=_setting, metavar="NAME=VALUE",
                        help="setting of the server that is started; several times")  # fmt: skip
    server.add_argument("--api", choices=APIS, help="speak this, whatever else the server does")
    server.add_argument("--name", metavar="MODEL", help="of the model in requests (default: the first it lists)")
    server.add_argument("--api-key-file", metavar="FILE", help="whose first line is a key of the server")
    server.add_argument("--read-timeout-s", type=float, default=1800.0, metavar="S",
                        help="without a byte, a comment included (default %(default)g)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="of drawn ids (default %(default)s)")
    parser.add_argument("--expect", metavar="SHA256", type=_sha256, help="of the output; another one is exit status 3")


def _positive(word: str) -> int:
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{word}: must be at least 1")
    return value


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
            return Bench(args, talk).run()
        except InputError as error:
            talk.say(f"bench: {error}")
            return EXIT_WRONG_INPUT
        except AnotherHash as error:
            talk.say(f"bench: {error}")
            return EXIT_ANOTHER_HASH


class Talk:
    """stderr: lines that stay, and one that tells how it goes."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
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
        self.console.print(line, markup=False, soft_wrap=True)

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
        self._args, self._talk = args, talk
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
                    api_key=args.api_key_file and key_in(args.api_key_file),
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
        if getattr(args, "prompt", None):
            return [_text(args.prompt)]
        n_tokens = args.prompt_tokens + args.output_tokens
        if server.context is not None and n_tokens > server.context:
            raise InputError(f"{n_tokens} tokens of prompt and output; the server's context holds {server.context}")
        folder = args.model or server.folder
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


def _text(file: str) -> str:
    try:
        return Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: {error}") from error
