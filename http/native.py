"""POST /generate, SGLang's own route, which the published benchmark speaks (io.md section 5.5)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from rocline.http.asks import check_prompt_logprobs, checked_logprobs, checked_n, choice_works, sampling_params
from rocline.http.errors import ApiError, invalid
from rocline.http.fields import NativeBody, NativeSampling
from rocline.http.job import Choice, Delta
from rocline.http.openai import event, progress_of
from rocline.http.prompt import Prepared
from rocline.http.respond import Form, respond
from rocline.http.serving import Serving, Work, new_id
from rocline.pipeline.request import Logprobs

MAX_NEW_TOKENS = 128  # SGLang's, where the request does not say


async def generate(request: web.Request, serving: Serving) -> web.StreamResponse:
    arrived_s = time.monotonic()
    prepared: Prepared[NativeBody] = await serving.prepare(request, "native")
    fields, prompts = prepared.body, prepared.prompts
    samplings = fields.sampling_params
    if not isinstance(samplings, list):
        samplings = [samplings or NativeSampling()] * len(prompts)
    rids = [fields.rid] if isinstance(fields.rid, str) else fields.rid or [new_id("gen-") for _ in prompts]
    for name, items in (("sampling_params", samplings), ("rid", rids)):
        if len(items) != len(prompts):
            raise invalid(f"{name}: {len(items)} of them for {len(prompts)} prompts", name)
    if _wants_prompt_logprobs(fields):
        check_prompt_logprobs(prompts, "logprob_start_len")
    works: list[Work] = []
    ids: list[str] = []  # of each choice
    for prompt, sampling, rid in zip(prompts, samplings, rids, strict=True):
        works += (more := _works(serving, fields, sampling, prompt, len(prompts)))
        ids += [rid] * len(more)
    form = NativeForm(fields, ids, prepared.batched or len(works) > 1, arrived_s)
    job = await serving.submit("/generate", rids, arrived_s, works)
    return await respond(request, serving, job, form, bool(fields.stream))


def _wants_prompt_logprobs(fields: NativeBody) -> bool:
    start = fields.logprob_start_len
    return bool(fields.return_logprob) and start is not None and start >= 0


def _works(
    serving: Serving, fields: NativeBody, sampling: NativeSampling, prompt: Sequence[int], n_prompts: int
) -> list[Work]:
    for name in ("json_schema", "regex", "ebnf"):
        if getattr(sampling, name):
            raise invalid(f"{name}: constrained output is not supported", name, "unsupported")
    max_tokens = MAX_NEW_TOKENS if sampling.max_new_tokens is None else sampling.max_new_tokens
    n_logprobs = checked_logprobs(fields.top_logprobs_num or 0, "top_logprobs_num") if fields.return_logprob else None
    return choice_works(
        serving,
        sampling,
        sampling_params(sampling, max_tokens, sampling.min_new_tokens),
        prompt,
        checked_n(serving, sampling.n, n_prompts),
        n_logprobs=n_logprobs,
        prompt_logprobs=_wants_prompt_logprobs(fields),
    )


class NativeForm(Form):
    """Each event holds the whole text and ids so far, the last one's object is the answer that is not streamed."""

    def __init__(self, fields: NativeBody, ids: list[str], listed: bool, arrived_s: float) -> None:
        """listed: several choices, told apart by `index`."""
        self.progress = bool(fields.stream and fields.stream_options and fields.stream_options.include_progress)
        self._fields, self._ids, self._listed, self._arrived_s = fields, ids, listed, arrived_s
        self._texts: dict[int, str] = defaultdict(str)
        self._ended: dict[int, dict[str, Any]] = {}

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        self._texts[choice.index] += "".join(piece.text for piece in delta.pieces)
        if not self._fields.stream or len(choice.ids) == delta.first:
            return b""
        return event(self._object(choice, None))

    def end(self, choice: Choice) -> bytes:
        reason: dict[str, Any] = {"type": choice.finish_reason}
        if choice.finish_reason == "length":
            reason["length"] = len(choice.ids)
        else:
            reason["matched"] = choice.matched
        self._ended[choice.index] = answer = self._object(choice, reason)
        answer["meta_info"]["e2e_latency"] = time.monotonic() - self._arrived_s
        return event(answer) if self._fields.stream else b""

    def tail(self) -> bytes:
        return b""

    def whole(self) -> bytes:
        answers = [self._ended[index] for index in sorted(self._ended)]
        return msgspec.json.encode(answers if self._listed else answers[0])

    def progressed(self, choice: Choice, eta_s: float | None) -> bytes:
        return event({"progress": progress_of(choice, eta_s)})

    def error(self, error: ApiError) -> bytes:
        """SGLang's terminal event where the request was aborted, an error event otherwise."""
        if error.code != "aborted":
            return super().error(error)
        reason = {"type": "abort", "message": error.message}
        return event({"text": "", "output_ids": [], "meta_info": {"id": self._ids[0], "finish_reason": reason}})

    def _object(self, choice: Choice, reason: dict[str, Any] | None) -> dict[str, Any]:
        meta = {
            "id": self._ids[choice.index],
            "finish_reason": reason,
            "prompt_tokens": choice.prompt_tokens,
            "completion_tokens": len(choice.ids),
            "cached_tokens": choice.cached_tokens,
            "weight_version": "default",
            "seed": choice.stream.seed,
        }
        if self._fields.return_logprob:
            meta |= self._logprobs(choice)
        result = {"text": self._texts[choice.index], "output_ids": choice.ids.tolist(), "meta_info": meta}
        return {"index": choice.index} | result if self._listed else result

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        """[log-probability, id, text] of each token; text is left to the client, who has the ids."""
        own, top = _columns(choice.ids, choice.logprobs)
        columns: dict[str, Any] = {"output_token_logprobs": own, "output_top_logprobs": top}
        if _wants_prompt_logprobs(self._fields):
            first, *rest = choice.stream.request.prompt_ids
            own, top = _columns(rest, choice.prompt_logprobs)
            start = self._fields.logprob_start_len or 0
            columns["input_token_logprobs"] = [(None, first, None), *own][start:]
            columns["input_top_logprobs"] = [None, *top][start:]
        return columns


def _columns(ids: Sequence[int], logprobs: Logprobs | None) -> tuple[list[Any], list[Any]]:
    if logprobs is None:
        return [], []
    own = [(logprobs.own_f32[place], token, None) for place, token in enumerate(ids)]
    top = [[(value, token, None) for token, value in logprobs.top(place)] for place in range(len(ids))]
    return own, top
