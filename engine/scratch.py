"""Where a stage's temporaries come from: tensors over spans of its arena's slab, without copies (design.md section 8).

A thread uses one memory at a time, as it uses one device and one stream. Outside a stage's run the functions
below give plain host tensors.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import prod

import torch
from torch import Tensor

from rocline.arena.arena import Arena
from rocline.arena.completions import RecordCompletion
from rocline.arena.scope import Scope
from rocline.arena.spans import Span

POISON_BYTE = 0xFF  # NaN in every float and scale format; no valid index or code count
# A chunk asks for the same tensors as the one before, mostly at the same places: looking one up takes a tenth of
# the time of making it. Two holders of one view are no worse off than two views of the same bytes.
MAX_VIEWS = 4096


class Lease:
    """Tensors that outlive the scopes they were made in. Whoever holds the lease releases it, once."""

    def __init__(self, memory: StageMemory, spans: Iterable[Span]) -> None:
        self._memory = memory
        self._spans = list(spans)

    def release(self) -> None:
        """Give the memory back: the tensors must not be read any more."""
        self._memory.give_back(self._spans)
        self._spans = []


@dataclass
class _Frame:
    """An open scope: the spans it has by offset, lent in it or kept from one inside it."""

    lender: Scope
    lent: dict[int, Span] = field(default_factory=dict)
    kept: dict[int, Span] = field(default_factory=dict)


class StageMemory:
    """One slab and the tensors lent from it; used by one stage's thread.

    arena_bytes        size of the slab. Host pages are committed when first written
    slab_u8            [>= arena_bytes] where the slab lies, on any device; host memory is taken when there is none
    record_completion  as in Arena: when the work queued on the device so far has finished. None on the host
    poison             fill tensors with POISON_BYTE when they are lent and given back, so that reading what was
                       not written, or is no longer there, shows (tests)
    """

    def __init__(
        self,
        arena_bytes: int,
        *,
        slab_u8: Tensor | None = None,
        record_completion: RecordCompletion | None = None,
        name: str = "arena",
        poison: bool = False,
    ) -> None:
        self.arena = Arena(arena_bytes, record_completion, name=name)
        self.arena.device_allocs = 1
        if slab_u8 is None:
            slab_u8 = torch.empty(self.arena.slab_bytes, dtype=torch.uint8)
        if len(slab_u8) < self.arena.slab_bytes:
            raise ValueError(f"{name}: slab_u8 has {len(slab_u8)} bytes, want at least {self.arena.slab_bytes}")
        self._slab_u8 = slab_u8[: self.arena.slab_bytes]
        self._first_byte = slab_u8.data_ptr()
        typed = {dtype: self._slab_u8.view(dtype) for dtype in _DTYPES}
        self._view = lru_cache(MAX_VIEWS)(partial(_view, typed))
        self._poison = poison
        self._frames: list[_Frame] = []

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Tensors lent inside are given back at the end, also when the body raises, unless kept or leased."""
        with self.arena.scope() as lender:
            frame = _Frame(lender)
            self._frames.append(frame)
            try:
                yield
            finally:
                self._frames.pop()
                if self._poison:
                    self._fill(frame.lent.values())
                self.give_back(frame.kept.values())

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype, label: str) -> Tensor:
        """A contiguous tensor, not initialised, of the innermost scope. Raises ArenaFull."""
        n_bytes = prod(shape) * dtype.itemsize
        if n_bytes == 0:
            return torch.empty(shape, dtype=dtype, device=self._slab_u8.device)
        frame = self._frames[-1]
        span = frame.lender.take(n_bytes, label=label, frames_up=4)
        frame.lent[span.offset] = span
        if self._poison:
            self._fill((span,))
        return self._view(span.offset, shape, dtype)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors of the innermost scope live as long as the one around it."""
        self._frames[-2].kept.update((span.offset, span) for span in self._hand_on(tensors))

    def lease(self, tensors: Iterable[Tensor]) -> Lease:
        """Let tensors of the innermost scope live until the lease is released."""
        return Lease(self, self._hand_on(tensors))

    def free(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors of the innermost scope back before it ends."""
        self.give_back(self._hand_on(tensors))

    def give_back(self, spans: Iterable[Span]) -> None:
        """Release spans that were handed on."""
        for span in spans:
            if self._poison:
                self._fill((span,))
            self.arena.release(span)

    def _hand_on(self, tensors: Iterable[Tensor]) -> list[Span]:
        """Take the spans of `tensors` out of the innermost scope. Tensors from elsewhere have none."""
        frame, out = self._frames[-1], []
        for tensor in tensors:
            offset = tensor.data_ptr() - self._first_byte
            if not 0 <= offset < self.arena.slab_bytes or tensor.numel() == 0:
                continue
            if span := frame.lent.pop(offset, None):
                out.append(frame.lender.keep(span))
            elif span := frame.kept.pop(offset, None):
                out.append(span)
            else:
                raise RuntimeError(
                    f"{self.arena.name}: a tensor of shape {list(tensor.shape)} at offset {offset:#x} is no whole "
                    "tensor of the innermost scope; hand on the tensor it is a view of, in its own scope"
                )
        return out

    def _fill(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self._slab_u8[span.offset : span.offset + span.size_bytes] = POISON_BYTE


_DTYPES = (torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8)
_thread = threading.local()


@contextmanager
def use(memory: StageMemory) -> Iterator[None]:
    """Lend this thread's tensors from `memory`."""
    before = getattr(_thread, "memory", None)
    _thread.memory = memory
    try:
        yield
    finally:
        _thread.memory = before


def _view(typed: dict[torch.dtype, Tensor], offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The bytes from offset on as a contiguous tensor; typed holds the whole slab in every dtype."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return typed[dtype].as_strided(shape, strides[::-1], offset // dtype.itemsize)


def _lend(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    memory: StageMemory | None = getattr(_thread, "memory", None)
    if memory is None:
        return torch.empty(shape, dtype=dtype)
    return memory.lend(shape, dtype, sys._getframe(2).f_code.co_name)


def bf16(*shape: int) -> Tensor:
    """A tensor of this shape, not initialised. Traces call it by the name of the calling function."""
    return _lend(shape, torch.bfloat16)


def f32(*shape: int) -> Tensor:
    return _lend(shape, torch.float32)


def i32(*shape: int) -> Tensor:
    return _lend(shape, torch.int32)


def i64(*shape: int) -> Tensor:
    return _lend(shape, torch.int64)


def u8(*shape: int) -> Tensor:
    return _lend(shape, torch.uint8)


def like(tensor: Tensor, n_rows: int) -> Tensor:
    """n_rows rows of the shape and dtype of tensor [R, ...]."""
    return _lend((n_rows, *tensor.shape[1:]), tensor.dtype)
