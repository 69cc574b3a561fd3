"""The choice of tokens and their log-probabilities on the GPU, bit for bit (sampling.py says what they are)."""

from __future__ import annotations

import torch
from torch import Tensor

from rocline.hip_kernels.binding import BindError
from rocline.hip_kernels.driver import copy_async
from rocline.hip_kernels.kernel import Kernel, launch
from rocline.hip_kernels.sampling import SampleRows, bind_logprobs, bind_sample

LIST_THREADS = 256
MOST_VOCAB, MOST_TOP = 131072, 2048
_SEEN, _BIAS, _BANNED = range(3)
_LDS_BYTES = (5 * 2048 + 40) * 4

_ADJUST = Kernel("sampling.hip", "sample_adjust", "PPPPPPPiii", threads=LIST_THREADS)
_CHOOSE = Kernel("sampling.hip", "sample_choose", "P" * 9 + "i", threads=1024, lds_bytes=_LDS_BYTES)
_LOGPROBS = Kernel("sampling.hip", "sample_logprobs", "PPPPPii", threads=1024, lds_bytes=_LDS_BYTES)
RELEASE_KERNELS = (_ADJUST, _CHOOSE, _LOGPROBS)


def sample_hip(logits_f32: Tensor, how: SampleRows, ids_i32: Tensor, adjusted_f32: Tensor | None = None) -> None:
    """sampling.sample on the current stream, the same ids; V at most 131,072.

    adjusted_f32  [R, V] workspace, wanted where how has a list of any width; a list that no row uses has width 0

    One launch, and one for each list of some width. Raises BindError.
    """
    n_rows, n_vocab = bind_sample(logits_f32, how, ids_i32)
    _check_vocab("sample", n_vocab)
    lists = (
        (_SEEN, how.seen_ids_i32, how.seen_counts_i32, None),
        (_BIAS, how.bias_ids_i32, None, how.bias_f32),
        (_BANNED, how.banned_ids_i32, None, None),
    )
    used = [entry for entry in lists if entry[1].shape[1]]
    if not n_rows:
        return
    scores_f32 = logits_f32
    if used:
        if adjusted_f32 is None or adjusted_f32.shape != logits_f32.shape or adjusted_f32.dtype != torch.float32:
            given = None if adjusted_f32 is None else (list(adjusted_f32.shape), adjusted_f32.dtype)
            raise BindError(f"sample: adjusted_f32 is {given}, want FP32 [{n_rows}, {n_vocab}] since how has lists")
        scores_f32 = adjusted_f32
        copy_async(scores_f32.data_ptr(), logits_f32.data_ptr(), logits_f32.nbytes)
    penalties = (how.repetition_f32, how.presence_f32, how.frequency_f32)
    for kind, ids, counts, bias in used:
        width = ids.shape[1]
        entries = (scores_f32, ids, counts, bias, *penalties)
        launch(_ADJUST, grid=(-(-width // LIST_THREADS), n_rows), args=(*entries, kind, width, n_vocab))
    noise = (how.seed_i64, how.position_i64)
    limits = (how.temperature_f32, how.top_k_i32, how.top_p_f32, how.min_p_f32)
    args = (ids_i32, logits_f32, scores_f32, *noise, *limits, n_vocab)
    launch(_CHOOSE, grid=(n_rows, 1), args=args, lds_bytes=_LDS_BYTES)


def logprobs_hip(
    logits_f32: Tensor, chosen_i32: Tensor, chosen_f32: Tensor, top_ids_i32: Tensor, top_f32: Tensor
) -> None:
    """sampling.logprobs on the current stream, the same bits; V at most 131,072, N at most 2,048. Raises BindError."""
    n_rows, n_vocab, n_top = bind_logprobs(logits_f32, chosen_i32, chosen_f32, top_ids_i32, top_f32)
    _check_vocab("logprobs", n_vocab)
    if n_top > MOST_TOP:
        raise BindError(f"logprobs: the best {n_top} of each row, want at most {MOST_TOP}")
    if n_rows:
        args = (chosen_f32, top_ids_i32, top_f32, logits_f32, chosen_i32, n_vocab, n_top)
        launch(_LOGPROBS, grid=(n_rows, 1), args=args, lds_bytes=_LDS_BYTES)


def _check_vocab(op: str, n_vocab: int) -> None:
    if not 0 < n_vocab <= MOST_VOCAB:
        raise BindError(f"{op}: {n_vocab} logits a row, want 1 to {MOST_VOCAB}: the kernel's sums have room for those")
