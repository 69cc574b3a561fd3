"""The doctor on a checkpoint: whether its files are whole by their headers, and how fast the disk reads them."""

from __future__ import annotations

import errno
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rocline.engine.checkpoint import READERS
from rocline.engine.config import ModelConfig
from rocline.engine.layout import expected_tensors
from rocline.engine.shards import CheckpointError, read_table
from rocline.tools.doctor_checks import Check, gb_per_s, gib

SAMPLE_BYTES, SAMPLE_S = 512 << 20, 5.0  # read so much, but no longer
BLOCK_BYTES = 16 << 20
LEAST_BYTES = 4 * BLOCK_BYTES
SLOW_BYTES_PER_S = 0.5e9  # 510 GB then take 17 minutes


def checkpoint(folder: Path, config: ModelConfig) -> Check:
    """Every shard's header against the layout of config.json. Reads no weights."""
    it = Check("checkpoint")
    try:
        table = read_table(folder, expected_tensors(config))
    except CheckpointError as error:
        it.values["problems"] = {kind: len(texts) for kind, texts in error.problems.items()}
        found, _, advice = str(error).rpartition("\n")
        if advice.startswith(" "):  # it has none of its own
            found, advice = str(error), "get these files again, or the config.json they belong to"
        it.problem(found, advice)
        return it
    files = {stored.path for stored in table.values()}
    n_bytes = sum(path.stat().st_size for path in files)
    it.values |= {"files": len(files), "tensors": len(table), "bytes": n_bytes}
    plural = "s" if len(files) > 1 else ""
    it.ok(f"{len(table):,} tensors, {gib(n_bytes)}, in {len(files)} file{plural}; every header as it must be")
    return it


def disk(folder: Path) -> Check:
    """How fast the largest shard is read by as many threads as loading has, past the page cache where that goes."""
    it = Check("disk")
    files = [path for path in folder.glob("*.safetensors") if path.is_file()]
    if not files:
        it.not_applicable("no .safetensors file")
        return it
    n_bytes_in_all = sum(path.stat().st_size for path in files)
    largest = max(files, key=lambda path: path.stat().st_size)
    try:
        n_bytes, took_s, is_direct = _read(largest)
    except OSError as error:
        it.problem(f"{largest}: {error.strerror}", "see its permissions, and what the kernel's log says of the disk")
        return it
    rate = n_bytes / max(took_s, 1e-9)
    it.values |= {"file": largest.name, "read_bytes": n_bytes, "took_s": round(took_s, 4), "direct": is_direct}
    it.values["bytes_per_s"] = rate
    what = f"{gib(n_bytes)} of {largest.name}"
    how = "past the page cache" if is_direct else "perhaps from the page cache, so the disk may be slower"
    if largest.stat().st_blocks * 512 < n_bytes:
        it.ok(f"{what}: the file has holes, so the disk was not asked")
    elif took_s > SAMPLE_S and rate < SLOW_BYTES_PER_S:
        it.warning(f"{what} at {gb_per_s(rate)}, {how}", "put the checkpoint on a local NVMe disk")
    elif n_bytes < LEAST_BYTES:
        it.ok(f"{what}: too little to time")
    else:
        it.ok(f"{what} at {gb_per_s(rate)}, {how}; {n_bytes_in_all / rate:,.0f} s for all files")
    return it


def _read(path: Path) -> tuple[int, float, bool]:
    """(bytes read, seconds, whether the page cache was out of the way). Raises OSError."""
    try:
        return (*_timed(path, os.O_DIRECT), True)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what file systems without direct reads say
            raise
        return (*_timed(path, 0), False)


def _timed(path: Path, flags: int) -> tuple[int, float]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # drops what is cached and not dirty, where it may
        n_bytes = min(SAMPLE_BYTES, os.fstat(file).st_size)
        began_s = time.monotonic()
        deadline_s = began_s + SAMPLE_S
        with ThreadPoolExecutor(READERS) as readers:
            starts = range(0, n_bytes, BLOCK_BYTES)
            got = sum(readers.map(lambda start: _read_block(file, start, deadline_s), starts))
        return got, time.monotonic() - began_s
    finally:
        os.close(file)


def _read_block(file: int, start: int, deadline_s: float) -> int:
    """Bytes read; none after the deadline. Direct reads want memory and offsets of whole pages, as mmap gives."""
    if time.monotonic() > deadline_s:
        return 0
    with mmap.mmap(-1, BLOCK_BYTES) as memory:
        return os.preadv(file, [memory], start)
