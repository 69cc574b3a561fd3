"""python -m rocline.tools.bench_index: the index path on one card, as JSON lines.

Medians of device time over rotating inputs, larger together than the card's cache; every ceiling is measured in the
same run. Needs a card that both HIP and torch see.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rocline.hip_kernels import index_score
from rocline.hip_kernels.driver import Event, devices
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.index_prepared import TILE_BYTES, VECTORS, Slots, index_prepare_hip
from rocline.hip_kernels.index_score import (
    BLOCK,
    MOST_HEADS,
    History,
    Queries,
    RowTiles,
    block_maxima_hip,
    index_score_hip,
    maxima_stride,
)
from rocline.hip_kernels.index_select import FEW_ROWS, Workspace, index_select_among_hip, index_select_hip
from rocline.hip_kernels.index_vectors import index_query_hip

HEADS, CHANNELS, TOP, CANDIDATES = 32, 128, 512, 2048
PAGE = 2048
OPS_PER_DOT = 2 * CHANNELS
KEY_BYTES = TILE_BYTES // VECTORS  # prepared
ROW = RowFormat("index_key", CHANNELS)


def timed_ms(work: Sequence[Callable[[], object]], repeats: int) -> float:
    """Median device time of one call, the calls taking turns; one warm-up round.

    The host runs ahead of the card, so that what it takes to launch is not in the times.
    """
    for call in work:
        call()
    pairs = []
    for turn in range(repeats):
        start, end = Event(timed=True), Event(timed=True)
        start.record()
        work[turn % len(work)]()
        end.record()
        pairs.append((start, end))
    pairs[-1][1].synchronize()
    return median(end.ms_since(start) for start, end in pairs)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call's launches as one replayed graph, as decode steps run: what the host takes is left out."""
    call()  # compiles and loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    return graph.replay


