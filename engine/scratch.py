"""Where a stage's temporaries come from: tensors over spans of its arena's slab, without copies (design.md section 8).

A thread uses one memory at a time, as it uses one device and one stream. Outside a stage's run the functions
below give plain host tensors.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from types import TracebackType

import torch
from torch import Tensor

from rocline.arena.arena import Arena
from rocline.arena.completions import LatestWork, RecordCompletion
from rocline.arena.room import Room
from rocline.arena.scope import leaked_since
from rocline.arena.spans import ArenaFull, Span, TakenIn
from rocline.engine.rehearsal import Key, Request, Run, Script, n_bytes_of
from rocline.hip_kernels.device_memory import put as put_on_device
from rocline.hip_kernels.device_memory import upload as upload_to_device
from rocline.hip_kernels.device_memory import upload_pinned as upload_pinned_to_device
from rocline.hip_kernels.dispatch import Place
from rocline.hip_kernels.paper import PaperPlace
from rocline.hip_kernels.staging import fetch as fetch_from_device

POISON_BYTE = 0xFF  # NaN in every float and scale format; no valid index or code count
# A chunk asks for the same tensors as the one before, mostly at the same places: looking one up takes a tenth of
# the time of making it. Two holders of one view are no worse off than two views of the same bytes.
MAX_VIEWS = 4096
MIN_ROOM = 3  # tensors; opening and closing a room for fewer costs more than it saves
LARGE_PART = 4  # of the slab; tensors above find their own places
MAX_SCRIPTS = 1024  # scopes by their place and first request; a server meets a few chunk sizes


class Lease:
    """Tensors that outlive the scopes they were made in. Whoever holds the lease releases it, once."""

    def __init__(self, memory: StageMemory, spans: Iterable[Span]) -> None:
        self._memory = memory
        self._spans = list(spans)

    def release(self) -> None:
        """Give the memory back: the tensors must not be read any more."""
        self._memory.give_back(self._spans)
        self._spans = []


class _Frame:
    """An open scope: what it has lent by offset, and its runs by script."""

    __slots__ = ("_first", "_first_taken", "_memory", "_name", "_run", "kept", "learning", "lent", "n_inner")

    def __init__(self, memory: StageMemory) -> None:
        self._memory = memory
        self.lent: dict[int, Span] = {}
        self.kept: dict[int, Span] = {}  # of a scope inside
        self.n_inner = 0  # scopes inside so far
        self.learning = True  # until a scope inside, or a tensor freed: what comes later may lie in its place
        self._run = Run()

    def __enter__(self) -> None:
        memory = self._memory
        frames = memory.frames
        if frames:
            frames[-1].stop_learning()
            self._name = (len(frames), frames[-1].n_inner)
            frames[-1].n_inner += 1
        else:
            self._name = (0, 0)
        self._first, self._first_taken = memory.arena.n_takes, memory.n_taken
        memory.room = None
        frames.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        memory = self._memory
        memory.frames.pop()
        memory.room = None
        run = self._run
        # Too few to write a script of are not written down each time.
        if kind is None and (run.script is not None or len(run.asked) >= MIN_ROOM) and run.asked_anew():
            memory.remember(self._name, run.written_down(lambda span: self.lent.get(span.offset) is span))
        if run.room is not None:
            memory.poison(run.room.ranges())
            memory.n_taken += memory.arena.close_room(run.room)
        # Newest first: the next scope finds what it takes first on top of the reuse layer.
        if self.lent:
            memory.give_back(reversed(self.lent.values()))
        if self.kept:
            memory.give_back(self.kept.values())
        if memory.arena.n_takes - self._first > memory.n_taken - self._first_taken:
            leaked_since(memory.arena, self._first)  # somebody took past this memory

    def request(self, shape: tuple[int, ...], key: Key) -> Tensor:
        """What is not simply the next tensor of the scope's room."""
        memory = self._memory
        _, dtype, code, instruction = key
        n_bytes = n_bytes_of(shape, dtype)
        if not n_bytes:
            return memory.empty(shape, dtype)
        run, known = self._run, not self.learning
        if self.learning:
            if run.script is None and not run.asked:
                self._begin(key)
            if run.room is not None and run.script is not None and (index := run.script.find(run.room, key)) >= 0:
                known, run.room.at = True, index + 1
                if (tensor := run.room.items[index][1]) is not None:
                    return tensor
        n_gone = run.room.at if run.room is not None else 0
        span = self.take(n_bytes, code.co_name, (code, instruction))
        if self.learning and not known:
            run.asked.append((n_gone, key, span))
        return memory.view(span.offset, shape, dtype)

    def take(self, n_bytes: int, label: str, taken_in: TakenIn) -> Span:
        """A span of its own. A room gives up what it has not handed out before there is no room for it."""
        arena, room = self._memory.arena, self._run.room
        can_shrink = room is not None and room.at < room.end
        try:
            span = arena.take(n_bytes, label=label, taken_in=taken_in, patient=not can_shrink)
        except ArenaFull:
            if not can_shrink:
                raise
            assert room is not None
            arena.shrink_room(room)
            span = arena.take(n_bytes, label=label, taken_in=taken_in)
        self.lent[span.offset] = span
        self._memory.n_taken += 1
        self._memory.poison([(span.offset, span.size_bytes)])
        return span

    def hand_on(self, offset: int) -> Span | None:
        """Take the span at offset out of the scope."""
        span = self.lent.pop(offset, None)
        if span is None:
            room = self._run.room
            if room is not None and (index := room.lent_at(offset)) is not None:
                span = self._memory.arena.hand_over(room, index)
                self._memory.n_taken += 1
        if span is None:
            return self.kept.pop(offset, None)
        span.lasting = True
        return span

    def stop_learning(self) -> None:
        """Serve what is asked for from now on as it comes."""
        if self.learning and self._run.room is not None:
            self._memory.arena.shrink_room(self._run.room)
        self.learning = False
        self._memory.room = None

    def _begin(self, key: Key) -> None:
        """Begin by the script of this first request, if there is one, and a room to be had."""
        run, memory = self._run, self._memory
        script = memory.scripts.get((self._name, key))
        if script is None:
            return
        room = memory.arena.open_room(script.plan, 0)
        if room is None:
            self.learning = False
            return
        run.script, run.room, memory.room = script, room, room
        room.items = script.items(room.offset, memory.view)
        memory.poison(room.ranges())


