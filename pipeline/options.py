"""What an engine is opened with: defaults of design.md section 8, each checked where it is set."""

from __future__ import annotations

from dataclasses import dataclass

from rocline.engine.home import DeviceKind
from rocline.engine.model import PrefillMode
from rocline.engine.weights import EngramHome
from rocline.pipeline.placement import MAX_STAGES, PlacementKind

MAX_RUNNING = 64
HOST_ARENA_GIB = 1.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """
    device            where the layers run: cpu or hip
    reference_op      on a GPU, operators that run by their torch reference there
    stages            pipeline stages, a thread each
    devices           cards they are spread over, neighbours together; None: one a stage, or as many cards as there are.
                      On the CPU all are host memory
    context           tokens of one request at most, prompt and output; None: the model's
    kv_tokens         positions that all running requests together may hold; None: twice the context
    chunk_rows        prompt rows that cross the stages together
    mixed_chunk_rows  the same while any request decodes
    inflight_chunks   chunks between the first stage and the last
    running           requests that run at a time
    queue             requests that wait before them
    reserve_tokens    output tokens that a request has room for when it is admitted; it grows after that
    groups            decode steps in flight; None: what the cost model finds fastest
    arena_gib         slab of each stage; None: on a GPU what the memory plan says, on the CPU 1, address space until
                      it is used

    None of these changes a bit of any answer.
    """

    device: DeviceKind = "cpu"
    reference_op: tuple[str, ...] = ()
    stages: int = 8
    devices: int | None = None
    placement: PlacementKind = "folded"
    context: int | None = None
    kv_tokens: int | None = None
    chunk_rows: int = 1024
    mixed_chunk_rows: int = 256
    inflight_chunks: int = 16
    running: int = 8
    queue: int = 64
    reserve_tokens: int = 8192
    groups: int | None = None
    prefill: PrefillMode = "halo"
    engram: EngramHome = "ram"
    arena_gib: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError naming the option, its value and the range."""
        for name, low, high in (
            ("stages", 1, MAX_STAGES),
            ("devices", 1, self.stages),
            ("chunk_rows", 1, 65_536),
            ("mixed_chunk_rows", 1, 65_536),
            ("inflight_chunks", 1, 1024),
            ("running", 1, MAX_RUNNING),
            ("queue", 0, 65_536),
            ("reserve_tokens", 1, 2**31 - 1),
            ("groups", 1, MAX_RUNNING),
            ("context", 1, 2**31 - 1),
            ("kv_tokens", 1, 2**40),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} = {value}: must be {low} to {high}")
        if self.arena_gib is not None and not 2**-10 <= self.arena_gib <= 64:
            raise ValueError(f"arena_gib = {self.arena_gib}: must be 0.001 to 64")
        if self.reference_op and self.device == "cpu":
            raise ValueError(f"reference_op = {self.reference_op}: on the CPU every operator is its torch reference")

    def stage_devices(self, n_devices: int) -> list[int]:
        """The device of each stage, of so many."""
        return [stage * n_devices // self.stages for stage in range(self.stages)]
