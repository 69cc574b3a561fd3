"""Which stage runs which layers: the cut that a cost model finds best, folded or contiguous (design.md section 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from heapq import heappop, heappush
from typing import Literal

from rocline.engine.config import ModelConfig
from rocline.engine.stage import StageLayers
from rocline.pipeline.costs import CostModel, Rates

PlacementKind = Literal["folded", "contiguous"]
MAX_STAGES = 8
ENCODER_LAYERS = 4  # of one stage at most where the stages suffice: more, and the others wait for it
CHOICE_RATES = Rates(17e12)  # the middle of the forecast's range; cuts differ little over it
HOST_RATES = Rates(20e9, 10e9, 10e9)  # a core or two in torch; only the ratio to a step's fixed cost matters
# A request is a cold prompt of the declared context and this many tokens, its share when eight decode.
REQUEST_TOKENS = 8192
HISTORIES = 8  # lengths at which a prompt's chunks are timed: one, the middle, is 8 % off at the release's limit


class PlacementError(ValueError):
    """No cut exists: what was asked, and what to change."""


@dataclass(frozen=True)
class PlacedStage:
    """device   of this stage; several stages may share one
    visits   what a row runs here, in order: one or two runs of layers, each as engine.Stage takes it
    """

    device: int
    visits: tuple[StageLayers, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for visit in self.visits for layer in visit.layers)


@dataclass(frozen=True)
class Placement:
    kind: PlacementKind
    stages: tuple[PlacedStage, ...]

    @cached_property
    def path(self) -> list[tuple[int, StageLayers]]:
        """(stage, visit) in the order that a row makes them."""
        visits = [(stage, visit) for stage, placed in enumerate(self.stages) for visit in placed.visits]
        return sorted(visits, key=lambda step: step[1].layers)

    @property
    def n_devices(self) -> int:
        return max(stage.device for stage in self.stages) + 1


# What a stage with these visits needs of its device.
NeedBytes = Callable[[tuple[StageLayers, ...]], int]


@dataclass(frozen=True, slots=True)
class _Edge:
    """One stage's runs, encoder layers up to `encoder_stop` and decoder layers up to `decoder_stop`."""

    encoder_stop: int
    decoder_stop: int
    visits: tuple[StageLayers, ...]
    need_bytes: int


_State = tuple[int, int]  # the next encoder and the next decoder layer
_Edges = Sequence[dict[_State, list[_Edge]]]  # of each stage


def layer_run(config: ModelConfig, first: int, stop: int) -> StageLayers:
    """Layers first .. stop - 1 as a visit. The last source's key/value side goes with the layer before it.

    It takes every prompt row, the source's layer only the halo (design.md section 6). A layer that adds Engram keeps
    its side: the side must see the streams after that.
    """
    text = config.text_config
    last = text.kv_source_layer_ids[-1]
    home = {source: source for source in text.kv_source_layer_ids}
    if last and text.layers[last].engram is None:
        home[last] = last - 1
    return StageLayers(tuple(range(first, stop)), frozenset(s for s, layer in home.items() if first <= layer < stop))


