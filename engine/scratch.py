"""Where a stage's temporaries come from: one place, so that an arena can stand behind it."""

from __future__ import annotations

import torch
from torch import Tensor


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def f32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32)


def i32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32)


def i64(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def u8(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8)
