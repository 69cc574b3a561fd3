"""The file of a sweep's results: a line of JSON that says what was measured, then one for each cell, as they come."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import msgspec

from rocline.tools.tune_cells import Cell, Outcome

FORMAT = 1  # of the lines; another number: fields have changed their meaning


class ResultsError(ValueError):
    """The file holds something else than this sweep's results, or is in use."""


class Results:
    """Outcomes by cell, a later line of a cell in place of an earlier one.

    work       what all cells of the file have in common
    n_dropped  bytes of a line that an earlier sweep did not write to its end
    """

    def __init__(self, path: Path, work: Mapping[str, Any]) -> None:
        """Raises OSError, and ResultsError for a file of other work, which stays as it is."""
        self.path, self.outcomes, self.n_dropped = path, dict[Cell, Outcome](), 0
        self._file = path.open("a+b")
        try:
            self._lock()
            if not self._load(work):
                self._write({"rocline_tune": FORMAT, "work": work})
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self._file.close()

    def add(self, outcome: Outcome) -> None:
        """In the file when this returns. Raises OSError; the outcome is known here all the same."""
        self.outcomes[outcome.cell] = outcome
        self._write(asdict(outcome))

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultsError(f"{self.path}: another sweep writes to it; name another file with --results") from None

    def _load(self, work: Mapping[str, Any]) -> bool:
        """Whether the file has a first line, which then is of this work."""
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if text and not lines:
            raise self._foreign("its first line has no end")
        for number, line in enumerate(lines, 1):
            try:
                if number == 1:
                    self._check(msgspec.json.decode(line), work)
                else:
                    outcome = msgspec.json.decode(line, type=Outcome)
                    self.outcomes[outcome.cell] = outcome
            except msgspec.MsgspecError as error:
                raise self._foreign(f"line {number}: {error}") from error
        self.n_dropped = len(text) - len(whole)
        self._file.truncate(len(whole))
        return bool(lines)

    def _check(self, first: Any, work: Mapping[str, Any]) -> None:
        before = first.get("work") if isinstance(first, dict) and first.get("rocline_tune") == FORMAT else None
        if not isinstance(before, dict):
            raise self._foreign("its first line is another's")
        if differing := [name for name in before | dict(work) if before.get(name) != work.get(name)]:
            told = "; ".join(f"{name} is {before.get(name)} there and {work.get(name)} here" for name in differing)
            raise ResultsError(
                f"{self.path}: of other work: {told}. Repeat that, name another file with --results, or delete this one"
            )

    def _foreign(self, why: str) -> ResultsError:
        return ResultsError(f"{self.path}: no results of rocline tune ({why}); name another file with --results")
