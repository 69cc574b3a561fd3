"""python -m rocline.tools.bench_attention: attention and the operators round it on one card, as JSON lines.

The release's shapes; medians of device time over rotating inputs, replayed as graphs, each beside the same work in
torch or beside a copy of as many bytes, measured in the same run. Of attention with few rows a graph holds many calls:
what starting a graph takes is left out, as in a decode step. Needs a card that both HIP and torch see.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rocline.hip_kernels.attention_hip import Selected, Turn, Windows, attention_hip, room_bytes
from rocline.hip_kernels.driver import devices
from rocline.hip_kernels.embedding import embedding_hip
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.mhc_hip import (
    Coefficients,
    Merge,
    Mixing,
    Projection,
    mhc_enter_hip,
    mhc_finish_hip,
    mhc_pass_hip,
    partials_shape,
    prepare_projection,
)
from rocline.hip_kernels.rmsnorm import rmsnorm_hip
from rocline.hip_kernels.rope import rope_hip
from rocline.hip_kernels.window_row import window_row_hip
from rocline.tools.bench_index import captured, report, timed_ms

HEADS, WIDTH, WINDOW, TOP = 64, 512, 128, 512
HIDDEN, STREAMS, PAIRS = 5120, 4, 32
EPS = 1e-20
FEW_ROWS_ROUNDS = 8  # of all inputs, in one graph


def attention_flops(n_rows: int) -> float:
    """Scores and values of every slot, present or not."""
    return 4.0 * n_rows * HEADS * (WINDOW + TOP) * WIDTH


class Rows:
    """n_rows consecutive rows of one sequence behind n_history compressed ones, every slot of their lists present."""

    def __init__(self, n_rows: int, n_history: int, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").bfloat16()

        self.q_bf16, self.out_bf16 = normal(n_rows, HEADS, WIDTH), normal(n_rows, HEADS, WIDTH)
        self.sink_f32 = torch.randn(HEADS, generator=generator, device="cuda")
        self.window_bf16, self.history_bf16 = normal(n_rows + WINDOW - 1, WIDTH), normal(n_history, WIDTH)
        noise = torch.rand((n_rows, n_history), generator=generator, device="cuda")
        chosen = noise.topk(TOP, dim=1).indices.sort(1).values.int()
        ints = partial(torch.zeros, dtype=torch.int32, device="cuda")
        first = torch.arange(n_rows, dtype=torch.int32, device="cuda")
        window_u8 = RowFormat("window", WIDTH).pack(self.window_bf16.cpu()).cuda()
        pages_u8 = RowFormat("compressed", WIDTH).pack(self.history_bf16.cpu()).cuda().unflatten(0, (-1, 1024))
        self.windows = Windows(window_u8[None], ints(n_rows), first, ints(n_rows) + WINDOW, WINDOW)
        table = torch.arange(len(pages_u8), dtype=torch.int32, device="cuda")
        self.selected = Selected(pages_u8, table[None], ints(n_rows), chosen)
        n_bytes = room_bytes(self.q_bf16, self.windows, self.selected, self.out_bf16)
        self.room_u8 = torch.empty(n_bytes, dtype=torch.uint8, device="cuda") if n_bytes else None
        self.turn = Turn(*torch.randn((2, n_rows, PAIRS), generator=generator, device="cuda"))
        self.place_i64 = torch.cat((first[:, None] + torch.arange(WINDOW, device="cuda"), chosen + len(window_u8)), 1)
        self.rows_bf16 = torch.cat((self.window_bf16, self.history_bf16))

    def run(self) -> None:
        attention_hip(self.q_bf16, self.windows, self.selected, self.sink_f32, self.out_bf16, self.room_u8, self.turn)

    def run_torch(self) -> None:
        """The usual form: decoded rows gathered, two batched products, one softmax with the sink as a last column."""
        kv_bf16 = self.rows_bf16[self.place_i64]
        scores = torch.bmm(self.q_bf16, kv_bf16.transpose(1, 2)) * WIDTH**-0.5
        sink = self.sink_f32.bfloat16()[None, :, None].expand(len(scores), -1, -1)
        weights = torch.softmax(torch.cat((scores, sink), 2), -1, dtype=torch.bfloat16)[..., :-1]
        torch.bmm(weights, kv_bf16, out=self.out_bf16)


def call_ms(calls: Sequence[Callable[[], None]], n_rows: int, repeats: int) -> float:
    """Of one call of n_rows rows, the calls taking turns."""
    rounds = FEW_ROWS_ROUNDS if n_rows <= 128 else 1

    def run() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    return timed_ms([captured(run)], repeats) / (rounds * len(calls))


def bench_attention(n_rows: int, n_history: int, repeats: int) -> None:
    """The kernel's outputs turn back too, which the torch form leaves out."""
    sets = [Rows(n_rows, n_history, seed) for seed in range(3)]
    tera = attention_flops(n_rows) / 1e12
    ms = call_ms([rows.run for rows in sets], n_rows, repeats)
    torch_ms = call_ms([rows.run_torch for rows in sets], n_rows, repeats)
    facts = {"rows": n_rows, "heads": HEADS, "slots": WINDOW + TOP, "tflops": round(tera / ms * 1e3, 1)}
    report("attention", ms, **facts, torch_ms=round(torch_ms, 4), times_torch=round(torch_ms / ms, 2))


