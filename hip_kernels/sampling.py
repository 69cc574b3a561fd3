"""The choice of a token from its row of logits, and log-probabilities (design.md section 4, io.md Part 3).

Every step is an exact selection or one rounded FP32 operation per element in a stated order, so rows need no
padded tiles: a row's bits are its own, and a kernel that repeats the steps repeats the bits on any device.
Order among scores is everywhere: higher first, then the lower id; -0 equals +0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from rocline.hip_kernels.binding import bind_dims, operator
from rocline.hip_kernels.explog import exp_f32, log_f32
from rocline.hip_kernels.philox import gumbel_ref
from rocline.hip_kernels.selection import top_k_mask

NOT_FINITE = -1  # in place of an id: a logit was NaN or infinite, or a score overflowed
NOTHING_LEFT = -2  # in place of an id: every token was banned

SUM_BLOCK = 64  # terms added one after the other in a sum or a prefix sum
_FIRST_RANKS = 1024  # ranks looked at first for top-p, a multiple of SUM_BLOCK; it cannot change the result


@dataclass(frozen=True)
class SampleRows:
    """How each of R rows is sampled. A list's unused places hold id -1; ids of one list are distinct.

    seed_i64          [R]     the request's seed, all 64 bits
    position_i64      [R]     position the chosen token will have
    temperature_f32   [R]     0: arg-max of the adjusted logits, nothing below applies
    top_k_i32         [R]     0: off
    top_p_f32         [R]     1: off
    min_p_f32         [R]     0: off
    repetition_f32    [R]     on tokens of prompt and output; 1: off
    presence_f32      [R]     on tokens of the output
    frequency_f32     [R]     on tokens of the output, per occurrence
    seen_ids_i32      [R, S]  tokens of the prompt and the output
    seen_counts_i32   [R, S]  their occurrences in the output; 0 for the prompt's own
    bias_ids_i32      [R, B]
    bias_f32          [R, B]
    banned_ids_i32    [R, N]  tokens that cannot be chosen
    """

    seed_i64: Tensor
    position_i64: Tensor
    temperature_f32: Tensor
    top_k_i32: Tensor
    top_p_f32: Tensor
    min_p_f32: Tensor
    repetition_f32: Tensor
    presence_f32: Tensor
    frequency_f32: Tensor
    seen_ids_i32: Tensor
    seen_counts_i32: Tensor
    bias_ids_i32: Tensor
    bias_f32: Tensor
    banned_ids_i32: Tensor

    def row(self, row: int) -> SampleRows:
        """The same fields without their first dimension."""
        return SampleRows(*(getattr(self, field.name)[row] for field in fields(self)))


_LIST_DIMS = {
    "seen_ids_i32": " S",
    "seen_counts_i32": " S",
    "bias_ids_i32": " B",
    "bias_f32": " B",
    "banned_ids_i32": " N",
}


@operator
def sample(logits_f32: Tensor, how: SampleRows, ids_i32: Tensor) -> None:
    """Fill ids_i32 [R] from logits_f32 [R, V], which stay as they are; see sample_ref.

    A row that has no token to choose gets NOT_FINITE or NOTHING_LEFT; other rows do not notice. Raises BindError
    for a tensor of the wrong shape or dtype.
    """
    n_rows, _ = bind_sample(logits_f32, how, ids_i32)
    for row in range(n_rows):
        ids_i32[row] = sample_ref(logits_f32[row], how.row(row))


def bind_sample(logits_f32: Tensor, how: SampleRows, ids_i32: Tensor) -> tuple[int, int]:
    """R and V. Raises BindError."""
    specs = {f"{f.name} R{_LIST_DIMS.get(f.name, '')}": getattr(how, f.name) for f in fields(how)}
    n_rows, n_vocab = bind_dims("sample", "R V", {"logits_f32 R V": logits_f32, "ids_i32 R": ids_i32, **specs})
    return n_rows, n_vocab


def sample_ref(logits_f32: Tensor, how: SampleRows) -> int:
    """The id chosen from one row's logits_f32 [V] (`how` is a SampleRows.row), or NOT_FINITE or NOTHING_LEFT.

    Adjusted logits (adjust_ref) divided by the temperature; tokens outside top-k, top-p and min-p dropped
    (kept_ref); Gumbel noise of (seed, position, id) added (philox.gumbel_ref); arg-max. At temperature 0: arg-max
    of the adjusted logits.
    """
    if not torch.isfinite(logits_f32).all():
        return NOT_FINITE
    scores_f32 = adjust_ref(logits_f32, how)
    sampled = bool(how.temperature_f32 > 0)
    if sampled:
        scores_f32 = scores_f32 / how.temperature_f32
    best = float(scores_f32.max())
    if best == float("inf"):
        return NOT_FINITE
    if best == float("-inf"):
        return NOTHING_LEFT
    if not sampled:
        return int(scores_f32.argmax())
    scores_f32 = scores_f32.masked_fill(~kept_ref(scores_f32, how), float("-inf"))
    by_quad_f32 = _blocks(scores_f32, 4, float("-inf"))  # [V / 4, 4]: four ids share a counter of the noise
    quads = (by_quad_f32 > float("-inf")).any(1).nonzero()[:, 0]
    noisy_f32 = by_quad_f32[quads] + gumbel_ref(int(how.seed_i64), int(how.position_i64), quads)
    place = int(noisy_f32.argmax())  # quads ascend, so the first of equals has the lowest id
    return int(quads[place // 4]) * 4 + place % 4


def adjust_ref(logits_f32: Tensor, how: SampleRows) -> Tensor:
    """[V] logits after penalties, bias and bans, each step one FP32 rounding.

    repetition  of a seen token: times the penalty where the logit is negative, else divided by it
    presence    of an output token: - presence, then - (frequency * occurrences)
    bias        + bias
    ban         -inf
    """
    scores_f32 = logits_f32.clone()
    listed = how.seen_ids_i32 >= 0
    ids, counts = how.seen_ids_i32[listed], how.seen_counts_i32[listed]
    seen = scores_f32[ids]
    seen = torch.where(seen < 0, seen * how.repetition_f32, seen / how.repetition_f32)
    lowered = (seen - how.presence_f32) - how.frequency_f32 * counts.float()
    scores_f32[ids] = torch.where(counts > 0, lowered, seen)
    listed = how.bias_ids_i32 >= 0
    ids = how.bias_ids_i32[listed]
    scores_f32[ids] = scores_f32[ids] + how.bias_f32[listed]
    scores_f32[how.banned_ids_i32[how.banned_ids_i32 >= 0]] = float("-inf")
    return scores_f32


def kept_ref(scores_f32: Tensor, how: SampleRows) -> Tensor:
    """[V] bool: the tokens of one row that stay after top-k, then top-p, then min-p; the best always does.

    top-k  the k first in order; k >= V keeps all
    top-p  top_p_ref over the weights exp_f32(score - best score), 0 for what top-k dropped
    min-p  weight >= min_p, that is probability >= min_p times the best one's
    """
    kept = scores_f32 > float("-inf")
    if how.top_k_i32 > 0:
        kept = kept & top_k_mask(scores_f32[None], int(how.top_k_i32))[0]
    if how.top_p_f32 < 1 or how.min_p_f32 > 0:
        weights_f32 = exp_f32(scores_f32 - scores_f32.max()).masked_fill(~kept, 0.0)
        if how.top_p_f32 < 1:
            kept = kept & top_p_ref(scores_f32, weights_f32, how.top_p_f32)
        kept = kept & (weights_f32 >= how.min_p_f32)
    return kept


def top_p_ref(scores_f32: Tensor, weights_f32: Tensor, top_p_f32: Tensor) -> Tensor:
    """[V] bool: the first by scores_f32, and every token whose predecessors' weights sum to less than the limit.

    The limit is fp32(top_p * sum_ref(weights_f32)), weights in order of id; a predecessors' sum is prefix_ref's
    over the weights in order of scores_f32.
    """
    limit_f32 = top_p_f32 * sum_ref(weights_f32)
    keys = rank_keys(scores_f32)
    n_ranks = _FIRST_RANKS
    while True:
        best = keys.topk(min(n_ranks, len(keys))).values
        n_kept = int((prefix_ref(weights_f32[ranked_ids(best)]) < limit_f32).sum())
        if n_kept < n_ranks:
            return keys >= best[max(n_kept, 1) - 1]
        n_ranks *= 8  # what follows does not change a prefix sum


def rank_keys(scores_f32: Tensor) -> Tensor:
    """[V] int64, all distinct, larger for what is earlier in order: the score in the upper half, the id below."""
    bits = (scores_f32 + 0.0).view(torch.int32).long()  # + 0: no negative zero
    ordered = bits ^ (bits >> 63 & 0x7FFFFFFF)  # as integers, negative floats run backwards
    return ordered << 32 | 0xFFFFFFFF - torch.arange(len(scores_f32), device=scores_f32.device)


def ranked_ids(keys_i64: Tensor) -> Tensor:
    """The token ids (int64) inside rank_keys."""
    return 0xFFFFFFFF - (keys_i64 & 0xFFFFFFFF)


def sum_ref(x_f32: Tensor) -> Tensor:
    """The sum of x_f32 [V], in FP32.

    Each block of SUM_BLOCK is summed in ascending order of index, zeros after the end; then the block sums in the
    same way, until one is left.
    """
    while True:
        x_f32 = _running_sums(_blocks(x_f32, SUM_BLOCK))[-1]
        if len(x_f32) == 1:
            return x_f32[0]


def prefix_ref(x_f32: Tensor) -> Tensor:
    """[n] FP32: the sum of what precedes each of x_f32 [n], terms at least 0; never decreasing.

    Inside a block of SUM_BLOCK terms are added ascending; so are, from the first, the sums of whole blocks. An
    element's sum is fp32(whole blocks before its own + terms before it in its own), 0 for none.
    """
    *inside, totals = _running_sums(_blocks(x_f32, SUM_BLOCK))
    before = _running_sums(totals[None])[:-1]
    return (torch.cat(before)[:, None] + torch.stack(inside, 1)).flatten()[: len(x_f32)]


def _running_sums(rows_f32: Tensor) -> list[Tensor]:
    """n + 1 tensors [R]: the sums of the first 0, 1, ... n columns of rows_f32 [R, n], added ascending in FP32."""
    # Not cumsum: on the CPU it adds in FP64.
    sums = [torch.zeros_like(rows_f32[:, 0])]
    for column in rows_f32.T.contiguous().unbind():
        sums.append(sums[-1] + column)
    return sums


def _blocks(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """x [V] as rows [n, size], `fill` after the end."""
    return F.pad(x, (0, -len(x) % size), value=fill).unflatten(0, (-1, size))


def logprobs(logits_f32: Tensor, chosen_i32: Tensor, chosen_f32: Tensor, top_ids_i32: Tensor, top_f32: Tensor) -> None:
    """Fill the log-probabilities of chosen tokens, and of each row's best, from raw logits at temperature 1.

    logits_f32   [R, V]
    chosen_i32   [R]     token ids; a negative one (see sample) gets NaN
    chosen_f32   [R]     out
    top_ids_i32  [R, N]  out: the N best in order, -1 where there are fewer
    top_f32      [R, N]  out: theirs, NaN where there are fewer

    A row with a logit that is not finite gets NaN and -1 everywhere. Raises BindError for a tensor of the wrong
    shape or dtype.
    """
    n_rows, n_vocab, n_top = bind_logprobs(logits_f32, chosen_i32, chosen_f32, top_ids_i32, top_f32)
    chosen_f32.fill_(float("nan"))
    top_ids_i32.fill_(-1)
    top_f32.fill_(float("nan"))
    n_top = min(n_top, n_vocab)
    for row in range(n_rows):
        if not torch.isfinite(logits_f32[row]).all():
            continue
        row_f32 = logprobs_ref(logits_f32[row])
        if chosen_i32[row] >= 0:
            chosen_f32[row] = row_f32[chosen_i32[row]]
        best = ranked_ids(rank_keys(logits_f32[row]).topk(n_top).values)
        top_ids_i32[row, :n_top] = best
        top_f32[row, :n_top] = row_f32[best]


def bind_logprobs(
    logits_f32: Tensor, chosen_i32: Tensor, chosen_f32: Tensor, top_ids_i32: Tensor, top_f32: Tensor
) -> tuple[int, int, int]:
    """R, V and N. Raises BindError."""
    n_rows, n_vocab, n_top = bind_dims(
        "logprobs",
        "R V N",
        {
            "logits_f32 R V": logits_f32,
            "chosen_i32 R": chosen_i32,
            "chosen_f32 R": chosen_f32,
            "top_ids_i32 R N": top_ids_i32,
            "top_f32 R N": top_f32,
        },
    )
    return n_rows, n_vocab, n_top


def logprobs_ref(logits_f32: Tensor) -> Tensor:
    """[V] log-softmax of one row's finite logits: (x - max) - log_f32(sum_ref(exp_f32(x - max)))."""
    shifted_f32 = logits_f32 - logits_f32.max()
    return shifted_f32 - log_f32(sum_ref(exp_f32(shifted_f32)))
