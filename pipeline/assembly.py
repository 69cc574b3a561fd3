"""Stages put together for an engine: where each lives, its part of the weights, pages and memory (design.md section 3,
6, 8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rocline.engine.config import ModelConfig
from rocline.engine.home import HipHome, Home, HostHome, PaperHome, Part, fence
from rocline.engine.layout import expected_tensors
from rocline.engine.pages import Pages, scored_sources
from rocline.engine.routes import StageLayers, routes
from rocline.engine.stage import Stage
from rocline.engine.weights import ModelWeights, WeightSource
from rocline.hip_kernels.driver import devices
from rocline.pipeline.costs import CostModel
from rocline.pipeline.options import HOST_ARENA_GIB, Options
from rocline.pipeline.placement import PlacedStage, Placement, PlacementError, host_placement
from rocline.pipeline.plan import HEADROOM_FLOOR_BYTES, Plan, Request, make_plan, shortage
from rocline.pipeline.transport import InProcess, PeerCopies, Transport

GIB = 1 << 30
CUT_CONTEXT = 8192  # for which stages on the host are cut, where a request may be longer


@dataclass(frozen=True)
class Layout:
    """Where stages go. device_indices: of HIP, by device of the placement; None on the host."""

    placement: Placement
    arena_bytes: tuple[int, ...]
    device_indices: tuple[int, ...] | None

    def visits_on(self, device: int) -> list[StageLayers]:
        return [visit for stage in self.placement.stages if stage.device == device for visit in stage.visits]


@dataclass(frozen=True)
class Assembly:
    """Of each stage, in order: the stage itself, where it lives, and its device's weights; homes also by device."""

    stages: tuple[Stage, ...]
    homes: tuple[Home, ...]
    weights: tuple[ModelWeights, ...]
    transport: Transport
    on_device: tuple[tuple[Home, ...], ...]

    def capture_steps(self, most_rows: int, context: int) -> None:
        """Capture every stage's decode steps of up to most_rows rows, where that is done. No sequence may be open.

        Raises HipError, CompileError.
        """
        for stage, home in zip(self.stages, self.homes, strict=True):
            if memory_of := home.step_memory():
                stage.capture_steps(memory_of, most_rows, context)

    def fence(self) -> None:
        """Whatever any stage queues from now on comes after what the others on its device have queued: on a card with
        several, one may still be at work in pages that come back."""
        for homes in self.on_device:
            fence(homes)


def lay_out(config: ModelConfig, options: Options, context: int, kv_tokens: int, source: WeightSource) -> Layout:
    """Raises PlacementError when the model cannot be cut as `options` say or does not fit, HipError without a GPU."""
    if options.device == "hip":
        return _on_cards(config, options, context, kv_tokens, source)
    placement = host_placement(
        CostModel(config),
        options.placement,
        options.stage_devices(options.devices or options.stages),
        min(context, CUT_CONTEXT),
        options.chunk_rows,
    )
    return Layout(placement, _arenas(options, [int(HOST_ARENA_GIB * GIB)] * options.stages), None)


def _on_cards(config: ModelConfig, options: Options, context: int, kv_tokens: int, source: WeightSource) -> Layout:
    """As the memory plan says, of what is free on the fullest card."""
    n_there = len(devices())
    n_devices = options.devices or min(options.stages, n_there)
    if n_devices > n_there:
        raise PlacementError(f"--devices {n_devices}: HIP shows {n_there}; lower it")
    used = devices()[:n_devices]
    request = Request(
        n_devices=n_devices,
        device_bytes=min(device.memory().free_bytes for device in used) + _shared_bytes(config, source, n_devices),
        n_stages=options.stages,
        kind=options.placement,
        context=context,
        kv_tokens=kv_tokens,
        chunk_rows=options.chunk_rows,
        drafts="off",
    )
    plan = make_plan(config, request)
    arenas = _arenas(options, [max(planned, _least_arena(config, options)) for planned in plan.arena_bytes])
    _check_room(plan, arenas)
    return Layout(plan.placement, arenas, tuple(device.index for device in used))


