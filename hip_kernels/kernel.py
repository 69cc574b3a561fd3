"""Launching kernels: what a binding declares, and the one way from tensors to the GPU."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rocline.hip_kernels.binding import is_shapes_only
from rocline.hip_kernels.compile import CACHE, SOURCES, Compiler, Request
from rocline.hip_kernels.driver import devices, here, refuse_in_capture
from rocline.hip_kernels.runtime import HipError, check, hip, torch_sees_gpus

LDS_BYTES = 65536  # of a gfx1100 workgroup
Argument = Tensor | int | float | None


class Kernel:
    """One entry point of a .hip file, compiled with its #defines at the first launch on a device.

    source     file name in hip_kernels/, or a path
    name       of the entry point
    arguments  one letter each, in order: P pointer, i int32, q int64, f float32
    threads    a workgroup, as the source's RL_KERNEL says
    defines    the compile-time dimensions
    lds_bytes  the most dynamic LDS that a launch asks for; the budget in the source holds for it
    """

    def __init__(
        self,
        source: str | Path,
        name: str,
        arguments: str,
        *,
        threads: int,
        defines: Mapping[str, int] | None = None,
        lds_bytes: int = 0,
    ) -> None:
        if unknown := set(arguments) - set("Piqf"):
            raise ValueError(f"kernel {name}: unknown argument letters {sorted(unknown)}, want P, i, q or f")
        if lds_bytes > LDS_BYTES:
            raise ValueError(f"kernel {name}: {lds_bytes} bytes of LDS, a workgroup has {LDS_BYTES}")
        self.source = SOURCES / source
        self.name, self.arguments, self.threads, self.lds_bytes = name, arguments, threads, lds_bytes
        self.defines = tuple(sorted((defines or {}).items()))
        self._struct = struct.Struct("@" + arguments)
        self._functions: dict[int, Any] = {}  # by device
        self._packed = threading.local()

    def __repr__(self) -> str:
        return f"Kernel({self.name} of {self.source.name}, {dict(self.defines)})"

    def request(self, arch: str) -> Request:
        """What the compiler is asked for."""
        return Request(self.source, self.defines, arch)

    def function_on(self, device: int) -> Any:
        """The loaded entry point, loading it if this is the first use there. Raises HipError, CompileError."""
        function = self._functions.get(device)
        if function is None:
            refuse_in_capture(f"loading {self}")
            gpu = devices()[device]
            code = compiler().code_object(self.request(gpu.arch))
            with gpu.current():
                module = check(hip().hipModuleLoadData(code), f"hipModuleLoadData of {self} on {gpu}")
                function = check(
                    hip().hipModuleGetFunction(module, self.name.encode()),
                    f"hipModuleGetFunction of {self}: has {self.source.name} an entry point of that name?",
                )
            function = self._functions.setdefault(device, function)  # modules live as long as the process
        return function

    def pack(self, values: Sequence[int | float]) -> int:
        """Address of a void*[] of the arguments, valid until this thread's next pack of this kernel.

        HIP copies arguments when it launches, so one buffer a thread serves every launch; with the pointers
        made once, packing is a single struct call.
        """
        try:
            buffer, pointers = self._packed.buffer, self._packed.pointers
        except AttributeError:
            buffer = self._packed.buffer = ctypes.create_string_buffer(max(1, self._struct.size))
            ends = [struct.calcsize("@" + self.arguments[: i + 1]) for i in range(len(self.arguments))]
            starts = [end - struct.calcsize(letter) for end, letter in zip(ends, self.arguments, strict=True)]
            base = ctypes.addressof(buffer)
            pointers = self._packed.pointers = (ctypes.c_void_p * max(1, len(starts)))(*(base + s for s in starts))
            self._packed.address = ctypes.addressof(pointers)
        self._struct.pack_into(buffer, 0, *values)
        address: int = self._packed.address
        return address


_compiler = Compiler(CACHE)
_all_counts: list[dict[tuple[str, str], int]] = []  # one a thread, so that counting needs no lock


class _Tally(threading.local):
    """What this thread has launched: per kernel name and layer kind; seen: what it would have, within shapes_only."""

    def __init__(self) -> None:
        self.layer_kind = ""
        self.seen: dict[Kernel, None] = {}
        self.counts: dict[tuple[str, str], int] = {}
        _all_counts.append(self.counts)


_tally = _Tally()


def use_cache(folder: Path) -> Compiler:
    """Keep compiled kernels in this folder. For entry points, before the first launch."""
    global _compiler
    _compiler = Compiler(folder)
    return _compiler


def compiler() -> Compiler:
    """The process's compiler; ~/.cache/rocline keeps its code objects where nobody chose a folder."""
    return _compiler


