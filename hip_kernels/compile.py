"""Kernels are compiled where they run, at first use, by hiprtc; what it made is kept on disk for the next start."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rocline.hip_kernels.runtime import HipError, check, hip, hiprtc

SOURCES = Path(__file__).resolve().parent
CACHE = Path.home() / ".cache" / "rocline"  # where nobody chose another folder
# Contraction is off in every .hip by port.hip.h too; whoever compiles without that header still rounds twice.
OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off")

_log = logging.getLogger(__name__)
_MAGIC = b"rocline code object 1\n"
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


class CompileError(HipError):
    """A kernel source did not compile; the message carries the compiler's log."""


@dataclass(frozen=True)
class Request:
    """What to compile: a source with #defines for one architecture."""

    source: Path
    defines: tuple[tuple[str, int], ...]
    arch: str

    def __str__(self) -> str:
        return " ".join([self.source.name, *(f"{name}={value}" for name, value in self.defines), self.arch])


def texts_of(source: Path) -> dict[str, bytes]:
    """The source and all it includes by "name", in order of first mention; names are searched beside the
    source, then here. Raises CompileError for a name found in neither."""
    texts: dict[str, bytes] = {}
    pending = [source.name]
    while pending:
        name = pending.pop(0)
        if name in texts:
            continue
        found = next((folder / name for folder in (source.parent, SOURCES) if (folder / name).is_file()), None)
        if found is None:
            raise CompileError(f"{source.name}: {name} is neither in {source.parent} nor in {SOURCES}")
        texts[name] = found.read_bytes()
        pending += [match.decode() for match in _INCLUDE.findall(texts[name])]
    return texts


class Compiler:
    """Code objects by request, from a folder of earlier ones where they are there. Safe to use from many threads.

    n_compiled  compilations so far
    n_late      those after seal(), which a server's readiness promises will be 0
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.n_compiled = 0
        self.n_late = 0
        self._sealed = False
        self._lock = threading.Lock()
        self._locks: defaultdict[bytes, threading.Lock] = defaultdict(threading.Lock)

    def code_object(self, request: Request) -> bytes:
        """The machine code. Compiles at most once per process and key. Raises CompileError."""
        texts = texts_of(request.source)
        key = _key(request, texts)
        with self._lock:
            lock = self._locks[key]
        with lock:
            path = self.folder / f"{request.source.stem}-{request.arch}-{key.hex()[:32]}"
            code = _read_entry(path, key)
            if code is None:
                code = self._compile(request, texts)
                self._store(path, key, code)
            return code

    def prepare(self, requests: Iterable[Request], progress: Callable[[int, int, str], None] | None = None) -> None:
        """Have all code objects on disk, compiling what is missing on every core.

        progress(n_done, n_all, what) is called in this thread as each is finished. Raises the first CompileError.
        """
        wanted = list(dict.fromkeys(requests))
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # hiprtc runs outside the interpreter's lock
            running = {pool.submit(self.code_object, request): request for request in wanted}
            try:
                for n_done, future in enumerate(as_completed(running), start=1):
                    future.result()
                    if progress:
                        progress(n_done, len(wanted), str(running[future]))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def seal(self) -> None:
        """From now on compiling is late: still done, but counted and logged."""
        self._sealed = True

    def _compile(self, request: Request, texts: Mapping[str, bytes]) -> bytes:
        with self._lock:
            self.n_compiled += 1
            self.n_late += self._sealed
        if self._sealed:
            _log.warning("compiling %s after the start: it was not among the prepared kernels", request)
        return compile_text(request, texts)

    def _store(self, path: Path, key: bytes, code: bytes) -> None:
        """Whole or not at all: readers and other writers of the same entry see no half-written one."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_MAGIC + _seal_of(key, code) + code)
                os.replace(name, path)
            except BaseException:
                Path(name).unlink()
                raise
        except OSError as error:  # a full or read-only disk costs the next start time, not this one
            _log.warning("cannot keep compiled %s: %s", path, error)


def compile_text(request: Request, texts: Mapping[str, bytes]) -> bytes:
    """Run hiprtc on the first of `texts`, the others being its headers. Raises CompileError with the log."""
    compiler = hiprtc()
    options = [f"--offload-arch={request.arch}", *OPTIONS, *(f"-D{name}={value}" for name, value in request.defines)]
    (name, text), *headers = texts.items()
    program = check(
        compiler.hiprtcCreateProgram(
            text, name.encode(), len(headers), [text for _, text in headers], [name.encode() for name, _ in headers]
        ),
        f"hiprtcCreateProgram of {request}",
    )
    try:
        status = compiler.hiprtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
        if status != 0:
            raise CompileError(f"{request} does not compile ({status.name}):\n{_log_of(compiler, program)}")
        code = bytearray(check(compiler.hiprtcGetCodeSize(program), "hiprtcGetCodeSize"))
        check(compiler.hiprtcGetCode(program, code), "hiprtcGetCode")
        return bytes(code)
    finally:
        compiler.hiprtcDestroyProgram(program.createRef())


def _log_of(compiler: Any, program: Any) -> str:
    log = bytearray(max(1, check(compiler.hiprtcGetProgramLogSize(program), "hiprtcGetProgramLogSize")))
    check(compiler.hiprtcGetProgramLog(program, log), "hiprtcGetProgramLog")
    return log.rstrip(b"\0\n").decode(errors="replace")


@cache
def compiler_version() -> str:
    """Of hiprtc and of the runtime it came with: the compiler's own number misses patch levels."""
    major, minor = check(hiprtc().hiprtcVersion(), "hiprtcVersion")
    return f"{major}.{minor}-{check(hip().hipRuntimeGetVersion(), 'hipRuntimeGetVersion')}"


def _key(request: Request, texts: Mapping[str, bytes]) -> bytes:
    """All that the machine code depends on."""
    facts = (compiler_version(), OPTIONS, request.arch, request.defines, tuple(texts.items()))
    return hashlib.sha256(repr(facts).encode()).digest()


def _seal_of(key: bytes, code: bytes) -> bytes:
    return hashlib.sha256(key + code).digest()


def _read_entry(path: Path, key: bytes) -> bytes | None:
    """The code of an entry that is whole and was written for this key."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + hashlib.sha256().digest_size
    code = entry[start:]
    return code if entry[:start] == _MAGIC + _seal_of(key, code) else None
