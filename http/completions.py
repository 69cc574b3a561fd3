"""POST /v1/completions (io.md section 5.3): prompts as text or ids, no chat encoding, nothing parsed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from rocline.engine.text import TextTokenizer
from rocline.http.asks import check_prompt_logprobs, checked_logprobs, checked_n, choice_works, sampling_params
from rocline.http.errors import invalid
from rocline.http.fields import CompletionBody
from rocline.http.job import Choice
from rocline.http.openai import MAX_TOKENS, OpenAiForm, usage
from rocline.http.output import Kind
from rocline.http.prompt import Prepared
from rocline.http.respond import respond
from rocline.http.serving import Serving, new_id
from rocline.pipeline.request import Logprobs


async def completions(request: web.Request, serving: Serving) -> web.StreamResponse:
    arrived_s = time.monotonic()
    prepared: Prepared[CompletionBody] = await serving.prepare(request, "completion")
    fields = prepared.body
    serving.check_model(fields.model)
    n = checked_n(serving, fields.n, len(prepared.prompts))
    best_of = n if fields.best_of is None else checked_n(serving, fields.best_of, len(prepared.prompts))
    if best_of < n or (best_of > n and fields.stream):
        raise invalid("best_of: at least n, and with stream equal to n: who is best shows at the end", "best_of")
    n_logprobs = None if fields.logprobs is None else checked_logprobs(fields.logprobs, "logprobs")
    prompt_logprobs = bool(fields.echo) and n_logprobs is not None
    if prompt_logprobs:
        check_prompt_logprobs(prepared.prompts, "echo")
    max_tokens = MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    params = sampling_params(fields, max_tokens, fields.min_tokens)
    works = [
        work
        for prompt in prepared.prompts
        for work in choice_works(
            serving,
            fields,
            params,
            prompt,
            best_of,
            n_logprobs=0 if n_logprobs is None and best_of > n else n_logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    ]
    id = new_id("cmpl-")
    form = CompletionForm(id, serving.settings.served_name, fields, serving.pool.tokenizer, n, best_of)
    job = await serving.submit("/v1/completions", [id], arrived_s, works)
    return await respond(request, serving, job, form, form.streamed)


class CompletionForm(OpenAiForm):
    """Of best_of choices a prompt, the n with the best mean log-probability, best first."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self, id: str, model: str, fields: CompletionBody, tokenizer: TextTokenizer, n: int, best_of: int
    ) -> None:
        super().__init__(id, model, fields, tokenizer, fields.logprobs is not None)
        self._echo, self._n, self._best_of = bool(fields.echo), n, best_of
        self._offsets: dict[int, int] = {}  # characters of text before the next token

    def _opening(self, choice: Choice) -> bytes:
        if not self._echo:
            return b""
        logprobs = self._prompt_logprobs(choice) if self._with_logprobs else None
        return self.chunk([self._piece(choice, "content", self._prompt_text(choice), logprobs)])

    def _piece(self, choice: Choice, kind: Kind, text: str, logprobs: Any) -> dict[str, Any]:
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _finish(self, choice: Choice, logprobs: Any) -> dict[str, Any]:
        return {"index": choice.index, "text": "", "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _answer(self, choice: Choice, texts: dict[Kind, str], logprobs: Any) -> dict[str, Any]:
        text = texts.get("content", "")
        if self._echo:
            text = self._prompt_text(choice) + text
        prompt, rank = divmod(choice.index, self._best_of)
        index = prompt * self._n + self._rank.get(choice.index, rank)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _ranked(self, choices: list[Choice]) -> list[Choice]:
        self._rank: dict[int, int] = {}
        if self._best_of == self._n:
            return choices
        best = []
        for first in range(0, len(choices), self._best_of):
            ranked = sorted(choices[first : first + self._best_of], key=_mean_logprob, reverse=True)[: self._n]
            self._rank |= {choice.index: rank for rank, choice in enumerate(ranked)}
            best += ranked
        return best

    def _logprobs(self, choice: Choice, first: int, stop: int) -> dict[str, list[Any]]:
        assert choice.logprobs is not None
        prompt = self._prompt_logprobs(choice) if self._echo and not self.streamed and not first else {}
        own = self._columns(choice, choice.ids[first:stop], choice.logprobs, first)
        return {name: prompt.get(name, []) + values for name, values in own.items()}

    def _prompt_logprobs(self, choice: Choice) -> dict[str, list[Any]]:
        """The first token has none: nothing precedes it."""
        first, *rest = choice.stream.request.prompt_ids
        self._offsets[choice.index] = 0
        columns = self._columns(choice, [first], None, 0)
        more = self._columns(choice, rest, choice.prompt_logprobs, 0)
        return {name: columns[name] + more[name] for name in columns}

    def _columns(
        self, choice: Choice, ids: Iterable[int], logprobs: Logprobs | None, first: int
    ) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = self._offsets.get(choice.index, 0)
        for place, token in enumerate(ids, first):
            columns["tokens"].append(self._name(token))
            columns["token_logprobs"].append(logprobs.own_f32[place] if logprobs else None)
            tops = {self._name(top): value for top, value in logprobs.top(place)} if logprobs else None
            columns["top_logprobs"].append(tops)
            columns["text_offset"].append(offset)
            offset += len(self._tokenizer.decode([token]))
        self._offsets[choice.index] = offset
        return columns

    def _name(self, token: int) -> str:
        """Distinct for every token: half a character is spelled in bytes."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _prompt_text(self, choice: Choice) -> str:
        return self._tokenizer.decode(choice.stream.request.prompt_ids)

    def _usage(self) -> dict[str, Any]:
        choices = [self._choices[index] for index in sorted(self._choices)]
        firsts = choices[:: self._best_of]  # one a prompt
        return usage(
            sum(choice.prompt_tokens for choice in firsts),
            sum(len(choice.ids) for choice in choices),
            sum(choice.cached_tokens for choice in firsts),
        )


def _mean_logprob(choice: Choice) -> float:
    assert choice.logprobs is not None
    return sum(choice.logprobs.own_f32) / max(len(choice.logprobs), 1)
