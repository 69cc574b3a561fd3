"""index_score: every query row against every history position, with the reference's roundings (backbone.md section 7).

The dot is four (d/32) exact group sums of integers, each scaled by its power of two, added in FP32 in
group order; that definition is shared by every device class (design.md section 4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, run_slabs
from rocline.hip_kernels.formats import RowFormat


def index_score_ref(
    q_codes_f32: Tensor, q_scales_f32: Tensor, k_codes_f32: Tensor, k_scales_f32: Tensor, weights_bf16: Tensor
) -> Tensor:
    """scores [R, P] FP32 holding BF16 values, unmasked.

    q_codes_f32   [R, H, G, 32] E2M1 values, q_scales_f32 [R, H, G]
    k_codes_f32   [P, G, 32], k_scales_f32 [P, G]
    weights_bf16  [R, H]
    """
    n_rows, n_heads, n_groups, _ = q_codes_f32.shape
    total_f32 = q_codes_f32.new_zeros((n_rows, len(k_codes_f32)))
    weights_f32 = weights_bf16.float()
    keys = [k_codes_f32[:, g].T.contiguous() for g in range(n_groups)]
    for head in range(n_heads):  # ascending: the head order is the contract
        dot_f32 = torch.zeros_like(total_f32)
        for g in range(n_groups):
            # At most 32 * 36 in quarters: exact in FP32, whatever the library's order.
            partial = q_codes_f32[:, head, g] @ keys[g]
            dot_f32 += (partial * q_scales_f32[:, head, g, None]) * k_scales_f32[:, g]
        relu_f32 = dot_f32.bfloat16().float().relu()
        total_f32 += (relu_f32 * weights_f32[:, head, None]).bfloat16().float()
    return total_f32.bfloat16().float()


def index_score(
    q_rows_u8: Tensor,
    weights_bf16: Tensor,
    keys_u8: Tensor,
    page_table_i32: Tensor,
    visible_i32: Tensor,
    scores_f32: Tensor,
) -> None:
    """Fill scores_f32 [R, P] for rows of one sequence; positions at or past visible_i32 are -inf.

    q_rows_u8       [R, H, d/2 + d/32] quantised queries
    weights_bf16    [R, H]
    keys_u8         [pages, rows, d/2 + d/32] the pool of the layer's key/value source
    page_table_i32  [n_pages] of the sequence, n_pages * rows >= P
    visible_i32     [R] compressed rows the query may see, 0..P
    """
    _, n_positions = bind_dims(
        "index_score",
        "R P",
        {
            "scores_f32 R P": scores_f32,
            "q_rows_u8 R H B": q_rows_u8,
            "weights_bf16 R H": weights_bf16,
            "keys_u8 N S B": keys_u8,
            "page_table_i32 T": page_table_i32,
            "visible_i32 R": visible_i32,
        },
    )
    row_format = _format_of(keys_u8.shape[2])
    rows_per_page = keys_u8.shape[1]
    for start in range(0, n_positions, rows_per_page):
        stop = min(start + rows_per_page, n_positions)
        page = keys_u8[int(page_table_i32[start // rows_per_page]), : stop - start]
        position = torch.arange(start, stop, dtype=torch.int32)

        def slab(q_rows: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
            scores = index_score_ref(*row_format.split(q_rows), *row_format.split(page), weights)  # noqa: B023 used at once
            return scores.masked_fill(position >= visible[:, None], float("-inf"))  # noqa: B023

        run_slabs(slab, (q_rows_u8, weights_bf16, visible_i32), scores_f32[:, start:stop])


def _format_of(row_bytes: int) -> RowFormat:
    """A row of d channels takes d/2 + d/32 bytes."""
    return RowFormat("index_key", row_bytes * 32 // 17)
