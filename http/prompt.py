"""From a request's body to token ids: parsing, rendering by the model vendor's recipe, tokenising (io.md Parts 1, 2).

All of it is pure work on bytes, for another process where the body is large (pool.py): nothing here imports torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import deepseek_recipe as recipe
import msgspec

from rocline.engine.text import TextTokenizer, TokenizerError
from rocline.http.errors import invalid
from rocline.http.fields import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    NativeBody,
    TokenizeBody,
    decode,
)

# Where the answer's text starts: in a turn's reasoning, in reasoning or content that the prompt began, in content.
Start = Literal["reasoning", "reasoning_goes_on", "content_goes_on", "content"]
BEGIN, END, THINK_END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "</think>"
CONTROL = (
    *(BEGIN, END, "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", THINK_END, "｜DSML｜"),
    "<｜latest_reminder｜>",
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
Body = TypeVar("Body")


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_Added]


class Markers:
    """The control tokens of a tokenizer.json, found by content: ids differ between checkpoints (io.md Part 1).

    ids      content: id, of every added token
    special  ids of those flagged special, which ordinary text leaves out
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises TokenizerError naming a marker that the chat encoding needs and the file lacks."""
        try:
            added = msgspec.json.decode(tokenizer_json, type=_TokenizerFile).added_tokens
        except msgspec.DecodeError as error:
            raise TokenizerError(f"not a tokenizer file: {error}") from error
        self.ids = {token.content: token.id for token in added}
        self.special = frozenset(token.id for token in added if token.special)
        if missing := [content for content in CONTROL if content not in self.ids]:
            raise TokenizerError(f"no token {', '.join(missing)}: not a tokenizer of this model generation")


class Prepared(msgspec.Struct, Generic[Body]):
    """A request ready for the engine: its fields without the prompt, and the prompts as ids.

    batched  the body held a list of prompts
    start    of a chat's answer
    """

    body: Body
    prompts: list[array[int]]
    batched: bool = False
    start: Start = "content"


@dataclass(frozen=True)
class Limits:
    """context: tokens, of prompt and output together."""

    context: int
    vocab_size: int
    thinking: bool


class Prompts:
    """Everything that turns bodies into ids. Methods raise ApiError (400) for what a client got wrong."""

    def __init__(self, folder: str | Path, limits: Limits) -> None:
        """Raises TokenizerError."""
        tokenizer_json = _read(Path(folder) / "tokenizer.json")
        self.tokenizer = TextTokenizer(tokenizer_json, limits.vocab_size)
        self.markers = Markers(tokenizer_json)
        self._limits = limits
        self._encoding = recipe.DeepseekV41Encoding()
        self._options = recipe.ConversionOptions().with_model_alias("", recipe.ModelVersion.DeepseekV41Flash)

    # One method for each route

    def chat(self, body: bytes) -> Prepared[ChatBody]:
        fields = decode(body, ChatBody)
        _refuse_unsupported(fields)
        ids, start = self._chat_ids(fields)
        self._check(ids, "messages")
        fields.messages = []
        return Prepared(fields, [ids], start=start)

    def completion(self, body: bytes) -> Prepared[CompletionBody]:
        fields = decode(body, CompletionBody)
        if fields.suffix:
            raise invalid("suffix: filling in the middle is not supported; leave it out", "suffix")
        prompt = fields.prompt
        prompts, batched = self._prompts(prompt, "prompt")
        fields.prompt = ""
        return Prepared(fields, prompts, batched)

    def native(self, body: bytes) -> Prepared[NativeBody]:
        fields = decode(body, NativeBody)
        if (fields.text is None) == (fields.input_ids is None):
            raise invalid("exactly one of text and input_ids is needed", "text")
        if fields.text is not None:
            prompts, batched = self._prompts(fields.text, "text")
        else:
            prompts, batched = self._prompts(fields.input_ids, "input_ids")
        fields.text = fields.input_ids = None
        return Prepared(fields, prompts, batched)

    def tokenize(self, body: bytes) -> bytes:
        """The whole answer: ids of a million tokens are as heavy to write as to read."""
        fields = decode(body, TokenizeBody)
        if (fields.prompt is None) == (fields.messages is None):
            raise invalid("exactly one of prompt and messages is needed", "prompt")
        if fields.messages is not None:
            ids, _ = self._chat_ids(fields)
        else:
            ids = self._encode(fields.prompt or "")
            if fields.add_special_tokens:
                ids.insert(0, self.markers.ids[BEGIN])
        return msgspec.json.encode({"tokens": ids.tolist(), "count": len(ids), "max_model_len": self._limits.context})

    def detokenize(self, body: bytes) -> bytes:
        ids = self._array(decode(body, DetokenizeBody).tokens, "tokens")
        return msgspec.json.encode({"prompt": self.tokenizer.decode(ids)})

    # Their parts

    def render(self, fields: ChatBody | TokenizeBody) -> tuple[recipe.RenderedPrompt, Start]:
        """A conversation as text with the ranges of its control tokens, by the recipe's rules (io.md section 2.2)."""
        request = {"model": "", "messages": [_message(n, m) for n, m in enumerate(fields.messages or ())]}
        try:
            converted = recipe.ChatCompletionRequest(request | _thinking(fields, self._limits.thinking)).convert(
                self._options
            )
            return self._encoding.render_conversation(converted.conversation), _start(converted.parsing_options)
        except recipe.ConversionError as error:
            raise invalid(str(error), "messages") from None
        except (ValueError, TypeError, OverflowError, RecursionError) as error:  # what has no place in its types
            raise invalid(f"messages: {str(error).removeprefix('invalid request body: ')}", "messages") from None

    def _chat_ids(self, fields: ChatBody | TokenizeBody) -> tuple[array[int], Start]:
        """Only the ranges the recipe marks become control tokens, whatever the text between them spells."""
        rendered, start = self.render(fields)
        text, ids, done = rendered.prompt, array("i"), 0
        for first, stop in rendered.special_ranges:
            ids.extend(self._encode(text[done:first]))
            ids.append(self.markers.ids[text[first:stop]])
            done = stop
        ids.extend(self._encode(text[done:]))
        return ids, start

    def _prompts(
        self, prompt: str | Sequence[str | int | list[int]] | None, param: str
    ) -> tuple[list[array[int]], bool]:
        """(prompts as ids, whether there was a list of them)."""
        if isinstance(prompt, str):
            prompts, batched = [self._encode(prompt)], False
        elif not prompt:
            raise invalid(f"{param}: empty; at least one token is needed", param)
        elif isinstance(prompt[0], int):
            prompts, batched = [self._array(prompt, param)], False
        else:
            prompts, batched = [self._one(item, f"{param}[{n}]") for n, item in enumerate(prompt)], True
        for ids in prompts:
            self._check(ids, param)
        return prompts, batched

    def _one(self, prompt: object, param: str) -> array[int]:
        if isinstance(prompt, str):
            return self._encode(prompt)
        if isinstance(prompt, list):
            return self._array(prompt, param)
        raise invalid(f"{param}: a list holds token ids alone, or texts and lists of token ids", param)

    def _encode(self, text: str) -> array[int]:
        return array("i", self.tokenizer.encode(text)) if text else array("i")

    def _array(self, ids: Iterable[Any], param: str) -> array[int]:
        """Token ids, each one the model's."""
        vocab_size = self._limits.vocab_size
        try:
            result = array("i", ids)
        except (TypeError, OverflowError):
            result = array("i", [-1])
        if result and not (min(result) >= 0 and max(result) < vocab_size):
            raise invalid(f"{param}: token ids are integers from 0 to {vocab_size - 1}", param)
        return result

    def _check(self, ids: array[int], param: str) -> None:
        context = self._limits.context
        if not ids:
            raise invalid(f"{param}: empty; at least one token is needed", param)
        if len(ids) >= context:
            message = f"{param}: {len(ids)} tokens; the context holds {context}, at least one of them for the answer"
            raise invalid(message, param, "context_length_exceeded")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror}") from error


