"""Where a source's new rows go: which visit stores them on its device, which sends them on (design.md section 6)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rocline.engine.config import ModelConfig


@dataclass(frozen=True)
class StageLayers:
    """What one visit runs: layers ascending, and the sources whose key/value side it makes.

    A source's side may stand on an earlier visit than the layer itself (design.md section 6).
    """

    layers: tuple[int, ...]
    kv_sides: frozenset[int]

    @property
    def steps(self) -> list[int]:
        return sorted({*self.layers, *self.kv_sides})


@dataclass(frozen=True)
class Route:
    """What a visit does with fresh rows, by source.

    enters    those that the visit before sends on
    stores    those it writes into its device's planes: all it makes, and of the others those that no earlier visit on
              the device has written. The planes of a device hold the union over its visits.
    forwards  those that it sends on, made or received, because a later visit has yet to store them
    """

    enters: frozenset[int]
    stores: frozenset[int]
    forwards: frozenset[int]


def routes(config: ModelConfig, path: Sequence[tuple[Hashable, StageLayers]]) -> list[Route]:
    """The route of each visit, given (device, visit) in the order that a row makes them.

    Rows are mirrored once per device that reads them, by the first visit there that does; a visit stores what it makes.
    Raises ValueError where a visit reads a source whose side is made later, twice or never.
    """
    roles = config.text_config.layers
    made_at: dict[int, int] = {}
    stored = set[tuple[Hashable, int]]()
    stores: list[frozenset[int]] = []
    last_store: dict[int, int] = {}  # by source, the last visit that stores it
    for at, (device, visit) in enumerate(path):
        if twice := visit.kv_sides & made_at.keys():
            raise ValueError(f"visit {at}, layers {visit.layers}: the side of source {min(twice)} is made twice")
        made_at |= dict.fromkeys(visit.kv_sides, at)
        reads = {source for layer in visit.layers if (source := roles[layer].kv_source) is not None}
        if unmade := reads - made_at.keys():
            raise ValueError(
                f"visit {at}, layers {visit.layers}: reads source {min(unmade)}, which no visit up to it makes"
            )
        new = {source for source in reads | visit.kv_sides if (device, source) not in stored}
        stored |= {(device, source) for source in new}
        last_store |= dict.fromkeys(new, at)
        stores.append(frozenset(new))
    forwards = [
        frozenset(source for source, last in last_store.items() if made_at[source] <= at < last)
        for at in range(len(path))
    ]
    return [Route(*of) for of in zip((frozenset(), *forwards), stores, forwards, strict=False)]
