"""Operators by kernels, with the arguments of their torch references: workspaces and uploads are found here.

Weights come as `prepared` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from rocline.hip_kernels import device_products as products
from rocline.hip_kernels.act_quant import act_round8_hip
from rocline.hip_kernels.attention_hip import Selected, Windows, attention_hip, room_bytes
from rocline.hip_kernels.attention_hip import Turn as TurnBack
from rocline.hip_kernels.compressor_hip import (
    FEW_KEYS,
    Keys,
    Pairs,
    Places,
    compress_hip,
    compress_keys_hip,
    compressed_row_hip,
    pool_pairs_hip,
)
from rocline.hip_kernels.device_memory import ROW_COUNTERS, here, upload
from rocline.hip_kernels.embedding import embedding_hip
from rocline.hip_kernels.engram_hip import FEW_ROWS as FEW_ENGRAM
from rocline.hip_kernels.engram_hip import engram_decode_hip, engram_few_hip, engram_gate_hip, engram_merge_hip
from rocline.hip_kernels.experts_hip import ExpertRoom, ExpertWeights, experts_hip
from rocline.hip_kernels.finite import rows_finite_hip
from rocline.hip_kernels.index_prepared import index_prepare_hip
from rocline.hip_kernels.index_score import History, Queries
from rocline.hip_kernels.index_select import Workspace, index_select_among_hip, index_select_hip
from rocline.hip_kernels.index_vectors import index_key_hip, index_query_hip, weight_scale
from rocline.hip_kernels.latents_hip import FEW_ROWS as FEW_LATENTS
from rocline.hip_kernels.latents_hip import latents_few_hip
from rocline.hip_kernels.linear_hip import (
    Product,
)
from rocline.hip_kernels.mhc_hip import (
    Coefficients,
    Merge,
    Mixing,
    Projection,
    mhc_enter_hip,
    mhc_pass_hip,
    partials_shape,
)
from rocline.hip_kernels.project_enter_hip import project_enter_hip, project_enters
from rocline.hip_kernels.rmsnorm import rmsnorm_hip
from rocline.hip_kernels.rope import rope_hip
from rocline.hip_kernels.router_hip import router_hip
from rocline.hip_kernels.rows import copy_rows_hip, gather_rows_hip, put_rows_hip
from rocline.hip_kernels.sampling import SampleRows
from rocline.hip_kernels.sampling_hip import sample_hip
from rocline.hip_kernels.weight_tiles import WeightTiles
from rocline.hip_kernels.window_row import latent_norms_hip, window_row_hip


def _latents(
    u_bf16: Tensor,
    wq_a: WeightTiles,
    qr_bf16: Tensor,
    wkv: WeightTiles,
    projected_bf16: Tensor,
    q_norm_bf16: Tensor,
    kv_norm_bf16: Tensor,
    eps: float,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
    slots_i32: Tensor | None = None,
    rounded_bf16: Tensor | None = None,
    rounded_qr_bf16: Tensor | None = None,
) -> None:
    turn, norms = (cos_f32, sin_f32), (q_norm_bf16, kv_norm_bf16)
    if rounded_bf16 is not None and len(u_bf16) <= FEW_LATENTS:
        given = rounded_bf16, wq_a, qr_bf16, wkv, projected_bf16, *norms, eps, *turn, rows_u8, slots_i32
        latents_few_hip(*given, rounded_qr_bf16, here.counters_i32[:1])
        return
    products.quantised(u_bf16, Product(wq_a, qr_bf16), Product(wkv, projected_bf16), rounded_bf16=rounded_bf16)
    window = projected_bf16, kv_norm_bf16, eps, *turn, rows_u8, slots_i32
    latent_norms_hip(qr_bf16, q_norm_bf16, *window, rounded_qr_bf16)


def _router(
    u_bf16: Tensor,
    weight: WeightTiles,
    bias_f32: Tensor,
    factor: float,
    scores_f32: Tensor,
    ids_i32: Tensor,
    weights_f32: Tensor,
    rounded_bf16: Tensor | None = None,
) -> None:
    outs = scores_f32, ids_i32, weights_f32, here.counters_i32[:1], products.sums(len(u_bf16), weight), rounded_bf16
    router_hip(u_bf16, weight, bias_f32, factor, *outs)


def _experts(
    u_bf16: Tensor,
    ids_i32: Tensor,
    weights_f32: Tensor,
    routed: ExpertWeights,
    shared: ExpertWeights,
    limit: float,
    out_bf16: Tensor,
) -> None:
    _mix(products.rounded(u_bf16), ids_i32, weights_f32, routed, shared, limit, out_bf16)


def _mix(rounded_bf16: Tensor, ids_i32: Tensor, weights_f32: Tensor, *others: Any) -> None:
    (n_rows, k), (routed, shared, limit, out_bf16) = ids_i32.shape, others
    room_u8 = here.lend((ExpertRoom.bytes_for(n_rows, k, routed, shared),), torch.uint8)
    experts_hip(rounded_bf16, ids_i32, weights_f32, routed, shared, limit, room_u8, out_bf16)


def _route_and_mix(
    u_bf16: Tensor,
    gate: WeightTiles,
    bias_f32: Tensor,
    factor: float,
    scores_f32: Tensor,
    ids_i32: Tensor,
    weights_f32: Tensor,
    routed: ExpertWeights,
    shared: ExpertWeights,
    limit: float,
    out_bf16: Tensor,
    rounded_bf16: Tensor | None = None,
) -> None:
    to_round = None
    if rounded_bf16 is None:
        rounded_bf16 = to_round = here.lend(tuple(u_bf16.shape), torch.bfloat16)
    _router(u_bf16, gate, bias_f32, factor, scores_f32, ids_i32, weights_f32, to_round)
    _mix(rounded_bf16, ids_i32, weights_f32, routed, shared, limit, out_bf16)


def _attention(
    q_bf16: Tensor,
    window_u8: Tensor,
    window_first_i32: Tensor,
    window_count_i32: Tensor,
    window: int,
    rows_u8: Tensor | None,
    page_table_i32: Tensor | None,
    selected_i32: Tensor | None,
    sink_f32: Tensor,
    out_bf16: Tensor,
) -> None:
    """The rows are of one sequence, and their window rows one ring that nothing wraps round in."""
    (one_i32,) = upload([torch.zeros(len(q_bf16), dtype=torch.int32)])
    windows = Windows(window_u8[None], one_i32, window_first_i32, window_count_i32, window)
    selected = None
    if rows_u8 is not None and page_table_i32 is not None and selected_i32 is not None:
        selected = Selected(rows_u8, page_table_i32[None], one_i32, selected_i32)
    room_u8 = _attention_room(q_bf16, windows, selected, out_bf16)
    attention_hip(q_bf16, windows, selected, sink_f32, out_bf16, room_u8)


def _attend(
    q_bf16: Tensor,
    windows: Windows,
    selected: Selected | None,
    sink_f32: Tensor,
    cos_f32: Tensor,
    sin_f32: Tensor,
    out_bf16: Tensor,
) -> None:
    room_u8 = _attention_room(q_bf16, windows, selected, out_bf16)
    attention_hip(q_bf16, windows, selected, sink_f32, out_bf16, room_u8, TurnBack(cos_f32, sin_f32))


def _attention_room(q_bf16: Tensor, windows: Windows, selected: Selected | None, out_bf16: Tensor) -> Tensor | None:
    n_bytes = room_bytes(q_bf16, windows, selected, out_bf16)
    return here.lend((n_bytes,), torch.uint8) if n_bytes else None


def _mhc_merge(
    sublayer_bf16: Tensor, streams_bf16: Tensor, post_f32: Tensor, comb_f32: Tensor, merged_bf16: Tensor
) -> None:
    merge = Merge(sublayer_bf16, post_f32, comb_f32)
    mhc_pass_hip(streams_bf16, merge, merged_bf16, None, None, None, None)


def _mhc_collapse_norm(
    streams_bf16: Tensor, pre_f32: Tensor, weight_bf16: Tensor, eps: float, out_bf16: Tensor
) -> None:
    mhc_enter_hip(streams_bf16, None, pre_f32, weight_bf16, eps, None, out_bf16, here.counters_i32[:1])


def _mhc_enter(streams_bf16: Tensor, pre_f32: Tensor, *others: Any) -> None:
    _enter(None, streams_bf16, pre_f32, *others)


def _mhc_merge_enter(
    sublayer_bf16: Tensor, post_f32: Tensor, comb_f32: Tensor, streams_bf16: Tensor, pre_f32: Tensor, *others: Any
) -> None:
    _enter(Merge(sublayer_bf16, post_f32, comb_f32), streams_bf16, pre_f32, *others)


def _enter(
    merge: Merge | None,
    streams_bf16: Tensor,
    pre_f32: Tensor,
    norm_bf16: Tensor,
    fn_bf16: Tensor,
    scale_f32: Tensor,
    base_f32: Tensor,
    norm_eps: float,
    eps: float,
    n_iters: int,
    out_bf16: Tensor,
    new_pre_f32: Tensor,
    post_f32: Tensor,
    comb_f32: Tensor,
    rounded_bf16: Tensor | None = None,
    *,
    projected: tuple[Tensor, WeightTiles] | None = None,
) -> None:
    """projected: rows and weight of what is merged, to be multiplied first."""
    n_rows, _, width = streams_bf16.shape
    projection = Projection(width, fn_bf16, scale_f32, base_f32)
    partials_f32 = here.lend(partials_shape(n_rows, width), torch.float32)
    mixing = Mixing(projection, partials_f32, Coefficients(new_pre_f32, post_f32, comb_f32), eps, n_iters)
    entering = pre_f32, norm_bf16, norm_eps, mixing, out_bf16
    if merge is not None and projected is not None:
        rows_bf16, weight = projected
        project_enter_hip(rows_bf16, weight, streams_bf16, merge, *entering, here.counters_i32, rounded_bf16)
    else:
        mhc_enter_hip(streams_bf16, merge, *entering, here.counters_i32[:1], rounded_bf16)


def _project_heads_enter(
    heads_bf16: Tensor,
    wo_a: WeightTiles,
    n_groups: int,
    wo_b: WeightTiles,
    grouped_bf16: Tensor,
    sublayer_bf16: Tensor,
    merge_post_f32: Tensor,
    merge_comb_f32: Tensor,
    streams_bf16: Tensor,
    pre_f32: Tensor,
    *others: Any,
) -> None:
    projected = None
    if project_enters(len(heads_bf16), wo_b, len(here.counters_i32)):
        products.grouped_projection(heads_bf16, wo_a, n_groups, grouped_bf16, round_out=True)
        projected = grouped_bf16, wo_b
    else:
        products.project_heads(heads_bf16, wo_a, n_groups, wo_b, grouped_bf16, sublayer_bf16)
    merge = Merge(sublayer_bf16, merge_post_f32, merge_comb_f32)
    _enter(merge, streams_bf16, pre_f32, *others, projected=projected)


def _engram_add(
    codes_e4m3: Tensor,
    scales_e8m0: Tensor,
    wkv: WeightTiles,
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
    at_end = q_weight_bf16, k_weight_bf16, lookback_i32, eps, gates_f32
    if len(streams_bf16) <= FEW_ENGRAM:
        first = codes_e4m3.flatten(1), scales_e8m0.flatten(1), wkv, kv_bf16, streams_bf16
        engram_few_hip(*first, sublayer_bf16, post_f32, comb_f32, *at_end, here.counters_i32[:1])
        return
    by_column_bf16 = values_bf16.view(-1, codes_e4m3.shape[2])
    engram_decode_hip(codes_e4m3.flatten(0, 1), scales_e8m0.flatten(0, 1), by_column_bf16)
    products.fp8_linear(values_bf16, wkv, kv_bf16)
    engram_merge_hip(streams_bf16, sublayer_bf16, post_f32, comb_f32, kv_bf16, *at_end)


def _index_key(
    latent_bf16: Tensor,
    weight: WeightTiles,
    norm_bf16: Tensor,
    eps: float,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
) -> None:
    index_key_hip(_projected(latent_bf16, weight), norm_bf16, eps, cos_f32, sin_f32, rows_u8)


def _key_rows(
    latent_bf16: Tensor,
    weight: WeightTiles,
    norm_bf16: Tensor,
    eps: float,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
    places: Places,
    prepared_u8: Tensor | None = None,
) -> None:
    key_bf16 = _projected(latent_bf16, weight)
    index_key_hip(key_bf16, norm_bf16, eps, cos_f32, sin_f32, rows_u8, places, prepared_u8)


def _projected(latent_bf16: Tensor, weight: WeightTiles) -> Tensor:
    key_bf16 = here.lend((len(latent_bf16), weight.n_out), torch.bfloat16)
    products.bf16_linear(latent_bf16, weight, key_bf16)
    return key_bf16


def _index_weights(u_bf16: Tensor, weight: WeightTiles, head_dim: int, out_bf16: Tensor, scaled: bool = True) -> None:
    products.bf16_linear(u_bf16, weight, out_bf16)
    if scaled:
        out_bf16.mul_(weight_scale(head_dim, weight.n_out))  # in FP32, rounded again


def _compress_rows(
    source: Pairs | Tensor,
    norm_bf16: Tensor,
    eps: float,
    latent_bf16: Tensor,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
    places: Places,
) -> None:
    compress_hip(source, norm_bf16, eps, latent_bf16, (cos_f32, sin_f32), rows_u8, places)


def _source_rows(
    source: Pairs | Tensor,
    norm_bf16: Tensor,
    eps: float,
    latent_bf16: Tensor,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
    places: Places,
    key_weight: WeightTiles,
    key_norm_bf16: Tensor,
    keys_u8: Tensor,
    key_pool_u8: Tensor,
    prepared_u8: Tensor | None = None,
) -> None:
    first, turn = (source, norm_bf16, eps, latent_bf16), (cos_f32, sin_f32)
    if 0 < len(latent_bf16) <= FEW_KEYS:
        projected_bf16 = here.lend((len(latent_bf16), key_weight.n_out), torch.bfloat16)
        keys = Keys(key_weight, key_norm_bf16, projected_bf16, keys_u8, key_pool_u8, prepared_u8)
        compress_keys_hip(*first, turn, rows_u8, places, keys, here.counters_i32[:1])
        return
    compress_hip(*first, turn, rows_u8, places)
    into = replace(places, pool_u8=key_pool_u8)
    _key_rows(latent_bf16, key_weight, key_norm_bf16, eps, *turn, keys_u8, into, prepared_u8)


def _prepared_queries(
    q_bf16: Tensor,
    cos_f32: Tensor,
    sin_f32: Tensor,
    weights_bf16: Tensor,
    tiles_u8: Tensor,
    rows_u8: Tensor | None = None,
) -> None:
    index_query_hip(q_bf16, cos_f32, sin_f32, rows_u8, tiles_u8, weights_bf16)


def _index_select(queries: Queries, history: History, selected_i32: Tensor, blocks_i32: Tensor | None = None) -> None:
    n_bytes = Workspace.bytes_for(len(selected_i32), history.n_positions, selected_i32.shape[1])
    workspace = Workspace(here.lend((n_bytes,), torch.uint8))
    index_select_hip(queries, history, workspace, selected_i32, blocks_i32, here.counters_i32[:ROW_COUNTERS])


def _index_select_among(queries: Queries, history: History, blocks_i32: Tensor, selected_i32: Tensor) -> None:
    n_bytes = Workspace.bytes_for(len(selected_i32), 0, blocks_i32.shape[1])
    workspace = Workspace(here.lend((n_bytes,), torch.uint8))
    index_select_among_hip(queries, history, workspace, blocks_i32, selected_i32, here.counters_i32[:ROW_COUNTERS])


def _sample(logits_f32: Tensor, how: SampleRows, ids_i32: Tensor) -> None:
    """`how` is on the host."""
    rows = SampleRows(*upload([getattr(how, field.name) for field in fields(how)]))
    has_lists = any(ids.shape[1] for ids in (how.seen_ids_i32, how.bias_ids_i32, how.banned_ids_i32))
    adjusted_f32 = here.lend(tuple(logits_f32.shape), torch.float32) if has_lists else None
    sample_hip(logits_f32, rows, ids_i32, adjusted_f32)


KERNELS: Mapping[str, Callable[..., None]] = {
    "act_round8": act_round8_hip,
    "attend": _attend,
    "attention": _attention,
    "bf16_linear": products.bf16_linear,
    "compress_rows": _compress_rows,
    "compressed_row": compressed_row_hip,
    "copy_rows": copy_rows_hip,
    "embedding": embedding_hip,
    "engram_add": _engram_add,
    "engram_decode": engram_decode_hip,
    "engram_gate": engram_gate_hip,
    "engram_merge": engram_merge_hip,
    "experts": _experts,
    "f32_linear": products.f32_linear,
    "fp8_linear": products.fp8_linear,
    "gather_rows": gather_rows_hip,
    "grouped_projection": products.grouped_projection,
    "head": products.head,
    "index_key": _index_key,
    "index_prepare": index_prepare_hip,
    "index_query": index_query_hip,
    "index_select": _index_select,
    "index_select_among": _index_select_among,
    "index_weights": _index_weights,
    "key_rows": _key_rows,
    "latents": _latents,
    "mhc_collapse_norm": _mhc_collapse_norm,
    "mhc_enter": _mhc_enter,
    "mhc_merge": _mhc_merge,
    "mhc_merge_enter": _mhc_merge_enter,
    "pool_pairs": pool_pairs_hip,
    "prepared_queries": _prepared_queries,
    "project_heads": products.project_heads,
    "project_heads_enter": _project_heads_enter,
    "put_rows": put_rows_hip,
    "rmsnorm": rmsnorm_hip,
    "rope": rope_hip,
    "rotated_linear": products.rotated_linear,
    "rotated_linear_pair": products.rotated_linear_pair,
    "route_and_mix": _route_and_mix,
    "router": _router,
    "rows_finite": rows_finite_hip,
    "sample": _sample,
    "source_and_weights": products.source_and_weights,
    "source_rows": _source_rows,
    "window_row": window_row_hip,
}
_COMPRESS_ROWS = ("pool_pairs", "rmsnorm", "compressed_row", "put_rows")
_KEY_ROWS = ("index_key", "put_rows", "index_prepare")
_PROJECT_HEADS = ("grouped_projection", "fp8_linear")
_ENGRAM_MERGE = ("engram_gate", "mhc_merge")
# Of operators that are others one after the other: which. They run by kernels where each of those does.
PARTS: Mapping[str, tuple[str, ...]] = {
    "attend": ("attention", "rope"),
    "compress_rows": _COMPRESS_ROWS,
    "engram_add": ("engram_decode", "fp8_linear", "engram_merge", *_ENGRAM_MERGE),
    "engram_merge": _ENGRAM_MERGE,
    "key_rows": _KEY_ROWS,
    "latents": ("fp8_linear", "rmsnorm", "window_row"),
    "prepared_queries": ("index_query", "index_prepare", "index_weights"),
    "project_heads": _PROJECT_HEADS,
    "project_heads_enter": ("project_heads", *_PROJECT_HEADS, "mhc_merge_enter"),
    "rotated_linear": ("fp8_linear", "rope"),
    "rotated_linear_pair": ("fp8_linear", "rope"),
    "route_and_mix": ("router", "experts"),
    "source_and_weights": ("bf16_linear", "f32_linear", "index_weights"),
    "source_rows": ("compress_rows", *_COMPRESS_ROWS, "key_rows", *_KEY_ROWS),
}
