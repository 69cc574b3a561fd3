"""Operators by kernels, with the arguments of their torch references: workspaces and uploads are found here.

Weights come as `prepared` makes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rocline.hip_kernels.act_quant import act_round8_hip
from rocline.hip_kernels.attention_hip import Selected, Windows, attention_hip
from rocline.hip_kernels.binding import use_kernels
from rocline.hip_kernels.compressor_hip import compressed_row_hip, pool_pairs_hip
from rocline.hip_kernels.embedding import embedding_hip
from rocline.hip_kernels.engram_hip import engram_decode_hip, engram_gate_hip
from rocline.hip_kernels.experts_hip import ExpertRoom, ExpertWeights, experts_hip, prepare_fp4_weight
from rocline.hip_kernels.finite import rows_finite_hip
from rocline.hip_kernels.grouped_projection_hip import grouped_projection_hip
from rocline.hip_kernels.head_hip import head_hip
from rocline.hip_kernels.index_prepared import index_prepare_hip
from rocline.hip_kernels.index_score import History, Queries
from rocline.hip_kernels.index_select import Workspace, index_select_among_hip, index_select_hip
from rocline.hip_kernels.index_vectors import index_query_hip
from rocline.hip_kernels.linear_hip import (
    bf16_linear_hip,
    f32_linear_hip,
    fp8_linear_hip,
    prepare_bf16_weight,
    prepare_fp8_weight,
    workspace_floats,
)
from rocline.hip_kernels.mhc_hip import (
    Coefficients,
    Merge,
    Projection,
    mhc_finish_hip,
    mhc_pass_hip,
    partials_shape,
    prepare_projection,
)
from rocline.hip_kernels.rmsnorm import rmsnorm_hip
from rocline.hip_kernels.rope import rope_hip, rope_table
from rocline.hip_kernels.router_hip import router_hip
from rocline.hip_kernels.rows import copy_rows_hip, gather_rows_hip, put_rows_hip
from rocline.hip_kernels.sampling import SampleRows
from rocline.hip_kernels.sampling_hip import sample_hip
from rocline.hip_kernels.staging import Staging
from rocline.hip_kernels.weight_tiles import WeightTiles
from rocline.hip_kernels.window_row import window_row_hip

Lend = Callable[[tuple[int, ...], torch.dtype], Tensor]


class _Thread(threading.local):
    """Where this thread's workspaces and uploads come from."""

    lend: Lend
    staging: Staging


_thread = _Thread()


@contextmanager
def use_memory(lend: Lend, staging: Staging) -> Iterator[None]:
    """Meanwhile this thread's workspaces are lent by `lend`, and its host tensors go through `staging`."""
    before = dict(vars(_thread))
    _thread.lend, _thread.staging = lend, staging
    try:
        yield
    finally:
        vars(_thread).clear()
        vars(_thread).update(before)


