"""Decoded weights, kept from call to call: decoding one takes as long as a decode step's product with it.

For the torch references on the host alone, and for small models: what does not fit is made anew each time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable

from torch import Tensor

MOST_BYTES = 256 << 20

Made = tuple[Tensor, ...]


class Kept:
    """What was made of tensors, for as long as these live and nothing is written to them. For all threads."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes, self.n_bytes = most_bytes, 0
        self._made: dict[Hashable, tuple[weakref.ref[Tensor], int, Made]] = {}
        self._lock = threading.RLock()  # a tensor may die, and _drop be called, inside it

    def of(self, source: Tensor, which: Hashable, make: Callable[[], Made]) -> Made:
        """make(), or what it returned before for this source and `which`."""
        if source.is_inference() or not source.is_cpu:  # the former do not say when they are written to
            return make()
        key = id(source), which
        found = self._made.get(key)
        if found is not None and found[0]() is source and found[1] == source._version:
            return found[2]
        version, made = source._version, make()
        n_bytes = sum(tensor.nbytes for tensor in made)
        with self._lock:
            self._drop(key)
            if self.n_bytes + n_bytes <= self.most_bytes:
                self._made[key] = weakref.ref(source, lambda _: self._drop(key)), version, made
                self.n_bytes += n_bytes
        return made

    def _drop(self, key: Hashable) -> None:
        with self._lock:
            if (gone := self._made.pop(key, None)) is not None:
                self.n_bytes -= sum(tensor.nbytes for tensor in gone[2])


kept = Kept()
