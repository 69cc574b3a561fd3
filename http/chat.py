"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from rocline.engine.text import TextTokenizer
from rocline.http.asks import checked_logprobs, checked_n, choice_works, sampling_params
from rocline.http.errors import invalid
from rocline.http.fields import ChatBody
from rocline.http.job import Choice
from rocline.http.openai import MAX_TOKENS, MAX_TOKENS_THINKING, OpenAiForm, usage
from rocline.http.output import Kind
from rocline.http.prompt import Prepared, Start
from rocline.http.respond import respond
from rocline.http.serving import Serving, new_id


async def chat(request: web.Request, serving: Serving) -> web.StreamResponse:
    arrived_s = time.monotonic()
    prepared: Prepared[ChatBody] = await serving.prepare(request, "chat")
    fields, start = prepared.body, prepared.start
    serving.check_model(fields.model)
    thinks = start.startswith("reasoning")
    max_tokens = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    if max_tokens is None:
        max_tokens = MAX_TOKENS_THINKING if thinks else MAX_TOKENS
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    works = choice_works(
        serving,
        fields,
        sampling_params(fields, max_tokens, fields.min_tokens),
        prepared.prompts[0],
        checked_n(serving, fields.n),
        start=start,
        n_logprobs=checked_logprobs(fields.top_logprobs or 0, "top_logprobs") if fields.logprobs else None,
    )
    id = new_id("chatcmpl-")
    form = ChatForm(id, serving.settings.served_name, fields, serving.pool.tokenizer, start)
    job = await serving.submit("/v1/chat/completions", [id], arrived_s, works)
    return await respond(request, serving, job, form, form.streamed)


class ChatForm(OpenAiForm):
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, id: str, model: str, fields: ChatBody, tokenizer: TextTokenizer, start: Start) -> None:
        super().__init__(id, model, fields, tokenizer, bool(fields.logprobs))
        self._thinks = start.startswith("reasoning")

    def _opening(self, choice: Choice) -> bytes:
        said = {"content": None, "reasoning_content": ""} if self._thinks else {"content": ""}
        return self.chunk([_choice(choice, {"role": "assistant"} | said, None, None)])

    def _piece(self, choice: Choice, kind: Kind, text: str, logprobs: Any) -> dict[str, Any]:
        return _choice(choice, {kind: text}, logprobs, None)

    def _finish(self, choice: Choice, logprobs: Any) -> dict[str, Any]:
        return _choice(choice, {}, logprobs, choice.finish_reason)

    def _answer(self, choice: Choice, texts: dict[Kind, str], logprobs: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": texts.get("content", "")}
        if self._thinks:
            message["reasoning_content"] = texts.get("reasoning_content", "")
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, choice: Choice, first: int, stop: int) -> dict[str, list[Any]]:
        """Every output token's, reasoning and markers too, under the model's own distribution."""
        logprobs = choice.logprobs
        assert logprobs is not None
        return {
            "content": [
                self._entry(choice.ids[place], logprobs.own_f32[place])
                | {"top_logprobs": [self._entry(*top) for top in logprobs.top(place)]}
                for place in range(first, stop)
            ]
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    def _usage(self) -> dict[str, Any]:
        choices = list(self._choices.values())
        n_prompt = choices[0].prompt_tokens  # once, however many choices share it
        reasoning = {"reasoning_tokens": sum(choice.text.n_reasoning for choice in choices)}
        n_output = sum(len(choice.ids) for choice in choices)
        return usage(n_prompt, n_output, choices[0].cached_tokens) | {"completion_tokens_details": reasoning}


def _choice(choice: Choice, delta: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
