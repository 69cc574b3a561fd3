"""A layer's mixture of experts: routing, the routed experts and the shared one (backbone.md section 10)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import TextConfig
from rocline.engine.record import Recorder
from rocline.hip_kernels.layer_ops import route_and_mix
from rocline.hip_kernels.linear import Fp4Weight, Fp8Weight


@dataclass(frozen=True)
class ExpertWeights:
    """gate_bf16 [E, D], bias_f32 [E]; routed (first axis: expert) and shared are w1 (gate), w3 (up), w2 (down)."""

    gate_bf16: Tensor
    bias_f32: Tensor
    routed: tuple[Fp4Weight, Fp4Weight, Fp4Weight]
    shared: tuple[Fp8Weight, Fp8Weight, Fp8Weight]


def mixture(
    config: TextConfig,
    weights: ExpertWeights,
    layer: int,
    u_bf16: Tensor,
    record: Recorder,
    rounded_bf16: Tensor | None = None,
) -> Tensor:
    """The sublayer's output [R, D] BF16 from u_bf16 [R, D]; rounded_bf16 as in streams.Entered."""
    n_rows, n_chosen = len(u_bf16), config.num_experts_per_tok
    scores_f32 = scratch.f32(n_rows, config.n_routed_experts)
    ids_i32, weights_f32 = scratch.i32(n_rows, n_chosen), scratch.f32(n_rows, n_chosen)
    out_bf16 = scratch.bf16(*u_bf16.shape)
    route_and_mix(
        u_bf16,
        weights.gate_bf16,
        weights.bias_f32,
        config.routed_scaling_factor,
        scores_f32,
        ids_i32,
        weights_f32,
        weights.routed,
        weights.shared,
        config.swiglu_limit,
        out_bf16,
        rounded_bf16,
    )
    record(layer, "router.s", scores_f32)
    record(layer, "router.ids", ids_i32)
    record(layer, "router.w", weights_f32)
    return out_bf16
