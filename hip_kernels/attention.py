"""Window and selected attention: streaming softmax over one list, with sink (backbone.md section 5.4, 5.5)."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, operator, run_slabs
from rocline.hip_kernels.formats import RowFormat
from rocline.hip_kernels.pages import row_slots

LIST_BLOCK = 64  # slots between two updates of the running maximum
SLAB_ROWS = 64  # a row gathers its whole list: what stays in a core's cache
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
        scores = torch.bmm(q_f32, kv_f32.transpose(1, 2)).mul_(scale).masked_fill_(absent, float("-inf"))
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        decay = torch.exp(top - new_top)
        p_f32 = scores.sub_(new_top).exp_()
        mass = mass * decay + p_f32.sum(-1, keepdim=True)
        out_f32 = out_f32.mul_(decay).add_(torch.bmm(p_f32.bfloat16().float(), kv_f32))
        top = new_top
    return (out_f32 / (mass + torch.exp(sink_f32[:, None] - top))).bfloat16()


class _Lists:
    """What rows attend to; the fields as attention's. History is decoded once where that is less than every row's own
    list."""

    def __init__(
        self,
        q_bf16: Tensor,
        window_u8: Tensor,
        window: int,
        rows_u8: Tensor | None,
        page_table_i32: Tensor | None,
        selected_i32: Tensor | None,
    ) -> None:
        n_rows, _, self._width = q_bf16.shape
        self._n_selected = 0 if selected_i32 is None else selected_i32.shape[1]
        self._n_slots = -(-(window + self._n_selected) // LIST_BLOCK) * LIST_BLOCK
        self._slot = torch.arange(window, dtype=torch.int32, device=q_bf16.device)
        self._window_u8, self._rows_u8, self._page_table_i32 = window_u8, rows_u8, page_table_i32
        self._n_history = 0 if rows_u8 is None or page_table_i32 is None else len(page_table_i32) * rows_u8.shape[1]
        self._shares_history = self._n_history <= n_rows * self._n_selected

    @cached_property  # not before somebody computes: on paper nobody does
    def _shared(self) -> Tensor:
        """Entries that rows share, decoded once: zeros for absent ones, the window rows, perhaps all of history."""
        window_bf16 = RowFormat("window", self._width).unpack(self._window_u8)
        entries = [window_bf16.new_zeros((1, self._width)), window_bf16]
        if self._shares_history and self._n_history:
            entries.append(self._compressed(torch.arange(self._n_history, dtype=torch.int32, device=self._slot.device)))
        return torch.cat(entries)

    def of_rows(self, first_i32: Tensor, count_i32: Tensor, *selected_i32: Tensor) -> tuple[Tensor, Tensor]:
        """kv_bf16 [R, slots, D] of some of the rows, and which of the slots hold anything [R, slots]."""
        entries, window, slot = self._shared, len(self._slot), self._slot
        place = slot.new_zeros((len(first_i32), self._n_slots))
        place[:, :window] = (first_i32[:, None] + slot + 1).where(slot < count_i32[:, None], 0)
        for chosen in selected_i32:
            rows = chosen.clamp_min(0)
            if not self._shares_history:
                entries = torch.cat((entries, self._compressed(rows)))
                rows = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device).view(rows.shape)
            place[:, window : window + self._n_selected] = (rows + 1 + len(self._window_u8)).where(chosen >= 0, 0)
        kv_bf16 = entries.index_select(0, place.flatten()).view(len(place), self._n_slots, self._width)
        return kv_bf16, place > 0

    def _compressed(self, rows_i32: Tensor) -> Tensor:
        assert self._rows_u8 is not None
        assert self._page_table_i32 is not None
        slots = row_slots(rows_i32.flatten(), self._page_table_i32, self._rows_u8.shape[1])
        return RowFormat("compressed", self._width).unpack(self._rows_u8.flatten(0, 1)[slots])


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
    lists = _Lists(q_bf16, window_u8, window, rows_u8, page_table_i32, selected_i32)

    def slab(q: Tensor, first: Tensor, count: Tensor, *selected: Tensor) -> Tensor:
        kv_bf16, is_there = lists.of_rows(first, count, *selected)
        return attention_ref(q, kv_bf16, is_there, sink_f32)

    per_row = (q_bf16, window_first_i32, window_count_i32)
    run_slabs(slab, per_row if selected_i32 is None else (*per_row, selected_i32), out_bf16, slab_rows=SLAB_ROWS)