def upload(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Host tensors on the device of this thread's work, in lent memory, by one copy."""
    edges = [0, *accumulate(-(-tensor.nbytes // 16) * 16 for tensor in tensors)]
    if not edges[-1]:
        return [_thread.lend(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    together_u8 = torch.empty(edges[-1], dtype=torch.uint8)
    here_u8 = _thread.lend((edges[-1],), torch.uint8)
    outs = []
    for tensor, start in zip(tensors, edges[:-1], strict=True):
        place = slice(start, start + tensor.nbytes)
        together_u8[place].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        outs.append(here_u8[place].view(tensor.dtype).view(tensor.shape))
    _thread.staging.put(together_u8, here_u8)
    return outs


def _sums(n_rows: int, tiles: WeightTiles) -> Tensor | None:
    """What a product of so many rows needs to add parts of its sums in."""
    n_floats = workspace_floats(n_rows, tiles)
    return _thread.lend((n_floats,), torch.float32) if n_floats else None


def _rounded(x_bf16: Tensor) -> Tensor:
    """x_bf16 through ActQuant8, in memory of its own."""
    out_bf16 = _thread.lend(tuple(x_bf16.shape), torch.bfloat16)
    act_round8_hip(x_bf16, out_bf16)
    return out_bf16


def _fp8_linear(x_bf16: Tensor, weight: WeightTiles, out_bf16: Tensor) -> None:
    fp8_linear_hip(_rounded(x_bf16), weight, out_bf16, _sums(len(x_bf16), weight))


def _bf16_linear(x_bf16: Tensor, weight: WeightTiles, out_bf16: Tensor) -> None:
    bf16_linear_hip(x_bf16, weight, out_bf16, _sums(len(x_bf16), weight))


def _f32_linear(x_bf16: Tensor, weight: WeightTiles, out_f32: Tensor) -> None:
    f32_linear_hip(x_bf16, weight, out_f32, _sums(len(x_bf16), weight))


def _grouped_projection(heads_bf16: Tensor, weight: WeightTiles, n_groups: int, out_bf16: Tensor) -> None:
    grouped_projection_hip(heads_bf16, weight, out_bf16, _sums(len(heads_bf16), weight))


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
) -> None:
    sums_f32 = _sums(len(u_bf16), weight)
    router_hip(u_bf16, weight, bias_f32, factor, scores_f32, ids_i32, weights_f32, sums_f32)


def _experts(
    u_bf16: Tensor,
    ids_i32: Tensor,
    weights_f32: Tensor,
    routed: ExpertWeights,
    shared: ExpertWeights,
    limit: float,
    out_bf16: Tensor,
) -> None:
    n_rows, k = ids_i32.shape
    room_u8 = _thread.lend((ExpertRoom.bytes_for(n_rows, k, routed, shared),), torch.uint8)
    experts_hip(_rounded(u_bf16), ids_i32, weights_f32, routed, shared, limit, room_u8, out_bf16)


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
    one_i32 = _thread.lend((len(q_bf16),), torch.int32).zero_()
    windows = Windows(window_u8[None], one_i32, window_first_i32, window_count_i32, window)
    selected = None
    if rows_u8 is not None and page_table_i32 is not None and selected_i32 is not None:
        selected = Selected(rows_u8, page_table_i32[None], one_i32, selected_i32)
    attention_hip(q_bf16, windows, selected, sink_f32, out_bf16)


def _mhc_merge(
    sublayer_bf16: Tensor, streams_bf16: Tensor, post_f32: Tensor, comb_f32: Tensor, merged_bf16: Tensor
) -> None:
    merge = Merge(sublayer_bf16, post_f32, comb_f32)
    mhc_pass_hip(streams_bf16, merge, merged_bf16, None, None, None, None)


def _mhc_collapse_norm(
    streams_bf16: Tensor, pre_f32: Tensor, weight_bf16: Tensor, eps: float, out_bf16: Tensor
) -> None:
    mhc_pass_hip(streams_bf16, None, None, pre_f32, out_bf16, None, None)
    mhc_finish_hip(out_bf16, weight_bf16, eps)


def _mhc_enter(streams_bf16: Tensor, pre_f32: Tensor, *others: Any) -> None:
    _pass_and_finish(None, streams_bf16, pre_f32, *others)


def _mhc_merge_enter(
    sublayer_bf16: Tensor, post_f32: Tensor, comb_f32: Tensor, streams_bf16: Tensor, pre_f32: Tensor, *others: Any
) -> None:
    _pass_and_finish(Merge(sublayer_bf16, post_f32, comb_f32), streams_bf16, pre_f32, *others)


def _pass_and_finish(
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
) -> None:
    n_rows, _, width = streams_bf16.shape
    projection = Projection(width, fn_bf16, scale_f32, base_f32)
    partials_f32 = _thread.lend(partials_shape(n_rows, width), torch.float32)
    merged_bf16 = streams_bf16 if merge else None
    mhc_pass_hip(streams_bf16, merge, merged_bf16, pre_f32, out_bf16, projection, partials_f32)
    out = Coefficients(new_pre_f32, post_f32, comb_f32)
    mhc_finish_hip(out_bf16, norm_bf16, norm_eps, projection, partials_f32, out, eps, n_iters)


def _index_key(
    latent_bf16: Tensor,
    weight: WeightTiles,
    norm_bf16: Tensor,
    eps: float,
    cos_f32: Tensor,
    sin_f32: Tensor,
    rows_u8: Tensor,
) -> None:
    key_bf16 = _thread.lend((len(latent_bf16), weight.n_out), torch.bfloat16)
    _bf16_linear(latent_bf16, weight, key_bf16)
    rmsnorm_hip(key_bf16, norm_bf16, eps, key_bf16)
    index_query_hip(key_bf16[:, None], cos_f32, sin_f32, rows_u8[:, None])


def _index_weights(u_bf16: Tensor, weight: WeightTiles, head_dim: int, out_bf16: Tensor) -> None:
    _bf16_linear(u_bf16, weight, out_bf16)
    out_bf16.mul_(head_dim**-0.5 * weight.n_out**-0.5)  # in FP32, rounded again


def _index_select(queries: Queries, history: History, selected_i32: Tensor, blocks_i32: Tensor | None = None) -> None:
    n_bytes = Workspace.bytes_for(len(selected_i32), history.n_positions, selected_i32.shape[1])
    workspace = Workspace(_thread.lend((n_bytes,), torch.uint8))
    index_select_hip(queries, history, workspace, selected_i32, blocks_i32)


def _index_select_among(queries: Queries, history: History, blocks_i32: Tensor, selected_i32: Tensor) -> None:
    n_bytes = Workspace.bytes_for(len(selected_i32), 0, blocks_i32.shape[1])
    workspace = Workspace(_thread.lend((n_bytes,), torch.uint8))
    index_select_among_hip(queries, history, workspace, blocks_i32, selected_i32)


def _rope_table(positions_i32: Tensor, omega_f32: Tensor, cos_f32: Tensor, sin_f32: Tensor) -> None:
    """positions_i32 and omega_f32 are on the host, where every device class takes its cosines from."""
    host = _host_turns(positions_i32.numpy().tobytes(), omega_f32.numpy().tobytes())
    for table, out in zip(host, (cos_f32, sin_f32), strict=True):
        _thread.staging.put(table, out)


@lru_cache(8)  # layers of one kind ask for the same rows, one after the other
def _host_turns(positions: bytes, omega: bytes) -> tuple[Tensor, Tensor]:
    positions_i32 = torch.frombuffer(bytearray(positions), dtype=torch.int32) if positions else torch.empty(0).int()
    omega_f32 = torch.frombuffer(bytearray(omega), dtype=torch.float32)
    out = torch.empty(len(positions_i32), len(omega_f32)), torch.empty(len(positions_i32), len(omega_f32))
    with use_kernels({}):
        rope_table(positions_i32, omega_f32, *out)
    return out


def _sample(logits_f32: Tensor, how: SampleRows, ids_i32: Tensor) -> None:
    """`how` is on the host."""
    here = SampleRows(*upload([getattr(how, field.name) for field in fields(how)]))
    has_lists = any(ids.shape[1] for ids in (how.seen_ids_i32, how.bias_ids_i32, how.banned_ids_i32))
    adjusted_f32 = _thread.lend(tuple(logits_f32.shape), torch.float32) if has_lists else None
    sample_hip(logits_f32, here, ids_i32, adjusted_f32)


KERNELS: Mapping[str, Callable[..., None]] = {
    "attention": _attention,
    "bf16_linear": _bf16_linear,
    "compressed_row": compressed_row_hip,
    "copy_rows": copy_rows_hip,
    "embedding": embedding_hip,
    "engram_decode": engram_decode_hip,
    "engram_gate": engram_gate_hip,
    "experts": _experts,
    "f32_linear": _f32_linear,
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
    "mhc_collapse_norm": _mhc_collapse_norm,
    "mhc_enter": _mhc_enter,
    "mhc_merge": _mhc_merge,
    "mhc_merge_enter": _mhc_merge_enter,
    "pool_pairs": pool_pairs_hip,
    "put_rows": put_rows_hip,
    "rmsnorm": rmsnorm_hip,
    "rope": rope_hip,
    "router": _router,
    "rows_finite": rows_finite_hip,
    "sample": _sample,
    "window_row": window_row_hip,
}
HOST_OPERATORS: Mapping[str, Callable[..., None]] = {"rope_table": _rope_table}
PREPARE: Mapping[str, Callable[..., Any]] = {
    "bf16_linear": prepare_bf16_weight,
    "experts": lambda routed, shared: (
        ExpertWeights(*map(prepare_fp4_weight, routed)),
        ExpertWeights(*map(prepare_fp8_weight, shared)),
    ),
    "f32_linear": prepare_bf16_weight,
    "fp8_linear": prepare_fp8_weight,
    "grouped_projection": prepare_fp8_weight,
    "head": prepare_bf16_weight,
    "index_key": prepare_bf16_weight,
    "index_weights": prepare_bf16_weight,
    "mhc_enter": prepare_projection,
    "mhc_merge_enter": prepare_projection,
    "router": prepare_bf16_weight,
}
