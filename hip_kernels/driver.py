"""GPUs: their memory, streams, events and copies.

Whatever runs asynchronously runs on the calling thread's current stream: the one whose `with` it is in, else the
null stream of device 0. torch's operators follow where torch sees the GPUs.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rocline.hip_kernels.binding import is_shapes_only
from rocline.hip_kernels.runtime import HipError, check, hip, torch_sees_gpus

_COPY_BY_ADDRESS = 4  # hipMemcpyDefault: the runtime sees from the addresses which way
_PEER_ACCESS_ALREADY_ENABLED = 704


class _Here(threading.local):
    """Where the calling thread's work goes."""

    def __init__(self) -> None:
        self.device = 0
        self.stream = 0  # a hipStream_t
        self.made_on = 0  # the runtime's current device, which Device.current() moves alone
        self.captures = False  # whether what is put on it is captured instead, see graph.py
        self.entered: list[tuple[int, int, AbstractContextManager[Any]]] = []  # what to return to


here = _Here()


def refuse_in_capture(doing: str, *details: object) -> None:
    """Raise HipError with `doing % details` where this thread captures a graph: what the host waits for does not come
    about there."""
    if here.captures:
        raise HipError(
            f"{doing % details if details else doing}: this thread is capturing a graph on device {here.device}, which "
            "holds launches, copies and fills of one stream; do it before or after"
        )


class MemoryReading(NamedTuple):
    """One device's memory: free and total of the whole card, and what this process holds in slabs."""

    free_bytes: int
    total_bytes: int
    slab_bytes: int
    n_slabs_ever: int


class Device:
    """One GPU. Take them from devices().

    arch         as the compiler spells it, for example "gfx1100"
    total_bytes  of the card
    is_host      whether its memory is the host's own, which a torch without GPUs can use too
    """

    def __init__(self, index: int) -> None:
        properties = check(hip().hipGetDeviceProperties(index), f"hipGetDeviceProperties of device {index}")
        self.index = index
        self.name: str = properties.name
        self.arch: str = properties.gcnArchName.partition(":")[0]  # a suffix like ":xnack-" is the card's state
        self.total_bytes: int = properties.totalGlobalMem
        self.is_host = bool(properties.directManagedMemAccessFromHost)
        self._lock = threading.Lock()
        self._slab_bytes = 0
        self._n_slabs_ever = 0

    def __repr__(self) -> str:
        return f"Device({self.index}: {self.name}, {self.arch})"

    @property
    def torch_device(self) -> torch.device:
        """What torch calls it. Raises HipError where torch cannot reach its memory."""
        if torch_sees_gpus():
            return torch.device("cuda", self.index)
        if self.is_host:
            return torch.device("cpu")
        raise HipError(f"{self}: torch {torch.__version__} sees no GPU; install its ROCm build")

    def memory(self) -> MemoryReading:
        """Read now, and cheap: it is asked for ten times a second. Raises HipError."""
        set_device(self.index)
        result = hip().hipMemGetInfo()
        set_device(here.device)
        free, total = check(result, "hipMemGetInfo of device %d", self.index)
        return MemoryReading(free, total, self._slab_bytes, self._n_slabs_ever)

    def allocate(self, n_bytes: int) -> Slab:
        """A slab of n_bytes, contents undefined. Raises HipError with what is free if it does not fit."""
        refuse_in_capture(f"hipMalloc of {n_bytes} bytes on {self}")
        with self.current():
            status, memory = hip().hipMalloc(n_bytes)
        if status != 0:
            free_bytes = self.memory().free_bytes
            raise HipError(
                f"hipMalloc of {n_bytes} bytes on device {self.index}: {status.name} ({int(status)}); "
                f"{free_bytes} bytes are free; ask for less or end what else uses the card",
                status.name,
            )
        self._count(n_bytes, 1)
        return Slab(self, int(memory), n_bytes)

    def stream(self) -> Stream:
        """A new stream, which does not wait for the null stream. Raises HipError."""
        with self.current():
            handle = check(hip().hipStreamCreateWithFlags(hip().hipStreamNonBlocking), f"a stream of {self}")
        return Stream(self, int(handle))

    def enable_peer(self, peer: Device) -> None:
        """Let this device reach peer's memory directly, where the machine can; copies work either way."""
        if check(hip().hipDeviceCanAccessPeer(self.index, peer.index), f"hipDeviceCanAccessPeer of {self}"):
            with self.current():
                status = hip().hipDeviceEnablePeerAccess(peer.index, 0)
            if status[0] != _PEER_ACCESS_ALREADY_ENABLED:
                check(status, f"hipDeviceEnablePeerAccess of {self} to {peer}")

    def synchronize(self) -> None:
        """Wait for everything on this device. Raises HipError, also for what an earlier kernel did wrong."""
        refuse_in_capture(f"hipDeviceSynchronize of {self}")
        with self.current():
            check(hip().hipDeviceSynchronize(), f"hipDeviceSynchronize of {self}")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the runtime's current device meanwhile; the current stream stays."""
        set_device(self.index)
        try:
            yield
        finally:
            set_device(here.device)

    def _count(self, n_bytes: int, n_slabs: int) -> None:
        with self._lock:
            self._slab_bytes += n_bytes
            self._n_slabs_ever += n_slabs


