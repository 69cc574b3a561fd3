"""Where a model lives: its weights, pages, rings and arenas on the host, or on a GPU (design.md section 3, 8).

On a GPU all of it is taken here, while loading; a chunk asks for nothing but what its arena lends.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rocline.arena.completions import RecordCompletion
from rocline.engine.config import LayerRole, TextConfig
from rocline.engine.layers.attention import AttentionWeights
from rocline.engine.layers.compressor import CompressorWeights
from rocline.engine.layers.experts import ExpertWeights
from rocline.engine.layers.indexer import IndexerWeights
from rocline.engine.layers.streams import EngramWeights, MhcWeights
from rocline.engine.marks import Clock, HostClock, StreamClock
from rocline.engine.pages import PAGE_POSITIONS, PagePlanes
from rocline.engine.row_checks import DeviceChecks, HostChecks, RowChecks
from rocline.engine.scratch import StageMemory
from rocline.engine.sequence import host_zeros
from rocline.engine.steps import MemoryOf
from rocline.engine.weights import LayerWeights, ModelWeights, SideWeights, StoredWeights, WeightSource
from rocline.hip_kernels.dispatch import Choice, Place, Shapes
from rocline.hip_kernels.driver import Device, Event, Slab, Stream, devices
from rocline.hip_kernels.paper import PaperPlace
from rocline.hip_kernels.runtime import torch_sees_gpus

DeviceKind = Literal["cpu", "hip"]
ENDS_BYTES = 256 << 20  # of a model that runs its stages in turn: embedded rows of a chunk, and logits
SEQUENCES_AT_ONCE = 64


@dataclass(frozen=True)
class Part:
    """What of a model lives somewhere: whole layers, key/value sides of layers that run elsewhere, and whether rows
    begin and end there."""

    layers: Collection[int]
    sides: Collection[int] = ()
    begins: bool = True
    ends: bool = True

    @classmethod
    def whole(cls, config: TextConfig) -> Part:
        return cls(range(config.num_hidden_layers))


class Home(Protocol):
    """
    sequences_at_once  as in Stage
    gathers_on_host    whether Engram's table rows are gathered apart from where they are added
    """

    @property
    def sequences_at_once(self) -> int | None: ...
    @property
    def gathers_on_host(self) -> bool: ...

    def ring_data(self, shape: tuple[int, ...], dtype: torch.dtype, /) -> Tensor:
        """As in Stage."""

    def memory(self, arena_bytes: int, name: str, poison: bool = False) -> StageMemory:
        """A stage's memory here. Raises HipError where it does not fit."""

    def step_memory(self) -> MemoryOf | None:
        """As in Steps.capture; None where steps are not captured: on the host, and where references run."""

    def planes(
        self, config: TextConfig, sources: Collection[int], n_pages: int, page_positions: int, scored: Collection[int]
    ) -> PagePlanes:
        """Pages for the rows of `sources`; the keys of `scored` are kept as the index kernels want them."""

    def weights(self, config: TextConfig, source: WeightSource, part: Part) -> ModelWeights:
        """Weights of a part here, as this home's operators read them; perhaps of more."""

    def clock(self) -> Clock:
        """For this home's thread, while it works here."""

    def checks(self, most_rows: int) -> RowChecks:
        """Of up to so many rows at a time, for a thread that works here."""

    def ends(self) -> StageMemory | None:
        """Memory for rows that are in no stage; None where plain host memory serves."""


class HostHome:
    """In host memory, for the torch references."""

    sequences_at_once: int | None = None
    gathers_on_host = False

    def ring_data(self, shape: tuple[int, ...], dtype: torch.dtype, /) -> Tensor:
        return host_zeros(shape, dtype)

    def memory(self, arena_bytes: int, name: str, poison: bool = False) -> StageMemory:
        return StageMemory(arena_bytes, name=name, poison=poison)

    def step_memory(self) -> MemoryOf | None:
        return None

    def planes(
        self,
        config: TextConfig,
        sources: Collection[int],
        n_pages: int,
        page_positions: int = PAGE_POSITIONS,
        scored: Collection[int] = (),
    ) -> PagePlanes:
        return PagePlanes(config, sources, n_pages, page_positions)

    def weights(self, config: TextConfig, source: WeightSource, part: Part) -> ModelWeights:
        if isinstance(source, ModelWeights):
            return source
        layers = {n: source.layer(n) for n in part.layers} | {n: source.side(n) for n in part.sides}
        return ModelWeights(source.embed_bf16, source.norm_bf16, source.head_bf16, layers)

    def clock(self) -> Clock:
        return HostClock()

    def checks(self, most_rows: int) -> RowChecks:
        return HostChecks()

    def ends(self) -> StageMemory | None:
        return None

    def __str__(self) -> str:
        return "on the host"


