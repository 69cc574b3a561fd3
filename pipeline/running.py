"""A request that the engine runs, and everything that is kept of it outside the stages."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

from rocline.engine.answer import Ask
from rocline.engine.digest import LogitsDigest, ids_sha256
from rocline.engine.sampling import SamplerState
from rocline.pipeline.request import FinishReason, Progress, Request, Summary
from rocline.pipeline.schedule import Entry
from rocline.pipeline.stream import Stream


@dataclass(eq=False)
class Running:
    """
    prompt_logprobs_from  position of the first prompt token whose log-probability has not been told yet
    """

    request: Request
    entry: Entry
    stream: Stream
    sampler: SamplerState
    output_ids: array[int] = field(default_factory=lambda: array("i"))
    digest: LogitsDigest | None = None
    prompt_logprobs_from: int = 1
    first_token_s: float | None = None

    @property
    def progress(self) -> Progress:
        entry = self.entry
        n_rows = entry.prefill_end or len(entry.ids)
        return Progress(entry.phase, min(entry.rows_done, n_rows), n_rows)

    def ask(self, end: int) -> Ask:
        """What it wants of rows up to the position `end`."""
        request = self.request
        return Ask(
            self.sampler if end == len(self.entry.ids) else None,
            request.n_logprobs,
            request.prompt_ids if request.prompt_logprobs else (),
            self.prompt_logprobs_from,
            request.logits_digest,
        )

    def summary(self, reason: FinishReason) -> Summary:
        """Of its end, now."""
        entry, stream = self.entry, self.stream
        return Summary(
            finish_reason=reason,
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=0,
            output_tokens=len(self.output_ids),
            seed=self.sampler.seed,
            admitted_s=_since(stream.submitted_s, entry.admitted_s),
            first_token_s=_since(stream.submitted_s, self.first_token_s),
            total_s=time.monotonic() - stream.submitted_s,
            pauses=entry.pauses,
            output_ids_sha256=ids_sha256(self.output_ids),
            logits_sha256=self.digest.hexdigest() if self.digest else None,
        )


def _since(start_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else at_s - start_s
