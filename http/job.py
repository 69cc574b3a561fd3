"""One HTTP request's work in the engine: its choices, from submit to the line in the log (cases B04, B06, B08)."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rocline.engine.digest import ids_sha256
from rocline.http.errors import ApiError
from rocline.http.output import OutputText, Piece
from rocline.http.settings import Settings
from rocline.pipeline.request import EngineError, Logprobs, Phase, RequestFailed, Update
from rocline.pipeline.stream import Stream

LOOK_S = 1.0  # at least, between looks at whether a request was admitted or stands still
NEVER_S = float("inf")


class Delta(NamedTuple):
    """New since the last one: text that became certain, and the ids from choice.ids[first] on."""

    pieces: list[Piece]
    first: int


class Choice:
    """One stream of the engine and what became of it.

    ids            output ids that count: none after a stop string
    logprobs       of these ids
    finish_reason  None before the end; "abort" where the request was cancelled
    matched        the stop string or stop token's id that ended it
    admitted_s     time.monotonic() when it was first seen at work
    first_text_s   the same of its first text
    """

    def __init__(self, index: int, stream: Stream, text: OutputText, stop_ids: frozenset[int]) -> None:
        self.index, self.stream, self.text = index, stream, text
        self.ids: array[int] = array("i")
        self.logprobs: Logprobs | None = None
        self.prompt_logprobs: Logprobs | None = None
        self.finish_reason: str | None = None
        self.matched: str | int | None = None
        self.admitted_s: float | None = None
        self.first_text_s: float | None = None
        self.last_text_s: float | None = None
        self._stop_ids = stop_ids

    async def updates(self) -> AsyncIterator[tuple[Update, Delta]]:
        """Until the end, whose reason is then known. Raises EngineError for a request that failed."""
        async for update in self.stream:
            delta = self._take(update)
            yield update, delta
            if self.text.matched is not None:
                self.stream.cancel()
                break
        rest = Delta(self.text.finish(), len(self.ids))
        self._conclude()
        yield Update(self.stream.progress, array("i")), rest

    def _take(self, update: Update) -> Delta:
        first = len(self.ids)
        pieces, n_used = self.text.push(update.ids)
        self.ids.extend(update.ids[:n_used])
        self.logprobs = _joined(self.logprobs, update.logprobs, len(self.ids))
        self.prompt_logprobs = _joined(self.prompt_logprobs, update.prompt_logprobs, None)
        return Delta(pieces, first)

    def _conclude(self) -> None:
        if self.text.matched is not None:
            self.finish_reason, self.matched = "stop", self.text.matched
        else:
            assert self.stream.summary is not None
            self.finish_reason = self.stream.summary.finish_reason
            if self.finish_reason == "stop" and self.ids and self.ids[-1] in self._stop_ids:
                self.matched = self.ids[-1]

    @property
    def prompt_tokens(self) -> int:
        return len(self.stream.request.prompt_ids)

    @property
    def began_s(self) -> float:
        """time.monotonic() when the engine took it up; when it was submitted, where its end does not say."""
        summary = self.stream.summary
        return self.stream.submitted_s + (summary.admitted_s or 0.0 if summary else 0.0)

    @property
    def cached_tokens(self) -> int:
        return self.stream.summary.cached_tokens if self.stream.summary else 0

    def figures(self, arrived_s: float) -> dict[str, Any]:
        """For the log, after the end."""
        summary, prefill_s, decode_s = self.stream.summary, None, None
        if summary and summary.first_token_s is not None and summary.admitted_s is not None:
            prefill_s = summary.first_token_s - summary.admitted_s
            decode_s = summary.total_s - summary.first_token_s
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": len(self.ids),
            "ttft_s": round(self.first_text_s - arrived_s, 4) if self.first_text_s else None,
            "prefill_tokens_per_s": _rate(self.prompt_tokens - self.cached_tokens, prefill_s),
            "decode_tokens_per_s": _rate(len(self.ids) - 1, decode_s),
            "output_ids_sha256": ids_sha256(self.ids),
        }


def _rate(n: int, seconds: float | None) -> float | None:
    return round(n / seconds, 2) if seconds and n > 0 else None


def _joined(sofar: Logprobs | None, new: Logprobs | None, n_tokens: int | None) -> Logprobs | None:
    """Both together, cut to n_tokens."""
    if new is None:
        return sofar
    joined = sofar or Logprobs(new.k)
    joined.extend(new)
    if n_tokens is not None:
        del joined.own_f32[n_tokens:], joined.top_ids[n_tokens * joined.k :], joined.top_f32[n_tokens * joined.k :]
    return joined


class Job:
    """The choices of one HTTP request.

    ids         what the client may call it: the answer's id, or its own rids
    arrived_s   time.monotonic() when the request's headers were read
    ended_by    why the server ended it before the engine did: "disconnect", "slow_reader", "timeout", "abort"
    """

    def __init__(self, route: str, ids: Sequence[str], arrived_s: float, choices: list[Choice]) -> None:
        self.route, self.ids, self.arrived_s, self.choices = route, ids, arrived_s, choices
        self.ended_by: str | None = None
        self._moved_s = time.monotonic()
        self._admitted_s: float | None = None
        self._error: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def saw(self, choice: Choice, update: Update, visible: bool) -> float | None:
        """Note progress. Returns the seconds since the choice's last text if this one is not its first."""
        now_s = self._moved_s = time.monotonic()
        if update.progress.phase is not Phase.QUEUED:
            self._admitted_s = self._admitted_s or now_s
            choice.admitted_s = choice.admitted_s or now_s
        since_s = None
        if visible:
            since_s = now_s - choice.last_text_s if choice.last_text_s is not None else None
            choice.first_text_s = choice.first_text_s or now_s
            choice.last_text_s = now_s
        return since_s

    def abort(self, error: ApiError, why: str) -> None:
        """End the answer with this error, unless the engine has ended it already. Harmless a second time."""
        if not self.ended and not self._error.done():
            self.ended_by = why
            self._error.set_exception(error)

    def reason(self, choice: Choice, error: EngineError | None) -> str:
        """A choice's finish reason, or why it has none."""
        if choice.finish_reason in (None, "abort"):
            return self.ended_by or ("failed" if error else "abort")
        return str(choice.finish_reason)

    @property
    def ended(self) -> bool:
        """In the engine; the client may still be reading."""
        return all(choice.stream.ended for choice in self.choices)

    def why_aborted(self) -> ApiError:
        """What a client is told whose request the engine ended as "abort"."""
        error = self._error.exception() if self._error.done() else None
        return error if isinstance(error, ApiError) else ApiError(503, "the request was ended: the engine is closing")

    async def ticks(self, every_s: float, from_admission: bool, limits: Settings) -> AsyncIterator[None]:
        """One every every_s, from now or from the first admission. Raises ApiError for abort and time-outs."""
        next_s = None if from_admission else time.monotonic() + every_s
        while True:
            if next_s is None and self._admitted_s is not None:
                next_s = self._admitted_s + every_s
            now_s, due_s = time.monotonic(), next_s or NEVER_S
            end_s = NEVER_S if self.ended else self.arrived_s + (limits.request_timeout_s or NEVER_S)
            stuck_s = self._moved_s + (limits.progress_timeout_s or NEVER_S) if self._runs else NEVER_S
            if now_s >= end_s:
                self._time_out(f"{limits.request_timeout_s:g} s in all")
            elif now_s >= stuck_s:
                self._time_out(f"{limits.progress_timeout_s:g} s without progress")
            with suppress(TimeoutError):
                wait_s = min(due_s, end_s, stuck_s, now_s + min(LOOK_S, every_s)) - now_s
                await asyncio.wait_for(asyncio.shield(self._error), max(wait_s, 0))
            if time.monotonic() >= due_s:
                next_s = due_s + every_s
                yield

    def _time_out(self, after: str) -> None:
        self.abort(ApiError(504, f"the request was ended after {after}", code="timeout"), "timeout")

    @property
    def _runs(self) -> bool:
        """A queued or paused request waits for others, not for itself."""
        return any(c.stream.progress.phase in (Phase.PREFILL, Phase.DECODE) for c in self.choices)

    def eta_s(self, choice: Choice) -> float | None:
        """Seconds to the end of a prefill at its speed so far."""
        progress, now_s = choice.stream.progress, time.monotonic()
        if progress.phase is not Phase.PREFILL or not progress.rows_done or choice.admitted_s is None:
            return None
        return (now_s - choice.admitted_s) / progress.rows_done * (progress.rows_total - progress.rows_done)

    def cancel(self) -> None:
        """Cancel what still runs in the engine: once, whatever the moment (case B06)."""
        for choice in self.choices:
            if not choice.stream.ended:
                choice.stream.cancel()
        if self._error.done():
            self._error.exception()  # seen: asyncio would complain of one that nobody read

    async def outcome(self, choice: Choice) -> EngineError | None:
        """Wait for the engine to let go of a choice; how it failed, if it did."""
        try:
            async for _ in choice.stream:
                pass
        except EngineError as error:
            return error
        except Exception as error:  # never lose a line of the log over a broken stream
            return RequestFailed(str(error))
        return None
