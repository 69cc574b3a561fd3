"""The rocline command line: choosing a command, loading nothing else, and how it ends."""

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from rocline.tools import cli

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def command(monkeypatch):
    """Make `rocline echo --text T` the only command besides one whose module cannot be imported."""
    module = types.ModuleType("echo_command")

    def add_parser(subparsers):
        parser = subparsers.add_parser("echo", description="say it")
        parser.add_argument("--text", default="nothing")

    def run(args):
        print(args.text)
        return 7

    module.add_parser, module.run = add_parser, run
    monkeypatch.setitem(sys.modules, "echo_command", module)
    table = {
        "echo": cli.Command("echo_command", "print a text"),
        "broken": cli.Command("no_such_module", "fails when it is loaded"),
    }
    monkeypatch.setattr(cli, "COMMANDS", table)
    return module


def test_runs_the_command_and_returns_its_status(command, capsys):
    assert cli.main(["echo", "--text", "hello"]) == 7
    assert capsys.readouterr().out == "hello\n"


def test_help_lists_every_summary_without_loading_a_command(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "print a text" in out
    assert "fails when it is loaded" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "COMMAND"),
        (["ehco"], "invalid choice: 'ehco'"),
        (["echo", "--texts", "x"], "unrecognized arguments: --texts x"),
        (["echo", "--tex", "x"], "unrecognized arguments: --tex x"),  # an abbreviation is a guess
        (["echo", "stray"], "unrecognized arguments: stray"),
        (["--", "echo"], "COMMAND"),
        (["--text", "x", "echo"], "--text: COMMAND must be the first word"),
    ],
)
def test_wrong_words_stop_with_status_2(command, capsys, argv, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--texts", "x"], ["stray"]])
def test_what_a_command_does_not_know_is_answered_with_its_own_usage(command, capsys, words):
    with pytest.raises(SystemExit):
        cli.main(["echo", *words])
    assert capsys.readouterr().err == (
        f"usage: rocline echo [-h] [--text TEXT]\nrocline echo: error: unrecognized arguments: {' '.join(words)}\n"
    )


def test_ctrl_c_is_quiet(command, capsys):
    def run(args):
        raise KeyboardInterrupt

    command.run = run
    assert cli.main(["echo"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])  # the write itself fails, or the flush after it
def test_a_reader_that_left_is_quiet(unbuffered):
    code = """
import sys, types
from rocline.tools import cli
echo = types.ModuleType("echo")
echo.add_parser = lambda subparsers: subparsers.add_parser("echo")
echo.run = lambda args: print("hello") or 0
sys.modules["echo"] = echo
cli.COMMANDS["echo"] = cli.Command("echo", "say hello")
sys.exit(cli.main(["echo"]))
"""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        timeout=60,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_help_imports_no_heavy_package():
    code = """
import sys
from rocline.tools import cli
try:
    cli.main(["--help"])
except SystemExit:
    print([name for name in ("torch", "numpy", "safetensors", "tokenizers", "rich") if name in sys.modules])
"""
    out = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT, timeout=60)
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_listed_command_has_its_module(name):
    assert importlib.util.find_spec(cli.COMMANDS[name].module), f"tools/ has no file for `rocline {name}`"
