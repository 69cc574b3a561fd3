"""Window key/value rows: norm, rotation, ActQuant8 over the whole width (backbone.md section 5.2)."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, operator, run_tiles
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.kernel import Kernel, launch
from rocline.hip_kernels.rmsnorm import rmsnorm_ref
from rocline.hip_kernels.rope import rope_ref

ROWS = 4  # a workgroup's


@cache
def _kernel(width: int) -> Kernel:
    """For rows of 64, 128, 256 or 512 channels."""
    return Kernel("window_row.hip", "window_row", "PPPPPiif", threads=32 * ROWS, defines={"WIDTH": width})


RELEASE_KERNELS = (_kernel(512),)


@operator
def window_row(
    projected_bf16: Tensor, norm_bf16: Tensor, eps: float, cos_f32: Tensor, sin_f32: Tensor, rows_u8: Tensor
) -> None:
    """Fill rows_u8 [R, D + D/32] from projected_bf16 [R, D], norm_bf16 [D], cos_f32 and sin_f32 [R, rope_dim/2]."""
    _bind(projected_bf16, norm_bf16, cos_f32, sin_f32, rows_u8)
    row_format = RowFormat("window", projected_bf16.shape[1])

    def tile(projected: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return row_format.pack(rope_ref(rmsnorm_ref(projected, norm_bf16, eps)[:, None], cos, sin)[:, 0])

    run_tiles(tile, (projected_bf16, cos_f32, sin_f32), (rows_u8,))


def window_row_hip(
    projected_bf16: Tensor, norm_bf16: Tensor, eps: float, cos_f32: Tensor, sin_f32: Tensor, rows_u8: Tensor
) -> None:
    """window_row on the current stream: the same bytes wherever the norm's sum, in an order of its own, is the same."""
    n_rows, width, n_pairs = _bind(projected_bf16, norm_bf16, cos_f32, sin_f32, rows_u8)
    if n_rows:
        args = (rows_u8, projected_bf16, norm_bf16, cos_f32, sin_f32, n_rows, n_pairs, eps)
        launch(_kernel(width), grid=(-(-n_rows // ROWS), 1), args=args)


def _bind(
    projected_bf16: Tensor, norm_bf16: Tensor, cos_f32: Tensor, sin_f32: Tensor, rows_u8: Tensor
) -> tuple[int, int, int]:
    n_rows, width, n_pairs = bind_dims(
        "window_row",
        "R D I",
        {
            "projected_bf16 R D": projected_bf16,
            "norm_bf16 D": norm_bf16,
            "cos_f32 R I": cos_f32,
            "sin_f32 R I": sin_f32,
            f"rows_u8 R {RowFormat('window', projected_bf16.shape[1]).row_bytes}": rows_u8,
        },
    )
    return n_rows, width, n_pairs