def _shared_bytes(config: ModelConfig, source: WeightSource, n_devices: int) -> int:
    """Of experts that the plan counts for every layer on a card, and layers share: at least so much of each card."""
    n_layers = config.text_config.num_hidden_layers
    stores = {source.expert_store(layer) for layer in range(n_layers)}
    n_more = -(-n_layers // n_devices) - len(stores)
    if n_more <= 0:
        return 0
    parts = "layers.0.ffn.experts.", "layers.0.ffn.shared_experts."
    return n_more * sum(spec.n_bytes for name, spec in expected_tensors(config).items() if name.startswith(parts))


def _check_room(plan: Plan, arenas: Sequence[int]) -> None:
    """Arenas larger than planned must fit too: said now, not after the weights are read."""
    for device, memory in enumerate(plan.memory):
        stages = [number for number, stage in enumerate(plan.placement.stages) if stage.device == device]
        headroom = memory.headroom - sum(arenas[number] - plan.arena_bytes[number] for number in stages)
        if headroom < HEADROOM_FLOOR_BYTES:
            raise PlacementError(
                f"arenas of {sum(arenas[number] for number in stages) / GIB:.2f} GiB need {shortage(headroom, device)} "
                f"(GiB, with the planned arena: {memory}); lower --arena-gib, or leave it out"
            )


def _least_arena(config: ModelConfig, options: Options) -> int:
    """The plan is of kernels; torch references hold more at once, and what they hold grows with the history."""
    references = PaperHome(config.text_config, options.reference_op).place.references
    return int(HOST_ARENA_GIB * GIB) if references else 0


def _arenas(options: Options, planned: Sequence[int]) -> tuple[int, ...]:
    return tuple(planned if options.arena_gib is None else [int(options.arena_gib * GIB)] * len(planned))


def assemble(
    config: ModelConfig, source: WeightSource, options: Options, layout: Layout, pages: Pages, poison: bool = False
) -> Assembly:
    """Bring weights, pages, rings and arenas to where they live. Raises HipError, DispatchError, CheckpointError."""
    text, placed = config.text_config, layout.placement.stages
    homes = [_home(config, options, layout, stage) for stage in placed]
    first_home = {stage.device: home for stage, home in reversed(list(zip(placed, homes, strict=True)))}
    weights, planes = {}, {}
    for device, home in sorted(first_home.items()):
        visits = layout.visits_on(device)
        weights[device] = home.weights(text, source, _part(config, layout.placement, visits))
        scored = scored_sources(text, [layer for visit in visits for layer in visit.layers])
        planes[device] = home.planes(text, _sources(config, visits), pages.n_pages, pages.page_positions, scored)
    path = layout.placement.path
    of_visit = dict(zip(path, routes(config, [(placed[stage].device, visit) for stage, visit in path]), strict=True))
    stages = [
        Stage(
            config,
            stage.visits,
            weights[stage.device].layers,
            planes[stage.device],
            home.memory(arena_bytes, f"arena of stage {number}", poison),
            [of_visit[number, visit] for visit in stage.visits],
            ring_data=home.ring_data,
            sequences_at_once=home.sequences_at_once,
        )
        for number, (stage, home, arena_bytes) in enumerate(zip(placed, homes, layout.arena_bytes, strict=True))
    ]
    on_device: dict[int, list[Home]] = {}
    for stage, home in zip(placed, homes, strict=True):
        on_device.setdefault(stage.device, []).append(home)
    return Assembly(
        tuple(stages),
        tuple(homes),
        tuple(weights[stage.device] for stage in placed),
        _transport(layout),
        tuple(map(tuple, on_device.values())),
    )


def _home(config: ModelConfig, options: Options, layout: Layout, stage: PlacedStage) -> Home:
    if layout.device_indices is None:
        return HostHome()
    device = devices()[layout.device_indices[stage.device]]
    return HipHome(config.text_config, device, options.reference_op, options.running)


def _transport(layout: Layout) -> Transport:
    if layout.device_indices is None:
        return InProcess()
    return PeerCopies([devices()[index] for index in layout.device_indices])


def _part(config: ModelConfig, placement: Placement, visits: Iterable[StageLayers]) -> Part:
    visits = list(visits)
    layers = {layer for visit in visits for layer in visit.layers}
    sides = {side for visit in visits for side in visit.kv_sides} - layers
    (_, first), (_, last) = placement.path[0], placement.path[-1]
    return Part(sorted(layers), sorted(sides), begins=first in visits, ends=last in visits)


def _sources(config: ModelConfig, visits: Iterable[StageLayers]) -> set[int]:
    """Key/value sources whose rows some visit reads or makes."""
    text, sources = config.text_config, set[int]()
    for visit in visits:
        sources |= visit.kv_sides | {s for layer in visit.layers if (s := text.layers[layer].kv_source) is not None}
    return sources
