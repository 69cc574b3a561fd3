"""The memory of every device for a placement, and the plan that fits: weights, pages, graphs, arena, headroom.

Spec: design.md section 8, backbone.md section 13. Weights come from the checkpoint's tensor sizes, temporaries from
traces of shapes; what no file or trace tells is a constant here and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from rocline.arena.arena import SPARE_PART
from rocline.arena.classes import align_up
from rocline.arena.replay import peaks
from rocline.arena.replay import plan as smallest_slab
from rocline.arena.spans import ArenaFull
from rocline.arena.trace import TraceEvent
from rocline.engine.config import LayerRole, ModelConfig
from rocline.engine.pages import PAGE_POSITIONS
from rocline.engine.sequence import REWIND_ROWS
from rocline.engine.shapes import SLAB_BYTES, prefill_traces
from rocline.engine.stage import StageLayers
from rocline.engine.steps import STEP_ROWS
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.index_select import Workspace
from rocline.pipeline.costs import CostModel, scored_sources
from rocline.pipeline.placement import MAX_STAGES, Placement, PlacementError, PlacementKind, Placer, layer_run

GIB = 1 << 30
HEADROOM_FLOOR_BYTES = 3 * GIB // 2
MAX_ARENA_BYTES = 3 * GIB
KV_TOKENS = 2 << 20
MAX_SEQUENCES = 64
LEAST_CHUNK_ROWS = 256  # worth advising: below, reading the experts takes most of a chunk's time
RUNTIME_BYTES = GIB // 2  # assumed, a device: HIP context, code objects, torch
GRAPH_BYTES = 4 << 20  # assumed, a captured step of one visit
WAITING_HANDOFFS = 1  # of each visit: made, and not yet copied by its receiver
_GROWS = "_index_select"  # of a chunk's temporaries the only one that grows with the history: one workspace a layer
TRACED_CHUNKS = 4  # at most; the halo's last chunks, where layers drop rows and hold both copies for a moment
# Several layers in a visit, and the halo's rows dropped at another place in a chunk, leave other holes: over 150 prompt
# lengths and cuts of the release the slab had to be up to 2.3 of a chunk's hand-offs larger than layers alone say.
SPARE_HANDOFFS = 3

Drafts = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    device_bytes  memory of each of n_devices
    kv_tokens     positions that all requests together may hold; at least the context
    drafts        keep the draft stages' weights with the head; auto: where they fit
    """

    n_devices: int
    device_bytes: int
    n_stages: int
    kind: PlacementKind
    context: int
    kv_tokens: int
    chunk_rows: int
    drafts: Drafts = "auto"

    @property
    def stage_devices(self) -> list[int]:
        return [stage * self.n_devices // self.n_stages for stage in range(self.n_stages)]


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device by what they are for.

    kv            compressed rows and index keys of the admitted tokens, once each, and the rings of 64 sequences
    prepared      index keys in the form that scoring reads
    kv_row_bytes  of kv, what a token takes; prepared_row_bytes alike
    graphs        captured steps and the span of their temporaries
    runtime       an assumed constant
    """

    capacity: int
    weights: int
    kv: int
    prepared: int
    graphs: int
    arena: int
    kv_row_bytes: float
    prepared_row_bytes: float
    runtime: int = RUNTIME_BYTES

    @property
    def headroom(self) -> int:
        return self.capacity - self.weights - self.kv - self.prepared - self.graphs - self.arena - self.runtime

    def __str__(self) -> str:
        parts = ("weights", "kv", "prepared", "graphs", "arena", "runtime")
        return ", ".join(f"{part} {getattr(self, part) / GIB:.2f}" for part in parts)


@dataclass(frozen=True)
class Plan:
    """A placement that fits, with the memory of each device and the arena of each stage. `request.drafts` is "on" or
    "off"."""

    request: Request
    model: CostModel
    placement: Placement
    memory: tuple[DeviceMemory, ...]
    arena_bytes: tuple[int, ...]


def counted(n: int, noun: str) -> str:
    """In words: 1 device, 2 devices."""
    return f"{n} {noun}{'s' * (n != 1)}"


def shortage(headroom: int, device: int) -> str:
    """What device `device` lacks where it keeps so many bytes of headroom, or misses as many below 0; in words."""
    more_gib = (HEADROOM_FLOOR_BYTES - headroom) / GIB
    return f"{more_gib:.2f} GiB more than device {device} has, {HEADROOM_FLOOR_BYTES / GIB:.1f} to be left free"


def make_plan(config: ModelConfig, request: Request) -> Plan:
    """The best placement that leaves every device HEADROOM_FLOOR_BYTES. Raises PlacementError with what would help."""
    _check(config, request)
    if not config.text_config.num_nextn_predict_layers:
        request = replace(request, drafts="off")
    for drafts in ("on", "off") if request.drafts == "auto" else (request.drafts,):
        if found := _fit(config, replace(request, drafts=drafts)):
            return found
    raise PlacementError(_refusal(config, request))


def _fit(config: ModelConfig, request: Request) -> Plan | None:
    memory = _Memory(config, request)
    if not (placement := memory.placer().choose()):
        return None
    arena_bytes = tuple(memory.arena_bytes(stage.visits) for stage in placement.stages)
    return Plan(request, memory.model, placement, memory.devices(placement), arena_bytes)


def _check(config: ModelConfig, request: Request) -> None:
    limit = config.text_config.max_position_embeddings
    if not 1 <= request.context <= limit:
        raise PlacementError(f"--context {request.context}: must be 1 to max_position_embeddings = {limit}")
    if request.kv_tokens < request.context:
        raise PlacementError(
            f"--kv-tokens {request.kv_tokens} holds no request of --context {request.context}; raise it or lower that"
        )
    if not request.n_devices <= request.n_stages <= MAX_STAGES:
        raise PlacementError(
            f"{counted(request.n_stages, 'stage')} on {counted(request.n_devices, 'device')}: must be at least one a "
            f"device, and at most {MAX_STAGES}; set --stages"
        )
    try:
        largest = max(layer_slabs(config, request.chunk_rows, request.context))
    except ArenaFull:  # in the trace, which has more room than any plan
        largest = SLAB_BYTES
    if largest > MAX_ARENA_BYTES:
        raise PlacementError(
            f"--chunk-rows {request.chunk_rows} needs an arena of {largest / GIB:.2f} GiB or more for --context "
            f"{request.context}: at most {MAX_ARENA_BYTES / GIB:.0f} GiB; lower --chunk-rows"
        )


_cost_model = cache(CostModel)


class _Memory:
    """What stages and devices need under one request."""

    def __init__(self, config: ModelConfig, request: Request) -> None:
        self.config, self.text, self.request = config, config.text_config, request
        self.model = _cost_model(config)
        self._chunk_slabs = layer_slabs(config, request.chunk_rows, request.context)
        self._step_slabs = layer_slabs(config, STEP_ROWS[-1], request.context)

    def placer(self) -> Placer:
        devices = self.request.stage_devices
        room_bytes = self.request.device_bytes - HEADROOM_FLOOR_BYTES - RUNTIME_BYTES
        shares = [room_bytes // devices.count(device) for device in devices]
        return Placer(
            self.model,
            self.request.kind,
            devices,
            self._stage_bytes,
            shares,
            self.request.context,
            self.request.chunk_rows,
            drafts=self.request.drafts == "on",
        )

    def devices(self, placement: Placement) -> tuple[DeviceMemory, ...]:
        stages = placement.stages
        return tuple(
            self._device([stage.visits for stage in stages if stage.device == device])
            for device in range(self.request.n_devices)
        )

    def _stage_bytes(self, visits: tuple[StageLayers, ...]) -> int:
        memory = self._device([visits])
        return memory.capacity - memory.headroom - memory.runtime

    def _device(self, stages: Sequence[tuple[StageLayers, ...]]) -> DeviceMemory:
        visits = [visit for of_stage in stages for visit in of_stage]
        positions = -(-self.request.kv_tokens // PAGE_POSITIONS) * PAGE_POSITIONS
        kv_row_bytes, prepared_row_bytes = self._row_bytes(visits)
        return DeviceMemory(
            capacity=self.request.device_bytes,
            weights=self._weight_bytes(visits),
            kv=round(positions * kv_row_bytes) + self._ring_bytes(visits),
            prepared=round(positions * prepared_row_bytes),
            graphs=sum(map(self._graph_bytes, stages)),
            arena=sum(map(self.arena_bytes, stages)),
            kv_row_bytes=kv_row_bytes,
            prepared_row_bytes=prepared_row_bytes,
        )

    def _weight_bytes(self, visits: Iterable[StageLayers]) -> int:
        """Layers, key/value sides, the embedding with the first layer, head and draft stages with the last."""
        model = self.model
        layers = [layer for visit in visits for layer in visit.layers]
        total = sum(model.layers[layer].weight_bytes for layer in layers)
        total += sum(model.sides[source].weight_bytes for visit in visits for source in visit.kv_sides)
        if 0 in layers:
            total += model.embed_bytes
        if model.n_layers - 1 in layers:
            total += model.head.weight_bytes + (model.draft.weight_bytes if self.request.drafts == "on" else 0)
        return total

    def _row_bytes(self, visits: Iterable[StageLayers]) -> tuple[float, float]:
        """(rows and keys, prepared keys) in bytes a token, of every source that the visits read or make."""
        roles, text = self.text.layers, self.text
        read = {roles[layer].kv_source for visit in visits for layer in visit.layers} - {None}
        sources = {source for source in read if source is not None} | {s for visit in visits for s in visit.kv_sides}
        scored = {source for visit in visits for source in scored_sources(self.config, visit)}
        stored = (
            RowFormat("compressed", text.head_dim).row_bytes + RowFormat("index_key", text.index_head_dim).row_bytes
        )
        rows_per_token = {source: 1 / roles[source].ratio for source in sources}
        return (
            sum(stored * rows_per_token[source] for source in sources),
            sum(self.model.prepared_key_bytes * rows_per_token[source] for source in scored),
        )

    def _ring_bytes(self, visits: Iterable[StageLayers]) -> int:
        text = self.text
        window = (text.sliding_window + REWIND_ROWS) * RowFormat("window", text.head_dim).row_bytes
        pair = (1 + REWIND_ROWS) * 2 * 4 * text.head_dim
        return MAX_SEQUENCES * sum(
            len(visit.layers) * window + pair * sum(text.layers[s].ratio == 2 for s in visit.kv_sides)
            for visit in visits
        )

    def _graph_bytes(self, visits: Sequence[StageLayers]) -> int:
        """Captured steps of a stage run one at a time: they share the span of the largest."""
        span_bytes = self._slab_bytes(self._step_slabs, STEP_ROWS[-1], visits, SPARE_HANDOFFS)
        return span_bytes + GRAPH_BYTES * len(STEP_ROWS) * len(visits)

    def arena_bytes(self, visits: Sequence[StageLayers]) -> int:
        """A stage's visits run one at a time, while what each has sent may wait for its receiver."""
        n_handoffs = SPARE_HANDOFFS + WAITING_HANDOFFS * len(visits)
        return self._slab_bytes(self._chunk_slabs, self.request.chunk_rows, visits, n_handoffs)

    def _slab_bytes(self, slabs: list[int], n_rows: int, visits: Sequence[StageLayers], n_handoffs: int) -> int:
        largest = max(slabs[layer] for visit in visits for layer in visit.layers)
        least_bytes = largest + n_handoffs * n_rows * self.model.hop_row_bytes
        return align_up(
            least_bytes + least_bytes // (SPARE_PART - 1)
        )  # with that to spare a scope's spans need no search


@cache
def layer_slabs(config: ModelConfig, chunk_rows: int, context: int) -> list[int]:
    """The smallest arena for chunks of chunk_rows at the end of `context` positions, by layer, each on its own.

    Over a prompt of a few chunks. Layers of one kind share the figure of the one that holds most at once: each drops
    the halo's rows at another place in a chunk.
    """
    text = config.text_config
    chunk_rows = min(chunk_rows, context)
    halo_rows = text.sliding_window * (text.num_hidden_layers - text.kv_source_layer_ids[-1])
    n_chunks = min(TRACED_CHUNKS, 1 + -(-halo_rows // chunk_rows))
    # The last chunk is not full, so that no layer drops its rows just where a chunk begins.
    prompt_tokens = min(n_chunks * chunk_rows - chunk_rows // 10, context)
    visits = [layer_run(config, layer, layer + 1) for layer in range(text.num_hidden_layers)]
    of_kind: dict[object, list[list[TraceEvent]]] = {}
    for role, events in zip(text.layers, card_traces(config, visits, prompt_tokens, chunk_rows, context), strict=True):
        of_kind.setdefault(_kind(role), []).append(events)
    slabs = {kind: smallest_slab(max(traces, key=peaks)).slab_bytes for kind, traces in of_kind.items()}
    return [slabs[_kind(role)] for role in text.layers]


def card_traces(
    config: ModelConfig, visits: Sequence[StageLayers], prompt_tokens: int, chunk_rows: int, context: int
) -> list[list[TraceEvent]]:
    """What each visit takes from its arena through a prompt, from shapes, as by kernels after `context` positions."""
    traces = prefill_traces(config, visits, prompt_tokens, chunk_rows, -(-prompt_tokens // chunk_rows), "hip")
    out = []
    for visit, events in zip(visits, traces, strict=True):
        ratio = min(config.text_config.layers[layer].ratio or 1 for layer in visit.layers)
        n_bytes = Workspace.bytes_for(chunk_rows, context // ratio, config.text_config.index_topk)
        out.append([replace(event, n_bytes=n_bytes) if event.operator == _GROWS else event for event in events])
    return out


def _kind(role: LayerRole) -> object:
    return role.ratio, role.has_indexer, role.engram is not None


def _refusal(config: ModelConfig, request: Request) -> str:
    """Why nothing fits, in numbers of the roomiest cut, and the first change that makes it fit."""
    drafts: Drafts = "on" if request.drafts == "on" else "off"
    memory = _Memory(config, replace(request, drafts=drafts))
    devices = memory.devices(memory.placer().roomiest())
    least = min(range(len(devices)), key=lambda number: devices[number].headroom)
    why = (
        f"{config.text_config.num_hidden_layers} layers on {counted(request.n_devices, 'device')} of "
        f"{request.device_bytes / GIB:.1f} GiB: the roomiest {request.kind} cut needs "
        f"{shortage(devices[least].headroom, least)} (GiB: {devices[least]}); "
    )
    most_devices = min(MAX_STAGES, config.text_config.num_hidden_layers)
    for flag, changed in _remedies(replace(request, drafts=drafts), devices[least], most_devices):
        if _fit(config, changed):
            return why + f"{flag} fits"
    return why + "no one flag is enough: take more or larger devices"


def _remedies(request: Request, fullest: DeviceMemory, most_devices: int) -> Iterator[tuple[str, Request]]:
    """Single flags that might help, the cheapest for the user first."""
    short_bytes = HEADROOM_FLOOR_BYTES - fullest.headroom
    if request.drafts == "on":
        yield "--drafts off", replace(request, drafts="off")
    if short_bytes < fullest.kv + fullest.prepared:
        for kv_tokens in (request.kv_tokens // 2, request.context):
            if request.context <= kv_tokens < request.kv_tokens:
                yield f"--kv-tokens {kv_tokens}", replace(request, kv_tokens=kv_tokens)
    if short_bytes < fullest.arena and request.chunk_rows > LEAST_CHUNK_ROWS:
        yield f"--chunk-rows {LEAST_CHUNK_ROWS}", replace(request, chunk_rows=LEAST_CHUNK_ROWS)
    for n_devices in range(request.n_devices + 1, most_devices + 1):
        more = replace(request, n_devices=n_devices, n_stages=max(n_devices, request.n_stages))
        yield f"--devices {n_devices}x{request.device_bytes / GIB:g}GiB", more
    for extra_bytes in (short_bytes, 2 * short_bytes):
        size_gib = -(-(request.device_bytes + extra_bytes) // GIB)
        yield f"--devices {request.n_devices}x{size_gib}GiB", replace(request, device_bytes=size_gib * GIB)
