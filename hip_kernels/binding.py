"""What every operator's binding does: hand over to a kernel where there is one, check shapes, cut rows into tiles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, wraps
from typing import ParamSpec

import torch
from torch import Tensor

TILE_ROWS = 64
SLAB_ROWS = 1024  # bounds the temporaries of operators that need no tiles
VECTOR = 64  # elements: a multiple of what a processor's loops take at a time

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
    return _bound(op, wanted, tuple(tensors), tuple([(tensor.dtype, tensor.shape) for tensor in tensors.values()]))


@lru_cache(8192)  # a model calls its operators with the same shapes over and over
def _bound(
    op: str, wanted: str, specs: tuple[str, ...], given: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
) -> tuple[int, ...]:
    """bind_dims by what it looks at."""
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    for spec, (given_dtype, shape) in zip(specs, given, strict=True):
        name, dtype, dims = _parse(spec)
        if given_dtype != dtype:
            raise BindError(f"{op}: {name} has dtype {given_dtype}, want {dtype}")
        good = len(shape) == len(dims)
        for dim, size in zip(dims, shape, strict=False):
            if isinstance(dim, int):
                good = good and dim == size
            else:
                good = good and sizes.setdefault(dim, size) == size
                origin.setdefault(dim, name)
        if not good:
            want = ", ".join(f"{d}={sizes[d]}" if d in sizes else str(d) for d in dims)
            source = sorted({origin[d] for d in dims if isinstance(d, str) and origin.get(d, name) != name})
            raise BindError(
                f"{op}: {name} is {list(shape)}, want [{want}]" + (f" from {', '.join(source)}" if source else "")
            )
    return tuple(sizes[letter] for letter in wanted.split())


class _ShapesOnly(threading.local):
    on = False


_shapes_only = _ShapesOnly()


@contextmanager
def shapes_only() -> Iterator[None]:
    """In this thread operators check their arguments and compute nothing: what is asked of memory stays the same."""
    before, _shapes_only.on = _shapes_only.on, True
    try:
        yield
    finally:
        _shapes_only.on = before


def is_shapes_only() -> bool:
    return _shapes_only.on


def run_slabs(
    slab: Callable[..., Tensor | tuple[Tensor, ...]],
    rows: Sequence[Tensor],
    *outs: Tensor,
    slab_rows: int = SLAB_ROWS,
) -> None:
    """Fill `outs` [R, ...] from `slab`, called on up to slab_rows rows of `rows` at a time, not padded.

    Only for operators whose every step treats an element or a row by itself: IEEE add, multiply and divide, root and
    exp, sums over the last axis, a product of matrices for each row (torch.bmm). Their bits cannot depend on how many
    rows run together. Products that rows share are taken by linear_tiles, sigmoids by in_vectors.
    """
    if getattr(_shapes_only, "on", False):
        return
    _one_thread()
    n_rows = rows[0].shape[0]
    for start in range(0, n_rows, slab_rows):
        if n_rows > slab_rows:
            part = slice(start, start + slab_rows)
            results = slab(*(x[part] for x in rows))
            places: Sequence[Tensor] = [out[part] for out in outs]
        else:  # as most calls: without the slices, which take longer than a few rows' work
            results, places = slab(*rows), outs
        for place, result in zip(places, results if isinstance(results, tuple) else (results,), strict=True):
            place.copy_(result)


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


def linear_tiles(x: Tensor, weight_f32: Tensor) -> Tensor:
    """x [R, K], widened, times weight_f32 [N, K]: [R, N] FP32, by zero-padded tiles of exactly TILE_ROWS rows.

    A library's product gives other bits for other row counts (design.md section 4).
    """
    n_rows = x.shape[0]
    padded_f32 = x.new_zeros((-(-n_rows // TILE_ROWS) * TILE_ROWS, x.shape[1]), dtype=torch.float32)
    padded_f32[:n_rows] = x
    weight_f32 = weight_f32.T
    if n_rows <= TILE_ROWS:
        return torch.mm(padded_f32, weight_f32)[:n_rows]
    out_f32 = padded_f32.new_empty((len(padded_f32), weight_f32.shape[1]))
    for start in range(0, n_rows, TILE_ROWS):
        part = slice(start, start + TILE_ROWS)
        torch.mm(padded_f32[part], weight_f32, out=out_f32[part])
    return out_f32[:n_rows]


def in_vectors(function: Callable[[Tensor], Tensor], x_f32: Tensor) -> Tensor:
    """function(x_f32) of a library function that treats the elements beyond whole vectors in another way: on a whole
    number of vectors, zero-padded. Any shape."""
    n = x_f32.numel()
    if n % VECTOR == 0:
        return function(x_f32.contiguous())
    padded_f32 = x_f32.new_zeros(-(-n // VECTOR) * VECTOR)
    padded_f32[:n] = x_f32.flatten()
    return function(padded_f32)[:n].view(x_f32.shape)


def pad_rows(x: Tensor, n_rows: int) -> Tensor:
    """x [n, ...] with zero rows appended up to n_rows, contiguous."""
    if x.shape[0] == n_rows:
        return x.contiguous()
    padded = x.new_zeros((n_rows, *x.shape[1:]))
    padded[: x.shape[0]].copy_(x)
    return padded
