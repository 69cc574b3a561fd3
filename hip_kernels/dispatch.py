"""Which operators run by kernels: a device, the kernels that fit a model's shapes, and weights as those read them.

Inside `Place.work` the operators of the other files, called with the same arguments as on the host, run by kernels, or
by their torch reference on the same device where no kernel fits or the reference was asked for. A weight is prepared
once for whichever of the two will read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from rocline.hip_kernels.attention_hip import MOST_SLOTS
from rocline.hip_kernels.binding import use_kernels
from rocline.hip_kernels.device_memory import COUNTERS, Lend, use_memory
from rocline.hip_kernels.device_ops import KERNELS, PARTS
from rocline.hip_kernels.driver import Device, Event, fill_async
from rocline.hip_kernels.prepare import PREPARE
from rocline.hip_kernels.router_hip import MOST_CHOSEN, MOST_EXPERTS
from rocline.hip_kernels.sampling_hip import MOST_VOCAB
from rocline.hip_kernels.staging import Staging
from rocline.hip_kernels.uploader import Source, Stored, Uploader


class DispatchError(ValueError):
    """An operator was named that has no kernel whose place its reference could take."""


@dataclass(frozen=True)
class Shapes:
    """Of a model, as far as a kernel may not fit them."""

    hidden: int
    n_streams: int
    n_heads: int
    head_dim: int
    rope_dim: int
    list_slots: int
    n_experts: int
    n_chosen: int
    vocab: int
    index_heads: int
    index_head_dim: int
    candidate_block: int


_INDEX = ("index_key", "index_prepare", "index_query", "index_select", "index_select_among")
_MHC = ("mhc_collapse_norm", "mhc_enter", "mhc_merge", "mhc_merge_enter")
# Operators, whether their kernels fit, and what those want.
_FITS: tuple[tuple[tuple[str, ...], Callable[[Shapes], bool], str], ...] = (
    (
        _INDEX,
        lambda s: (s.index_head_dim, s.rope_dim, s.candidate_block) == (128, 64, 8) and s.index_heads <= 64,
        "128 index channels of which 64 rotate, blocks of 8, at most 64 heads",
    ),
    (
        ("attention",),
        lambda s: (
            (s.n_heads <= 16 or (s.n_heads % 16 == 0 and s.n_heads <= 64))
            and s.head_dim % (64 * -(-s.n_heads // 16)) == 0
            and s.list_slots <= MOST_SLOTS
        ),
        f"at most 16 heads or 32, 48 or 64, 64 channels a head for each 16, and lists up to {MOST_SLOTS}",
    ),
    (
        ("window_row", "pool_pairs", "compressed_row"),
        lambda s: s.head_dim in (64, 128, 256, 512),
        "64, 128, 256 or 512 channels a row",
    ),
    (_MHC, lambda s: s.n_streams == 4 and s.hidden % 16 == 0, "4 streams of a multiple of 16 channels"),
    (("engram_gate",), lambda s: s.n_streams == 4 and s.hidden % 8 == 0, "4 streams of a multiple of 8 channels"),
    (("embedding", "rows_finite"), lambda s: s.hidden % 8 == 0, "a multiple of 8 channels"),
    (("rope",), lambda s: s.head_dim % 8 == 0 and s.rope_dim % 8 == 0, "multiples of 8 channels"),
    (
        ("router",),
        lambda s: s.n_experts <= MOST_EXPERTS and s.n_chosen <= MOST_CHOSEN,
        f"{MOST_CHOSEN} of {MOST_EXPERTS} experts at most",
    ),
    (("sample",), lambda s: s.vocab <= MOST_VOCAB, f"at most {MOST_VOCAB} tokens"),
)


class Choice:
    """Which operators of a model run by kernels, and weights as those read them.

    references  operators that run their torch reference, and why
    kernels     functions of the others, by name

    Raises DispatchError for a name in reference_ops that stands for no kernel.
    """

    torch_device: torch.device

    def __init__(self, shapes: Shapes, reference_ops: Collection[str] = ()) -> None:
        for name in reference_ops:
            if name not in KERNELS:
                near = get_close_matches(name, KERNELS, n=1)
                meant = f"; did you mean {near[0]}?" if near else ";"
                raise DispatchError(f"reference operator {name!r}{meant} there are {', '.join(KERNELS)}")
        self.references = {
            name: f"its kernel wants {wanted}" for names, fits, wanted in _FITS if not fits(shapes) for name in names
        } | dict.fromkeys(reference_ops, "as asked for")
        self.kernels: Mapping[str, Callable[..., None]] = {
            name: kernel
            for name, kernel in KERNELS.items()
            if self.references.keys().isdisjoint((name, *PARTS.get(name, ())))
        }

    def has(self, name: str) -> bool:
        """Whether the operator runs by a kernel."""
        return name in self.kernels

    def put(self, source: Source) -> Tensor:
        """A tensor on the device for good, at load."""
        tensor = source.load() if isinstance(source, Stored) else source
        return tensor.to(self.torch_device).contiguous()

    def each(self, parts: Iterable[Sequence[Source]]) -> Iterator[Sequence[Tensor]]:
        """Tensors of each part on the device, for what is queued before the next part is asked for; at load."""
        for sources in parts:
            yield [self.put(source) for source in sources]

    def prepare(self, op: str, *weights: Any) -> Any:
        """Weights on the device, as the operator reads them there; at load, on the stream. Numbers pass as they are.

        Raises BindError for a weight that its kernel cannot take.
        """
        if op in self.kernels:
            return PREPARE[op](self, *weights)
        placed = [self.placed(weight) for weight in weights]
        return placed[0] if op != "experts" else tuple(placed)

    def placed(self, weight: Any) -> Any:
        """A tensor, or a tuple of what may be placed, as by put; numbers as they are."""
        if isinstance(weight, Source):
            return self.put(weight)
        if isinstance(weight, tuple):
            parts = [self.placed(part) for part in weight]
            return type(weight)(*parts) if hasattr(weight, "_fields") else tuple(parts)
        return weight


class Place(Choice):
    """A device as one thread works on it: its stream, and its choice of operators.

    Raises what Choice does, and HipError where HIP cannot be used.
    """

    def __init__(self, device: Device, shapes: Shapes, reference_ops: Collection[str] = ()) -> None:
        super().__init__(shapes, reference_ops)
        self.device, self.torch_device = device, device.torch_device
        self.stream = device.stream()
        with self.stream:  # its events are of the stream's device
            self._staging = Staging()
        self._counters = device.allocate(4 * COUNTERS)
        with self.stream:
            fill_async(self._counters.address, 0, 4 * COUNTERS)
        self._counters_i32 = self._counters.tensor().view(torch.int32)
        self._uploader: Uploader | None = None

    def __str__(self) -> str:
        lines = [f"{self.device}: {len(KERNELS) - len(self.references)} operators by kernels"]
        lines += [f"  torch reference of {name}: {why}" for name, why in sorted(self.references.items())]
        return "\n".join(lines)

    @contextmanager
    def work(self, lend: Lend) -> Iterator[None]:
        """Meanwhile this thread's operators run here, on the stream; lend(shape, dtype) gives them workspaces."""
        with self.stream, use_kernels(self.kernels), use_memory(lend, self._staging, self._counters_i32):
            yield

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Meanwhile weights that are not on the device come through pinned memory, on another stream. Within work."""
        with Uploader(self.device, self._staging) as self._uploader:
            try:
                yield
            finally:
                self._uploader = None

    def put(self, source: Source) -> Tensor:
        return self._uploader.put(source) if self._uploader else super().put(source)

    def each(self, parts: Iterable[Sequence[Source]]) -> Iterator[Sequence[Tensor]]:
        return self._uploader.each(parts) if self._uploader else super().each(parts)

    def record_completion(self, stream: Hashable) -> Callable[[], bool]:
        """Whether what is on the stream now has been done, to be asked later; as the arena wants it."""
        with self.stream:
            return Event().record().done

    def close(self) -> None:
        """Wait for the stream and free what it worked with. No call may follow."""
        with self.stream:
            self._staging.close()
        self._counters.free()
