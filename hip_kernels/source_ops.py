"""What a key/value source makes, and what its readers look for, in as few launches as kernels can.

As in layer_ops.py the references are other operators one by one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rocline.hip_kernels.binding import operator
from rocline.hip_kernels.compressor import compressed_row, pool_pairs
from rocline.hip_kernels.compressor_hip import Pairs, Places
from rocline.hip_kernels.index_prepared import Slots, index_prepare
from rocline.hip_kernels.index_vectors import index_key, index_query, index_weights, weight_scale
from rocline.hip_kernels.linear import Fp8Weight, bf16_linear, f32_linear, fp8_linear
from rocline.hip_kernels.rmsnorm import rmsnorm
from rocline.hip_kernels.rope import rope
from rocline.hip_kernels.rows import put_rows


@operator
def source_and_weights(
    u_bf16: Tensor, wkv_bf16: Tensor, out: Tensor, weights_proj_bf16: Tensor, head_dim: int, weights_bf16: Tensor
) -> None:
    """bf16_linear or f32_linear of u_bf16 [R, D], as `out` [R, N] is, and index_weights before their factor."""
    (f32_linear if out.dtype == torch.float32 else bf16_linear)(u_bf16, wkv_bf16, out)
    index_weights(u_bf16, weights_proj_bf16, head_dim, weights_bf16, False)


@operator
def compress_rows(
    source: Pairs | Tensor,
    norm_bf16: Tensor,
    eps: float,
    latent_bf16: Tensor,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
    places: Places,
) -> None:
    """Latents and compressed rows of J groups: pool_pairs or rmsnorm, compressed_row, put_rows.

    source       Pairs, whose tokens are held in their slots afterwards, or BF16 [J, D] of a ratio-1 source
    latent_bf16  [J, D] and rows_u8 [J, D/2 + D/16] are filled, places too; cos_f32, sin_f32 at the groups' first tokens
    """
    if isinstance(source, Pairs):
        assert source.pair_i32 is not None
        assert source.held_f32 is not None
        assert source.slot_i32 is not None
        tokens_f32 = torch.stack((source.values_f32, source.gates_f32), 1)
        if len(source.pair_i32):
            index = source.pair_i32.long()
            now, before = tokens_f32[index.clamp_min(0)], source.held_f32[(-1 - index).clamp_min(0)]
            pairs_f32 = now.where((index >= 0)[..., None, None], before)
            values_f32, gates_f32 = (pairs_f32[:, :, i].contiguous() for i in range(2))
            pool_pairs(values_f32, gates_f32, norm_bf16, eps, latent_bf16)
        kept = source.slot_i32 >= 0
        source.held_f32[source.slot_i32[kept].long()] = tokens_f32[kept]
    else:
        rmsnorm(source, norm_bf16, eps, latent_bf16)
    compressed_row(latent_bf16, cos_f32, sin_f32, rows_u8)
    put_rows(rows_u8, places.positions_i32, places.sequences_i32, places.page_tables_i32, places.pool_u8)


@operator
def key_rows(
    latent_bf16: Tensor,
    weight_bf16: Tensor,
    norm_bf16: Tensor,
    eps: float,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
    places: Places,
    prepared_u8: Tensor | None = None,
) -> None:
    """index_key of latents [J, D] to rows_u8 [J, bytes], put_rows, and index_prepare into a pool of the same places."""
    index_key(latent_bf16, weight_bf16, norm_bf16, eps, cos_f32, sin_f32, rows_u8)
    positions_i32, sequences_i32, tables_i32 = places.positions_i32, places.sequences_i32, places.page_tables_i32
    put_rows(rows_u8, positions_i32, sequences_i32, tables_i32, places.pool_u8)
    if prepared_u8 is None:
        return
    slots = Slots(positions_i32, sequences_i32, tables_i32, places.pool_u8.shape[1])
    index_prepare(rows_u8[:, None], prepared_u8.flatten(0, 1)[:, None], slots)


@operator
def source_rows(
    source: Pairs | Tensor,
    norm_bf16: Tensor,
    eps: float,
    latent_bf16: Tensor,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
    places: Places,
    key_weight_bf16: Tensor,
    key_norm_bf16: Tensor,
    keys_u8: Tensor,
    key_pool_u8: Tensor,
    prepared_u8: Tensor | None = None,
) -> None:
    """compress_rows, with the first arguments, and key_rows of the same groups, to the same places of a pool of
    their own."""
    compress_rows(source, norm_bf16, eps, latent_bf16, cos_f32, sin_f32, rows_u8, places)
    into = replace(places, pool_u8=key_pool_u8)
    key_rows(latent_bf16, key_weight_bf16, key_norm_bf16, eps, cos_f32, sin_f32, keys_u8, into, prepared_u8)


@operator
def rotated_linear_pair(
    x_bf16: Tensor,
    weight: Fp8Weight,
    cos_f32: Tensor,
    sin_f32: Tensor,
    out_bf16: Tensor,
    second: Fp8Weight,
    second_out_bf16: Tensor,
    rounded_bf16: Tensor | None = None,
) -> None:
    """layer_ops.rotated_linear to out_bf16 [R, H, D], and fp8_linear of the same x_bf16 [R, K] with a second weight."""
    fp8_linear(x_bf16, weight, out_bf16.flatten(1))
    rope(out_bf16, cos_f32, sin_f32, out_bf16)
    fp8_linear(x_bf16, second, second_out_bf16)


@operator
def prepared_queries(
    q_bf16: Tensor,
    cos_f32: Tensor,
    sin_f32: Tensor,
    weights_bf16: Tensor,
    tiles_u8: Tensor,
    rows_u8: Tensor | None = None,
) -> None:
    """index_query of q_bf16 [R, H, d] and index_prepare to tiles_u8; weights_bf16 [R, H] get index_weights' factor.

    rows_u8 [R, H, bytes], where given, is filled with the stored form.
    """
    if rows_u8 is None:
        rows_u8 = tiles_u8.new_empty((*q_bf16.shape[:2], q_bf16.shape[2] * 17 // 32))
    index_query(q_bf16, cos_f32, sin_f32, rows_u8)
    index_prepare(rows_u8, tiles_u8)
    weights_bf16.copy_((weights_bf16.float() * weight_scale(q_bf16.shape[2], q_bf16.shape[1])).bfloat16())