def copy_gb_per_s(n_bytes: int, repeats: int) -> float:
    """Bytes read and written by a copy of n_bytes / 2."""
    pairs = [[torch.empty(n_bytes // 2, dtype=torch.uint8, device="cuda") for _ in range(2)] for _ in range(3)]
    return n_bytes / timed_ms([captured(partial(target.copy_, source)) for source, target in pairs], repeats) / 1e6


def say(what: str, calls: Sequence[Callable[[], object]], n_bytes: int, repeats: int, **facts: object) -> None:
    """Time an operator that moves n_bytes, beside a copy of as many."""
    ms = timed_ms([captured(call) for call in calls], repeats)
    rate, copy = n_bytes / ms / 1e6, copy_gb_per_s(n_bytes, repeats)
    report(what, ms, gb_per_s=round(rate), of_copy=round(rate / copy, 3), **facts)


def bench_rows(n_rows: int, repeats: int) -> None:
    """Operators that move rows: in turn on three sets, larger together than the card's cache."""
    normal = partial(torch.randn, device="cuda")
    row_bytes = n_rows * HIDDEN * 2
    weight = normal(HIDDEN).bfloat16()
    xs = [normal(n_rows, HIDDEN).bfloat16() for _ in range(3)]
    outs = [torch.empty_like(x) for x in xs]
    pairs = list(zip(xs, outs, strict=True))
    say("rmsnorm", [partial(rmsnorm_hip, x, weight, EPS, out) for x, out in pairs], 2 * row_bytes, repeats, rows=n_rows)
    table = normal(16384, HIDDEN).bfloat16()
    ids = torch.randint(0, len(table), (n_rows,), dtype=torch.int32, device="cuda")
    streams = [normal(n_rows, STREAMS, HIDDEN).bfloat16() for _ in range(3)]
    calls = [partial(embedding_hip, ids, table, s) for s in streams]
    say("embedding", calls, (1 + STREAMS) * row_bytes, repeats, rows=n_rows)
    q = [normal(n_rows, HEADS, WIDTH).bfloat16() for _ in range(3)]
    turn = normal(n_rows, PAIRS), normal(n_rows, PAIRS)
    calls = [partial(rope_hip, x, *turn, x) for x in q]
    say("rope in place", calls, 2 * n_rows * HEADS * PAIRS * 4, repeats, rows=n_rows)
    kv = [normal(n_rows, WIDTH).bfloat16() for _ in range(3)]
    packed = torch.empty((n_rows, WIDTH + WIDTH // 32), dtype=torch.uint8, device="cuda")
    calls = [partial(window_row_hip, x, weight[:WIDTH], EPS, *turn, packed) for x in kv]
    say("window_row", calls, n_rows * (WIDTH * 3 + WIDTH // 32 + PAIRS * 8), repeats, rows=n_rows)
    bench_streams(streams, weight, outs, repeats)


def bench_streams(streams: Sequence[Tensor], norm_bf16: Tensor, outs: Sequence[Tensor], repeats: int) -> None:
    """The two mHC kernels of a sublayer, against the 2n + 4 values of a channel that they move."""
    n_rows = len(streams[0])
    normal = partial(torch.randn, device="cuda")
    fn = normal(STREAMS * (STREAMS + 2), STREAMS * HIDDEN) * (STREAMS * HIDDEN) ** -0.5
    projection = Projection(HIDDEN, prepare_projection(fn), normal(3), normal(24))
    made = Coefficients(normal(n_rows, STREAMS), normal(n_rows, STREAMS), normal(n_rows, STREAMS, STREAMS))
    post, comb = normal(n_rows, STREAMS), normal(n_rows, STREAMS, STREAMS)
    partials = normal(*partials_shape(n_rows, HIDDEN))

    def enter(x: Tensor, u: Tensor) -> None:
        mhc_pass_hip(x, Merge(u, post, comb), x, made.pre_f32, u, projection, partials)

    def finish(u: Tensor) -> None:
        mhc_finish_hip(u, norm_bf16, EPS, Mixing(projection, partials, made, 1e-6, 20))

    pairs = list(zip(streams, outs, strict=True))
    values = n_rows * HIDDEN * 2
    say("mhc_pass", [partial(enter, *pair) for pair in pairs], (2 * STREAMS + 2) * values, repeats, rows=n_rows)
    calls = [partial(finish, u) for _, u in pairs]
    say("mhc_finish", calls, 2 * values + partials.nbytes, repeats, rows=n_rows)
    counter, mixing = torch.zeros(1, dtype=torch.int32, device="cuda"), Mixing(projection, partials, made, 1e-6, 20)

    def both(x: Tensor, u: Tensor) -> None:
        mhc_enter_hip(x, Merge(u, post, comb), made.pre_f32, norm_bf16, EPS, mixing, u, counter)

    moved = (2 * STREAMS + 4) * values + 2 * partials.nbytes
    say("mhc_enter", [partial(both, *pair) for pair in pairs], moved, repeats, rows=n_rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all benchmarks; JSON lines to stdout."""
    parser = argparse.ArgumentParser(prog="bench_attention", description=__doc__)
    parser.add_argument("--repeats", type=int, default=21, help="timed calls of each kind")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_attention: torch sees no GPU; install its ROCm build", file=sys.stderr)
        return 1
    with devices()[0].stream():
        for n_rows in (2048, 128, 48, 32, 16, 8, 2, 1):
            bench_attention(n_rows, 65_536, args.repeats)
        for n_rows in (2048, 6, 1):
            bench_rows(n_rows, args.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
