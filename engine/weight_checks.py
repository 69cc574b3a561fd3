"""Values a loader refuses by name: what the exactness of every linear rests on (design.md section 4).

A code times its scale must be exact in BF16, that is zero or a normal number, and no weight may be NaN or
infinite. The checks take row ranges as `Checkpoint.read` delivers them.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from rocline.engine.config import GROUP
from rocline.engine.shards import CheckpointError
from rocline.hip_kernels.formats import E8M0_NAN, e2m1x2_decode, e4m3_decode

Codes = Literal["e4m3", "e2m1x2"]

_MIN_EXPONENT, _MAX_EXPONENT = -126, 127  # of BF16's normal numbers
_CODE_BYTES_AT_ONCE = 1 << 22  # looked up together where scales are extreme


def check_finite(name: str, values: Tensor, row_start: int = 0) -> None:
    """Refuse NaN and infinity in a BF16 or F32 weight. Raises CheckpointError with the first place."""
    lowest_and_highest = torch.stack(values.aminmax())  # NaN shows as well, 15 times faster than isfinite of all
    if not lowest_and_highest.isfinite().all():
        bad = ~values.isfinite()
        place = _first(bad, row_start)
        raise _refused(name, f"{values[bad][0].item()} at {place}, {int(bad.sum()):,} not finite")


def check_quantised(name: str, kind: Codes, codes_u8: Tensor, scales_e8m0: Tensor, row_start: int = 0) -> None:
    """Refuse NaN codes, NaN scales, and non-zero products outside BF16's normal range.

    kind         "e4m3": a code a byte; "e2m1x2": two, the even element low
    codes_u8     [N, bytes of a row]
    scales_e8m0  [N, groups of 32 channels], or [ceil(N/32), groups] where 32 rows share a scale
    row_start    of codes_u8 in its tensor, for the message

    Scale bytes alone clear almost every weight: any E4M3 code goes with bytes 10..246, any E2M1 code with
    2..252. Raises CheckpointError with the tensor, the place and the values.
    """
    n_rows = codes_u8.shape[0]
    scale_rows = 1 if scales_e8m0.shape[0] == n_rows else GROUP
    if int(scales_e8m0.amax()) == E8M0_NAN:
        place = _first(scales_e8m0 == E8M0_NAN, row_start // scale_rows)
        raise _refused(name, f"scale byte 255 (NaN) at scale {place}")
    # The two NaN codes are the largest bytes there are, one unsigned, the other signed.
    if kind == "e4m3" and (codes_u8.amax() == 0xFF or codes_u8.view(torch.int8).amax() == 0x7F):
        nan = (codes_u8 & 0x7F) == 0x7F
        raise _refused(name, f"code 0x{int(codes_u8[nan][0]):02X} (NaN) at {_first(nan, row_start)}")
    if scales_suit_every_code(kind, scales_e8m0):
        return
    low, high = _scale_limits(kind)
    extreme = ((scales_e8m0 < low.max()) | (scales_e8m0 > high.min())).any(dim=1).nonzero()[:, 0]
    at_once = max(1, _CODE_BYTES_AT_ONCE // (scale_rows * codes_u8.shape[1]))
    for chunk in extreme.split(at_once):
        rows = (chunk[:, None] * scale_rows + torch.arange(scale_rows)).flatten()
        rows = rows[rows < n_rows]  # the last tile may be partial
        codes = codes_u8[rows]
        group_bytes = GROUP if kind == "e4m3" else GROUP // 2
        scales = scales_e8m0[rows // scale_rows].repeat_interleave(group_bytes, dim=1)[:, : codes.shape[1]]
        wrong = (scales < low[codes.int()]) | (scales > high[codes.int()])
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            code, scale = int(codes[row, column]), int(scales[row, column])
            place = [row_start + int(rows[row]), column]
            raise _refused(name, f"code byte 0x{code:02X} times scale byte {scale} at {place} is no normal BF16")


def scales_suit_every_code(kind: Codes, scales_e8m0: Tensor) -> bool:
    """Whether no code that is a number goes wrong with any of these scales."""
    low, high = _scale_limits(kind)
    lowest, highest = (int(scale) for scale in scales_e8m0.aminmax())
    return lowest >= int(low.max()) and highest <= int(high.min())


def _refused(name: str, text: str) -> CheckpointError:
    return CheckpointError(name, {"unusable values": [text]})


def _first(mask: Tensor, row_start: int) -> list[int]:
    place = mask.nonzero()[0].tolist()
    return [place[0] + row_start, *place[1:]]


@cache
def _scale_limits(kind: Codes) -> tuple[Tensor, Tensor]:
    """Smallest and largest E8M0 byte that keeps each code byte's products normal, uint8 [256] each.

    A zero takes every scale but NaN. A significand has 4 bits at most, so BF16 loses none.
    """
    code_bytes = torch.arange(256, dtype=torch.uint8)
    values = e4m3_decode(code_bytes)[:, None] if kind == "e4m3" else e2m1x2_decode(code_bytes[:, None])
    exponents = torch.frexp(values).exponent - 1  # |value| = 1.x * 2^exponent
    nonzero = (values != 0) & values.isfinite()
    low = torch.where(nonzero, _MIN_EXPONENT + 127 - exponents, 0).amax(-1)
    high = torch.where(nonzero, _MAX_EXPONENT + 127 - exponents, E8M0_NAN - 1).amin(-1)
    return low.clamp(min=0).to(torch.uint8), high.clamp(max=E8M0_NAN - 1).to(torch.uint8)
