"""The HIP runtime of this process, through hip-python: loaded on first use, checked once, errors as exceptions."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch  # before hip-python: a ROCm build of torch brings the HIP runtime that both must share


class HipError(RuntimeError):
    """A HIP call failed or HIP cannot be used; the message says which, the values, and what to do.

    name is HIP's word for the status, such as "hipErrorOutOfMemory"; empty where there is none.
    """

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


@cache
def hip() -> Any:
    """hip-python's module of the HIP runtime. Raises HipError where there is no library, no GPU, or two runtimes."""
    try:
        from hip import hip as module
    except ImportError as error:
        raise HipError(
            f"HIP: hip-python is not installed ({error}); install the release that goes with this ROCm "
            "(tools/bootstrap.py knows it), or use the CPU"
        ) from error
    try:
        status, n_devices = module.hipGetDeviceCount()
    except RuntimeError as error:  # hip-python opens the library on the first call
        why = re.sub(r"b'([^']*)'", r"\1", str(error))  # it names the file as a bytes object
        raise HipError(
            f"HIP: no runtime library ({why}); install ROCm, or name its folder in ROCM_PATH, or use the CPU"
        ) from error
    if status != 0 or n_devices == 0:
        raise HipError(
            f"HIP: the runtime sees no GPU ({status.name}); check rocminfo and the permissions of /dev/kfd, "
            "or use the CPU",
            status.name,
        )
    check_one_runtime(Path("/proc/self/maps").read_text())
    return module


@cache
def hiprtc() -> Any:
    """hip-python's module of the run-time compiler. Raises HipError where HIP cannot be used."""
    hip()
    from hip import hiprtc as module

    return module


@cache
def torch_sees_gpus() -> bool:
    """Whether torch is a GPU build with GPUs; its word for them is "cuda", ROCm's too."""
    return torch.cuda.is_available()


def check_one_runtime(maps: str) -> None:
    """Raise HipError unless exactly one libamdhip64 is mapped, `maps` being the text of /proc/self/maps.

    torch's ROCm wheel may carry its own. Two runtimes share nothing: a pointer, stream or event of one means
    nothing, or something else, to the other.
    """
    found = {}
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)  # addresses, permissions, offset, device, inode, path
        if len(fields) == 6 and Path(fields[5]).name.startswith("libamdhip64.so"):
            found[fields[3], fields[4]] = fields[5]
    if len(found) != 1:
        listed = ", ".join(sorted(found.values())) or "none"
        raise HipError(
            f"HIP: want exactly one libamdhip64 in this process, found {len(found)} ({listed}); point ROCM_PATH at "
            "the ROCm whose lib folder torch loads, or install the torch wheel made for that ROCm"
        )


def check(result: tuple[Any, ...], doing: str, *details: object) -> Any:
    """What a hip-python call returned, without its status: one value, a tuple of several, or None.

    Raises HipError with `doing % details`, for example "hipMalloc of 4096 bytes on device 3"; what is called for every
    step gives details apart, for writing them takes longer than most calls.
    """
    status = result[0]
    if status != 0:
        raise HipError(f"{doing % details if details else doing}: {status.name} ({int(status)})", status.name)
    return result[1] if len(result) == 2 else result[1:] or None
