"""--help of every command and of what it has below: whole, and nothing of Python in it."""

import argparse
import importlib

import pytest

from rocline.tools import cli


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
