"""Window key/value rows: norm, rotation, ActQuant8 over the whole width (backbone.md section 5.2)."""

from __future__ import annotations

from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, run_tiles
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.rmsnorm import rmsnorm_ref
from rocline.hip_kernels.rope import rope_ref


def window_row(
    projected_bf16: Tensor, norm_bf16: Tensor, eps: float, cos_f32: Tensor, sin_f32: Tensor, rows_u8: Tensor
) -> None:
    """Fill rows_u8 [R, D + D/32] from projected_bf16 [R, D], norm_bf16 [D], cos_f32 and sin_f32 [R, rope_dim/2]."""
    bind_dims(
        "window_row",
        "R",
        {
            "projected_bf16 R D": projected_bf16,
            "norm_bf16 D": norm_bf16,
            "cos_f32 R I": cos_f32,
            "sin_f32 R I": sin_f32,
            "rows_u8 R B": rows_u8,
        },
    )
    row_format = RowFormat("window", projected_bf16.shape[1])

    def tile(projected: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return row_format.pack(rope_ref(rmsnorm_ref(projected, norm_bf16, eps)[:, None], cos, sin)[:, 0])

    run_tiles(tile, (projected_bf16, cos_f32, sin_f32), (rows_u8,))
