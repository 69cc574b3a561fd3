"""The end of the path: final rows to output tokens and log-probabilities (design.md section 4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocline.engine import scratch
from rocline.engine.config import TextConfig
from rocline.engine.handoff import Rows, gathered
from rocline.engine.layers.head import Logits, final_rows
from rocline.engine.logprobs import Logprobs, logprobs_of
from rocline.engine.sampling import SamplerState, pack_rows
from rocline.engine.weights import ModelWeights
from rocline.hip_kernels.head import head
from rocline.hip_kernels.sampling import NOT_FINITE, sample

ROWS_AT_A_TIME = 64  # a tile of the head; the logits of a whole chunk would be its largest tensor by far


@dataclass(frozen=True)
class Ask:
    """What one sequence wants of its rows.

    sampler       chooses a token after the last row; None: no token yet
    n_logprobs    as Logprobs.k; None: none
    prompt_ids    tokens whose log-probabilities are wanted, by position from prompt_from on
    keep_logits   hand back the logits that the token was chosen from
    """

    sampler: SamplerState | None
    n_logprobs: int | None = None
    prompt_ids: Sequence[int] = ()
    prompt_from: int = 1
    keep_logits: bool = False


@dataclass
class Answer:
    """
    token            chosen after the last row; None where none was asked for, or `why` says why not
    why              what ends the request with an error
    logprobs         of `token`
    prompt_logprobs  of the prompt's tokens after each row
    logits_f32       [V] that `token` was chosen from
    """

    token: int | None = None
    why: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    logits_f32: Tensor | None = None


def answer(config: TextConfig, weights: ModelWeights, rows: Rows, asks: Mapping[int, Ask]) -> dict[int, Answer]:
    """By sequence, the answer to each whose logits were wanted of these rows (RowSpan.logits_from).

    Waits for the device once a piece of rows, and for each row whose log-probabilities or logits are asked for.
    """
    answers: dict[int, Answer] = {}
    last = {span.sequence: span.end - 1 for span in rows.spans}
    for logits in _pieces(config, weights, rows):
        at_end = [row for row, (sequence, position) in enumerate(logits.rows) if position == last[sequence]]
        choice = _choose(logits, [row for row in at_end if asks[logits.rows[row][0]].sampler], asks)
        finite = scratch.fetch(logits.finite_u8).tolist()
        for row, (sequence, position) in enumerate(logits.rows):
            ask, out = asks[sequence], answers.setdefault(sequence, Answer())
            if not finite[row]:
                out.why = out.why or f"logits of position {position} are not finite; the request cannot go on"
            if not out.why and ask.prompt_from <= position + 1 < len(ask.prompt_ids):
                row_f32 = scratch.fetch(logits.logits_f32[row])
                _add_prompt_token(out, row_f32, ask.prompt_ids[position + 1], ask.n_logprobs or 0)
        if choice:
            _tell(logits, choice, asks, answers)
    return answers


def _pieces(config: TextConfig, weights: ModelWeights, rows: Rows) -> Iterator[Logits]:
    """Logits of the wanted rows, a tile at a time: each piece overwrites the one before."""
    h_bf16, places = final_rows(config, weights.norm_bf16, rows)
    n_rows = min(ROWS_AT_A_TIME, len(places))
    logits_f32, finite_u8 = scratch.f32(n_rows, config.vocab_size), scratch.u8(n_rows)
    for start in range(0, len(places), ROWS_AT_A_TIME):
        of_piece = places[start : start + ROWS_AT_A_TIME]
        out = Logits(logits_f32[: len(of_piece)], finite_u8[: len(of_piece)], of_piece)
        head(h_bf16[start : start + len(of_piece)], weights.head_bf16, out.logits_f32, out.finite_u8)
        yield out


def _add_prompt_token(out: Answer, row_f32: Tensor, token: int, k: int) -> None:
    if out.prompt_logprobs is None:
        out.prompt_logprobs = Logprobs(k)
    out.prompt_logprobs.extend(logprobs_of(row_f32[None], [token], k))


@dataclass(frozen=True)
class _Choice:
    """Tokens ids_i32 [n], chosen from logits_f32 [n, V] of these rows."""

    rows: list[int]
    logits_f32: Tensor
    ids_i32: Tensor


def _choose(logits: Logits, rows: list[int], asks: Mapping[int, Ask]) -> _Choice | None:
    """A token after each of these rows, which need not be finite; nothing is waited for."""
    if not rows:
        return None
    logits_f32 = logits.logits_f32
    if len(rows) < len(logits_f32):
        logits_f32 = gathered(logits_f32, scratch.upload(torch.tensor(rows)))
    choice = _Choice(rows, logits_f32, scratch.i32(len(rows)))
    samplers = [sampler for row in rows if (sampler := asks[logits.rows[row][0]].sampler)]
    sample(choice.logits_f32, pack_rows((sampler, ()) for sampler in samplers), choice.ids_i32)
    return choice


def _tell(logits: Logits, choice: _Choice, asks: Mapping[int, Ask], answers: Mapping[int, Answer]) -> None:
    for at, (row, token) in enumerate(zip(choice.rows, scratch.fetch(choice.ids_i32).tolist(), strict=True)):
        sequence, position = logits.rows[row]
        ask, out = asks[sequence], answers[sequence]
        if out.why:
            continue
        if token < 0:
            why = "a score overflowed" if token == NOT_FINITE else "every token is banned"
            out.why = f"no token to choose after position {position}: {why}"
            continue
        out.token = token
        if ask.n_logprobs is not None:
            out.logprobs = logprobs_of(scratch.fetch(choice.logits_f32[at])[None], [token], ask.n_logprobs)
        if ask.keep_logits:
            out.logits_f32 = scratch.fetch(choice.logits_f32[at]).clone()  # beyond this memory's scope
