"""What commands print: --help, whole and with nothing of Python in it; and others' words as they are."""

import argparse
import ast
import importlib
from pathlib import Path

import pytest

from rocline.tools import cli

ROOT = Path(__file__).resolve().parents[2]


def parsers_of(name):
    """(words, parser) of a command and everything below it."""
    subparsers = argparse.ArgumentParser(prog="rocline").add_subparsers()
    importlib.import_module(cli.COMMANDS[name].module).add_parser(subparsers)
    pending = list(subparsers.choices.items())
    while pending:
        words, parser = pending.pop()
        yield words, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                assert [choice.dest for choice in action._choices_actions] == list(action.choices), f"{words}: no list"
                pending += [(f"{words} {name}", below) for name, below in action.choices.items()]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_is_whole(name):
    for words, parser in parsers_of(name):
        assert (parser.description or "").endswith("."), f"rocline {words}: no description, or not a sentence"
        for action in parser._actions:
            assert action.help or isinstance(action, argparse._SubParsersAction), f"rocline {words}: {action.dest}"
        text = parser.format_help()
        for python in ("None", "True", "False", "()", "(default )", "default ("):
            assert python not in text, f"rocline {words}: {python}"


def test_no_console_reads_markup_or_pictures_in_what_it_prints():
    """Names of files, words of a server and of the command line are printed as they are."""
    found = 0
    for path in sorted([*(ROOT / "tools").glob("*.py"), *(ROOT / "engine").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Console":
                given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
                assert (given.get("markup"), given.get("emoji")) == (False, False), path.name
                found += 1
    assert found
