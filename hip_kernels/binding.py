"""What every operator's binding does: hand over to a kernel where there is one, check shapes, cut rows into tiles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import ParamSpec

import torch
from torch import Tensor

TILE_ROWS = 64
SLAB_ROWS = 1024  # bounds the temporaries of operators that need no tiles

# An operator's argument names end in what is stored. Codes of the small formats travel as bytes.
_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
    "e4m3": torch.uint8,
    "e8m0": torch.uint8,
    "e2m1x2": torch.uint8,
    "bool": torch.bool,
}


class BindError(ValueError):
    """An operator was called with a tensor of the wrong shape or dtype."""


class _Thread(threading.local):
    kernels: Mapping[str, Callable[..., None]] = {}


_thread = _Thread()
_P = ParamSpec("_P")


def operator(reference: Callable[_P, None]) -> Callable[_P, None]:
    """An operator by its torch reference, which a kernel stands in for where this thread uses one (use_kernels)."""
    name = reference.__name__

    @wraps(reference)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
        _thread.kernels.get(name, reference)(*args, **kwargs)

    return call


@contextmanager
def use_kernels(kernels: Mapping[str, Callable[..., None]]) -> Iterator[None]:
    """In this thread the operators named in `kernels` are these functions, of the references' arguments."""
    before, _thread.kernels = _thread.kernels, kernels
    try:
        yield
    finally:
        _thread.kernels = before


@cache
def _parse(spec: str) -> tuple[str, torch.dtype, tuple[int | str, ...]]:
    name, *dims = spec.split()
    return name, _DTYPES[name.rsplit("_", 1)[1]], tuple(int(d) if d.isdigit() else d for d in dims)


def bind_dims(op: str, wanted: str, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Bind the letters of `wanted` ("R H P") to sizes, from specs like {"scores_f32 R P": tensor}.

    The first tensor that carries a letter fixes it; a number in a spec is a fixed size. The name's
    suffix is the dtype. Raises BindError with the operator, the tensor, its shape and the wanted one.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    for spec, tensor in tensors.items():
        name, dtype, dims = _parse(spec)
        if tensor.dtype != dtype:
            raise BindError(f"{op}: {name} has dtype {tensor.dtype}, want {dtype}")
        good = tensor.ndim == len(dims)
        for dim, size in zip(dims, tensor.shape, strict=False):
            if isinstance(dim, int):
                good = good and dim == size
            else:
                good = good and sizes.setdefault(dim, size) == size
                origin.setdefault(dim, name)
        if not good:
            want = ", ".join(f"{d}={sizes[d]}" if d in sizes else str(d) for d in dims)
            source = sorted({origin[d] for d in dims if isinstance(d, str) and origin.get(d, name) != name})
            raise BindError(
                f"{op}: {name} is {list(tensor.shape)}, want [{want}]"
                + (f" from {', '.join(source)}" if source else "")
            )
    return tuple(sizes[letter] for letter in wanted.split())


_shapes_only = threading.local()


@contextmanager
def shapes_only() -> Iterator[None]:
    """In this thread operators check their arguments and compute nothing: what is asked of memory stays the same."""
    _shapes_only.on = True
    try:
        yield
    finally:
        _shapes_only.on = False


def run_slabs(slab: Callable[..., Tensor], rows: Sequence[Tensor], out: Tensor) -> None:
    """Fill out [R, ...] from `slab`, called on up to SLAB_ROWS rows of `rows` at a time, not padded.

    Only for operators whose every step is exact or rounds each element by itself (IEEE add, multiply,
    divide): their bits cannot depend on how many rows run together.
    """
    if getattr(_shapes_only, "on", False):
        return
    _one_thread()
    n_rows = rows[0].shape[0]
    if 0 < n_rows <= SLAB_ROWS:  # as most calls: without the slices, which take longer than a few rows' work
        out.copy_(slab(*rows))
        return
    for start in range(0, n_rows, SLAB_ROWS):
        part = slice(start, start + SLAB_ROWS)
        out[part].copy_(slab(*(x[part] for x in rows)))


def _one_thread() -> None:
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def run_tiles(
    tile: Callable[..., object], rows: Sequence[Tensor], outs: Sequence[Tensor], tile_rows: int = TILE_ROWS
) -> None:
    """Fill `outs` from `tile`, called on zero-padded tiles of exactly tile_rows rows.

    rows, outs  [R, ...] tensors with the same R; `tile` takes one slice of each of `rows` and returns
                one tensor (or a tuple of them) of tile_rows rows for `outs`
    tile_rows   a constant of the operator

    Library GEMMs, sums and even sigmoid give other bits for other row counts, tails and thread
    counts. One shape and one thread make a row's bits its own (design.md section 4).
    """
    if getattr(_shapes_only, "on", False):
        return
    _one_thread()
    n_rows = rows[0].shape[0]
    for start in range(0, n_rows, tile_rows):
        stop = min(start + tile_rows, n_rows)
        slices = [pad_rows(x[start:stop], tile_rows) for x in rows]
        results = tile(*slices)
        for out, result in zip(outs, results if isinstance(results, tuple) else (results,), strict=True):
            out[start:stop].copy_(result[: stop - start])


def pad_rows(x: Tensor, n_rows: int) -> Tensor:
    """x [n, ...] with zero rows appended up to n_rows, contiguous."""
    if x.shape[0] == n_rows:
        return x.contiguous()
    padded = x.new_zeros((n_rows, *x.shape[1:]))
    padded[: x.shape[0]].copy_(x)
    return padded
