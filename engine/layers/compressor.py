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
from rocline.hip_kernels.linear import bf16_linear, f32_linear
from rocline.hip_kernels.rmsnorm import rmsnorm
from rocline.hip_kernels.source_ops import source_rows


@dataclass(frozen=True)
class CompressorWeights:
    """wkv_bf16 [hd, D], at ratio 2 [2 hd, D] with gates after values; norm_bf16 [hd]; for keys wk_bf16 [d, hd],
    k_norm_bf16 [d]."""

    wkv_bf16: Tensor
    norm_bf16: Tensor
    wk_bf16: Tensor
    k_norm_bf16: Tensor


def projection_room(config: TextConfig, ratio: int, n_rows: int) -> Tensor:
    """For what wkv makes of rows: [R, hd] BF16 of a ratio-1 source, [R, 2, hd] FP32 values and gates of a ratio-2 one's
    tokens."""
    return scratch.bf16(n_rows, config.head_dim) if ratio == 1 else scratch.f32(n_rows, 2, config.head_dim)


def projection(config: TextConfig, weights: CompressorWeights, ratio: int, u_bf16: Tensor) -> Tensor:
    """What wkv makes of u_bf16 [R, D], as projection_room has it."""
    out = projection_room(config, ratio, len(u_bf16))
    (bf16_linear if ratio == 1 else f32_linear)(u_bf16, weights.wkv_bf16, out.flatten(1))
    return out


def pooled_latent(
    config: TextConfig, weights: CompressorWeights, ring: Ring, span: RowSpan, fresh_f32: Tensor
) -> Tensor:
    """[J, hd] BF16 latents of the pairs that the span closes; its tokens [n_rows, 2, hd] go into the ring."""
    n_rows, _, width = fresh_f32.shape
    n_held = span.start % 2 if span.keeps_rows else 0
    tokens_f32 = scratch.f32(n_held + n_rows, 2, width)
    tokens_f32[:n_held] = ring.read(span.start - n_held, span.start)
    tokens_f32[n_held:] = fresh_f32
    if n_rows:
        ring.append(span.start, fresh_f32)
    n_pairs = (n_held + n_rows) // 2 if span.keeps_rows else 0
    pairs_f32 = tokens_f32[: 2 * n_pairs].unflatten(0, (n_pairs, 2))
    latent_bf16 = scratch.bf16(n_pairs, width)
    pool_pairs(pairs_f32[:, :, 0], pairs_f32[:, :, 1], weights.norm_bf16, config.rms_norm_eps, latent_bf16)
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
    into = Places(pools.rows_u8, groups.positions_i32, groups.sequences_i32, page_tables_i32)
    rows = source, weights.norm_bf16, eps, made.latent_bf16, *turn, made.rows_u8, into
    source_rows(*rows, weights.wk_bf16, weights.k_norm_bf16, made.keys_u8, pools.keys_u8, pools.prepared_u8)
    return made


def single_latent(config: TextConfig, weights: CompressorWeights, u_bf16: Tensor) -> Tensor:
    """[R, hd] BF16 latents of a ratio-1 source."""
    latent_bf16 = projection(config, weights, 1, u_bf16)
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
