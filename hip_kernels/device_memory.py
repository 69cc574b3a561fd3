"""Where operators that run by kernels find workspaces, and where host tensors of theirs go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from rocline.hip_kernels.driver import copy_async, refuse_in_capture

COUNTERS = 64  # of workgroups done, by segments of a row's channels at most
ROW_COUNTERS = 8  # of them, for kernels that count by rows: as many as a step of few rows has


class Uploads(Protocol):
    def put(self, source: Tensor, target: Tensor) -> None:
        """As Staging.put."""


Lend = Callable[[tuple[int, ...], torch.dtype], Tensor]


class _Thread(threading.local):
    """Where this thread's workspaces and uploads come from; counters_i32 are zeros between kernels."""

    lend: Lend
    staging: Uploads
    counters_i32: Tensor


here = _Thread()


@contextmanager
def use_memory(lend: Lend, staging: Uploads, counters_i32: Tensor) -> Iterator[None]:
    """Meanwhile this thread's workspaces are lent by `lend`, and its host tensors go through `staging`.

    counters_i32  [COUNTERS] zeros, which no other stream's work uses
    """
    before = dict(vars(here))
    here.lend, here.staging, here.counters_i32 = lend, staging, counters_i32
    try:
        yield
    finally:
        vars(here).clear()
        vars(here).update(before)


def upload(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Host tensors on the device of this thread's work, in lent memory, by one copy."""
    if len(tensors) == 1:
        out = here.lend(tuple(tensors[0].shape), tensors[0].dtype)
        here.staging.put(tensors[0], out)
        return [out]
    edges = [0, *accumulate(-(-tensor.nbytes // 16) * 16 for tensor in tensors)]
    if not edges[-1]:
        return [here.lend(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    together_u8 = torch.empty(edges[-1], dtype=torch.uint8)
    here_u8 = here.lend((edges[-1],), torch.uint8)
    outs = []
    for tensor, start in zip(tensors, edges[:-1], strict=True):
        place = slice(start, start + tensor.nbytes)
        together_u8[place].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        outs.append(here_u8[place].view(tensor.dtype).view(tensor.shape))
    here.staging.put(together_u8, here_u8)
    return outs


def upload_pinned(tensor: Tensor) -> Tensor:
    """A contiguous tensor in pinned memory on the device of this thread's work, in lent memory. Nobody waits, and the
    tensor must stay as it is until the copy has been made. Raises HipError while a graph is captured."""
    refuse_in_capture(f"upload of {tensor.nbytes} bytes")
    out = here.lend(tuple(tensor.shape), tensor.dtype)
    if tensor.nbytes:
        copy_async(out.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return out


def put(source: Tensor, target: Tensor) -> None:
    """Copy a host tensor to one on the device of this thread's work, as Staging.put."""
    here.staging.put(source, target)
