"""python -m rocline.tools.bench_gemm: the matrix products on one card, as JSON lines.

Medians of device time over rotating weights, larger together than the card's cache; every yardstick is measured in the
same run: cuBLAS (rocBLAS) on decoded BF16 weights, a loop of those over experts, and copies. Needs a card that both HIP
and torch see.

of_copy        weight bytes a second over the bytes that a copy of 1 GiB reads and writes a second
of_alike_copy  the same over copies of as many bytes as the weights have, or of 1 GiB, queued as these products are
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from rocline.hip_kernels.act_quant import act_round8_hip
from rocline.hip_kernels.driver import devices
from rocline.hip_kernels.experts import swiglu_ref
from rocline.hip_kernels.experts_hip import ExpertRoom, ExpertWeights, experts_hip, prepare_fp4_weight, shared_up_hip
from rocline.hip_kernels.formats import dequantise_tiles, e2m1x2_decode, e8m0_decode
from rocline.hip_kernels.grouped_projection_hip import grouped_projection_hip
from rocline.hip_kernels.linear import Fp4Weight, Fp8Weight
from rocline.hip_kernels.linear_hip import (
    Product,
    Turn,
    f32_linear_hip,
    fp8_linear_hip,
    multiply_together,
    prepare_bf16_weight,
    prepare_fp8_weight,
    rounds_rows,
    workspace_floats,
)
from rocline.hip_kernels.rope import rope_hip
from rocline.hip_kernels.router_hip import router_hip
from rocline.hip_kernels.weight_tiles import WeightTiles
from rocline.tools.bench_index import captured, report, timed_ms

# [N, K] of the release's dense linears (backbone.md section 12).
DENSE = {
    "wq_a": (1280, 5120),
    "wkv": (512, 5120),
    "wq_b": (32768, 1280),
    "wo_b": (5120, 8192),
    "indexer.wq_b": (4096, 1280),
    "shared w1": (2304, 5120),
    "shared w2": (5120, 2304),
    "engram.wkv": (25600, 6144),
}
TOGETHER = ("wq_a", "wkv")  # in one launch
WO_A, GROUPS = (8192, 4096), 8  # of the heads, in groups
HEADS, HEAD_WIDTH, PAIRS = 64, 512, 32
WIDTH, INNER = 5120, 2304
FEW = (1, 6)
CACHE_BYTES = 200 << 20  # of weights in turn: several times what a card keeps
COPY_BYTES = 1 << 30


def random_fp8(n_out: int, n_in: int, seed: int) -> Fp8Weight:
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn((n_out, n_in), generator=generator, device="cuda") * 64
    shape = (-(-n_out // 32), n_in // 32)
    scales = torch.randint(112, 120, shape, generator=generator, device="cuda", dtype=torch.uint8)
    return Fp8Weight(values.to(torch.float8_e4m3fn).view(torch.uint8), scales)


def random_rows(n_rows: int, width: int) -> Tensor:
    x = torch.randn((n_rows, width), device="cuda").bfloat16()
    act_round8_hip(x, x)
    return x


def workspace_for(n_rows: int, *tiles: WeightTiles) -> Tensor:
    return torch.empty(max(1, workspace_floats(n_rows, *tiles)), device="cuda")


def weight_sets(n_out: int, n_in: int, groups: int = 1) -> list[WeightTiles]:
    """As many as take turns without the card keeping one."""
    n_sets = max(2, min(24, CACHE_BYTES // (n_out * n_in)))
    return [prepare_fp8_weight(random_fp8(n_out, n_in, seed), groups) for seed in range(n_sets)]


def bf16(n_rows: int, width: int) -> Tensor:
    return torch.empty((n_rows, width), dtype=torch.bfloat16, device="cuda")


def copy_gb_per_s(repeats: int) -> float:
    """Bytes read and written a second by a copy of 1 GiB."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    ms = timed_ms([partial(target.copy_, source)], repeats)
    rate = 2 * COPY_BYTES / ms / 1e6
    report("copy of 1 GiB, read and written", ms, gb_per_s=round(rate))
    return rate


