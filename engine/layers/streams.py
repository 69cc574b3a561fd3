"""Residual streams around a sublayer: coefficients, collapse, merge, Engram's addition (backbone.md section 4, 11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import TextConfig
from rocline.engine.engram import EngramTable
from rocline.engine.engram_ahead import EngramRows
from rocline.engine.record import Recorder
from rocline.hip_kernels.engram import engram_add, engram_gather, engram_merge
from rocline.hip_kernels.linear import Fp8Weight, fp8_linear
from rocline.hip_kernels.mhc import mhc_collapse_norm, mhc_enter, mhc_merge, mhc_merge_enter


class MhcWeights(NamedTuple):
    """fn_f32 [n(n+2), n*D], scale_f32 [3], base_f32 [n(n+2)]."""

    fn_f32: Tensor
    scale_f32: Tensor
    base_f32: Tensor


class Coefficients(NamedTuple):
    """pre_f32, post_f32 [R, n], comb_f32 [R, n, n]."""

    pre_f32: Tensor
    post_f32: Tensor
    comb_f32: Tensor


@dataclass(frozen=True)
class Unmixed:
    """A sublayer's output [R, D] BF16 that has yet to be merged into the streams which entered it."""

    sublayer_bf16: Tensor
    coefficients: Coefficients

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What merging reads."""
        return self.sublayer_bf16, self.coefficients.post_f32, self.coefficients.comb_f32


@dataclass(frozen=True)
class EngramWeights:
    """wkv [(n+1) * D, width] FP8; q_bf16, k_bf16 [n, D]; the table stays on the host."""

    wkv: Fp8Weight
    q_bf16: Tensor
    k_bf16: Tensor
    table: EngramTable


@dataclass(frozen=True)
class Entered:
    """A sublayer's input u_bf16 [R, D] and coefficients.

    rounded_bf16  [R, D] the input through ActQuant8; None on the host, where each linear sees to that
    """

    u_bf16: Tensor
    coefficients: Coefficients
    rounded_bf16: Tensor | None


def enter(config: TextConfig, norm_bf16: Tensor, weights: MhcWeights, streams_bf16: Tensor, pre_f32: Tensor) -> Entered:
    """What enters the sublayer that these streams [R, n, D] are before, collapsed by pre_f32 [R, n]."""
    into, numbers = entering(config, streams_bf16)
    mhc_enter(streams_bf16, pre_f32, norm_bf16, *weights, *numbers, into.u_bf16, *into.coefficients, into.rounded_bf16)
    return into


def merge_enter(
    config: TextConfig, before: Unmixed, norm_bf16: Tensor, weights: MhcWeights, streams_bf16: Tensor
) -> Entered:
    """Merge a sublayer's output into the streams [R, n, D], in place, and enter the next one.

    The next one's input is collapsed by the coefficients of the one before.
    """
    into, numbers = entering(config, streams_bf16)
    pre_f32, post_f32, comb_f32 = before.coefficients
    others = pre_f32, norm_bf16, *weights, *numbers, into.u_bf16, *into.coefficients, into.rounded_bf16
    mhc_merge_enter(before.sublayer_bf16, post_f32, comb_f32, streams_bf16, *others)
    return into


def entering(config: TextConfig, streams_bf16: Tensor) -> tuple[Entered, tuple[float, float, int]]:
    """What enters a sublayer, of streams [R, n, D], to be filled, and the numbers that this takes."""
    n_rows, n, width = streams_bf16.shape
    out = Coefficients(scratch.f32(n_rows, n), scratch.f32(n_rows, n), scratch.f32(n_rows, n, n))
    rounded_bf16 = scratch.bf16(n_rows, width) if scratch.is_on_device() else None
    numbers = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
    return Entered(scratch.bf16(n_rows, width), out, rounded_bf16), numbers


def collapse_norm(config: TextConfig, norm_bf16: Tensor, streams_bf16: Tensor, pre_f32: Tensor) -> Tensor:
    """Streams [R, n, D] as a sublayer takes them, [R, D] BF16, where nothing is merged back."""
    out_bf16 = scratch.bf16(streams_bf16.shape[0], streams_bf16.shape[2])
    mhc_collapse_norm(streams_bf16, pre_f32, norm_bf16, config.rms_norm_eps, out_bf16)
    return out_bf16


def merge(of: Unmixed, streams_bf16: Tensor) -> None:
    """Mix a sublayer's output into the streams [R, n, D], in place."""
    _, post_f32, comb_f32 = of.coefficients
    mhc_merge(of.sublayer_bf16, streams_bf16, post_f32, comb_f32, streams_bf16)


def add_engram(
    config: TextConfig,
    weights: EngramWeights,
    layer: int,
    unmixed: Unmixed | None,
    streams_bf16: Tensor,
    lookback_i32: Tensor,
    ahead: EngramRows | None,
    record: Recorder,
) -> None:
    """Add the gated table value of each row's n-grams to the streams [R, n, D], before the layer's statistics.

    unmixed goes into the streams first. lookback_i32 [R, N] as in HandOff; `ahead` has the table rows where they were
    gathered before.
    """
    record(layer, "x_pre_engram", streams_bf16)
    n_rows, n, width = streams_bf16.shape
    table = weights.table
    sublayer_bf16, post_f32, comb_f32 = unmixed.tensors() if unmixed else (None, None, None)
    values_bf16, kv_bf16 = scratch.bf16(n_rows, config.engram_width), scratch.bf16(n_rows, (n + 1) * width)
    gates_f32 = scratch.f32(n_rows, n)
    at_end = weights.q_bf16, weights.k_bf16, lookback_i32, config.rms_norm_eps, gates_f32
    if ahead:
        rows_i64, codes_e4m3, scales_e8m0 = ahead.take(layer)
        of_table = codes_e4m3, scales_e8m0, weights.wkv, values_bf16, kv_bf16
        engram_add(*of_table, streams_bf16, sublayer_bf16, post_f32, comb_f32, *at_end)
    else:
        rows_i64 = scratch.i64(n_rows, len(table.primes_i64))
        table.hash_rows(lookback_i32, rows_i64)
        engram_gather(rows_i64, table.codes_e4m3, table.scales_e8m0, values_bf16)
        fp8_linear(values_bf16, weights.wkv, kv_bf16)
        engram_merge(streams_bf16, sublayer_bf16, post_f32, comb_f32, kv_bf16, *at_end)
    record(layer, "engram.rows", rows_i64)
    record(layer, "engram.gate", gates_f32)
