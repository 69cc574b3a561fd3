"""python -m rocline.tools.bench_layer: a decode step's kernels of one layer but attention on one card, as JSON lines.

By number of rows: each operator alone, and all of them one after the other as a layer has them, of few rows with wo_b
and mHC apart and together, in one graph, over rotating weights of the release's sizes, larger together than the card's
cache. The outputs' hash is of the first set of weights; it must not depend on what is timed. Needs a card that both HIP
and torch see.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from rocline.hip_kernels import latents_hip
from rocline.hip_kernels.device_memory import COUNTERS
from rocline.hip_kernels.driver import devices
from rocline.hip_kernels.experts_hip import ExpertRoom, experts_hip
from rocline.hip_kernels.grouped_projection_hip import grouped_projection_hip
from rocline.hip_kernels.latents_hip import latents_few_hip
from rocline.hip_kernels.linear_hip import Product, Turn, fp8_linear_hip, multiply_together, prepare_bf16_weight
from rocline.hip_kernels.mhc_hip import (
    FEW_ROWS,
    Coefficients,
    Merge,
    Mixing,
    Projection,
    mhc_enter_hip,
    partials_shape,
    prepare_projection,
)
from rocline.hip_kernels.project_enter_hip import project_enter_hip
from rocline.hip_kernels.router_hip import router_hip
from rocline.hip_kernels.weight_tiles import WeightTiles
from rocline.hip_kernels.window_row import latent_norms_hip
from rocline.tools import bench_gemm as gemm
from rocline.tools.bench_gemm import DENSE, GROUPS, HEAD_WIDTH, HEADS, PAIRS, WIDTH, WO_A, bf16, many_ms, workspace_for
from rocline.tools.bench_index import report

SETS = 6  # of weights, taking turns
RING_BYTES, N_EXPERTS, LIMIT, FACTOR = 528, 384, 10.0, 1.5
NORM_EPS, EPS, ITERS = 1e-20, 1e-6, 20
ORDER = ("mhc", "latents", "wq_b", "wo_a", "wo_b", "mhc", "router", "experts")
FEW_ORDER = ("mhc", "latents", "wq_b", "wo_a", "wo_b and mhc", "router", "experts")


class Weights:
    """One layer's, but the experts."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)

        def fp8(n_out: int, n_in: int, groups: int = 1) -> WeightTiles:
            return gemm.prepare_fp8_weight(gemm.random_fp8(n_out, n_in, seed + n_out), groups)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        self.wq_a, self.wkv, self.wq_b, self.wo_b = (fp8(*DENSE[name]) for name in ("wq_a", "wkv", "wq_b", "wo_b"))
        self.wo_a = fp8(*WO_A, GROUPS)
        self.gate = prepare_bf16_weight((0.02 * noise(N_EXPERTS, WIDTH)).bfloat16())
        fn_bf16 = prepare_projection((0.01 * noise(24, 4 * WIDTH)).cpu()).cuda()
        self.projection = Projection(WIDTH, fn_bf16, noise(3), noise(24))
        self.norms = [noise(n).bfloat16() for n in (WIDTH, self.wq_a.n_out, self.wkv.n_out)]


