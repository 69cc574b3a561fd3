"""Compressed KV: pooling of token pairs and the rows that go into the cache (backbone.md section 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, operator, run_slabs
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.rmsnorm import rmsnorm_ref
from rocline.hip_kernels.rope import rope_ref


def pool_pairs_ref(values_f32: Tensor, gates_f32: Tensor) -> Tensor:
    """[J, D] BF16 from [J, 2, D] values and gates: per channel a softmax over the pair's two gates, FP32."""
    weight = torch.exp(gates_f32 - gates_f32.amax(1, keepdim=True))
    weight = weight / weight.sum(1, keepdim=True)
    return (values_f32 * weight).sum(1).bfloat16()


@operator
def pool_pairs(values_f32: Tensor, gates_f32: Tensor, weight_bf16: Tensor, eps: float, latent_bf16: Tensor) -> None:
    """Fill latent_bf16 [J, D], normed and not rotated, from closed pairs [J, 2, D] of values and gates."""
    bind_dims(
        "pool_pairs",
        "J D",
        {
            "values_f32 J 2 D": values_f32,
            "gates_f32 J 2 D": gates_f32,
            "weight_bf16 D": weight_bf16,
            "latent_bf16 J D": latent_bf16,
        },
    )
    run_slabs(
        lambda values, gates: rmsnorm_ref(pool_pairs_ref(values, gates), weight_bf16, eps),
        (values_f32, gates_f32),
        latent_bf16,
    )


@operator
def compressed_row(latent_bf16: Tensor, cos_f32: Tensor, sin_f32: Tensor, rows_u8: Tensor) -> None:
    """Fill rows_u8 [J, D/2 + D/16]: latent_bf16 [J, D] rotated at its group's first token, then ActQuant4.

    cos_f32, sin_f32 [J, rope_dim/2] at position j * ratio.
    """
    bind_dims(
        "compressed_row",
        "J",
        {
            "latent_bf16 J D": latent_bf16,
            "cos_f32 J I": cos_f32,
            "sin_f32 J I": sin_f32,
            "rows_u8 J B": rows_u8,
        },
    )
    row_format = RowFormat("compressed", latent_bf16.shape[1])
    run_slabs(
        lambda latent, cos, sin: row_format.pack(rope_ref(latent[:, None], cos, sin)[:, 0]),
        (latent_bf16, cos_f32, sin_f32),
        rows_u8,
    )
