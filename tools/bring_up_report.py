"""bring-up.json: how far a machine has climbed, written after every rung, and what of it still counts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FORMAT = 1
State = Literal["running", "passed", "failed", "not applicable", "interrupted"]
DONE: tuple[State, ...] = ("passed", "not applicable")
SOURCES = ("*.py", "*.hip", "*.h")


class ReportError(Exception):
    """A file that is no report, or cannot be written; the message says which and what to do."""


@dataclass
class Report:
    """What is known of each rung, by name, in the order of the climb.

    identity  of what climbs: the code, the model, the device. Rungs count only for the same
    about     for readers; changes nothing
    rungs     name, state and the check of each, JSON-ready
    """

    path: Path
    identity: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    rungs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def state(self, name: str) -> State | None:
        return self.rungs[name]["state"] if name in self.rungs else None

    def is_done(self, name: str) -> bool:
        return self.state(name) in DONE

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.rungs.pop(name, None)

    def begin(self, is_other: bool) -> None:
        """Write it once: a place that cannot be written shows before any work. A file there that does not count is kept
        beside it. Raises ReportError."""
        if is_other:
            with contextlib.suppress(OSError):  # then it cannot be written either, which is said
                os.replace(self.path, old_place(self.path))
        self.write()

    def write(self) -> None:
        """Whole or not at all. Raises ReportError."""
        content = {"rocline_bring_up": FORMAT, **self.identity, "about": self.about, "rungs": list(self.rungs.values())}
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        part = None
        try:
            number, part = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
            with open(number, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(part, self.path)
        except OSError as error:
            if part:
                with contextlib.suppress(OSError):
                    os.unlink(part)
            raise ReportError(f"{self.path}: {error.strerror}; name another place with --report") from error


def open_report(path: Path, identity: Mapping[str, Any], about: Mapping[str, Any]) -> tuple[Report, list[str]]:
    """The report at `path`, or a new one; and what of its identity an old one has otherwise, so that it does not count.

    Writes nothing. Raises ReportError for a file that cannot be read, or is something else.
    """
    report, other = Report(path, dict(identity), dict(about)), list[str]()
    if path.exists():
        old = _read(path)
        other = [name for name, value in identity.items() if old.get(name) != value]
        if not other:
            report.rungs = {rung["name"]: rung for rung in old["rungs"]}
    return report, other


def old_place(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def _read(path: Path) -> dict[str, Any]:
    try:
        old = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}; name another place with --report") from error
    except ValueError:
        old = None
    if not isinstance(old, dict) or old.get("rocline_bring_up") != FORMAT:
        raise ReportError(f"{path}: no report of this command; name another place with --report")
    return old


def code_sha256(package: Path) -> str:
    """One number for the code of a package folder: a checkout that was edited is another build."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in package.glob(f"*/**/{pattern}")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def model_sha256(folder: Path) -> str:
    """One number for a checkpoint: its small files by content, its shards by name, size and time of change."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            found = path.stat()
            digest.update(f"{path.name}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
        elif path.suffix == ".json":
            digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
