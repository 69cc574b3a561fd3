"""ActQuant8 as an operator of its own: rows on their way into a quantised linear (backbone.md section 2.4).

A quantised linear on the GPU takes its rows "rounded": BF16 numbers that are code times scale, which BF16 holds
exactly. One rounding serves every linear that reads the same rows.
"""

from __future__ import annotations

from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, operator, run_slabs
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.kernel import Kernel, launch

THREADS, PIECE = 256, 8

_QUANT = Kernel("act_quant.hip", "act_quant8", "PPPq", threads=THREADS)
_ROUND = Kernel("act_quant.hip", "act_round8", "PPq", threads=THREADS)
RELEASE_KERNELS = (_QUANT, _ROUND)


def act_quant8_hip(x_bf16: Tensor, codes_e4m3: Tensor, scales_e8m0: Tensor) -> None:
    """Fill codes_e4m3 [R, K] and scales_e8m0 [R, K/32] on the current stream, the bytes of formats.act_quant8."""
    n_rows, width = bind_dims("act_quant8", "R K", {"x_bf16 R K": x_bf16, "codes_e4m3 R K": codes_e4m3})
    bind_dims("act_quant8", "", {f"scales_e8m0 {n_rows} {width // 32}": scales_e8m0})
    n_pieces = n_rows * width // PIECE
    if n_pieces:
        launch(_QUANT, grid=(-(-n_pieces // THREADS), 1), args=(codes_e4m3, scales_e8m0, x_bf16, n_pieces))


@operator
def act_round8(x_bf16: Tensor, rounded_bf16: Tensor) -> None:
    """Fill rounded_bf16 [R, K] with x_bf16 [R, K] as its ActQuant8 codes and scales say it; they may be one tensor."""
    _, width = bind_dims("act_round8", "R K", {"x_bf16 R K": x_bf16, "rounded_bf16 R K": rounded_bf16})
    row_format = RowFormat("window", width)
    run_slabs(lambda x: row_format.unpack(row_format.pack(x)), (x_bf16,), rounded_bf16)


def act_round8_hip(x_bf16: Tensor, rounded_bf16: Tensor) -> None:
    """act_round8 on the current stream, the same bits."""
    n_rows, width = bind_dims("act_round8", "R K", {"x_bf16 R K": x_bf16, "rounded_bf16 R K": rounded_bf16})
    n_pieces = n_rows * width // PIECE
    if n_pieces:
        launch(_ROUND, grid=(-(-n_pieces // THREADS), 1), args=(rounded_bf16, x_bf16, n_pieces))
