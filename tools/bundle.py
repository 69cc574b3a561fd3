"""A file to send to somebody who shall find out what is wrong: what the doctor found, and logs without their words.

Nothing goes in but what is named here: no prompt, no answer, no key. Where a key is known, it is masked wherever it
turned up all the same; the home folder is written "~".
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from rocline.hip_kernels.compile import CACHE
from rocline.http.settings import Settings
from rocline.pipeline.options import Options

# As serve has them, which would bring the server's packages along: a broken installation may lack some.
PREFIX, CONFIG_FILE = "ROCLINE_", "rocline.toml"
KEYS_VARIABLE = PREFIX + "API_KEYS"
SETTINGS: Mapping[str, Any] = {"model": str} | get_type_hints(Settings) | get_type_hints(Options)
VARIABLES = (
    "ROCM_PATH",
    "LD_LIBRARY_PATH",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HSA_OVERRIDE_GFX_VERSION",
    "HSA_ENABLE_SDMA",
    "HSA_FORCE_FINE_GRAIN_PCIE",
    "HIP_LAUNCH_BLOCKING",
    "AMD_SERIALIZE_KERNEL",
    "AMD_SERIALIZE_COPY",
    "AMD_LOG_LEVEL",
    "GPU_MAX_HW_QUEUES",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "OMP_NUM_THREADS",
)
# Fields of the server's log lines that hold numbers, or words of its own.
LOG_NUMBERS = (
    "time",
    "choice",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "ttft_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "chunk_rows",
    "device_allocs",
    "min_headroom_bytes",
    "queued",
    "prefilling",
    "decoding",
    "paused",
    "prompt_rows",
    "free_pages",
    "busy_s",
    "context",
    "started_s",
    "requests",
    "drain_s",
    "drained",
)
LOG_WORDS = ("event", "route", "reason", "state", "error", "where")
LOG_TABLES = {"stages": ("stage", "device", "layers", "arena_bytes")}
EVENT = re.compile(r"^[a-z_]{1,32}$")
FRAME = re.compile(r'^\s*File "[^"]+", line \d+, in [\w.<>]+$')  # of a traceback: a place, no value
MOST_WORD = 2000  # characters of a word of the log
MOST_LOG_BYTES = 64 << 20  # the end of a longer log
LEAST_KEY = 6  # characters: shorter ones would mask half of every file
TRACES = "traces"  # where README has traces written
FORM_KEY = re.compile(r"^[a-z0-9]+ [0-9x+]+ rows [0-9]+$")


class BundleError(Exception):
    """The file cannot be written, or a log not read; the message says which and why."""


class Bundle:
    """A file in the making. `names`: what write() put into it. close() throws an unfinished one away."""

    def __init__(self, path: Path, part: Path, logs: Sequence[Path]) -> None:
        self.path, self.names = path, list[str]()
        self._part, self._logs = part, logs

    @classmethod
    def create(cls, path: Path, logs: Sequence[Path]) -> Bundle:
        """Raises BundleError, before anything has been done, where the file could not be written in the end."""
        for log in logs:
            if not (log.is_file() and os.access(log, os.R_OK)):
                raise BundleError(f"--log {log}: no file that can be read")
        if path.is_dir():
            raise BundleError(f"--bundle {path}: is a folder; name a file, such as {path / 'rocline.tar.gz'}")
        try:
            number, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            os.close(number)
        except OSError as error:
            raise BundleError(f"--bundle {path}: {error.strerror}; name a file in a folder you may write to") from error
        return cls(path, Path(part), logs)

    def write(self, report: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        """Raises OSError where the disk is full."""
        keys = known_keys(environ)
        with tarfile.open(self._part, "w:gz") as archive:
            for name, text in _members(report, environ, self._logs):
                data = json.dumps(masked(text, keys), indent=1, ensure_ascii=False).encode()
                entry = tarfile.TarInfo(f"rocline-doctor/{name}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
                self.names.append(name)
        self._part.replace(self.path)

    def close(self) -> None:
        self._part.unlink(missing_ok=True)


def _members(report: Mapping[str, Any], environ: Mapping[str, str], logs: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    checks = {check["name"]: check for check in report["checks"]}
    yield "doctor.json", report
    yield "versions.json", checks["versions"]["values"]
    if plan := checks["plan"]["values"].get("plan"):
        yield "plan.json", plan
    yield "environment.json", {name: environ[name] for name in VARIABLES if name in environ}
    yield "settings.json", shown_settings(environ)
    yield "forms.json", measured_forms(CACHE)
    yield "traces.json", sorted(path.name for path in Path(TRACES).glob("*.csv"))
    for number, log in enumerate(logs):
        yield f"log-{number}.json", shown_log(log)


def measured_forms(folder: Path) -> dict[str, dict[str, Any]]:
    """Of each file of tactics.py: what launches took on a kind of card."""
    shown: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("tactics-*.json")):
        with suppress(OSError, ValueError, AttributeError):
            entries = json.loads(path.read_text("utf-8")).items()
            shown[path.name] = {
                key: {"form": of["form"], "us": of["us"]}
                for key, of in entries
                if FORM_KEY.match(key) and _is_numbers([of.get("form"), *of.get("us", {}).values()])
            }
    return shown


def shown_settings(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Settings of rocline.toml and the environment: numbers and choices by value, of others only that they are set."""
    shown: dict[str, dict[str, Any]] = {"file": {}, "environment": {}}
    for name, value in _toml(environ).items():
        if name in SETTINGS:
            shown["file"][name] = _harmless(name, value)
    for name in SETTINGS:
        if (variable := PREFIX + name.upper()) in environ:
            shown["environment"][name] = _harmless(name, environ[variable])
    return shown