@cache
def alike_gb_per_s(n_bytes: int, repeats: int) -> float:
    """Bytes read and written a second by copies of n_bytes, one after the other in a graph."""
    n_sets = max(2, min(24, CACHE_BYTES // n_bytes))
    buffers = [[torch.empty(n_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)] for _ in range(n_sets)]
    return 2 * n_bytes / many_ms([partial(target.copy_, source) for source, target in buffers], repeats) / 1e6


def report_rate(what: str, n_rows: int, n_bytes: int, ms: float, copied: float, repeats: int) -> None:
    """A product that is to be bound by the n_bytes of its weights."""
    rate = n_bytes / ms / 1e6
    alike = alike_gb_per_s(n_bytes, repeats) if n_bytes < COPY_BYTES else copied
    of_copies = {"of_copy": round(rate / copied, 3), "of_alike_copy": round(rate / alike, 3)}
    report(what, ms, rows=n_rows, gb_per_s=round(rate), **of_copies)


def bench_few(copied: float, repeats: int) -> None:
    """One to six rows, by weight bytes a second, as graphs: what the host takes to launch is left out."""
    for name, (n_out, n_in) in DENSE.items():
        sets = weight_sets(n_out, n_in)
        for n_rows in FEW:
            x, out = random_rows(n_rows, n_in), bf16(n_rows, n_out)
            calls = [partial(fp8_linear_hip, x, tiles, out) for tiles in sets]
            report_rate(f"{name}, few rows", n_rows, n_out * n_in, many_ms(calls, repeats), copied, repeats)


def bench_together(n_rows: int, repeats: int) -> None:
    """What shares a launch with a product, against launches apart."""

    def compare(
        what: str, one: Sequence[Callable[[], object]], apart: Sequence[Sequence[Callable[[], object]]]
    ) -> None:
        ms, apart_ms = many_ms(one, repeats), many_ms([call for calls in apart for call in calls], repeats)
        report(what, ms, rows=n_rows, apart_ms=round(apart_ms * len(apart[0]), 4))

    (a_out, width), (kv_out, _) = (DENSE[name] for name in TOGETHER)
    first, second = weight_sets(a_out, width), weight_sets(kv_out, width)
    x, a, kv = random_rows(n_rows, width), bf16(n_rows, a_out), bf16(n_rows, kv_out)
    both = [(Product(f, a), Product(s, kv)) for f, s in zip(first, second, strict=False)]
    room = workspace_for(n_rows, first[0], second[0])
    one = [partial(multiply_together, "both", x, products, room) for products in both]
    apart = [[partial(fp8_linear_hip, x, *product, room) for product in products] for products in both]
    compare("wq_a and wkv", one, apart)

    sets, (n_out, rank) = weight_sets(*DENSE["wq_b"]), DENSE["wq_b"]
    x, q = random_rows(n_rows, rank), bf16(n_rows, n_out)
    cos, sin = (torch.rand((n_rows, PAIRS), device="cuda") for _ in range(2))
    turn = Turn(cos, sin, HEAD_WIDTH)
    room, heads = workspace_for(n_rows, sets[0]), q.view(n_rows, HEADS, HEAD_WIDTH)
    turning = partial(rope_hip, heads, cos, sin, heads)
    one = [partial(fp8_linear_hip, x, tiles, q, room, turn=turn) for tiles in sets]
    compare("wq_b and the rotation", one, [[partial(fp8_linear_hip, x, tiles, q, room), turning] for tiles in sets])
    if rounds_rows(n_rows, rank):
        one = [partial(fp8_linear_hip, x, tiles, q, room, round_rows=True) for tiles in sets]
        rounding = partial(act_round8_hip, x, x)
        compare("ActQuant8 and wq_b", one, [[rounding, partial(fp8_linear_hip, x, tiles, q, room)] for tiles in sets])

    sets, (n_out, n_in) = weight_sets(*WO_A, GROUPS), WO_A
    x, out = random_rows(n_rows, GROUPS * n_in).view(n_rows, HEADS, HEAD_WIDTH), bf16(n_rows, n_out)
    room, rounding = workspace_for(n_rows, sets[0]), partial(act_round8_hip, out, out)
    one = [partial(grouped_projection_hip, x, tiles, out, room, round_out=True) for tiles in sets]
    apart = [[partial(grouped_projection_hip, x, tiles, out, room), rounding] for tiles in sets]
    compare("wo_a and ActQuant8", one, apart)


def many_ms(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    """Median time of one call among all of them in a row in one graph."""

    def all_of_them() -> None:
        for call in calls:
            call()

    return timed_ms([captured(all_of_them)], repeats) / len(calls)


def bench_dense(n_rows: int, repeats: int) -> None:
    """Many rows against the library on weights decoded to BF16 beforehand: each weight, and two that share a launch."""
    for names in (*((name,) for name in DENSE), TOGETHER):
        widths, n_in = [DENSE[name][0] for name in names], DENSE[names[0]][1]
        weights = [[random_fp8(n_out, n_in, seed) for n_out in widths] for seed in range(2)]
        sets = [[prepare_fp8_weight(weight) for weight in each] for each in weights]
        x, outs = random_rows(n_rows, n_in), [bf16(n_rows, n_out) for n_out in widths]
        room = workspace_for(n_rows, *sets[0])
        both = [list(map(Product, tiles, outs)) for tiles in sets]
        calls = [partial(multiply_together, "dense", x, products, room) for products in both]
        _against_library(" and ".join(names), x, calls, weights, repeats)


def bench_shared_up(n_rows: int, repeats: int) -> None:
    """The shared expert's gate and up as the engine launches them, SiLU and ActQuant8 included; the library has none of
    those, and both weights as one."""
    weights = [[random_fp8(*DENSE["shared w1"], seed + up) for up in (0, 2)] for seed in range(2)]
    x, hidden = random_rows(n_rows, WIDTH), bf16(n_rows, INNER)
    calls = []
    for gate, up in ([prepare_fp8_weight(weight) for weight in each] for each in weights):
        calls.append(partial(shared_up_hip, x, ExpertWeights(gate, up, gate), Layer.LIMIT, hidden))
    _against_library("shared w1 and w3 with SiLU and ActQuant8", x, calls, weights, repeats)


def _against_library(
    what: str,
    x: Tensor,
    calls: Sequence[Callable[[], object]],
    weights: Sequence[Sequence[Fp8Weight]],
    repeats: int,
) -> None:
    """calls: the rows x with each of `weights`, of which the library multiplies all together."""
    ours = many_ms(calls, repeats)
    wide = [torch.cat([dequantise_tiles(*weight) for weight in each]).T for each in weights]
    (n_rows, n_in), n_out = x.shape, wide[0].shape[1]
    out = bf16(n_rows, n_out)
    theirs = many_ms([partial(torch.mm, x, w, out=out) for w in wide], repeats)
    tera_ops = 2 * n_rows * n_out * n_in / 1e12
    report(
        f"{what}, dense",
        ours,
        rows=n_rows,
        tflops=round(tera_ops / ours * 1e3, 1),
        library_tflops=round(tera_ops / theirs * 1e3, 1),
        of_library=round(theirs / ours, 3),
    )


def bench_head(copied: float, repeats: int) -> None:
    n_out, n_in = 129280, 5120
    tiles = prepare_bf16_weight(torch.randn((n_out, n_in), device="cuda").bfloat16())
    for n_rows in FEW:
        x, out = random_rows(n_rows, n_in), torch.empty((n_rows, n_out), device="cuda")
        ms = many_ms([partial(f32_linear_hip, x, tiles, out)], repeats)
        report_rate("head, few rows", n_rows, 2 * n_out * n_in, ms, copied, repeats)


def bench_router(repeats: int) -> None:
    """Logits and choice, the rows rounded for the experts on the way."""
    n_experts = 384
    gates = [prepare_bf16_weight(torch.randn((n_experts, WIDTH), device="cuda").bfloat16()) for _ in range(24)]
    bias, counter = torch.zeros(n_experts, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    for n_rows in (*FEW, 16):
        x = torch.randn((n_rows, WIDTH), device="cuda").bfloat16()
        scores = torch.empty((n_rows, n_experts), device="cuda")
        weights = torch.empty((n_rows, Layer.CHOSEN), device="cuda")
        outs = (scores, weights.int(), weights, counter, None, torch.empty_like(x))
        ms = many_ms([partial(router_hip, x, gate, bias, 1.5, *outs) for gate in gates], repeats)
        report("router", ms, rows=n_rows)


class Layer:
    """One layer's experts at the release's shapes, `n_experts` of them."""

    CHOSEN, LIMIT = 6, 10.0

    def __init__(self, n_experts: int) -> None:
        generator = torch.Generator("cuda").manual_seed(5)
        self.n_experts = n_experts
        shapes = ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER))

        def random_fp4(n_out: int, n_in: int) -> Fp4Weight:
            def bytes_of(low: int, high: int, last: int) -> Tensor:
                shape = (n_experts, n_out, last)
                return torch.randint(low, high, shape, generator=generator, device="cuda", dtype=torch.uint8)

            return Fp4Weight(bytes_of(0, 256, n_in // 2), bytes_of(119, 122, n_in // 32))

        self.raw = [random_fp4(*shape) for shape in shapes]
        self.routed = ExpertWeights(*map(prepare_fp4_weight, self.raw))
        self.shared = ExpertWeights(*(prepare_fp8_weight(random_fp8(*shape, 3)) for shape in shapes))
        self.expert_bytes = sum(w.codes_e2m1x2[0].numel() + w.scales_e8m0[0].numel() for w in self.raw)
        self.shared_bytes = sum(n_out * n_in for n_out, n_in in shapes)

    def choose(self, n_rows: int, seed: int) -> Tensor:
        """ids [R, 6]: even spread over the experts, distinct in a row."""
        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.rand((n_rows, self.n_experts), generator=generator, device="cuda").topk(self.CHOSEN).indices.int()

    def call(self, n_rows: int, ids: Tensor) -> Callable[[], object]:
        room = torch.empty(ExpertRoom.bytes_for(n_rows, self.CHOSEN, self.routed, self.shared), dtype=torch.uint8)
        weights, x = torch.rand((n_rows, self.CHOSEN), device="cuda"), random_rows(n_rows, WIDTH)
        return partial(
            experts_hip, x, ids, weights, self.routed, self.shared, self.LIMIT, room.cuda(), torch.empty_like(x)
        )

    def decoded(self, expert: int) -> list[Tensor]:
        """w1, w3, w2 as BF16 [N, K]."""
        return [
            (
                e2m1x2_decode(w.codes_e2m1x2[expert]) * e8m0_decode(w.scales_e8m0[expert]).repeat_interleave(32, 1)
            ).bfloat16()
            for w in self.raw
        ]

    def torch_loop(self, n_rows: int) -> Callable[[], object]:
        """The products of all experts on decoded weights, each on its share of rows, already gathered."""
        wide = [self.decoded(expert) for expert in range(self.n_experts)]
        share = n_rows * self.CHOSEN // self.n_experts
        rows, weights = random_rows(share, WIDTH), torch.rand(share, device="cuda")

        def loop() -> None:
            for w1, w3, w2 in wide:
                hidden = swiglu_ref(rows @ w1.T, rows @ w3.T, weights, self.LIMIT)
                torch.mm(hidden, w2.T)

        return loop


def bench_experts(copied: float, repeats: int) -> None:
    """Routed and shared experts together, the sort and the sum included."""
    layer = Layer(384)
    for n_rows in (1, 6, 16, 17, 48, 256):
        choices = [layer.choose(n_rows, seed) for seed in range(4)]
        n_experts = sum(len(ids.unique()) for ids in choices) / len(choices)
        ms = many_ms([layer.call(n_rows, ids) for ids in choices], repeats)
        report_rate("experts", n_rows, int(n_experts * layer.expert_bytes) + layer.shared_bytes, ms, copied, repeats)
    for n_rows in (512, 1024, 2048):
        ms = many_ms([layer.call(n_rows, layer.choose(n_rows, seed)) for seed in range(2)], repeats)
        tera_ops = 6 * n_rows * (layer.CHOSEN + 1) * WIDTH * INNER / 1e12
        report("experts", ms, rows=n_rows, tflops=round(tera_ops / ms * 1e3, 1))
    loop = layer.torch_loop(2048)
    for what, call in (("torch loop over experts", loop), ("torch loop over experts, as a graph", captured(loop))):
        report(what, timed_ms([call], 3), rows=2048)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all benchmarks; JSON lines to stdout."""
    parser = argparse.ArgumentParser(prog="bench_gemm", description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of each kind")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_gemm: torch sees no GPU; install its ROCm build", file=sys.stderr)
        return 1
    with devices()[0].stream():
        copied = copy_gb_per_s(args.repeats)
        bench_few(copied, args.repeats)
        bench_head(copied, args.repeats)
        for n_rows in (*FEW, 48, 2048):
            bench_together(n_rows, args.repeats)
        for n_rows in (48, 128, 2048):
            bench_dense(n_rows, args.repeats)
            bench_shared_up(n_rows, args.repeats)
        bench_router(args.repeats)
        bench_experts(copied, args.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