def _refuse_unsupported(fields: ChatBody) -> None:
    for name in ("tools", "functions"):
        if getattr(fields, name):
            raise invalid(f"{name}: tools are not supported yet; leave the field out", name, "unsupported")
    for name in ("tool_choice", "function_call"):
        if getattr(fields, name) not in (None, "none", "auto"):
            raise invalid(f"{name}: tools are not supported yet; leave the field out", name, "unsupported")
    form = fields.response_format
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise invalid('response_format: only {"type": "text"} is supported', "response_format", "unsupported")


def _thinking(fields: ChatBody | TokenizeBody, default: bool) -> dict[str, Any]:
    """The recipe's two fields, from all the ways clients say it (io.md section 5.2)."""
    kwargs = fields.chat_template_kwargs or {}
    effort = fields.reasoning_effort or kwargs.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise invalid(f"reasoning_effort: one of {', '.join(EFFORTS)}", "reasoning_effort")
    if fields.thinking and fields.thinking.type not in ("enabled", "disabled"):
        raise invalid("thinking.type: enabled or disabled", "thinking")
    said = [kwargs[key] for key in ("thinking", "enable_thinking") if kwargs.get(key) is not None]
    if not all(isinstance(word, bool) for word in said):
        raise invalid("chat_template_kwargs: thinking is true or false", "chat_template_kwargs")
    if fields.thinking:
        said.append(fields.thinking.type == "enabled")
    on = all(said) if said else default and effort != "none"  # said "on" wins over effort none, as in the recipe
    result: dict[str, Any] = {"thinking": {"type": "enabled" if on else "disabled"}}
    return result | ({"reasoning_effort": effort} if on and effort not in (None, "none") else {})


def _message(n: int, message: dict[str, Any]) -> dict[str, Any]:
    """One message as the recipe takes it: developer is system, arguments are text. Refuses parts other than text."""
    role, content = message.get("role"), message.get("content")
    place = f"messages[{n}]"
    if role not in ROLES:
        raise invalid(f"{place}.role: one of {', '.join(ROLES)}", "messages")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                known = kind if kind in ("image_url", "image", "input_audio", "file", "video_url") else "of this type"
                raise invalid(f"{place}.content: parts {known} are not supported, only text", "messages", "unsupported")
    result = message | {"role": "system"} if role == "developer" else dict(message)
    if isinstance(calls := message.get("tool_calls"), list):
        result["tool_calls"] = [_call(place, call) for call in calls]
    return result


def _call(place: str, call: Any) -> Any:
    """A call of the conversation's past. Its arguments may be an object, or text encoded twice (io.md rule 8)."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise invalid(f"{place}.tool_calls: each needs a function with name and arguments", "messages")
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            inner = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            inner = None
        arguments = inner if isinstance(inner, str) else arguments
    else:
        arguments = msgspec.json.encode(arguments).decode()
    return call | {"function": call["function"] | {"arguments": arguments}}


def _start(options: recipe.ParsingOptions) -> Start:
    stage, stages = options.thinking_initial_stage, recipe.ThinkingInitialStage
    if stage is None:
        return "content"
    if stage == stages.ContentContinuation:
        return "content_goes_on"
    return "reasoning_goes_on" if stage == stages.ReasoningContinuation else "reasoning"
