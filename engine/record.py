"""A hook on intermediate values, so that conformance can compare a layer field by field."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Recorder(Protocol):
    """Called with a layer, a field's name and its value, which is only lent: copy what you keep."""

    def __call__(self, layer: int, field: str, value: Tensor) -> None: ...


def ignore(layer: int, field: str, value: Tensor) -> None:
    """The recorder of a run that nobody watches."""
