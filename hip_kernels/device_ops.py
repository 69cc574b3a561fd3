"""Operators by kernels, with the arguments of their torch references: workspaces and uploads are found here.

Weights come as `prepared` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from rocline.hip_kernels.act_quant import act_round8_hip
from rocline.hip_kernels.attention_hip import Selected, Windows, attention_hip, list_slots, room_bytes
from rocline.hip_kernels.attention_hip import Turn as TurnBack
from rocline.hip_kernels.compressor_hip import Pairs, Places, compress_hip, compressed_row_hip, pool_pairs_hip
from rocline.hip_kernels.device_memory import here, upload
from rocline.hip_kernels.embedding import embedding_hip
from rocline.hip_kernels.engram_hip import engram_decode_hip, engram_gate_hip, engram_merge_hip
from rocline.hip_kernels.experts_hip import ExpertRoom, ExpertWeights, experts_hip
from rocline.hip_kernels.finite import rows_finite_hip
from rocline.hip_kernels.grouped_projection_hip import grouped_projection_hip
from rocline.hip_kernels.head_hip import head_hip
from rocline.hip_kernels.index_prepared import index_prepare_hip
from rocline.hip_kernels.index_score import History, Queries
from rocline.hip_kernels.index_select import Workspace, index_select_among_hip, index_select_hip
from rocline.hip_kernels.index_vectors import index_key_hip, index_query_hip, weight_scale
from rocline.hip_kernels.latents_hip import FEW_ROWS as FEW_LATENTS
from rocline.hip_kernels.latents_hip import latents_few_hip
from rocline.hip_kernels.linear_hip import (
    Product,
    Turn,
    fp8_linear_hip,
    multiply_together,
    rounds_rows,
    workspace_floats,
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
from rocline.hip_kernels.rmsnorm import rmsnorm_hip
from rocline.hip_kernels.rope import rope_hip
from rocline.hip_kernels.router_hip import router_hip
from rocline.hip_kernels.rows import copy_rows_hip, gather_rows_hip, put_rows_hip
from rocline.hip_kernels.sampling import SampleRows
from rocline.hip_kernels.sampling_hip import sample_hip
from rocline.hip_kernels.weight_tiles import WeightTiles
from rocline.hip_kernels.window_row import latent_norms_hip, window_row_hip


def _sums(n_rows: int, *weights: WeightTiles) -> Tensor | None:
    """What products of so many rows need to add parts of their sums in."""
    n_floats = workspace_floats(n_rows, *weights)
    return here.lend((n_floats,), torch.float32) if n_floats else None


def _rounded(x_bf16: Tensor) -> Tensor:
    """x_bf16 through ActQuant8, in memory of its own."""
    out_bf16 = here.lend(tuple(x_bf16.shape), torch.bfloat16)
    act_round8_hip(x_bf16, out_bf16)
    return out_bf16


def _fp8_linear(x_bf16: Tensor, weight: WeightTiles, out_bf16: Tensor) -> None:
    _quantised(x_bf16, Product(weight, out_bf16))


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
    _quantised(u_bf16, Product(wq_a, qr_bf16), Product(wkv, projected_bf16), rounded_bf16=rounded_bf16)
    window = projected_bf16, kv_norm_bf16, eps, *turn, rows_u8, slots_i32
    latent_norms_hip(qr_bf16, q_norm_bf16, *window, rounded_qr_bf16)


def _rotated_linear(
    x_bf16: Tensor,
    weight: WeightTiles,
    cos_f32: Tensor,
    sin_f32: Tensor,
    out_bf16: Tensor,
    rounded_bf16: Tensor | None = None,
) -> None:
    turn = Turn(cos_f32, sin_f32, out_bf16.shape[2])
    _quantised(x_bf16, Product(weight, out_bf16.flatten(1)), turn=turn, rounded_bf16=rounded_bf16)


def _quantised(
    x_bf16: Tensor, *products: Product, turn: Turn | None = None, rounded_bf16: Tensor | None = None
) -> None:
    """Products of the rows through ActQuant8."""
    rounds = rounded_bf16 is None and rounds_rows(len(x_bf16), x_bf16.shape[1])
    rows_bf16 = x_bf16 if rounds else _rounded(x_bf16) if rounded_bf16 is None else rounded_bf16
    sums_f32 = _sums(len(x_bf16), *(product.tiles for product in products))
    multiply_together("fp8_linear", rows_bf16, products, sums_f32, round_rows=rounds, turn=turn)


def _rotated_linear_pair(
    x_bf16: Tensor,
    weight: WeightTiles,
    cos_f32: Tensor,
    sin_f32: Tensor,
    out_bf16: Tensor,
    second: WeightTiles,
    second_out_bf16: Tensor,
    rounded_bf16: Tensor | None = None,
) -> None:
    turn = Turn(cos_f32, sin_f32, out_bf16.shape[2])
    products = Product(weight, out_bf16.flatten(1)), Product(second, second_out_bf16)
    _quantised(x_bf16, *products, turn=turn, rounded_bf16=rounded_bf16)


def _plain(op: str, x_bf16: Tensor, *products: Product) -> None:
    """Products of the rows as they are."""
    multiply_together(op, x_bf16, products, _sums(len(x_bf16), *(product.tiles for product in products)))


def _bf16_linear(x_bf16: Tensor, weight: WeightTiles, out_bf16: Tensor) -> None:
    _plain("bf16_linear", x_bf16, Product(weight, out_bf16))


def _f32_linear(x_bf16: Tensor, weight: WeightTiles, out_f32: Tensor) -> None:
    _plain("f32_linear", x_bf16, Product(weight, out_f32))


def _f32_linear_pair(
    x_bf16: Tensor, first: WeightTiles, first_out_f32: Tensor, second: WeightTiles, second_out_f32: Tensor
) -> None:
    _plain("f32_linear", x_bf16, Product(first, first_out_f32), Product(second, second_out_f32))


def _grouped_projection(heads_bf16: Tensor, weight: WeightTiles, n_groups: int, out_bf16: Tensor) -> None:
    grouped_projection_hip(heads_bf16, weight, out_bf16, _sums(len(heads_bf16), weight))


def _project_heads(
    heads_bf16: Tensor,
    wo_a: WeightTiles,
    n_groups: int,
    wo_b: WeightTiles,
    grouped_bf16: Tensor,
    out_bf16: Tensor,
) -> None:
    grouped_projection_hip(heads_bf16, wo_a, grouped_bf16, _sums(len(heads_bf16), wo_a), round_out=True)
    fp8_linear_hip(grouped_bf16, wo_b, out_bf16, _sums(len(heads_bf16), wo_b))


def _head(h_bf16: Tensor, weight: WeightTiles, logits_f32: Tensor, finite_u8: Tensor) -> None:
    head_hip(h_bf16, weight, logits_f32, finite_u8, _sums(len(h_bf16), weight))


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
    outs = scores_f32, ids_i32, weights_f32, here.counters_i32[:1], _sums(len(u_bf16), weight), rounded_bf16
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
    _mix(_rounded(u_bf16), ids_i32, weights_f32, routed, shared, limit, out_bf16)


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
    attention_hip(q_bf16, windows, selected, sink_f32, out_bf16, _attention_room(q_bf16, windows, selected))


def _attend(
    q_bf16: Tensor,
    windows: Windows,
    selected: Selected | None,
    sink_f32: Tensor,
    cos_f32: Tensor,
    sin_f32: Tensor,
    out_bf16: Tensor,
) -> None:
    room_u8 = _attention_room(q_bf16, windows, selected)
    attention_hip(q_bf16, windows, selected, sink_f32, out_bf16, room_u8, TurnBack(cos_f32, sin_f32))


def _attention_room(q_bf16: Tensor, windows: Windows, selected: Selected | None) -> Tensor | None:
    n_rows, n_heads, width = q_bf16.shape
    n_bytes = room_bytes(n_rows, n_heads, width, list_slots(windows, selected))
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
) -> None:
    n_rows, _, width = streams_bf16.shape
    projection = Projection(width, fn_bf16, scale_f32, base_f32)
    partials_f32 = here.lend(partials_shape(n_rows, width), torch.float32)
    mixing = Mixing(projection, partials_f32, Coefficients(new_pre_f32, post_f32, comb_f32), eps, n_iters)
    into = mixing, out_bf16, here.counters_i32[:1], rounded_bf16
    mhc_enter_hip(streams_bf16, merge, pre_f32, norm_bf16, norm_eps, *into)


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
    _bf16_linear(latent_bf16, weight, key_bf16)
    return key_bf16


def _index_weights(u_bf16: Tensor, weight: WeightTiles, head_dim: int, out_bf16: Tensor, scaled: bool = True) -> None:
    _bf16_linear(u_bf16, weight, out_bf16)
    if scaled:
        out_bf16.mul_(weight_scale(head_dim, weight.n_out))  # in FP32, rounded again


def _latent_and_weights(
    u_bf16: Tensor,
    wkv: WeightTiles,
    latent_bf16: Tensor,
    weights_proj: WeightTiles,
    head_dim: int,
    weights_bf16: Tensor,
) -> None:
    _plain("bf16_linear", u_bf16, Product(wkv, latent_bf16), Product(weights_proj, weights_bf16))


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
    index_select_hip(queries, history, workspace, selected_i32, blocks_i32, here.counters_i32)


def _index_select_among(queries: Queries, history: History, blocks_i32: Tensor, selected_i32: Tensor) -> None:
    n_bytes = Workspace.bytes_for(len(selected_i32), 0, blocks_i32.shape[1])
    workspace = Workspace(here.lend((n_bytes,), torch.uint8))
    index_select_among_hip(queries, history, workspace, blocks_i32, selected_i32, here.counters_i32)


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
    "bf16_linear": _bf16_linear,
    "compress_rows": _compress_rows,
    "compressed_row": compressed_row_hip,
    "copy_rows": copy_rows_hip,
    "embedding": embedding_hip,
    "engram_decode": engram_decode_hip,
    "engram_gate": engram_gate_hip,
    "engram_merge": engram_merge_hip,
    "experts": _experts,
    "f32_linear": _f32_linear,
    "f32_linear_pair": _f32_linear_pair,
    "fp8_linear": _fp8_linear,
    "gather_rows": gather_rows_hip,
    "grouped_projection": _grouped_projection,
    "head": _head,
    "index_key": _index_key,
    "index_prepare": index_prepare_hip,
    "index_query": index_query_hip,
    "index_select": _index_select,
    "index_select_among": _index_select_among,
    "index_weights": _index_weights,
    "key_rows": _key_rows,
    "latent_and_weights": _latent_and_weights,
    "latents": _latents,
    "mhc_collapse_norm": _mhc_collapse_norm,
    "mhc_enter": _mhc_enter,
    "mhc_merge": _mhc_merge,
    "mhc_merge_enter": _mhc_merge_enter,
    "pool_pairs": pool_pairs_hip,
    "prepared_queries": _prepared_queries,
    "project_heads": _project_heads,
    "put_rows": put_rows_hip,
    "rmsnorm": rmsnorm_hip,
    "rope": rope_hip,
    "rotated_linear": _rotated_linear,
    "rotated_linear_pair": _rotated_linear_pair,
    "route_and_mix": _route_and_mix,
    "router": _router,
    "rows_finite": rows_finite_hip,
    "sample": _sample,
    "window_row": window_row_hip,
}
# Of operators that are others one after the other: which. They run by kernels where each of those does.
PARTS: Mapping[str, tuple[str, ...]] = {
    "attend": ("attention", "rope"),
    "compress_rows": ("pool_pairs", "rmsnorm", "compressed_row", "put_rows"),
    "engram_merge": ("engram_gate", "mhc_merge"),
    "f32_linear_pair": ("f32_linear",),
    "key_rows": ("index_key", "put_rows", "index_prepare"),
    "latent_and_weights": ("bf16_linear", "index_weights"),
    "latents": ("fp8_linear", "rmsnorm", "window_row"),
    "prepared_queries": ("index_query", "index_prepare", "index_weights"),
    "project_heads": ("grouped_projection", "fp8_linear"),
    "rotated_linear": ("fp8_linear", "rope"),
    "rotated_linear_pair": ("fp8_linear", "rope"),
    "route_and_mix": ("router", "experts"),
}
