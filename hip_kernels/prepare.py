"""Weights made once, at load, into what the kernels of their operators read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from rocline.hip_kernels.experts_hip import ExpertWeights, prepare_fp4_weights
from rocline.hip_kernels.linear import Fp4Weight, Fp8Weight
from rocline.hip_kernels.linear_hip import prepare_bf16_weight, prepare_fp8_weight
from rocline.hip_kernels.mhc_hip import prepare_projection
from rocline.hip_kernels.uploader import Source


class Placing(Protocol):
    def placed(self, weight: Any) -> Any:
        """As Choice.placed."""

    def each(self, parts: Iterable[Sequence[Source]]) -> Iterable[Sequence[Tensor]]:
        """As Choice.each."""


def _placed(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """A weight is put whole before it is prepared; numbers pass as they are."""
    return lambda place, *weights: prepare(*map(place.placed, weights))


def _prepare_experts(
    place: Placing, routed: Sequence[Fp4Weight], shared: Sequence[Fp8Weight]
) -> tuple[ExpertWeights, ExpertWeights]:
    return (
        ExpertWeights(*prepare_fp4_weights(routed, place.each)),
        ExpertWeights(*(prepare_fp8_weight(place.placed(weight)) for weight in shared)),
    )


# Called with what places weights, which are on the host or stored.
PREPARE: Mapping[str, Callable[..., Any]] = {
    "bf16_linear": _placed(prepare_bf16_weight),
    "experts": _prepare_experts,
    "f32_linear": _placed(prepare_bf16_weight),
    "fp8_linear": _placed(prepare_fp8_weight),
    "grouped_projection": _placed(prepare_fp8_weight),
    "head": _placed(prepare_bf16_weight),
    "index_key": _placed(prepare_bf16_weight),
    "index_weights": _placed(prepare_bf16_weight),
    "mhc_enter": _placed(prepare_projection),
    "mhc_merge_enter": _placed(prepare_projection),
    "router": _placed(prepare_bf16_weight),
}