class Rows:
    """n_rows rows on their way through a layer; call(what, weights) launches one of ORDER."""

    def __init__(self, n_rows: int, experts: gemm.Layer) -> None:
        generator = torch.Generator("cuda").manual_seed(n_rows)

        def noise(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device="cuda")

        def coefficients() -> Coefficients:
            return Coefficients(noise(n_rows, 4), noise(n_rows, 4), noise(n_rows, 4, 4) / 4)

        self.n_rows, self.experts = n_rows, experts
        self.streams, self.sublayer = (noise(n_rows, *of).bfloat16() for of in ((4, WIDTH), (WIDTH,)))
        self.before, self.after = coefficients(), coefficients()
        self.partials = torch.empty(partials_shape(n_rows, WIDTH), device="cuda")
        self.u, self.rounded, self.out, self.mixed = (bf16(n_rows, WIDTH) for _ in range(4))
        self.counter, self.counters = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (1, COUNTERS))
        self.qr, self.rounded_qr, self.kv = (bf16(n_rows, n) for n in (DENSE["wq_a"][0],) * 2 + (DENSE["wkv"][0],))
        self.turn = noise(n_rows, PAIRS), noise(n_rows, PAIRS)
        self.ring_u8 = torch.zeros((n_rows, RING_BYTES), dtype=torch.uint8, device="cuda")
        self.q, self.grouped = bf16(n_rows, HEADS * HEAD_WIDTH), bf16(n_rows, WO_A[0])
        self.heads = gemm.random_rows(n_rows, HEADS * HEAD_WIDTH).view(n_rows, HEADS, HEAD_WIDTH)
        self.scores, self.weights = noise(n_rows, N_EXPERTS), noise(n_rows, experts.CHOSEN)
        self.ids, self.bias = self.weights.int(), torch.zeros(N_EXPERTS, device="cuda")
        n_bytes = ExpertRoom.bytes_for(n_rows, experts.CHOSEN, experts.routed, experts.shared)
        self.room_u8 = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
        self.chosen = [experts.choose(n_rows, seed) for seed in range(SETS)]

    def mhc(self, of: Weights, number: int) -> None:
        merge = Merge(self.sublayer, self.before.post_f32, self.before.comb_f32)
        mixing = Mixing(of.projection, self.partials, self.after, EPS, ITERS)
        into = mixing, self.u, self.counter, self.rounded
        mhc_enter_hip(self.streams, merge, self.before.pre_f32, of.norms[0], NORM_EPS, *into)

    def latents(self, of: Weights, number: int) -> None:
        q_norm, kv_norm = of.norms[1:]
        if self.n_rows <= latents_hip.FEW_ROWS:
            first = self.rounded, of.wq_a, self.qr, of.wkv, self.kv, q_norm, kv_norm
            latents_few_hip(*first, NORM_EPS, *self.turn, self.ring_u8, None, self.rounded_qr, self.counter)
            return
        products = Product(of.wq_a, self.qr), Product(of.wkv, self.kv)
        multiply_together("latents", self.rounded, products, workspace_for(self.n_rows, of.wq_a, of.wkv))
        window = self.kv, kv_norm, NORM_EPS, *self.turn, self.ring_u8, None
        latent_norms_hip(self.qr, q_norm, *window, self.rounded_qr)

    def wq_b(self, of: Weights, number: int) -> None:
        room, turn = workspace_for(self.n_rows, of.wq_b), Turn(*self.turn, HEAD_WIDTH)
        fp8_linear_hip(self.rounded_qr, of.wq_b, self.q, room, turn=turn)

    def wo_a(self, of: Weights, number: int) -> None:
        grouped_projection_hip(self.heads, of.wo_a, self.grouped, workspace_for(self.n_rows, of.wo_a), round_out=True)

    def wo_b(self, of: Weights, number: int) -> None:
        fp8_linear_hip(self.grouped, of.wo_b, self.out, workspace_for(self.n_rows, of.wo_b))

    def wo_b_and_mhc(self, of: Weights, number: int) -> None:
        merge = Merge(self.out, self.before.post_f32, self.before.comb_f32)
        mixing = Mixing(of.projection, self.partials, self.after, EPS, ITERS)
        into = mixing, self.u, self.counters, self.rounded
        given = self.grouped, of.wo_b, self.streams, merge, self.before.pre_f32, of.norms[0], NORM_EPS
        project_enter_hip(*given, *into)

    def router(self, of: Weights, number: int) -> None:
        outs = self.scores, self.ids, self.weights, self.counter, workspace_for(self.n_rows, of.gate)
        router_hip(self.u, of.gate, self.bias, FACTOR, *outs)

    def mixture(self, of: Weights, number: int) -> None:
        ids, layer = self.chosen[number], self.experts
        experts_hip(self.rounded, ids, self.weights, layer.routed, layer.shared, LIMIT, self.room_u8, self.mixed)

    def call(self, what: str, of: Weights, number: int) -> Callable[[], object]:
        return partial(self.mixture if what == "experts" else getattr(self, what.replace(" ", "_")), of, number)

    def outputs(self) -> list[Tensor]:
        after, ring = self.after, self.ring_u8
        of_mhc = [self.streams, self.u, self.rounded, after.pre_f32, after.post_f32, after.comb_f32]
        return [*of_mhc, self.qr, self.rounded_qr, ring, self.q, self.grouped, self.out, self.scores, self.mixed]


def bench(n_rows: int, sets: Sequence[Weights], experts: gemm.Layer, repeats: int) -> None:
    """Lines of one number of rows."""
    rows = Rows(n_rows, experts)
    for what in ORDER:
        rows.call(what, sets[0], 0)()
    outputs = b"".join(tensor.view(torch.uint8).cpu().numpy().tobytes() for tensor in rows.outputs())
    print(json.dumps({"what": "outputs", "rows": n_rows, "sha256": hashlib.sha256(outputs).hexdigest()}), flush=True)
    orders = (ORDER, FEW_ORDER) if n_rows <= FEW_ROWS else (ORDER,)
    for what in dict.fromkeys(chain(*orders)):
        calls = [rows.call(what, of, number) for number, of in enumerate(sets)]
        report(what, many_ms(calls * 4, repeats), rows=n_rows)
    for order in orders:
        calls = [rows.call(what, of, number) for number, of in enumerate(sets) for what in order]
        report("a layer but attention", len(order) * many_ms(calls, repeats), rows=n_rows, operators=len(order))


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; JSON lines to stdout."""
    parser = argparse.ArgumentParser(prog="bench_layer", description=__doc__)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of a step (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=15, help="timed graphs of each kind (default: %(default)s)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_layer: torch sees no GPU; install its ROCm build", file=sys.stderr)
        return 1
    with devices()[0].stream():
        sets, experts = [Weights(seed) for seed in range(SETS)], gemm.Layer(N_EXPERTS)
        for n_rows in args.rows:
            bench(n_rows, sets, experts, args.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
