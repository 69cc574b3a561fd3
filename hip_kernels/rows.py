"""Moving whole rows: gather by index, copy, and write into pages."""

from __future__ import annotations

from functools import cache
from math import gcd

import torch
from torch import Tensor

from rocline.hip_kernels.binding import BindError, bind_dims, operator, run_slabs
from rocline.hip_kernels.driver import copy_async
from rocline.hip_kernels.kernel import Kernel, launch
from rocline.hip_kernels.pages import row_slots

THREADS = 256


@cache
def _kernels(word_bytes: int) -> tuple[Kernel, Kernel]:
    """take_rows, put_rows of rows that are moved in words of so many bytes."""
    defines = {"WORD_BYTES": word_bytes}
    return (
        Kernel("rows.hip", "take_rows", "PPPi", threads=THREADS, defines=defines),
        Kernel("rows.hip", "put_rows", "PPPPPiii", threads=THREADS, defines=defines),
    )


RELEASE_KERNELS = (*_kernels(16), *_kernels(4))


@operator
def gather_rows(rows: Tensor, index_i64: Tensor, out: Tensor) -> None:
    """Fill out [n, ...] with rows [R, ...] at index_i64 [n]; any dtype."""
    _check_gather(rows, index_i64, out)
    run_slabs(lambda index: rows[index], (index_i64,), out)


@operator
def copy_rows(rows: Tensor, out: Tensor) -> None:
    """Fill out [R, ...] with rows [R, ...]; any dtype."""
    _check_copy(rows, out)
    run_slabs(lambda part: part, (rows,), out)


@operator
def put_rows(
    rows_u8: Tensor, positions_i32: Tensor, sequences_i32: Tensor, page_tables_i32: Tensor, pool_u8: Tensor
) -> None:
    """Write rows_u8 [n, B] into pool_u8 [pages, S, B] at their sequences' positions; other slots stay as they are.

    positions_i32    [n] no two of one sequence alike; a negative one is not stored
    sequences_i32    [n] row of page_tables_i32
    page_tables_i32  [Q, W] page ids, W * S above every position
    """
    _bind_put(rows_u8, positions_i32, sequences_i32, page_tables_i32, pool_u8)
    for sequence, table in enumerate(page_tables_i32):
        mine = (sequences_i32 == sequence) & (positions_i32 >= 0)
        pool_u8.flatten(0, 1)[row_slots(positions_i32[mine], table, pool_u8.shape[1])] = rows_u8[mine]


def gather_rows_hip(rows: Tensor, index_i64: Tensor, out: Tensor) -> None:
    """gather_rows on the current stream."""
    _check_gather(rows, index_i64, out)
    if out.numel():
        word_bytes = _word_bytes(out, rows)
        row_words = out[0].nbytes // word_bytes
        grid = (len(index_i64), -(-row_words // THREADS))
        launch(_kernels(word_bytes)[0], grid=grid, args=(out, rows, index_i64, row_words))


def copy_rows_hip(rows: Tensor, out: Tensor) -> None:
    """copy_rows on the current stream, by the runtime's own copy; both are contiguous."""
    _check_copy(rows, out)
    if not (rows.is_contiguous() and out.is_contiguous()):
        raise BindError(f"copy_rows: strides {rows.stride()} to {out.stride()}; want contiguous rows")
    if out.numel():
        copy_async(out.data_ptr(), rows.data_ptr(), rows.nbytes)


def put_rows_hip(
    rows_u8: Tensor, positions_i32: Tensor, sequences_i32: Tensor, page_tables_i32: Tensor, pool_u8: Tensor
) -> None:
    """put_rows on the current stream."""
    n_rows, row_bytes = _bind_put(rows_u8, positions_i32, sequences_i32, page_tables_i32, pool_u8)
    if n_rows and row_bytes:
        word_bytes = _word_bytes(rows_u8, pool_u8)
        row_words = row_bytes // word_bytes
        sizes = (row_words, pool_u8.shape[1], page_tables_i32.shape[1])
        args = (pool_u8, rows_u8, positions_i32, sequences_i32, page_tables_i32, *sizes)
        launch(_kernels(word_bytes)[1], grid=(n_rows, -(-row_words // THREADS)), args=args)


def _word_bytes(rows: Tensor, others: Tensor) -> int:
    """The most that rows and both addresses are multiples of."""
    common = gcd(16, rows[0].nbytes, rows.data_ptr(), others.data_ptr())
    return common if common in (16, 4) else 4 if common == 8 else 1


def _check_gather(rows: Tensor, index_i64: Tensor, out: Tensor) -> None:
    if out.shape != (len(index_i64), *rows.shape[1:]) or out.dtype != rows.dtype or index_i64.dtype != torch.int64:
        raise BindError(
            f"gather_rows: out is {list(out.shape)} {out.dtype}, want {len(index_i64)} rows of "
            f"{list(rows.shape[1:])} {rows.dtype} at indices that are torch.int64, not {index_i64.dtype}"
        )


def _check_copy(rows: Tensor, out: Tensor) -> None:
    if out.shape != rows.shape or out.dtype != rows.dtype:
        raise BindError(f"copy_rows: out is {list(out.shape)} {out.dtype}, want {list(rows.shape)} {rows.dtype}")


def _bind_put(
    rows_u8: Tensor, positions_i32: Tensor, sequences_i32: Tensor, page_tables_i32: Tensor, pool_u8: Tensor
) -> tuple[int, int]:
    n_rows, row_bytes = bind_dims(
        "put_rows",
        "N B",
        {
            "rows_u8 N B": rows_u8,
            "positions_i32 N": positions_i32,
            "sequences_i32 N": sequences_i32,
            "page_tables_i32 Q W": page_tables_i32,
            "pool_u8 P S B": pool_u8,
        },
    )
    return n_rows, row_bytes
