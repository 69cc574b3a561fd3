"""Forms of products that a card takes: which is quickest there is measured before the first request, and kept beside
the compiled kernels. All of them give the same bits (linear_hip.forms).

Times are those of launches in a graph, one after the other over weights larger together than a card's cache, as decode
steps come to them.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

import msgspec
import torch
from torch import Tensor

from rocline.hip_kernels.compile import SOURCES, texts_of
from rocline.hip_kernels.driver import Device, Event, Slab, fill_async
from rocline.hip_kernels.graph import Graph, capture
from rocline.hip_kernels.linear_hip import Launched, Product, forms, multiply_together, use_forms, workspace_floats
from rocline.hip_kernels.runtime import HipError
from rocline.hip_kernels.weight_tiles import WeightTiles, tile_bytes

ROTATED_BYTES = 256 << 20  # of weights that take turns
MOST_SETS = 64  # of them: small ones would fill a graph without end
MOST_WEIGHT_BYTES = 256 << 20  # larger ones fill any card, whatever their form
SPARE_BYTES = 1 << 30  # of the card, that stay free meanwhile
REPEATS = 5
LEAST_GAIN = 0.03  # for less the rule stays
ALIGNMENT = 256

_log = logging.getLogger(__name__)


class Measured(msgspec.Struct, frozen=True):
    """form is the one to take; us what a launch of each took, by form."""

    form: int
    us: dict[str, float]


class Tactics:
    """What has been measured, by Launched.key(), and the file that keeps it.

    What is there stays: later phases and other processes add to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.measured = self._read()

    @classmethod
    def of(cls, device: Device, folder: Path) -> Tactics:
        """For this kind of card, and the kernels as their sources are now."""
        texts = b"".join(texts_of(SOURCES / "linear.hip").values())
        card = re.sub(r"[^A-Za-z0-9]+", "-", device.name).strip("-")
        return cls(folder / f"tactics-{device.arch}-{card}-{hashlib.sha256(texts).hexdigest()[:16]}.json")

    @property
    def forms(self) -> dict[str, int]:
        """For use_forms."""
        return {key: measured.form for key, measured in self.measured.items()}

    def add(self, measured: Mapping[str, Measured]) -> None:
        """Keep these too, where the file, as it is by now, has none. A file that cannot be written costs the next start
        time, not this one."""
        try:
            with self._locked():
                self.measured = {**measured, **self.measured, **self._read()}
                self._write()
        except OSError as error:
            self.measured = {**measured, **self.measured}
            _log.warning("cannot keep what was measured in %s: %s", self.path, error)

    def _read(self) -> dict[str, Measured]:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, Measured])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("%s: %s; it is passed over, and what it has measured anew", self.path, error)
            return {}

    def _write(self) -> None:
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=".")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(dict(sorted(self.measured.items())))))
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink()
            raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


Timer = Callable[[Sequence[Graph]], list[float]]  # ms of each


def measure(
    device: Device,
    launched: Iterable[Launched],
    row_counts: Iterable[int],
    tactics: Tactics,
    timer: Timer | None = None,
) -> dict[str, Measured]:
    """Of launches with so many rows what `tactics` has not and what has forms to choose from.

    For a thread that is alone in the process, before memory is lent; takes some of the card's and gives it back, and
    leaves out what finds no room, which others may have taken meanwhile. Afterwards the forms of `tactics` are in use.
    Raises HipError.
    """
    found: dict[str, Measured] = {}
    with device.stream(), torch.inference_mode():
        for of, n_rows in product(launched, row_counts):
            key, may_be = of.key(n_rows), forms(of, n_rows)
            is_known = len(may_be) == 1 or key in tactics.measured or key in found
            if is_known or not _Trial.fits(device, of, n_rows):
                continue
            try:
                found[key] = _measured(device, of, n_rows, may_be, timer or graphs_ms)
            except HipError as error:
                if error.name != "hipErrorOutOfMemory":
                    raise
                _log.warning("%s is not measured: %s", key, error)
    use_forms(tactics.forms)
    return found


