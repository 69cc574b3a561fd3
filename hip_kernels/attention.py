"""Window and selected attention: streaming softmax over one list, with sink (backbone.md section 5.4, 5.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, operator, run_tiles
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.pages import row_slots

LIST_BLOCK = 64  # slots between two updates of the running maximum
TILE_ROWS = 16  # a row gathers its whole list, so a tile of 64 would be mostly padding while decoding
FIRST_MAX = -1e30  # finite, so that a list without entries gives zeros and not NaN


def attention_ref(q_bf16: Tensor, kv_bf16: Tensor, present_bool: Tensor, sink_f32: Tensor) -> Tensor:
    """[R, H, D] BF16 attention of each row over its own list, key and value being the same vector.

    q_bf16        [R, H, D]
    kv_bf16       [R, S, D], S a multiple of LIST_BLOCK; absent slots hold zeros
    present_bool  [R, S]
    sink_f32      [H], added to the denominator only, neither scaled nor in the maximum

    The running maximum moves block by block and P is rounded to BF16 for the value product only, so
    where absent slots lie decides which entries share a block (design.md section 4).
    """
    n_rows, n_heads, width = q_bf16.shape
    q_f32 = q_bf16.float()
    scale = width**-0.5
    top = q_f32.new_full((n_rows, n_heads, 1), FIRST_MAX)
    mass = q_f32.new_zeros((n_rows, n_heads, 1))
    out_f32 = torch.zeros_like(q_f32)
    for start in range(0, kv_bf16.shape[1], LIST_BLOCK):
        kv_f32 = kv_bf16[:, start : start + LIST_BLOCK].float()
        absent = ~present_bool[:, None, start : start + LIST_BLOCK]
        scores = (torch.bmm(q_f32, kv_f32.transpose(1, 2)) * scale).masked_fill(absent, float("-inf"))
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        decay = torch.exp(top - new_top)
        p_f32 = torch.exp(scores - new_top)
        mass = mass * decay + p_f32.sum(-1, keepdim=True)
        out_f32 = out_f32 * decay + torch.bmm(p_f32.bfloat16().float(), kv_f32)
        top = new_top
    return (out_f32 / (mass + torch.exp(sink_f32[:, None] - top))).bfloat16()


@operator
def attention(
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
    """Fill out_bf16 [R, H, D]: rows of one sequence over their window and selected compressed rows.

    q_bf16            [R, H, D] rotated queries
    window_u8         [W, bytes] packed window rows in ascending position
    window_first_i32  [R] index into window_u8 of the row's first window entry
    window_count_i32  [R] entries from there, 1..window; the other slots of the window are absent
    rows_u8           [pages, rows, bytes] compressed rows, page_table_i32 [n_pages] of this sequence
    selected_i32      [R, K] compressed row indices ascending, -1 at the end; all three None without compression
    sink_f32          [H]

    The list is always `window` slots, then K, padded with absent ones to a multiple of LIST_BLOCK. out_bf16 may
    be q_bf16 itself.
    """
    bind_dims(
        "attention",
        "R",
        {
            "q_bf16 R H D": q_bf16,
            "window_u8 W B": window_u8,
            "window_first_i32 R": window_first_i32,
            "window_count_i32 R": window_count_i32,
            "sink_f32 H": sink_f32,
            "out_bf16 R H D": out_bf16,
        },
    )
    width = q_bf16.shape[2]
    n_selected = 0 if selected_i32 is None else selected_i32.shape[1]
    n_slots = -(-(window + n_selected) // LIST_BLOCK) * LIST_BLOCK
    slot = torch.arange(window, dtype=torch.int32, device=q_bf16.device)
    window_bf16 = RowFormat("window", width).unpack(window_u8)  # once: neighbouring rows share their windows
    row_format = RowFormat("compressed", width)

    def tile(q: Tensor, first: Tensor, count: Tensor, *selected: Tensor) -> Tensor:
        kv_bf16 = q.new_zeros((len(q), n_slots, width))
        present = torch.zeros((len(q), n_slots), dtype=torch.bool, device=q.device)
        present[:, :window] = slot < count[:, None]
        index = (first[:, None] + slot).where(present[:, :window], 0)
        kv_bf16[:, :window] = window_bf16[index].where(present[:, :window, None], 0)
        if selected and rows_u8 is not None and page_table_i32 is not None:
            chosen = selected[0] >= 0
            slots = row_slots(selected[0].clamp_min(0), page_table_i32, rows_u8.shape[1])
            values = row_format.unpack(rows_u8.flatten(0, 1)[slots])
            kv_bf16[:, window : window + n_selected] = values.where(chosen[..., None], 0)
            present[:, window : window + n_selected] = chosen
        return attention_ref(q, kv_bf16, present, sink_f32)

    per_row = (q_bf16, window_first_i32, window_count_i32)
    run_tiles(tile, per_row if selected_i32 is None else (*per_row, selected_i32), (out_bf16,), TILE_ROWS)
