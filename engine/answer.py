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
    for piece in _pieces(config, weights, rows):
        logits = piece.logits
        at_end = [row for row, (sequence, position) in enumerate(logits.rows) if position == last[sequence]]
        choice = _choose(piece, [row for row in at_end if asks[logits.rows[row][0]].sampler], asks)
        finite, ids = piece.told()
        for row, (sequence, position) in enumerate(logits.rows):
            ask, out = asks[sequence], answers.setdefault(sequence, Answer())
            if not finite[row]:
                out.why = out.why or f"logits of position {position} are not finite; the request cannot go on"
            if not out.why and ask.prompt_from <= position + 1 < len(ask.prompt_ids):
                row_f32 = scratch.fetch(logits.logits_f32[row])
                _add_prompt_token(out, row_f32, ask.prompt_ids[position + 1], ask.n_logprobs or 0)
        if choice:
            _tell(logits, choice, ids, asks, answers)
    return answers


@dataclass(frozen=True)
class _Piece:
    """Logits of wanted rows, and what the host waits for, all of it in one piece of memory: ids of chosen tokens, at
    most one a row, then the logits' finite_u8."""

    logits: Logits
    told_u8: Tensor

    @property
    def ids_i32(self) -> Tensor:
        return self.told_u8[: 4 * len(self.logits.rows)].view(torch.int32)

    def told(self) -> tuple[list[bool], list[int]]:
        """Which rows are finite, and the ids. Waits for the device."""
        n_rows, told_u8 = len(self.logits.rows), scratch.fetch(self.told_u8)
        return told_u8[4 * n_rows :].bool().tolist(), told_u8[: 4 * n_rows].view(torch.int32).tolist()


def _pieces(config: TextConfig, weights: ModelWeights, rows: Rows) -> Iterator[_Piece]:
    """Of the wanted rows, a tile at a time: each piece overwrites the one before."""
    h_bf16, places = final_rows(config, weights.norm_bf16, rows)
    n_rows = min(ROWS_AT_A_TIME, len(places))
    logits_f32, told_u8 = scratch.f32(n_rows, config.vocab_size), scratch.u8(5 * n_rows)
    for start in range(0, len(places), ROWS_AT_A_TIME):
        of_piece = places[start : start + ROWS_AT_A_TIME]
        n = len(of_piece)
        out = Logits(logits_f32[:n], told_u8[4 * n : 5 * n], of_piece)
        head(h_bf16[start : start + n], weights.head_bf16, out.logits_f32, out.finite_u8)
        yield _Piece(out, told_u8[: 5 * n])


def _add_prompt_token(out: Answer, row_f32: Tensor, token: int, k: int) -> None:
    if out.prompt_logprobs is None:
        out.prompt_logprobs = Logprobs(k)
    out.prompt_logprobs.extend(logprobs_of(row_f32[None], [token], k))


@dataclass(frozen=True)
class _Choice:
    """After these rows, from logits_f32 [n, V]."""

    rows: list[int]
    logits_f32: Tensor


def _choose(piece: _Piece, rows: list[int], asks: Mapping[int, Ask]) -> _Choice | None:
    """The piece's first ids: a token after each of these rows, which need not be finite. Nothing is waited for."""
    if not rows:
        return None
    logits = piece.logits
    logits_f32 = logits.logits_f32
    if len(rows) < len(logits_f32):
        logits_f32 = gathered(logits_f32, scratch.upload(torch.tensor(rows)))
    choice = _Choice(rows, logits_f32)
    samplers = [sampler for row in rows if (sampler := asks[logits.rows[row][0]].sampler)]
    sample(choice.logits_f32, pack_rows((sampler, ()) for sampler in samplers), piece.ids_i32[: len(rows)])
    return choice


def _tell(
    logits: Logits, choice: _Choice, ids: Sequence[int], asks: Mapping[int, Ask], answers: Mapping[int, Answer]
) -> None:
    """ids: the choice's first."""
    for at, (row, token) in enumerate(zip(choice.rows, ids[: len(choice.rows)], strict=True)):
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
