"""The rocline command line: finds the subcommand, and loads that one only.

A command is one module here with two functions:

    add_parser(subparsers)   subparsers.add_parser("<command>", description=...) and its arguments
    run(args) -> int         does the work; the exit status
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


class Command(NamedTuple):
    module: str
    summary: str  # kept here so that `rocline --help` imports no command: torch alone takes seconds


COMMANDS = {
    "serve": Command("rocline.tools.serve", "serve a checkpoint over HTTP"),
    "demo": Command("rocline.tools.demo", "serve a small checkpoint and show what it does"),
    "generate": Command("rocline.tools.generate", "continue a prompt, streaming the text to the terminal"),
    "conform": Command("rocline.tools.conform", "check this build against a folder of golden data"),
    "bench": Command("rocline.tools.bench", "measure a server by the published protocols, over HTTP"),
    "trace": Command("rocline.tools.trace", "draw what stages take from their arenas, and their work over time"),
    "perplexity": Command("rocline.tools.perplexity", "score a text, to see that the weights mean what they should"),
    "plan": Command("rocline.tools.plan", "place the layers on cards and count their memory"),
    "tune": Command("rocline.tools.tune", "find the chunk size and arena size to serve with"),
    "doctor": Command("rocline.tools.doctor", "find out whether this machine can serve, and what to do"),
    "bring-up": Command("rocline.tools.bring_up", "climb from one kernel to the longest prompt on new cards"),
    "top": Command("rocline.tools.top", "show what a running server is doing, in a terminal"),
    "vram": Command("rocline.tools.vram", "watch the cards' memory and sensors, ten times a second"),
    "demo-checkpoint": Command("rocline.tools.demo_checkpoint", "write a small checkpoint of the model"),
}


class CommandModule(Protocol):
    """What a command's module provides."""

    def add_parser(self, subparsers: Any) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rocline command and return its exit status.

    argv: the words after `rocline`, sys.argv[1:] by default. Raises SystemExit(2) on unknown commands and
    flags, as argparse does; 130 after Ctrl-C and 141 when the reader of the output has gone, both quietly.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # a reader that has gone shows here, not in a traceback at exit
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it exits: let it flush into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


class _Parser(argparse.ArgumentParser):
    """Takes no abbreviated flag, in subcommands too: `--max` would turn ambiguous when a flag is added."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses what it does not know itself: argparse leaves that to the outermost parser, which shows its own usage
        in place of the command's."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def _run(argv: list[str]) -> int:
    parser = _Parser(
        prog="rocline",
        description="DeepSeek-V4.1-Flash from its released checkpoint, exact to the bit.",
        epilog="`rocline COMMAND --help` lists a command's flags.",
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help"):
        parser.error(f"{argv[0]}: COMMAND must be the first word")
    module = None
    for name, command in COMMANDS.items():
        if argv[:1] == [name]:
            module = cast(CommandModule, importlib.import_module(command.module))
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=command.summary)
    args = parser.parse_args(argv)
    assert module  # any other first word has ended the parser
    return module.run(args)


if __name__ == "__main__":
    sys.exit(main())