def _measured(device: Device, of: Launched, n_rows: int, may_be: Sequence[int], timer: Timer) -> Measured:
    trial, graphs = _Trial.of(device, of, n_rows), []
    try:
        for form in may_be:
            use_forms({of.key(n_rows): form})
            trial.calls[0]()  # compiles and loads
            with capture() as graph:
                for call in trial.calls:
                    call()
            graphs.append(graph)
        us = [1e3 * ms / len(trial.calls) for ms in timer(graphs)]
    finally:
        device.synchronize()
        for graph in graphs:
            graph.close()
        trial.slab.free()
    best = us.index(min(us))
    is_worth_it = us[best] < (1 - LEAST_GAIN) * us[0]
    return Measured(
        may_be[best if is_worth_it else 0], {str(form): round(t, 2) for form, t in zip(may_be, us, strict=True)}
    )


def graphs_ms(graphs: Sequence[Graph]) -> list[float]:
    """Device time, the median of REPEATS. By turns: a card's clock rises while it is measured."""
    spans: list[list[tuple[Event, Event]]] = [[] for _ in graphs]
    for _ in range(1 + REPEATS):
        for graph, own in zip(graphs, spans, strict=True):
            began = Event(timed=True).record()
            graph.launch()
            own.append((began, Event(timed=True).record()))
    spans[-1][-1][1].synchronize()
    return [median(ended.ms_since(began) for began, ended in own[1:]) for own in spans]


@dataclass(frozen=True)
class _Trial:
    """A launch over several weights in turn, in memory of its own; what it multiplies is zeros."""

    slab: Slab
    calls: list[Callable[[], None]]

    @staticmethod
    def sizes(of: Launched, n_rows: int) -> tuple[int, list[int], list[int]]:
        """Sets of weights; bytes of one's weights; of rows, outputs, and the workspace of the form that wants most."""
        weights = [size for shape in of.shapes for size in tile_bytes(of.kind, shape)]
        n_sets = min(MOST_SETS, -(-ROTATED_BYTES // sum(weights)))
        groups, _, n_blocks = of.shapes[0]
        outs = [2 * n_rows * n_groups * n_out for n_groups, n_out, _ in of.shapes]
        use_forms({})  # the rules', which want the most
        floats = workspace_floats(n_rows, *(WeightTiles.of_shape(of.kind, shape) for shape in of.shapes))
        return n_sets, weights, [2 * n_rows * groups * n_blocks * 32, *outs, 4 * floats]

    @classmethod
    def fits(cls, device: Device, of: Launched, n_rows: int) -> bool:
        n_sets, weights, others = cls.sizes(of, n_rows)
        n_bytes = n_sets * sum(weights) + sum(others)
        return sum(weights) <= MOST_WEIGHT_BYTES and n_bytes + SPARE_BYTES <= device.memory().free_bytes

    @classmethod
    def of(cls, device: Device, launched: Launched, n_rows: int) -> _Trial:
        n_sets, weights, others = cls.sizes(launched, n_rows)
        sizes = [*others, *(weights * n_sets)]
        slab = device.allocate(sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes) or ALIGNMENT)
        fill_async(slab.address, 0, slab.n_bytes)
        pieces = _pieces(slab.tensor(), sizes)
        x_bf16 = next(pieces).view(torch.bfloat16).view(n_rows, -1)
        outs = [next(pieces).view(torch.bfloat16).view(n_rows, -1) for _ in launched.shapes]
        room_f32 = next(pieces).view(torch.float32)

        def tiles(shape: tuple[int, int, int]) -> WeightTiles:
            return WeightTiles.of_shape(launched.kind, shape, next(pieces), next(pieces))

        def call(products: Sequence[Product]) -> Callable[[], None]:
            return lambda: multiply_together("tactics", x_bf16, products, room_f32)

        sets = [
            [Product(tiles(shape), out) for shape, out in zip(launched.shapes, outs, strict=True)]
            for _ in range(n_sets)
        ]
        return cls(slab, [call(products) for products in sets])


def _pieces(bytes_u8: Tensor, sizes: Iterable[int]) -> Iterator[Tensor]:
    at = 0
    for size in sizes:
        yield bytes_u8[at : at + size]
        at += -(-size // ALIGNMENT) * ALIGNMENT
