"""Sampling noise that depends on (request seed, position, token id) only (design.md section 4).

Philox4x32-10 is the counter-based generator of Random123: no state, any word at any time, in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocline.hip_kernels.explog import log_f32

PURPOSE_TOKEN = 0  # third counter word; another use of a request's seed takes another number

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_BELOW_ONE = 1 - 2.0**-24  # the largest FP32 below 1


def philox4x32_10(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words for each counter: int64 tensors of values below 2^32 that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The 64-bit product may wrap below zero; its bits are still the unsigned product's.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (high >> 32 & _WORD) ^ c1 ^ k0, high & _WORD
        c2, c3 = (low >> 32 & _WORD) ^ c3 ^ k1, low & _WORD
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return c0, c1, c2, c3


def gumbel_ref(seed: int, position: int, quads_i64: Tensor) -> Tensor:
    """[Q, 4] FP32 standard Gumbel noise at `position` of token ids 4 q ... 4 q + 3, for q in quads_i64 [Q].

    key      the seed's low and high 32 bits
    counter  (position, q, purpose, position >> 32), one word for each of the four ids
    u        (word >> 8 + 0.5) * 2^-24 in FP32, at most 1 - 2^-24: a word of 24 leading ones would round to
             u = 1, whose noise is infinite, and once in 130 rows of 129,280 ids choose a token whatever its score
    noise    -log(-log(u)), log_f32 both times
    """
    low, purpose, high = (
        torch.tensor(word, device=quads_i64.device) for word in (position & _WORD, PURPOSE_TOKEN, position >> 32)
    )
    words = philox4x32_10((low, quads_i64, purpose, high), (seed & _WORD, seed >> 32 & _WORD))
    return gumbel_of_words(torch.stack(words, 1))


def gumbel_of_words(words_i64: Tensor) -> Tensor:
    """FP32 noise of random words in [0, 2^32), any shape; see gumbel_ref."""
    u_f32 = (((words_i64 >> 8).float() + 0.5) * 2.0**-24).clamp(max=_BELOW_ONE)
    return -log_f32(-log_f32(u_f32))
