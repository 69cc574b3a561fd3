"""Log-probabilities of tokens and of their likeliest alternatives (io.md section 5.2)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Logprobs:
    """Natural log-probabilities under the model's own distribution: temperature 1, no penalty, no bias.

    k        alternatives of each token
    own_f32  [n] of the tokens themselves
    top_ids  [n, k] of the k likeliest, likeliest first, lower id first on a tie
    top_f32  [n, k]
    """

    k: int
    own_f32: array[float] = field(default_factory=lambda: array("f"))
    top_ids: array[int] = field(default_factory=lambda: array("i"))
    top_f32: array[float] = field(default_factory=lambda: array("f"))

    def __len__(self) -> int:
        return len(self.own_f32)

    def extend(self, other: Logprobs) -> None:
        self.own_f32.extend(other.own_f32)
        self.top_ids.extend(other.top_ids)
        self.top_f32.extend(other.top_f32)

    def top(self, token: int) -> list[tuple[int, float]]:
        """(id, log-probability) of the alternatives of the token at this place."""
        place = slice(token * self.k, (token + 1) * self.k)
        return list(zip(self.top_ids[place], self.top_f32[place], strict=True))


def logprobs_of(logits_f32: Tensor, token_ids: Sequence[int], k: int) -> Logprobs:
    """Of token_ids [n], each under its row of logits_f32 [n, V]."""
    out = Logprobs(k)
    for row_f32, token in zip(logits_f32, token_ids, strict=True):
        row_f64 = row_f32.double().log_softmax(0)
        out.own_f32.append(float(row_f64[token]))
        ids_i64 = _likeliest(row_f32, k)
        out.top_ids.frombytes(ids_i64.int().numpy().tobytes())
        out.top_f32.frombytes(row_f64[ids_i64].float().numpy().tobytes())
    return out


def _likeliest(row_f32: Tensor, k: int) -> Tensor:
    """Ids of the k largest of row_f32 [V], lower id first on a tie, which topk does not promise."""
    k = min(k, len(row_f32))
    if not k:
        return torch.empty(0, dtype=torch.int64)
    ids_i64 = (row_f32 >= row_f32.topk(k).values[-1]).nonzero().flatten()
    return ids_i64[row_f32[ids_i64].argsort(descending=True, stable=True)][:k]
