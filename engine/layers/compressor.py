"""A key/value source's own rows: compressed rows and index keys of the pairs that close (backbone.md section 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import LayerRole, TextConfig
from rocline.engine.handoff import FreshRows, RowSpan
from rocline.engine.pages import Pools
from rocline.engine.record import Recorder
from rocline.engine.rope_rows import RopeTables
from rocline.engine.row_tables import GroupPlaces
from rocline.engine.sequence import Ring
from rocline.hip_kernels.compressor import compressed_row, pool_pairs
from rocline.hip_kernels.compressor_hip import Pairs, Places
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.index_vectors import index_key
from rocline.hip_kernels.linear import bf16_linear
from rocline.hip_kernels.rmsnorm import rmsnorm
from rocline.hip_kernels.source_ops import compress_rows, f32_linear_pair, key_rows


@dataclass(frozen=True)
class CompressorWeights:
    """wkv_bf16, wgate_bf16 [hd, D] (no gate at ratio 1), norm_bf16 [hd]; for keys wk_bf16 [d, hd], k_norm_bf16 [d]."""

    wkv_bf16: Tensor
    wgate_bf16: Tensor | None
    norm_bf16: Tensor
    wk_bf16: Tensor
    k_norm_bf16: Tensor


def pair_rows(config: TextConfig, weights: CompressorWeights, u_bf16: Tensor) -> Tensor:
    """[2, R, hd] FP32: values, then gates, of the tokens u_bf16 [R, D] of a ratio-2 source."""
    assert weights.wgate_bf16 is not None
    planes_f32 = scratch.f32(2, len(u_bf16), config.head_dim)
    f32_linear_pair(u_bf16, weights.wkv_bf16, planes_f32[0], weights.wgate_bf16, planes_f32[1])
    return planes_f32


def pooled_latent(
    config: TextConfig, weights: CompressorWeights, ring: Ring, span: RowSpan, planes_f32: Tensor
) -> Tensor:
    """[J, hd] BF16 latents of the pairs that the span closes; its tokens [2, n_rows, hd] go into the ring."""
    _, n_rows, width = planes_f32.shape
    n_held = span.start % 2 if span.keeps_rows else 0
    tokens_f32 = scratch.f32(2, n_held + n_rows, width)
    tokens_f32[:, :n_held] = ring.read(span.start - n_held, span.start).transpose(0, 1)
    tokens_f32[:, n_held:] = planes_f32
    if n_rows:
        ring.append(span.start, planes_f32.transpose(0, 1))
    n_pairs = (n_held + n_rows) // 2 if span.keeps_rows else 0
    values_f32, gates_f32 = tokens_f32[:, : 2 * n_pairs].unflatten(1, (n_pairs, 2))
    latent_bf16 = scratch.bf16(n_pairs, width)
    pool_pairs(values_f32, gates_f32, weights.norm_bf16, config.rms_norm_eps, latent_bf16)
    return latent_bf16


class Made(NamedTuple):
    """latent_bf16 [J, hd], rows_u8 and keys_u8 [J, bytes] of all groups that close."""

    latent_bf16: Tensor
    rows_u8: Tensor
    keys_u8: Tensor


def store_rows(
    config: TextConfig,
    weights: CompressorWeights,
    source: Pairs | Tensor,
    groups: GroupPlaces,
    page_tables_i32: Tensor,
    pools: Pools,
) -> Made:
    """Rows and keys of every sequence's groups, made and stored at once.

    source  pairs of a ratio-2 source's tokens, or projections [R, hd] of a ratio-1 source
    """
    n_groups, eps, turn = len(groups.positions_i32), config.rms_norm_eps, (groups.cos_f32, groups.sin_f32)
    made = Made(
        scratch.bf16(n_groups, config.head_dim),
        scratch.u8(n_groups, RowFormat("compressed", config.head_dim).row_bytes),
        scratch.u8(n_groups, RowFormat("index_key", config.index_head_dim).row_bytes),
    )
    through = groups.positions_i32, groups.sequences_i32, page_tables_i32
    into = Places(pools.rows_u8, *through)
    compress_rows(source, weights.norm_bf16, eps, made.latent_bf16, *turn, made.rows_u8, into)
    into = Places(pools.keys_u8, *through)
    norm_bf16 = weights.k_norm_bf16
    key_rows(made.latent_bf16, weights.wk_bf16, norm_bf16, eps, *turn, made.keys_u8, into, pools.prepared_u8)
    return made


def latent_projection(config: TextConfig, weights: CompressorWeights, u_bf16: Tensor) -> Tensor:
    """[R, hd] BF16 of a ratio-1 source's rows."""
    projected_bf16 = scratch.bf16(len(u_bf16), config.head_dim)
    bf16_linear(u_bf16, weights.wkv_bf16, projected_bf16)
    return projected_bf16


def single_latent(config: TextConfig, weights: CompressorWeights, u_bf16: Tensor) -> Tensor:
    """[R, hd] BF16 latents of a ratio-1 source."""
    latent_bf16 = latent_projection(config, weights, u_bf16)
    rmsnorm(latent_bf16, weights.norm_bf16, config.rms_norm_eps, latent_bf16)
    return latent_bf16


def fresh_rows(
    config: TextConfig,
    weights: CompressorWeights,
    role: LayerRole,
    tables: RopeTables,
    span: RowSpan,
    latent_bf16: Tensor,
    record: Recorder,
) -> FreshRows:
    """Rows and keys of latents [J, hd], the first of which is the first that the span closes.

    The key comes from the un-rotated latent; both are rotated at the first token of their group.
    """
    first = span.start // role.ratio
    positions_i32 = torch.arange(first, first + len(latent_bf16), dtype=torch.int32) * role.ratio
    turn = tables.rows(positions_i32, role.ratio)
    keys_u8 = scratch.u8(len(latent_bf16), RowFormat("index_key", config.index_head_dim).row_bytes)
    index_key(
        latent_bf16,
        weights.wk_bf16,
        weights.k_norm_bf16,
        config.rms_norm_eps,
        turn.cos_f32,
        turn.sin_f32,
        keys_u8,
    )
    rows_u8 = scratch.u8(len(latent_bf16), RowFormat("compressed", config.head_dim).row_bytes)
    compressed_row(latent_bf16, turn.cos_f32, turn.sin_f32, rows_u8)
    record(role.layer, "lat", latent_bf16)
    record(role.layer, "index_k", keys_u8)
    record(role.layer, "comp_kv", rows_u8)
    return FreshRows(role.layer, span.sequence, first, rows_u8, keys_u8)