@cache
def devices() -> tuple[Device, ...]:
    """Every GPU that HIP shows. Raises HipError where HIP cannot be used."""
    return tuple(Device(index) for index in range(check(hip().hipGetDeviceCount(), "hipGetDeviceCount")))


def set_device(index: int) -> None:
    """Make it the runtime's current device in this thread."""
    check(hip().hipSetDevice(index), "hipSetDevice to %d", index)
    here.made_on = index


class Slab:
    """Device memory of one hipMalloc: address, n_bytes. Lives until free()."""

    def __init__(self, device: Device, address: int, n_bytes: int) -> None:
        self.device, self.address, self.n_bytes = device, address, n_bytes

    def tensor(self) -> Tensor:
        """The slab as uint8 [n_bytes] on the device's torch_device, not copied; valid until free(). Raises HipError."""
        place = self.device.torch_device
        return torch.as_tensor(self, device=place) if place.type == "cuda" else _host_tensor(self.address, self.n_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.n_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def free(self) -> None:
        """Give the memory back; waits for the device. Once only: a second call raises HipError."""
        refuse_in_capture(f"hipFree of {self.n_bytes} bytes on {self.device}")
        with self.device.current():
            check(hip().hipFree(self.address), f"hipFree of {self.n_bytes} bytes on device {self.device.index}")
        self.device._count(-self.n_bytes, 0)


class HostBuffer:
    """Pinned host memory, which asynchronous copies need: address, n_bytes. Lives until free()."""

    def __init__(self, n_bytes: int) -> None:
        refuse_in_capture(f"hipHostMalloc of {n_bytes} bytes")
        memory = check(hip().hipHostMalloc(n_bytes, hip().hipHostMallocPortable), f"hipHostMalloc of {n_bytes} bytes")
        self.address, self.n_bytes = int(memory), n_bytes

    def tensor(self) -> Tensor:
        """The buffer as uint8 [n_bytes] on the CPU, not copied; valid until free()."""
        return _host_tensor(self.address, self.n_bytes)

    def free(self) -> None:
        """Give the memory back. Once only: a second call raises HipError."""
        refuse_in_capture(f"hipHostFree of {self.n_bytes} bytes")
        check(hip().hipHostFree(self.address), f"hipHostFree of {self.n_bytes} bytes")


def _host_tensor(address: int, n_bytes: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), dtype=torch.uint8)


class Stream:
    """Work of one device in order. `with stream:` makes it this thread's current one, for torch too."""

    def __init__(self, device: Device, handle: int) -> None:
        self.device, self.handle = device, handle
        weakref.finalize(self, hip().hipStreamDestroy, handle).atexit = False

    def __enter__(self) -> Stream:
        if self.handle != here.stream:
            refuse_in_capture(f"entering another stream, of {self.device}")
        theirs: AbstractContextManager[Any] = nullcontext()
        if torch_sees_gpus():
            theirs = torch.cuda.stream(torch.cuda.ExternalStream(self.handle, device=self.device.index))
        theirs.__enter__()
        set_device(self.device.index)
        here.entered.append((here.device, here.stream, theirs))
        here.device, here.stream = self.device.index, self.handle
        return self

    def __exit__(self, *error: Any) -> None:
        here.device, here.stream, theirs = here.entered.pop()
        theirs.__exit__(*error)
        set_device(here.device)

    def wait(self, event: Event) -> None:
        """What is put on this stream later waits for the event, of whichever device; the host does not."""
        refuse_in_capture(f"hipStreamWaitEvent on {self.device}")
        check(hip().hipStreamWaitEvent(self.handle, event.handle, 0), f"hipStreamWaitEvent on {self.device}")

    def synchronize(self) -> None:
        """Wait until the stream has done all. Raises HipError, also for what an earlier kernel did wrong."""
        refuse_in_capture(f"hipStreamSynchronize on {self.device}")
        check(hip().hipStreamSynchronize(self.handle), f"hipStreamSynchronize on {self.device}")


