"""What a scope asked for when it last ran, by heart, so that its next run need not search.

A stage's layer asks chunk after chunk for the same tensors in the same order. One run is written down as a
script; the next gets a room (arena/room.py) for all that will die with the scope, and is handed the tensors one
after another. A request is known by its shape, its dtype and the place in the code it comes from. One that comes
as a surprise is served as in a first run, and the script is written anew. Where two runs want different shapes at
one place (scores over a history that grows), and for what is large, every run looks for a place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor

from rocline.arena.classes import align_up
from rocline.arena.room import Room, RoomPlan
from rocline.arena.spans import Span

Shape = tuple[int, ...]
Key = tuple[Shape | None, torch.dtype, CodeType, int]  # shape (None: any), dtype, calling code and its instruction
Item = tuple[Key, Tensor] | tuple[None, None]
MAX_PLACES = 8  # a script remembers tensors for: rooms come to lie where they lay before
View = Callable[[int, Shape, torch.dtype], Tensor]  # a tensor at an offset of the slab


class Request(NamedTuple):
    """dies: with its scope, or else it was handed on or freed."""

    key: Key
    n_bytes: int
    dies: bool


def n_bytes_of(shape: Shape, dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize


def any_shape(key: Key) -> Key:
    return (None, *key[1:])


class Script:
    """One run of a scope. What died with the scope has a place in its room, unless it is of any shape or large."""

    __slots__ = ("_items", "plan", "requests")

    def __init__(self, requests: Sequence[Request], large_bytes: int) -> None:
        self.requests = requests
        in_room = [r.dies and r.key[0] is not None and r.n_bytes <= large_bytes for r in requests]
        keys = [request.key for request in requests]
        self.plan = RoomPlan(
            [align_up(request.n_bytes) if here else 0 for request, here in zip(requests, in_room, strict=True)],
            [code.co_name for _, _, code, _ in keys],
            [(code, instruction) for _, _, code, instruction in keys],
            [r.n_bytes for r, here in zip(requests, in_room, strict=True) if not here],
        )
        self._items: dict[int, list[Item]] = {}  # offset of the room -> its items

    def items(self, offset: int, view: View) -> list[Item]:
        """What a room at offset hands out by request; (None, None) for what is served elsewhere, and at the end: no
        request is that."""
        if items := self._items.get(offset):
            return items
        if len(self._items) == MAX_PLACES:
            self._items.clear()
        items = self._items[offset] = [
            (key, view(offset + edge, key[0], key[1])) if size_bytes and key[0] is not None else (None, None)
            for (key, _, _), edge, size_bytes in zip(
                self.requests, self.plan.edges[:-1], self.plan.sizes_bytes, strict=True
            )
        ]
        items.append((None, None))
        return items

    def find(self, room: Room, key: Key) -> int:
        """Index of the request that this is: the next one, or, when that does not come, the one after. -1: neither."""
        for index in range(room.at, min(room.at + 2, room.end)):
            known = self.requests[index].key
            if known == key or (known[0] is None and known == any_shape(key)):
                if index > room.at:
                    room.skip(room.at)
                return index
        return -1


class Run:
    """A scope as it runs: by a script, or for the first time."""

    __slots__ = ("asked", "room", "script")

    def __init__(self) -> None:
        self.script: Script | None = None
        self.room: Room | None = None
        # Surprises: requests of the script gone by before, key, span.
        self.asked: list[tuple[int, Key, Span]] = []

    def asked_anew(self) -> bool:
        """Whether it did not go as its script has it."""
        room = self.room
        return bool(self.asked) or (room is not None and (bool(room.gone) or room.at < len(room.plan.sizes_bytes)))

    def written_down(self, dies: Callable[[Span], bool]) -> list[Request]:
        """Its requests, in order, for the next time."""
        rows = [(at, 0, Request(key, span.size_bytes, dies(span))) for at, key, span in self.asked]
        if self.script is not None and self.room is not None:
            gone, requests = self.room.gone, self.script.requests
            came = [index for index in range(self.room.at) if gone.get(index, True)]
            # In the place of one that did not come, from the same line: it has another shape every time.
            absent = {index: request.key for index, request in enumerate(requests) if index not in came}
            rows = [
                (at, 0, row._replace(key=any_shape(row.key)) if same_line(absent.get(at), row.key) else row)
                for at, _, row in rows
            ]
            rows += [(i, 1, requests[i]._replace(dies=requests[i].dies and i not in gone)) for i in came]
        rows.sort(key=lambda row: row[:2])
        return [request for _, _, request in rows]


def same_line(one: Key | None, other: Key) -> bool:
    return one is not None and one[1:] == other[1:]