class Inputs:
    """One set of queries and keys on the card; `spread` sets groups' sizes apart by up to 2^spread."""

    def __init__(self, n_rows: int, n_positions: int, seed: int, spread: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        n_pages = -(-n_positions // PAGE)
        self.q_bf16 = _vectors(generator, (n_rows, HEADS), spread)
        self.k_bf16 = _vectors(generator, (n_pages * PAGE, 1), spread)
        self.weights_bf16 = torch.randn((n_rows, HEADS), generator=generator, device="cuda").mul_(2.0**-6).bfloat16()
        straight = torch.zeros((2, max(n_rows, n_pages * PAGE), 32), device="cuda")
        straight[0] = 1.0  # cosines: no rotation
        self.turn = straight
        self.q_rows_u8 = torch.empty((n_rows, HEADS, ROW.row_bytes), dtype=torch.uint8, device="cuda")
        self.k_rows_u8 = torch.empty((n_pages * PAGE, 1, ROW.row_bytes), dtype=torch.uint8, device="cuda")
        self.quantise(self.k_bf16, self.k_rows_u8)
        self.quantise(self.q_bf16, self.q_rows_u8)
        self.table_i32 = torch.randperm(n_pages, generator=generator, device="cuda").int()
        tiles_u8 = torch.empty((-(-n_rows // VECTORS), HEADS, TILE_BYTES), dtype=torch.uint8, device="cuda")
        keys_u8 = torch.empty((n_pages, PAGE // VECTORS, TILE_BYTES), dtype=torch.uint8, device="cuda")
        visible_i32 = torch.full((n_rows,), n_positions, dtype=torch.int32, device="cuda")
        placed = RowTiles.of([n_rows])
        row_tiles = RowTiles(placed.tiles_i32.cuda(), placed.sequences_i32.cuda(), placed.first)
        self.queries = Queries(tiles_u8, self.weights_bf16, visible_i32, row_tiles)
        self.history = History(keys_u8, self.table_i32[None], n_positions)
        positions_i32 = torch.arange(n_positions, dtype=torch.int32, device="cuda")
        self.key_slots = Slots(positions_i32, torch.zeros_like(positions_i32), self.table_i32[None], PAGE)
        self.prepare()

    def quantise(self, x_bf16: Tensor, rows_u8: Tensor) -> None:
        cos, sin = (part[: len(x_bf16)] for part in self.turn)
        index_query_hip(x_bf16, cos, sin, rows_u8)

    def prepare_queries(self) -> None:
        index_prepare_hip(self.q_rows_u8, self.queries.tiles_u8)

    def prepare_keys(self) -> None:
        index_prepare_hip(self.k_rows_u8, self.history.keys_u8.flatten(0, 1)[:, None], self.key_slots)

    def prepare(self) -> None:
        self.prepare_queries()
        self.prepare_keys()


def _vectors(generator: torch.Generator, shape: tuple[int, int], spread: int) -> Tensor:
    x = torch.randn((*shape, 4, 32), generator=generator, device="cuda")
    sizes = torch.randint(-(spread // 2), spread - spread // 2 + 1, (*shape, 4, 1), generator=generator, device="cuda")
    return (x * torch.exp2(sizes)).flatten(-2).bfloat16()


@contextmanager
def lds_of_heads(most_heads: int) -> Iterator[None]:
    """Launch scoring meanwhile with the LDS of so many heads, as a kernel with room for every model would."""
    real = index_score.rows_lds_bytes

    def wider(n_heads: int) -> int:
        return real(max(n_heads, most_heads))

    index_score.rows_lds_bytes = wider
    try:
        yield
    finally:
        index_score.rows_lds_bytes = real


def torch_short_form(inputs: Inputs, scores_bf16: Tensor, products_bf16: Tensor) -> None:
    """Without the second of the three roundings, which torch would need two more passes for."""
    keys = inputs.k_bf16[: inputs.history.n_positions, 0]
    torch.mm(inputs.q_bf16.flatten(0, 1), keys.T, out=products_bf16)
    dots = products_bf16.view(len(inputs.q_bf16), HEADS, -1).relu_()
    torch.bmm(inputs.weights_bf16[:, None], dots, out=scores_bf16[:, None])


def torch_form(inputs: Inputs, scores_bf16: Tensor, products_bf16: Tensor) -> None:
    """The reference's own operations on BF16 tensors (backbone.md section 7, steps 3 and 4)."""
    keys = inputs.k_bf16[: inputs.history.n_positions, 0]
    torch.mm(inputs.q_bf16.flatten(0, 1), keys.T, out=products_bf16)
    terms = products_bf16.view(len(inputs.q_bf16), HEADS, -1).relu_().mul_(inputs.weights_bf16[:, :, None])
    torch.sum(terms, dim=1, out=scores_bf16)


def report(what: str, ms: float, **facts: object) -> None:
    print(json.dumps({"what": what, "ms": round(ms, 4), **facts}), flush=True)


def bench_ceilings(repeats: int) -> None:
    for name, dtype in (("int8", torch.int8), ("bf16", torch.bfloat16)):
        a, b = (torch.randint(-12, 13, (8192, 8192), device="cuda").to(dtype) for _ in range(2))
        multiply = torch._int_mm if dtype == torch.int8 else torch.mm
        ms = timed_ms([partial(multiply, a, b.T)], repeats)
        report(f"ceiling: {name} product of 8192^3", ms, tops=round(2 * 8192**3 / ms / 1e9, 1))
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    ms = timed_ms([partial(target.copy_, source)], repeats)
    report("ceiling: copy of 1 GiB, read and written", ms, gb_per_s=round((2 << 30) / ms / 1e6))


def bench_scores(n_rows: int, n_positions: int, repeats: int) -> None:
    """Scoring alone; then groups' scales apart, which cannot be summed together, and the LDS of twice the heads."""
    shape: dict[str, Any] = {"rows": n_rows, "positions": n_positions, "heads": HEADS}
    tera_ops = n_rows * n_positions * HEADS * OPS_PER_DOT / 1e12
    sets = [Inputs(n_rows, n_positions, seed) for seed in range(4)]
    maxima = torch.empty((n_rows, maxima_stride(n_positions)), dtype=torch.int16, device="cuda")
    scores = torch.empty((n_rows, n_positions), device="cuda")

    def maxima_of(inputs: Inputs) -> Callable[[], object]:
        return partial(block_maxima_hip, inputs.queries, inputs.history, range(n_rows), maxima)

    def say(what: str, calls: Sequence[Callable[[], object]]) -> None:
        ms = timed_ms(calls, repeats)
        report(what, ms, **shape, tops=round(tera_ops / ms * 1e3, 1), lds_bytes=index_score.rows_lds_bytes(HEADS))

    say("score, block maxima written", [maxima_of(i) for i in sets])
    say("score, FP32 scores written", [partial(index_score_hip, i.queries, i.history, scores) for i in sets])
    with lds_of_heads(MOST_HEADS):
        say("score, block maxima written, LDS for 64 heads", [maxima_of(i) for i in sets])
    say("score, groups' scales apart", [maxima_of(Inputs(n_rows, n_positions, 7, 12))])
    say("score, scales beyond reach", [maxima_of(Inputs(n_rows, n_positions, 8, 120))])
    bench_yardsticks(sets, shape, repeats)


def bench_yardsticks(sets: Sequence[Inputs], shape: dict[str, Any], repeats: int) -> None:
    """What torch takes for the same scores, for choosing from them, and for their products alone."""
    n_rows, n_positions = shape["rows"], shape["positions"]
    products = torch.empty((n_rows * HEADS, n_positions), dtype=torch.bfloat16, device="cuda")
    scores = torch.empty((n_rows, n_positions), dtype=torch.bfloat16, device="cuda")
    for what, form in (("torch BF16 form", torch_form), ("torch BF16 form, one rounding less", torch_short_form)):
        report(what, timed_ms([partial(form, i, scores, products) for i in sets], repeats), **shape)
    report("torch.topk of BF16 scores", timed_ms([partial(torch.topk, scores, TOP, dim=1)], repeats), **shape)
    del products
    q = torch.randint(-12, 13, (n_rows * HEADS, CHANNELS), device="cuda").to(torch.int8)
    k = torch.randint(-12, 13, (n_positions, CHANNELS), device="cuda").to(torch.int8)
    report("torch._int_mm of the products alone", timed_ms([partial(torch._int_mm, q, k.T)], repeats), **shape)


def bench_lists(n_rows: int, n_positions: int, repeats: int, n_sets: int = 3) -> None:
    """Scoring with selection, as index sources, candidate producers and consumers do."""
    sets = [Inputs(n_rows, n_positions, seed) for seed in range(n_sets)]
    n_bytes = Workspace.bytes_for(n_rows, n_positions, TOP)
    room = Workspace(torch.empty(n_bytes, dtype=torch.uint8, device="cuda"))
    selected = torch.empty((n_rows, TOP), dtype=torch.int32, device="cuda")
    blocks = torch.empty((n_rows, CANDIDATES), dtype=torch.int32, device="cuda")
    shape: dict[str, Any] = {"rows": n_rows, "positions": n_positions, "heads": HEADS}
    query_bytes, key_reads = HEADS * KEY_BYTES, -(-n_rows // VECTORS) if n_rows > FEW_ROWS else n_rows
    row_bytes = query_bytes + maxima_stride(n_positions) * 2 * 4 + TOP * BLOCK * (KEY_BYTES + 2 * 4)

    def say(what: str, facts: dict[str, Any], operator: Callable[..., None], *operands: object) -> None:
        calls = [captured(partial(operator, i.queries, i.history, *operands)) for i in sets]
        report(what, timed_ms(calls, repeats), **shape, **facts)

    facts = {
        "workspace_bytes": n_bytes,
        "least_bytes_moved": n_positions * KEY_BYTES + n_rows * row_bytes,
        "bytes_through_cache": key_reads * n_positions * KEY_BYTES + n_rows * row_bytes,
    }
    say("score and select 512", facts, index_select_hip, room, selected)
    say("score, select 512 and 2048 candidate blocks", facts, index_select_hip, room, selected, blocks)
    n_bytes = Workspace.bytes_for(n_rows, 0, CANDIDATES)
    room = Workspace(torch.empty(n_bytes, dtype=torch.uint8, device="cuda"))
    moved = n_rows * (query_bytes + CANDIDATES * BLOCK * (KEY_BYTES + 2 * 4))
    facts = {"workspace_bytes": n_bytes, "bytes_through_cache": moved}
    say("score and select 512 among candidates", facts, index_select_among_hip, room, blocks, selected)


def bench_preparation(n_rows: int, n_positions: int, repeats: int) -> None:
    """What writing the prepared form costs, for a chunk and for a whole history."""
    sets = [Inputs(n_rows, n_positions, seed) for seed in range(3)]
    facts = {"rows": n_rows, "positions": n_positions, "heads": HEADS}
    report("prepare the queries", timed_ms([i.prepare_queries for i in sets], repeats), **facts)
    report("prepare all keys", timed_ms([i.prepare_keys for i in sets], repeats), **facts)
    calls = [partial(i.quantise, i.q_bf16, i.q_rows_u8) for i in sets]
    report("rotate and quantise the queries", timed_ms(calls, repeats), **facts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all benchmarks; JSON lines to stdout."""
    parser = argparse.ArgumentParser(prog="bench_index", description=__doc__)
    parser.add_argument("--repeats", type=int, default=21, help="timed calls of each kind")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_index: torch sees no GPU; install its ROCm build", file=sys.stderr)
        return 1
    with devices()[0].stream():
        bench_ceilings(args.repeats)
        for n_rows, n_positions in ((128, 131_072), (32, 524_288)):
            bench_scores(n_rows, n_positions, args.repeats)
            bench_lists(n_rows, n_positions, args.repeats)
        bench_lists(128, 1 << 20, args.repeats, 2)
        bench_lists(1, 1 << 20, args.repeats, 2)
        bench_lists(2048, 131_072, args.repeats, 2)
        bench_preparation(1024, 131_072, args.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
