"""The fields of request bodies, as clients send them (io.md sections 5.2, 5.3 and 5.5). Unknown ones are ignored."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from rocline.http.errors import ApiError, invalid

MAX_STOPS, MAX_STOP_CHARS = 16, 1024


class StreamOptions(msgspec.Struct):
    """include_progress is rocline's own: events about a prompt's rows while there are no tokens yet."""

    include_usage: bool | None = None
    include_progress: bool | None = None


class Sampling(msgspec.Struct, kw_only=True):
    """What all routes let a request choose. null is the same as absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises ApiError for too many, an empty or an overlong one."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise invalid(f"stop: at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters", "stop")
        return stops


class OpenAiBody(Sampling, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Thinking(msgspec.Struct):
    type: str


class ChatBody(OpenAiBody, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    thinking: Thinking | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None


class CompletionBody(OpenAiBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    best_of: int | None = None


class NativeSampling(Sampling, kw_only=True):
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None


class NativeBody(msgspec.Struct, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    rid: str | list[str] | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    thinking: Thinking | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]


class AbortBody(msgspec.Struct):
    rid: str | None = None
    abort_all: bool | None = None


T = TypeVar("T")


def decode(body: bytes, form: type[T]) -> T:
    """A JSON body as `form`. Raises ApiError saying which field is wrong and how."""
    try:
        return msgspec.json.decode(body, type=form)
    except msgspec.ValidationError as error:
        message = str(error)
        place = re.search(r"\$\.([\w.]+)[^$]*$", message)
        missing = re.search(r"required field `(\w+)`", message)
        raise invalid(message, (place and place[1]) or (missing and missing[1]) or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body's JSON is nested too deep", code="invalid_json") from None
