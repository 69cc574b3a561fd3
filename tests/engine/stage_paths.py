"""Stages on devices of their own, run in the test's thread: a pipeline without its threads."""

from collections import defaultdict
from itertools import pairwise

from rocline.engine import scratch
from rocline.engine.engram_ahead import EngramAhead
from rocline.engine.handoff import HandOff, RowKind, RowSpan, reach_for
from rocline.engine.layers.head import embed_rows, final_logits, lookback_rows
from rocline.engine.pages import Pages, scored_sources
from rocline.engine.routes import StageLayers, routes
from rocline.engine.stage import Stage

PAGE = 64
N_PAGES = 32


def random_path(rng, config, n_devices, n_visits) -> list[tuple[int, StageLayers]]:
    """Any cut into visits, on any devices; the last source's side may go one layer early."""
    text = config.text_config
    inner = rng.choice(range(1, text.num_hidden_layers), n_visits - 1, replace=False).tolist()
    bounds = [0, *sorted(inner), text.num_hidden_layers]
    home = {source: source for source in text.kv_source_layer_ids}
    last = text.kv_source_layer_ids[-1]
    if text.layers[last].engram is None:
        home[last] -= int(rng.integers(2))
    return [
        (int(rng.integers(n_devices)), StageLayers(tuple(range(a, b)), frozenset(s for s in home if a <= home[s] < b)))
        for a, b in pairwise(bounds)
    ]


class Path:
    """The visits of `path`, (device, visit) in order: one stage a device, with a model's weights, where the model is.

    On a GPU all devices are that one, and a path is used inside the model's at_the_ends.
    """

    def __init__(self, model, path: list[tuple[int, StageLayers]]) -> None:
        self.config, self.weights = model.config.text_config, model.placed
        self.pages, home = Pages(N_PAGES, PAGE), model.home
        parts = defaultdict(list)
        self.order: list[tuple[int, int]] = []  # (device, which of its visits)
        for (device, visit), route in zip(path, routes(model.config, path), strict=True):
            self.order.append((device, len(parts[device])))
            parts[device].append((visit, route))
        self.stages: dict[int, Stage] = {}
        for device, of_device in parts.items():
            visits, own_routes = zip(*of_device, strict=True)
            sources = frozenset().union(*(route.stores for route in own_routes))
            scored = scored_sources(self.config, (layer for visit in visits for layer in visit.layers))
            planes = home.planes(self.config, sources, N_PAGES, PAGE, scored)
            memory = home.memory(1 << 28, f"arena of device {device}", poison=True)
            self.stages[device] = Stage(
                model.config,
                visits,
                self.weights.layers,
                planes,
                memory,
                own_routes,
                ring_data=home.ring_data,
                sequences_at_once=home.sequences_at_once,
            )
        self.ids: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.ahead: EngramAhead | None = None

    def open(self, sequence: int) -> None:
        self.ids[sequence], self.tables[sequence] = [], []
        for stage in self.stages.values():
            stage.open(sequence, self.tables[sequence])

    def add(self, sequence: int, ids, end: int | None = None) -> RowSpan:
        """New rows: of a prompt in `halo` that ends at `end`, or decoded ones."""
        kind = RowKind.DECODE if end is None else RowKind.PREFILL
        start = len(self.ids[sequence])
        self.ids[sequence] += ids
        length = len(self.ids[sequence])
        reach = reach_for(self.config, "full" if end is None else "halo", end or length)
        self.pages.grow([(self.tables[sequence], length)])
        return RowSpan(sequence, start, len(ids), kind, reach, (end or length) - 1)

    def embed(self, *spans: RowSpan) -> HandOff:
        """The first hand-off of rows that were added."""
        engram = self.ahead and self.ahead.start(lookback_rows(self.config, spans, self.ids))
        return embed_rows(self.config, self.weights.embed_bf16, spans, self.ids, engram)

    def begin(self, sequence: int, ids, end: int | None = None) -> HandOff:
        return self.embed(self.add(sequence, ids, end))

    def run(self, rows: HandOff, **options) -> HandOff:
        """Through every visit, as far as there is something to do."""
        for device, visit in self.order:
            if rows.is_spent:
                break
            sent, rows = rows, self.stages[device].run(rows, visit, **options)
            sent.release()
        return rows

    def logits(self, rows: HandOff) -> bytes:
        """The bits of the wanted rows' logits, in plain memory; `rows` are released."""
        out = final_logits(self.config, self.weights.norm_bf16, self.weights.head_bf16, rows).logits_f32
        rows.release()
        return scratch.fetch(out).numpy().tobytes()

    def used_bytes(self) -> int:
        return sum(stage.memory.arena.stats().used_bytes for stage in self.stages.values())
