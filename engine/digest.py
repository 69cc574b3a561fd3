"""One number for one answer: SHA-256 of output ids and of logits (design.md section 4)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # commands that hash ids alone start seconds sooner without torch
    from torch import Tensor


def ids_sha256(ids: Iterable[int]) -> str:
    """Hex SHA-256 over token ids as little-endian int32, nothing between them."""
    return hashlib.sha256(np.fromiter(ids, dtype="<i4").tobytes()).hexdigest()


class LogitsDigest:
    """Hex SHA-256 over rows of logits as little-endian FP32, in the order they were sampled."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def add(self, logits_f32: Tensor) -> None:
        """Append one row or several: logits_f32 [..., V], on the CPU."""
        self._sha256.update(logits_f32.numpy().astype("<f4", copy=False).tobytes())

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()
