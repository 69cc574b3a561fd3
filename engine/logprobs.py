"""Log-probabilities of tokens and of their likeliest alternatives (io.md section 5.2)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rocline.hip_kernels.sampling import logprobs


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
    n_rows, k = len(token_ids), min(k, logits_f32.shape[1])
    chosen_i32 = torch.tensor(token_ids, dtype=torch.int32)
    own_f32, top_f32 = torch.empty(n_rows), torch.empty(n_rows, k)
    top_ids_i32 = torch.empty(n_rows, k, dtype=torch.int32)
    logprobs(logits_f32, chosen_i32, own_f32, top_ids_i32, top_f32)
    out = Logprobs(k)
    out.own_f32.frombytes(own_f32.numpy().tobytes())
    out.top_ids.frombytes(top_ids_i32.numpy().tobytes())
    out.top_f32.frombytes(top_f32.numpy().tobytes())
    return out
