"""Engram: n-gram hash, table rows, and the gated addition to the streams (backbone.md section 11.3 to 11.5)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, in_vectors, is_shapes_only, operator, run_slabs
from rocline.hip_kernels.formats import e4m3_decode, e8m0_decode
from rocline.hip_kernels.linear import Fp8Weight, fp8_linear
from rocline.hip_kernels.mhc import mhc_merge

GATE_FLOOR = 1e-6


def engram_hash(
    lookback_i64: Tensor,
    multipliers_i64: Tensor,
    primes_i64: Tensor,
    offsets_i64: Tensor,
    pad: int,
    rows_i64: Tensor,
) -> None:
    """Fill rows_i64 [R, C]: the table row of every column, n-gram size major, head minor.

    lookback_i64     [R, N] compressed ids at positions p, p-1, … p-N+1; -1 where dead or before the start
    multipliers_i64  [N]; primes_i64, offsets_i64 [C]
    pad              compressed id that stands for a blocked lookback: everything from the first -1 on
    """
    bind_dims(
        "engram_hash",
        "R",
        {
            "lookback_i64 R N": lookback_i64,
            "multipliers_i64 N": multipliers_i64,
            "primes_i64 C": primes_i64,
            "offsets_i64 C": offsets_i64,
            "rows_i64 R C": rows_i64,
        },
    )
    if not is_shapes_only():
        columns = multipliers_i64.numpy(), primes_i64.numpy(), offsets_i64.numpy()
        rows_i64.numpy()[:] = engram_hash_ref(lookback_i64.numpy(), *columns, pad)


def engram_hash_ref(
    lookback_i64: NDArray, multipliers_i64: NDArray, primes_i64: NDArray, offsets_i64: NDArray, pad: int
) -> NDArray:
    """rows [R, C] int64; see engram_hash for the shapes. By numpy: a step's few rows take torch five times as long."""
    n_sizes = len(multipliers_i64) - 1
    blocked = np.logical_or.accumulate(lookback_i64 < 0, axis=1)
    terms = np.where(blocked, pad, lookback_i64) * multipliers_i64  # below 2^63 by the multipliers' bound
    mixed = np.bitwise_xor.accumulate(terms, axis=1)[:, 1:, None]
    rows: NDArray = mixed % primes_i64.reshape(n_sizes, -1) + offsets_i64.reshape(n_sizes, -1)
    return rows.reshape(len(rows), len(primes_i64))


def engram_gather(rows_i64: Tensor, codes_e4m3: Tensor, scales_e8m0: Tensor, out_bf16: Tensor) -> None:
    """Fill out_bf16 [R, C * d] with table rows rows_i64 [R, C], in column order.

    codes_e4m3 [rows, d], scales_e8m0 [rows, d/32]: one scale per row per 32 channels, not per tile.
    """
    bind_dims(
        "engram_gather",
        "R",
        {
            "rows_i64 R C": rows_i64,
            "codes_e4m3 N D": codes_e4m3,
            "scales_e8m0 N G": scales_e8m0,
            "out_bf16 R W": out_bf16,
        },
    )
    run_slabs(lambda rows: engram_gather_ref(rows, codes_e4m3, scales_e8m0), (rows_i64,), out_bf16)


def engram_gather_ref(rows_i64: Tensor, codes_e4m3: Tensor, scales_e8m0: Tensor) -> Tensor:
    """[R, C * d] FP32, exact in BF16; see engram_gather for the shapes."""
    return engram_decode_ref(codes_e4m3[rows_i64], scales_e8m0[rows_i64]).flatten(1)


@operator
def engram_decode(codes_e4m3: Tensor, scales_e8m0: Tensor, out_bf16: Tensor) -> None:
    """Fill out_bf16 [N, d] from table rows that the host has gathered: codes_e4m3 [N, d], scales_e8m0 [N, d/32]."""
    bind_dims(
        "engram_decode",
        "N",
        {"codes_e4m3 N D": codes_e4m3, "scales_e8m0 N G": scales_e8m0, "out_bf16 N D": out_bf16},
    )
    run_slabs(engram_decode_ref, (codes_e4m3, scales_e8m0), out_bf16)


def engram_decode_ref(codes_e4m3: Tensor, scales_e8m0: Tensor) -> Tensor:
    """[..., d] FP32, exact in BF16, from codes_e4m3 [..., d] and scales_e8m0 [..., d/32]."""
    codes_f32 = e4m3_decode(codes_e4m3).unflatten(-1, (scales_e8m0.shape[-1], -1))
    return (codes_f32 * e8m0_decode(scales_e8m0).unsqueeze(-1)).flatten(-2)


