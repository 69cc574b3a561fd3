"""Moving whole rows: gather by index, and copy."""

from __future__ import annotations

from torch import Tensor

from rocline.hip_kernels.binding import BindError, run_slabs


def gather_rows(rows: Tensor, index_i64: Tensor, out: Tensor) -> None:
    """Fill out [n, ...] with rows [R, ...] at index_i64 [n]; any dtype."""
    if out.shape != (len(index_i64), *rows.shape[1:]) or out.dtype != rows.dtype:
        raise BindError(
            f"gather_rows: out is {list(out.shape)} {out.dtype}, want {len(index_i64)} rows of "
            f"{list(rows.shape[1:])} {rows.dtype}"
        )
    run_slabs(lambda index: rows[index], (index_i64,), out)


def copy_rows(rows: Tensor, out: Tensor) -> None:
    """Fill out [R, ...] with rows [R, ...]; any dtype."""
    if out.shape != rows.shape or out.dtype != rows.dtype:
        raise BindError(f"copy_rows: out is {list(out.shape)} {out.dtype}, want {list(rows.shape)} {rows.dtype}")
    run_slabs(lambda part: part, (rows,), out)
