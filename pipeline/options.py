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
    device            Where the layers run: cpu or hip.
    reference_op      Operators that run by their torch reference on the GPU, to bring up a card; very slow.
    stages            Pipeline stages that the layers are cut into. Each has a thread.
    devices           Cards that the stages are spread over, neighbours together. Unset: one a stage, or as many cards
                      as there are. On the CPU all are host memory.
    placement         How layers are cut into stages: folded gives every stage layers of the encoder and of the decoder,
                      contiguous gives it a run of neighbours.
    context           Tokens of one request at most, prompt and output together. Unset: the model's limit.
    kv_tokens         Tokens that all running requests together may hold. Unset: twice the context.
    chunk_rows        Prompt tokens that cross the stages together.
    mixed_chunk_rows  Prompt tokens that cross the stages together while any request decodes.
    inflight_chunks   Chunks that may be under way between the first stage and the last.
    running           Requests that run at a time, at most.
    queue             Requests that may wait for those that run; more are refused.
    reserve_tokens    Output tokens that a request has room for when it is admitted. It grows after that.
    groups            Decode steps in flight. Unset: as many as the cost model finds fastest.
    prefill           Layers that prompt tokens run: with halo only those of the encoder, but for the last few thousand
                      tokens, with full every layer.
    engram            Where the Engram tables are: ram reads them into memory, mmap maps their file.
    arena_gib         GiB for the temporaries of each stage. Unset: what the memory plan says on a GPU, and on the CPU
                      1 GiB, which is taken as it is used.

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
