"""Cosines and sines for the rows at hand; a compressed layer has its own table (backbone.md section 5.3)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import TextConfig
from rocline.engine.handoff import gathered
from rocline.hip_kernels.binding import is_shapes_only
from rocline.hip_kernels.rope import rope_frequencies, rope_table, yarn_frequencies

# Three a chunk, for as many as are in flight: each of its visits asks for them. Of a row of the release 256 bytes each.
RANGES_KEPT = 64


class RopeRows(NamedTuple):
    """cos_f32, sin_f32 [R, rope_dim/2]."""

    cos_f32: Tensor
    sin_f32: Tensor

    def pick(self, index: Tensor) -> RopeRows:
        return RopeRows(gathered(self.cos_f32, index), gathered(self.sin_f32, index))


class RopeTables:
    """The two frequency tables of a model: window-only layers, and everything in compressed layers.

    Stages of one model share them (`of`): a chunk's rotations are made once, not in each of its visits.
    """

    def __init__(self, config: TextConfig) -> None:
        scaling, width = config.rope_scaling, config.qk_rope_head_dim
        self.plain_f32 = rope_frequencies(config.rope_theta, width)
        self.compressed_f32 = yarn_frequencies(
            config.compress_rope_theta,
            width,
            scaling.factor,
            scaling.beta_fast,
            scaling.beta_slow,
            scaling.original_max_position_embeddings,
        )
        self._kept = lru_cache(RANGES_KEPT)(self._made)

    @staticmethod
    @lru_cache(4)
    def of(config: TextConfig) -> RopeTables:
        return RopeTables(config)

    def rows(self, positions_i32: Tensor, ratio: int) -> RopeRows:
        """Rows for positions_i32 [R], on the host, in a layer of the given compression ratio."""
        return RopeRows(*scratch.upload_together(*self.on_host(positions_i32, ratio)))

    def on_host(self, positions_i32: Tensor, ratio: int) -> RopeRows:
        """`rows` before they go anywhere: every device class takes its cosines from the host."""
        omega_f32 = self.compressed_f32 if ratio else self.plain_f32
        shape = len(positions_i32), len(omega_f32)
        out = RopeRows(torch.empty(shape), torch.empty(shape))
        rope_table(positions_i32, omega_f32, *out)
        return out

    def of_ranges(self, ranges: Iterable[range], ratio: int) -> RopeRows:
        """on_host of ranges of positions one after the other; to be read only, others have it too."""
        make = self._made if is_shapes_only() else self._kept  # on paper nothing is computed: not to be kept
        return make(tuple(ranges), bool(ratio))

    def _made(self, ranges: tuple[range, ...], is_compressed: bool) -> RopeRows:
        parts = [torch.arange(of.start, max(of.start, of.stop), of.step, dtype=torch.int32) for of in ranges]
        return self.on_host(torch.cat(parts), int(is_compressed))
