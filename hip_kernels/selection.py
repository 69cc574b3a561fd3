"""Candidate position-blocks and top-k lists over index scores (backbone.md section 7 step 5, section 8).

Ties are decided everywhere: higher score first, then lower index; -0 equals +0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, run_slabs
from rocline.hip_kernels.kernel import Kernel, launch

_SELECT = Kernel("selection.hip", "select_keys", "PPPPPiiii", threads=1024, lds_bytes=(4096 + 34) * 4)
RELEASE_KERNELS = (_SELECT,)


def top_k_mask(scores_f32: Tensor, k: int) -> Tensor:
    """[R, P] bool: the k best of each row, ties to the lower index. NaN and -inf are never chosen."""
    scores_f32 = scores_f32.where(~scores_f32.isnan(), float("-inf"))
    real = scores_f32 > float("-inf")
    if k >= scores_f32.shape[1]:
        return real
    cut = scores_f32.topk(k, dim=1).values[:, -1:]
    chosen = (scores_f32 >= cut) & real
    many = (chosen.sum(1) > k).nonzero(as_tuple=True)[0]  # rows with more ties at the cut than room
    if len(many):
        tied = scores_f32[many] == cut[many]
        above = chosen[many] & ~tied
        chosen[many] = above | (tied & (tied.cumsum(1) <= k - above.sum(1, keepdim=True)))
    return chosen


def mask_to_list(mask_bool: Tensor, width: int) -> Tensor:
    """[R, width] int32: the indices set in each row of mask_bool [R, P], ascending, -1 at the end."""
    out = torch.full((len(mask_bool), width), -1, dtype=torch.int32, device=mask_bool.device)
    row, index = mask_bool.nonzero(as_tuple=True)  # row by row, ascending
    n_set = mask_bool.sum(1)
    place = torch.arange(len(row), device=row.device) - (n_set.cumsum(0) - n_set)[row]
    out[row, place] = index.int()
    return out


def candidate_blocks_ref(scores_f32: Tensor, visible_i32: Tensor, block_size: int, n_keep: int) -> Tensor:
    """[R, n_keep] int32 kept candidate blocks, ascending, -1 at the end; scores [R, P] are causally masked.

    A block scores the maximum of its positions; the block of the newest visible row is kept in any case.
    """
    n_positions = scores_f32.shape[1]
    scores_f32 = scores_f32.where(~scores_f32.isnan(), float("-inf"))  # a NaN must not take its block along
    padded = F.pad(scores_f32, (0, -n_positions % block_size), value=float("-inf"))
    blocks = padded.unflatten(1, (-1, block_size)).amax(2)
    newest = torch.div(visible_i32 - 1, block_size, rounding_mode="floor")
    forced = torch.arange(blocks.shape[1], device=blocks.device) == newest[:, None]
    blocks = blocks.masked_fill(forced, float("inf"))
    return mask_to_list(top_k_mask(blocks, n_keep), n_keep)


def candidate_blocks(scores_f32: Tensor, visible_i32: Tensor, block_size: int, blocks_i32: Tensor) -> None:
    """Fill blocks_i32 [R, C] (see candidate_blocks_ref) from scores_f32 [R, P] and visible_i32 [R]."""
    bind_dims(
        "candidate_blocks",
        "R",
        {"scores_f32 R P": scores_f32, "visible_i32 R": visible_i32, "blocks_i32 R C": blocks_i32},
    )
    n_keep = blocks_i32.shape[1]
    run_slabs(
        lambda scores, visible: candidate_blocks_ref(scores, visible, block_size, n_keep),
        (scores_f32, visible_i32),
        blocks_i32,
    )


def restrict_ref(scores_f32: Tensor, blocks_i32: Tensor, block_size: int) -> Tensor:
    """scores [R, P] with every position outside the kept blocks at -inf."""
    n_blocks = -(-scores_f32.shape[1] // block_size)
    kept = torch.zeros((len(scores_f32), n_blocks + 1), dtype=torch.bool, device=scores_f32.device)
    kept.scatter_(1, blocks_i32.long().where(blocks_i32 >= 0, n_blocks), True)
    keep = kept[:, :n_blocks].repeat_interleave(block_size, 1)[:, : scores_f32.shape[1]]
    return scores_f32.masked_fill(~keep, float("-inf"))


def top_k_list_ref(scores_f32: Tensor, visible_i32: Tensor, k: int) -> Tensor:
    """[R, k] int32: the k best positions ascending, -1 at the end where fewer are visible."""
    position = torch.arange(scores_f32.shape[1], dtype=torch.int32, device=scores_f32.device)
    return mask_to_list(top_k_mask(scores_f32, k) & (position < visible_i32[:, None]), k)


def top_k_list(
    scores_f32: Tensor,
    visible_i32: Tensor,
    blocks_i32: Tensor | None,
    block_size: int,
    selected_i32: Tensor,
) -> None:
    """Fill selected_i32 [R, K] from causally masked scores_f32 [R, P] and visible_i32 [R].

    blocks_i32 [R, C] restricts the choice to kept candidate blocks; None leaves it open.
    """
    bind_dims(
        "top_k_list",
        "R",
        {"scores_f32 R P": scores_f32, "visible_i32 R": visible_i32, "selected_i32 R K": selected_i32},
    )
    k = selected_i32.shape[1]

    def slab(scores: Tensor, visible: Tensor, *blocks: Tensor) -> Tensor:
        if blocks:
            scores = restrict_ref(scores, blocks[0], block_size)
        return top_k_list_ref(scores, visible, k)

    per_row = (scores_f32, visible_i32)
    run_slabs(slab, per_row if blocks_i32 is None else (*per_row, blocks_i32), selected_i32)


def select_keys_hip(
    keys_i16: Tensor,
    chosen_i32: Tensor,
    visible_i32: Tensor | None = None,
    among_i32: Tensor | None = None,
    listed_i32: Tensor | None = None,
) -> None:
    """chosen_i32 [rows, K]: the best of keys_i16 [rows, n], ascending, -1 at the end; see selection.hip.

    visible_i32  [rows] positions a row sees: its keys are those of their blocks, and what lies behind is not read
    among_i32    [rows, n / 8] blocks that the keys are of, eight each
    listed_i32   [rows, L] a second list by the same keys; in the first the newest visible block is chosen in any case
    """
    n_rows, k = chosen_i32.shape
    width, n_listed = (0 if lists is None else lists.shape[1] for lists in (among_i32, listed_i32))
    args = (chosen_i32, listed_i32, keys_i16, visible_i32, among_i32, keys_i16.shape[1], k, n_listed, width)
    launch(_SELECT, grid=(1 if listed_i32 is None else 2, n_rows), args=args, lds_bytes=_SELECT.lds_bytes)
