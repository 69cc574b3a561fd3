"""exp and log in FP32 as a fixed sequence of IEEE operations: the same bits on every device.

Library functions differ between devices, and on the CPU between a vector's lanes and its tail. Here every
step is one rounded FP32 operation or an integer one; a kernel repeats them in this order, without fused
multiply-adds. Errors: at most 3 units in the last place.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LN2 = 0.6931471805599453
_LN2_HIGH = 0.693145751953125  # 15 bits, so that times a whole number below 2^9 it is exact
_LN2_LOW = _LN2 - _LN2_HIGH
_EXPONENT_ONE = 127 << 23  # the bits of 1.0
_SQRT_HALF = 0x3F3504F3  # the bits of sqrt(1/2), rounded down
EXP_FLOOR = -86.0  # below it exp_f32 is 0, so no result is subnormal


def log_f32(x_f32: Tensor) -> Tensor:
    """Natural logarithm of positive, finite, normal x_f32 (any shape).

    x = m 2^k with m in [sqrt(1/2), sqrt(2)); log m = 2 (s + s^3/3 + ... + s^9/9) with s = (m - 1) / (m + 1).
    The first term left out is below 2^-28 of the sum.
    """
    bits = x_f32.view(torch.int32) + (_EXPONENT_ONE - _SQRT_HALF)
    k = (bits >> 23) - 127
    m = ((bits & 0x7FFFFF) + _SQRT_HALF).view(torch.float32)
    s = (m - 1) / (m + 1)
    z = s * s
    series = z * (1 / 9) + 1 / 7
    series = series * z + 1 / 5
    series = series * z + 1 / 3
    s = s + s
    return k.float() * _LN2 + (s * (series * z) + s)


def exp_f32(x_f32: Tensor) -> Tensor:
    """e^x of x_f32 (any shape) at most 0, -inf included; exactly 0 below EXP_FLOOR, exactly 1 at 0.

    x = k ln2 + r with |r| <= ln2 / 2; e^r by its Taylor series to r^7, times 2^k in the exponent bits.
    """
    x = x_f32.clamp(min=EXP_FLOOR)
    k = (x * (1 / _LN2)).round()  # half to even
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    series = r * (1 / 5040) + 1 / 720
    for divisor in (120, 24, 6, 2, 1, 1):
        series = series * r + 1 / divisor
    scaled = (series.view(torch.int32) + (k.int() << 23)).view(torch.float32)
    return scaled.masked_fill(x_f32 < EXP_FLOOR, 0.0)
