"""What a caller asks of the engine and what it hears back (design.md sections 1, 7 and 9)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from rocline.engine.logprobs import Logprobs as Logprobs
from rocline.engine.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort"]
MAX_LOGPROBS = 20  # alternatives of a token (io.md section 5.2)


class EngineError(RuntimeError):
    """Why a request was not taken, or ended without an answer."""


class QueueFull(EngineError):
    """As many requests wait as may; worth another try after retry_after_s."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class NotReady(EngineError):
    """The engine is draining, has failed, or is closed: it takes no request."""


class TooLong(EngineError):
    """The request can never be admitted: it needs more pages than there are."""


class RequestFailed(EngineError):
    """The request ended without an answer: why, and what to do. Other requests go on unless it says so."""


class Phase(Enum):
    """queued -> prefill -> decode -> ended; paused requests have given their pages back and wait to run again."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Request:
    """
    prompt_ids       at least one token id
    n_logprobs       None: no log-probabilities. k: of every output token, and of its k likeliest alternatives
    prompt_logprobs  those of the prompt's tokens too; every prompt row then runs all layers (`full`)
    logits_digest    also hash the logits that the output ids were chosen from (tests)
    label            what logs call it; never prompt text
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    n_logprobs: int | None = None
    prompt_logprobs: bool = False
    logits_digest: bool = False
    label: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for n_logprobs outside 0..MAX_LOGPROBS, or prompt_logprobs without it."""
        if self.n_logprobs is not None and not 0 <= self.n_logprobs <= MAX_LOGPROBS:
            raise ValueError(f"n_logprobs = {self.n_logprobs}: must be 0 to {MAX_LOGPROBS}, or absent")
        if self.prompt_logprobs and self.n_logprobs is None:
            raise ValueError("prompt_logprobs without n_logprobs; set n_logprobs, 0 for the tokens' own alone")


@dataclass(frozen=True)
class Progress:
    """rows_done of rows_total rows are through all their layers. A resumed request counts its output again."""

    phase: Phase
    rows_done: int
    rows_total: int


@dataclass
class Update:
    """What is new since the reader's last look; tokens of several steps come merged when the reader is slow.

    ids              output ids, the one that ends the output included
    logprobs         of these ids; None where none were asked for
    prompt_logprobs  of prompt tokens 1 .. n-1 (the first has none), in parts as chunks end
    """

    progress: Progress
    ids: array[int]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


@dataclass(frozen=True)
class Summary:
    """A request after its end. Times in seconds from submit; None for what did not come to pass.

    prompt_tokens   all of them; cached_tokens of these were not run again
    seed            the request's own, or the one drawn for it
    """

    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seed: int
    admitted_s: float | None
    first_token_s: float | None
    total_s: float
    pauses: int
    output_ids_sha256: str
    logits_sha256: str | None
