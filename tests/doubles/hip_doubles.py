"""Builds the HIP doubles: folders that ROCM_PATH may name in place of a ROCm installation.

The product finds its HIP library as on any machine, through hip-python and ROCM_PATH, and cannot tell.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

SOURCES = Path(__file__).resolve().parent
FLAGS = ["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"]


def build_cpu_double(cache: Path) -> Path:
    """A ROCM_PATH whose HIP runs kernels on the CPU behind cpu_shim.h, and whose hiprtc calls g++."""
    shim = SOURCES / "cpu_shim.h"
    return _build(cache, "cpu", ["-pthread", "-ldl"], defines=[f'-DSHIM_HEADER="{shim}"'])


def build_cuda_double(cache: Path, cuda: Path) -> Path:
    """A ROCM_PATH whose HIP is the CUDA driver and whose hiprtc is the NVRTC of the CUDA installation `cuda`."""
    libraries = cuda / "lib64"
    links = [f"-I{cuda / 'include'}", f"-L{libraries}", f"-L{libraries / 'stubs'}", "-lcuda", "-lnvrtc"]
    return _build(cache, "cuda", [*links, f"-Wl,-rpath,{libraries}"])


class CpuDouble:
    """What a test may do to the CPU double that this process runs on."""

    HOST = -1  # in place of a device: the host's memory

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(Path(os.environ["ROCM_PATH"]) / "lib" / "libamdhip64.so"))

    @contextmanager
    def fault(self, source: int, target: int, kind: Literal["corrupt", "refuse"]) -> Iterator[None]:
        """Meanwhile copies from device `source` to device `target` change one bit, or fail."""
        self._library.double_fault(source, target, {"corrupt": 1, "refuse": 2}[kind])
        try:
            yield
        finally:
            self._library.double_fault(source, target, 0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile copies, fills and events wait on their streams, until let_go or a call that waits for them."""
        self._library.double_hold()
        try:
            yield
        finally:
            self.let_go()

    def let_go(self, newest_first: bool = False) -> None:
        """Run what waits, at each moment a task of the oldest stream, or the newest, that may go on."""
        self._library.double_let_go(newest_first)


def _build(cache: Path, kind: str, links: Sequence[str], defines: Sequence[str] = ()) -> Path:
    digest = _digest([kind, *links, *defines], [*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])
    root = cache / f"{kind}-{digest[:16]}"
    # Only of what compiled kernels depend on: they need not be made again for a change of the runtime's own.
    version = _digest([kind], [SOURCES / "cpu_shim.h", SOURCES / f"libhiprtc_{kind}.cpp"])
    flags = [*FLAGS, *defines, f"-DRUNTIME_VERSION=0x{version[:7]}"]
    (root / "lib").mkdir(parents=True, exist_ok=True)
    for library in ("libamdhip64", "libhiprtc"):
        target = root / "lib" / f"{library}.so"
        if target.exists():
            continue
        with tempfile.TemporaryDirectory(dir=root) as folder:  # renamed when whole: test processes build side by side
            built = Path(folder) / target.name
            command = ["g++", *flags, str(SOURCES / f"{library}_{kind}.cpp"), "-o", str(built), *links]
            subprocess.run(command, check=True)
            os.replace(built, target)
    return root


def _digest(words: Sequence[str], sources: Sequence[Path]) -> str:
    """Changes with the words, the sources, the compiler and the processor."""
    macros = subprocess.run(
        ["g++", "-march=native", "-dM", "-E", "-x", "c++", os.devnull], check=True, capture_output=True
    ).stdout
    parts = [repr(words).encode(), macros]
    parts += [path.read_bytes() for path in sorted(sources)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
