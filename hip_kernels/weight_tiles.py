"""Weights in the order in which the matrix kernels read them: made once at load, still codes.

A tile is 16 output columns x 32 input channels; tiles follow each other along the channels, then along the columns,
then by group. A lane's 16 codes lie together, in the order of the device's matrix fragments (weight_tiles.hip.h), and
inside a 32-bit word so that two at a time come out by one shift. So tiles are of the device that prepared them, and
nothing else reads them.

  kind    bytes of a tile  scales of a tile
  e4m3    512              2, of 8 columns each
  e2m1    256              16, of a column each
  bf16    1024             none
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from rocline.hip_kernels.binding import BindError

TILE, STEP = 16, 32
Kind = Literal["e4m3", "e2m1", "bf16"]
_BYTES: dict[Kind, tuple[int, int]] = {"e4m3": (512, 2), "e2m1": (256, 16), "bf16": (1024, 0)}
# Above these, 2^7 and 2, a code's factor would leave the exponents of BF16; scales of weights are far below 1.
MOST_SCALE: dict[Kind, int] = {"e4m3": 134, "e2m1": 128}


@dataclass(frozen=True)
class WeightTiles:
    """A weight of `groups` x [n_out, n_in], prepared.

    codes_u8   [groups, ceil(n_out / 16), n_in / 32, bytes of a tile]
    scales_u8  [groups, ceil(n_out / 16), n_in / 32, scales of a tile]
    """

    kind: Kind
    codes_u8: Tensor
    scales_u8: Tensor
    n_out: int

    @cached_property  # as what follows from it: asking a tensor takes longer, and every launch asks
    def shape(self) -> tuple[int, int, int]:
        """groups, n_out, n_blocks."""
        return self.codes_u8.shape[0], self.n_out, self.codes_u8.shape[2]

    @cached_property
    def groups(self) -> int:
        return self.shape[0]

    @cached_property
    def n_blocks(self) -> int:
        """Tiles along the channels."""
        return self.shape[2]

    @cached_property
    def n_in(self) -> int:
        return self.n_blocks * STEP

    @property
    def n_lanes(self) -> int:
        """Pieces of 16 codes, which is what a thread prepares."""
        return self.codes_u8.shape[:3].numel() * 32

    @staticmethod
    def of_shape(
        kind: Kind, shape: tuple[int, int, int], codes_u8: Tensor | None = None, scales_u8: Tensor | None = None
    ) -> WeightTiles:
        """Of such a `shape`, in these bytes, of which tile_bytes says how many; without any as a shape alone."""
        groups, n_out, n_blocks = shape
        code_bytes, n_scales = _BYTES[kind]
        in_tiles = groups, -(-n_out // TILE), n_blocks

        def placed(n_bytes: int, bytes_u8: Tensor | None) -> Tensor:
            if bytes_u8 is None:
                return torch.empty((*in_tiles, n_bytes), dtype=torch.uint8, device="meta")
            return bytes_u8.view(*in_tiles, n_bytes)

        return WeightTiles(kind, placed(code_bytes, codes_u8), placed(n_scales, scales_u8), n_out)

    @staticmethod
    def empty(kind: Kind, groups: int, n_out: int, n_in: int, device: torch.device) -> WeightTiles:
        """Room for one. Raises BindError where the shape has no tiles."""
        if n_in % STEP or (kind == "e4m3" and groups > 1 and n_out % 8):
            raise BindError(
                f"weight_tiles: {groups} x [{n_out}, {n_in}] {kind}; channels come in {STEP}s, and the rows of several "
                "groups in 8s, which share a scale"
            )
        code_bytes, n_scales = _BYTES[kind]
        shape = (groups, -(-n_out // TILE), n_in // STEP)
        codes_u8 = torch.empty((*shape, code_bytes), dtype=torch.uint8, device=device)
        return WeightTiles(kind, codes_u8, torch.empty((*shape, n_scales), dtype=torch.uint8, device=device), n_out)


def tile_bytes(kind: Kind, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Bytes of the codes and of the scales of a weight of such a `shape` (WeightTiles.shape)."""
    groups, n_out, n_blocks = shape
    n_tiles = groups * -(-n_out // TILE) * n_blocks
    return n_tiles * _BYTES[kind][0], n_tiles * _BYTES[kind][1]


def check_scales(op: str, kind: Kind, scales_e8m0: Tensor) -> None:
    """Raise BindError for a scale that the kernels cannot decode; waits for the device, so for load time only."""
    if scales_e8m0.is_meta:  # a shape alone
        return
    most = int(scales_e8m0.max()) if scales_e8m0.numel() else 0
    if most > MOST_SCALE[kind]:
        raise BindError(
            f"{op}: a scale of 2^{most - 127} (code {most}), want at most 2^{MOST_SCALE[kind] - 127}; "
            "the weight is broken, or run this operator's torch reference"
        )
