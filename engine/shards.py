"""The table of a sharded safetensors checkpoint, checked whole before a byte of weights is read.

A shard is an 8-byte little-endian header length, a JSON header, and the tensors' bytes without gaps. The
headers are parsed here: the release's F8_E8M0 scales and packed I8 codes are bytes at an offset, and every
fault shall be listed, not the first one raised. Nothing in a file is trusted.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rocline.engine.layout import DTYPE_BYTES, TensorSpec

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit; the release's longest is 0.3 MB
SHOWN_PER_KIND = 8


class CheckpointError(ValueError):
    """A checkpoint cannot be used. `problems` holds every fault, by kind; the message shows the first few."""

    def __init__(self, where: Path | str, problems: Mapping[str, Iterable[str]], advice: str = "") -> None:
        self.problems = {kind: list(texts) for kind, texts in problems.items()}
        lines = [f"{where}: checkpoint refused"]
        for kind, texts in self.problems.items():
            lines.append(f"  {kind} ({len(texts):,}):")
            lines += [f"    {text}" for text in texts[:SHOWN_PER_KIND]]
            if len(texts) > SHOWN_PER_KIND:
                lines.append(f"    ... and {len(texts) - SHOWN_PER_KIND:,} more")
        super().__init__("\n".join([*lines, advice] if advice else lines))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a checked tensor's bytes lie: `offset` is from the start of the shard's file."""

    path: Path
    offset: int
    spec: TensorSpec


@dataclass
class _Problems:
    by_kind: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, text: str) -> None:
        self.by_kind.setdefault(kind, []).append(text)


_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Claim(msgspec.Struct):
    """A header's words on one tensor. Few and bounded sizes: their product stays a small number."""

    dtype: Annotated[str, msgspec.Meta(pattern=r"^\w{1,16}$")]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a header as the file claims it; `begin` and `end` count from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _BadHeader(Exception):
    """A shard without a usable header; the message says why."""


def read_table(folder: Path, expected: Mapping[str, TensorSpec]) -> dict[str, StoredTensor]:
    """Match the files of `folder` against `expected`; the table is in the order of `expected`.

    Raises CheckpointError listing everything that is missing, short, misshapen, of another dtype, stored
    twice, overlapping, unknown, or not where the index says.
    """
    problems = _Problems()
    weight_map = _read_index(folder, problems)
    found: dict[str, tuple[Path, _Entry]] = {}
    unreadable = set()
    for file in sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_FILE]:
        path = folder / file
        try:
            entries = _read_shard(path, problems)
        except _BadHeader as error:
            unreadable.add(file)
            problems.add("unreadable shards", f"{file}: {error}")
            continue
        for entry in entries:
            if entry.name in found:
                first = found[entry.name][0].name
                problems.add("duplicate tensors", f"{entry.name}: in {first} and in {file}")
            found.setdefault(entry.name, (path, entry))
    if weight_map is not None:
        _compare_with_index(weight_map, found, unreadable, problems)
    _compare_with_layout(expected, found, weight_map, unreadable, problems)
    if problems.by_kind:
        raise CheckpointError(folder, problems.by_kind, "get these files again, or the config.json they belong to")
    return {
        name: StoredTensor(path=found[name][0], offset=found[name][1].begin, spec=spec)
        for name, spec in expected.items()
    }


def _read_index(folder: Path, problems: _Problems) -> dict[str, str] | None:
    """Tensor name to file name, or None where a single file stands without an index."""
    path = folder / INDEX_FILE
    if not path.exists():
        if not (folder / SINGLE_FILE).exists():
            raise CheckpointError(folder, {"no weights": [f"neither {INDEX_FILE} nor {SINGLE_FILE} is there"]})
        return None
    try:
        with path.open("rb") as file:
            weight_map = _parse_object(file.read(MAX_HEADER_BYTES)).get("weight_map")
    except (OSError, _BadHeader) as error:
        raise CheckpointError(folder, {"unreadable index": [f"{INDEX_FILE}: {error}"]}) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(folder, {"unreadable index": [f"{INDEX_FILE}: weight_map is no filled object"]})
    files: dict[str, str] = {}
    for name, file in weight_map.items():
        if isinstance(file, str) and file.isprintable() and re.fullmatch(r"[^/]+\.safetensors", file):
            files[name] = file
        else:
            problems.add("index", f"{name}: {file!r:.100} is not the name of a .safetensors file of this folder")
    return files


