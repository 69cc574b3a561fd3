"""What `rocline bench engine` printed, read again: results, curves and profiles."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocline.tools.files import read_text
from rocline.tools.load_client import InputError
from rocline.tools.load_protocols import AnotherHash

Line = dict[str, Any]


@dataclass
class Curve:
    """A cold prefill on its way: (rows, seconds since submit). whole: whether its first id came."""

    labels: Line
    points: list[tuple[int, float]]
    whole: bool = False

    @property
    def prompt_tokens(self) -> int:
        n_tokens: int = self.labels["prompt_tokens"]
        return n_tokens


@dataclass
class Profile:
    """One profiled request: its summary, kernels, copies, when a device had none, and the bounds of some kernels."""

    summary: Line
    kernels: list[Line] = field(default_factory=list)
    copies: list[Line] = field(default_factory=list)
    idle: list[Line] = field(default_factory=list)
    bounds: list[Line] = field(default_factory=list)


@dataclass
class Measured:
    """
    results   prefills and decodes, in the order of the files
    commands  each once
    """

    results: list[Line] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)
    ceilings: list[Line] = field(default_factory=list)
    failures: list[Line] = field(default_factory=list)
    routings: list[Line] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    def check_hashes(self) -> int:
        """How many results have a hash that another result must have too, and has. Raises AnotherHash.

        Neither the size of chunks nor stages, devices or the prefill mode may change a bit of an answer.
        """
        alike: dict[tuple[Any, ...], list[Line]] = {}
        for result in self.results:
            alike.setdefault((name_of(result, with_mode=False), *map(result.get, OF_AN_ANSWER)), []).append(result)
        for (name, *_), results in alike.items():
            if len({result["output_sha256"] for result in results}) > 1:
                told = "; ".join(f"{r['output_sha256']} with chunks of {r['chunk_rows']}" for r in results)
                raise AnotherHash(f"{name}: {told}. No setting may change a bit of any answer; no page is written")
        return sum(len(results) for results in alike.values() if len(results) > 1)


OF_AN_ANSWER = ("weights", "commit", "seed", "device", "context", "output_tokens")


def name_of(result: Line, with_mode: bool = True) -> str:
    """What was asked, in words."""
    if "streams" in result:
        many = "one request" if result["streams"] == 1 else f"{result['streams']} requests together"
        return f"decode, {many}, {result['context']:,} tokens before"
    return f"{result['prompt_tokens']:,}-token cold prefill" + f", `{result['prefill']}`" * with_mode


def read(files: Sequence[Path]) -> Measured:
    """Raises InputError for what is no such line, and FileError."""
    measured = Measured()
    for file in files:
        text = sys.stdin.read() if str(file) == "-" else read_text(file)
        _take(measured, _lines(file, text))
    if not measured.results and not measured.curves:
        raise InputError(f"{', '.join(map(str, files))}: no results; give lines of rocline bench engine")
    return measured


def _lines(file: Path, text: str) -> Iterable[Line]:
    """What else a script has printed between them is passed over; the last line may have been cut off."""
    numbered = [(number, words) for number, words in enumerate(text.splitlines(), 1) if words.startswith("{")]
    for number, words in numbered:
        try:
            line = json.loads(words)
        except ValueError:
            if number == numbered[-1][0]:
                return
            raise InputError(f"{file}: line {number} is no JSON") from None
        if line.get("rocline_bench") != "engine" or "line" not in line:
            raise InputError(f"{file}: line {number} is not of rocline bench engine")
        yield line


def _take(measured: Measured, lines: Iterable[Line]) -> None:
    """Add a file's lines; a curve goes on until its prefill ends, or something else begins."""
    curve: Curve | None = None
    for line in lines:
        kind = line["line"]
        if kind in ("rows", "prefill"):
            if curve is None or curve.prompt_tokens != line["prompt_tokens"]:
                curve = Curve(line, [])
                measured.curves.append(curve)
            n_rows = line["rows"] if kind == "rows" else line["prompt_tokens"]
            curve.points.append((n_rows, line["seconds"]))
        if kind == "prefill" and curve:
            curve.whole = True
        if kind != "rows":
            curve = None
        if kind in ("prefill", "decode"):
            measured.results.append(line)
        elif kind == "opened" and (command := line.get("command")) and command not in measured.commands:
            measured.commands.append(command)
        elif kind == "ceilings":
            measured.ceilings.append(line)
        elif kind == "failed":
            measured.failures.append(line)
        elif kind == "routing":
            measured.routings.append(line)
        elif kind == "profile":
            measured.profiles.append(Profile(line))
        elif kind == "kernel":
            measured.profiles[-1].kernels.append(line)
        elif kind == "copies":
            measured.profiles[-1].copies.append(line)
        elif kind == "idle":
            measured.profiles[-1].idle.append(line)
        elif kind == "bound":
            measured.profiles[-1].bounds.append(line)
