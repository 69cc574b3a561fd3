"""One streamed answer as a client sees it: which event came when, and what it brought.

Two dialects: SGLang's /generate, whose events tell how many tokens there are so far, and OpenAI's routes, where only
some servers do.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rocline.engine.digest import ids_sha256


class LoadError(Exception):
    """A server or a request that failed. The message is the reason, in the same words each time it happens."""


class Mark(NamedTuple):
    """An event that brought tokens: time.perf_counter(), and all tokens up to it, estimated ones not whole."""

    at_s: float
    n_tokens: float


@dataclass(frozen=True)
class Answer:
    """
    sent_s, done_s      time.perf_counter() before the request's first byte and after the answer's last
    first_has_token     the first event of all brought a token
    first_text_s        the first event with content, reasoning or text that is not empty; None: there was none
    last_event_s        the last event of all
    marks               at least one, ascending
    counts_told         the server told marks' tokens; else all events with text are taken to bring the same number
    hash_of             what output_sha256 is of: "ids" as the engine's log has them, or "text" where no ids came
    accept_length       tokens a verify step, of servers that draft and tell
    """

    sent_s: float
    done_s: float
    first_has_token: bool
    first_text_s: float | None
    last_event_s: float
    marks: Sequence[Mark]
    counts_told: bool
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    output_sha256: str
    hash_of: str
    accept_length: float | None

    @property
    def total_s(self) -> float:
        return self.done_s - self.sent_s

    @property
    def first_token_s(self) -> float:
        """From sending the request to the first event with a token."""
        return self.marks[0].at_s - self.sent_s

    @property
    def ttft_s(self) -> float:
        """From sending the request to the first text. Raises LoadError if there was none."""
        if self.first_text_s is None:
            raise LoadError("no event had any text; ask for more output tokens")
        return self.first_text_s - self.sent_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after those of the first event, over the time from it to the last event; None for one event."""
        took_s = self.last_event_s - self.marks[0].at_s
        n_tokens = self.completion_tokens - self.marks[0].n_tokens
        return n_tokens / took_s if n_tokens and took_s else None

    def gaps_s(self) -> list[float]:
        """Seconds between tokens: those of one event share the time since the event before."""
        gaps = []
        for before, after in itertools.pairwise(self.marks):
            n_new = max(round(after.n_tokens - before.n_tokens), 1)
            gaps += [(after.at_s - before.at_s) / n_new] * n_new
        return gaps


class Recorder(ABC):
    """Takes a stream's events; answer() when it has ended."""

    def __init__(self, sent_s: float) -> None:
        self.sent_s = sent_s
        self._n_events = 0
        self._first_has_token = False
        self._first_text_s: float | None = None
        self._last_event_s = sent_s
        self._arrivals: list[tuple[float, int | None]] = []  # of events with tokens; how many so far, where told
        self._n_prompt: int | None = None
        self._n_completion: int | None = None
        self._n_cached = 0

    def take(self, event: dict[str, Any], now_s: float) -> None:
        """Raises LoadError for an event that tells of a failure."""
        if error := event.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise LoadError(f"the server failed: {message}")
        self._take(event, now_s)
        self._last_event_s = now_s

    @abstractmethod
    def _take(self, event: dict[str, Any], now_s: float) -> None: ...

    @abstractmethod
    def _output(self) -> tuple[str, str]:
        """(SHA-256 of the output, what it is of)."""

    @property
    def _accept_length(self) -> float | None:
        return None

    def _note(self, now_s: float, has_text: bool, n_told: int | None) -> None:
        """An event about the answer: n_told tokens so far, where the server says."""
        if self._n_events == 0:
            self._first_has_token = has_text if n_told is None else n_told > 0
        self._n_events += 1
        if has_text and self._first_text_s is None:
            self._first_text_s = now_s
        n_before = self._arrivals[-1][1] if self._arrivals else 0
        if has_text if n_told is None or n_before is None else n_told > n_before:
            self._arrivals.append((now_s, n_told))

    def answer(self, done_s: float) -> Answer:
        """Raises LoadError for an answer without tokens, or whose tokens the server does not count."""
        if not self._n_prompt or self._n_completion is None:
            raise LoadError("the server does not tell prompt_tokens and completion_tokens; nothing can be counted")
        if not self._arrivals:
            raise LoadError("the answer has no token")
        output_sha256, hash_of = self._output()
        return Answer(
            sent_s=self.sent_s,
            done_s=done_s,
            first_has_token=self._first_has_token,
            first_text_s=self._first_text_s,
            last_event_s=self._last_event_s,
            marks=_marks(self._arrivals, self._n_completion),
            counts_told=all(n_told is not None for _, n_told in self._arrivals),
            prompt_tokens=self._n_prompt,
            completion_tokens=self._n_completion,
            cached_tokens=self._n_cached,
            output_sha256=output_sha256,
            hash_of=hash_of,
            accept_length=self._accept_length,
        )


def _marks(arrivals: Sequence[tuple[float, int | None]], n_completion: int) -> list[Mark]:
    told = [Mark(at_s, n_told) for at_s, n_told in arrivals if n_told is not None]
    if len(told) == len(arrivals):
        return told
    each = n_completion / len(arrivals)
    return [Mark(at_s, n * each) for n, (at_s, _) in enumerate(arrivals, 1)]


class NativeRecorder(Recorder):
    """SGLang's: text and ids so far in every event, or the new ones where the server was started so."""

    def __init__(self, sent_s: float) -> None:
        super().__init__(sent_s)
        self._text = ""
        self._ids: list[int] | None = []  # None: the server sends none, or not all
        self._n_verify_steps = 0

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        meta = event.get("meta_info") or {}
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            raise LoadError(f"the server aborted the request: {reason.get('message')}")
        self._n_prompt = meta.get("prompt_tokens", self._n_prompt)
        self._n_completion = meta.get("completion_tokens", self._n_completion)
        self._n_cached = meta.get("cached_tokens") or 0
        self._n_verify_steps = meta.get("spec_verify_ct") or 0
        text, new_only = event.get("text") or "", self._take_ids(event.get("output_ids"))
        self._text = self._text + text if new_only or not text.startswith(self._text) else text
        self._note(now_s, bool(text), self._n_completion or 0)

    def _take_ids(self, ids: list[int] | None) -> bool:
        """Whether these were the new ones only."""
        n_completion = self._n_completion or 0
        if self._ids is None or ids is None or len(ids) not in (n_completion, n_completion - len(self._ids)):
            self._ids = None
            return False
        new_only = len(ids) != n_completion
        self._ids = self._ids + ids if new_only else ids
        return new_only

    def _output(self) -> tuple[str, str]:
        return _text_sha256(self._text) if self._ids is None else (ids_sha256(self._ids), "ids")

    @property
    def _accept_length(self) -> float | None:
        return (self._n_completion or 0) / self._n_verify_steps if self._n_verify_steps else None


class OpenAiRecorder(Recorder):
    """Chat's and completions': pieces of text; usage at the end, with some servers in every event too."""

    def __init__(self, sent_s: float) -> None:
        super().__init__(sent_s)
        self._pieces: list[str] = []

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        usage, n_told = event.get("usage"), None
        if usage:
            self._n_prompt = usage.get("prompt_tokens")
            self._n_completion = n_told = usage.get("completion_tokens")
            self._n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
            text = reasoning + (delta.get("content") or choice.get("text") or "")
            self._pieces.append(text)
            self._note(now_s, bool(text), n_told)

    def _output(self) -> tuple[str, str]:
        return _text_sha256("".join(self._pieces))


def _text_sha256(text: str) -> tuple[str, str]:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), "text"
