"""Weights on their way to a card while a model loads: threads fill pinned memory, a stream of its own copies from
there, and kernels re-order what came before.

What is copied from memory that is not pinned goes at a fraction of the rate, and from a mapped file slower yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocline.hip_kernels.driver import Device, Event, HostBuffer, Slab, copy_async, wait_for
from rocline.hip_kernels.staging import Staging

# As much of the host, pinned, and of the card, while loading. Pinning takes 0.7 ms a MiB, once a card.
PARTS, PART_BYTES = 4, 32 << 20
AHEAD = PARTS - 2  # parts being filled; of the others one is copied and one waits for the kernel that reads it
READERS = 8
READ_BYTES = 4 << 20  # by a thread at a time
SMALL_BYTES = 1 << 20  # not worth a part
ALIGNMENT = 256

Read = Callable[[int, np.ndarray], None]


class Stored(ABC):
    """A tensor whose bytes are still elsewhere, as in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def __getitem__(self, part: slice) -> Stored:
        """Of consecutive items of the first axis."""

    @abstractmethod
    def read(self, start: int, out_u8: np.ndarray) -> None:
        """Fill out_u8 with the bytes from `start` on. Called by several threads at once."""

    def load(self) -> Tensor:
        """In host memory."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self.read(0, out.view(-1).view(torch.uint8).numpy())
        return out


Source = Tensor | Stored


class _Part:
    """Pinned memory and as much of the card.

    passed  its last copy has been made: it may be filled again
    used    what read the card's half has been run: it may be copied to again
    """

    def __init__(self, device: Device) -> None:
        self.host = HostBuffer(PART_BYTES)
        self.bytes_u8 = self.host.tensor().numpy()
        self.slab: Slab | None = None
        self._device = device
        self.passed, self.used = Event(), Event()
        self.reads: list[Future[None]] = []

    @property
    def on_card_u8(self) -> Tensor:
        if self.slab is None:
            self.slab = self._device.allocate(PART_BYTES)
        return self.slab.tensor()

    def free(self) -> None:
        self.host.free()
        if self.slab is not None:
            self.slab.free()


class Uploader:
    """Of one thread, for a device; what it brings is for that thread's current stream. A context manager.

    staging  for small tensors, of that stream

    After an error, of a read too, it is good for nothing but its end, which waits for what is on its way and leaves
    nothing pinned.
    """

    def __init__(self, device: Device, staging: Staging) -> None:
        self._device, self._staging = device, staging
        self._stream = device.stream()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="weight-reader")
        self._parts: deque[_Part] = deque()  # the longest unused first

    def __enter__(self) -> Uploader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._readers.shutdown(cancel_futures=True)
        try:
            self._stream.synchronize()
        finally:
            while self._parts:
                self._parts.popleft().free()

    def put(self, source: Source) -> Tensor:
        """A tensor on the device for good; there already, if contiguous, itself. Raises HipError, and what reading
        raises."""
        if isinstance(source, Tensor) and not _is_elsewhere(source):
            return source.contiguous()
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device.torch_device)
        if target.nbytes <= SMALL_BYTES:
            self._staging.put(source.load() if isinstance(source, Stored) else source, target)
            return target
        self._stream.wait(Event().record())  # the target's memory may be that of a tensor which is still read
        read, filling = _reader(source), deque[tuple[_Part, int, int]]()
        for start in range(0, target.nbytes, PART_BYTES):
            n_bytes = min(PART_BYTES, target.nbytes - start)
            filling.append((self._fill([(read, start, n_bytes, 0)]), start, n_bytes))
            if len(filling) > AHEAD:
                self._copy_to(target, *filling.popleft())
        while filling:
            self._copy_to(target, *filling.popleft())
        return target

    def each(self, parts: Iterable[Sequence[Source]]) -> Iterator[Sequence[Tensor]]:
        """Tensors of each part on the device, in order, while later parts are being read.

        They are for what is put on the current stream before the next part is asked for. Raises as put.
        """
        filling = deque[tuple[_Part, Sequence[Source]]]()
        for sources in parts:
            ends = _ends(sources)
            if SMALL_BYTES < ends[-1] <= PART_BYTES and all(map(_is_elsewhere, sources)):
                reads = [(_reader(s), 0, s.nbytes, at) for s, at in zip(sources, ends[:-1], strict=True)]
                filling.append((self._fill(reads), sources))
                if len(filling) > AHEAD:
                    yield from self._arrived(*filling.popleft())
                continue
            while filling:
                yield from self._arrived(*filling.popleft())
            yield [self.put(source) for source in sources]
        while filling:
            yield from self._arrived(*filling.popleft())

    def _fill(self, reads: Sequence[tuple[Read, int, int, int]]) -> _Part:
        """Have threads read into a part: by each the bytes from a start on, so many, to a place of the part."""
        if len(self._parts) < PARTS:
            part = _Part(self._device)
            self._parts.append(part)
        else:
            part = self._parts[0]
            part.passed.synchronize()
            self._parts.rotate(-1)
        part.reads = [
            self._readers.submit(read, start + at, part.bytes_u8[to + at : to + min(at + READ_BYTES, n_bytes)])
            for read, start, n_bytes, to in reads
            for at in range(0, n_bytes, READ_BYTES)
        ]
        return part

    def _copy(self, part: _Part, to_address: int, n_bytes: int) -> None:
        """Copy from a part once it is filled; the current stream goes on after that."""
        for read in part.reads:
            read.result()
        with self._stream:
            copy_async(to_address, part.host.address, n_bytes)
            part.passed.record()
        wait_for(part.passed)

    def _copy_to(self, target: Tensor, part: _Part, start: int, n_bytes: int) -> None:
        self._copy(part, target.data_ptr() + start, n_bytes)

    def _arrived(self, part: _Part, sources: Sequence[Source]) -> Iterator[Sequence[Tensor]]:
        on_card_u8, ends = part.on_card_u8, _ends(sources)
        self._stream.wait(part.used)
        self._copy(part, on_card_u8.data_ptr(), ends[-1])
        yield [
            on_card_u8[at : at + source.nbytes].view(source.dtype).view(source.shape)
            for source, at in zip(sources, ends[:-1], strict=True)
        ]
        part.used.record()


def _is_elsewhere(source: Source) -> bool:
    """Whether it has to be brought. What a test's device has in host memory is brought all the same."""
    return isinstance(source, Stored) or source.device.type == "cpu"


def _ends(sources: Sequence[Source]) -> list[int]:
    """Where each begins in a part, and where the last one ends."""
    ends = [0]
    for source in sources:
        ends.append(ends[-1] + -(-source.nbytes // ALIGNMENT) * ALIGNMENT)
    return ends


def _reader(source: Source) -> Read:
    if isinstance(source, Stored):
        return source.read
    bytes_u8: np.ndarray[Any, Any] = source.contiguous().view(-1).view(torch.uint8).numpy()

    def read(start: int, out_u8: np.ndarray) -> None:
        np.copyto(out_u8, bytes_u8[start : start + len(out_u8)])

    return read