class StageMemory:
    """One slab and the tensors lent from it; used by one stage's thread.

    arena_bytes        size of the slab. Host pages are committed when first written
    slab_u8            [>= arena_bytes] where the slab lies, on any device; host memory is taken when there is none
    record_completion  as in Arena: when the work queued on the device so far has finished. Called when another
                       stream, or a reader of statistics, asks for it. None on the host
    poison             fill tensors with POISON_BYTE when they are lent and given back, so that reading what was
                       not written, or is no longer there, shows (tests)
    place              the device that the slab is of, made current where this memory is used; None on the host
    """

    def __init__(
        self,
        arena_bytes: int,
        *,
        slab_u8: Tensor | None = None,
        record_completion: RecordCompletion | None = None,
        name: str = "arena",
        poison: bool = False,
        place: Place | PaperPlace | None = None,
    ) -> None:
        self.place = place
        self.arena = Arena(arena_bytes, record_completion and LatestWork(record_completion), name=name)
        self.arena.device_allocs = 1
        if slab_u8 is None:
            slab_u8 = torch.empty(self.arena.slab_bytes, dtype=torch.uint8)
        if len(slab_u8) < self.arena.slab_bytes:
            raise ValueError(f"{name}: slab_u8 has {len(slab_u8)} bytes, want at least {self.arena.slab_bytes}")
        self._slab_u8 = slab_u8[: self.arena.slab_bytes]
        self._first_byte = slab_u8.data_ptr()
        typed = {dtype: self._slab_u8.view(dtype) for dtype in _DTYPES}
        self.view = lru_cache(MAX_VIEWS)(partial(_view, typed))
        self._poison = poison
        self.frames: list[_Frame] = []
        self.n_taken = 0  # of the arena's takes: by this memory
        self.room: Room | None = None  # of the innermost scope, while that runs by its script
        self.scripts: dict[tuple[tuple[int, int], Key], Script] = {}
        self._apart = range(0)  # offsets that set_apart has

    def scope(self) -> _Frame:
        """`with memory.scope():` gives back at the end what was lent inside, also when the body raises, unless it is
        kept or leased."""
        return _Frame(self)

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype, label: str) -> Tensor:
        """A contiguous tensor, not initialised, of the innermost scope. Raises ArenaFull."""
        if 0 in shape:
            return self.empty(shape, dtype)
        caller = sys._getframe(1)
        span = self.frames[-1].take(n_bytes_of(shape, dtype), label, (caller.f_code, caller.f_lasti))
        return self.view(span.offset, shape, dtype)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors of the innermost scope live as long as the one around it."""
        self.frames[-2].kept.update((span.offset, span) for span in self._hand_on(tensors))

    def lease(self, tensors: Iterable[Tensor]) -> Lease:
        """Let tensors of the innermost scope live until the lease is released."""
        return Lease(self, self._hand_on(tensors))

    def free(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors of the innermost scope back before it ends."""
        self.frames[-1].stop_learning()
        self.give_back(self._hand_on(tensors))

    @contextmanager
    def set_apart(self, tensor: Tensor) -> Iterator[None]:
        """Meanwhile views of this tensor are nobody's to keep, lease or free. Of one tensor at a time."""
        offset = tensor.data_ptr() - self._first_byte
        self._apart = range(offset, offset + tensor.nbytes)
        try:
            yield
        finally:
            self._apart = range(0)

    def give_back(self, spans: Iterable[Span]) -> None:
        """Release spans that were handed on."""
        if self._poison:
            spans = list(spans)
            self.poison((span.offset, span.size_bytes) for span in spans)
        self.arena.release_together(spans, 0)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor without elements, on the slab's device."""
        return torch.empty(shape, dtype=dtype, device=self._slab_u8.device)

    def remember(self, name: tuple[int, int], requests: Sequence[Request]) -> None:
        """Write the script of a scope's run; none where a room would serve too few."""
        if sum([request.dies for request in requests]) < MIN_ROOM:
            self.scripts.pop((name, requests[0].key), None)
            return
        if len(self.scripts) == MAX_SCRIPTS:
            self.scripts.clear()
        self.scripts[name, requests[0].key] = Script(requests, self.arena.slab_bytes // LARGE_PART)

    def poison(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fill (offset, size_bytes) in tests, so that what is read there shows."""
        if self._poison:
            for offset, size_bytes in spans:
                self._slab_u8[offset : offset + size_bytes] = POISON_BYTE

    def _hand_on(self, tensors: Iterable[Tensor]) -> list[Span]:
        """Take the spans of `tensors` out of the innermost scope. Tensors from elsewhere have none."""
        frame, out = self.frames[-1], []
        for tensor in tensors:
            offset = tensor.data_ptr() - self._first_byte
            if not 0 <= offset < self.arena.slab_bytes or tensor.numel() == 0 or offset in self._apart:
                continue
            if (span := frame.hand_on(offset)) is None:
                raise RuntimeError(
                    f"{self.arena.name}: a tensor of shape {list(tensor.shape)} at offset {offset:#x} is no whole "
                    "tensor of the innermost scope; hand on the tensor it is a view of, in its own scope"
                )
            out.append(span)
        return out


_DTYPES = (torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8)


class _Thread(threading.local):
    memory: StageMemory | None = None


_thread = _Thread()


class use:
    """`with use(memory):` lends this thread's tensors from `memory`, and runs its operators on the device that this is
    of."""

    __slots__ = ("_before", "_memory", "_work")

    def __init__(self, memory: StageMemory) -> None:
        self._memory = memory
        self._work: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        self._before = _thread.memory
        # Entering a stream again takes longer than a small step has.
        if self._before is not self._memory and self._memory.place:
            self._work = self._memory.place.work(lend)
            self._work.__enter__()
        _thread.memory = self._memory

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _thread.memory = self._before
        if self._work:
            self._work.__exit__(kind, error, trace)


def memory() -> StageMemory:
    """What this thread uses."""
    assert _thread.memory is not None, "outside of scratch.use"
    return _thread.memory


def _view(typed: dict[torch.dtype, Tensor], offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The bytes from offset on as a contiguous tensor; typed holds the whole slab in every dtype."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return typed[dtype].as_strided(shape, strides[::-1], offset // dtype.itemsize)


def _lend(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    memory = _thread.memory
    if memory is None:
        return torch.empty(shape, dtype=dtype)
    caller = sys._getframe(2)
    key = (shape, dtype, caller.f_code, caller.f_lasti)
    room = memory.room
    if room is not None:
        item_key, tensor = room.items[room.at]
        if item_key == key:
            room.at += 1
            return tensor
    return memory.frames[-1].request(shape, key)


def lend(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of this shape and dtype, not initialised."""
    return _lend(shape, dtype)


def upload(tensor: Tensor) -> Tensor:
    """A host tensor where this thread's operators read it: itself on the host, else lent, and on its way there."""
    return upload_to_device([tensor])[0] if is_on_device() else tensor


def upload_pinned(tensor: Tensor) -> Tensor:
    """upload of one in pinned memory, for a thread on a device. It must stay as it is until the copy has been made."""
    return upload_pinned_to_device(tensor)


def upload_together(*tensors: Tensor) -> Sequence[Tensor]:
    """upload for several small ones, on their way in one piece."""
    return upload_to_device(tensors) if is_on_device() else tensors


def put(tensor: Tensor, into: Tensor) -> None:
    """Copy a host tensor to one of the device's that this thread works on. Nobody waits."""
    put_on_device(tensor, into)


def fetch(tensor: Tensor) -> Tensor:
    """What an operator wrote, for the host: itself there, else a copy. **Waits for the device.**"""
    return fetch_from_device(tensor) if is_on_device() else tensor


def is_on_device() -> bool:
    """Whether this thread's tensors are a GPU's."""
    memory = _thread.memory
    return memory is not None and memory.place is not None


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