# Handles of events that are gone, for those to come: a step has a dozen, and making one takes longer than recording it.
_spare_events: dict[tuple[int, bool], deque[int]] = {}


class Event:
    """A point in a stream. Only timed ones can be asked for ms_since; others cost less.

    Belongs to the device that is current when it is made, and is recorded on streams of that device.
    """

    def __init__(self, timed: bool = False) -> None:
        self._spare = _spare_events.setdefault((here.made_on, timed), deque())
        try:
            self.handle = self._spare.pop()
        except IndexError:
            flags = 0 if timed else hip().hipEventDisableTiming
            self.handle = int(check(hip().hipEventCreateWithFlags(flags), f"an event on device {here.device}"))

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._spare.append(self.handle)

    def record(self) -> Event:
        """Move it to the current stream's present end. Returns itself."""
        refuse_in_capture("hipEventRecord")
        check(hip().hipEventRecord(self.handle, here.stream), "hipEventRecord on device %d", here.device)
        return self

    def done(self) -> bool:
        """Whether the stream has passed what was recorded last, of which nobody knows before a first record(). Does not
        wait."""
        refuse_in_capture("hipEventQuery")
        result = hip().hipEventQuery(self.handle)
        if result[0] == hip().hipError_t.hipErrorNotReady:
            return False
        check(result, "hipEventQuery")
        return True

    def synchronize(self) -> None:
        """Wait until the stream has passed it."""
        refuse_in_capture("hipEventSynchronize")
        check(hip().hipEventSynchronize(self.handle), "hipEventSynchronize")

    def ms_since(self, earlier: Event) -> float:
        """Milliseconds of device time between two recorded, passed, timed events."""
        elapsed: float = check(hip().hipEventElapsedTime(earlier.handle, self.handle), "hipEventElapsedTime")
        return elapsed


def wait_for(event: Event) -> None:
    """What is put on the current stream later waits for the event, of whichever device; the host does not."""
    refuse_in_capture("hipStreamWaitEvent")
    check(hip().hipStreamWaitEvent(here.stream, event.handle, 0), "hipStreamWaitEvent on device %d", here.device)


def copy_async(to_address: int, from_address: int, n_bytes: int) -> None:
    """Copy between any two of this device's memory and pinned host memory, on the current stream.

    Raises HipError. From or to host memory that is not pinned it may wait, and is not ordered as promised.
    """
    if is_shapes_only():
        return
    result = hip().hipMemcpyAsync(to_address, from_address, n_bytes, _by_address(), here.stream)
    check(result, "hipMemcpyAsync of %d bytes on device %d", n_bytes, here.device)


@cache
def _by_address() -> Any:
    return hip().hipMemcpyKind(_COPY_BY_ADDRESS)


def copy_peer_async(to_address: int, to_device: Device, from_address: int, from_device: Device, n_bytes: int) -> None:
    """Copy from one device's memory to another's, on the current stream, which is of either. Raises HipError."""
    refuse_in_capture("hipMemcpyPeerAsync of %d bytes", n_bytes)
    result = hip().hipMemcpyPeerAsync(
        to_address, to_device.index, from_address, from_device.index, n_bytes, here.stream
    )
    check(result, "hipMemcpyPeerAsync of %d bytes from device %d to %d", n_bytes, from_device.index, to_device.index)


def fill_async(address: int, byte: int, n_bytes: int) -> None:
    """Set n_bytes of this device's memory to `byte`, on the current stream. Raises HipError."""
    result = hip().hipMemsetAsync(address, byte, n_bytes, here.stream)
    check(result, f"hipMemsetAsync of {n_bytes} bytes on device {here.device}")
