"""Whether rows hold only numbers (design.md section 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims, operator, run_slabs
from rocline.hip_kernels.kernel import Kernel, launch

_LDS_BYTES = 32
_FINITE = Kernel("finite.hip", "rows_finite", "PPi", threads=256, lds_bytes=_LDS_BYTES)
RELEASE_KERNELS = (_FINITE,)


@operator
def rows_finite(values_bf16: Tensor, finite_u8: Tensor) -> None:
    """Fill finite_u8 [R]: 1 for a row of values_bf16 [R, C] without NaN or infinity, else 0."""
    _bind(values_bf16, finite_u8)
    run_slabs(_finite, (values_bf16,), finite_u8)


def _finite(rows_bf16: Tensor) -> Tensor:
    # Both ends of a row's range: NaN is either, and reading twice is quicker than writing a mask.
    return (rows_bf16.amax(1).isfinite() & rows_bf16.amin(1).isfinite()).to(torch.uint8)


def rows_finite_hip(values_bf16: Tensor, finite_u8: Tensor) -> None:
    """rows_finite on the current stream, for C a multiple of 8."""
    n_rows, width = _bind(values_bf16, finite_u8)
    if width % 8:
        raise BindError(f"rows_finite: rows of {width} numbers, want a multiple of 8: they are read 16 bytes at a time")
    if n_rows:
        launch(_FINITE, grid=(n_rows, 1), args=(finite_u8, values_bf16, width // 8), lds_bytes=_LDS_BYTES)


def _bind(values_bf16: Tensor, finite_u8: Tensor) -> tuple[int, int]:
    n_rows, width = bind_dims("rows_finite", "R C", {"values_bf16 R C": values_bf16, "finite_u8 R": finite_u8})
    return n_rows, width