def prepare(kernels: Iterable[Kernel], progress: Callable[[int, int, str], None] | None = None) -> None:
    """Compile and load kernels on every device, so that no launch has to; see Compiler.prepare for progress. Within
    shapes_only nobody launches any."""
    if is_shapes_only():
        return
    kernels = list(kernels)
    archs = dict.fromkeys(device.arch for device in devices())
    compiler().prepare((kernel.request(arch) for kernel in kernels for arch in archs), progress)
    for device in devices():
        for kernel in kernels:
            kernel.function_on(device.index)


def launch(kernel: Kernel, *, grid: tuple[int, int], args: Sequence[Argument], lds_bytes: int = 0) -> None:
    """Run kernel on the current stream over grid (x, y) workgroups, neither 0.

    args       contiguous tensors (None is a null pointer), ints and floats, as kernel.arguments says
    lds_bytes  dynamic LDS of a workgroup, at most kernel.lds_bytes

    Raises HipError with the kernel's name and what it was given.
    """
    if lds_bytes > kernel.lds_bytes:
        raise _launch_error(kernel, grid, args, lds_bytes, f"its budget allows {kernel.lds_bytes} bytes of LDS")
    if is_shapes_only():
        _tally.seen[kernel] = None
        return
    function = kernel.function_on(here.device)
    try:
        packed = kernel.pack(_values_of(kernel, args))
    except (struct.error, _BadArgument) as error:
        raise _launch_error(kernel, grid, args, lds_bytes, f"want {kernel.arguments}: {error}") from error
    status = hip().hipModuleLaunchKernel(
        function, grid[0], grid[1], 1, kernel.threads, 1, 1, lds_bytes, here.stream, packed, None
    )[0]
    if status != 0:
        raise _launch_error(kernel, grid, args, lds_bytes, f"{status.name} ({int(status)})", status.name)
    counts, key = _tally.counts, (kernel.name, _tally.layer_kind)
    counts[key] = counts.get(key, 0) + 1


class _BadArgument(Exception):
    pass


def _values_of(kernel: Kernel, args: Sequence[Argument]) -> list[Any]:
    """What is packed: of a tensor its address, since nothing else reaches the kernel.

    Strides would be lost, and an address of another device or of the host can hang the card. By letter, not by
    isinstance: asking whether an int is a Tensor takes longer than all the rest.
    """
    placed, device = torch_sees_gpus(), here.device
    values = list(args)
    for position, letter in enumerate(kernel.arguments[: len(values)]):
        if letter != "P":
            continue
        tensor = values[position]
        if tensor is None:
            values[position] = 0
        elif not isinstance(tensor, Tensor):
            raise _BadArgument(f"argument {position} is {tensor!r}, not a tensor")
        elif not tensor.is_contiguous():
            raise _BadArgument(f"argument {position} is not contiguous: strides {tensor.stride()}")
        elif placed and tensor.get_device() != device:
            raise _BadArgument(f"argument {position} is on {tensor.device}, the current stream on device {device}")
        else:
            values[position] = tensor.data_ptr()
    return values


def _launch_error(
    kernel: Kernel, grid: tuple[int, int], args: Sequence[Argument], lds_bytes: int, reason: str, name: str = ""
) -> HipError:
    given = ", ".join(
        f"{str(a.dtype).removeprefix('torch.')} {list(a.shape)}" if isinstance(a, Tensor) else str(a) for a in args
    )
    return HipError(
        f"{kernel.name} on device {here.device}: {reason}; grid {grid} of {kernel.threads} threads, "
        f"{lds_bytes} bytes of LDS, {dict(kernel.defines)}, arguments ({given})",
        name,
    )


@contextmanager
def layer_kind(label: str) -> Iterator[None]:
    """Count this thread's launches under this label meanwhile."""
    before, _tally.layer_kind = _tally.layer_kind, label
    try:
        yield
    finally:
        _tally.layer_kind = before


@contextmanager
def seen() -> Iterator[Collection[Kernel]]:
    """The kernels that this thread would launch meanwhile, were it not within shapes_only: those to prepare."""
    before, _tally.seen = _tally.seen, {}
    try:
        yield _tally.seen
    finally:
        _tally.seen = before


@contextmanager
def count_apart() -> Iterator[dict[tuple[str, str], int]]:
    """Meanwhile this thread's launches are counted in what is yielded, not among all."""
    before, _tally.counts = _tally.counts, {}
    try:
        yield _tally.counts
    finally:
        _tally.counts = before


def count(launches: Mapping[tuple[str, str], int]) -> None:
    """Count launches that this thread did not make one by one."""
    for key, n in launches.items():
        _tally.counts[key] = _tally.counts.get(key, 0) + n


def launch_counts() -> Counter[tuple[str, str]]:
    """Launches so far, of all threads: {(kernel name, layer kind): n}."""
    return sum((Counter(counts) for counts in list(_all_counts)), Counter())