def _harmless(name: str, value: Any) -> Any:
    """The value where only numbers, switches and a setting's own words can be meant; else "set"."""
    kind = SETTINGS[name]
    if str in _plain_types(kind):
        return "set"
    try:
        return msgspec.to_builtins(msgspec.convert(value, kind, strict=not isinstance(value, str)))
    except msgspec.ValidationError:
        return "set, not as it should be"


def _plain_types(kind: Any) -> set[Any]:
    """The types that a type is made of; a Literal's words are none."""
    parts = getattr(kind, "__args__", ())
    if not parts or any(isinstance(part, str) for part in parts):
        return {kind}
    return set().union(*(_plain_types(part) for part in parts if part is not Ellipsis))


def _toml(environ: Mapping[str, str]) -> dict[str, Any]:
    with suppress(OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return tomllib.loads(Path(environ.get(PREFIX + "CONFIG") or CONFIG_FILE).read_text("utf-8"))
    return {}


def shown_log(log: Path) -> dict[str, Any]:
    """What of a server's log holds no word of a request: figures of its lines, and places of tracebacks."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - MOST_LOG_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    kept, n_left_out = list[Any](), 0
    for line in lines:
        if FRAME.match(line):
            kept.append(line.strip())
        elif entry := _shown_line(line):
            kept.append(entry)
        elif line.strip():
            n_left_out += 1
    return {"name": log.name, "lines": kept, "lines_left_out": n_left_out}


def _shown_line(line: str) -> dict[str, Any] | None:
    """Fields that are known, of a line that is the server's own, whatever a supervisor has put before it."""
    try:
        fields = json.loads(line[line.index("{") :])
    except ValueError:
        return None
    if not isinstance(fields, dict) or not EVENT.match(str(fields.get("event"))):
        return None
    shown: dict[str, Any] = {name: fields[name] for name in LOG_NUMBERS if _is_numbers(fields.get(name))}
    for name in LOG_WORDS:
        if isinstance(fields.get(name), str):
            shown[name] = fields[name][:MOST_WORD]
    for name, columns in LOG_TABLES.items():
        rows = [row for row in fields.get(name) or () if isinstance(row, dict)]
        shown |= {name: [{c: row[c] for c in columns if _is_numbers(row.get(c))} for row in rows]} if rows else {}
    return shown


def _is_numbers(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_numbers, value))
    return isinstance(value, int | float)


def known_keys(environ: Mapping[str, str]) -> list[str]:
    """Keys that the server would take, and whatever else of rocline.toml may be one: words of no known setting."""
    keys = environ.get(KEYS_VARIABLE, "").split(",")
    toml = _toml(environ)
    for value in (toml.get("api_key_file"), environ.get(PREFIX + "API_KEY_FILE")):
        if isinstance(value, str):
            keys.append(value)  # perhaps the key itself was written where its file should be named
            with suppress(OSError, UnicodeDecodeError):
                keys += Path(value).read_text("utf-8").splitlines()
    keys += _words({name: value for name, value in toml.items() if name not in SETTINGS})
    return sorted({key.strip() for key in keys if len(key.strip()) >= LEAST_KEY}, key=len, reverse=True)


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _words(list(value.values()))
    elif isinstance(value, list):
        for part in value:
            yield from _words(part)


def masked(value: Any, keys: Sequence[str]) -> Any:
    """The same JSON-ready data, keys and the home folder replaced in every word of it."""
    if isinstance(value, str):
        for key in keys:
            value = value.replace(key, "[key]")
        return value.replace(str(Path.home()), "~")
    if isinstance(value, Mapping):
        return {masked(name, keys): masked(part, keys) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [masked(part, keys) for part in value]
    return value