class HipHome:
    """On a GPU, for one thread. What it has made is freed with its owner: memory and planes when nothing refers to
    them any more, rings when nothing refers to the home.

    Raises HipError where HIP cannot be used, DispatchError for an unknown name in reference_ops.
    """

    gathers_on_host = True

    def __init__(
        self,
        config: TextConfig,
        device: Device | None = None,
        reference_ops: Collection[str] = (),
        sequences_at_once: int = SEQUENCES_AT_ONCE,
    ) -> None:
        self.place = Place(device or devices()[0], shapes_of(config), reference_ops)
        self.sequences_at_once = sequences_at_once
        self._rings: list[Slab] = []
        _free_with(self, self._rings)
        weakref.finalize(self, self.place.close).atexit = False

    def memory(self, arena_bytes: int, name: str, poison: bool = False) -> StageMemory:
        return self._memory(arena_bytes, name, self.place.record_completion, poison)

    def step_memory(self) -> MemoryOf | None:
        """What steps lend is of one stream and goes back in its order: nothing is ever pending."""
        return None if self.place.references else partial(self._memory, name="steps", record_completion=None)

    def _memory(
        self, n_bytes: int, name: str, record_completion: RecordCompletion | None, poison: bool = False
    ) -> StageMemory:
        slab = self.place.device.allocate(n_bytes)
        memory = StageMemory(
            n_bytes,
            slab_u8=slab.tensor(),
            record_completion=record_completion,
            name=name,
            poison=poison,
            place=self.place,
        )
        _free_with(memory, [slab])
        return memory

    def planes(
        self,
        config: TextConfig,
        sources: Collection[int],
        n_pages: int,
        page_positions: int = PAGE_POSITIONS,
        scored: Collection[int] = (),
    ) -> PagePlanes:
        prepared = scored if self.place.has("index_select") else ()
        slabs: list[Slab] = []
        zeros = partial(self._zeros, slabs)
        planes = PagePlanes(config, sources, n_pages, page_positions, prepared=prepared, zeros=zeros)
        _free_with(planes, slabs)
        return planes

    def weights(self, config: TextConfig, source: WeightSource, part: Part) -> ModelWeights:
        with torch.inference_mode(), self.place.work(_no_workspace), self.place.uploading():
            placed = _weights(self.place, config, source, part)
        self.place.stream.synchronize()  # other threads' streams read them too
        if torch_sees_gpus():
            torch.cuda.empty_cache()  # what weights were prepared from
        return placed

    def clock(self) -> Clock:
        return StreamClock(self.place.stream)

    def checks(self, most_rows: int) -> RowChecks:
        checks = DeviceChecks(most_rows)
        weakref.finalize(self, checks.close).atexit = False
        return checks

    def __str__(self) -> str:
        return f"on {self.place}"

    def ends(self) -> StageMemory | None:
        return self.memory(ENDS_BYTES, "arena of rows in no stage")

    def ring_data(self, shape: tuple[int, ...], dtype: torch.dtype, /) -> Tensor:
        return self._zeros(self._rings, shape, dtype)

    def _zeros(self, slabs: list[Slab], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        slabs.append(self.place.device.allocate(torch.Size(shape).numel() * dtype.itemsize))
        with self.place.stream:
            zeros = slabs[-1].tensor().zero_().view(dtype).view(shape)
        self.place.stream.synchronize()  # other threads' streams read them too
        return zeros


class PaperHome(HostHome):
    """A GPU on paper, within binding.shapes_only: what its kernels would be lent, in address space alone."""

    sequences_at_once = 1
    gathers_on_host = True

    def __init__(self, config: TextConfig, reference_ops: Collection[str] = ()) -> None:
        self.place = PaperPlace(shapes_of(config), reference_ops)

    def memory(self, arena_bytes: int, name: str, poison: bool = False) -> StageMemory:
        return StageMemory(arena_bytes, name=name, place=self.place)

    def step_memory(self) -> MemoryOf | None:
        return None if self.place.references else partial(self.memory, name="steps")

    def planes(
        self,
        config: TextConfig,
        sources: Collection[int],
        n_pages: int,
        page_positions: int = PAGE_POSITIONS,
        scored: Collection[int] = (),
    ) -> PagePlanes:
        prepared = scored if self.place.has("index_select") else ()
        return PagePlanes(config, sources, n_pages, page_positions, prepared=prepared)

    def weights(self, config: TextConfig, source: WeightSource, part: Part) -> ModelWeights:
        with torch.inference_mode(), self.place.work(_no_workspace):
            return _weights(self.place, config, source, part)

    def ends(self) -> StageMemory | None:
        return self.memory(ENDS_BYTES, "arena of rows in no stage")


def fence(homes: Sequence[Home]) -> None:
    """What any of these homes of one device queues from now on comes after all that they have queued by now.

    Called by any thread. Nobody waits.
    """
    events: list[Event] = []
    streams: list[Stream] = []
    for home in homes:
        if isinstance(home, HipHome):
            streams.append(home.place.stream)
    for stream in streams:
        with stream:
            events.append(Event().record())
    for waiting in streams:
        for stream, event in zip(streams, events, strict=True):
            if stream is not waiting:
                waiting.wait(event)


def shapes_of(config: TextConfig) -> Shapes:
    return Shapes(
        hidden=config.hidden_size,
        n_streams=config.hc_mult,
        n_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        rope_dim=config.qk_rope_head_dim,
        list_slots=config.sliding_window + config.index_topk,
        n_experts=config.n_routed_experts,
        n_chosen=config.num_experts_per_tok,
        vocab=config.vocab_size,
        index_heads=config.index_n_heads,
        index_head_dim=config.index_head_dim,
        candidate_block=config.candidate_block_size,
    )


def _free_with(owner: object, slabs: list[Slab]) -> None:
    """Free the slabs, also those that the list has yet to get, when nothing refers to the owner any more."""

    def free() -> None:
        for slab in slabs:
            slab.free()

    weakref.finalize(owner, free).atexit = False  # at the end of the process the driver does that


def _no_workspace(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    raise RuntimeError(f"a workspace of {list(shape)} {dtype} while loading: there is no arena to lend it")


def _weights(place: Choice, config: TextConfig, source: WeightSource, part: Part) -> ModelWeights:
    none_bf16, roles = torch.empty((0, config.hidden_size), dtype=torch.bfloat16), config.layers
    layers: dict[int, SideWeights] = {}
    stores: dict[int, tuple[Any, Any]] = {}  # of experts, prepared
    with closing(_read(place, source, list(part.layers))) as read:
        for n, weights in read:
            store = source.expert_store(n)
            if store not in stores:
                stores[store] = place.prepare("experts", weights.experts.routed, weights.experts.shared)
            layers[n] = _layer(place, config, roles[n], weights, *stores[store])
    layers |= {n: _side(place, roles[n], source.side(n)) for n in part.sides}
    return ModelWeights(
        place.put(source.embed_bf16 if part.begins else none_bf16),
        place.put(source.norm_bf16),
        place.prepare("head", source.head_bf16) if part.ends else place.put(none_bf16),
        layers,
    )


def _read(place: Choice, source: WeightSource, layers: list[int]) -> Generator[tuple[int, LayerWeights], None, None]:
    """Layers' weights one after another. On paper all of them are read, and nothing is put anywhere."""
    if isinstance(source, StoredWeights) and isinstance(place, Place):
        yield from source.layers_ahead(layers)
        return
    for n in layers:
        yield n, source.layer(n)


def _layer(
    place: Choice, config: TextConfig, role: LayerRole, weights: LayerWeights, routed: Any, shared: Any
) -> LayerWeights:
    """One layer's weights, each prepared for the operator that reads it; experts are so already."""
    put, prepare = place.put, place.prepare

    def mhc(op: str, of: MhcWeights) -> MhcWeights:
        return MhcWeights(prepare(op, of.fn_f32), put(of.scale_f32), put(of.base_f32))

    def fp8(weight: Any) -> Any:
        return prepare("fp8_linear", weight)

    attention, experts, indexer, engram = weights.attention, weights.experts, weights.indexer, weights.engram
    side = _side(place, role, weights)
    return LayerWeights(
        side.attn_norm_bf16,
        side.compressor,
        put(weights.ffn_norm_bf16),
        mhc("mhc_enter", weights.hc_attn),
        mhc("mhc_merge_enter", weights.hc_ffn),
        AttentionWeights(
            fp8(attention.wq_a),
            put(attention.q_norm_bf16),
            fp8(attention.wq_b),
            fp8(attention.wkv),
            put(attention.kv_norm_bf16),
            prepare("grouped_projection", attention.wo_a, config.o_groups),
            fp8(attention.wo_b),
            put(attention.sink_f32),
        ),
        ExpertWeights(prepare("router", experts.gate_bf16), put(experts.bias_f32), routed, shared),
        indexer and IndexerWeights(fp8(indexer.wq_b), prepare("index_weights", indexer.weights_proj_bf16)),
        engram and EngramWeights(fp8(engram.wkv), put(engram.q_bf16), put(engram.k_bf16), engram.table),
    )


def _side(place: Choice, role: LayerRole, weights: SideWeights) -> SideWeights:
    put, prepare, compressor = place.put, place.prepare, weights.compressor
    latent = "f32_linear" if role.ratio == 2 else "bf16_linear"
    return SideWeights(
        put(weights.attn_norm_bf16),
        compressor
        and CompressorWeights(
            prepare(latent, compressor.wkv_bf16),
            put(compressor.norm_bf16),
            prepare("index_key", compressor.wk_bf16),
            put(compressor.k_norm_bf16),
        ),
    )
