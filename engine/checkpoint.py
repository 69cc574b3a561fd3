"""A checkpoint's weights: opened and checked whole, then read by range through bounded host memory.

Nothing is copied out of a memory map on the way to a device (case B44): reader threads fill a few reused
buffers, and the caller's thread takes each tensor from there while the next ranges are being read. What is large
stays in the files, as a StoredStack, until the device's own uploader reads it.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from rocline.engine.config import GROUP, ModelConfig
from rocline.engine.layout import Component, TensorSpec, expected_tensors
from rocline.engine.shards import CheckpointError, StoredTensor, read_table
from rocline.hip_kernels.uploader import Stored

MAX_STAGING_BYTES = 2 << 30
READ_BYTES = 16 << 20  # of a large tensor, by one call
READERS = 4
# Quantised tensors stay bytes: torch cannot compute on F8_E8M0, and I8 is two E2M1 codes, no integer.
TORCH_DTYPE = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.uint8,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}

Deliver = Callable[[str, int, Tensor], None]


def new_staging(n_buffers: int = 2 * READERS, buffer_bytes: int = 64 << 20) -> list[Tensor]:
    """Host buffers for `Checkpoint.read`: twice the readers, so that none waits while one is delivered."""
    return [torch.empty(buffer_bytes, dtype=torch.uint8) for _ in range(n_buffers)]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive rows of one tensor: all of them unless it is larger than a buffer."""

    name: str
    row_start: int
    shape: tuple[int, ...]
    dtype: str
    n_bytes: int
    is_last: bool


@dataclass(slots=True)
class _Range:
    """Adjacent pieces of one file, read by one call."""

    path: Path
    begin: int
    n_bytes: int = 0
    pieces: list[_Piece] = field(default_factory=list)


