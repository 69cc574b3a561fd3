"""What chat and text completions share: the envelope, usage, and the order of events (io.md section 5.1)."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import defaultdict
from typing import Any

import msgspec

from rocline.engine.text import TextTokenizer
from rocline.http.fields import OpenAiBody, StreamOptions
from rocline.http.job import Choice, Delta
from rocline.http.output import Kind
from rocline.http.respond import Form

MAX_TOKENS_THINKING, MAX_TOKENS = 65_536, 8_192  # where the request does not say (design.md section 8)


def event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class OpenAiForm(Form):
    """
    streamed  events; otherwise text is kept for whole()
    """

    whole_object = chunk_object = ""

    def __init__(self, id: str, model: str, fields: OpenAiBody, tokenizer: TextTokenizer, with_logprobs: bool) -> None:
        options = fields.stream_options or StreamOptions()
        self.streamed = bool(fields.stream)
        self.progress = self.streamed and bool(options.include_progress)
        self._with_usage = self.streamed and bool(options.include_usage)
        self._envelope = {"id": id, "object": self.chunk_object, "created": int(time.time()), "model": model}
        self._with_logprobs, self._tokenizer = with_logprobs, tokenizer
        self._choices: dict[int, Choice] = {}
        self._texts: dict[int, dict[Kind, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._kept: dict[int, dict[str, list[bytes]]] = defaultdict(lambda: defaultdict(list))
        self._n_told: dict[int, int] = defaultdict(int)  # ids whose log-probabilities went out

    # One event's choice, and one of a whole answer: what the two routes differ in

    @abstractmethod
    def _opening(self, choice: Choice) -> bytes:
        """Events before the first id's."""

    @abstractmethod
    def _piece(self, choice: Choice, kind: Kind, text: str, logprobs: Any) -> dict[str, Any]: ...

    @abstractmethod
    def _finish(self, choice: Choice, logprobs: Any) -> dict[str, Any]: ...

    @abstractmethod
    def _answer(self, choice: Choice, texts: dict[Kind, str], logprobs: Any) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, choice: Choice, first: int, stop: int) -> dict[str, list[Any]]:
        """Of output ids first to stop, in columns."""

    @abstractmethod
    def _usage(self) -> dict[str, Any]: ...

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event(self._envelope | {"choices": choices} | ({"usage": None} if self._with_usage else {}) | more)

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        if not self.streamed:
            for piece in delta.pieces:
                self._texts[choice.index][piece.kind].append(piece.text)
            self._keep_logprobs(choice)
            return b""
        data = self._open(choice)
        for piece in delta.pieces:
            data += self.chunk([self._piece(choice, piece.kind, piece.text, self._new_logprobs(choice))])
        return data

    def end(self, choice: Choice) -> bytes:
        if not self.streamed:
            self._choices[choice.index] = choice
            self._keep_logprobs(choice)
            return b""
        return self._open(choice) + self.chunk([self._finish(choice, self._new_logprobs(choice))])

    def tail(self) -> bytes:
        return event(self._envelope | {"choices": [], "usage": self._usage()}) if self._with_usage else b""

    def whole(self) -> bytes:
        answers = []
        for choice in self._ranked(sorted(self._choices.values(), key=lambda choice: choice.index)):
            texts = {kind: "".join(parts) for kind, parts in self._texts[choice.index].items()}
            answers.append(self._answer(choice, texts, self._kept_logprobs(choice)))
        envelope = self._envelope | {"object": self.whole_object}
        return msgspec.json.encode(envelope | {"choices": answers, "usage": self._usage()})

    def progressed(self, choice: Choice, eta_s: float | None) -> bytes:
        return self.chunk([], progress=progress_of(choice, eta_s))

    def _ranked(self, choices: list[Choice]) -> list[Choice]:
        return choices

    def _open(self, choice: Choice) -> bytes:
        if choice.index in self._choices or not choice.ids:
            return b""
        self._choices[choice.index] = choice
        return self._opening(choice)

    def _keep_logprobs(self, choice: Choice) -> None:
        """As JSON at once: written together at the end, those of a long answer would hold up the event loop."""
        for column, values in (self._new_logprobs(choice) or {}).items():
            self._kept[choice.index][column].append(msgspec.json.encode(values)[1:-1])

    def _kept_logprobs(self, choice: Choice) -> dict[str, msgspec.Raw] | None:
        if not self._with_logprobs:
            return None
        kept = self._kept[choice.index].items()
        return {column: msgspec.Raw(b"[" + b",".join(parts) + b"]") for column, parts in kept}

    def _new_logprobs(self, choice: Choice) -> dict[str, list[Any]] | None:
        """Of the ids since the last event: text that was held back brings theirs with it."""
        first, stop = self._n_told[choice.index], len(choice.ids)
        if not self._with_logprobs or first == stop:
            return None
        self._n_told[choice.index] = stop
        return self._logprobs(choice, first, stop)


def progress_of(choice: Choice, eta_s: float | None) -> dict[str, Any]:
    """What an event about a prompt's rows says."""
    progress = choice.stream.progress
    rows = {"rows_done": progress.rows_done, "rows_total": progress.rows_total}
    eta = {"eta_s": None if eta_s is None else round(eta_s, 1)}
    return {"index": choice.index, "phase": progress.phase.value} | rows | eta


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