def engram_gate_ref(
    streams_bf16: Tensor,
    kv_bf16: Tensor,
    q_weight_bf16: Tensor,
    k_weight_bf16: Tensor,
    alive_u8: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """New streams [R, n, D] BF16 and gates [R, n] FP32.

    streams_bf16 [R, n, D]; kv_bf16 [R, (n+1) * D], n keys and one value; weights [n, D]; alive_u8 [R], 0 forces gate 0.
    """
    n_streams, width = streams_bf16.shape[1:]
    kv_f32 = kv_bf16.float().unflatten(1, (n_streams + 1, width))
    keys, value = kv_f32[:, :n_streams], kv_f32[:, n_streams]
    x_f32 = streams_bf16.float()
    inverse = torch.rsqrt(x_f32.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    dot = (x_f32 * (q_weight_bf16.float() * k_weight_bf16.float()) * keys).sum(-1) * inverse * width**-0.5
    gate = in_vectors(torch.sigmoid, torch.copysign(dot.abs().clamp_min(GATE_FLOOR).sqrt(), dot))
    gate = gate.where(alive_u8[:, None] != 0, 0)
    return (x_f32 + gate[:, :, None] * value[:, None]).bfloat16(), gate


@operator
def engram_gate(
    streams_bf16: Tensor,
    kv_bf16: Tensor,
    q_weight_bf16: Tensor,
    k_weight_bf16: Tensor,
    alive_u8: Tensor,
    eps: float,
    out_bf16: Tensor,
    gates_f32: Tensor,
) -> None:
    """Fill out_bf16 [R, n, D], which may be streams_bf16 itself, and gates_f32 [R, n]; see engram_gate_ref."""
    bind_dims(
        "engram_gate",
        "R",
        {
            "streams_bf16 R N D": streams_bf16,
            "kv_bf16 R W": kv_bf16,
            "q_weight_bf16 N D": q_weight_bf16,
            "k_weight_bf16 N D": k_weight_bf16,
            "alive_u8 R": alive_u8,
            "out_bf16 R N D": out_bf16,
            "gates_f32 R N": gates_f32,
        },
    )
    run_slabs(
        lambda streams, kv, alive: engram_gate_ref(streams, kv, q_weight_bf16, k_weight_bf16, alive, eps),
        (streams_bf16, kv_bf16, alive_u8),
        out_bf16,
        gates_f32,
    )


@operator
def engram_merge(
    streams_bf16: Tensor,
    sublayer_bf16: Tensor | None,
    post_f32: Tensor | None,
    comb_f32: Tensor | None,
    kv_bf16: Tensor,
    q_weight_bf16: Tensor,
    k_weight_bf16: Tensor,
    lookback_i32: Tensor,
    eps: float,
    gates_f32: Tensor,
) -> None:
    """mhc_merge of a sublayer's output into streams_bf16 [R, n, D], if one is given, and engram_gate; both in place.

    lookback_i32 [R, N] token ids, of which a negative first one forces gate 0.
    """
    if sublayer_bf16 is not None and post_f32 is not None and comb_f32 is not None:
        mhc_merge(sublayer_bf16, streams_bf16, post_f32, comb_f32, streams_bf16)
    alive_u8 = (lookback_i32[:, 0] >= 0).to(torch.uint8)
    engram_gate(streams_bf16, kv_bf16, q_weight_bf16, k_weight_bf16, alive_u8, eps, streams_bf16, gates_f32)


@operator
def engram_add(
    codes_e4m3: Tensor,
    scales_e8m0: Tensor,
    wkv: Fp8Weight,
    values_bf16: Tensor,
    kv_bf16: Tensor,
    streams_bf16: Tensor,
    sublayer_bf16: Tensor | None,
    post_f32: Tensor | None,
    comb_f32: Tensor | None,
    q_weight_bf16: Tensor,
    k_weight_bf16: Tensor,
    lookback_i32: Tensor,
    eps: float,
    gates_f32: Tensor,
) -> None:
    """engram_decode of table rows, fp8_linear with wkv, and engram_merge.

    codes_e4m3   [R, C, d], scales_e8m0 [R, C, d/32]
    values_bf16  [R, C * d] and kv_bf16 [R, (n+1) * D] are room for what lies between
    """
    by_column_bf16 = values_bf16.view(-1, codes_e4m3.shape[2])
    engram_decode(codes_e4m3.flatten(0, 1), scales_e8m0.flatten(0, 1), by_column_bf16)
    fp8_linear(values_bf16, wkv, kv_bf16)
    at_end = q_weight_bf16, k_weight_bf16, lookback_i32, eps, gates_f32
    engram_merge(streams_bf16, sublayer_bf16, post_f32, comb_f32, kv_bf16, *at_end)