def equal_cut(config: ModelConfig, n_stages: int) -> Placement:
    """Contiguous stages of nearly equal length, a device each: what the published engine runs."""
    n_layers = config.text_config.num_hidden_layers
    bounds = [n_layers * stage // n_stages for stage in range(n_stages + 1)]
    runs = [layer_run(config, bounds[stage], bounds[stage + 1]) for stage in range(n_stages)]
    return Placement("contiguous", tuple(PlacedStage(stage, (run,)) for stage, run in enumerate(runs)))


def host_placement(
    model: CostModel, kind: PlacementKind, stage_devices: Sequence[int], context: int, chunk_rows: int
) -> Placement:
    """The cut for stages in host memory: shared by weight and by what a CPU takes. Raises PlacementError."""

    def need_bytes(visits: tuple[StageLayers, ...]) -> int:
        return sum(model.layers[layer].weight_bytes for visit in visits for layer in visit.layers)

    rooms = [2**62] * len(stage_devices)
    placer = Placer(model, kind, stage_devices, need_bytes, rooms, context, chunk_rows, rates=HOST_RATES)
    if not (placement := placer.choose()):
        raise PlacementError(f"{model.n_layers} layers cannot be cut into {len(stage_devices)} {kind} stages")
    return placement


class Placer:
    """Finds the best cut of a configuration over n_stages stages.

    stage_devices  device of each stage, ascending
    need_bytes     memory that a stage needs with given visits; more layers never need less
    room_bytes     memory that each stage may use
    drafts         whether the last layer's stage drafts tokens too
    rates          of one device

    Key/value sources, which score their whole history, stand on different stages, or where that leaves no cut as few
    together as possible.

    The best `contiguous` cut leaves its fullest stage the most room: equal shares of the model, as the published
    engine has them. The best `folded` cut has the least modelled time of one request: a cold prompt of `context`
    tokens in `halo`, in chunks of chunk_rows, and REQUEST_TOKENS output tokens. A pipeline goes at its slowest
    stage's pace, so a chunk counts the greatest encoder time of a stage, averaged over HISTORIES of the prompt (index
    sources grow with it), and a token the greatest decode time. What no cut changes, the fill, is left out. The
    minimum is exact: encoder cuts come in ascending order of their part, each with its best decoder cut by dynamic
    programming, until that part alone is more than the best so far.
    """

    def __init__(
        self,
        model: CostModel,
        kind: PlacementKind,
        stage_devices: Sequence[int],
        need_bytes: NeedBytes,
        room_bytes: Sequence[int],
        context: int,
        chunk_rows: int,
        drafts: bool = False,
        rates: Rates = CHOICE_RATES,
    ) -> None:
        self.model, self.kind, self.stage_devices = model, kind, tuple(stage_devices)
        self.n_stages = len(stage_devices)
        if not 1 <= self.n_stages <= MAX_STAGES or self.n_stages > model.n_layers:
            raise PlacementError(
                f"{self.n_stages} stages for {model.n_layers} layers: must be 1 to {min(MAX_STAGES, model.n_layers)}"
            )
        self._need_bytes, self._room_bytes = cache(need_bytes), room_bytes
        self._chunk_rows, self._drafts, self._rates = chunk_rows, drafts, rates
        self._histories = [context * (2 * at + 1) // (2 * HISTORIES) for at in range(HISTORIES)]
        self._n_chunks = -(-context // chunk_rows)
        n_owners = len(model.text.kv_source_layer_ids)
        self._owner_limits = range(-(-n_owners // self.n_stages), n_owners + 1)
        self._encoder_s = cache(self._encoder_s_at)
        self._visit_s = cache(self._visit_s_of)

    def choose(self) -> Placement | None:
        """The best cut that fits, or None."""
        for n_owners in self._owner_limits:
            edges = self._edges(n_owners, fits_only=True)
            found = self._quickest(edges) if self.kind == "folded" else self._roomiest(edges)
            if found:
                return self._placement(found)
        return None

    def roomiest(self) -> Placement:
        """The cut whose fullest stage has the most room, if that is less than none. Raises PlacementError."""
        for n_owners in self._owner_limits:
            if found := self._roomiest(self._edges(n_owners, fits_only=False)):
                return self._placement(found)
        raise PlacementError(f"{self.model.n_layers} layers cannot be cut into {self.n_stages} {self.kind} stages")

    def request_s(self, placement: Placement) -> float:
        """Modelled seconds that `folded` minimises, of any placement of this model."""
        encoder = [[layer for layer in stage.layers if layer < self.model.n_encoder] for stage in placement.stages]
        costs = [self._encoder_s(run[0], run[-1] + 1) for run in encoder if run]
        decode_s = max(self._decode_s(stage.visits) for stage in placement.stages)
        return self._request_s(_greatest(costs), decode_s)

    def _request_s(self, encoder_s: Sequence[float], decode_s: float) -> float:
        return self._n_chunks * sum(encoder_s) / HISTORIES + REQUEST_TOKENS * decode_s

    def _roomiest(self, edges: _Edges) -> list[_Edge] | None:
        found = self._minimax(edges, lambda stage, edge: edge.need_bytes - self._room_bytes[stage])
        return found and found[1]

    def _quickest(self, edges: _Edges) -> list[_Edge] | None:
        def decode_s(stage: int, edge: _Edge) -> float:
            return self._decode_s(edge.visits)

        if not (free := self._minimax(edges, decode_s)):
            return None
        best_s, best = float("inf"), None
        for encoder_s, stops in self._encoder_cuts():
            if self._request_s(encoder_s, free[0]) >= best_s:
                break
            if found := self._minimax(edges, decode_s, stops):
                seconds = self._request_s(encoder_s, found[0])
                if seconds < best_s:
                    best_s, best = seconds, found[1]
        return best

    def _encoder_cuts(self) -> Iterator[tuple[tuple[float, ...], tuple[int, ...]]]:
        """(greatest seconds of a stage at each history, where each stage's encoder run stops), least sum first."""
        heap: list[tuple[float, tuple[int, ...], tuple[float, ...]]] = [(0.0, (), (0.0,) * HISTORIES)]
        while heap:
            _, stops, so_far = heappop(heap)
            if len(stops) == self.n_stages:
                yield so_far, stops
                continue
            first = stops[-1] if stops else 0
            for stop in self._encoder_stops(len(stops), first):
                greatest = _greatest([so_far, self._encoder_s(first, stop)])
                heappush(heap, (sum(greatest), (*stops, stop), greatest))

    def _minimax(
        self, edges: _Edges, cost: Callable[[int, _Edge], float], encoder_stops: Sequence[int] = ()
    ) -> tuple[float, list[_Edge]] | None:
        """The cut with the least greatest cost of a stage; of those with the given encoder stops, if any are."""
        n_encoder, n_layers = self.model.n_encoder, self.model.n_layers
        front: dict[_State, tuple[float, list[_Edge]]] = {(0, n_encoder): (float("-inf"), [])}
        for stage, of_stage in enumerate(edges):
            after: dict[_State, tuple[float, list[_Edge]]] = {}
            for state, (worst, cut) in front.items():
                for edge in of_stage.get(state, ()):
                    if encoder_stops and edge.encoder_stop != encoder_stops[stage]:
                        continue
                    value = max(worst, cost(stage, edge))
                    reached = edge.encoder_stop, edge.decoder_stop
                    if reached not in after or value < after[reached][0]:
                        after[reached] = value, [*cut, edge]
            front = after
        return front.get((n_encoder, n_layers))

    def _edges(self, n_owners: int, fits_only: bool) -> _Edges:
        """Every choice of every stage, by the layers before it."""
        n_encoder, n_layers = self.model.n_encoder, self.model.n_layers
        edges: list[dict[_State, list[_Edge]]] = []
        states = {(0, n_encoder)}
        for stage in range(self.n_stages):
            of_stage = {state: list(self._from(stage, state, n_owners, fits_only)) for state in states}
            states = {(edge.encoder_stop, edge.decoder_stop) for out in of_stage.values() for edge in out}
            edges.append(of_stage)
        last = edges[-1]
        for state, out in last.items():
            last[state] = [edge for edge in out if (edge.encoder_stop, edge.decoder_stop) == (n_encoder, n_layers)]
        return edges

    def _from(self, stage: int, state: _State, n_owners: int, fits_only: bool) -> Iterator[_Edge]:
        encoder, decoder = state
        n_encoder = self.model.n_encoder
        sources = self.model.text.kv_source_layer_ids
        for encoder_stop in self._encoder_stops(stage, encoder):
            for decoder_stop in self._decoder_stops(stage, decoder, encoder_stop == n_encoder):
                if encoder_stop == encoder and decoder_stop == decoder:
                    continue
                runs = ((encoder, encoder_stop), (decoder, decoder_stop))
                if sum(first <= source < stop for source in sources for first, stop in runs) > n_owners:
                    break
                visits = self._visits(runs)
                need_bytes = self._need_bytes(visits)
                if fits_only and need_bytes > self._room_bytes[stage]:
                    break  # more layers need more
                yield _Edge(encoder_stop, decoder_stop, visits, need_bytes)

    def _encoder_stops(self, stage: int, first: int) -> range:
        """Where a stage's encoder run may end. Folded stages have 1 to ENCODER_LAYERS, if there are enough of both."""
        n_encoder, left = self.model.n_encoder, self.n_stages - stage - 1
        if self.kind == "contiguous":
            return range(first, n_encoder + 1)
        fewest = min(1, n_encoder // self.n_stages)
        most = max(ENCODER_LAYERS, -(-n_encoder // self.n_stages))
        low = max(first + fewest, n_encoder - left * most)
        return range(low, min(first + most, n_encoder - left * fewest) + 1)

    def _decoder_stops(self, stage: int, first: int, encoder_done: bool) -> range:
        """Where a stage's decoder run may end. Folded stages have one layer at least, if there are enough."""
        n_layers, left = self.model.n_layers, self.n_stages - stage - 1
        if self.kind == "contiguous":
            return range(first, (n_layers if encoder_done else first) + 1)
        fewest = min(1, (n_layers - self.model.n_encoder) // self.n_stages)
        return range(first + fewest, n_layers - left * fewest + 1)

    def _visits(self, runs: tuple[tuple[int, int], tuple[int, int]]) -> tuple[StageLayers, ...]:
        (encoder, encoder_stop), (decoder, decoder_stop) = runs
        if encoder < encoder_stop == decoder < decoder_stop:  # they meet: one visit
            runs = ((encoder, decoder_stop), (decoder_stop, decoder_stop))
        return tuple(layer_run(self.model.config, first, stop) for first, stop in runs if first < stop)

    def _encoder_s_at(self, first: int, stop: int) -> tuple[float, ...]:
        """Seconds of a chunk in encoder layers first .. stop - 1, as one visit, at each history."""
        if first == stop:
            return (0.0,) * HISTORIES
        visit = layer_run(self.model.config, first, stop)
        return tuple(
            self._rates.step_s
            + self.model.work_s(visit.layers, visit.kv_sides, lambda layer: self._chunk_rows, history, self._rates)
            for history in self._histories
        )

    def _decode_s(self, visits: tuple[StageLayers, ...]) -> float:
        """Seconds of one decoded row at the middle of the context, its logits with the last layer."""
        seconds = sum(self._visit_s(visit) for visit in visits)
        if visits[-1].layers[-1] == self.model.n_layers - 1:
            seconds += self.model.head.seconds(1, self._rates)
            seconds += self.model.draft_s(1, self._rates) if self._drafts else 0.0
        return seconds

    def _visit_s_of(self, visit: StageLayers) -> float:
        history = self._histories[HISTORIES // 2]
        work_s = self.model.work_s(visit.layers, visit.kv_sides, lambda layer: 1, history, self._rates)
        return self._rates.step_s + work_s

    def _placement(self, cut: Sequence[_Edge]) -> Placement:
        stages = (PlacedStage(device, edge.visits) for device, edge in zip(self.stage_devices, cut, strict=True))
        return Placement(self.kind, tuple(stages))


def _greatest(costs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(map(max, zip(*costs, strict=True))) if costs else (0.0,) * HISTORIES