class Checkpoint:
    """An open, checked checkpoint. One thread at a time may call read; use it as a context manager.

    tensors  where each tensor lies and what it is, by name
    """

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.folder = folder
        self.tensors = tensors
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self._bytes_left: dict[str, int] = {}  # of tensors read in parts
        self._files: dict[Path, int] = {}
        for path in sorted({stored.path for stored in tensors.values()}):
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @classmethod
    def open(cls, folder: str | Path, config: ModelConfig) -> Checkpoint:
        """Check every header of `folder` against the layout of `config` (backbone.md section 12).

        Reads no weights. Raises CheckpointError with all the faults there are.
        """
        return cls(Path(folder), read_table(Path(folder), expected_tensors(config)))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Planes that were mapped stay valid."""
        while self._files:
            os.close(self._files.popitem()[1])

    def read(
        self,
        names: Iterable[str],
        deliver: Deliver,
        *,
        staging: Sequence[Tensor] | None = None,
        n_readers: int = READERS,
        advance: Callable[[int], None] = lambda n_bytes: None,
    ) -> None:
        """Read the named tensors, in file order, and hand each to deliver(name, row_start, tensor).

        deliver is called in this thread. `tensor` holds the rows row_start, row_start + 1, ... of the
        stored shape, as BF16, F32, or uint8 for quantised dtypes; it lies in a staging buffer and is valid
        only during the call. A tensor that fits one buffer comes whole, a larger one in ascending row
        ranges, each but the last a multiple of 32 rows (a scale tile) where 32 rows fit.

        staging  1-D uint8 host tensors of at most 2 GiB together (pinned ones make device copies fast);
                 the smallest of them bounds a range. Default: new_staging()
        advance  called with the bytes of each tensor or row range delivered

        Raises CheckpointError if a file has changed or cannot be read, and whatever deliver raises; in
        either case the readers have stopped. ValueError if the staging is too large, or too small for a row.
        """
        buffers = list(new_staging() if staging is None else staging)
        total_bytes = sum(buffer.nbytes for buffer in buffers)
        if not 0 < total_bytes <= MAX_STAGING_BYTES:
            raise ValueError(f"staging of {total_bytes:,} bytes, must be 1 to {MAX_STAGING_BYTES:,}")
        stored = {name: self.tensors[name] for name in names}
        ranges = _ranges(stored, min(buffer.nbytes for buffer in buffers))
        in_flight: deque[tuple[_Range, Tensor, Future[None]]] = deque()
        with ThreadPoolExecutor(n_readers, thread_name_prefix="checkpoint-reader") as readers:
            try:
                for part in ranges:
                    if not buffers:
                        buffers.append(self._take(in_flight.popleft(), deliver, advance))
                    buffer = buffers.pop()
                    in_flight.append((part, buffer, readers.submit(self._fill, part, buffer)))
                while in_flight:
                    self._take(in_flight.popleft(), deliver, advance)
            finally:
                readers.shutdown(cancel_futures=True)

    def _take(
        self, filled: tuple[_Range, Tensor, Future[None]], deliver: Deliver, advance: Callable[[int], None]
    ) -> Tensor:
        """Deliver a range once it is read; returns its buffer, free again."""
        part, buffer, future = filled
        future.result()
        at = 0
        for piece in part.pieces:
            raw, dtype = buffer[at : at + piece.n_bytes], TORCH_DTYPE[piece.dtype]
            if raw.data_ptr() % dtype.itemsize:  # the format does not promise aligned tensors
                raw = raw.clone()
            deliver(piece.name, piece.row_start, raw.view(dtype).view(piece.shape))
            advance(piece.n_bytes)
            at += piece.n_bytes
            if piece.is_last:
                self._seen.add(piece.name)
        return buffer

    def _fill(self, part: _Range, buffer: Tensor) -> None:
        """Read one range into the front of `buffer`. Runs in a reader thread."""
        self._pread(part.path, part.begin, buffer.numpy()[: part.n_bytes], part.pieces[0].name)

    def read_whole(self, name: str, out: Tensor, *, advance: Callable[[int], None] = lambda n_bytes: None) -> None:
        """Read a large tensor to where it is to be, contiguous, by several readers; errors and advance as of read.

        One thread that copies from staging, and takes the page faults, would be slower than a good disk.
        """
        out_u8 = out.view(-1).view(torch.uint8).numpy()
        starts = range(0, len(out_u8), READ_BYTES)
        with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-reader") as readers:
            try:
                pieces = [out_u8[start : start + READ_BYTES] for start in starts]
                reads = [readers.submit(self.read_bytes, name, *each) for each in zip(starts, pieces, strict=True)]
                for read, piece in zip(reads, pieces, strict=True):
                    read.result()
                    advance(len(piece))
            finally:
                readers.shutdown(cancel_futures=True)

    def read_bytes(self, name: str, start: int, out_u8: np.ndarray) -> None:
        """Fill out_u8 with a tensor's bytes from `start` on. Called by any thread; it counts as read once as many bytes
        of it have been asked for as it has. Raises CheckpointError as read does."""
        stored = self.tensors[name]
        self._pread(stored.path, stored.offset + start, out_u8, name)
        with self._lock:
            left = self._bytes_left[name] = self._bytes_left.get(name, stored.spec.n_bytes) - len(out_u8)
        if left <= 0:
            self._seen.add(name)

    def _pread(self, path: Path, begin: int, out_u8: np.ndarray, name: str) -> None:
        view, done = out_u8.data, 0
        while done < len(view):  # one call may return less, and never more than 2 GiB
            try:
                got = os.preadv(self._files[path], [view[done:]], begin + done)
            except OSError as error:
                raise self._lost(path, begin + done, name, error.strerror or str(error)) from error
            if got == 0:
                why = "the file ends here; it was cut since it was opened"
                raise self._lost(path, begin + done, name, why)
            done += got

    def _lost(self, path: Path, offset: int, name: str, why: str) -> CheckpointError:
        text = f"{path.name} at byte {offset:,}, near {name}: {why}"
        return CheckpointError(self.folder, {"failed reads": [text]})

    def map_plane(self, name: str) -> np.ndarray:
        """A tensor as a read-only uint8 array over its file, the last axis in bytes. It counts as read.

        For Engram planes left on disk: pages come in as rows are gathered, and the kernel is told not to
        read ahead of them.
        """
        stored = self.tensors[name]
        begin = stored.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        skip, n_bytes = stored.offset - begin, stored.spec.n_bytes
        mapped = mmap.mmap(self._files[stored.path], skip + n_bytes, access=mmap.ACCESS_READ, offset=begin)
        mapped.madvise(mmap.MADV_RANDOM)
        self._seen.add(name)
        plane = np.frombuffer(mapped, np.uint8, n_bytes, skip)
        return plane.reshape(*stored.spec.shape[:-1], -1)

    def unread(self) -> list[str]:
        """The tensors that were neither read to the end nor mapped."""
        return [name for name in self.tensors if name not in self._seen]

    def finish(self, skip_components: Collection[Component] = ()) -> None:
        """Call when everything is loaded: drop the files' pages from the page cache.

        Hundreds of GB of it would otherwise be reclaimed inside the next large pinned allocation (case
        B45). Raises CheckpointError if a tensor outside `skip_components` was not read: a weight that
        nobody asked for is a model that silently lacks it.
        """
        left = [name for name in self.unread() if self.tensors[name].spec.component not in skip_components]
        if left:
            raise CheckpointError(self.folder, {"unread tensors": left})
        for file in self._files.values():
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


class StoredStack(Stored):
    """Tensors of one shape as one of theirs along a first axis, still in the files.

    advance  called with the bytes of each read, by the threads that read
    """

    def __init__(self, checkpoint: Checkpoint, names: Sequence[str], advance: Callable[[int], None]) -> None:
        spec = checkpoint.tensors[names[0]].spec
        self.shape, self.dtype = (len(names), *spec.shape), TORCH_DTYPE[spec.dtype]
        self._checkpoint, self._names, self._advance = checkpoint, names, advance

    def __getitem__(self, part: slice) -> StoredStack:
        return StoredStack(self._checkpoint, self._names[part], self._advance)

    def read(self, start: int, out_u8: np.ndarray) -> None:
        item_bytes, done = self.nbytes // len(self._names), 0
        while done < len(out_u8):
            item, at = divmod(start + done, item_bytes)
            end = min(done + item_bytes - at, len(out_u8))
            self._checkpoint.read_bytes(self._names[item], at, out_u8[done:end])
            self._advance(end - done)
            done = end


def _ranges(stored: Mapping[str, StoredTensor], range_bytes: int) -> Iterator[_Range]:
    """Cut tensors into pieces and join neighbours into ranges of at most range_bytes, in file order."""
    part: _Range | None = None
    for name, tensor in sorted(stored.items(), key=lambda item: (item[1].path, item[1].offset)):
        begin = tensor.offset
        for piece in _pieces(name, tensor.spec, range_bytes):
            adjacent = part and part.path == tensor.path and part.begin + part.n_bytes == begin
            if part is None or not adjacent or part.n_bytes + piece.n_bytes > range_bytes:
                if part:
                    yield part
                part = _Range(tensor.path, begin)
            part.pieces.append(piece)
            part.n_bytes += piece.n_bytes
            begin += piece.n_bytes
    if part:
        yield part


def _pieces(name: str, spec: TensorSpec, range_bytes: int) -> Iterator[_Piece]:
    total_rows, row_bytes = spec.shape[0], spec.n_bytes // spec.shape[0]
    n_rows = range_bytes // row_bytes
    if n_rows == 0:
        raise ValueError(f"staging buffers of {range_bytes:,} bytes, a row of {name} has {row_bytes:,}")
    if GROUP <= n_rows < total_rows:
        n_rows = n_rows // GROUP * GROUP
    for row in range(0, total_rows, n_rows):
        end = min(row + n_rows, total_rows)
        shape = (end - row, *spec.shape[1:])
        yield _Piece(name, row, shape, spec.dtype, (end - row) * row_bytes, end == total_rows)
