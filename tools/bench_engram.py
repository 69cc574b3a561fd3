"""python -m rocline.tools.bench_engram: table rows a second that threads hash and gather, from a table in memory.

The release's hash (24 columns, n-grams of 2 to 4 tokens) and row (256 codes, 8 scales), over buckets that make the
table as large as asked; its content does not matter. Tokens are random, so every row is as far away as can be.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

from rocline.engine.engram import EngramTable, table_room
from rocline.engine.engram_ahead import EngramAhead
from rocline.engine.ngrams import ngram_tables

GIB = 1 << 30
VOCAB = 99_092  # compressed ids of the release
MAX_NGRAM, N_HEADS = 4, 8
CODES, SCALES = 256, 8  # bytes of a row
IN_FLIGHT = 4  # chunks: their stages take them later


def table_of(table_bytes: int) -> EngramTable:
    """One layer's table, every byte of it written."""
    buckets = table_bytes // (CODES + SCALES) // (MAX_NGRAM - 1) // N_HEADS
    ngrams = ngram_tables([1], MAX_NGRAM, N_HEADS, max(2, buckets), VOCAB)[0]
    codes, scales = (table_room(ngrams.n_rows, width).fill_(0x38) for width in (CODES, SCALES))
    return EngramTable.build(ngrams, codes, scales, np.arange(VOCAB, dtype=np.int32), pad_token=2)


def rates(table: EngramTable, n_threads: int, chunk_rows: int, seconds: float) -> tuple[float, float]:
    """Table rows gathered by n_threads in chunks of chunk_rows tokens: a second, and a second of processor time.

    The latter is what a busy host leaves comparable.
    """
    rng = np.random.default_rng(0)
    chunks = [
        torch.from_numpy(rng.integers(0, VOCAB, (chunk_rows, MAX_NGRAM), dtype=np.int32)) for _ in range(4 * IN_FLIGHT)
    ]
    ahead = EngramAhead({1: table}, n_threads)
    waiting = deque(ahead.start(chunk) for chunk in chunks[:IN_FLIGHT])
    n_taken, began_s, began_cpu_s = 0, time.perf_counter(), time.process_time()
    while (took_s := time.perf_counter() - began_s) < seconds:
        gathered = waiting.popleft()
        gathered.take(1)
        gathered.release()
        n_taken += 1
        waiting.append(ahead.start(chunks[n_taken % len(chunks)]))
    took_cpu_s = time.process_time() - began_cpu_s
    ahead.close()
    n_rows = n_taken * chunk_rows * len(table.primes_i64)
    return n_rows / took_s, n_rows / took_cpu_s


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.machine()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_engram", description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the table (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--chunk-rows", type=int, nargs="+", default=[1, 64, 1024], metavar="R", help="tokens a chunk")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.gib * 1.05 * GIB > psutil.virtual_memory().available:
        free_gib = psutil.virtual_memory().available / GIB
        print(f"bench_engram: {free_gib:.1f} GiB of memory are free; lower --gib {args.gib}", file=sys.stderr)
        return 1
    table = table_of(int(args.gib * GIB))
    n_bytes = table.codes_e4m3.nbytes + table.scales_e8m0.nbytes
    cores = f"{psutil.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}"
    print(f"{cpu_name()}, {cores}; table of {n_bytes / GIB:.2f} GiB, {len(table.codes_e4m3):,} rows")
    for chunk_rows in args.chunk_rows:
        for n_threads in args.threads:
            rate, cpu_rate = rates(table, n_threads, chunk_rows, args.seconds)
            print(
                f"chunk {chunk_rows:5}  threads {n_threads}  {rate / 1e6:6.2f} million table rows/s"
                f"  {cpu_rate / 1e6:6.2f} a processor second",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