def _parse_object(text: bytes) -> dict[str, Any]:
    """A JSON object whose keys are unique on every level; json alone would keep the last of two."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(keys := dict(pairs)) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in keys if names.count(name) > 1)
            raise _BadHeader(f"{twice!r:.100} is there twice")
        return keys

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _BadHeader(f"not JSON: {error!s:.200}") from error
    if not isinstance(value, dict):
        raise _BadHeader(f"JSON, but {type(value).__name__} in place of an object")
    return value


def _read_shard(path: Path, problems: _Problems) -> list[_Entry]:
    """The entries of one shard whose bytes are all inside the file; other faults go to `problems`."""
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            if file_bytes < 8:
                raise _BadHeader(f"{file_bytes} bytes, too few for a header")
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                text = f"the limit is {MAX_HEADER_BYTES:,} and the file has {file_bytes:,}"
                raise _BadHeader(f"header of {header_bytes:,} bytes, {text}")
            header = _parse_object(file.read(header_bytes))
    except OSError as error:
        raise _BadHeader(error.strerror or str(error)) from error
    header.pop("__metadata__", None)
    data_begin = 8 + header_bytes
    entries = []
    for name, claim in header.items():
        if entry := _check_claim(name, claim, data_begin, path.name, problems):
            entries.append(entry)
    _check_extent(entries, data_begin, file_bytes, path.name, problems)
    return entries


def _check_claim(name: str, claim: Any, data_begin: int, file: str, problems: _Problems) -> _Entry | None:
    try:
        fields = msgspec.convert(claim, _Claim)
    except msgspec.ValidationError as error:
        problems.add("malformed entries", f"{name!r:.100} in {file}: {error}")
        return None
    begin, end = (data_begin + offset for offset in fields.data_offsets)
    if begin > end or not name.isprintable():
        text = f"{name!r:.100} in {file}: data_offsets {list(fields.data_offsets)}"
        problems.add("malformed entries", text)
        return None
    want = prod(fields.shape) * DTYPE_BYTES.get(fields.dtype, 0)
    if want != end - begin and fields.dtype in DTYPE_BYTES:
        claimed = f"{fields.dtype} {list(fields.shape)}"
        problems.add("malformed entries", f"{name} in {file}: {end - begin:,} bytes, {want:,} for {claimed}")
    return _Entry(name, fields.dtype, fields.shape, begin, end)


def _check_extent(entries: list[_Entry], data_begin: int, file_bytes: int, file: str, problems: _Problems) -> None:
    """The tensors of a shard tile its data: no two share a byte, none is cut off, nothing lies between."""
    position, before = data_begin, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin < position:
            problems.add("overlapping tensors", f"{entry.name} begins inside {before} in {file}")
        elif entry.begin > position:
            text = f"{entry.begin - position:,} bytes between {before} and {entry.name} in {file}"
            problems.add("unclaimed bytes", text)
        if entry.end >= position:
            position, before = entry.end, entry.name
    if position > file_bytes:
        cut = [entry.name for entry in entries if entry.end > file_bytes]
        text = f"{file}: {file_bytes:,} of {position:,} bytes; {len(cut):,} tensors cut off, one is {cut[0]}"
        problems.add("short shards", text)
    elif position < file_bytes:
        problems.add("unclaimed bytes", f"{file_bytes - position:,} bytes after {before} in {file}")


def _compare_with_index(
    weight_map: Mapping[str, str],
    found: Mapping[str, tuple[Path, _Entry]],
    unreadable: set[str],
    problems: _Problems,
) -> None:
    for name, file in weight_map.items():
        if name in found and found[name][0].name != file:
            problems.add("index", f"{name}: listed in {file}, stored in {found[name][0].name}")
        elif name not in found and file not in unreadable:
            problems.add("index", f"{name}: listed in {file}, which does not hold it")
    for name, (path, _) in found.items():
        if name not in weight_map:
            problems.add("index", f"{name}: stored in {path.name}, not listed")


def _compare_with_layout(
    expected: Mapping[str, TensorSpec],
    found: Mapping[str, tuple[Path, _Entry]],
    weight_map: Mapping[str, str] | None,
    unreadable: set[str],
    problems: _Problems,
) -> None:
    for name, spec in expected.items():
        if name in found:
            entry = found[name][1]
            if entry.dtype != spec.dtype:
                problems.add("wrong dtypes", f"{name}: {entry.dtype}, want {spec.dtype}")
            if entry.shape != spec.shape:
                problems.add("wrong shapes", f"{name}: {list(entry.shape)}, want {list(spec.shape)}")
        # What an unreadable shard should hold is that shard's one problem, not thousands.
        elif (weight_map or {}).get(name, SINGLE_FILE) not in unreadable:
            problems.add("missing tensors", f"{name}: {spec.dtype} {list(spec.shape)}")
    for name, (path, entry) in found.items():
        if name not in expected:
            text = f"{name:.100}: {entry.dtype} {list(entry.shape)} in {path.name}"
            problems.add("unknown tensors", text)
