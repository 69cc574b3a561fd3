"""How a request's tokens are chosen: its parameters, what it has seen so far, and a batch of both as tensors.

Spec: design.md section 4 (sampling), io.md Part 3 and section 5.2. The choice itself is hip_kernels/sampling.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rocline.hip_kernels.sampling import SampleRows

LOWEST_TEMPERATURE = 1e-5  # the released reference's floor; only 0 itself means arg-max
INT32_MAX = 2**31 - 1
SEED_MAX = 2**63 - 1


class SamplingError(ValueError):
    """A sampling parameter is outside its range."""


def _require(good: bool, field: str, value: object, allowed: str) -> None:
    if not good:
        raise SamplingError(f"{field} = {value}: must be {allowed}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a request asks of its sampler. Raises SamplingError with the field, its value and the allowed range.

    temperature         0: arg-max, lowest id on a tie; between 0 and 1e-5 it counts as 1e-5
    top_k               tokens kept, -1 or 0: all
    top_p               share of probability kept, 1: all
    min_p               least probability kept, as a share of the best token's, 0: all
    repetition_penalty  divides positive logits of tokens in prompt or output and multiplies negative ones
    presence_penalty    taken off logits of tokens in the output
    frequency_penalty   taken off logits of tokens in the output, once an occurrence
    logit_bias          token id: added to its logit
    min_tokens          output tokens before one of the stop ids may be chosen
    max_tokens          output tokens at most
    seed                None: the request draws one (SamplerState.seed)
    ignore_eos          the model's end token is a token like any other
    stop_token_ids      end the output like the model's end token; ignore_eos does not concern them
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    max_tokens: int = 8192
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0, 100),
            ("top_k", -1, INT32_MAX),
            ("min_p", 0, 1),
            ("repetition_penalty", 0.01, 100),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
            ("max_tokens", 1, INT32_MAX),
            ("min_tokens", 0, self.max_tokens),
        ):
            value = getattr(self, name)
            _require(low <= value <= high, name, value, f"from {low} to {high}")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, and 1 at most")
        seed = self.seed
        _require(seed is None or 0 <= seed <= SEED_MAX, "seed", seed, f"from 0 to {SEED_MAX}, or absent")
        for token, bias in self.logit_bias.items():
            _require(-100 <= bias <= 100, f"logit_bias[{token}]", bias, "from -100 to 100")

    def check_vocab(self, vocab_size: int) -> None:
        """Raise SamplingError for a token id the model does not have."""
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(self, name):
                _require(0 <= token < vocab_size, f"token id in {name}", token, f"from 0 to {vocab_size - 1}")

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class SamplerState:
    """One request's sampler between steps: its parameters, its seed, and the tokens that count for penalties.

    seed         the request's own, or drawn here; what the client is told
    stop_ids     tokens that end the output
    n_committed  output tokens so far
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int], eos_ids: Iterable[int], vocab_size: int
    ) -> None:
        """Raises SamplingError for a token id in `params` that is not below vocab_size."""
        params.check_vocab(vocab_size)
        self.params = params
        self.seed = secrets.randbelow(SEED_MAX + 1) if params.seed is None else params.seed
        self.stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids)
        self.n_committed = 0
        self._n_prompt = len(prompt_ids)
        # Occurrences in the output. Only repetition asks for the prompt's tokens: they are there with 0.
        self._counts = dict.fromkeys(prompt_ids if params.repetition_penalty != 1 else (), 0)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the output."""
        self.n_committed += len(token_ids)
        if self.params.has_penalties:
            _count(self._counts, token_ids)

    def _rows(self, draft_ids: Sequence[int]) -> Iterator[_Row]:
        """The choice after the committed tokens, then after each draft as if it were committed."""
        counts = self._counts
        yield _Row(self, counts, self.n_committed)
        for n_drafts, draft in enumerate(draft_ids, 1):
            if self.params.has_penalties:
                counts = dict(counts)
                _count(counts, [draft])
            yield _Row(self, counts, self.n_committed + n_drafts)


class _Row(NamedTuple):
    state: SamplerState
    counts: dict[int, int]
    n_output: int

    @property
    def position(self) -> int:
        return self.state._n_prompt + self.n_output

    @property
    def banned_ids(self) -> frozenset[int]:
        return self.state.stop_ids if self.n_output < self.state.params.min_tokens else frozenset()


def _count(counts: dict[int, int], token_ids: Sequence[int]) -> None:
    for token in token_ids:
        counts[token] = counts.get(token, 0) + 1


def pack_rows(requests: Iterable[tuple[SamplerState, Sequence[int]]]) -> SampleRows:
    """The sampler's tensors (on the CPU) for requests, at least one, given as (state, draft ids to verify).

    A request has 1 + len(draft ids) rows: the choice after its committed tokens, then after each draft. A row's
    position is that of the token it chooses, counted from the prompt's first token at 0.
    """
    rows = [row for state, draft_ids in requests for row in state._rows(draft_ids)]
    params = [row.state.params for row in rows]
    floats = [
        [p.temperature and max(p.temperature, LOWEST_TEMPERATURE) for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [p.repetition_penalty for p in params],
        [p.presence_penalty for p in params],
        [p.frequency_penalty for p in params],
    ]
    temperature_f32, top_p_f32, min_p_f32, *penalties = torch.tensor(floats, dtype=torch.float32)  # at once: in a step
    seed_i64, position_i64 = torch.tensor([[row.state.seed for row in rows], [row.position for row in rows]])
    return SampleRows(
        seed_i64=seed_i64,
        position_i64=position_i64,
        temperature_f32=temperature_f32,
        top_k_i32=torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int32),
        top_p_f32=top_p_f32,
        min_p_f32=min_p_f32,
        repetition_f32=penalties[0],
        presence_f32=penalties[1],
        frequency_f32=penalties[2],
        seen_ids_i32=_lists([row.counts.keys() for row in rows], np.int32),
        seen_counts_i32=_lists([row.counts.values() for row in rows], np.int32),
        bias_ids_i32=_lists([p.logit_bias.keys() for p in params], np.int32),
        bias_f32=_lists([p.logit_bias.values() for p in params], np.float32),
        banned_ids_i32=_lists([row.banned_ids for row in rows], np.int32),
    )


def _lists(lists: Sequence[Collection[float]], dtype: type[np.generic]) -> Tensor:
    """[R, width of the longest], -1 where a list has ended."""
    if not any(lists):
        return torch.from_numpy(np.empty((len(lists), 0), dtype))
    table = np.full((len(lists), max(map(len, lists))), -1, dtype)
    for row, items in zip(table, lists, strict=True):
        row[: len(items)] = np.fromiter(items, dtype, len(items))
    return torch.from_numpy(table)
