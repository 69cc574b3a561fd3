"""Host tensors on their way to a device: through pinned memory, so that nobody waits."""

from __future__ import annotations

import torch
from torch import Tensor

from rocline.hip_kernels.binding import BindError, is_shapes_only
from rocline.hip_kernels.driver import Event, HostBuffer, copy_async, refuse_in_capture

PARTS, PART_BYTES = 4, 2 << 20  # 8 MiB: a few chunks' row tables, or the Engram rows of one


class Staging:
    """Pinned memory in parts, written in turn. Of one thread and one stream.

    A part is written again when the copies out of it have passed. That is the only wait, and means that the host is
    PARTS - 1 parts ahead of the device.
    """

    def __init__(self) -> None:
        self._buffer = HostBuffer(PARTS * PART_BYTES)
        self._bytes_u8 = self._buffer.tensor()
        self._passed = [Event() for _ in range(PARTS)]
        self._part = self._used = 0

    def put(self, source: Tensor, target: Tensor) -> None:
        """Copy a host tensor to a contiguous one on the device, of the same shape, on the current stream.

        What happens to source later does not matter. Raises BindError, and HipError while a graph is captured: at its
        launch the pinned memory would hold something else.
        """
        refuse_in_capture(f"put of {source.nbytes} bytes")
        if source.shape != target.shape or source.dtype != target.dtype or not target.is_contiguous():
            raise BindError(
                f"put: {list(source.shape)} {source.dtype} to {list(target.shape)} {target.dtype} with strides "
                f"{target.stride()}; want the same, and contiguous"
            )
        flat = source.contiguous().as_strided((source.numel(),), (1,))  # a single element may have any stride
        data_u8 = flat.view(torch.uint8)
        for start in range(0, len(data_u8), PART_BYTES):
            piece = data_u8[start : start + PART_BYTES]
            at = self._room(len(piece))
            self._bytes_u8[at : at + len(piece)].copy_(piece)
            copy_async(target.data_ptr() + start, self._buffer.address + at, len(piece))

    def close(self) -> None:
        """Wait for what is on its way, and free the memory. No call may follow."""
        self._passed[self._part].record()
        for event in self._passed:
            event.synchronize()
        self._buffer.free()

    def _room(self, n_bytes: int) -> int:
        """Where n_bytes may be written."""
        if self._used + n_bytes > PART_BYTES:
            self._passed[self._part].record()
            self._part, self._used = (self._part + 1) % PARTS, 0
            self._passed[self._part].synchronize()
        at = self._part * PART_BYTES + self._used
        self._used += -(-n_bytes // 16) * 16
        return at


def fetch(tensor: Tensor) -> Tensor:
    """A copy in host memory of a tensor on the device, as it is at the current stream's end. Waits for that."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor.numel() and not is_shapes_only():
        refuse_in_capture(f"fetch of {tensor.nbytes} bytes")
        source = tensor.contiguous()
        copy_async(out.data_ptr(), source.data_ptr(), out.nbytes)
        Event().record().synchronize()
    return out
